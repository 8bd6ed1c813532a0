"""Launchers and commands on this host: start, look, wait, stop.

Owns the launchers that are this process's children, and reaps them. After a restart of the worker they are somebody else's
children; everything here works on recorded identities and does not care.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..domain.errors import Conflict
from ..domain.identity import DurableHandle, Place, Presence, compare_place
from ..ports import Held, LaunchPlan, Rejected, StopResult
from .command_check import check_command
from .launching import hold, refuse_plan, spawn
from .pidfd import HeldProcess
from .process_table import is_alive, read_command_line, read_stat
from .stopping import stop_session

# launcher.pyc where a package ships bytecode alone
_LAUNCHER: Final = Path(__file__).parent.with_name("launcher").with_suffix(Path(__file__).suffix)


class LinuxProcesses:
    """The Processes port. `place` is where this worker lives.

    `python` runs launcher.py unless `launcher` is the command line of another implementation of its contract.
    `launch_timeout_ms` bounds the time from spawn to held, `kill_wait_ms` the time after KILL.
    """

    def __init__(
        self,
        place: Place,
        *,
        python: str = sys.executable,
        launcher: Sequence[str] = (),
        launch_timeout_ms: int = 20_000,
        kill_wait_ms: int = 5_000,
    ) -> None:
        self._place = place
        self._command_line = tuple(launcher) or (python, "-I", "-S", str(_LAUNCHER))
        self._launch_timeout_ms = launch_timeout_ms
        self._kill_wait_ms = kill_wait_ms
        self._children: set[int] = set()

    def precheck(
        self, argv: list[str], working_directory: str, path: str, environment: Mapping[str, str] | None = None
    ) -> Rejected | None:
        """Why this command cannot be started, or None; see command_check.py. With `environment` its size counts too."""
        return check_command(argv, working_directory, path, environment or {})

    async def launch(self, plan: LaunchPlan) -> Rejected | Held:
        """Starts a launcher and returns once it holds the command at its gate, or cannot.

        `Rejected` proves that nothing of the user's ran and never will. A launcher that could not hold the command has
        tried to publish a receipt "not started" as well: remove it when the failure is settled. Cancelled, it leaves the
        gate closed. Raises TimeoutError when a launcher that did not answer could not be proven dead.
        """
        self._reap()
        if rejected := refuse_plan(plan):
            return rejected
        try:
            spawned = spawn(self._command_line, plan.attempt_id)
        except OSError as error:
            return Rejected("launcher_missing" if isinstance(error, FileNotFoundError) else "resources")
        self._children.add(spawned.pid)
        try:
            return await hold(spawned, plan, self._place, self._launch_timeout_ms)
        finally:
            self._reap()

    async def inspect(self, handle: DurableHandle) -> Presence:
        """What is to be seen of the launcher and its command (R218).

        RUNNING while the command lives, PENDING while only its launcher does or the command still stands at the gate. EXITED
        when both are proven gone, also when their pids belong to others by now: in the same boot and namespace a pid with other
        start ticks proves that the recorded process has ended (R219).
        MISMATCH when the handle speaks of another host or namespace, where nothing can be proven; OTHER_BOOT of an earlier
        boot of this host. UNSUPPORTED without /proc, PROBE_FAILED when it does not tell.
        """
        self._reap()
        if (elsewhere := compare_place(handle, self._place)) is not None:
            return elsewhere
        try:
            if read_stat(os.getpid()) is None:
                return Presence.UNSUPPORTED
            is_launcher_there = is_alive(handle.launcher)
            is_command_there = handle.command is not None and is_alive(handle.command)
            is_at_gate = is_launcher_there and is_command_there and _is_at_gate(handle)
        except (OSError, ValueError, IndexError):
            return Presence.PROBE_FAILED
        if is_at_gate or (is_launcher_there and not is_command_there and handle.command is not None):
            return Presence.PENDING
        return Presence.RUNNING if is_launcher_there or is_command_there else Presence.EXITED

    async def wait_gone(self, handle: DurableHandle) -> None:
        """Returns once the launcher and its command are gone: then the receipt is published, or will never be.

        Raises Conflict for a handle of another host or namespace, OSError when /proc does not tell: neither proves an end.
        """
        elsewhere = compare_place(handle, self._place)
        if elsewhere is Presence.MISMATCH:
            raise Conflict("cannot wait for a process of another host or namespace: settle its record by hand")
        # The launcher first: it goes last, unless it was killed and left the command without a parent.
        for process in (handle.launcher, handle.command):
            held = None if process is None or elsewhere is Presence.OTHER_BOOT else HeldProcess.open(process)
            if held is not None:
                with held:
                    await held.wait()
        self._reap()

    async def stop(self, handle: DurableHandle, grace_ms: int) -> StopResult:
        """Ends the command's whole session; the launcher stays and publishes the receipt. A held command is ended too.

        UNKNOWN when the process table does not tell, for another host or namespace, and for a running launcher of version
        1, whose command has no recorded identity.
        """
        self._reap()
        elsewhere = compare_place(handle, self._place)
        if elsewhere is not None:
            return StopResult.ALREADY_EXITED if elsewhere is Presence.OTHER_BOOT else StopResult.UNKNOWN
        try:
            if read_stat(os.getpid()) is None:
                return StopResult.UNKNOWN
            if handle.command is None:
                return StopResult.UNKNOWN if is_alive(handle.launcher) else StopResult.ALREADY_EXITED
            return await stop_session(handle.command, grace_ms, self._kill_wait_ms)
        except (OSError, ValueError, IndexError):
            return StopResult.UNKNOWN

    def _reap(self) -> None:
        """Takes the status of ended launchers; it says nothing that their receipts do not."""
        for pid in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)


def _is_at_gate(handle: DurableHandle) -> bool:
    """The command's process begins as a copy of its launcher and has its arguments until it executes the command."""
    if handle.command is None or handle.command.pid == handle.launcher.pid:
        return False
    launcher, command = read_command_line(handle.launcher.pid), read_command_line(handle.command.pid)
    return bool(command) and launcher == command
