"""The command line: exit codes, one clear line for every error, and a drain that signals the owner and nobody else."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker import __version__, cli
from qlworker.adapters.process_table import read_place, read_stat
from qlworker.cli.drain import signal_owner
from qlworker.domain.errors import (
    CapacityExceeded,
    Corrupt,
    Fenced,
    Misconfigured,
    OwnershipHeld,
    OwnershipLost,
    QlworkerError,
    Transient,
    Unauthorized,
)
from qlworker.domain.identity import ProcessId
from qlworker.domain.ownership import OwnerRecord

from .pki import Files, make_token

NO_PROCESS = 2**22 + 1  # above the largest pid of Linux


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration of which everything exists."""
    credentials = Files(tmp_path / "credentials").write()
    (tmp_path / "state").mkdir(mode=0o700)
    file = tmp_path / "qlworker.toml"
    file.write_text(f"""
[worker]
id = "edge-1"
[control_plane]
origin = "https://127.0.0.1:1"
[credentials]
certificate = "{credentials.certificate}"
key = "{credentials.key}"
trust_anchors = "{credentials.anchors}"
token = "{credentials.token}"
[state]
directory = "{tmp_path / "state"}"
""")
    return file


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qlworker", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_version_tells_the_version() -> None:
    found = program("version")

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"qlworker {__version__} (python 3.")
    assert json.loads(program("version", "--json").stdout)["version"] == __version__


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--speed", "9"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    found = program(*arguments)

    assert found.returncode == 2
    assert "usage: qlworker" in found.stderr


def test_the_table_of_the_keys_can_be_printed() -> None:
    found = program("config-table")

    assert found.returncode == 0
    assert "| `session.lease_s` | `120` | 15 to 600 seconds |" in found.stdout


@pytest.mark.parametrize("command", ["run", "drain"])
def test_a_wrong_configuration_exits_2_with_one_line(config: Path, command: str) -> None:
    config.write_text(config.read_text() + "[session]\nlease_s = 3\n")

    found = program(command, "--config", config)

    assert found.returncode == 2
    assert found.stderr == f"qlworker: {config}: session.lease_s = 3: must be 15 to 600 seconds\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Misconfigured("x"), 2),
        (OwnershipHeld("x"), 3),
        (OwnershipLost("x"), 3),
        (Corrupt("x"), 3),
        (Transient("x"), 4),
        (Unauthorized("x"), 1),
        (Fenced("x"), 1),
        (CapacityExceeded("x"), 1),
        (QlworkerError("x"), 1),
        (ExceptionGroup("tasks", [Transient("x"), ExceptionGroup("more", [Transient("x")])]), 4),
        (ExceptionGroup("tasks", [Transient("x"), Corrupt("x")]), 3),
        (ExceptionGroup("tasks", [Transient("x"), Misconfigured("x")]), 2),
        (KeyboardInterrupt(), 1),
    ],
)
def test_every_error_has_its_exit_code_and_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(_options: object) -> int:
        raise error

    monkeypatch.setattr("qlworker.cli.version.execute", fail)

    assert cli.main(["version"]) == code
    assert capsys.readouterr().err == ("" if isinstance(error, KeyboardInterrupt) else "qlworker: x\n")


@pytest.mark.parametrize("error", [RuntimeError("bug"), ExceptionGroup("tasks", [Transient("x"), RuntimeError("bug")])])
def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_options: object) -> int:
        raise error

    monkeypatch.setattr("qlworker.cli.version.execute", fail)

    with pytest.raises(type(error)):
        cli.main(["version"])


def checks(config: Path) -> dict[str, tuple[bool, str]]:
    found = program("check", "--json", "--config", config)
    answer = json.loads(found.stdout)
    assert answer["ok"] is (found.returncode == 0)
    assert found.returncode in {0, 2}
    return {row["check"]: (row["ok"], row["detail"]) for row in answer["checks"]}


