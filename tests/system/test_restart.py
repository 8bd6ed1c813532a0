"""What a worker's end does not end: commands, sessions, results."""

import os
import signal
from pathlib import Path

import pytest

from .world import Box


def held_run(box: Box, tmp_path: Path) -> tuple[str, Path, Path]:
    """A run that says it is there once, counts itself, and waits for a word."""
    go_on, counted = tmp_path / "go-on", tmp_path / "counted"
    os.mkfifo(go_on)
    return box.run(f"echo x >> {counted}; echo started; cat {go_on}; echo ended"), go_on, counted


@pytest.mark.req("R3", "R167", "R171", "R541")
def test_a_killed_workers_command_goes_on_and_is_adopted_and_completed(box: Box, tmp_path: Path) -> None:
    first = box.start()
    run_id, go_on, counted = held_run(box, tmp_path)
    box.follow(run_id, until=b"started\n")
    first.wait_event("command_started")

    first.kill()
    second = box.start()
    second.wait_event("session_continued")
    go_on.write_text("between\n")
    detail, output = box.finish(run_id)

    assert (detail.run.status, detail.run.exit_code, len(detail.attempts)) == ("succeeded", 0, 1)
    assert output == b"started\nbetween\nended\n"
    assert counted.read_text() == "x\n"
    assert second.stop() == 0


def test_a_command_that_ends_while_no_worker_runs_is_completed_by_the_next(box: Box, tmp_path: Path) -> None:
    first = box.start()
    run_id, go_on, counted = held_run(box, tmp_path)
    box.follow(run_id, until=b"started\n")
    first.wait_event("command_started")

    first.kill()
    go_on.write_text("between\n")
    receipt = box.state / "receipts"
    while not list(receipt.rglob("*.json")):
        os.sched_yield()
    second = box.start()
    detail, output = box.finish(run_id)

    assert (detail.run.status, output) == ("succeeded", b"started\nbetween\nended\n")
    assert counted.read_text() == "x\n"
    second.stop()


def test_sigterm_leaves_the_command_alone_frees_the_journal_and_exits_0(box: Box, tmp_path: Path) -> None:
    first = box.start()
    run_id, go_on, _ = held_run(box, tmp_path)
    box.follow(run_id, until=b"started\n")

    assert first.stop() == 0
    assert not (box.state / "journal/.owner.lock").exists()
    second = box.start()
    second.wait_event("session_continued")
    go_on.write_text("")

    assert box.finish(run_id)[0].run.status == "succeeded"
    second.stop()


def test_a_second_worker_on_the_same_journal_exits_3_and_harms_nothing(box: Box) -> None:
    first = box.start()
    first.wait_event("session_registered")
    second = box.start()

    assert second.wait() == 3
    assert f"pid {first.pid}" in second.text() or str(first.pid) in second.text()
    assert box.finish(box.run("true"))[0].run.status == "succeeded"
    assert first.stop() == 0


def test_a_drained_worker_finishes_its_command_signs_off_and_exits_0(box: Box, tmp_path: Path) -> None:
    worker = box.start()
    run_id, go_on, _ = held_run(box, tmp_path)
    box.follow(run_id, until=b"started\n")

    worker.signal(signal.SIGUSR1)
    worker.wait_event("session_draining")
    waiting = box.run("true")
    go_on.write_text("")

    assert worker.wait() == 0
    assert box.show(run_id).run.status == "succeeded"
    assert box.show(waiting).run.status == "queued"
    assert worker.has_event("session_offline")
    assert not (box.state / "journal/session.json").exists()


def test_a_worker_started_after_a_drain_registers_anew_and_works(box: Box) -> None:
    worker = box.start()
    worker.wait_event("session_registered")
    worker.signal(signal.SIGUSR1)
    assert worker.wait() == 0

    again = box.start()
    again.wait_event("session_registered")

    assert box.finish(box.run("true"))[0].run.status == "succeeded"
    again.stop()


def test_a_control_plane_that_restarts_interrupts_nothing(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    from .world import World

    world = World(tmp_path_factory.mktemp("restarted"))
    world.start()
    box = world.add_worker()
    worker = box.start()
    run_id, go_on, counted = held_run(box, tmp_path)
    box.follow(run_id, until=b"started\n")
    worker.wait_event("command_started")

    world.stop(signal.SIGKILL)
    go_on.write_text("")
    worker.wait_event("step_deferred")
    world.start()
    detail, output = box.finish(run_id)

    assert (detail.run.status, output, counted.read_text()) == ("succeeded", b"started\nended\n", "x\n")
    assert worker.stop() == 0
    world.stop()
