"""Real launchers and commands on this host: held, released, watched, stopped, and recognised after a worker's death."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from qlworker.adapters import process_table
from qlworker.adapters.command_check import check_command
from qlworker.adapters.pidfd import HeldProcess
from qlworker.adapters.process_table import is_alive, myself, read_place, read_stat
from qlworker.adapters.processes import LinuxProcesses
from qlworker.adapters.receipts import ReceiptFiles
from qlworker.adapters.stopping import session_members
from qlworker.domain.canonical import b64u, callback_token_digest
from qlworker.domain.errors import Conflict
from qlworker.domain.identity import DurableHandle, Place, Presence, ProcessId
from qlworker.domain.receipt import Ending, Receipt, authenticate
from qlworker.domain.record import InboxRecord, State
from qlworker.ports import Held, LaunchPlan, Rejected, StopResult

from ..builders import make_record
from ..contract.launching import Fifo, obey_file_modes, wait_gone

TOKEN = bytes(range(32))
PATH = os.environ["PATH"]


class Bench:
    """One worker's processes and receipts, with a log and a place for marks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = read_place("this-host")
        self.processes = LinuxProcesses(self.place)
        self.receipts = ReceiptFiles(root / "receipts")
        self.log = root / "log"
        self.log.touch(0o600)
        self.marker = root / "ran"
        self.handles: list[DurableHandle] = []

    def plan(self, *argv: str, **changes: Any) -> LaunchPlan:
        plan = LaunchPlan(
            run_id="run-1",
            attempt_id="attempt-1",
            callback_sequence=1,
            token=TOKEN,
            started_at_ms=1000,
            argv=list(argv),
            environment={"PATH": PATH},
            working_directory=str(self.root),
            output=self.log,
            receipt=self.receipts.path("attempt-1"),
        )
        return msgspec.structs.replace(plan, **changes)

    def shell(self, script: str, **changes: Any) -> LaunchPlan:
        return self.plan("/bin/sh", "-c", script, **changes)

    async def hold(self, plan: LaunchPlan) -> Held:
        held = await self.processes.launch(plan)
        assert isinstance(held, Held), held
        self.handles.append(held.handle)
        return held

    async def start(self, script: str, **changes: Any) -> DurableHandle:
        held = await self.hold(self.shell(script, **changes))
        await held.gate.open()
        return held.handle

    async def receipt(self) -> Receipt:
        receipt = await self.receipts.read("attempt-1")
        assert receipt is not None
        return receipt

    async def receipt_of(self, handle: DurableHandle) -> Receipt:
        await self.processes.wait_gone(handle)
        return await self.receipt()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    with trio.fail_after(120):
        yield bench
    for handle in bench.handles:
        left = [stat.process for stat in session_members(command_of(handle))]
        for process in [*left, handle.launcher]:
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
    bench.processes._reap()


def command_of(handle: DurableHandle) -> ProcessId:
    assert handle.command is not None
    return handle.command


def session_of(pid: int) -> int:
    stat = read_stat(pid)
    assert stat is not None
    return stat.session


# Launching and the gate


@pytest.mark.req("R384")
async def test_a_launch_gives_a_handle_of_launcher_and_command_and_runs_nothing(bench: Bench) -> None:
    held = await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))
    handle = DurableHandle.parse(held.handle.text())
    assert is_alive(handle.launcher)
    assert is_alive(command_of(handle))
    assert session_of(handle.p) == handle.p
    assert session_of(command_of(handle).pid) == handle.c
    assert handle.b == process_table.read_boot_id()
    assert not bench.marker.exists()
    await held.gate.open()
    assert (await bench.receipt_of(handle)).ending is Ending.EXITED
    assert bench.marker.read_text() == "ran\n"


async def test_opening_twice_runs_the_command_once(bench: Bench) -> None:
    held = await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))
    await held.gate.open()
    await held.gate.open()
    await held.gate.abandon()
    await bench.processes.wait_gone(held.handle)
    assert bench.marker.read_text() == "ran\n"


