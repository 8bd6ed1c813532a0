"""From the lock to the first pull: audit, bounded recovery, audit again, hold; and what is refused on the way."""

import errno
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qlworker.domain.audit import Audit, AuditBudget, Finding, Readiness
from qlworker.domain.canonical import b64u, callback_token_digest
from qlworker.domain.errors import Conflict, Corrupt, Misconfigured, OwnershipHeld, OwnershipLost
from qlworker.domain.identity import Presence
from qlworker.domain.receipt import Ending, Receipt, authenticate
from qlworker.domain.record import Event, InboxRecord, RecoveryReason, State, advance
from qlworker.flow.recovery.audit import StartupAuditor
from qlworker.flow.recovery.evidence import EvidenceReconciler
from qlworker.flow.recovery.lifecycle import JournalLifecycle
from qlworker.flow.recovery.supervisor import Outcome, StartupRecovery
from qlworker.ports import Page
from tests.builders import TOKEN, make_record, make_revision
from tests.flow.rig import RecordingLog, Worker, World

CAPABILITY = b"t" * 32


def in_state(state: State, number: int = 1) -> InboxRecord:
    """A record that came to `state` the ordinary way."""
    record = make_record(f"offer-{number}", attempt_id=f"attempt-{number}")
    steps: dict[State, list[tuple[Event, dict[str, Any]]]] = {}
    barrier = {
        "executor_started_at_ms": 3000,
        "log_artifact_id": "wlog-" + "0" * 30,
        "completion_receipt_callback_sequence": 1,
        "completion_receipt_token_digest": callback_token_digest(CAPABILITY),
    }
    starting = [(Event.STARTING_ACKED, {})]
    launching = [*starting, (Event.BARRIER_RAISED, barrier)]
    started = [*launching, (Event.HANDLE_RECORDED, {"executor_handle": "handle"})]
    steps = {
        State.ACCEPTED: [],
        State.STARTING_ACKNOWLEDGED: starting,
        State.LAUNCHING: launching,
        State.STARTED: started,
        State.RUNNING_ACKNOWLEDGED: [*started, (Event.RUNNING_ACKED, {})],
        State.START_FAILED: [*launching, (Event.NOT_STARTED, {})],
        State.START_FAILURE_ACKNOWLEDGED: [*launching, (Event.NOT_STARTED, {}), (Event.FAILURE_ACKED, {})],
        State.COMPLETION_ACKNOWLEDGED: [*started, (Event.COMPLETION_ACKED, {"completion_acknowledged_at_ms": 5000})],
        State.RECOVERY_REQUIRED: [
            *launching,
            (Event.RECOVERY_NEEDED, {"recovery_reason": RecoveryReason.LAUNCH_OUTCOME_UNKNOWN}),
        ],
    }
    for event, members in steps[state]:
        record = advance(record, event, 4000, **members)
    return record


class Shelf:
    """Records, receipts and ownership in one, with one trace. The audit sees only its `page`."""

    def __init__(self, *records: InboxRecord) -> None:
        self.records = {record.offer_id: record for record in records}
        self.receipts: dict[str, Receipt] = {}
        self.trace: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.is_owned = False
        self.busy = 0

    async def _step(self, text: str) -> None:
        assert self.is_owned, f"{text} without ownership"
        self.busy += 1
        assert self.busy == 1, "not serial"
        self.trace.append(text)
        await trio.lowlevel.checkpoint()
        self.busy -= 1
        if text in self.faults:
            raise self.faults[text]

    async def acquire(self) -> None:
        await trio.lowlevel.checkpoint()
        self.trace.append("acquire")
        if "acquire" in self.faults:
            raise self.faults["acquire"]
        self.is_owned = True

    async def release(self) -> None:
        await trio.lowlevel.checkpoint()
        self.trace.append("release")
        self.is_owned = False

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        await self._step("page")
        names = [name for name in sorted(self.records) if after is None or name > after]
        chosen = names[:limit]
        return Page([self.records[name] for name in chosen], chosen[-1] if len(names) > limit else None)

    async def replace(self, record: InboxRecord) -> None:
        await self._step(f"write {record.offer_id} {record.state}")
        self.records[record.offer_id] = record

    async def remove(self, attempt_id: str) -> None:
        await self._step(f"clean {attempt_id}")

    def auditor(self, budget: AuditBudget | None = None) -> StartupAuditor:
        return StartupAuditor(self, budget or AuditBudget())

    def recovery(self, **terms: Any) -> StartupRecovery:
        reader = Reader(self)
        evidence = EvidenceReconciler(reader, reader, reader, authenticate)
        return StartupRecovery(Records(self), self, evidence, RecordingLog(), **terms)

    def effects(self) -> list[str]:
        return [text for text in self.trace if text.startswith(("write", "clean"))]


