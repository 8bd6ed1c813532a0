"""completion: control-plane.md §8 with D2 to D5."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from qlworker.control.schema import runs, worker_sessions
from qlworker.control.services.session import Caller
from qlworker.domain.errors import Fenced
from qlworker.wire.completion import Artifact, CompletionResult
from tests.builders import make_revision
from tests.control.fixtures import LEASE_MS, LOG, OTHER_SESSION, SESSION, START_MS, WORKER, Held, Plane

MINUTE_MS = 60_000


@pytest.fixture
def held(plane: Plane) -> Held:
    """A running attempt whose log is stored."""
    held = plane.drive("running")
    plane.store(held)
    return held


def intend(plane: Plane, reason: str) -> None:
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(cancel_requested_at_ms=tx.now_ms, cancel_reason=reason))


def changed(held: Held, name: str) -> Any:
    """The completion of `held` with one member changed, in every way that a repeat may differ."""
    request = held.completion()
    result, artifact = request.result, request.artifact
    variants: dict[str, dict[str, Any]] = {
        "run": {"run_id": "another"},
        "attempt": {"attempt_id": "another"},
        "project": {"project_id": "another"},
        "offer": {"offer_id": "offer-2"},
        "worker generation": {"worker_generation": 2},
        "lease generation": {"lease_generation": 2},
        "token": {"lease_token": "another_lease_capability_0000000000"},
        "version below": {"expected_lease_version": 1},
        "callback sequence": {"callback_sequence": 2},
        "callback digest": {"callback_token_digest": "d" * 64},
        "exit code": {
            "result": CompletionResult(outcome="failed", started_at_ms=START_MS + 10, finished_at_ms=START_MS + 20, exit_code=1)
        },
        "start": {"result": msgspec.structs.replace(result, started_at_ms=START_MS + 11)},
        "finish": {"result": msgspec.structs.replace(result, finished_at_ms=START_MS + 21)},
        "log length": {"artifact": msgspec.structs.replace(artifact, byte_length=1)},
        "log digest": {"artifact": msgspec.structs.replace(artifact, sha256="e" * 64)},
        "log truncation": {"artifact": msgspec.structs.replace(artifact, truncated=None)},
        "log id": {"artifact": msgspec.structs.replace(artifact, log_artifact_id="wlog-" + "0" * 30)},
    }
    return msgspec.structs.replace(request, **variants[name])


NAMES = [
    "run",
    "attempt",
    "project",
    "offer",
    "worker generation",
    "lease generation",
    "token",
    "version below",
    "callback sequence",
    "callback digest",
    "exit code",
    "start",
    "finish",
    "log length",
    "log digest",
    "log truncation",
    "log id",
]


@pytest.mark.parametrize(("exit_code", "status", "code"), [(0, "succeeded", None), (137, "failed", "EXECUTION_FAILED")])
def test_a_completion_ends_run_attempt_and_lease(plane: Plane, held: Held, exit_code: int, status: str, code: Any) -> None:
    plane.clock.advance(MINUTE_MS)
    assert plane.complete(held, held.completion(exit_code)).status == "applied"
    run, attempt = plane.facts(held)
    assert (run.status, run.error_code, run.finished_at_ms) == (status, code, START_MS + MINUTE_MS)
    assert (attempt.status, attempt.exit_code, attempt.lease_version) == (status, exit_code, 1)
    assert plane.events(held.run_id)[-2:] == [f"attempt.{status}", f"run.{status}"]


def timed(plane: Plane, seconds: float) -> Held:
    """A running attempt whose log is stored and whose command may take that long."""
    held = plane.drive("running", make_revision(timeout_ms=int(seconds * 1000)))
    plane.store(held)
    return held


@pytest.mark.parametrize(
    ("exit_code", "took_ms", "status"),
    [(143, 60_100, "timed_out"), (143, 59_000, "failed"), (0, 60_100, "succeeded")],
)
def test_a_failure_past_the_deadline_is_a_timeout_even_if_nobody_asked_for_the_stop(
    plane: Plane, exit_code: int, took_ms: int, status: str
) -> None:
    held = timed(plane, 60)
    plane.clock.advance(took_ms + 1_000)
    request = held.completion(exit_code)
    request = msgspec.structs.replace(
        request, result=msgspec.structs.replace(request.result, finished_at_ms=START_MS + took_ms)
    )
    assert plane.complete(held, request).status == "applied"
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status, run.cancel_reason) == (status, status, "timeout" if status == "timed_out" else None)
    assert plane.events(held.run_id).count("run.cancel_requested") == (status == "timed_out")
    assert plane.complete(held, request).status == "already_completed"


def test_a_completion_is_accepted_while_the_attempt_is_still_starting(plane: Plane) -> None:  # D4
    held = plane.drive("starting")
    plane.store(held)
    assert plane.complete(held).status == "applied"
    assert plane.complete(held).status == "already_completed"
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status, attempt.callback_sequence) == ("succeeded", "succeeded", 1)


def test_a_claimed_attempt_cannot_be_completed(plane: Plane) -> None:
    held = plane.claim()
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.complete(held)
    assert plane.snapshot() == before


def test_a_completion_is_whole_or_not_at_all(plane: Plane, held: Held) -> None:  # V81
    before = plane.snapshot()
    for write in range(1, 8):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            plane.complete(held)
        assert plane.snapshot() == before
    with plane.failing_at(8) as seen:
        plane.complete(held)
    assert seen == [7]


@pytest.mark.parametrize(("reason", "status"), [("user", "cancelled"), ("policy", "cancelled"), ("timeout", "timed_out")])
def test_an_intent_beats_a_success(plane: Plane, held: Held, reason: str, status: str) -> None:  # V83
    intend(plane, reason)
    assert plane.complete(held).status == "applied"
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status, attempt.exit_code) == (status, status, 0)
    assert plane.complete(held).status == "already_completed"


@pytest.mark.parametrize(
    ("started", "finished", "accepted"),
    [
        (0, 4 * MINUTE_MS, True),
        (0, 6 * MINUTE_MS, False),
        (4 * MINUTE_MS, 4 * MINUTE_MS, True),
        (-1, 0, False),
    ],
)
def test_reported_times_may_lead_by_five_minutes_and_never_precede_the_attempt(
    plane: Plane, held: Held, started: int, finished: int, accepted: bool
) -> None:  # V84
    request = held.completion(0, START_MS + started, START_MS + finished)
    if accepted:
        assert plane.complete(held, request).status == "applied"
        return
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.complete(held, request)
    assert plane.snapshot() == before


@pytest.mark.parametrize("shift_ms", [-24 * 3600 * 1000, 24 * 3600 * 1000])
def test_a_worker_clock_that_is_a_day_off_changes_no_fact(plane: Plane, held: Held, shift_ms: int) -> None:  # V118
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.complete(held, held.completion(0, START_MS + shift_ms, START_MS + shift_ms + 10))
    assert plane.snapshot() == before


def test_a_completion_needs_its_log(plane: Plane) -> None:  # V85
    held = plane.drive("running")
    before = plane.snapshot()
    with pytest.raises(Fenced, match="log"):
        plane.complete(held)
    assert plane.snapshot() == before


@pytest.mark.req("R515")
@pytest.mark.parametrize("name", ["log length", "log digest", "log truncation"])
def test_a_completion_needs_exactly_the_stored_log(plane: Plane, held: Held, name: str) -> None:  # V85
    before = plane.snapshot()
    with pytest.raises(Fenced, match="log"):
        plane.complete(held, changed(held, name))
    assert plane.snapshot() == before


@pytest.mark.req("R515")
def test_a_log_that_was_damaged_in_the_store_completes_nothing(plane: Plane, held: Held) -> None:  # V85
    for file in plane.directory.glob("artifacts/*/*"):
        file.write_bytes(LOG[::-1])
    with pytest.raises(Fenced, match="log"):
        plane.complete(held)


@pytest.mark.req("R234")
def test_the_exact_repeat_is_told_and_changes_nothing(plane: Plane, held: Held) -> None:
    plane.complete(held)
    before = plane.snapshot()
    assert plane.complete(held).status == "already_completed"
    assert plane.snapshot() == before


@pytest.mark.req("R235")
def test_the_exact_repeat_needs_neither_a_live_worker_nor_a_live_lease(plane: Plane, held: Held) -> None:  # V16, D2
    plane.complete(held)
    plane.register(Caller(WORKER, OTHER_SESSION))
    plane.clock.advance(LEASE_MS * 10)
    before = plane.snapshot()
    assert plane.complete(held).status == "already_completed"
    plane.clock.advance(-LEASE_MS * 20)  # nor does it ask for monotonic time
    assert plane.complete(held).status == "already_completed"
    assert plane.snapshot() == before


@pytest.mark.req("R234", "R236", "R237")
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_with_any_other_fact_is_refused(plane: Plane, held: Held, name: str, replaced: bool) -> None:  # V16
    plane.complete(held)
    if replaced:
        plane.register(Caller(WORKER, OTHER_SESSION))
    before = plane.snapshot()
    if name == "version below" and not replaced:
        # Not this version of the lease ended it: the worker is told that it is over, and may conclude nothing else (D3).
        assert plane.complete(held, changed(held, name)).status == "already_terminal"
    else:
        with pytest.raises(Fenced):
            plane.complete(held, changed(held, name))
    assert plane.snapshot() == before


@pytest.mark.req("R234")
@pytest.mark.parametrize("caller", [Caller("edge-2", SESSION), Caller(WORKER, OTHER_SESSION)])
def test_a_repeat_by_another_worker_or_session_is_refused(plane: Plane, held: Held, caller: Caller) -> None:
    plane.complete(held)
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.complete(msgspec.structs.replace(held, caller=caller))
    assert plane.snapshot() == before


@pytest.mark.req("R237", "R238")
def test_a_replaced_session_cannot_complete_for_the_first_time(plane: Plane, held: Held) -> None:  # V58
    plane.register(Caller(WORKER, OTHER_SESSION))
    before = plane.snapshot()
    with pytest.raises(Fenced, match="replaced"):
        plane.complete(held)
    assert plane.snapshot() == before


@pytest.mark.req("R237")
@pytest.mark.parametrize("ended", ["lease", "session"])
def test_a_first_completion_needs_a_live_lease_and_session(plane: Plane, held: Held, ended: str) -> None:
    if ended == "lease":
        plane.clock.advance(LEASE_MS)
    else:
        with plane.database.transaction() as tx:
            tx.write(update(worker_sessions).values(lease_expires_at_ms=tx.now_ms))
    before = plane.snapshot()
    with pytest.raises(Fenced, match="expired"):
        plane.complete(held)
    assert plane.snapshot() == before


@pytest.mark.req("R237")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("exit code", "start", "finish")])
def test_a_first_completion_with_any_wrong_fact_is_refused(plane: Plane, held: Held, name: str) -> None:
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.complete(held, changed(held, name))
    assert plane.snapshot() == before


def test_a_late_completion_of_a_cancelled_claim_changes_nothing(plane: Plane) -> None:  # V123
    held = plane.claim()
    plane.clock.advance(LEASE_MS)
    plane.cancel(held.run_id)
    assert plane.facts(held)[0].status == "cancelled"
    before = plane.snapshot()
    assert plane.complete(held).status == "already_terminal"
    for late in (plane.starting, plane.running, plane.start_failure, plane.control):
        with pytest.raises(Fenced):
            late(held)
    assert plane.snapshot() == before


@pytest.mark.parametrize(("exit_code", "outcome"), [(1, "succeeded"), (0, "failed"), (256, "failed")])
def test_outcome_and_exit_code_must_agree(exit_code: int, outcome: Any) -> None:  # V82
    with pytest.raises(ValueError, match="result"):
        CompletionResult(outcome=outcome, started_at_ms=1, finished_at_ms=2, exit_code=exit_code)


def test_the_callback_token_itself_has_no_place_in_the_request(held: Held) -> None:
    assert isinstance(held.completion().artifact, Artifact)
    assert set(held.completion().members()) & {"callbackToken", "token"} == set()
