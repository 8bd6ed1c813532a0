"""A worker killed before and after every step of a run, and what the next worker makes of it."""

from pathlib import Path

import pytest

from .dying_worker import STEPS
from .world import Box

BARRIER = STEPS.index("write launching")
GATE = STEPS.index("open gate")

# Killed here nobody can prove whether the launch happened: the launcher was not spawned, or not yet given its capability.
UNPROVABLE = {("after", "write launching"), ("before", "launch")}


@pytest.mark.req("R1", "R2", "R4", "R5", "R6", "R7", "R162", "R163", "R167", "R168", "R169", "R170", "R171", "R178", "R541")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_command_runs_at_most_once_and_its_end_is_proven_or_honestly_unknown(
    box: Box, tmp_path: Path, when: str, step: str
) -> None:
    box.world.put_secret("word", "hidden")
    counted = tmp_path / "counted"
    run_id = box.run(f"echo x >> {counted}; echo output", environment={"secret": {"WORD": "word"}})

    dying = box.start("-m", "tests.system.dying_worker", f"{when}:{step}")
    assert dying.wait() == -9
    second = box.start()
    second.wait_event("journal_read")

    if (when, step) in UNPROVABLE:
        event = second.wait_event("evidence_judged")
        assert (event["state"], event["verdict"]) == ("launching", "unknown")
        assert box.show(run_id).run.status == "dispatching"
        assert not counted.exists()
    else:
        detail, output = box.finish(run_id)
        gate_was_opened = STEPS.index(step) > GATE or (when, step) == ("after", "open gate")
        barrier_was_raised = STEPS.index(step) > BARRIER or (when, step) == ("after", "write launching")
        if barrier_was_raised and not gate_was_opened:
            # The launcher read end of file at its gate and said so: proof that nothing ran, and never will.
            assert (detail.run.status, detail.run.error_code) == ("failed", "EXECUTOR_START_FAILED")
            assert not counted.exists()
        else:
            assert (detail.run.status, detail.run.exit_code, output) == ("succeeded", 0, b"output\n")
            assert counted.read_text() == "x\n"
        assert len(detail.attempts) == 1
        if STEPS.index(step) < STEPS.index("write completion_acknowledged") or (when, step) == ("before", STEPS[-2]):
            second.wait_event("start_failure_reported" if not counted.exists() else "run_completed")
    assert second.stop() == 0
    (record,) = box.records()
    assert record["state"] in ("completion_acknowledged", "start_failure_acknowledged", "recovery_required")
    assert (record["state"] == "recovery_required") is ((when, step) in UNPROVABLE)


@pytest.mark.req("R23")
def test_a_record_says_running_only_after_the_control_plane_does(box: Box) -> None:
    run_id = box.run("true")

    assert box.start("-m", "tests.system.dying_worker", "before:ask running").wait() == -9
    (before,) = box.records()
    assert (before["state"], box.show(run_id).run.status) == ("started", "dispatching")