class Reader:
    """The reading side of a shelf; a process asked or waited for is a failure."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def read(self, attempt_id: str) -> Receipt | None:
        await self._shelf._step(f"receipt {attempt_id}")
        return self._shelf.receipts.get(attempt_id)

    async def inspect(self, handle: Any) -> Any:
        raise AssertionError("a process was asked")

    def boot_ms(self) -> int:
        return 1

    async def sleep_until(self, boot_ms: int) -> None:
        raise AssertionError("somebody waits")


class Records:
    """The records of a shelf as the recovery may use them."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.replace = shelf.replace

    async def read(self, offer_id: str) -> InboxRecord | None:
        await self._shelf._step(f"read {offer_id}")
        return self._shelf.records.get(offer_id)


def receipt(number: int, ending: Ending = Ending.NOT_STARTED) -> Receipt:
    return Receipt(
        schema_version=2,
        run_id="run-1",
        attempt_id=f"attempt-{number}",
        callback_sequence=1,
        token=b64u(CAPABILITY),
        started_at_ms=3000,
        finished_at_ms=3001,
        exit_code=125,
        ending=ending,
    )


async def audit_of(shelf: Shelf) -> Audit:
    shelf.is_owned = True
    audit = await shelf.auditor().audit()
    shelf.trace.clear()
    return audit


# -- the auditor


@pytest.mark.req("R106", "R107", "R120")
async def test_an_audit_shows_every_record_and_nothing_of_its_offer() -> None:
    shelf = Shelf(*(in_state(state, number) for number, state in enumerate(State, 1)))
    shelf.is_owned = True
    audit = await shelf.auditor().audit()

    assert [(each.offer_id, each.attempt_id, each.state) for each in audit.findings] == [
        (f"offer-{number}", f"attempt-{number}", state) for number, state in enumerate(State, 1)
    ]
    shown = repr(audit) + msgspec.json.encode(audit).decode()
    for hidden in (TOKEN, "/bin/true", "task-1", "run-1", callback_token_digest(CAPABILITY)):
        assert hidden not in shown


@pytest.mark.req("R89", "R116", "R117", "R118", "R119")
async def test_an_audit_only_reads_pages_and_can_do_nothing_else() -> None:
    shelf = Shelf(*(in_state(state, number) for number, state in enumerate(State, 1)))
    before = dict(shelf.records)
    shelf.is_owned = True
    await shelf.auditor(AuditBudget(page_size=3, max_pages=4)).audit()

    assert shelf.trace == ["page"] * 3
    assert shelf.records == before
    assert set(inspect.signature(StartupAuditor.__init__).parameters) == {"self", "source", "budget"}
    source = inspect.signature(StartupAuditor.__init__).parameters["source"].annotation
    assert [name for name in vars(source) if not name.startswith("_")] == ["page"]


@pytest.mark.req("R90", "R96")
@pytest.mark.parametrize("count", [64, 65])
async def test_the_default_budget_takes_64_records_and_refuses_65(count: int) -> None:
    shelf = Shelf(*(in_state(State.ACCEPTED, number) for number in range(100, 100 + count)))
    shelf.is_owned = True
    if count == 64:
        assert len((await shelf.auditor().audit()).findings) == 64
    else:
        with pytest.raises(Corrupt, match="audit budget is exhausted"):
            await shelf.auditor().audit()
    assert len(shelf.trace) == 4


class Liar:
    """A journal whose second page is whatever it was told."""

    def __init__(self, names: list[int], next_after: str | None) -> None:
        self._names = names
        self._next_after = next_after
        self.pages = 0

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        await trio.lowlevel.checkpoint()
        self.pages += 1
        if after is None:
            return Page([in_state(State.ACCEPTED, 10), in_state(State.ACCEPTED, 20)], "offer-20")
        return Page([in_state(State.ACCEPTED, number) for number in self._names], self._next_after)


