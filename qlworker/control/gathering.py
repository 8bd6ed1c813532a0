"""Many small transactions in one: those that wait while another one commits share the next commit.

A commit of SQLite is a wait for the disk. Each job keeps its own savepoint, so that one that fails takes nothing of the others
with it, and none is told of success before the common commit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

BATCH: Final = 64

Job = Callable[[Any], Any]


class Result:
    """What came of one job: a value or an exception."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value = value
        self._error = error

    def get(self) -> Any:
        """The value. Raises the exception if there is one."""
        if self._error is not None:
            raise self._error
        return self._value


class _Entry:
    """A waiting job. Its turn comes when it is over, or when its caller has to lead the next batch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.turn = trio.Event()
        self.result: Result | None = None


class Gathering:
    """Runs jobs in the order they came. `together` executes up to 64 of them in one transaction and blocks; whatever it
    raises is the answer to all of them."""

    def __init__(self, together: Callable[[Sequence[Job]], list[Result]]) -> None:
        self._together = together
        self._waiting: deque[_Entry] = deque()
        self._is_led = False

    async def run(self, job: Job) -> Any:
        """The job's value or exception. A cancelled caller still waits for the end, so that nobody is told "no" about
        something that happened without knowing it."""
        entry = _Entry(job)
        self._waiting.append(entry)
        with trio.CancelScope(shield=True):
            if self._is_led:
                await entry.turn.wait()
            if entry.result is None:
                await self._lead()
        assert entry.result is not None
        return entry.result.get()

    async def _lead(self) -> None:
        """Carries out everything that waits, the leader's own job first, and hands the lead to whoever came meanwhile."""
        self._is_led = True
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH))]
        try:
            results = await trio.to_thread.run_sync(self._together, [entry.job for entry in batch])
        except Exception as error:
            results = [Result(error=error) for _ in batch]
        for entry, result in zip(batch, results, strict=True):
            entry.result = result
            entry.turn.set()
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._is_led = False
