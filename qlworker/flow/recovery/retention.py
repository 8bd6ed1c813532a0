"""Removes settled records once they are old enough, so that the journal never fills up by itself (gap 10, R257 to R272).

One call looks at one page; the caller keeps cursor and cadence. The receipt goes first, then the record if it is still at the
revision that was read, then its output. Ages are by the control plane's time: nothing is removed while that is not known, and
the wall clock has no say at all.
"""

import msgspec

from ...domain.errors import Conflict, Corrupt
from ...domain.record import InboxRecord
from ...domain.sweep import SweepTerms
from ...ports import Inbox, Log, OutputStore, Receipts
from ..server_clock import ServerClock


class Swept(msgspec.Struct, frozen=True):
    """How many records went, and where to go on; None means that this was the last page."""

    removed: int
    next_after: str | None


class Retention:
    """Sweeps. It keeps nothing between two calls: no cursor, no timer, no listing (R260, R270)."""

    def __init__(
        self,
        inbox: Inbox,
        receipts: Receipts,
        outputs: OutputStore,
        server_clock: ServerClock,
        log: Log,
        terms: SweepTerms,
    ) -> None:
        self._inbox = inbox
        self._receipts = receipts
        self._outputs = outputs
        self._server_clock = server_clock
        self._log = log
        self._terms = terms

    async def sweep(self, after: str | None) -> Swept:
        """Looks at one page after the cursor and removes what is due there, up to the limit; the rest of that page is the next
        call's. Raises what reading the page raises."""
        if not self._server_clock.is_proven:
            return Swept(0, after)
        page = await self._inbox.page(after, self._terms.page_size)
        removed = 0
        seen = after
        for record in page.records:
            if self._is_due(record):
                if removed == self._terms.max_deletions:
                    return Swept(removed, seen)
                removed += await self._remove(record)
            seen = record.offer_id
        return Swept(removed, page.next_after)

    def _is_due(self, record: InboxRecord) -> bool:
        """Only what is settled: what runs, is owed or needs an operator never gets too old (R261, R271, R272)."""
        return record.is_settled and record.updated_at_ms + self._terms.age_ms <= self._server_clock.now_ms()

    async def _remove(self, record: InboxRecord) -> bool:
        try:
            # A start failure can have a receipt "not started" as well.
            await self._receipts.remove(record.offer.attempt_id)
            if not await self._inbox.remove(record.offer_id, record.revision):
                return False
        except (OSError, Conflict, Corrupt) as error:
            self._note(record, error)
            return False
        if isinstance(record.log_artifact_id, str):
            try:
                await self._outputs.remove(record.log_artifact_id)
            except (OSError, Corrupt) as error:
                self._note(record, error)
        return True

    def _note(self, record: InboxRecord, error: Exception) -> None:
        self._log.warning("retention_failed", offer=record.offer_id, error=type(error).__name__)