@pytest.mark.req("R120")
@pytest.mark.parametrize(
    "names, next_after",
    [
        pytest.param([30, 40], "offer-20", id="repeated", marks=pytest.mark.req("R92")),
        pytest.param([30, 40], "offer-10", id="backward", marks=pytest.mark.req("R93")),
        pytest.param([10, 20], "offer-20", id="again", marks=pytest.mark.req("R92")),
        pytest.param([30, 40], "offer-50", id="skipping", marks=pytest.mark.req("R94")),
        pytest.param([30, 40, 50], "offer-50", id="oversize", marks=pytest.mark.req("R95")),
    ],
)
async def test_a_source_with_bad_cursors_or_pages_is_refused_at_once(names: list[int], next_after: str) -> None:
    source = Liar(names, next_after)
    with pytest.raises(Corrupt, match="cannot trust the journal's listing"):
        await StartupAuditor(source, AuditBudget(page_size=2, max_pages=16)).audit()

    assert source.pages == 2


# -- the lifecycle


@pytest.mark.req("R97", "R99")
async def test_the_order_is_acquire_audit_recover_audit_hold_release() -> None:
    shelf = Shelf(in_state(State.COMPLETION_ACKNOWLEDGED, 1), in_state(State.LAUNCHING, 2))
    shelf.receipts["attempt-2"] = receipt(2)

    async def prepare() -> None:
        await shelf._step("prepare")

    lifecycle = JournalLifecycle(shelf, shelf.auditor(), shelf.recovery(), prepare=prepare)
    async with lifecycle.hold() as audit:
        shelf.trace.append("held")
        assert shelf.is_owned

    assert shelf.trace == [
        "acquire",
        "prepare",
        "page",
        "clean attempt-1",
        "read offer-2",
        "receipt attempt-2",
        "write offer-2 start_failed",
        "page",
        "held",
        "release",
    ]
    assert [each.state for each in audit.findings] == [State.COMPLETION_ACKNOWLEDGED, State.START_FAILED]
    assert audit.readiness is Readiness.RECONCILIATION_REQUIRED


@pytest.mark.req("R98", "R99", "R115")
async def test_without_a_recovery_the_order_is_acquire_audit_hold() -> None:
    shelf = Shelf(in_state(State.COMPLETION_ACKNOWLEDGED))
    async with JournalLifecycle(shelf, shelf.auditor()).hold() as audit:
        assert audit.readiness is Readiness.READY
        assert shelf.is_owned

    assert shelf.trace == ["acquire", "page", "release"]


def too_long(shelf: Shelf) -> JournalLifecycle:
    return JournalLifecycle(shelf, shelf.auditor(AuditBudget(page_size=1, max_pages=1)), shelf.recovery())


def too_many_actions(shelf: Shelf) -> JournalLifecycle:
    return JournalLifecycle(shelf, shelf.auditor(), shelf.recovery(max_actions=1))


def damaged(shelf: Shelf) -> JournalLifecycle:
    shelf.faults["page"] = Corrupt("offer-1.json is damaged")
    return JournalLifecycle(shelf, shelf.auditor(), shelf.recovery())


def failing(shelf: Shelf) -> JournalLifecycle:
    shelf.faults["page"] = OSError(errno.EIO, "no disk")
    return JournalLifecycle(shelf, shelf.auditor(), shelf.recovery())


@pytest.mark.parametrize(
    "broken, raised",
    [
        pytest.param(too_long, Corrupt, marks=pytest.mark.req("R100", "R250")),
        pytest.param(too_many_actions, Corrupt, marks=pytest.mark.req("R101", "R251")),
        pytest.param(damaged, Corrupt, marks=pytest.mark.req("R102")),
        pytest.param(failing, OSError, marks=pytest.mark.req("R103")),
    ],
)
async def test_a_refusal_releases_first_and_leaves_everything_as_it_was(
    broken: Callable[[Shelf], JournalLifecycle], raised: type[Exception]
) -> None:
    shelf = Shelf(in_state(State.COMPLETION_ACKNOWLEDGED, 1), in_state(State.COMPLETION_ACKNOWLEDGED, 2))
    lifecycle = broken(shelf)
    with pytest.raises(raised):
        async with lifecycle.hold():
            raise AssertionError("held")

    assert shelf.trace[-1] == "release"
    assert shelf.effects() == []


