"""Removes settled records once they are old enough, so that the journal never fills up by itself (gap 10, R257 to R272).

One call looks at one page; the caller keeps cursor and cadence. The receipt goes first, then the record if it is still at the
revision that was read, then its output. Ages are by the control plane's time: nothing is removed while that is not known.
"""

from typing import Final

import msgspec

from ...domain.errors import Conflict
from ...domain.record import InboxRecord, State
from ...ports import Inbox, Log, OutputStore, Receipts
from ..server_clock import ServerClock

PAGE: Final = 16
DELETIONS: Final = 8


class Swept(msgspec.Struct, frozen=True):
    """How many records went, and where the next page begins; None means from the start."""

    removed: int
    next_after: str | None


class Retention:
    """Sweeps. `age_ms` is 1 minute to 30 days, as the configuration checked."""

    def __init__(
        self,
        inbox: Inbox,
        receipts: Receipts,
        outputs: OutputStore,
        server_clock: ServerClock,
        log: Log,
        *,
        age_ms: int,
    ) -> None:
        self._inbox = inbox
        self._receipts = receipts
        self._outputs = outputs
        self._server_clock = server_clock
        self._log = log
        self._age_ms = age_ms

    async def sweep(self, after: str | None) -> Swept:
        """Looks at one page after the cursor and removes at most eight records."""
        if not self._server_clock.is_proven:
            return Swept(0, after)
        page = await self._inbox.page(after, PAGE)
        removed = 0
        for record in page.records:
            if not self._is_due(record):
                continue
            if removed == DELETIONS:
                return Swept(removed, after)
            removed += await self._remove(record)
        return Swept(removed, page.next_after)

    def _is_due(self, record: InboxRecord) -> bool:
        return record.is_settled and record.updated_at_ms + self._age_ms <= self._server_clock.now_ms()

    async def _remove(self, record: InboxRecord) -> bool:
        try:
            if record.state is State.COMPLETION_ACKNOWLEDGED:
                await self._receipts.remove(record.offer.attempt_id)
            if not await self._inbox.remove(record.offer_id, record.revision):
                return False
            if isinstance(record.log_artifact_id, str):
                await self._outputs.remove(record.log_artifact_id)
        except (OSError, Conflict) as error:
            self._log.warning("retention_failed", offer=record.offer_id, error=type(error).__name__)
            return False
        return True
