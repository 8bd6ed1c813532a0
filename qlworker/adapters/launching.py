"""Starting one launcher: the spawn, the plan through its pipe, its one answer, and the gate that stays open to be decided.

Whatever goes wrong here before the gate's byte proves that nothing of the user's ran: a launcher that reads end of file
instead of the byte never runs the command, and neither does one that dies. See qlworker/launcher.py for the contract.
"""

import json
import os
import signal
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from ..domain.canonical import b64u
from ..domain.errors import Conflict
from ..domain.identity import DurableHandle, Place, ProcessId
from ..domain.text import check_launch_id
from ..ports import Held, LaunchPlan, Rejected
from .pidfd import HeldProcess
from .process_table import read_stat

_LINE_BYTES: Final = 4096
_DEATH_S: Final = 5.0
_TOKEN_BYTES: Final = 32


class _Answer(msgspec.Struct, frozen=True):
    held: int = 0
    rejected: str = ""


class Spawned(msgspec.Struct, frozen=True):
    """A launcher that is this process's child, and the worker's ends of its two pipes."""

    pid: int
    plan: int
    status: int


class PipeGate:
    """The worker's end of a launcher's pipe. Dropped without a decision it closes: the command never runs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._opened = False

    async def open(self) -> None:
        """Lets the command run. Idempotent. Raises OSError when the launcher is gone, Conflict after `abandon`.

        It cannot be cancelled half-way: the pipe is empty, so the byte goes in without waiting.
        """
        if self._opened:
            return
        if self._descriptor < 0:
            raise Conflict("cannot open a gate that was abandoned: the command counts as never started")
        try:
            os.write(self._descriptor, b"G")
            self._opened = True
        finally:
            self._close()

    async def abandon(self) -> None:
        """Closes the gate. Idempotent; without effect once it was opened."""
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self._close()


def refuse_plan(plan: LaunchPlan) -> Rejected | None:
    """Why no launcher may be started for this plan, or None (wire-protocol §11.1)."""
    try:
        check_launch_id(plan.run_id, "runId")
        check_launch_id(plan.attempt_id, "attemptId")
    except ValueError:
        return Rejected("invalid_plan")
    return None if len(plan.token) == _TOKEN_BYTES else Rejected("invalid_plan")


def spawn(command_line: Sequence[str], title: str) -> Spawned:
    """Starts a launcher with no environment and no descriptor but its three. Raises OSError when there is none then.

    posix_spawn starts it without copying this process and without a thread. The signals a terminal or an init system sends
    to a whole group stay blocked until the launcher ignores them.
    """
    ends: list[int] = []
    try:
        ends += os.pipe()
        ends += os.pipe()
        plan_read, plan, status, status_write = ends
        pid = os.posix_spawn(
            command_line[0],
            [*command_line, title],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, plan_read, 0),
                (os.POSIX_SPAWN_DUP2, status_write, 1),
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_RDWR, 0),
            ],
            setsigmask=[signal.SIGHUP, signal.SIGINT, signal.SIGTERM],
        )
    except OSError:
        for end in ends:
            os.close(end)
        raise
    os.close(plan_read)
    os.close(status_write)
    os.set_blocking(plan, False)
    os.set_blocking(status, False)
    return Spawned(pid, plan, status)


async def hold(spawned: Spawned, plan: LaunchPlan, place: Place, timeout_ms: int) -> Held | Rejected:
    """Hands over the plan and returns when the command is held, or cannot be.

    Raises TimeoutError when the launcher neither answered within `timeout_ms` nor could be proven dead afterwards.
    """
    gate = PipeGate(spawned.plan)  # closes on every way out but `Held`
    answer: _Answer | None = None
    try:
        with trio.move_on_after(timeout_ms / 1000) as scope:
            await _send(spawned.plan, _encode(plan))
            answer = await _receive(spawned.status)
        if answer is not None and answer.held and (handle := _identify(spawned.pid, answer.held, place)):
            return Held(handle, gate)
    except BaseException:
        await gate.abandon()
        raise
    finally:
        os.close(spawned.status)
    await gate.abandon()
    if answer is not None and answer.rejected:
        await _ended(spawned.pid, kill=False)
        return Rejected(answer.rejected)
    if not await _ended(spawned.pid, kill=True):
        raise TimeoutError(f"cannot end launcher {spawned.pid}: it may be stuck in the kernel")
    return Rejected("launcher_timeout" if scope.cancelled_caught else "launcher_failed")


def _encode(plan: LaunchPlan) -> bytes:
    # ASCII escapes, because the standard library's encoder carries the halves that stand for bytes that are not UTF-8.
    text = json.dumps(
        {
            "run_id": plan.run_id,
            "attempt_id": plan.attempt_id,
            "callback_sequence": plan.callback_sequence,
            "token": b64u(bytes(plan.token)),
            "started_at_ms": plan.started_at_ms,
            "argv": plan.argv,
            "environment": plan.environment,
            "working_directory": plan.working_directory,
            "output": str(plan.output),
            "receipt": str(plan.receipt),
        }
    ).encode("ascii")
    return len(text).to_bytes(4, "big") + text


async def _send(descriptor: int, data: bytes) -> None:
    """Writes all of it, or what a launcher took that has already made up its mind: its answer tells."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(descriptor)
        except BrokenPipeError:
            return


async def _receive(descriptor: int) -> _Answer | None:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        try:
            more = os.read(descriptor, _LINE_BYTES)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(descriptor)
            continue
        if not more:
            return None
        line += more
    try:
        return msgspec.json.decode(line, type=_Answer)
    except msgspec.MsgspecError:
        return None


def _identify(launcher_pid: int, command_pid: int, place: Place) -> DurableHandle | None:
    """The handle of both, or None when the launcher is not the command's parent any more."""
    launcher, command = read_stat(launcher_pid), read_stat(command_pid)
    if launcher is None or launcher.is_dead or command is None or command.parent != launcher_pid:
        return None
    if command.session != command_pid or command.group != command_pid:
        return None
    return DurableHandle.of(str(uuid.uuid4()), place, launcher.process, command.process)


async def _ended(pid: int, *, kill: bool) -> bool:
    """Whether the launcher is gone, killed first if asked for. It is our child and not yet reaped: the pid is its own."""
    stat = read_stat(pid)
    held = None if stat is None else HeldProcess.open(ProcessId(pid, stat.process.start_ticks))
    if held is None:
        return True
    with held, trio.move_on_after(_DEATH_S):
        if kill:
            held.send(signal.SIGKILL)
        await held.wait()
        return True
    return False