async def test_a_journal_that_is_owned_by_another_is_not_released() -> None:
    shelf = Shelf()
    shelf.faults["acquire"] = OwnershipHeld("somebody has it")
    with pytest.raises(OwnershipHeld):
        async with JournalLifecycle(shelf, shelf.auditor()).hold():
            raise AssertionError("held")

    assert shelf.trace == ["acquire"]


@pytest.mark.req("R104", "R105", "R255")
def test_lifecycle_and_recovery_know_no_clock_no_task_and_no_network() -> None:
    for kind in (JournalLifecycle, StartupRecovery, StartupAuditor):
        source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
        for word in ("open_nursery", "start_soon", "sleep", "move_on", "control_plane", "delivery import", "Clock"):
            assert word not in source, (kind, word)


# -- the recovery


@pytest.mark.req("R246", "R247")
async def test_completions_are_cleaned_first_then_launches_then_executions_one_at_a_time() -> None:
    states = [State.STARTED, State.LAUNCHING, State.COMPLETION_ACKNOWLEDGED, State.RUNNING_ACKNOWLEDGED, State.LAUNCHING]
    states += [State.COMPLETION_ACKNOWLEDGED, State.ACCEPTED, State.RECOVERY_REQUIRED]
    shelf = Shelf(*(in_state(state, number) for number, state in enumerate(states, 1)))
    result = await shelf.recovery().recover(await audit_of(shelf))

    assert [item.attempt_id for item in result.items] == [f"attempt-{number}" for number in (3, 6, 2, 5, 8, 1, 4)]
    assert [item.outcome for item in result.items] == [
        *[Outcome.CLEANED] * 2,
        *[Outcome.HANDED_ON] * 2,
        Outcome.KEPT,
        *[Outcome.HANDED_ON] * 2,
    ]
    assert shelf.effects() == ["clean attempt-3", "clean attempt-6"]


@pytest.mark.req("R245")
async def test_an_audit_is_consumed_once() -> None:
    shelf = Shelf(in_state(State.COMPLETION_ACKNOWLEDGED))
    audit, recovery = await audit_of(shelf), shelf.recovery()
    await recovery.recover(audit)
    with pytest.raises(Conflict):
        await recovery.recover(audit)

    assert shelf.effects() == ["clean attempt-1"]


@pytest.mark.req("R248", "R251")
@pytest.mark.parametrize("count", [64, 65])
async def test_the_default_budget_is_64_actions_and_is_checked_before_the_first_one(count: int) -> None:
    shelf = Shelf(*(in_state(State.COMPLETION_ACKNOWLEDGED, number) for number in range(100, 100 + count)))
    shelf.is_owned = True
    audit = await shelf.auditor(AuditBudget(64, 16)).audit()
    if count == 64:
        assert len((await shelf.recovery().recover(audit)).items) == 64
    else:
        with pytest.raises(Corrupt, match="action budget is exhausted: 65 records need one, the budget is 64"):
            await shelf.recovery().recover(audit)
        assert shelf.effects() == []


@pytest.mark.req("R249")
@pytest.mark.parametrize("max_actions", [0, 1025])
def test_a_budget_beyond_1024_actions_is_refused(max_actions: int) -> None:
    with pytest.raises(Misconfigured, match="1 to 1024"):
        Shelf().recovery(max_actions=max_actions)


@pytest.mark.req("R252", "R253", "R254")
async def test_one_failing_record_stops_no_other_and_its_reason_stays_inside() -> None:
    shelf = Shelf(*(in_state(State.COMPLETION_ACKNOWLEDGED, number) for number in (1, 2, 3)))
    audit = await audit_of(shelf)
    assert audit.readiness is Readiness.READY
    shelf.faults["clean attempt-2"] = OSError(errno.EIO, "the-secret-reason")
    result = await shelf.recovery().recover(audit)

    assert [item.outcome for item in result.items] == [Outcome.CLEANED, Outcome.FAILED, Outcome.CLEANED]
    assert result.readiness is Readiness.RECONCILIATION_REQUIRED
    assert "the-secret-reason" not in repr(result)


