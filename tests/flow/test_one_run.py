"""One run from offer to completion: the order of everything, and a sudden end at every step of it."""

from pathlib import Path

import pytest

from qlworker.domain.record import RecoveryReason, State
from tests.builders import make_revision
from tests.flow.rig import World, outlive

OPENING = [
    "request register",
    "session write",
    "request heartbeat",
    "session write",
    "claim write",
    "request offers",
]
RUN = [
    "journal accepted",
    "claim remove",
    "request starting",
    "journal starting_acknowledged",
    "output prepare",
    "journal launching",
    "executor launch",
    "journal started",
    "gate open",
    "request running",
    "journal running_acknowledged",
    "receipt read",
    "receipt read",
    "output seal",
    "request artifacts",
    "request completion",
    "journal completion_acknowledged",
    "receipt remove",
]


def moments(steps: list[str]) -> list[str]:
    """Each step as the moments a worker can end at: before it, carried out by the other side, and after it."""
    found: list[str] = []
    for step in steps:
        found.append(step)
        if step.startswith("request "):
            found.append(step.replace("request ", "performed "))
        found.append(f"{step}: done")
    return found


MOMENTS = moments([*OPENING, *RUN])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def run_through(world: World) -> None:
    """One worker's life until the record is at rest, as far as it gets."""

    async def life() -> None:
        async with world.worker() as worker:
            await worker.until(lambda: any(record.is_settled for record in world.records()) or has_recovery(world))
            await worker.settle()

    await outlive(life)


def has_recovery(world: World) -> bool:
    return any(record.state is State.RECOVERY_REQUIRED for record in world.records())


@pytest.mark.req("R128", "R129", "R136", "R138", "R140", "R147", "R149", "R150", "R152", "R162", "R176", "R197", "R225")
async def test_the_steps_of_one_run_come_in_exactly_this_order(world: World) -> None:
    world.control.enqueue(make_revision())
    world.processes.runs_ms = 1_000

    await run_through(world)

    assert world.trace == MOMENTS


# Behind the barrier on disk and before there is a launcher nobody is left to say that nothing ran (ADR-0111 §3).
UNDECIDABLE = {"journal launching: done", "executor launch"}
BEFORE_THE_GATE = MOMENTS[MOMENTS.index("executor launch: done") : MOMENTS.index("gate open") + 1]


@pytest.mark.req("R1", "R3", "R4", "R5", "R6", "R7", "R155", "R159", "R163", "R167", "R169", "R170", "R233")
@pytest.mark.parametrize("number", range(len(MOMENTS)), ids=lambda number: f"{number}-{MOMENTS[number]}")
async def test_a_worker_that_ends_at_any_step_leaves_a_run_that_is_started_once_and_ends_right(
    world: World, number: int
) -> None:
    attempt = world.control.enqueue(make_revision())
    world.processes.runs_ms = 1_000
    world.kill_at = number + 1

    await run_through(world)
    world.kill_at = None
    await run_through(world)

    record = world.read()
    assert world.trace[number] == MOMENTS[number]
    assert len(world.processes.commands) <= 1
    if MOMENTS[number] in UNDECIDABLE:
        assert (world.processes.opened, attempt.status) == (0, "starting")
        assert (record.state, record.recovery_reason) == (State.RECOVERY_REQUIRED, RecoveryReason.LAUNCH_OUTCOME_UNKNOWN)
    elif MOMENTS[number] in BEFORE_THE_GATE:
        assert (world.processes.opened, attempt.status, attempt.error_code) == (0, "failed", "EXECUTOR_START_FAILED")
        assert record.state is State.START_FAILURE_ACKNOWLEDGED
    else:
        assert (world.processes.opened, attempt.status, attempt.exit_code) == (1, "succeeded", 0)
        assert record.state is State.COMPLETION_ACKNOWLEDGED
        assert world.receipt_files() == [] or MOMENTS[number] in ("journal completion_acknowledged: done", "receipt remove")


@pytest.mark.req("R167")
@pytest.mark.parametrize("second", range(0, 24, 3))
@pytest.mark.parametrize("number", range(12, len(MOMENTS), 4), ids=lambda number: f"{number}-{MOMENTS[number]}")
async def test_a_second_end_during_the_recovery_starts_nothing_twice_either(world: World, number: int, second: int) -> None:
    world.control.enqueue(make_revision())
    world.processes.runs_ms = 1_000
    world.kill_at = number + 1

    await run_through(world)
    world.kill_at = number + 1 + second
    await run_through(world)
    world.kill_at = None
    await run_through(world)

    assert world.processes.opened <= 1
    assert len(world.processes.commands) <= 1
    assert world.read().is_settled or has_recovery(world)
