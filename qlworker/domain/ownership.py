"""Who owns the journal, and whether a recorded owner may be displaced.

An owner is displaced at once only when it is proven dead; a step of any clock proves nothing. Source: R75 to R88, design.md §3.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Final, Literal

import msgspec

from .document import Document
from .errors import Misconfigured
from .identity import Place, ProcessId
from .text import INT31, check_integer

WINDOW_MS: Final = 30_000
WINDOW_MIN_MS: Final = 5_000
WINDOW_MAX_MS: Final = 300_000
OWNER_BYTES: Final = 1024


class OwnerRecord(Document, frozen=True, kw_only=True):
    """The process that took the lock. `nonce` is 32 hexadecimal characters, new for each acquisition."""

    schema_version: Literal[1]
    pid: int
    start_ticks: str
    host_id: str
    boot_id: str
    pid_namespace: int
    time_namespace: int
    nonce: str

    def __post_init__(self) -> None:
        check_integer(self.pid, "pid", 1, INT31)
        if not (self.start_ticks.isascii() and self.start_ticks.isdecimal() and self.host_id and self.boot_id and self.nonce):
            raise ValueError("an owner record must hold start ticks, host, boot and nonce")

    @classmethod
    def of(cls, place: Place, process: ProcessId, nonce: str) -> "OwnerRecord":
        """The record of `process`, which lives at `place`."""
        return cls(
            schema_version=1,
            pid=process.pid,
            start_ticks=process.start_ticks,
            host_id=place.host_id,
            boot_id=place.boot_id,
            pid_namespace=place.pid_namespace,
            time_namespace=place.time_namespace,
            nonce=nonce,
        )

    @classmethod
    def parse(cls, data: bytes) -> "OwnerRecord | None":
        """The record in `data`, or None when it is not one."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    @property
    def place(self) -> Place:
        """Where the owner lives or lived."""
        return Place(self.host_id, self.boot_id, self.pid_namespace, self.time_namespace)

    @property
    def process(self) -> ProcessId:
        """Who the owner is, at its place."""
        return ProcessId(self.pid, self.start_ticks)


class Standing(StrEnum):
    """What is known of a recorded owner."""

    ALIVE = "alive"
    DEAD = "dead"
    UNPROVABLE = "unprovable"


def standing(owner: OwnerRecord | None, here: Place, is_alive: Callable[[ProcessId], bool]) -> Standing:
    """What a process at `here` can know of `owner`; None stands for a missing or damaged record.

    A pid can only be looked up in its own boot and namespaces, and start ticks are counted per time namespace. A host has one
    boot at a time, so an owner of another boot of this host is dead.
    """
    if owner is None or owner.host_id != here.host_id:
        return Standing.UNPROVABLE
    if owner.boot_id != here.boot_id:
        return Standing.DEAD
    if owner.place != here:
        return Standing.UNPROVABLE
    return Standing.ALIVE if is_alive(owner.process) else Standing.DEAD


def check_window(window_ms: int) -> int:
    """The stale window, 5 s to 5 min in milliseconds (R78). Raises Misconfigured outside."""
    if not WINDOW_MIN_MS <= window_ms <= WINDOW_MAX_MS:
        raise Misconfigured(
            f"the journal's stale window must be {WINDOW_MIN_MS} to {WINDOW_MAX_MS} milliseconds, not {window_ms}"
        )
    return window_ms