async def test_an_abandoned_gate_never_opens_and_the_launcher_says_so(bench: Bench) -> None:
    held = await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))
    await held.gate.abandon()
    await held.gate.abandon()
    with pytest.raises(Conflict, match="abandoned"):
        await held.gate.open()
    receipt = await bench.receipt_of(held.handle)
    assert receipt.says_not_started
    assert not bench.marker.exists()
    assert await bench.processes.inspect(held.handle) is Presence.EXITED


async def test_a_gate_that_is_dropped_undecided_closes(bench: Bench) -> None:
    handle = (await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))).handle
    assert (await bench.receipt_of(handle)).says_not_started
    assert not bench.marker.exists()


async def test_opening_the_gate_of_a_dead_launcher_is_an_error(bench: Bench) -> None:
    held = await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))
    os.kill(held.handle.p, signal.SIGKILL)
    await bench.processes.wait_gone(held.handle)
    wait_gone(command_of(held.handle).pid)
    with pytest.raises(OSError, match="pipe"):
        await held.gate.open()
    assert not bench.marker.exists()
    assert await bench.processes.inspect(held.handle) is Presence.EXITED


async def test_a_cancelled_launch_leaves_nothing_that_could_run(bench: Bench) -> None:
    plan = bench.shell(f"echo ran >> {bench.marker}")
    before = set(children())
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.processes.launch(plan)
    for pid in set(children()) - before:
        wait_gone(pid)
    assert not bench.marker.exists()


async def test_a_plan_beyond_the_pipe_buffer_does_not_stop_the_loop(bench: Bench) -> None:
    environment = {f"V{number}": "x" * 16_000 for number in range(24)}
    handle = (held := await bench.hold(bench.plan("/bin/cat", "/proc/self/environ", environment=environment))).handle
    await held.gate.open()
    await bench.processes.wait_gone(handle)
    assert bench.log.stat().st_size == sum(len(name) + len(value) + 2 for name, value in environment.items())


@pytest.mark.req("R399")
async def test_the_launcher_keeps_a_copy_of_the_token_that_the_worker_wipes(bench: Bench) -> None:
    token = bytearray(TOKEN)
    held = await bench.hold(bench.shell("exit 0", token=token))
    token[:] = bytes(32)
    await held.gate.open()
    assert (await bench.receipt_of(held.handle)).token == b64u(TOKEN)


async def test_secrets_show_in_no_repr_and_no_process_listing(bench: Bench) -> None:
    plan = bench.shell("true", environment={"SECRET": "hidden-value"})
    held = await bench.hold(plan)
    listing = listing_of(held.handle.p) + listing_of(command_of(held.handle).pid)
    for secret in ("hidden-value", b64u(TOKEN)):
        assert secret.encode() not in listing
        assert secret not in repr(plan)
        assert secret not in repr(held)


def listing_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def children() -> list[int]:
    return [stat.process.pid for stat in process_table.every_stat() if stat.parent == os.getpid()]


async def test_ended_launchers_do_not_stay_as_zombies(bench: Bench) -> None:
    handle = await bench.start("exit 0")
    await bench.processes.wait_gone(handle)
    assert read_stat(handle.p) is None


# Refusals: each one proves that nothing ran


@pytest.mark.req("R385")
async def test_a_rejection_by_the_launcher_is_final(bench: Bench) -> None:
    plan = bench.shell(f"echo ran >> {bench.marker}", working_directory=str(bench.root / "missing"))
    assert await bench.processes.launch(plan) == Rejected("working_directory_missing")
    assert not bench.marker.exists()
    assert (await bench.receipt()).says_not_started


@pytest.mark.req("R385", "R396")
@pytest.mark.parametrize(
    "changes", [{"token": bytes(31)}, {"token": bytes(33)}, {"attempt_id": "../x"}, {"run_id": ""}], ids=str
)
async def test_a_plan_with_wrong_ids_or_token_starts_no_launcher(bench: Bench, changes: dict[str, Any]) -> None:
    before = children()
    assert await bench.processes.launch(bench.shell("true", **changes)) == Rejected("invalid_plan")
    assert children() == before


