"""The reconciler alone: what it asks, in which order, how often, and what it cannot reach."""

import errno
import inspect
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qlworker.domain.canonical import b64u, callback_token_digest
from qlworker.domain.errors import Corrupt, Misconfigured
from qlworker.domain.evidence import Authority, AuthorityFacts
from qlworker.domain.identity import DurableHandle, Presence
from qlworker.domain.receipt import Ending, Receipt, authenticate
from qlworker.domain.record import Event, InboxRecord, advance
from qlworker.domain.server_time import Anchor
from qlworker.domain.session import Access
from qlworker.domain.verdict import ReceiptEvidence, Verdict
from qlworker.flow.recovery import evidence as module
from qlworker.flow.recovery.evidence import EvidenceReconciler
from qlworker.flow.recovery.supervisor import NO_AUTHORITY
from tests.builders import make_record

TOKEN = b"t" * 32
HANDLE = DurableHandle(v=1, h="h", b="boot", p=7, g=7, s="1")


def started(handle: str = HANDLE.text()) -> InboxRecord:
    record = advance(
        advance(make_record(), Event.STARTING_ACKED, 2000),
        Event.BARRIER_RAISED,
        3000,
        executor_started_at_ms=3000,
        log_artifact_id="wlog-" + "0" * 30,
        completion_receipt_callback_sequence=1,
        completion_receipt_token_digest=callback_token_digest(TOKEN),
    )
    return advance(record, Event.HANDLE_RECORDED, 4000, executor_handle=handle)


def receipt(**changes: Any) -> Receipt:
    made = Receipt(
        schema_version=2,
        run_id="run-1",
        attempt_id="attempt-1",
        callback_sequence=1,
        token=b64u(TOKEN),
        started_at_ms=3000,
        finished_at_ms=9000,
        exit_code=0,
        ending=Ending.EXITED,
    )
    return msgspec.structs.replace(made, **changes)


