"""The demonstration proves what it says, ends on a deviation, and leaves nothing behind however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-W", "error", "-m", "qlworker.control.demo"]
DEADLINE_S = 120


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory for temporary files: a Unix socket's path holds 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="ql-"))
    yield directory
    shutil.rmtree(directory)


def demonstration(place: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"TMPDIR": str(place), "PYTHONIOENCODING": "utf-8"},
    )


def mentioned(place: Path) -> list[int]:
    """Processes whose command line or environment names a directory of the demonstration."""
    name, found = os.fsencode(place / "qlworker-demo-"), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (name in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def assert_nothing_left(place: Path) -> None:
    assert mentioned(place) == []
    assert list(place.iterdir()) == []


def test_it_proves_the_main_job_from_end_to_end(place: Path) -> None:
    stdout, stderr = (process := demonstration(place)).communicate(timeout=DEADLINE_S)

    assert process.returncode == 0, stdout + stderr
    for fact in (
        "nobody gets in without a certificate",
        "its first line was seen live",
        "its exit code came through: 7",
        "the command ran exactly once",
        "the log is whole, live and stored: 40 lines",
        "no process is left",
    ):
        assert f"\u2713 {fact}" in stdout
    assert stderr == ""
    assert_nothing_left(place)


def test_idle_prints_the_worker_and_stops_when_its_input_ends(place: Path) -> None:
    process = demonstration(place, "--idle")
    assert process.stdout is not None
    name, _, pid = process.stdout.readline().strip().partition("=")

    assert name == "worker_pid"
    assert b"qlworker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout, stderr) == (0, "", "")
    assert_nothing_left(place)


def test_a_worker_that_dies_is_a_deviation(place: Path) -> None:
    process = demonstration(place, "--idle")
    assert process.stdout is not None
    pid = int(process.stdout.readline().strip().partition("=")[2])
    os.kill(pid, signal.SIGKILL)
    stderr = _wait(process)

    assert process.returncode == 1
    assert "the demonstration failed: the worker ended" in stderr
    assert "end of worker.log" in stderr
    assert_nothing_left(place)


def _wait(process: "subprocess.Popen[str]") -> str:
    """Its standard error once it has ended by itself; its input stays open until then."""
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.wait(DEADLINE_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    return stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_in_the_middle_of_a_run_leaves_nothing_behind(place: Path, number: int) -> None:
    process = demonstration(place)
    assert process.stdout is not None
    while "the worker got SIGKILL" not in (line := process.stdout.readline()):
        assert line, _wait(process)
    process.send_signal(number)
    stderr = _wait(process)

    assert process.returncode == 128 + number
    assert "nothing is left behind" in stderr
    assert_nothing_left(place)
