"""What one look says: classes of authority, the four conditions of a late running, and results that hold no capability."""

import itertools
from typing import Any

import msgspec
import pytest

from qlworker.domain.evidence import Authority, AuthorityFacts, ObservedEnd, Reconciled, authority_of, decided
from qlworker.domain.identity import Presence
from qlworker.domain.receipt import Ending, Receipt
from qlworker.domain.record import Event, InboxRecord, State, advance
from qlworker.domain.server_time import Anchor
from qlworker.domain.session import Access, LiveSession, SessionStatus
from qlworker.domain.verdict import ReceiptEvidence, Verdict
from tests.builders import DIGEST, SESSION_ID, make_record

NOW = 1_000_000
LIVE = LiveSession("edge-1", SESSION_ID, 2, 7, SessionStatus.ONLINE, NOW + 1)
GOOD = AuthorityFacts(session=LIVE, access=Access.OPEN, lease_expires_at=NOW + 1, anchor=None)
END = ObservedEnd(1, 2, 0, "succeeded")


def session(**changes: Any) -> LiveSession:
    return msgspec.structs.replace(LIVE, **changes)


def facts(**changes: Any) -> AuthorityFacts:
    return msgspec.structs.replace(GOOD, **changes)


def launching() -> InboxRecord:
    return advance(
        advance(make_record(), Event.STARTING_ACKED, 2000),
        Event.BARRIER_RAISED,
        3000,
        executor_started_at_ms=3000,
        log_artifact_id="wlog-" + "0" * 30,
        completion_receipt_callback_sequence=1,
        completion_receipt_token_digest=DIGEST,
    )


CASES = {
    "all well": (GOOD, Authority.CURRENT),
    "draining": (facts(session=session(status=SessionStatus.DRAINING)), Authority.CURRENT),
    "suspended": (facts(access=Access.SUSPENDED), Authority.CURRENT),
    "lease not tracked, time not known": (facts(lease_expires_at=None), Authority.CURRENT),
    "fenced": (facts(access=Access.FENCED), Authority.SESSION_FENCED),
    "fenced without a session": (facts(access=Access.FENCED, session=None), Authority.SESSION_FENCED),
    "a new session": (facts(session=session(session_id="018f0000-0000-7000-8000-000000000002")), Authority.SESSION_FENCED),
    "a new generation": (facts(session=session(generation=3)), Authority.SESSION_FENCED),
    "no session": (facts(session=None), Authority.WORKER_OFFLINE),
    "signed off": (facts(session=session(status=SessionStatus.OFFLINE)), Authority.WORKER_OFFLINE),
    "session over": (facts(session=session(expires_at=NOW)), Authority.WORKER_SESSION_EXPIRED),
    "lease over": (facts(lease_expires_at=NOW), Authority.RUN_LEASE_EXPIRED),
    "lease over by the control plane's time": (
        facts(lease_expires_at=None, anchor=Anchor(boot_id="b", server_ms=30_020, boot_ms=NOW)),
        Authority.RUN_LEASE_EXPIRED,
    ),
    "lease alive by the control plane's time": (
        facts(lease_expires_at=None, anchor=Anchor(boot_id="b", server_ms=30_019, boot_ms=NOW)),
        Authority.CURRENT,
    ),
}


@pytest.mark.req("R210", "R211", "R213")
@pytest.mark.parametrize("case", CASES)
def test_authority_is_classed_from_the_records_own_session_and_lease(case: str) -> None:
    given, expected = CASES[case]

    assert authority_of(make_record(), given, NOW) is expected


@pytest.mark.req("R210")
def test_there_are_five_classes_and_the_cases_above_meet_each() -> None:
    assert {expected for _, expected in CASES.values()} == set(Authority)
    assert [each.value for each in Authority] == [
        "current",
        "session_fenced",
        "worker_offline",
        "worker_session_expired",
        "run_lease_expired",
    ]


@pytest.mark.req("R221", "R239")
@pytest.mark.parametrize("state", [State.LAUNCHING, State.STARTED, State.RUNNING_ACKNOWLEDGED])
@pytest.mark.parametrize("authority", Authority)
def test_an_end_and_a_late_running_may_be_told_under_their_own_conditions_only(state: State, authority: Authority) -> None:
    for receipt, presence in itertools.product(ReceiptEvidence, [None, *Presence]):
        end = END if receipt is ReceiptEvidence.ENDED else None
        seen = Reconciled(state, receipt, presence, authority, end)
        facts = (state, receipt, presence, authority)

        assert seen.may_acknowledge_running == (
            facts == (State.STARTED, ReceiptEvidence.MISSING, Presence.RUNNING, Authority.CURRENT)
        )
        assert seen.may_complete == (receipt is ReceiptEvidence.ENDED and authority is Authority.CURRENT)


@pytest.mark.req("R206", "R218")
@pytest.mark.parametrize("receipt, presence", list(itertools.product(ReceiptEvidence, [None, *Presence])))
def test_only_what_a_receipt_or_nothing_at_all_decides_is_written_here(
    receipt: ReceiptEvidence, presence: Presence | None
) -> None:
    record = launching()
    seen = Reconciled(record.state, receipt, presence, Authority.CURRENT, END if receipt is ReceiptEvidence.ENDED else None)
    successor = decided(record, seen, 4000)

    expected = {Verdict.NOT_STARTED: State.START_FAILED, Verdict.UNKNOWN: State.RECOVERY_REQUIRED}.get(seen.verdict)
    assert (None if successor is None else successor.state) is expected


@pytest.mark.req("R207", "R208")
def test_an_observed_end_has_four_members_and_no_capability() -> None:
    receipt = Receipt(
        schema_version=2,
        run_id="run-1",
        attempt_id="attempt-1",
        callback_sequence=1,
        token="A" * 43,
        started_at_ms=1,
        finished_at_ms=5,
        exit_code=137,
        ending=Ending.SIGNALED,
        signal=9,
    )
    end = ObservedEnd.of(receipt)

    assert ObservedEnd.__struct_fields__ == ("callback_sequence", "finished_at_ms", "exit_code", "outcome")
    assert end == ObservedEnd(1, 5, 137, "failed")
    for value in (end, Reconciled(State.STARTED, ReceiptEvidence.ENDED, None, Authority.CURRENT, end)):
        assert receipt.token not in repr(value) + msgspec.json.encode(value).decode()
