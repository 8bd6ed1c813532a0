"""A firm hold on one process: a pidfd whose process was recognised after it was opened, so that a signal or a wait can never
meet a stranger that got the pid later (design.md §3 "signal safety").

A kernel before 5.3, or a seccomp filter, has no pidfds. There the identity is looked at just before every signal, and a
wait looks again every 50 ms.
"""

import errno
import os
import signal
from typing import Final, Self

import trio

from ..domain.identity import ProcessId
from .process_table import is_alive

_PROCESS_GROUP: Final = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
_LOOK_AGAIN_S: Final = 0.05


class HeldProcess:
    """A process that was alive, and the one meant, when `open` returned. To be closed, or used in a `with` statement."""

    def __init__(self, process: ProcessId, pidfd: int | None) -> None:
        self.process = process
        self._pidfd = pidfd

    @classmethod
    def open(cls, process: ProcessId) -> Self | None:
        """A hold on `process`, or None when it is gone. Raises OSError when that cannot be told."""
        pidfd: int | None
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                return None
            pidfd = None  # not supported, or the number is a thread's now: what follows tells the two apart
        held = cls(process, pidfd)
        try:
            alive = is_alive(process)
        except OSError:
            held.close()
            raise
        if not alive:
            held.close()
            return None
        return held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def send(self, number: signal.Signals) -> None:
        """Signals the process. One that is gone, or that belongs to another user, is left to whoever looks what remains."""
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif is_alive(self.process):
                os.kill(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def send_to_group(self, number: signal.Signals) -> None:
        """Signals the group that the process leads, while it holds the pid that is the group's number."""
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number, None, _PROCESS_GROUP)
                return
        except (ProcessLookupError, PermissionError):
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        try:
            if is_alive(self.process):
                os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    async def wait(self) -> None:
        """Returns once the process has ended; whether it was reaped does not matter."""
        if self._pidfd is not None:
            await trio.lowlevel.wait_readable(self._pidfd)
            return
        await trio.lowlevel.checkpoint()
        while is_alive(self.process):
            await trio.sleep(_LOOK_AGAIN_S)
