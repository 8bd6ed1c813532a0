"""Triggers fire: once per time, by their policies, and once only where replicas meet; on both databases."""

import threading
from typing import Any

import msgspec
import pytest
import trio
from sqlalchemy import select, update

from qlworker.control.maintenance import Maintenance
from qlworker.control.operator_api import TriggerView
from qlworker.control.schedule import firing
from qlworker.control.schedule.firing import Firing, Outcome, Taken, fire, take_due
from qlworker.control.schedule.plan import put_task
from qlworker.control.schedule.triggers import listed
from qlworker.control.schema import runs, triggers
from qlworker.control.task_file import TaskDefinition
from qlworker.domain.errors import Conflict
from qlworker.wire.offers import Idle
from tests.control.fixtures import EDGE, START_MS, Held, Plane, token
from tests.pki import Events

STEP = 20_000
GRACE = 30_000
TERMS = Firing(owner="replica-1", page=16, lease_ms=30_000, grace_ms=GRACE)
FIRST = START_MS + STEP - START_MS % STEP


def put(plane: Plane, shell: str = "true", task: str = "job", **trigger: Any) -> None:
    """Publishes a task that runs every 20 s."""
    definition = {
        "project": "home",
        "id": task,
        "command": {"shell": shell},
        "triggers": [{"name": "often", "cron": "*/20 * * * * *", **trigger}],
    }
    plane.database.transact(put_task, msgspec.convert(definition, TaskDefinition))


def tick(plane: Plane) -> Events:
    """One tick of the scheduler, as the control plane makes it."""
    events = Events()
    trio.run(Maintenance(plane.database, plane.artifacts, plane.settings, events).fire)
    assert "trigger_stuck" not in events.names
    return events


def at(plane: Plane, moment: int) -> Events:
    plane.clock.advance(moment - plane.clock.now_ms())
    return tick(plane)


def all_runs(plane: Plane) -> list[Any]:
    with plane.database.transaction() as tx:
        return tx.rows(select(runs).order_by(runs.c.scheduled_for_ms))


def statuses(plane: Plane) -> list[str]:
    return [row.status for row in all_runs(plane)]


def view(plane: Plane) -> TriggerView:
    (found,) = plane.database.transact(listed, 10)
    return found


def work(plane: Plane, number: int = 1) -> Held:
    """A worker takes the run that waits and starts it."""
    plane.register(EDGE, slots=4)
    held = plane.hold(plane.pull(f"offer-{number}", token(number)), token(number))
    plane.starting(held)
    plane.running(held)
    return held


def end(plane: Plane, held: Held) -> None:
    """The command ended well."""
    plane.store(held)
    now = plane.clock.now_ms()
    plane.complete(held, held.completion(started_at_ms=now, finished_at_ms=now))


def test_a_trigger_fires_at_its_time_and_not_before(plane: Plane) -> None:
    put(plane)
    at(plane, FIRST - 1)
    assert all_runs(plane) == []

    at(plane, FIRST)
    tick(plane)

    (run,) = all_runs(plane)
    assert (run.status, run.trigger_type, run.execution_origin) == ("queued", "schedule", "scheduler")
    assert (run.scheduled_for_ms, run.triggered_by) == (FIRST, "often")
    assert plane.events(run.id) == ["run.created", "run.queued"]
    found = view(plane)
    assert (found.last_fire_at_ms, found.next_fire_at_ms) == (FIRST, FIRST + STEP)
    assert (found.last_run_id, found.last_outcome) == (run.id, "started")


def test_a_trigger_fires_the_revision_it_was_published_with(plane: Plane) -> None:
    put(plane, "echo first")
    put(plane, "echo second")
    at(plane, FIRST)

    (run,) = all_runs(plane)
    assert run.task_revision.startswith("qltd:v1:2:")


def test_a_trigger_that_is_off_or_gone_does_not_fire(plane: Plane) -> None:
    put(plane, task="off", enabled=False)
    put(plane, task="gone")
    definition = {"project": "home", "id": "gone", "command": {"shell": "true"}}
    plane.database.transact(put_task, msgspec.convert(definition, TaskDefinition))

    at(plane, FIRST)

    assert all_runs(plane) == []
    assert view(plane).next_fire_at_ms is None


@pytest.mark.parametrize(("misfire", "expected"), [("skip", 0), ("run_once", 1)])
def test_times_that_nobody_was_there_for_are_skipped_or_made_up_for_once(plane: Plane, misfire: str, expected: int) -> None:
    put(plane, misfire=misfire)

    at(plane, FIRST + 10 * STEP + GRACE + 1)  # one and a half steps late

    assert len(all_runs(plane)) == expected
    assert view(plane).next_fire_at_ms == FIRST + 12 * STEP
    assert view(plane).last_outcome == ("missed" if misfire == "skip" else "started")


def test_a_tick_that_comes_late_within_the_grace_loses_nothing(plane: Plane) -> None:
    put(plane, if_running="allow")

    at(plane, FIRST + STEP + 5_000)
    tick(plane)

    assert [row.scheduled_for_ms for row in all_runs(plane)] == [FIRST, FIRST + STEP]


def test_skip_lets_a_time_pass_while_a_run_is_not_over(plane: Plane) -> None:
    put(plane)
    at(plane, FIRST)
    at(plane, FIRST + STEP)
    assert (statuses(plane), view(plane).last_outcome) == (["queued"], "skipped_while_running")

    plane.cancel(all_runs(plane)[0].id)
    at(plane, FIRST + 2 * STEP)

    assert statuses(plane) == ["cancelled", "queued"]


def test_allow_runs_them_side_by_side(plane: Plane) -> None:
    put(plane, if_running="allow")
    at(plane, FIRST)
    at(plane, FIRST + STEP)

    assert statuses(plane) == ["queued", "queued"]