@pytest.mark.req("R385")
@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (("/no/such/launcher",), "launcher_missing"),
        (("/bin/false",), "launcher_failed"),
        (("/bin/sh", "-c", "echo nonsense"), "launcher_failed"),
        (("/bin/sh", "-c", 'echo "{\\"held\\": $$}"; read -r never'), "launcher_failed"),
        (("/bin/sh", "-c", "exec sleep 600"), "launcher_timeout"),
    ],
    ids=["missing", "dies", "talks nonsense", "claims to hold itself", "says nothing"],
)
async def test_a_launcher_that_holds_nothing_is_proven_dead(bench: Bench, launcher: tuple[str, ...], reason: str) -> None:
    before = children()
    processes = LinuxProcesses(
        bench.place, launcher=launcher, launch_timeout_ms=300 if reason == "launcher_timeout" else 20_000
    )
    assert await processes.launch(bench.shell("true")) == Rejected(reason)
    assert children() == before


# After a crash of the worker

WORKER = """
import os, sys, trio
from pathlib import Path
from qlworker.adapters.process_table import read_place
from qlworker.adapters.processes import LinuxProcesses
from qlworker.ports import LaunchPlan

async def main():
    root, receipt, script, gate = sys.argv[1:]
    plan = LaunchPlan("run-1", "attempt-1", 1, bytes(range(32)), 1000, ["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]},
                      root, Path(root, "log"), Path(receipt))
    held = await LinuxProcesses(read_place("this-host")).launch(plan)
    if gate == "open":
        await held.gate.open()
    print(held.handle.text(), flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


@contextlib.contextmanager
def another_worker(bench: Bench, script: str, gate: str) -> Iterator[DurableHandle]:
    """The handle of a command that a worker launched which has been killed since."""
    command_line = [sys.executable, "-c", WORKER, str(bench.root), str(bench.receipts.path("attempt-1")), script, gate]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as worker:
        assert worker.stdout is not None
        handle = DurableHandle.parse(worker.stdout.readline().strip())
        bench.handles.append(handle)
        worker.kill()
    yield handle


async def test_a_worker_killed_before_the_gate_leaves_a_proof_that_nothing_ran(bench: Bench) -> None:
    with another_worker(bench, f"echo ran >> {bench.marker}", "closed") as handle:
        receipt = await bench.receipt_of(handle)
    assert receipt.says_not_started
    assert receipt.token == b64u(TOKEN)
    wait_gone(command_of(handle).pid)
    assert not bench.marker.exists()


@pytest.mark.req("R214")
async def test_a_command_outlives_its_worker_and_the_next_one_watches_it_to_its_end(bench: Bench) -> None:
    started, release = Fifo(bench.root / "started"), bench.root / "release"
    os.mkfifo(release)
    script = f"echo ran >> {bench.marker}; echo ready > {started.path}; read line < {release}; exit 7"
    with another_worker(bench, script, "open") as handle:
        started.line()
        assert await bench.processes.inspect(handle) is Presence.RUNNING
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.processes.wait_gone, handle)
            await trio.testing.wait_all_tasks_blocked()
            release.write_text("go\n")
    assert (await bench.receipt()).exit_code == 7
    assert bench.marker.read_text() == "ran\n"
    assert await bench.processes.inspect(handle) is Presence.EXITED


# Receipts of a real launcher


def record_of(**changes: Any) -> InboxRecord:
    base = make_record()
    values = {
        "state": State.LAUNCHING,
        "executor_started_at_ms": 1000,
        "log_artifact_id": "wlog-" + "0" * 30,
        "completion_receipt_callback_sequence": 1,
        "completion_receipt_token_digest": callback_token_digest(TOKEN),
    }
    return msgspec.structs.replace(base, **(values | changes))


@pytest.mark.req("R180", "R181", "R182", "R184", "R188")
async def test_only_the_launchers_own_receipt_authenticates(bench: Bench) -> None:
    receipt = await bench.receipt_of(await bench.start("exit 3"))
    record = record_of()
    assert authenticate(receipt, record, receipt.finished_at_ms)
    forged = [
        {"run_id": "run-2"},
        {"attempt_id": "attempt-2"},
        {"callback_sequence": 2},
        {"started_at_ms": 1001},
        {"started_at_ms": 999},
        {"token": b64u(bytes([1]) + TOKEN[1:])},
        {"token": b64u(TOKEN[:-1] + b"\0")},
        {"finished_at_ms": receipt.finished_at_ms + 300_001},
    ]
    for changes in forged:
        assert not authenticate(msgspec.structs.replace(receipt, **changes), record, receipt.finished_at_ms), changes


# Looking


@pytest.mark.req("R202", "R203", "R204", "R206", "R218", "R219")
async def test_every_presence_is_told_apart(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = await bench.hold(bench.shell("true"))
    handle = held.handle

    async def seen(**changes: Any) -> Presence:
        return await bench.processes.inspect(msgspec.structs.replace(handle, **changes))

    assert await seen() is Presence.PENDING, "the command stands at the gate"
    assert await seen(b="another-boot") is Presence.OTHER_BOOT
    assert await seen(m="another-host") is Presence.MISMATCH
    assert await seen(m="another-host", b="another-boot") is Presence.MISMATCH
    assert await seen(n=1) is Presence.MISMATCH
    assert await seen(t=1) is Presence.MISMATCH
    assert await seen(s="1") is Presence.RUNNING, "the command alone is enough"
    assert await seen(s="1", r="1") is Presence.EXITED, "both pids belong to other processes now"
    with monkeypatch.context() as patch:
        patch.setattr(process_table, "PROC", tmp_path)
        assert await seen() is Presence.UNSUPPORTED
    with monkeypatch.context() as patch:
        patch.setattr(process_table, "read_stat", lambda pid: None)
        assert await seen() is Presence.PROBE_FAILED, "a process that /proc hides is not gone"
    await held.gate.abandon()
    await bench.processes.wait_gone(handle)
    assert await seen() is Presence.EXITED


async def test_a_launcher_whose_command_is_over_is_pending_until_it_has_said_so(bench: Bench) -> None:
    ready = Fifo(bench.root / "ready")
    handle = await bench.start(f"echo ready > {ready.path}; {SLEEP}")
    ready.line()
    assert await bench.processes.inspect(handle) is Presence.RUNNING
    command = command_of(handle)
    with HeldProcess.open(command) as held:  # type: ignore[union-attr]
        os.kill(handle.p, signal.SIGSTOP)
        os.kill(command.pid, signal.SIGKILL)
        await held.wait()
    assert await bench.processes.inspect(handle) is Presence.PENDING
    os.kill(handle.p, signal.SIGCONT)
    await bench.processes.wait_gone(handle)
    assert await bench.processes.inspect(handle) is Presence.EXITED


async def test_a_handle_of_the_first_version_speaks_of_the_launcher_alone(bench: Bench) -> None:
    me = myself()
    handle = DurableHandle(v=1, h="x", b=bench.place.boot_id, p=me.pid, g=me.pid, s=me.start_ticks)
    assert await bench.processes.inspect(handle) is Presence.RUNNING
    assert await bench.processes.stop(handle, 0) is StopResult.UNKNOWN
    gone = msgspec.structs.replace(handle, s="1")
    assert await bench.processes.inspect(gone) is Presence.EXITED
    assert await bench.processes.stop(gone, 0) is StopResult.ALREADY_EXITED


def test_a_process_whose_first_thread_ended_is_not_dead() -> None:
    code = (
        "import ctypes, threading, sys, os\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while (stat := read_stat(process.pid)) is not None and stat.state != "Z":
            select.select([], [], [], 0.01)
        assert stat is not None
        assert is_alive(stat.process)
        process.kill()


async def test_waiting_ends_at_once_for_what_is_gone_and_refuses_what_it_cannot_see(bench: Bench) -> None:
    held = await bench.hold(bench.shell("true"))
    await bench.processes.wait_gone(msgspec.structs.replace(held.handle, s="1", r="1"))
    await bench.processes.wait_gone(msgspec.structs.replace(held.handle, b="another-boot"))
    with pytest.raises(Conflict, match="another host"):
        await bench.processes.wait_gone(msgspec.structs.replace(held.handle, m="another-host"))
    await held.gate.abandon()


async def test_two_tasks_may_wait_for_the_same_launcher(bench: Bench) -> None:
    held = await bench.hold(bench.shell("true"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.processes.wait_gone, held.handle)
        nursery.start_soon(bench.processes.wait_gone, held.handle)
        await trio.testing.wait_all_tasks_blocked()
        await held.gate.open()


# Stopping

SLEEP = "while :; do sleep 600; done"


@contextlib.contextmanager
def _without(monkeypatch: pytest.MonkeyPatch, feature: str) -> Iterator[None]:
    def no_pidfd(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "no pidfd")

    real = signal.pidfd_send_signal

    def no_groups(pidfd: int, number: int, siginfo: None = None, flags: int = 0) -> None:
        if flags:
            raise OSError(errno.EINVAL, "no flags")
        real(pidfd, number)

    with monkeypatch.context() as patch:
        if feature == "pidfds":
            patch.setattr(os, "pidfd_open", no_pidfd)
        elif feature == "group signals":
            patch.setattr(signal, "pidfd_send_signal", no_groups)
        yield


@pytest.mark.parametrize("missing", ["nothing", "group signals", "pidfds"])
async def test_a_polite_command_ends_by_term_with_its_children(
    bench: Bench, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = Fifo(bench.root / "ready")
    with _without(monkeypatch, missing):
        handle = await bench.start(f"trap 'exit 9' TERM; sh -c 'echo $$ > {ready.path}; exec sleep 600' & wait")
        child = int(ready.line())
        assert await bench.processes.stop(handle, 60_000) is StopResult.STOPPED
        assert (await bench.receipt_of(handle)).exit_code == 9
    wait_gone(child)


@pytest.mark.parametrize("missing", ["nothing", "group signals", "pidfds"])
async def test_a_command_that_ignores_term_is_killed_with_everything_below(
    bench: Bench, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = Fifo(bench.root / "ready")
    with _without(monkeypatch, missing):
        handle = await bench.start(f"trap '' TERM; (sh -c '{SLEEP}') & echo $! > {ready.path}; {SLEEP}")
        child = int(ready.line())
        assert await bench.processes.stop(handle, 50) is StopResult.STOPPED
        assert session_members(command_of(handle)) == []
        receipt = await bench.receipt_of(handle)
    assert (receipt.ending, receipt.signal) == (Ending.SIGNALED, signal.SIGKILL)
    wait_gone(child)


async def test_a_process_in_a_group_of_its_own_is_ended_with_its_session(bench: Bench) -> None:
    ready = Fifo(bench.root / "ready")
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['/bin/sh', '-c', sys.argv[1]], process_group=0).wait()\n"
    )
    plan = bench.plan(sys.executable, "-c", code, f"echo ready > {ready.path}; {SLEEP}")
    held = await bench.hold(plan)
    await held.gate.open()
    handle = held.handle
    ready.line()
    groups = {stat.group for stat in session_members(command_of(handle))}
    assert len(groups) > 1
    assert await bench.processes.stop(handle, 50) is StopResult.STOPPED
    assert session_members(command_of(handle)) == []


async def test_what_answers_a_request_to_end_with_more_processes_is_ended(bench: Bench) -> None:
    ready = Fifo(bench.root / "ready")
    script = (
        f"trap '(trap \"\" TERM; echo more > {ready.path}; {SLEEP}) &' TERM; echo ready > {ready.path}; while :; do :; done"
    )
    handle = await bench.start(script)
    ready.line()
    os.killpg(command_of(handle).pid, signal.SIGTERM)
    assert ready.line() == "more"
    assert await bench.processes.stop(handle, 50) is StopResult.STOPPED
    assert session_members(command_of(handle)) == []


async def test_a_stopped_process_gets_to_hear_the_request(bench: Bench) -> None:
    ready = Fifo(bench.root / "ready")
    handle = await bench.start(f"trap 'exit 4' TERM; echo ready > {ready.path}; while :; do :; done")
    ready.line()
    os.kill(command_of(handle).pid, signal.SIGSTOP)
    assert await bench.processes.stop(handle, 60_000) is StopResult.STOPPED
    assert (await bench.receipt_of(handle)).exit_code == 4


async def test_members_are_ended_even_when_their_leader_is_gone(bench: Bench) -> None:
    handle = await bench.start(f"(trap '' TERM; {SLEEP}) & sleep 600 & exit 0")
    await bench.processes.wait_gone(handle)
    assert len(session_members(command_of(handle))) >= 2
    assert await bench.processes.stop(handle, 50) is StopResult.STOPPED
    assert session_members(command_of(handle)) == []
    assert (await bench.receipt()).exit_code == 0


async def test_a_held_command_is_stopped_and_the_launcher_still_testifies(bench: Bench) -> None:
    held = await bench.hold(bench.shell(f"echo ran >> {bench.marker}"))
    assert await bench.processes.stop(held.handle, 60_000) is StopResult.STOPPED
    assert is_alive(held.handle.launcher)
    await held.gate.abandon()
    assert (await bench.receipt_of(held.handle)).says_not_started
    assert not bench.marker.exists()


def a_stranger() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)


@pytest.mark.req("R219")
async def test_a_stranger_that_got_the_pid_is_never_signalled(bench: Bench) -> None:
    with a_stranger() as stranger:
        stat = read_stat(stranger.pid)
        assert stat is not None
        recorded = ProcessId(stranger.pid, str(int(stat.process.start_ticks) - 1))
        handle = DurableHandle.of("x", bench.place, recorded, recorded)
        assert await bench.processes.inspect(handle) is Presence.EXITED
        assert await bench.processes.stop(handle, 0) is StopResult.ALREADY_EXITED
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0, "nobody killed it"


async def test_what_cannot_be_running_here_is_not_searched_for(bench: Bench) -> None:
    held = await bench.hold(bench.shell("true"))

    async def stopped(**changes: Any) -> StopResult:
        return await bench.processes.stop(msgspec.structs.replace(held.handle, **changes), 0)

    assert await stopped(b="another-boot") is StopResult.ALREADY_EXITED
    assert await stopped(m="another-host") is StopResult.UNKNOWN
    assert await stopped(n=1) is StopResult.UNKNOWN
    assert is_alive(command_of(held.handle))
    await held.gate.open()
    await bench.processes.wait_gone(held.handle)
    assert await stopped() is StopResult.ALREADY_EXITED


async def test_without_a_process_table_a_stop_is_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = await bench.hold(bench.shell("true"))
    with monkeypatch.context() as patch:
        patch.setattr(process_table, "PROC", tmp_path)
        assert await bench.processes.stop(held.handle, 0) is StopResult.UNKNOWN
    await held.gate.abandon()


async def test_a_killed_launcher_leaves_a_running_command_and_no_receipt(bench: Bench) -> None:
    ready = Fifo(bench.root / "ready")
    handle = await bench.start(f"echo ready > {ready.path}; {SLEEP}")
    ready.line()
    launcher = HeldProcess.open(handle.launcher)
    assert launcher is not None
    os.kill(handle.p, signal.SIGKILL)
    with launcher:
        await launcher.wait()
    assert await bench.processes.inspect(handle) is Presence.RUNNING
    assert await bench.receipts.read("attempt-1") is None, "an exit code is never made up"
    async with trio.open_nursery() as nursery:
        # The command that is left over is waited for too, or its watcher would look again and again.
        nursery.start_soon(bench.processes.wait_gone, handle)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        assert await bench.processes.stop(handle, 60_000) is StopResult.STOPPED


# What can be told before


@pytest.fixture
def place() -> Place:
    return read_place("this-host")


def write(path: Path, content: bytes, mode: int = 0o700) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.req("R385")
@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"#!/bin/sh\n", 0o700, None),
        (b"#! /bin/sh -e\n", 0o700, None),
        (b"#!/bin/sh", 0o700, None),
        (b"#!/usr/bin/env sh\n", 0o700, None),
        (b"#!/usr/bin/env -S sh -e\n", 0o700, None),
        (b"\x7fELF whatever follows", 0o700, None),
        (None, 0o700, "command_not_found"),
        (b"#!/bin/sh\n", 0o600, "not_executable"),
        (b"#!/no/such/interpreter\n", 0o700, "interpreter_not_found"),
        (b"#!/usr/bin/env no-such-interpreter\n", 0o700, "interpreter_not_found"),
        (b"#!/etc/passwd\n", 0o700, "not_executable"),
        (b"#!/bin/sh\r\n", 0o700, "crlf_script"),
        (b"#!/usr/bin/env sh\r\n", 0o700, "crlf_script"),
        (b"#!\n", 0o700, "not_a_program"),
        (b"echo hi\n", 0o700, "not_a_program"),
        (b"", 0o700, "not_a_program"),
    ],
    ids=repr,
)
def test_a_file_that_cannot_be_executed_is_refused_before(
    place: Place, tmp_path: Path, content: bytes | None, mode: int, reason: str | None
) -> None:
    command = tmp_path / "command"
    if content is not None:
        write(command, content, mode)
    expected = Rejected(reason) if reason else None
    assert LinuxProcesses(place).precheck([str(command)], "/", PATH) == expected


def test_a_directory_is_not_a_command(place: Place, tmp_path: Path) -> None:
    processes = LinuxProcesses(place)
    assert processes.precheck([str(tmp_path)], "/", PATH) == Rejected("command_not_found")
    assert processes.precheck([f"{write(tmp_path / 'x', b'#!/bin/sh')}/y"], "/", PATH) == Rejected("command_not_found")
    assert processes.precheck(["/bin/true\0"], "/", PATH) == Rejected("command_not_found")


def test_a_working_directory_must_be_one(place: Place, tmp_path: Path) -> None:
    processes = LinuxProcesses(place)
    for directory in (tmp_path / "missing", write(tmp_path / "file", b"")):
        assert processes.precheck(["/bin/true"], str(directory), PATH) == Rejected("working_directory_missing")
    (tmp_path / "closed").mkdir(0)
    code = (
        "import sys; from qlworker.adapters.command_check import check_command as check\n"
        "print([check(['/bin/true'], each, '', {}).reason for each in sys.argv[1:]])"
    )
    folders = [str(tmp_path / "closed"), str(tmp_path / "closed" / "below")]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], preexec_fn=obey_file_modes, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['working_directory_denied', 'working_directory_denied']"


def test_what_the_kernel_will_not_take_is_refused_before_and_what_it_takes_is_not() -> None:
    def check(*arguments: str, **environment: str) -> Rejected | None:
        return check_command(["/bin/true", *arguments], "/", PATH, environment)

    assert check("x" * 131_071) is None
    assert subprocess.run(["/bin/true", "x" * 131_071], check=False).returncode == 0
    assert check("x" * 131_072) == Rejected("too_large")
    assert check(V="x" * 131_069) is None
    assert check(V="x" * 131_070) == Rejected("too_large")
    assert check(*["x" * 100_000] * 100) == Rejected("too_large")
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true", *["x" * 100_000] * 100], check=False)
