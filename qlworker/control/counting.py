"""What is told to whoever counts, so that nothing that is counted needs the library for it."""

from typing import Protocol


class Counting(Protocol):
    """Hears of what is done (metrics.py)."""

    def request(self, operation: str, status: int, seconds: float) -> None:
        """A worker's request was answered. `operation` is a route's name or `other`."""

    def tick(self, cadence: str, *, succeeded: bool) -> None:
        """A tick of background work ended."""


class Uncounted:
    """Nobody counts."""

    def request(self, operation: str, status: int, seconds: float) -> None:
        """Is forgotten."""

    def tick(self, cadence: str, *, succeeded: bool) -> None:
        """Is forgotten."""
