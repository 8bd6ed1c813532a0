"""The kernel's process table: where this process lives and who holds a pid. The only reader of /proc/PID/stat.

A process is its pid and its start ticks, inside one boot, pid namespace and host (design.md §3). psutil is not used: its
creation time moves with the wall clock.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from ..domain.errors import Corrupt
from ..domain.identity import Place, ProcessId

PROC: Final = Path("/proc")
_DEAD: Final = frozenset("ZXx")


class ProcessStat(msgspec.Struct, frozen=True):
    """What one stat file says. `session` and `group` are pids; `threads` counts the first one too."""

    process: ProcessId
    state: str
    parent: int
    group: int
    session: int
    threads: int

    @property
    def is_dead(self) -> bool:
        """Whether it has ended and only waits to be reaped. A process whose first thread has ended shows the state of a
        zombie as well, but lives on in the others."""
        return self.state in _DEAD and self.threads <= 1


def read_boot_id() -> str:
    """The kernel's random id of this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def read_place(host_id: str) -> Place:
    """Where this process lives. Namespace inodes are 0 on a kernel without them."""
    return Place(
        host_id=host_id,
        boot_id=read_boot_id(),
        pid_namespace=_namespace("pid"),
        time_namespace=_namespace("time"),
    )


def read_host_id(installation_file: Path) -> str:
    """`/etc/machine-id`, or else the id in `installation_file`, which the journal made once (design.md §3 "the host").

    Raises Corrupt when neither holds an id.
    """
    for path in (Path("/etc/machine-id"), installation_file):
        try:
            text = path.read_text("ascii").strip()
        except OSError:
            continue
        if 1 <= len(text) <= 64 and text.replace("-", "").isalnum():
            return text
    raise Corrupt(f"cannot tell this host from another: neither /etc/machine-id nor {installation_file} holds an id")


def read_stat(pid: int) -> ProcessStat | None:
    """The process that holds `pid` now, or None. The command's name is skipped by its last parenthesis: it may hold any
    byte."""
    try:
        data = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = data[data.rindex(b")") + 2 :].decode("ascii").split()
    return ProcessStat(
        process=ProcessId(pid, fields[19]),
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
    )


def read_command_line(pid: int) -> bytes | None:
    """The arguments of the process that holds `pid` now, each ended by NUL; None when there is none, empty for a zombie."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def every_stat() -> list[ProcessStat]:
    """Every process that this one can see."""
    found = (read_stat(int(entry)) for entry in os.listdir(PROC) if entry.isdecimal())  # noqa: PTH208
    return [stat for stat in found if stat is not None]


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs; a zombie does not.

    Raises OSError when it cannot be told: a `/proc` that is not mounted, or mounted with hidepid, shows less than there is
    (R206).
    """
    stat = read_stat(process.pid)
    if stat is not None:
        return stat.process == process and not stat.is_dead
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    raise PermissionError(f"cannot see process {process.pid}: mount /proc without hidepid")


def myself() -> ProcessId:
    """This process."""
    stat = read_stat(os.getpid())
    if stat is None:
        raise Corrupt("cannot read /proc/self/stat: /proc must be mounted")
    return stat.process


def _namespace(name: str) -> int:
    try:
        return (PROC / "self/ns" / name).stat().st_ino
    except OSError:
        return 0
