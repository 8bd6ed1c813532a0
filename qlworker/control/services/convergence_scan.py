"""One page of runs that were asked to stop, each ended in its own transaction if it can be (control-plane.md §11.5)."""

from typing import Final

import msgspec
from sqlalchemy import and_, or_, select

from ...domain.errors import QlworkerError
from ...domain.text import check_integer
from ..aggregate import TERMINAL, load_run
from ..config import ExpiryPolicy
from ..database import Database, Transaction
from ..schema import runs
from .convergence import converge

PAGE: Final = 32
PAGE_LIMIT: Final = 128


class StopCursor(msgspec.Struct, frozen=True, order=True):
    """The last run that was looked at."""

    cancel_requested_at_ms: int
    run_id: str


class ConvergenceScan(msgspec.Struct, frozen=True, kw_only=True):
    """How many ended, and how many have to wait. `failures` maps runs to reasons; `cursor` is None behind the last one."""

    settled: int
    waiting: int
    failures: dict[str, str]
    cursor: StopCursor | None


def stop_wanted(tx: Transaction, after: StopCursor | None, limit: int) -> list[StopCursor]:
    """Up to `limit` (1..128) runs with an intent that are not over, longest waiting first, without those that somebody is
    changing just now."""
    check_integer(limit, "the page", 1, PAGE_LIMIT)
    table = runs.c
    statement = (
        select(table.cancel_requested_at_ms, table.id)
        .where(table.cancel_requested_at_ms.is_not(None), table.status.not_in(TERMINAL))
        .order_by(table.cancel_requested_at_ms, table.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    if after is not None:
        statement = statement.where(
            or_(
                table.cancel_requested_at_ms > after.cancel_requested_at_ms,
                and_(table.cancel_requested_at_ms == after.cancel_requested_at_ms, table.id > after.run_id),
            )
        )
    return [StopCursor(row.cancel_requested_at_ms, row.id) for row in tx.rows(statement)]


async def scan_stops(database: Database, after: StopCursor | None, policy: ExpiryPolicy, limit: int = PAGE) -> ConvergenceScan:
    """Ends what can be ended of one page. A run that cannot be looked at does not keep the others waiting."""
    page = await database.run(stop_wanted, after, limit)
    settled, failures = 0, {}
    for each in page:
        try:
            settled += await database.run(_settle, each.run_id, policy)
        except Exception as error:
            failures[each.run_id] = str(error) if isinstance(error, QlworkerError) else type(error).__name__
    return ConvergenceScan(
        settled=settled,
        waiting=len(page) - settled - len(failures),
        failures=failures,
        cursor=page[-1] if len(page) == limit else None,
    )


def _settle(tx: Transaction, run_id: str, policy: ExpiryPolicy) -> bool:
    """Whether the run ended. One that somebody else is changing waits for the next page."""
    if not tx.try_lock("run", run_id):
        return False
    run = load_run(tx, run_id)
    return run is not None and run.status not in TERMINAL and converge(tx, run, policy).status in TERMINAL
