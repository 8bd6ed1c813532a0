"""starting, running and start-failure: control-plane.md §7."""

from typing import Any

import pytest
from msgspec import UNSET
from sqlalchemy import update

from qlworker.control.schema import runs
from qlworker.domain.errors import Fenced
from tests.builders import make_revision
from tests.control.fixtures import CALLBACK_DIGEST, HANDLE, LEASE_MS, START_MS, Plane


def timed(milliseconds: int = 60_000) -> Any:
    return make_revision(timeout_ms=milliseconds)


def intend(plane: Plane, reason: str) -> None:
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(cancel_requested_at_ms=tx.now_ms, cancel_reason=reason))


def test_starting_applies_once_and_keeps_its_deadline(plane: Plane) -> None:  # V74
    held = plane.claim(timed())
    plane.clock.advance(1000)
    first = plane.starting(held)
    assert (first.status, first.snapshot.deadline_at_ms) == ("applied", START_MS + 61_000)
    assert (first.snapshot.run_status, first.snapshot.attempt_status) == ("dispatching", "starting")
    plane.clock.advance(1000)
    before = plane.snapshot()
    again = plane.starting(held)
    assert (again.status, again.snapshot) == ("already_starting", first.snapshot)
    assert plane.snapshot() == before


def test_a_revision_without_a_timeout_has_no_deadline(plane: Plane) -> None:  # V74
    answer = plane.starting(plane.claim())
    assert answer.snapshot.deadline_at_ms is UNSET


def test_starting_tells_that_the_attempt_runs_already(plane: Plane) -> None:  # V74
    held = plane.drive("running")
    answer = plane.starting(held)
    assert (answer.status, answer.snapshot.shape) == ("already_running", "running")


@pytest.mark.parametrize("state", ["start_failed", "succeeded", "failed"])
def test_nothing_starts_after_the_end(plane: Plane, state: str) -> None:  # V74
    held = plane.drive(state)
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.starting(held)
    with pytest.raises(Fenced):
        plane.running(held)
    assert plane.snapshot() == before


def test_running_without_starting_is_refused(plane: Plane) -> None:  # V75
    held = plane.claim()
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.running(held)
    assert plane.snapshot() == before


def test_running_fixes_handle_log_and_callback_at_the_planes_time(plane: Plane) -> None:
    held = plane.drive("starting")
    plane.clock.advance(500)
    answer = plane.running(held)
    assert (answer.status, answer.snapshot.shape, answer.snapshot.started_at_ms) == ("applied", "running", START_MS + 500)
    run, attempt = plane.facts(held)
    assert (run.status, run.started_at_ms, attempt.status) == ("running", START_MS + 500, "running")
    assert (attempt.executor_handle, attempt.callback_token_digest) == (HANDLE, CALLBACK_DIGEST)
    assert plane.events(held.run_id)[-2:] == ["attempt.running", "run.running"]


def test_the_callback_sequence_must_be_the_next_one(plane: Plane) -> None:
    held = plane.drive("starting")
    with pytest.raises(Fenced, match="sequence"):
        plane.running(held, callback_sequence=2)


def test_a_running_replay_changes_nothing(plane: Plane) -> None:  # V76
    held = plane.drive("running")
    before = plane.snapshot()
    answer = plane.running(held)
    assert (answer.status, answer.snapshot.executor_handle) == ("already_running", HANDLE)
    assert plane.snapshot() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"executor_handle": "another"},
        {"log_artifact_id": None},
        {"callback_sequence": 2},
        {"callback_token_digest": "d" * 64},
    ],
)
def test_a_running_replay_with_one_other_fact_is_refused(plane: Plane, changes: dict[str, Any]) -> None:  # V76
    held = plane.drive("running")
    before = plane.snapshot()
    with pytest.raises(Fenced, match="other facts"):
        plane.running(held, **changes)
    assert plane.snapshot() == before


def test_after_a_renewal_only_the_new_lease_version_counts(plane: Plane) -> None:  # V77
    held = plane.claim()
    plane.control(held)
    with pytest.raises(Fenced, match="version"):
        plane.starting(held)
    answer = plane.starting(held, expected_lease_version=1)
    assert (answer.status, answer.snapshot.lease_version) == ("applied", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "another"},
        {"attempt_id": "another"},
        {"worker_generation": 2},
        {"offer_id": "offer-2"},
        {"lease_generation": 2},
        {"lease_token": "another_lease_capability_0000000000"},
        {"expected_lease_version": 1},
    ],
)
def test_every_member_of_the_fence_counts(plane: Plane, changes: dict[str, Any]) -> None:
    held = plane.claim()
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.starting(held, **changes)
    assert plane.snapshot() == before


def test_an_expired_lease_starts_nothing(plane: Plane) -> None:
    held = plane.claim()
    plane.clock.advance(LEASE_MS)
    with pytest.raises(Fenced, match="expired"):
        plane.starting(held)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (None, "failed", "EXECUTOR_START_FAILED"),
        ("user", "cancelled", "EXECUTION_CANCELLED"),
        ("timeout", "timed_out", "EXECUTION_TIMED_OUT"),
    ],
)
def test_a_start_failure_ends_as_the_intent_says(plane: Plane, reason: str | None, status: str, code: str) -> None:  # V78
    held = plane.drive("starting")
    if reason is not None:
        intend(plane, reason)
    answer = plane.start_failure(held)
    snapshot = answer.snapshot
    assert (answer.status, snapshot.run_status, snapshot.attempt_status, snapshot.error_code) == (
        "applied",
        status,
        status,
        code,
    )
    assert (snapshot.lease_version, snapshot.callback_sequence) == (1, 1)
    before = plane.snapshot()
    again = plane.start_failure(held)
    assert (again.status, again.snapshot) == ("already_terminal", snapshot)
    assert plane.snapshot() == before


def test_a_start_failure_closes_the_callback(plane: Plane) -> None:  # V79
    held = plane.drive("starting")
    plane.store(held)
    plane.start_failure(held)
    before = plane.snapshot()
    for sequence in (1, 2):
        with pytest.raises(Fenced):
            plane.complete(held, held.completion(callback_sequence=sequence))
    assert plane.snapshot() == before


@pytest.mark.parametrize("state", ["claimed", "running", "succeeded", "failed"])
def test_a_start_failure_needs_an_attempt_that_is_starting(plane: Plane, state: str) -> None:
    held = plane.drive(state)
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.start_failure(held)
    assert plane.snapshot() == before


@pytest.mark.parametrize(
    ("operation", "state", "writes"), [("starting", "claimed", 3), ("running", "starting", 5), ("start_failure", "starting", 7)]
)
def test_an_acknowledgement_is_whole_or_not_at_all(plane: Plane, operation: str, state: str, writes: int) -> None:  # V80
    held = plane.drive(state)
    before = plane.snapshot()
    for write in range(1, writes + 1):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            getattr(plane, operation)(held)
        assert plane.snapshot() == before
    with plane.failing_at(writes + 1) as seen:
        getattr(plane, operation)(held)
    assert seen == [writes]
