"""A QingLong 2.x crontab becomes task files, and every line is accounted for."""

import json
import subprocess
from pathlib import Path

import pytest

from qlworker.control.schedule.qinglong import Carried, Target, carry_over
from qlworker.control.task_file import parse_task
from qlworker.domain.errors import Misconfigured
from tests.control.running import command

TARGET = Target(project="panel", timezone="Asia/Shanghai")
CRONTAB = """\
0 3 * * * ID=1 /usr/bin/curl -fsS https://example.net/ping
15 */2 * * * ID=2 task repo/script.js now
# 0 4 * * * ID=3 /bin/echo disabled
# */30 * * * * * ID=4 /bin/echo six fields
# a comment of somebody
@reboot ID=5 /bin/echo boot
0 0 30 2 * ID=6 /bin/echo never
nonsense

"""


def verdicts(carried: list[Carried]) -> list[tuple[int, str]]:
    return [(each.place, each.verdict) for each in carried]


def test_every_line_of_a_crontab_is_accounted_for() -> None:
    carried = carry_over(CRONTAB.encode(), TARGET)

    assert verdicts(carried) == [
        (1, "carried over"),
        (2, "look at it"),
        (3, "carried over"),
        (4, "carried over"),
        (5, "left"),
        (6, "look at it"),
        (7, "look at it"),
        (8, "left"),
    ]
    plain, panel, disabled, seconds, comment, boot, never, nonsense = carried
    assert plain.definition is not None
    assert plain.definition.command.shell == "/usr/bin/curl -fsS https://example.net/ping"
    assert [(each.cron, each.timezone, each.enabled) for each in plain.definition.triggers] == [
        ("0 3 * * *", "Asia/Shanghai", True)
    ]
    assert panel.notes == ["`task` is a program of the panel: put what it runs on the worker and call that"]
    assert disabled.definition is not None
    assert disabled.definition.triggers[0].enabled is False
    assert seconds.definition is not None
    assert seconds.definition.triggers[0].enabled is True
    for each, reason in ((boot, "@reboot"), (never, "never comes")):
        assert each.definition is not None
        assert each.definition.triggers == []
        assert reason in each.notes[0]
    assert (comment.notes, nonsense.definition) == (["it is a comment"], None)


def test_the_panels_json_is_read_with_names_further_schedules_and_commands_around() -> None:
    jobs = [
        {"id": 7, "name": "nightly backup", "command": "/bin/backup", "schedule": "0 3 * * *", "isDisabled": 0},
        {
            "id": 8,
            "name": "中文",
            "command": "/bin/work",
            "schedule": "0 0 * * *",
            "extra_schedules": [{"schedule": "0 12 * * *"}],
            "task_before": "echo before",
            "task_after": "echo after",
            "isDisabled": 1,
        },
        {"id": 9, "name": "nightly backup", "command": "/bin/other", "schedule": "0 5 * * *"},
        {"name": "no command"},
        "not even an object",
    ]

    carried = carry_over(json.dumps({"code": 200, "data": {"data": jobs, "total": 5}}).encode(), TARGET)

    assert verdicts(carried) == [(1, "carried over"), (2, "look at it"), (3, "carried over"), (4, "left"), (5, "left")]
    ids = [each.definition.id for each in carried if each.definition is not None]
    assert ids == ["nightly-backup", "qinglong-8", "nightly-backup-9-3"]
    second = carried[1].definition
    assert second is not None
    assert second.command.shell == "echo before\n/bin/work\necho after"
    assert [(each.name, each.cron, each.enabled) for each in second.triggers] == [
        ("panel", "0 0 * * *", False),
        ("panel-2", "0 12 * * *", False),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[1, 2", "is none"),
        (b'{"code": 401}', "must be an array"),
        (b"\xff\xfe", "UTF-8"),
        (b"#" * (4 * 2**20 + 1), "at most"),
    ],
)
def test_a_file_that_is_no_export_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Misconfigured, match=reason):
        carry_over(data, TARGET)


def imported(export: Path, out: Path, *options: str) -> "subprocess.CompletedProcess[bytes]":
    return command("import", "qinglong", str(export), "--out", str(out), *options)


def test_the_command_writes_files_that_can_be_applied_and_reports_line_by_line(tmp_path: Path) -> None:
    export, out = tmp_path / "crontab.list", tmp_path / "tasks"
    export.write_text(CRONTAB)

    done = imported(export, out, "--worker", "router-1", "--timezone", "Europe/Berlin")

    assert done.returncode == 0, done.stderr
    report = done.stdout.decode().splitlines()
    assert len(report) == 1 + 8
    assert "6 of 8 carried over" in done.stderr.decode()
    files = sorted(out.glob("*.toml"))
    assert len(files) == 6
    for file in files:
        task = parse_task(file.read_bytes(), str(file))
        assert (task.project, task.worker) == ("qinglong", "router-1")
    assert "# `task` is a program of the panel" in (out / "qinglong-2.toml").read_text()


def test_nothing_is_written_over_and_a_wrong_export_writes_nothing(tmp_path: Path) -> None:
    export, out = tmp_path / "export.json", tmp_path / "tasks"
    export.write_text("[")
    assert imported(export, out).returncode == 2
    assert not out.exists()
    export.write_text(CRONTAB)
    out.mkdir()

    done = imported(export, out)

    assert done.returncode == 3
    assert b"name a new directory" in done.stderr
    assert list(out.iterdir()) == []


def test_an_export_of_which_nothing_can_be_carried_over_is_a_failure(tmp_path: Path) -> None:
    export = tmp_path / "crontab.list"
    export.write_text("# only a comment\n")

    assert imported(export, tmp_path / "tasks").returncode == 1
