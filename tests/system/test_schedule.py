"""A task that runs by itself, from its file in a directory to the command on the worker."""

from pathlib import Path

import pytest

from qlworker.control.operator_api import RunView, TriggerView

from .world import PROJECT, Box

TASK = """
project = "{project}"
id = "{name}"
worker = "{worker}"
[command]
shell = "echo done >> {marks}"
[placement]
support_tiers = ["tier1", "candidate", "experimental", "legacy-only"]
[[triggers]]
name = "each-second"
cron = "* * * * * *"
"""


@pytest.mark.req("R526")
def test_an_applied_trigger_runs_its_command_once_per_fire_time_until_its_file_is_gone(box: Box, tmp_path: Path) -> None:
    directory, marks, task = tmp_path / "tasks", tmp_path / "marks", f"{box.name}-scheduled"
    directory.mkdir()
    file = directory / "task.toml"
    file.write_text(TASK.format(project=PROJECT, name=task, worker=box.name, marks=marks))
    (directory / "other.toml").write_text(f'project = "{PROJECT}"\nid = "{task}-idle"\n[command]\nshell = "true"\n')
    worker = box.start()
    box.world.control("apply", str(directory), "--config", str(box.world.settings))
    worker.wait_event("run_completed", 3)

    file.unlink()
    box.world.control("apply", str(directory), "--config", str(box.world.settings))
    with box.world.operator() as operator:
        runs = operator.call(list[RunView], "GET", "/runs", task=task, limit=500)
        triggers = [each for each in operator.call(list[TriggerView], "GET", "/triggers") if each.task == task]
    for run in runs:
        box.finish(run.id)
    worker.stop()

    assert triggers == []
    assert len(runs) >= 3
    assert len(marks.read_text().splitlines()) == len(runs)
    assert {box.show(run.id).run.status for run in runs} == {"succeeded"}
