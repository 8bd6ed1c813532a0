"""Who a process is: pid, start ticks, boot, namespaces and host. Wall time is never part of it (design.md §3).

A durable handle names the launcher and, below it, the leader of the command's session. It is opaque to the control plane.
Source: wire-protocol.md §11.5, R198 to R206, R218, R219.
"""

import re
from enum import StrEnum
from typing import Final, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from .canonical import b64u, from_b64u
from .document import Document
from .text import INT31, check_integer, check_text

_PREFIX: Final = "ql3lp1."
_TICKS: Final = re.compile(r"[1-9][0-9]{0,31}\Z")
_BOOT: Final = re.compile(r"[A-Za-z0-9-]{1,64}\Z")


class Place(msgspec.Struct, frozen=True):
    """Where a process lives: a pid means nothing outside its boot, pid namespace and host.

    `pid_namespace` and `time_namespace` are inode numbers, 0 where the kernel has none.
    """

    host_id: str
    boot_id: str
    pid_namespace: int
    time_namespace: int


class ProcessId(msgspec.Struct, frozen=True):
    """A process of one place. `start_ticks` is field 22 of its stat file, as decimal text."""

    pid: int
    start_ticks: str


class Presence(StrEnum):
    """What was seen of a recorded process (R218).

    PENDING: the launcher lives and the command does not run. It is held at the gate, or it is over and its receipt is being
    published; only that receipt will tell which.
    """

    RUNNING = "running"
    PENDING = "pending"
    EXITED = "exited"
    OTHER_BOOT = "other_boot"
    MISMATCH = "mismatch"
    UNSUPPORTED = "unsupported"
    PROBE_FAILED = "probe_failed"


class DurableHandle(Document, frozen=True, kw_only=True):
    """A launcher's identity. Version 1 is the upstream's form; version 2 adds place and command.

    Members: v(ersion), h(andle id), b(oot id), p(id), g(roup), s(tart ticks); from version 2 also n (pid namespace),
    t(ime namespace), m(achine: host id), c(ommand's pid, which leads its own session and group) and r (its start ticks).
    """

    v: Literal[1, 2]
    h: str
    b: str
    p: int
    g: int
    s: str
    n: int | UnsetType = UNSET
    t: int | UnsetType = UNSET
    m: str | UnsetType = UNSET
    c: int | UnsetType = UNSET
    r: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_text(self.h, "handle id", minimum=1, maximum=255)
        if not _BOOT.match(self.b) or not _TICKS.match(self.s) or (self.r is not UNSET and not _TICKS.match(self.r)):
            raise ValueError("a durable handle must hold a boot id and decimal start ticks")
        for pid in (self.p, self.g, self.c):
            if pid is not UNSET:
                check_integer(pid, "pid", 1, INT31)
        extra = (self.n, self.t, self.m, self.c, self.r)
        if any((member is UNSET) is (self.v == 2) for member in extra):
            raise ValueError("namespaces, host and command belong to version 2 of a durable handle")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The handle in `text`. Raises ValueError when it is not one, or not canonical."""
        if not text.startswith(_PREFIX) or len(text) > 512:
            raise ValueError(f"a durable handle must start with {_PREFIX} and be at most 512 bytes")
        try:
            handle = msgspec.json.decode(from_b64u(text.removeprefix(_PREFIX)), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError("a durable handle must hold base64url of its members") from error
        if handle.text() != text:
            raise ValueError("a durable handle must be canonical")
        return handle

    @classmethod
    def of(cls, handle_id: str, place: Place, launcher: ProcessId, command: ProcessId) -> Self:
        """The handle of a launcher that holds `command` at its gate."""
        return cls(
            v=2,
            h=handle_id,
            b=place.boot_id,
            p=launcher.pid,
            g=launcher.pid,
            s=launcher.start_ticks,
            n=place.pid_namespace,
            t=place.time_namespace,
            m=place.host_id,
            c=command.pid,
            r=command.start_ticks,
        )

    def text(self) -> str:
        """The handle as it is stored and sent: at most 512 bytes."""
        return _PREFIX + b64u(self.to_json())

    @property
    def launcher(self) -> ProcessId:
        """The launcher's identity."""
        return ProcessId(self.p, self.s)

    @property
    def command(self) -> ProcessId | None:
        """The identity of the leader of the command's session, or None in version 1."""
        return None if self.c is UNSET or self.r is UNSET else ProcessId(self.c, self.r)


def compare_place(handle: DurableHandle, here: Place) -> Presence | None:
    """What the place alone decides, or None when the process itself must be looked at.

    Another boot of the same host proves that every process of the handle is gone. Another host, or another namespace in the
    same boot, proves nothing: MISMATCH.
    """
    if handle.m is not UNSET and handle.m != here.host_id:
        return Presence.MISMATCH
    if handle.b != here.boot_id:
        return Presence.OTHER_BOOT
    if handle.n is not UNSET and (handle.n, handle.t) != (here.pid_namespace, here.time_namespace):
        return Presence.MISMATCH
    return None
