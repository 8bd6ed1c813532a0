"""The state of affairs in numbers, read from the database when somebody asks: what waits, what is stuck, who is there.

Source: R527, control-plane.md §22 item 4.
"""

from typing import Any, Final

import msgspec
from sqlalchemy import Select, case, func, select

from .aggregate import RUN_TRANSITIONS
from .config import ExpiryPolicy
from .database import Transaction
from .schema import (
    cancellation_dispatches,
    recovery_controls,
    run_attempts,
    run_dispatch_leases,
    runs,
    worker_certificates,
    worker_sessions,
)
from .services.authority import LEASED
from .services.claiming import CLAIMED, QUEUED
from .services.session import OFFLINE

OPEN: Final = tuple(RUN_TRANSITIONS)
"""The states of a run that is not over."""

ENDING_MS: Final = 7 * 86_400_000
"""A certificate with less than this left should have been renewed long ago."""


class Gauge(msgspec.Struct, frozen=True):
    """One measure. `values` by the one label's value, or by the empty text where there is no label."""

    name: str
    meaning: str
    values: dict[str, float]
    label: str = ""


def measure(tx: Transaction, policy: ExpiryPolicy) -> list[Gauge]:
    """Every gauge now. A handful of queries over what is not over, none of which grows with history."""
    return [
        Gauge("qlcontrol_runs", "Runs that are not over.", _open_runs(tx), "status"),
        Gauge(
            "qlcontrol_queue_age_seconds", "How long the run that waits longest for a worker has waited.", _age(tx, _queued())
        ),
        Gauge(
            "qlcontrol_expired_lease_age_seconds",
            "How long ago the lease ran out that should have been ended first.",
            _age(tx, _expired(tx, policy)),
        ),
        Gauge("qlcontrol_recoveries", "Started runs that nobody holds.", _recoveries(tx), "status"),
        Gauge("qlcontrol_cancellations", "Stops of runs that are not over.", _cancellations(tx), "status"),
        Gauge("qlcontrol_workers", "Workers by the state of their session.", _workers(tx), "session"),
        Gauge(
            "qlcontrol_workers_with_ending_certificate",
            "Workers whose last certificate ends within seven days.",
            {"": float(_ending(tx))},
        ),
    ]


def _counts(tx: Transaction, statement: Select[Any], *always: str) -> dict[str, float]:
    return dict.fromkeys(always, 0.0) | {str(state): float(count) for state, count in map(tuple, tx.rows(statement))}


def _open_runs(tx: Transaction) -> dict[str, float]:
    statement = select(runs.c.status, func.count()).where(runs.c.status.in_(OPEN)).group_by(runs.c.status)
    return _counts(tx, statement, *OPEN)


def _queued() -> Select[Any]:
    return select(func.min(runs.c.queued_at_ms)).where(runs.c.status == QUEUED)


def _expired(tx: Transaction, policy: ExpiryPolicy) -> Select[Any]:
    """Under the policy `evidence` a started run keeps its lease; recovery looks after it."""
    lease = run_dispatch_leases
    statement = select(func.min(lease.c.expires_at_ms)).where(lease.c.status == LEASED, lease.c.expires_at_ms <= tx.now_ms)
    if policy == "lost":
        return statement
    return statement.join(run_attempts, run_attempts.c.id == lease.c.attempt_id).where(run_attempts.c.status == CLAIMED)


def _age(tx: Transaction, statement: Select[Any]) -> dict[str, float]:
    row = tx.row(statement)
    since = None if row is None else row[0]
    return {"": 0.0 if since is None else max(0, tx.now_ms - int(since)) / 1000}


def _recoveries(tx: Transaction) -> dict[str, float]:
    control = recovery_controls
    statement = select(control.c.status, func.count()).where(control.c.status != "resolved").group_by(control.c.status)
    return _counts(tx, statement, "retry", "manual")


def _cancellations(tx: Transaction) -> dict[str, float]:
    record = cancellation_dispatches
    statement = (
        select(record.c.status, func.count())
        .join(runs, runs.c.id == record.c.run_id)
        .where(runs.c.status.in_(OPEN))
        .group_by(record.c.status)
    )
    return _counts(tx, statement, "pending", "dispatched", "blocked")


def _workers(tx: Transaction) -> dict[str, float]:
    session = worker_sessions
    is_silent = (session.c.status != OFFLINE) & (session.c.lease_expires_at_ms <= tx.now_ms)
    state = case((is_silent, "silent"), else_=session.c.status)
    return _counts(tx, select(state, func.count()).group_by(state), "online", "draining", "offline", "silent")


def _ending(tx: Transaction) -> int:
    table = worker_certificates
    last = (
        select(func.max(table.c.not_after_ms).label("ends"))
        .where(table.c.revoked_at_ms.is_(None))
        .group_by(table.c.worker_id)
        .subquery()
    )
    row = tx.row(select(func.count()).select_from(last).where(last.c.ends > tx.now_ms, last.c.ends <= tx.now_ms + ENDING_MS))
    return 0 if row is None else int(row[0])
