"""Calls the retention: owns its cursor and its cadence, and keeps both over a restart (R260).

The position is written only after a call that removed something, so an idle worker writes nothing to flash: beginning a round
again that found nothing costs only reading.
"""

from typing import Final

from ...domain.errors import Corrupt
from ...domain.sweep import SweepPosition
from ...ports import Log, SweepStore
from ..server_clock import ServerClock
from .retention import Retention

ROUND_MS: Final = 60_000
"""Between two rounds through the whole journal."""


class Sweeper:
    """One call a tick of the worker's cadence, while a round is due; it has no timer of its own."""

    def __init__(self, retention: Retention, store: SweepStore, server_clock: ServerClock, log: Log) -> None:
        self._retention = retention
        self._store = store
        self._server_clock = server_clock
        self._log = log
        self._stored: SweepPosition | None = None
        self._position: SweepPosition | None = None

    async def tick(self) -> int:
        """Sweeps one page if it is time; says how many records went. Raises OSError when the disk fails."""
        if not self._server_clock.is_proven:
            return 0
        position = self._position = self._position or await self._load()
        now_ms = self._server_clock.now_ms()
        # A time further ahead than a round was written under a clock that has been set back since.
        if now_ms < position.due_at_ms <= now_ms + ROUND_MS:
            return 0
        swept = await self._retention.sweep(position.after)
        due_at_ms = now_ms + ROUND_MS if swept.next_after is None else 0
        self._position = SweepPosition(after=swept.next_after, due_at_ms=due_at_ms)
        if swept.removed:
            self._log.info("records_removed", count=swept.removed)
            await self._keep(self._position)
        return swept.removed

    async def _load(self) -> SweepPosition:
        try:
            self._stored = await self._store.read_sweep()
        except Corrupt:
            # Only a place to go on from: without it the round begins at the beginning.
            self._log.warning("sweep_position_unreadable")
        return self._stored or SweepPosition()

    async def _keep(self, position: SweepPosition) -> None:
        if position == self._stored:
            return
        await self._store.write_sweep(position)
        self._stored = position
