"""One page of lost runs, each taken a step further in its own transaction. Whoever calls it owns the rhythm.

A run that fails to move is reported and keeps nobody waiting (D9). Source: control-plane.md §10.6, R361 to R365.
"""

from typing import Final

import msgspec
from sqlalchemy import and_, case, or_, select

from ...domain.errors import QlworkerError
from ...domain.text import check_integer
from ..aggregate import RUNTIME
from ..database import Database, Transaction
from ..schema import run_retry_policies, runs
from .completion import LOST
from .lost_retry import RETRY_WAIT, LostStep, follow_lost

PAGE: Final = 16
PAGE_LIMIT: Final = 64


class LostScan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each run of a page, in order; `failures` maps those that did not move to reasons."""

    steps: dict[str, LostStep]
    failures: dict[str, str]


def lost_runs(tx: Transaction, limit: int) -> list[str]:
    """Up to `limit` (1..64) runs that are lost, or whose wait is over by now: the lost ones first, then by due time, then by
    id. Nothing that is not due yet, and nothing that is to be cancelled."""
    check_integer(limit, "the page", 1, PAGE_LIMIT)
    due = run_retry_policies.c.next_attempt_at_ms
    statement = (
        select(runs.c.id)
        .outerjoin(run_retry_policies, run_retry_policies.c.run_id == runs.c.id)
        .where(
            runs.c.execution_owner == RUNTIME,
            runs.c.cancel_requested_at_ms.is_(None),
            or_(runs.c.status == LOST, and_(runs.c.status == RETRY_WAIT, due <= tx.now_ms)),
        )
        .order_by(case((runs.c.status == LOST, 0), else_=due), runs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=runs)
    )
    return [row.id for row in tx.rows(statement)]


async def scan_lost(database: Database, limit: int = PAGE) -> LostScan:
    """Takes every run of one page a step further."""
    steps: dict[str, LostStep] = {}
    failures: dict[str, str] = {}
    for run_id in await database.run(lost_runs, limit):
        try:
            steps[run_id] = await database.run(follow_lost, run_id)
        except Exception as error:
            failures[run_id] = str(error) if isinstance(error, QlworkerError) else type(error).__name__
    return LostScan(steps=steps, failures=failures)