class Evidence:
    """Receipts, processes and clock in one, with one trace. `receipts` holds what each read brings; the last one stays."""

    def __init__(self, *receipts: Receipt | Exception | None, presence: Presence = Presence.EXITED) -> None:
        self.receipts = list(receipts) or [None]
        self.presence = presence
        self.trace: list[str] = []
        self.now_ms = 50_000
        self.clock_reads = 0

    async def read(self, attempt_id: str) -> Receipt | None:
        await trio.lowlevel.checkpoint()
        self.trace.append("read")
        found = self.receipts.pop(0) if len(self.receipts) > 1 else self.receipts[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def inspect(self, handle: DurableHandle) -> Presence:
        await trio.lowlevel.checkpoint()
        self.trace.append(f"inspect {handle.p}")
        return self.presence

    def boot_ms(self) -> int:
        self.clock_reads += 1
        return self.now_ms

    async def sleep_until(self, boot_ms: int) -> None:
        await trio.lowlevel.checkpoint()
        self.now_ms = max(self.now_ms, boot_ms)

    def reconciler(self, authenticator: Any = authenticate, **terms: Any) -> EvidenceReconciler:
        return EvidenceReconciler(self, self, self, authenticator, **terms)


@pytest.mark.req("R179", "R196", "R217", "R531")
async def test_a_trusted_receipt_is_the_first_and_the_only_thing_asked() -> None:
    world = Evidence(receipt(exit_code=3))
    seen = await world.reconciler().reconcile(started(), NO_AUTHORITY)

    assert world.trace == ["read"]
    assert seen.verdict is Verdict.ENDED
    assert seen.end is not None
    assert (seen.end.exit_code, seen.end.outcome, seen.end.finished_at_ms) == (3, "failed", 9000)


@pytest.mark.req("R198", "R199")
async def test_the_process_is_asked_when_the_receipt_is_missing_and_then_the_receipt_again_at_once() -> None:
    world = Evidence(None, receipt())
    seen = await world.reconciler().reconcile(started(), NO_AUTHORITY)

    assert world.trace == ["read", "inspect 7", "read"]
    assert world.now_ms == 50_000
    assert seen.verdict is Verdict.ENDED


@pytest.mark.req("R200", "R201", "R206")
@pytest.mark.parametrize("grace_ms", [0, 100, 250, 5_000])
async def test_a_receipt_is_waited_for_no_longer_than_the_grace_and_then_it_is_unknown(grace_ms: int) -> None:
    world = Evidence(None)
    seen = await world.reconciler(grace_ms=grace_ms).reconcile(started(), NO_AUTHORITY)

    assert world.now_ms == 50_000 + grace_ms
    assert seen.verdict is Verdict.UNKNOWN
    assert seen.end is None
    assert world.trace.count("inspect 7") == 1


@pytest.mark.req("R200")
@pytest.mark.parametrize("grace_ms", [-1, 5_001])
def test_a_grace_beyond_five_seconds_is_refused(grace_ms: int) -> None:
    with pytest.raises(Misconfigured, match="0 to 5000"):
        Evidence().reconciler(grace_ms=grace_ms)


@pytest.mark.req("R202", "R203", "R204", "R205", "R218")
@pytest.mark.parametrize("presence", Presence)
async def test_each_class_of_presence_stays_what_it_is(presence: Presence) -> None:
    world = Evidence(None, presence=presence)
    seen = await world.reconciler(grace_ms=0).reconcile(started(), NO_AUTHORITY)

    assert seen.presence is presence
    expected = {Presence.RUNNING: Verdict.RUNNING, Presence.PENDING: Verdict.PENDING}
    assert seen.verdict is expected.get(presence, Verdict.UNKNOWN)


@pytest.mark.req("R202")
async def test_a_handle_that_is_none_asks_no_process() -> None:
    world = Evidence(None, presence=Presence.RUNNING)
    seen = await world.reconciler(grace_ms=0).reconcile(started("not-a-handle"), NO_AUTHORITY)

    assert world.trace == ["read", "read"]
    assert seen.verdict is Verdict.UNKNOWN


def unavailable(receipt: Receipt, record: InboxRecord, now_ms: int | None) -> bool:
    raise OSError(errno.EIO, "no authenticator")


@pytest.mark.parametrize(
    "found, authenticator, raised",
    [
        pytest.param(receipt(), unavailable, OSError, marks=pytest.mark.req("R194")),
        pytest.param(OSError(errno.EIO, "unreadable"), authenticate, OSError, marks=pytest.mark.req("R195")),
        pytest.param(Corrupt("not a receipt"), authenticate, Corrupt, marks=pytest.mark.req("R195")),
    ],
)
async def test_a_receipt_that_cannot_be_judged_ends_the_look_before_a_process_is_asked(
    found: Receipt | Exception, authenticator: Any, raised: type[Exception]
) -> None:
    world = Evidence(found, presence=Presence.RUNNING)
    with pytest.raises(raised):
        await world.reconciler(authenticator).reconcile(started(), NO_AUTHORITY)

    assert world.trace == ["read"]


@pytest.mark.req("R193")
async def test_a_conflicting_receipt_asks_no_process_and_proves_nothing() -> None:
    world = Evidence(receipt(token=b64u(b"x" * 32)), presence=Presence.RUNNING)
    seen = await world.reconciler().reconcile(started(), NO_AUTHORITY)

    assert world.trace == ["read"]
    assert (seen.receipt, seen.verdict, seen.end) == (ReceiptEvidence.UNTRUSTED, Verdict.UNKNOWN, None)


@pytest.mark.req("R183")
def test_there_is_no_reconciler_without_an_authenticator() -> None:
    world = Evidence()
    with pytest.raises(TypeError):
        EvidenceReconciler(world, world, world)  # type: ignore[call-arg]


@pytest.mark.req("R209")
@pytest.mark.parametrize("receipts", [(None,), (receipt(),), (None, None, receipt())])
async def test_one_pass_reads_the_clock_once(receipts: tuple[Receipt | None, ...]) -> None:
    world = Evidence(*receipts)
    facts = AuthorityFacts(
        session=None, access=Access.OPEN, lease_expires_at=1, anchor=Anchor(boot_id="boot", server_ms=9_000, boot_ms=50_000)
    )
    seen = await world.reconciler().reconcile(started(), facts)

    assert world.clock_reads == 1
    assert seen.authority is Authority.WORKER_OFFLINE


@pytest.mark.req("R215", "R216", "R217")
def test_no_port_of_the_reconciler_can_start_stop_acknowledge_complete_or_remove() -> None:
    """By its types: what each constructor argument offers, and what the module knows at all."""
    hints = typing.get_type_hints(EvidenceReconciler.__init__)
    offered = {
        name: {member for member in dir(kind) if not member.startswith("_") and callable(getattr(kind, member, None))}
        for name, kind in hints.items()
        if name not in ("return", "grace_ms")
    }

    assert offered == {
        "receipts": {"read"},
        "processes": {"inspect"},
        "clock": {"boot_ms", "sleep_until"},
        "authenticator": set(),
    }
    assert set(inspect.signature(EvidenceReconciler.__init__).parameters) == {"self", "grace_ms", *offered}
    text = Path(module.__file__).read_text("utf-8")
    assert not [line for line in text.splitlines() if "import" in line and ("ports" in line or "control_plane" in line)]


@pytest.mark.req("R214")
async def test_nothing_is_remembered_between_two_looks() -> None:
    world = Evidence(None, presence=Presence.RUNNING)
    reconciler = world.reconciler()
    before = dict(vars(reconciler))
    first = await reconciler.reconcile(started(), NO_AUTHORITY)
    second = await world.reconciler().reconcile(started(), NO_AUTHORITY)

    assert first == second
    assert vars(reconciler) == before


async def test_a_glance_reads_the_receipt_once_and_asks_nobody() -> None:
    world = Evidence(None, presence=Presence.RUNNING)
    seen = await world.reconciler().glance(started(), NO_AUTHORITY)

    assert world.trace == ["read"]
    assert not seen.has_receipt
    assert seen.verdict is Verdict.UNKNOWN
