"""The control plane's only source of time (control-plane.md §17, D6)."""

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds since the Unix epoch. A transaction reads it once, after its lock is held."""

    def now_ms(self) -> int:
        """The present time in milliseconds."""
        ...


class SystemClock:
    """The wall clock, never behind what it said before: a step back must not revive a lease that has expired."""

    def __init__(self) -> None:
        self._latest = 0

    def now_ms(self) -> int:
        """The present time in milliseconds, or the latest one given out when the wall clock was set back."""
        self._latest = max(self._latest, time.time_ns() // 1_000_000)
        return self._latest


class SettableClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """The time it was set to."""
        return self._now_ms

    def advance(self, milliseconds: int) -> None:
        """Moves by `milliseconds`; a negative number moves back."""
        self._now_ms += milliseconds
