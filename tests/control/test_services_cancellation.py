"""From the word to stop to the end of a run: control-plane.md §11."""

from typing import Any

import pytest
from sqlalchemy import select, update

from qlworker.control import runs
from qlworker.control.aggregate import load_run
from qlworker.control.database import Transaction
from qlworker.control.schema import cancellation_dispatches, run_attempts, worker_execution_attestations
from qlworker.control.schema import runs as runs_table
from qlworker.control.services.convergence import converge
from qlworker.control.services.convergence_scan import StopCursor, scan_stops, stop_wanted
from qlworker.control.services.expiry import expire_with_lease
from qlworker.control.services.lost_retry import follow_lost
from tests.builders import make_revision
from tests.control.fixtures import LEASE_MS, START_MS, Held, Plane, token
from tests.control.losing import held_runs
from tests.control.test_services_lost_retry import lost, waiting

Policy = Any


def dispatch(plane: Plane) -> Any:
    with plane.database.transaction() as tx:
        return tx.row(select(cancellation_dispatches))


def settle(plane: Plane, held: Held, policy: Policy = "lost") -> str:
    def step(tx: Transaction) -> str:
        tx.lock("run", held.run_id)
        run = load_run(tx, held.run_id)
        assert run is not None
        return converge(tx, run, policy).status

    return plane.database.transact(step)


def expire(plane: Plane, held: Held, policy: Policy = "lost") -> None:
    plane.clock.advance(LEASE_MS)
    plane.database.transact(expire_with_lease, held.run_id, held.attempt_id, plane.clock.now_ms(), policy)


def test_a_run_nobody_took_ends_without_a_worker(plane: Plane) -> None:  # V103
    run_id = plane.start_run(plane.publish())
    assert plane.database.transact(runs.cancel, run_id).status == "cancelled"
    assert plane.events(run_id) == [
        "run.created",
        "run.queued",
        "run.cancel_requested",
        "attempt.cancelled",
        "run.cancelled",
    ]
    assert dispatch(plane) is None


def test_the_word_is_written_once_and_waits_for_the_worker_to_hear_it(plane: Plane) -> None:  # V98
    held = plane.drive("running")
    assert plane.database.transact(runs.cancel, held.run_id).result == "requested"
    before = plane.snapshot()
    assert plane.database.transact(runs.cancel, held.run_id).result == "already_requested"
    assert plane.snapshot() == before
    found = dispatch(plane)
    assert (found.status, found.attempt_id, found.dispatch_count) == ("pending", held.attempt_id, 0)


def test_a_worker_hears_of_the_stop_in_the_transaction_that_says_so(plane: Plane) -> None:  # V100, D20
    held = plane.drive("running")
    plane.cancel(held.run_id)
    before = plane.snapshot()
    with plane.failing_at(1), pytest.raises(OSError, match="disk"):
        plane.control(held)
    assert plane.snapshot() == before
    answer = plane.control(held)
    assert (answer.status, answer.lease_version) == ("stop_requested", held.lease_version + 1)
    found = dispatch(plane)
    assert (found.status, found.dispatch_count, found.last_dispatched_at_ms) == ("dispatched", 1, plane.clock.now_ms())
    assert plane.events(held.run_id)[-1] == "run.cancel_dispatched"
    # Told again, nothing more is written about it.
    plane.control(held, expected_lease_version=held.lease_version + 1)
    assert plane.events(held.run_id).count("run.cancel_dispatched") == 1


def test_a_deadline_that_passed_is_told_and_recorded_in_one_answer(plane: Plane) -> None:  # V99
    held = plane.drive("running", make_revision(timeout_ms=5_000))
    plane.clock.advance(5_000)
    answer = plane.control(held)
    assert answer.stop is not None
    assert (answer.status, answer.stop.reason) == ("stop_requested", "timeout")
    assert plane.events(held.run_id)[-2:] == ["run.cancel_requested", "run.cancel_dispatched"]


@pytest.mark.parametrize("policy", ["lost", "evidence"])
@pytest.mark.parametrize("state", ["claimed", "starting", "running"])
def test_while_a_worker_holds_the_lease_the_run_waits(plane: Plane, state: str, policy: str) -> None:
    held = plane.drive(state)
    plane.cancel(held.run_id)
    before = plane.snapshot()
    assert settle(plane, held, policy) in ("dispatching", "running")
    assert plane.snapshot() == before


@pytest.mark.parametrize("policy", ["lost", "evidence"])
def test_a_claimed_attempt_ends_when_its_lease_is_over(plane: Plane, policy: str) -> None:
    held = plane.claim()
    plane.cancel(held.run_id)
    expire(plane, held, policy)
    assert settle(plane, held, policy) == "cancelled"
    run, attempt = plane.facts(held)
    assert (attempt.status, run.error_code) == ("cancelled", "EXECUTION_CANCELLED")