def test_check_finds_everything_in_order_and_makes_nothing(config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = program("check", "--config", config)

    assert found.returncode == 0, found.stdout
    assert all(line.startswith("ok ") for line in found.stdout.splitlines())
    assert [name for name, (is_ok, _) in checks(config).items() if is_ok] == [
        "configuration",
        "credentials",
        "state directory",
        "journal",
        "receipts",
        "output",
        "capabilities",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_check_tells_what_is_wrong_with_each_thing(config: Path, tmp_path: Path) -> None:
    (tmp_path / "credentials" / "token").chmod(0o644)
    (tmp_path / "state").chmod(0o755)
    (tmp_path / "state" / "journal").write_text("")

    found = checks(config)

    assert {name for name, (is_ok, _) in found.items() if not is_ok} == {"credentials", "state directory", "journal"}
    assert "chmod go-rwx" in found["credentials"][1]
    assert "chmod 0700" in found["state directory"][1]
    assert make_token() not in json.dumps(found)


def test_check_of_a_missing_configuration_says_so(tmp_path: Path) -> None:
    found = program("check", "--config", tmp_path / "none.toml")

    assert found.returncode == 2
    assert re.match(r"failure configuration: cannot read .*none\.toml", found.stdout)


OWNER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
print("ready", flush=True)
print(signal.Signals(signal.sigwait({signal.SIGUSR1, signal.SIGTERM})).name, flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.stdout.close()
    process.wait()


def lock(journal: Path, pid: int, **changes: Any) -> Path:
    """The record that `pid` would have left."""
    stat = read_stat(pid)
    process = ProcessId(pid, "1") if stat is None else stat.process
    record = msgspec.structs.replace(OwnerRecord.of(read_place("host"), process, "0" * 32), **changes)
    directory = journal / ".owner.lock"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "owner.json").write_bytes(record.to_json())
    return journal


def test_drain_signals_the_worker_that_owns_the_journal(config: Path, tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    lock(tmp_path / "state" / "journal", owner.pid)

    found = program("drain", "--config", config)

    assert (found.returncode, found.stderr) == (0, "")
    assert f"worker {owner.pid} drains" in found.stdout
    assert owner.stdout is not None
    assert owner.stdout.readline() == "SIGUSR1\n"


def test_drain_without_a_worker_exits_1_and_says_so(config: Path, tmp_path: Path) -> None:
    found = program("drain", "--config", config)

    assert found.returncode == 1
    assert found.stderr == f"qlworker: no worker runs on {tmp_path / 'state' / 'journal'}\n"


@pytest.mark.parametrize("changes", [{"start_ticks": "1"}, {"boot_id": "another-boot"}])
def test_a_stranger_with_the_owners_number_is_never_signalled(
    tmp_path: Path, owner: subprocess.Popen[str], changes: dict[str, str]
) -> None:
    journal = lock(tmp_path / "journal", owner.pid, **changes)

    assert signal_owner(journal, signal.SIGUSR1) is None
    owner.send_signal(signal.SIGTERM)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "SIGTERM\n"


def test_a_worker_that_is_gone_or_a_zombie_is_no_worker(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)

    assert signal_owner(lock(tmp_path / "a", zombie.pid), signal.SIGUSR1) is None
    assert signal_owner(lock(tmp_path / "b", NO_PROCESS), signal.SIGUSR1) is None
    zombie.wait()


def test_a_worker_in_another_container_is_left_alone(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    with pytest.raises(Misconfigured, match="another container"):
        signal_owner(lock(tmp_path / "journal", owner.pid, pid_namespace=1), signal.SIGUSR1)


def test_a_damaged_record_names_no_process(tmp_path: Path) -> None:
    journal = lock(tmp_path / "journal", os.getpid())
    (journal / ".owner.lock" / "owner.json").write_text("{")

    with pytest.raises(QlworkerError, match="no record of an owner"):
        signal_owner(journal, signal.SIGUSR1)


def test_a_file_that_cannot_be_used_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(_: object) -> int:
        raise ExceptionGroup("nursery", [OSError(errno.EROFS, "Read-only file system", "/state/journal")])

    monkeypatch.setattr(cli.version, "execute", execute)

    assert cli.main(["version"]) == cli.Exit.FAILED
    assert capsys.readouterr().err == "qlworker: cannot use /state/journal: read-only file system\n"