def test_queue_holds_one_run_until_the_one_before_is_over(plane: Plane) -> None:
    put(plane, if_running="queue")
    at(plane, FIRST)
    held = work(plane)
    at(plane, FIRST + STEP)
    assert (statuses(plane), view(plane).last_outcome) == (["running", "created"], "held")
    assert isinstance(plane.pull("offer-2", token(2)), Idle)  # nobody is offered what waits
    at(plane, FIRST + 2 * STEP)  # one waits already
    assert statuses(plane) == ["running", "created"]

    end(plane, held)
    events = tick(plane)

    assert statuses(plane) == ["succeeded", "queued"]
    assert "held_run_queued" in events.names


def test_runs_that_wait_are_queued_in_the_order_of_their_times(plane: Plane) -> None:
    """One that waits for a run that is over, met by the next time before anybody looked."""
    put(plane, if_running="queue")
    at(plane, FIRST)
    held = work(plane)
    at(plane, FIRST + STEP)
    end(plane, held)
    with plane.database.transaction() as tx:
        (taken,) = _due(tx, plane, FIRST + 2 * STEP)
        assert fire(tx, taken, TERMS) is Outcome.HELD
    assert statuses(plane) == ["succeeded", "created", "created"]

    tick(plane)
    assert statuses(plane) == ["succeeded", "queued", "created"]

    plane.cancel(all_runs(plane)[1].id)
    tick(plane)
    assert statuses(plane) == ["succeeded", "cancelled", "queued"]


def _due(tx: Any, plane: Plane, moment: int) -> list[Taken]:
    plane.clock.advance(moment - plane.clock.now_ms())
    return take_due(tx, TERMS)


def test_kill_stops_the_one_before_and_starts_when_it_is_over(plane: Plane) -> None:
    put(plane, if_running="kill")
    at(plane, FIRST)
    held = work(plane)
    at(plane, FIRST + STEP)

    first, second = all_runs(plane)
    assert first.cancel_requested_at_ms is not None
    assert second.status == "created"
    answer = plane.control(held)
    assert answer.stop is not None  # its worker is told
    held = msgspec.structs.replace(held, lease_version=held.lease_version + 1)

    end(plane, held)
    tick(plane)

    assert statuses(plane)[1] == "queued"
    at(plane, FIRST + 2 * STEP)  # what was never started makes way at once
    assert statuses(plane)[1:] == ["cancelled", "queued"]


def test_a_run_that_waits_can_be_cancelled(plane: Plane) -> None:
    put(plane, if_running="queue")
    at(plane, FIRST)
    work(plane)
    at(plane, FIRST + STEP)

    plane.cancel(all_runs(plane)[1].id)
    tick(plane)

    assert statuses(plane) == ["running", "cancelled"]


def test_two_replicas_take_no_trigger_together(plane: Plane) -> None:
    for number in range(20):
        put(plane, task=f"job-{number:02}")
    plane.clock.advance(FIRST - plane.clock.now_ms())
    taken: list[str] = []
    barrier = threading.Barrier(2)

    def replica(name: str) -> None:
        terms = msgspec.structs.replace(TERMS, owner=name, page=16)
        barrier.wait()
        taken.extend(each.trigger_id for each in plane.database.transact(take_due, terms))

    threads = [threading.Thread(target=replica, args=(f"replica-{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(taken) == len(set(taken)) == 20


def test_a_replica_that_died_with_a_trigger_is_replaced_when_its_lease_is_over(plane: Plane) -> None:
    put(plane)
    plane.clock.advance(FIRST - plane.clock.now_ms())
    (dead,) = plane.database.transact(take_due, TERMS)
    tick(plane)
    assert all_runs(plane) == []

    plane.clock.advance(TERMS.lease_ms)
    tick(plane)

    assert len(all_runs(plane)) == 1
    assert plane.database.transact(fire, dead, TERMS) is Outcome.GONE  # it comes back too late
    assert len(all_runs(plane)) == 1


def test_a_time_is_fired_once_even_if_the_trigger_is_put_back(plane: Plane) -> None:
    put(plane, if_running="allow")
    at(plane, FIRST)
    with plane.database.transaction() as tx:
        tx.write(update(triggers).values(next_fire_at_ms=FIRST, version=triggers.c.version + 1))

    tick(plane)

    assert len(all_runs(plane)) == 1
    assert view(plane).last_outcome == "already_fired"


def test_a_trigger_without_a_time_gets_one_and_makes_up_for_nothing(plane: Plane) -> None:
    put(plane, misfire="run_once")
    with plane.database.transaction() as tx:
        tx.write(update(triggers).values(next_fire_at_ms=None))  # as a restore leaves it
    plane.clock.advance(FIRST + 5 * STEP - plane.clock.now_ms())

    tick(plane)

    assert all_runs(plane) == []
    assert view(plane).next_fire_at_ms == FIRST + 6 * STEP


def test_a_firing_that_fails_changes_nothing_and_the_others_go_on(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    put(plane, task="a")
    put(plane, task="b")
    plane.clock.advance(FIRST - plane.clock.now_ms())
    real = firing.admit

    def failing(tx: Any, pinned: Any, origin: Any) -> Any:
        if pinned.task_id == "a":
            real(tx, pinned, origin)
            raise Conflict("it went wrong behind the admission")
        return real(tx, pinned, origin)

    monkeypatch.setattr(firing, "admit", failing)
    events = Events()
    trio.run(Maintenance(plane.database, plane.artifacts, plane.settings, events).fire)

    assert [row.task_id for row in all_runs(plane)] == ["b"]
    assert events.names.count("trigger_stuck") == 1
    assert events.names.count("trigger_fired") == 1
