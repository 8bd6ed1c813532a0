"""Task files in a directory: a plan tells what an application does, all of it happens or nothing, and again changes nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker.control.operator_api import Applied, TriggerView
from qlworker.control.schedule.plan import PlanOnly, apply
from qlworker.control.schedule.triggers import listed
from qlworker.control.task_file import TaskDefinition, parse_task, task_text
from qlworker.domain.errors import Conflict
from tests.control.fixtures import Plane
from tests.control.running import ControlPlane

TASK = """
project = "home"
id = "{name}"
[command]
shell = "{shell}"
[[triggers]]
name = "nightly"
cron = "0 3 * * *"
timezone = "Europe/Berlin"
"""


def definition(name: str, shell: str = "true", **changes: Any) -> TaskDefinition:
    content = {
        "project": "home",
        "id": name,
        "command": {"shell": shell},
        "triggers": [{"name": "nightly", "cron": "0 3 * * *"}],
    }
    return msgspec.convert({**content, **changes}, TaskDefinition)


def applied(plane: Plane, *definitions: TaskDefinition, source: str = "git") -> list[str]:
    return told(plane.database.transact(apply, list(definitions), source, is_plan=False))


def planned(plane: Plane, *definitions: TaskDefinition) -> list[str]:
    with pytest.raises(PlanOnly) as plan:
        plane.database.transact(apply, list(definitions), "git", is_plan=True)
    return told(plan.value.applied)


def told(result: Applied) -> list[str]:
    return [
        f"{task.id} {task.change} {' '.join(f'{each.name}:{each.change}' for each in task.triggers)}".strip()
        for task in result.tasks
    ]


def test_applying_again_changes_nothing(plane: Plane) -> None:
    assert applied(plane, definition("a"), definition("b")) == ["a new nightly:new", "b new nightly:new"]
    before = plane.snapshot()

    assert applied(plane, definition("a"), definition("b")) == [
        "a unchanged nightly:unchanged",
        "b unchanged nightly:unchanged",
    ]

    assert plane.snapshot() == before


def test_a_plan_tells_what_will_be_done_and_does_nothing(plane: Plane) -> None:
    applied(plane, definition("a"), definition("b"))
    before = plane.snapshot()
    following = (definition("a", "echo other"), definition("c"))

    plan = planned(plane, *following)

    assert plan == ["a changed nightly:changed", "c new nightly:new", "b unchanged nightly:removed"]
    assert plane.snapshot() == before
    assert applied(plane, *following) == plan


def test_a_new_revision_keeps_a_triggers_time_and_a_new_line_does_not(plane: Plane) -> None:
    applied(plane, definition("a", triggers=[{"name": "t", "cron": "*/5 * * * *"}]))
    (before,) = plane.database.transact(listed, 10)
    plane.clock.advance(10 * 60_000)

    applied(plane, definition("a", "echo other", triggers=[{"name": "t", "cron": "*/5 * * * *"}]))
    (same_line,) = plane.database.transact(listed, 10)
    applied(plane, definition("a", "echo other", triggers=[{"name": "t", "cron": "*/7 * * * *"}]))
    (other_line,) = plane.database.transact(listed, 10)

    assert (same_line.next_fire_at_ms, same_line.revision) == (before.next_fire_at_ms, 2)
    assert other_line.next_fire_at_ms is not None
    assert other_line.next_fire_at_ms > plane.clock.now_ms()


def test_what_another_source_applied_is_left_alone(plane: Plane) -> None:
    applied(plane, definition("a"), source="one")
    applied(plane, definition("b"), source="other")

    assert applied(plane, definition("c"), source="one") == ["c new nightly:new", "a unchanged nightly:removed"]

    assert [(each.task, each.source) for each in plane.database.transact(listed, 10)] == [("b", "other"), ("c", "one")]


def test_one_task_that_cannot_be_published_takes_everything_back(plane: Plane) -> None:
    before = plane.snapshot()

    with pytest.raises(Conflict, match="home/b: the task home/b is for the worker nobody"):
        applied(plane, definition("a"), definition("b", worker="nobody"))
    with pytest.raises(Conflict, match="two files define home/a"):
        applied(plane, definition("a"), definition("a", "echo other"))

    assert plane.snapshot() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"triggers": [{"name": "t", "cron": "0 0 30 2 *"}]}, "never comes"),
        ({"triggers": [{"name": "t", "cron": "* * * * *", "timezone": "Mars/Olympus"}]}, "timezone"),
        ({"triggers": [{"name": "t", "cron": "* * * * *", "surprise": 1}]}, "surprise"),
        ({"triggers": [{"name": "t", "cron": "* * * * *"}] * 2}, "a name of its own"),
        ({"triggers": [{"name": f"t{number}", "cron": "* * * * *"} for number in range(17)]}, "at most 16"),
        ({"triggers": [{"name": "t t", "cron": "* * * * *"}]}, "a trigger's name"),
        ({"triggers": [{"name": "t", "cron": "* * * * *", "misfire": "always"}]}, "Invalid enum"),
    ],
)
def test_a_trigger_that_is_none_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        definition("a", **change)


def test_a_definition_written_as_a_file_reads_back_the_same() -> None:
    whole = definition(
        "a",
        'echo "$A" \\\n\ttab é \x7f',
        environment={"public": {"A": 'quoted "value"'}, "secret": {}},
        placement={
            "labels": {"site": "home"},
            "runtimes": {"python": ">=3.11"},
            "preferred": [{"labels": {"a": "b"}, "weight": 5}],
        },
        timeout_s=1.5,
    )

    assert parse_task(task_text(whole, ["a note"]).encode(), "a.toml") == whole


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("apply") / "control") as running:
        yield running


def test_the_command_shows_a_plan_applies_it_and_says_when_nothing_changes(server: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name, place in (("cli-a", "a.toml"), ("cli-b", "below/b.toml")):
        (tmp_path / place).write_text(TASK.format(name=name, shell="true"))
    expected = "".join(
        f"new        home/{name}  revision 1\nnew        home/{name}  trigger nightly\n" for name in ("cli-a", "cli-b")
    )

    assert server.out("apply", str(tmp_path), "--plan") == expected
    assert server.out("apply", str(tmp_path)) == expected
    assert server.out("apply", str(tmp_path)) == "nothing changes\n"
    with server.operator() as operator:
        found = [each for each in operator.call(list[TriggerView], "GET", "/triggers") if each.task.startswith("cli-")]
    assert [(each.task, each.timezone, each.source) for each in found] == [
        ("cli-a", "Europe/Berlin", str(tmp_path)),
        ("cli-b", "Europe/Berlin", str(tmp_path)),
    ]
    assert "0 3 * * *" in server.out("trigger", "list")


def test_every_mistake_in_every_file_is_told_and_nothing_is_applied(server: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(TASK.format(name="good", shell="true"))
    (tmp_path / "key.toml").write_text(TASK.format(name="key", shell="true").replace("id =", "surprise = 1\nid ="))
    (tmp_path / "cron.toml").write_text(TASK.format(name="cron", shell="true").replace("0 3 * * *", "0 0 31 4 *"))

    done = server.run("apply", str(tmp_path))

    assert done.returncode == 2
    said = done.stderr.decode()
    assert "nothing was applied" in said
    assert "key.toml" in said
    assert "surprise" in said
    assert "cron.toml" in said
    assert "never comes" in said
    assert "home/good" not in server.out("task", "list")


@pytest.mark.parametrize("case", ["secret", "worker"])
def test_a_secret_or_worker_that_does_not_exist_is_named_and_nothing_is_applied(
    server: ControlPlane, tmp_path: Path, case: str
) -> None:
    (tmp_path / "first.toml").write_text(TASK.format(name=f"first-{case}", shell="true"))
    text = TASK.format(name=f"second-{case}", shell="true")
    wrong = {"secret": text + '[environment.secret]\nA = "no-such-secret"\n', "worker": 'worker = "no-such-worker"\n' + text}
    (tmp_path / "second.toml").write_text(wrong[case])

    done = server.run("apply", str(tmp_path))

    assert done.returncode in (1, 2)
    assert f"no-such-{case}" in done.stderr.decode()
    assert f"first-{case}" not in server.out("task", "list")


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_directory_without_task_files_is_refused(server: ControlPlane, tmp_path: Path, what: str) -> None:
    directory = tmp_path / what
    if what == "empty":
        directory.mkdir()

    done = server.run("apply", str(directory))

    assert done.returncode == 2
    assert str(directory) in done.stderr.decode()


def test_the_answer_as_json_is_the_answer(server: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TASK.format(name="json-a", shell="true"))

    answer = json.loads(server.out("apply", str(tmp_path), "--json"))

    assert [(task["id"], task["change"]) for task in answer["tasks"]] == [("json-a", "new")]
