"""The order in which a transaction may wait for others, and the advisory locks that make PostgreSQL keep it.

SQLite runs one writing transaction at a time, so there is nothing to lock; the order is checked all the same, so that a test
on either database finds a transaction that could deadlock. Source: control-plane.md §17.
"""

import hashlib
from typing import Final, Literal

Kind = Literal["scan", "task", "worker", "run"]

ORDER: Final[tuple[Kind, ...]] = ("scan", "task", "worker", "run")
"""From first to last, and by key among the same. A run's lock covers its attempts and their leases; a worker's its session and
the count of its leases; a task's its revisions, its triggers and the idempotency keys of its project."""


class LockOrder:
    """What one transaction holds."""

    def __init__(self) -> None:
        self._held: set[tuple[Kind, str]] = set()
        self._last = (0, "")

    def is_held(self, kind: Kind, key: str) -> bool:
        """Whether this transaction has the lock."""
        return (kind, key) in self._held

    def require(self, kind: Kind, key: str) -> None:
        """Raises RuntimeError when waiting for this lock now could be waited for in a circle."""
        if (ORDER.index(kind), key) <= self._last:
            raise RuntimeError(f"the lock {kind} {key} is taken after {sorted(self._held)}")

    def note(self, kind: Kind, key: str) -> None:
        """The lock was taken."""
        self._held.add((kind, key))
        self._last = max(self._last, (ORDER.index(kind), key))


def advisory_key(kind: Kind, key: str) -> int:
    """The signed 64-bit number of PostgreSQL's lock. Two keys with one number only wait for each other."""
    digest = hashlib.sha256(f"qlcontrol\x00{kind}\x00{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
