"""The contract of a launcher, over every implementation of it. It knows pipes, files and signals only."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qlworker.domain.receipt import Ending

from .launching import LAUNCHERS, Box, Fifo, Launch, adopted_orphans, eventually, obey_file_modes, wait_gone

Start = Callable[..., Launch]


@pytest.fixture(params=LAUNCHERS)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    running = []

    def launch(plan: Any, **popen: Any) -> Launch:
        running.append(Launch(LAUNCHERS[request.param], plan, **popen))
        return running[-1]

    yield launch
    for each in running:
        each.kill()


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def run(start: Start, plan: dict[str, Any], **popen: Any) -> None:
    """From start to receipt."""
    launch = start(plan, **popen)
    launch.held()
    launch.gate()
    assert launch.ended() == 0


def shell(box: Box, script: str, **changes: Any) -> dict[str, Any]:
    return box.plan("/bin/sh", "-c", script, **changes)


# The gate


def test_nothing_runs_before_the_gate_opens_and_the_command_runs_once_after(start: Start, box: Box) -> None:
    launch = start(box.plan(*box.marking()))
    command = launch.held()
    assert not box.marker.exists()
    assert not box.target.exists()
    assert Path(f"/proc/{command}/cmdline").read_bytes() == Path(f"/proc/{launch.pid}/cmdline").read_bytes()
    launch.gate()
    assert launch.ended() == 0
    assert box.marker.read_text() == "ran\n"
    assert box.receipt().ending is Ending.EXITED


@pytest.mark.parametrize("byte", [b"", b"g", b"\0"], ids=["end of file", "lower case", "NUL"])
def test_anything_but_the_byte_means_never_and_is_published(start: Start, box: Box, byte: bytes) -> None:
    launch = start(box.plan(*box.marking()))
    command = launch.held()
    launch.gate(byte)
    assert launch.ended() == 0
    wait_gone(command)
    assert not box.marker.exists()
    receipt = box.receipt()
    assert (receipt.ending, receipt.exit_code, receipt.reason) == (Ending.NOT_STARTED, 125, "gate_closed")
    assert receipt.says_not_started


def test_a_launcher_killed_before_the_gate_takes_the_command_with_it(start: Start, box: Box) -> None:
    with adopted_orphans():
        launch = start(box.plan(*box.marking()))
        command = launch.held()
        launch.process.kill()
        wait_gone(command)
        launch.process.wait()
        assert os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) == 125, "it ended by itself, without execve"
    assert not box.marker.exists()
    assert not box.target.exists()


def test_a_worker_that_dies_while_it_writes_the_plan_leaves_nothing(start: Start, box: Box) -> None:
    launch = start(b"")
    assert launch.ended() == 1
    assert not box.target.exists()


def test_a_command_killed_while_held_did_start_if_the_gate_was_opened_all_the_same(start: Start, box: Box) -> None:
    launch = start(box.plan(*box.marking()))
    os.kill(launch.held(), signal.SIGTERM)
    launch.gate()
    assert launch.ended() == 0
    assert not box.marker.exists()
    assert (box.receipt().ending, box.receipt().signal) == (Ending.SIGNALED, signal.SIGTERM)


# How it ended


@pytest.mark.parametrize("code", [0, 3, 137, 255])
def test_an_exit_code_is_reported_as_it_is(start: Start, box: Box, code: int) -> None:
    run(start, shell(box, f"exit {code}"))
    receipt = box.receipt()
    assert (receipt.ending, receipt.exit_code, receipt.signal or None, receipt.reason or None) == (
        Ending.EXITED,
        code,
        None,
        None,
    )
    assert box.log.read_bytes() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_not_mistaken_for_the_exit_code_of_the_same_number(start: Start, box: Box, number: signal.Signals) -> None:
    run(start, shell(box, f"kill -{number} $$"))
    receipt = box.receipt()
    assert (receipt.ending, receipt.exit_code, receipt.signal) == (Ending.SIGNALED, 128 + number, number)


@pytest.mark.parametrize(
    ("content", "mode", "code", "reason", "line"),
    [
        (None, 0, 127, "command_not_found", "no such file or directory"),
        (b"#!/no/such/interpreter\n", 0o700, 127, "interpreter_not_found", "interpreter not found, or CRLF line endings"),
        (b"#!/bin/sh\r\necho hi\r\n", 0o700, 127, "interpreter_not_found", "interpreter not found, or CRLF line endings"),
        (b"#!/bin/sh\n", 0o600, 126, "not_executable", "permission denied"),
        (b"echo hi\n", 0o700, 126, "not_a_program", "neither a program for this machine nor a script"),
    ],
    ids=["missing", "missing interpreter", "CRLF", "not executable", "no format"],
)
def test_a_command_that_cannot_be_executed_says_so_in_one_line(
    start: Start, box: Box, content: bytes | None, mode: int, code: int, reason: str, line: str
) -> None:
    command = box.root / "command"
    if content is not None:
        command.write_bytes(content)
        command.chmod(mode)
    run(start, box.plan(str(command)))
    receipt = box.receipt()
    assert (receipt.ending, receipt.exit_code, receipt.reason) == (Ending.EXITED, code, reason)
    log = box.log.read_text()
    assert log.startswith(f"qlworker: cannot start {command}: {line}")
    assert log.count("\n") == 1


def test_arguments_larger_than_the_kernel_takes_are_an_exit_and_not_a_crash(start: Start, box: Box) -> None:
    run(start, box.plan("/bin/true", "x" * 200_000))
    assert (box.receipt().exit_code, box.receipt().reason) == (126, "too_large")
    assert "larger than the kernel takes" in box.log.read_text()


def test_a_command_is_waited_for_even_if_the_worker_ignored_its_children(start: Start, box: Box) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    run(start, shell(box, "exit 3"), preexec_fn=ignore)
    assert box.receipt().exit_code == 3


def test_times_are_counted_on_the_boot_clock_from_the_given_start(start: Start, box: Box) -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    run(start, box.plan("/bin/true", started_at_ms=5))
    elapsed_ms = (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before) // 1_000_000
    assert box.receipt().started_at_ms == 5
    assert 5 <= box.receipt().finished_at_ms <= 5 + elapsed_ms


# What the command gets


def test_arguments_arrive_as_they_are_even_empty_or_not_utf8(start: Start, box: Box) -> None:
    arguments = ["", "a b", "line\nbreak", os.fsdecode(b"\xff\xfe"), "ü", ""]
    run(start, box.plan("/bin/sh", "-c", "cat /proc/$$/cmdline", *arguments))
    expected = [b"/bin/sh", b"-c", b"cat /proc/$$/cmdline", *map(os.fsencode, arguments)]
    assert box.log.read_bytes() == b"".join(each + b"\0" for each in expected)


def test_the_environment_is_exactly_what_was_given(start: Start, box: Box) -> None:
    environment = {"EMPTY": "", "A": "1", "BYTES": os.fsdecode(b"\xff"), "MULTI": "a\nb=c", "lower": "ü"}
    run(start, box.plan("/bin/cat", "/proc/self/environ", environment=environment))
    given = sorted(os.fsencode(f"{name}={value}") for name, value in environment.items())
    assert sorted(box.log.read_bytes().removesuffix(b"\0").split(b"\0")) == given


def test_no_environment_at_all_is_possible(start: Start, box: Box) -> None:
    run(start, box.plan("/bin/cat", "/proc/self/environ"))
    assert box.log.read_bytes() == b""


def test_no_descriptor_is_inherited_but_null_and_the_log(start: Start, box: Box) -> None:
    stray, other = os.pipe()
    script = 'for fd in /proc/$$/fd/*; do [ -e "$fd" ] && echo "${fd##*/} $(readlink "$fd")"; done'
    run(start, shell(box, script, environment={"PATH": os.environ["PATH"]}), pass_fds=(stray, other))
    os.close(stray)
    os.close(other)
    lines = [line.split(" ", 1) for line in box.log.read_text().splitlines()]
    standard = {number: target for number, target in lines if int(number) < 3}
    assert standard == {"0": "/dev/null", "1": str(box.log), "2": str(box.log)}
    others = [target for number, target in lines if int(number) > 2]
    assert all(target.startswith("/proc/") for target in others), "only what the listing itself opens"


def test_signals_are_at_their_defaults_and_nothing_is_blocked(start: Start, box: Box) -> None:
    def spoil() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGRTMIN):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD])

    run(start, box.plan("/bin/cat", "/proc/self/status"), preexec_fn=spoil, restore_signals=False)
    status = dict(line.split(":\t", 1) for line in box.log.read_text().splitlines() if ":\t" in line)
    # 32 and 33 are the C library's own: it lets nobody reset them, and some parents leave them ignored.
    seen = {name: int(status[name], 16) & ~(0b11 << 31) for name in ("SigIgn", "SigBlk", "SigCgt")}
    assert seen == {"SigIgn": 0, "SigBlk": 0, "SigCgt": 0}


def test_the_command_leads_its_own_session_in_its_directory_with_umask_022(start: Start, box: Box) -> None:
    folder = box.root / os.fsdecode(b"w\xff")
    folder.mkdir()
    script = "cut -d' ' -f1,5,6 /proc/$$/stat; umask; pwd"
    launch = start(shell(box, script, working_directory=str(folder), environment={"PATH": os.environ["PATH"]}))
    command = launch.held()
    assert os.getsid(command) == os.getpgid(command) == command
    assert os.getsid(launch.pid) == os.getpgid(launch.pid) == launch.pid
    launch.gate()
    assert launch.ended() == 0
    lines = box.log.read_bytes().splitlines()
    assert lines == [f"{command} {command} {command}".encode(), b"0022", os.fsencode(folder)]


@pytest.mark.req("R137", "R395")
def test_token_and_secrets_are_in_no_command_line_environment_or_file(start: Start, box: Box) -> None:
    plan = shell(box, "read line < fifo", environment={"SECRET": "hidden-value", "PATH": os.environ["PATH"]})
    launch = start(plan)
    command = launch.held()
    for pid in (launch.pid, command):
        for name in ("cmdline", "environ"):
            data = Path(f"/proc/{pid}/{name}").read_bytes()
            assert plan["token"].encode() not in data
            assert b"hidden-value" not in data
    files = [path.read_bytes() for path in box.root.rglob("*") if path.is_file()]
    assert all(secret not in data for data in files for secret in (b"hidden-value", plan["token"].encode()))
    launch.gate()
    assert launch.ended() == 0
    assert plan["token"].encode() not in box.log.read_bytes()
    assert all(b"hidden-value" not in path.read_bytes() for path in box.root.rglob("*") if path.is_file())


def test_output_is_kept_byte_by_byte_and_appended(start: Start, box: Box) -> None:
    data = bytes(range(256)) * 4096 + b"\xff\x00no newline"
    (box.root / "data").write_bytes(data)
    box.log.write_bytes(b"before\n")
    run(start, box.plan("/bin/cat", str(box.root / "data")))
    assert box.log.read_bytes() == b"before\n" + data


def test_a_plan_larger_than_any_pipe_buffer_arrives(start: Start, box: Box) -> None:
    environment = {f"V{number}": "x" * 16_000 for number in range(25)}
    run(start, box.plan("/bin/cat", "/proc/self/environ", environment=environment))
    assert len(box.log.read_bytes()) == sum(len(name) + len(value) + 2 for name, value in environment.items())


# Signals and survivors


def test_signals_to_the_group_or_to_the_launcher_do_not_keep_the_receipt_back(start: Start, box: Box) -> None:
    ready = Fifo(box.root / "fifo")
    launch = start(shell(box, f"echo ready > {ready.path}; while :; do :; done"))
    command = launch.held()
    launch.gate()
    ready.line()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        os.kill(launch.pid, number)
    assert launch.process.poll() is None
    os.killpg(command, signal.SIGTERM)
    assert launch.ended() == 0
    assert (box.receipt().ending, box.receipt().signal) == (Ending.SIGNALED, signal.SIGTERM)


def test_a_grandchild_that_keeps_the_log_open_delays_nothing(start: Start, box: Box) -> None:
    run(start, shell(box, "sleep 600 & echo $!; exit 4", environment={"PATH": os.environ["PATH"]}))
    orphan = int(box.log.read_text())
    assert Path(f"/proc/{orphan}").exists()
    os.kill(orphan, signal.SIGKILL)
    assert box.receipt().exit_code == 4


# The receipt


def test_the_receipt_is_private_canonical_and_alone(start: Start, box: Box) -> None:
    run(start, shell(box, "exit 9"))
    receipt = box.receipt()
    assert receipt.to_json() == box.target.read_bytes()
    assert box.target.stat().st_mode & 0o7777 == 0o600
    assert box.target.stat().st_nlink == 1
    assert box.leftovers() == set()
    assert (receipt.schema_version, receipt.run_id, receipt.attempt_id, receipt.callback_sequence) == (
        2,
        "run-1",
        "attempt-1",
        7,
    )


def test_the_first_receipt_wins(start: Start, box: Box) -> None:
    box.target.write_bytes(b"first")
    run(start, shell(box, "exit 9"))
    assert box.target.read_bytes() == b"first"
    assert box.leftovers() == set()


def test_a_receipt_waits_for_its_directory(start: Start, box: Box) -> None:
    box.receipts.rmdir()
    launch = start(shell(box, "exit 5"))
    command = launch.held()
    launch.gate()
    wait_gone(command)
    eventually(lambda: not Path(f"/proc/{command}").exists())
    slept = sleeps(launch.pid)
    eventually(lambda: sleeps(launch.pid) > slept + 1)
    box.receipts.mkdir(0o700)
    assert launch.ended() == 0
    assert box.receipt().exit_code == 5


def test_a_receipt_survives_a_full_disk_that_gets_space_again(start: Start, box: Box) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(box.receipts)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        ballast = fill(box.receipts / "ballast")
        launch = start(shell(box, "exit 6"))
        launch.held()
        launch.gate()
        touched = box.receipts.stat().st_mtime_ns
        eventually(lambda: box.receipts.stat().st_mtime_ns != touched)
        assert not box.target.exists()
        ballast.unlink()
        assert launch.ended() == 0
        assert box.receipt().exit_code == 6
        assert box.leftovers() == set()
    finally:
        subprocess.run(["umount", "-l", str(box.receipts)], check=True)


def sleeps(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    return 0


def fill(path: Path) -> Path:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


# Refusals


def test_a_missing_or_wrong_working_directory_is_rejected(start: Start, box: Box) -> None:
    for directory in (box.root / "missing", box.log):
        launch = start(box.plan(*box.marking(), working_directory=str(directory)))
        assert launch.answer() == {"rejected": "working_directory_missing"}
        assert launch.ended() == 0


def test_a_directory_that_may_not_be_entered_is_rejected(start: Start, box: Box) -> None:
    closed = box.root / "closed"
    closed.mkdir(0)
    launch = start(box.plan(*box.marking(), working_directory=str(closed)), preexec_fn=obey_file_modes)
    assert launch.answer() == {"rejected": "working_directory_denied"}
    assert launch.ended() == 0


@pytest.mark.parametrize("kind", ["missing", "symlink", "fifo", "directory"])
def test_a_log_that_is_not_a_plain_file_is_rejected(start: Start, box: Box, kind: str) -> None:
    output = box.root / "output"
    if kind == "symlink":
        output.symlink_to(box.log)
    elif kind == "fifo":
        os.mkfifo(output)
    elif kind == "directory":
        output.mkdir()
    launch = start(box.plan(*box.marking(), output=str(output)))
    assert launch.answer() == {"rejected": "output_unusable"}
    assert launch.ended() == 0
    assert not box.marker.exists()


def test_a_rejection_is_published_too_for_a_worker_that_dies_before_it_reads_it(start: Start, box: Box) -> None:
    launch = start(box.plan(*box.marking(), working_directory="/no/such/place"))
    assert launch.ended() == 0
    receipt = box.receipt()
    assert (receipt.ending, receipt.reason) == (Ending.NOT_STARTED, "working_directory_missing")


@pytest.mark.parametrize(
    "plan",
    [
        b"not json",
        b"[]",
        b"{}",
        {"argv": []},
        {"argv": ["relative"]},
        {"argv": ["/bin/true", "a\0b"]},
        {"environment": {"A=B": "1"}},
        {"environment": {"": "1"}},
        {"receipt": "relative"},
        {"argv": [1]},
    ],
    ids=repr,
)
def test_what_is_not_a_plan_is_rejected_and_nothing_is_written(start: Start, box: Box, plan: bytes | dict[str, Any]) -> None:
    launch = start(plan if isinstance(plan, bytes) else box.plan("/bin/true") | plan)
    assert launch.answer() == {"rejected": "invalid_plan"}
    assert launch.ended() == 0
    assert list(box.receipts.iterdir()) == []
    assert box.log.read_bytes() == b""


def test_a_plan_that_announces_more_than_it_may_is_rejected_unread(start: Start, box: Box) -> None:
    launch = start(b" " * (4 * 1024 * 1024 + 1))
    assert launch.answer() == {"rejected": "invalid_plan"}
