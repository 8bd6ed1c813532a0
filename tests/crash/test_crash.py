"""A worker killed before and after every step of a run, its launcher at every step of its own, and the worker at random.

`make crash` kills both at once as well, and in as many random rounds as one likes.
"""

import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from qlworker.domain.identity import DurableHandle

from .faults import Case, Faults, Outcome, cases
from .harness import KINDS, Site, make_world
from .outcome import Expected, Fault, Seen, Tally, faults, outcome
from .rounds import plan, run_rounds
from .steps import run_case

# Every point of the worker, and half of the launcher's own; `make crash` has them all.
IN_THE_SUITE = [
    case for case in cases() if case.faults.die or (case.faults.launcher.startswith("before:") and not case.faults.with_worker)
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory):
    world = make_world(tmp_path_factory.mktemp("crash") / "world")
    site = Site(world)
    yield site
    if site.worker is not None and site.worker.is_running():
        site.worker.kill()
    world.stop()


@pytest.mark.req("R1", "R2", "R4", "R5", "R6", "R7", "R162", "R163", "R167", "R168", "R169", "R170", "R171", "R178", "R541")
@pytest.mark.parametrize("case", IN_THE_SUITE, ids=lambda case: case.name)
def test_a_command_runs_at_most_once_and_its_end_is_proven_or_honestly_unknown(site: Site, case: Case) -> None:
    tally = Tally()

    run_case(site, case, tally)

    assert tally.is_clean, "\n".join(tally.notes)


@pytest.mark.req("R23")
def test_a_record_says_running_only_after_the_control_plane_does(site: Site) -> None:
    shutil.rmtree(site.box.state, ignore_errors=True)
    (run_id,) = site.run(KINDS["quick"])

    assert site.start(Faults(die="before:ask running")).wait() == -signal.SIGKILL

    assert (site.records()[run_id]["state"], site.box.show(run_id).run.status) == ("started", "dispatching")
    site.start(Faults())
    assert site.settle([run_id])
    assert site.worker is not None
    site.worker.stop()


def test_a_launcher_slow_to_say_that_nothing_ran_is_not_taken_for_a_running_command(site: Site) -> None:
    shutil.rmtree(site.box.state, ignore_errors=True)
    (run_id,) = site.run(KINDS["quick"])
    faults = Faults(die="before:open gate", launcher="before:receipt", launcher_stops=True)
    assert site.start(faults).wait() == -signal.SIGKILL
    handle = DurableHandle.parse(site.records()[run_id]["executorHandle"])

    worker = site.start(Faults())
    worker.wait_event("session_continued")
    deadline = time.monotonic() + 3
    while site.box.show(run_id).run.status != "running" and time.monotonic() < deadline:
        os.sched_yield()
    os.kill(handle.p, signal.SIGCONT)
    settled = site.settle([run_id])
    worker.stop()

    (found,) = site.look([run_id])
    assert settled
    assert (outcome(found), found.started) == (Outcome.NOT_STARTED, 0)


@pytest.mark.req("R1", "R3", "R5", "R162", "R168")
def test_random_kills_lost_answers_frozen_workers_and_full_disks_double_and_lose_nothing() -> None:
    seed = secrets.randbelow(1_000_000)

    with tempfile.TemporaryDirectory(prefix="crash-") as short:  # a Unix socket's path has at most 107 bytes
        tally = run_rounds(Path(short) / "rounds", seed, 3)

    assert tally.rounds == 3
    assert tally.executions > 0
    assert tally.is_clean, f"seed {seed}\n" + "\n".join(tally.notes)


def test_a_seed_makes_the_same_plan_again_and_other_seeds_other_plans() -> None:
    assert [plan(7, number, with_disk=True) for number in range(5)] == [plan(7, number, with_disk=True) for number in range(5)]
    assert plan(7, 1, with_disk=True) != plan(8, 1, with_disk=True)


def seen(**changes: object) -> Seen:
    facts = {"run_id": "r", "attempt_id": "a", "status": "failed", "is_over": True, "exit_code": 3, "error_code": None}
    facts |= {"started": 1, "ended": 1, "record": "completion_acknowledged", "is_behind_barrier": True, "has_handle": True}
    return Seen(**{**facts, "has_receipt": False, "plan_sent": True, **changes})  # type: ignore[arg-type]


LIMBO = {"status": "running", "is_over": False, "exit_code": None}
NEVER = {"started": 0, "ended": 0, "has_handle": False, "plan_sent": False}


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({}, None),
        ({"started": 2}, Fault.DOUBLE),
        ({"exit_code": 4}, Fault.WRONG_EXIT_CODE),
        ({"status": "succeeded", "exit_code": 0}, Fault.WRONG_EXIT_CODE),
        ({"started": 0, "ended": 0}, Fault.WRONG_EXIT_CODE),
        ({"error_code": "EXECUTOR_START_FAILED", "exit_code": None}, Fault.WRONG_EXIT_CODE),
        ({"error_code": "EXECUTOR_START_FAILED", "exit_code": None, **NEVER}, None),
        (
            {"error_code": "EXECUTOR_START_FAILED", "exit_code": None, **NEVER, "is_behind_barrier": False},
            Fault.WRONG_EXIT_CODE,
        ),
        ({**LIMBO, "record": "started"}, Fault.LOST_COMPLETION),
        ({**LIMBO, "record": "recovery_required"}, Fault.LOST_COMPLETION),
        ({**LIMBO, "record": "recovery_required", "ended": 0}, Fault.UNKNOWN_NOT_ALLOWED),
        ({**LIMBO, **NEVER, "record": "recovery_required"}, None),
        ({**LIMBO, **NEVER, "record": "recovery_required", "plan_sent": True}, Fault.UNKNOWN_NOT_ALLOWED),
        ({**LIMBO, **NEVER, "record": None}, Fault.UNKNOWN_NOT_ALLOWED),
    ],
)
def test_every_broken_promise_is_seen(facts: dict[str, object], fault: Fault | None) -> None:
    assert faults(seen(**facts), Expected("failed", 3)) == ([] if fault is None else [fault])


def test_a_point_that_leaves_only_one_outcome_open_allows_no_other() -> None:
    unknown = seen(**{**LIMBO, **NEVER, "record": "recovery_required"})

    assert faults(unknown, Expected("failed", 3), frozenset({Outcome.UNKNOWN})) == []
    assert faults(unknown, Expected("failed", 3), frozenset({Outcome.RAN})) == [Fault.UNKNOWN_NOT_ALLOWED]
    assert faults(seen(), Expected("failed", 3), frozenset({Outcome.UNKNOWN})) == [Fault.WRONG_EXIT_CODE]
