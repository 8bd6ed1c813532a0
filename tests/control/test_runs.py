"""Runs as an operator starts, cancels and reads them."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Executable, func, insert, select

from qlworker.control import runs
from qlworker.control.aggregate import advance_attempt, advance_run, append_event, latest_attempt, load_run, project_lease
from qlworker.control.clock import SettableClock
from qlworker.control.database import Database, Transaction
from qlworker.control.schema import run_attempts, run_dispatch_leases, run_events
from qlworker.control.schema import runs as runs_table
from qlworker.control.services.convergence import converge
from qlworker.control.task_file import parse_task
from qlworker.control.tasks import publish
from qlworker.domain.errors import Conflict

NOW = 1_790_000_000_000
TASK = b'project = "home"\nid = "job"\n[command]\nshell = "true"\n'


class Injected(Exception):
    """Not a real failure."""


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOW)


@pytest.fixture
def database(tmp_path: Path, clock: SettableClock) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/control.sqlite", clock)
    database.create_tables()
    with database.transaction() as tx:
        publish(tx, parse_task(TASK, "job.toml"))
    yield database
    database.close()


def started(database: Database, **options: object) -> str:
    with database.transaction() as tx:
        return runs.start(tx, "home", "job", **options).run_id  # type: ignore[arg-type]


def types(tx: Transaction, run_id: str) -> list[str]:
    return [each.type for each in runs.events(tx, run_id)]


def rows(database: Database) -> list[int]:
    with database.transaction() as tx:
        tables = (runs_table, run_attempts, run_events)
        return [tx.rows(select(func.count()).select_from(each))[0][0] for each in tables]


def claim(tx: Transaction, run_id: str, expires_at_ms: int) -> str:
    """What the ingress does when a worker takes the attempt."""
    attempt, run = latest_attempt(tx, run_id), load_run(tx, run_id)
    assert attempt is not None
    assert run is not None
    held = {
        "worker_id": "edge-1",
        "worker_session_id": "018f0000-0000-7000-8000-000000000001",
        "worker_generation": 1,
        "lease_generation": 1,
        "lease_token_digest": "a" * 64,
        "offer_id": f"offer-{attempt.id}",
    }
    tx.write(
        insert(run_dispatch_leases).values(
            attempt_id=attempt.id,
            run_id=run_id,
            status="leased",
            version=0,
            acquired_at_ms=tx.now_ms,
            renewed_at_ms=tx.now_ms,
            expires_at_ms=expires_at_ms,
            updated_at_ms=tx.now_ms,
            **held,
        )
    )
    project_lease(tx, attempt, held | {"lease_version": 0, "lease_expires_at_ms": expires_at_ms})
    advance_run(tx, run, "dispatching", "run.dispatching", actor_type="worker")
    return attempt.id


def test_a_start_queues_a_run_with_a_claimed_first_attempt_and_two_events(database: Database) -> None:
    run_id = started(database, priority=5)

    with database.transaction() as tx:
        run, attempt = load_run(tx, run_id), latest_attempt(tx, run_id)
        assert types(tx, run_id) == ["run.created", "run.queued"]
    assert run is not None
    assert attempt is not None
    assert (run.status, run.version, run.event_sequence, run.priority, run.queued_at_ms) == ("queued", 2, 2, 5, NOW)
    assert (attempt.status, attempt.attempt, attempt.worker_id, attempt.executor_type) == ("claimed", 1, None, "remote_worker")


@pytest.mark.parametrize("failing", range(6))
def test_a_start_is_all_or_nothing(database: Database, failing: int) -> None:
    """Run, attempt and the two events (each an update and an insert) are six writes; losing any of them loses all."""
    before, seen = rows(database), []

    def fail(statement: Executable) -> None:
        seen.append(statement)
        if len(seen) == failing + 1:
            raise Injected

    database.on_write = fail
    with pytest.raises(Injected):
        started(database)
    database.on_write = None

    assert rows(database) == before
    assert started(database)


def test_a_run_is_pinned_to_the_revision_it_was_started_with(database: Database) -> None:
    first = started(database)
    with database.transaction() as tx:
        publish(tx, parse_task(TASK.replace(b"true", b"false"), "job.toml"))
    second, old = started(database), started(database, revision=1)

    with database.transaction() as tx:
        assert [runs.detail(tx, each).run.revision for each in (first, second, old)] == [1, 2, 1]


def test_an_idempotency_key_returns_the_run_it_named(database: Database) -> None:
    with database.transaction() as tx:
        first = runs.start(tx, "home", "job", idempotency_key="k")
    before = rows(database)
    with database.transaction() as tx:
        again = runs.start(tx, "home", "job", idempotency_key="k")

    assert (first.created, again.created) == (True, False)
    assert first.run_id == again.run_id
    assert rows(database) == before


def test_an_idempotency_key_of_another_task_is_a_conflict(database: Database) -> None:
    started(database, idempotency_key="k")
    with database.transaction() as tx:
        publish(tx, parse_task(TASK.replace(b'"job"', b'"other"'), "other.toml"))

    with pytest.raises(Conflict, match="another task"), database.transaction() as tx:
        runs.start(tx, "home", "other", idempotency_key="k")


def test_a_start_with_bad_values_changes_nothing(database: Database) -> None:
    before = rows(database)

    for options in ({"priority": 2**53}, {"idempotency_key": ""}, {"idempotency_key": "a\n"}):
        with pytest.raises(ValueError):
            started(database, **options)
    with pytest.raises(Conflict, match="no task"), database.transaction() as tx:
        runs.start(tx, "home", "absent")

    assert rows(database) == before


def test_a_cancel_ends_a_queued_run_at_once_with_its_attempt(database: Database) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        cancelled = runs.cancel(tx, run_id)
        view = runs.detail(tx, run_id)

        assert types(tx, run_id)[2:] == ["run.cancel_requested", "attempt.cancelled", "run.cancelled"]
    assert (cancelled.result, cancelled.status) == ("requested", "cancelled")
    assert view.run.cancel_reason == "user"
    assert view.attempts[0].status == "cancelled"
    assert view.run.finished_at_ms == NOW


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_cancel_of_a_terminal_run_appends_nothing(database: Database, repeats: int) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        runs.cancel(tx, run_id)
        before = types(tx, run_id)
        results = {runs.cancel(tx, run_id).result for _ in range(repeats)}

        assert results == {"already_terminal"}
        assert types(tx, run_id) == before


def test_a_cancel_of_a_started_command_is_only_an_intent(database: Database) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        claim(tx, run_id, NOW + 90_000)
        attempt = latest_attempt(tx, run_id)
        assert attempt is not None
        advance_attempt(tx, attempt, "starting")
        first, second = runs.cancel(tx, run_id), runs.cancel(tx, run_id)

        assert [first.result, second.result] == ["requested", "already_requested"]
        assert first.status == second.status == "dispatching"
        assert types(tx, run_id).count("run.cancel_requested") == 1


def test_a_started_attempt_blocks_convergence_even_when_its_lease_is_over(database: Database, clock: SettableClock) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        claim(tx, run_id, NOW + 1)
        attempt = latest_attempt(tx, run_id)
        assert attempt is not None
        advance_attempt(tx, attempt, "starting")
    clock.advance(10_000)

    with database.transaction() as tx:
        assert runs.cancel(tx, run_id).status == "dispatching"


def test_a_claimed_attempt_is_ended_once_its_lease_is_over(database: Database, clock: SettableClock) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        claim(tx, run_id, NOW + 1_000)
        assert runs.cancel(tx, run_id).status == "dispatching"
    clock.advance(1_000)

    with database.transaction() as tx:
        again = runs.cancel(tx, run_id)
        assert (again.result, again.status) == ("already_requested", "cancelled")


def test_a_timeout_intent_ends_as_timed_out(database: Database) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        run = load_run(tx, run_id)
        assert run is not None
        intent = {"cancel_requested_at_ms": NOW, "cancel_reason": "timeout"}
        run = append_event(tx, run, "run.cancel_requested", actor_type="system", changes=intent)

        assert converge(tx, run, "lost").status == "timed_out"


@pytest.mark.parametrize("failing", range(7))
def test_a_cancel_is_all_or_nothing(database: Database, failing: int) -> None:
    run_id, seen = started(database), []
    before = rows(database)

    def fail(statement: Executable) -> None:
        seen.append(statement)
        if len(seen) == failing + 1:
            raise Injected

    database.on_write = fail
    with pytest.raises(Injected), database.transaction() as tx:
        runs.cancel(tx, run_id)
    database.on_write = None

    assert rows(database) == before
    with database.transaction() as tx:
        assert runs.detail(tx, run_id).run.status == "queued"


def test_events_are_gap_free_and_the_version_counts_them(database: Database) -> None:
    run_ids = [started(database) for _ in range(3)]
    for run_id in random.sample(run_ids, 2):
        with database.transaction() as tx:
            runs.cancel(tx, run_id)
    with database.transaction() as tx:
        for run_id in run_ids:
            run = load_run(tx, run_id)
            assert run is not None
            assert [each.sequence for each in runs.events(tx, run_id)] == list(range(1, run.version + 1))
            assert run.version == run.event_sequence


def test_events_can_be_read_from_a_sequence_on(database: Database) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        assert [each.sequence for each in runs.events(tx, run_id, after=1)] == [2]
        assert [each.sequence for each in runs.events(tx, run_id, limit=1)] == [1]


def test_the_list_is_newest_first_and_can_be_narrowed(database: Database, clock: SettableClock) -> None:
    with database.transaction() as tx:
        publish(tx, parse_task(TASK.replace(b'"job"', b'"other"'), "other.toml"))
    first = started(database)
    clock.advance(1)
    with database.transaction() as tx:
        second = runs.start(tx, "home", "other").run_id

        assert [each.id for each in runs.listed(tx, 10)] == [second, first]
        assert [each.id for each in runs.listed(tx, 1)] == [second]
        assert [each.id for each in runs.listed(tx, 10, "home", "job")] == [first]
        assert runs.listed(tx, 10, "elsewhere") == []


@pytest.mark.parametrize("limit", [0, 501])
def test_a_list_is_bounded(database: Database, limit: int) -> None:
    with pytest.raises(ValueError, match="1 to 500"), database.transaction() as tx:
        runs.listed(tx, limit)


def test_what_is_shown_of_a_run_authorises_nothing(database: Database) -> None:
    run_id = started(database)
    with database.transaction() as tx:
        claim(tx, run_id, NOW + 1)
        shown = msgspec.json.encode([runs.detail(tx, run_id), runs.events(tx, run_id), runs.listed(tx, 10)]).decode()

    for word in ("digest", "token", "handle", "offer"):
        assert word not in shown


def test_an_unknown_run_is_named(database: Database) -> None:
    with database.transaction() as tx:
        for read in (runs.cancel, runs.detail, runs.events):
            with pytest.raises(Conflict, match="no run absent"):
                read(tx, "absent")


def test_a_run_that_is_over_can_be_run_again_as_a_new_one(database: Database) -> None:  # V121
    run_id = started(database, priority=3)
    with database.transaction() as tx, pytest.raises(Conflict, match="is queued; cancel it"):
        runs.retry(tx, run_id)
    with database.transaction() as tx:
        runs.cancel(tx, run_id)
    with database.transaction() as tx:
        publish(tx, parse_task(TASK.replace(b"true", b"false"), "job.toml"))
    with database.transaction() as tx:
        again = load_run(tx, runs.retry(tx, run_id).run_id)
        old = load_run(tx, run_id)
    assert again is not None
    assert old is not None
    assert (again.retry_of_run_id, again.task_revision, again.priority) == (run_id, old.task_revision, 3)
    assert (again.status, old.status) == ("queued", "cancelled")
