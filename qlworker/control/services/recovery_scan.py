"""One page of started attempts without a live lease, each looked at in its own transaction (control-plane.md §16)."""

from typing import Final

import msgspec
from sqlalchemy import and_, func, or_, select

from ...domain.errors import QlworkerError
from ...domain.text import check_integer
from ..aggregate import REMOTE_WORKER, RUNTIME
from ..database import Database, Transaction
from ..schema import recovery_controls, run_attempts, run_dispatch_leases, runs
from .activation import RUNNING, STARTING
from .authority import LEASED
from .claiming import DISPATCHING
from .recovery import RecoveryTerms, Verdict, recover

PAGE: Final = 16
PAGE_LIMIT: Final = 128


class Candidate(msgspec.Struct, frozen=True):
    """An attempt to look at."""

    run_id: str
    attempt_id: str


class RecoveryScan(msgspec.Struct, frozen=True, kw_only=True):
    """What came of each attempt of a page; `failures` maps those that could not be looked at to reasons."""

    verdicts: dict[str, Verdict]
    failures: dict[str, str]


def candidates(tx: Transaction, limit: int) -> list[Candidate]:
    """Up to `limit` (1..128) started attempts whose lease is over and whose time for a look has come; those that waited
    longest first. What waits for an operator is not among them."""
    check_integer(limit, "the page", 1, PAGE_LIMIT)
    control, lease = recovery_controls.c, run_dispatch_leases.c
    due = func.coalesce(control.next_look_at_ms, lease.expires_at_ms)
    statement = (
        select(run_attempts.c.run_id, run_attempts.c.id)
        .join(runs, runs.c.id == run_attempts.c.run_id)
        .join(run_dispatch_leases, lease.attempt_id == run_attempts.c.id)
        .outerjoin(recovery_controls, control.attempt_id == run_attempts.c.id)
        .where(
            runs.c.execution_owner == RUNTIME,
            runs.c.status.in_((DISPATCHING, RUNNING)),
            run_attempts.c.executor_type == REMOTE_WORKER,
            run_attempts.c.status.in_((STARTING, RUNNING)),
            or_(lease.status != LEASED, lease.expires_at_ms <= tx.now_ms),
            or_(
                control.attempt_id.is_(None),
                control.status == "resolved",
                and_(control.status == "retry", control.next_look_at_ms <= tx.now_ms),
            ),
        )
        .order_by(due, run_attempts.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=run_attempts)
    )
    return [Candidate(row.run_id, row.id) for row in tx.rows(statement)]


async def scan_recovery(database: Database, terms: RecoveryTerms, limit: int = PAGE) -> RecoveryScan:
    """Looks at every attempt of one page."""
    verdicts: dict[str, Verdict] = {}
    failures: dict[str, str] = {}
    for each in await database.run(candidates, limit):
        try:
            verdicts[each.attempt_id] = await database.run(recover, each.run_id, each.attempt_id, terms)
        except Exception as error:
            failures[each.attempt_id] = str(error) if isinstance(error, QlworkerError) else type(error).__name__
    return RecoveryScan(verdicts=verdicts, failures=failures)