async def test_a_lost_ownership_ends_the_recovery_at_once() -> None:
    shelf = Shelf(*(in_state(State.COMPLETION_ACKNOWLEDGED, number) for number in (1, 2)))
    audit = await audit_of(shelf)
    shelf.faults["clean attempt-1"] = OwnershipLost("gone")
    with pytest.raises(OwnershipLost):
        await shelf.recovery().recover(audit)

    assert shelf.effects() == ["clean attempt-1"]


@pytest.mark.req("R220")
async def test_a_record_that_moved_on_since_the_audit_is_left_alone() -> None:
    shelf = Shelf(in_state(State.LAUNCHING))
    audit = await audit_of(shelf)
    shelf.records["offer-1"] = in_state(State.RUNNING_ACKNOWLEDGED)
    shelf.receipts["attempt-1"] = receipt(1)
    result = await shelf.recovery().recover(audit)

    assert [item.outcome for item in result.items] == [Outcome.FAILED]
    assert shelf.effects() == []


DECIDED = {
    (State.LAUNCHING, Ending.NOT_STARTED): State.START_FAILED,
    (State.STARTED, Ending.NOT_STARTED): State.START_FAILED,
    (State.RUNNING_ACKNOWLEDGED, Ending.NOT_STARTED): State.RECOVERY_REQUIRED,
    (State.LAUNCHING, Ending.EXITED): None,
    (State.STARTED, Ending.EXITED): None,
    (State.RUNNING_ACKNOWLEDGED, Ending.EXITED): None,
}


@pytest.mark.req("R221", "R222")
@pytest.mark.parametrize("state, ending", DECIDED)
async def test_only_what_a_receipt_settles_without_the_control_plane_is_written(state: State, ending: Ending) -> None:
    shelf = Shelf(in_state(state))
    shelf.receipts["attempt-1"] = receipt(1, ending)
    result = await shelf.recovery().recover(await audit_of(shelf))

    expected = DECIDED[state, ending]
    assert shelf.records["offer-1"].state is (expected or state)
    assert [item.outcome for item in result.items] == [Outcome.HANDED_ON if expected is None else Outcome.DECIDED]


# -- the whole worker


@pytest.mark.req("R105", "R256")
async def test_nothing_is_asked_of_the_control_plane_before_the_journal_is_held(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
    world.processes.command.end(0)
    world.trace.clear()
    worker = Worker(world, 2)
    world.living.add(worker.pid)
    async with worker.lifecycle.hold() as audit:
        assert [each.state for each in audit.unfinished] == [State.RUNNING_ACKNOWLEDGED]

    assert world.steps("request", "claim", "journal", "executor") == []


@pytest.mark.req("R99", "R115")
async def test_a_box_without_a_network_holds_its_journal_and_adopts_what_runs(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
    world.control.go_away()
    async with world.worker() as worker:
        await worker.settle()
        assert len(worker.executions.active) == 1
        assert (world.root / "journal").exists()
        world.control.come_back()
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")

    assert len(world.processes.commands) == 1


async def test_a_command_that_is_gone_keeps_no_place_while_its_receipt_is_waited_for(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("running_acknowledged")
    world.processes.command.publishes = False
    world.processes.command.end(0)
    asked = len(world.control.called("offers"))
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until(lambda: len(world.control.called("offers")) > asked, within_ms=4_900)
        assert worker.is_in("running_acknowledged")


@pytest.mark.parametrize("presence", [Presence.MISMATCH, Presence.PROBE_FAILED, Presence.UNSUPPORTED, Presence.RUNNING])
async def test_a_command_that_may_run_keeps_its_place(world: World, presence: Presence) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("running_acknowledged")
    world.processes.presence = presence
    asked = len(world.control.called("offers"))
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.pass_time(4_900)
        assert len(world.control.called("offers")) == asked


@pytest.mark.req("R228", "R229")
async def test_a_receipt_left_by_a_crash_after_the_end_was_durable_goes_at_the_next_start(world: World) -> None:
    world.control.enqueue(make_revision())
    world.faults["receipt remove"] = [OSError(errno.EROFS, "read-only")]
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")
        await worker.settle()
    assert world.receipt_files()
    world.control.go_away()
    async with world.worker() as worker:
        await worker.settle()

    assert world.receipt_files() == []
    assert len(world.control.called("completion")) == 1


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_finding_is_made_from_what_the_record_says() -> None:
    record = in_state(State.STARTED)

    assert Finding.of(record.offer_id, record.offer.attempt_id, record.state).state is State.STARTED
