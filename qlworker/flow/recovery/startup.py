"""Reads every record before the first pull. A journal that cannot be read whole is no ground to start work on (R102)."""

from collections.abc import AsyncIterator

import msgspec

from ...domain.record import InboxRecord, State
from ...ports import Inbox

PAGE = 16


class Found(msgspec.Struct, frozen=True):
    """What the journal holds. Only `unsettled` is work; the others are counted."""

    unsettled: list[InboxRecord]
    settled: int
    recovery_required: int


async def read_journal(inbox: Inbox) -> Found:
    """Every record, classed. Read only: no acknowledgement, no process, no removal. Raises Corrupt for a damaged one."""
    unsettled: list[InboxRecord] = []
    settled = recovery_required = 0
    async for record in every_record(inbox):
        if record.is_settled:
            settled += 1
        elif record.state is State.RECOVERY_REQUIRED:
            recovery_required += 1
        else:
            unsettled.append(record)
    return Found(unsettled, settled, recovery_required)


async def every_record(inbox: Inbox) -> AsyncIterator[InboxRecord]:
    """The records in ascending order of offer id, a page at a time."""
    after: str | None = None
    while True:
        page = await inbox.page(after, PAGE)
        for record in page.records:
            yield record
        if page.next_after is None:
            return
        after = page.next_after
