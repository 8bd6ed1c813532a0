"""One page of leases that have run out, ended one after another. Whoever calls it owns the rhythm and keeps the cursor.

A failing lease stops the page and is met again next time: it is never skipped, and so it is what an alarm is for.
Source: control-plane.md §9.2, R310 to R323.
"""

from typing import Any, Final

import msgspec
from sqlalchemy import and_, or_, select

from ...domain.errors import Corrupt, QlworkerError
from ...domain.text import check_integer
from ..aggregate import REMOTE_WORKER, RUNTIME
from ..config import ExpiryPolicy
from ..database import Database, Transaction
from ..schema import run_attempts, run_dispatch_leases, runs
from .activation import RUNNING, STARTING
from .authority import LEASED
from .claiming import CLAIMED, DISPATCHING
from .expiry import Expiry, expire_with_lease

PAGE: Final = 16
PAGE_LIMIT: Final = 64


class ExpiryCursor(msgspec.Struct, frozen=True, order=True):
    """The last lease that was ended; the next page lies strictly behind it."""

    expires_at_ms: int
    attempt_id: str


class DueLease(msgspec.Struct, frozen=True):
    """A lease that seems to have run out. Decided about only under its run's lock."""

    cursor: ExpiryCursor
    run_id: str


class DuePage(msgspec.Struct, frozen=True):
    """A page of the source, and the time at which it was looked at."""

    observed_at_ms: int
    leases: list[DueLease]


class ExpiryScan(msgspec.Struct, frozen=True, kw_only=True):
    """What one scan did. `cursor` is where the next one goes on, None for the beginning; `failed`, the run that ended it."""

    results: list[Expiry]
    cursor: ExpiryCursor | None
    truncated: bool
    failed: str | None = None
    error: str | None = None


def due_leases(tx: Transaction, after: ExpiryCursor | None, limit: int, policy: ExpiryPolicy) -> DuePage:
    """Up to `limit` (1..64) leases that have run out by now, strictly behind `after`, oldest first.

    Under `evidence` only those of attempts that never started: the others wait for recovery.
    """
    check_integer(limit, "the page", 1, PAGE_LIMIT)
    lease = run_dispatch_leases
    statuses = (CLAIMED,) if policy == "evidence" else (CLAIMED, STARTING, RUNNING)
    statement = (
        select(lease.c.expires_at_ms, lease.c.attempt_id, lease.c.run_id)
        .join(run_attempts, run_attempts.c.id == lease.c.attempt_id)
        .join(runs, runs.c.id == lease.c.run_id)
        .where(
            lease.c.status == LEASED,
            lease.c.expires_at_ms <= tx.now_ms,
            runs.c.execution_owner == RUNTIME,
            runs.c.status.in_((DISPATCHING, RUNNING)),
            run_attempts.c.executor_type == REMOTE_WORKER,
            run_attempts.c.status.in_(statuses),
        )
        .order_by(lease.c.expires_at_ms, lease.c.attempt_id)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(
            or_(
                lease.c.expires_at_ms > after.expires_at_ms,
                and_(lease.c.expires_at_ms == after.expires_at_ms, lease.c.attempt_id > after.attempt_id),
            )
        )
    rows = tx.rows(statement)
    return DuePage(tx.now_ms, [DueLease(ExpiryCursor(row.expires_at_ms, row.attempt_id), row.run_id) for row in rows])


async def scan_expired(
    database: Database,
    after: ExpiryCursor | None,
    policy: ExpiryPolicy,
    limit: int = PAGE,
    source: Any = due_leases,
) -> ExpiryScan:
    """Ends the leases of one page, each in its own transaction, all judged by the one time the page was read at.

    Raises Corrupt when the source is not in strict order or holds what is not due, before anything of it is done.
    """
    page: DuePage = await database.run(source, after, limit, policy)
    _require_order(page, after, limit)
    results: list[Expiry] = []
    cursor = after
    for lease in page.leases:
        try:
            result = await database.run(expire_with_lease, lease.run_id, lease.cursor.attempt_id, page.observed_at_ms, policy)
        except Exception as error:
            reason = str(error) if isinstance(error, QlworkerError) else type(error).__name__
            return ExpiryScan(results=results, cursor=cursor, truncated=True, failed=lease.run_id, error=reason)
        results.append(result)
        cursor = lease.cursor
    is_full = len(page.leases) == limit
    return ExpiryScan(results=results, cursor=cursor if is_full else None, truncated=is_full)


def _require_order(page: DuePage, after: ExpiryCursor | None, limit: int) -> None:
    if len(page.leases) > limit:
        raise Corrupt("the page of expired leases is longer than it was asked for")
    for lease in page.leases:
        if after is not None and lease.cursor <= after:
            raise Corrupt("the expired leases are not in strict order")
        if lease.cursor.expires_at_ms > page.observed_at_ms:
            raise Corrupt("a lease that has not expired is among the expired ones")
        after = lease.cursor