@pytest.mark.parametrize(("reason", "status"), [("user", "cancelled"), ("timeout", "timed_out")])
@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_started_attempt_whose_worker_is_gone_is_lost_and_its_run_ends_as_wanted(
    plane: Plane, state: str, reason: str, status: str
) -> None:
    held = plane.drive(state)
    with plane.database.transaction() as tx:
        tx.write(update(runs_table).values(cancel_requested_at_ms=tx.now_ms, cancel_reason=reason))
    expire(plane, held)
    assert settle(plane, held) == status
    run, attempt = plane.facts(held)
    assert (attempt.status, run.finished_at_ms) == ("lost", plane.clock.now_ms())
    assert plane.events(held.run_id)[-3:] == ["attempt.lost", "run.lost", f"run.{status}"]


def test_under_evidence_a_started_attempt_blocks_until_it_is_known_to_have_stopped(plane: Plane) -> None:  # V103
    held = plane.drive("running")
    plane.attest(held, state="stopped")
    with plane.database.transaction() as tx:
        tx.write(update(worker_execution_attestations).values(state="running"))
    plane.cancel(held.run_id)
    expire(plane, held, "evidence")
    assert settle(plane, held, "evidence") == "running"
    assert dispatch(plane).status == "blocked"
    assert plane.events(held.run_id)[-1] == "run.cancel_dispatch_blocked"
    before = plane.snapshot()
    settle(plane, held, "evidence")
    assert plane.snapshot() == before  # said once

    with plane.database.transaction() as tx:
        tx.write(update(worker_execution_attestations).values(state="stopped"))
    assert settle(plane, held, "evidence") == "cancelled"
    assert plane.facts(held)[1].status == "lost"


@pytest.mark.parametrize("state", ["lost", "retry_wait"])
@pytest.mark.parametrize(("reason", "status"), [("user", "cancelled"), ("timeout", "timed_out")])
def test_a_cancel_ends_a_lost_run_before_a_new_attempt(plane: Plane, state: str, reason: str, status: str) -> None:  # D8
    held = lost(plane) if state == "lost" else waiting(plane)
    with plane.database.transaction() as tx:
        tx.write(update(runs_table).values(cancel_requested_at_ms=tx.now_ms, cancel_reason=reason))
    assert settle(plane, held) == status
    plane.database.transact(follow_lost, held.run_id)
    with plane.database.transaction() as tx:
        assert len(tx.rows(select(run_attempts))) == 1
    assert plane.facts(held)[0].cancel_reason == reason


def test_an_ending_is_whole_or_not_at_all(plane: Plane) -> None:
    held = plane.claim()
    plane.cancel(held.run_id)
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    for write in range(1, 7):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            settle(plane, held)
        assert plane.snapshot() == before
    assert settle(plane, held) == "cancelled"


async def test_a_scan_takes_a_page_in_the_order_of_the_requests(plane: Plane) -> None:
    helds = held_runs(plane, 4)
    for held in helds:
        plane.cancel(held.run_id)
        plane.clock.advance(1)
    scan = await scan_stops(plane.database, None, "lost", 3)
    assert (scan.settled, scan.waiting, scan.failures) == (0, 3, {})
    assert scan.cursor == StopCursor(START_MS + 2, helds[2].run_id)
    scan = await scan_stops(plane.database, scan.cursor, "lost", 3)
    assert (scan.waiting, scan.cursor) == (1, None)


async def test_one_run_that_cannot_be_ended_keeps_nobody_waiting(plane: Plane) -> None:
    helds = held_runs(plane, 3)
    for held in helds:
        plane.cancel(held.run_id)
        expire(plane, held)
        plane.clock.advance(-LEASE_MS)
    with plane.database.transaction() as tx:
        # A state that does not exist: nothing may be made of it.
        tx.write(update(runs_table).where(runs_table.c.id == helds[1].run_id).values(status="unheard"))
    plane.clock.advance(LEASE_MS)
    scan = await scan_stops(plane.database, None, "lost")
    assert scan.settled == 2
    assert list(scan.failures) == [helds[1].run_id]
    with plane.database.transaction() as tx:
        tx.write(update(runs_table).where(runs_table.c.id == helds[1].run_id).values(status="dispatching"))


@pytest.mark.parametrize("limit", [0, 129])
def test_a_page_is_1_to_128(plane: Plane, limit: int) -> None:
    with pytest.raises(ValueError, match="1 to 128"), plane.database.transaction() as tx:
        stop_wanted(tx, None, limit)


def test_a_run_that_somebody_is_changing_is_not_waited_for(postgresql_plane: Plane) -> None:
    plane = postgresql_plane
    run_id = plane.start_run(plane.publish())
    with plane.database.transaction() as tx:
        tx.write(update(runs_table).values(cancel_requested_at_ms=tx.now_ms, cancel_reason="user"))
    with plane.database.transaction() as tx:
        tx.write(update(runs_table).values(priority=1))
        with plane.database.transaction() as other:
            assert stop_wanted(other, None, 8) == []
    with plane.database.transaction() as tx:
        assert [each.run_id for each in stop_wanted(tx, None, 8)] == [run_id]


def test_the_offer_of_a_cancelled_run_still_tells_its_worker_to_stop(plane: Plane) -> None:
    held = plane.claim()
    plane.cancel(held.run_id)
    assert plane.control(held).status == "stop_requested"
    plane.starting(held, expected_lease_version=1)
    assert plane.start_failure(held, expected_lease_version=1).snapshot.attempt_status == "cancelled"
    assert token()
