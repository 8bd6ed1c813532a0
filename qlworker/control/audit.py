"""The security audit: one row per decision about who may do what; never a body, a token or a key (control-plane.md §12)."""

import uuid
from typing import Final, Literal

from sqlalchemy import delete, select, tuple_

from .database import Transaction
from .ids import new_id
from .operator_api import AuditView
from .schema import security_audit

LISTED: Final = 1000
"""The most rows one question is answered with."""

Outcome = Literal["allowed", "authentication_rejected", "refused"]


def note(
    tx: Transaction,
    operation: str,
    outcome: Outcome,
    *,
    subject: str | None,
    authentication_id: str | None = None,
    reasons: str = "",
    request_id: str | None = None,
) -> None:
    """Writes one row. `operation`, `outcome` and `reasons` are words of this program, at most 64, 64 and 512 characters."""
    tx.add(
        security_audit,
        {
            "event_id": new_id(tx.now_ms),
            "request_id": request_id or str(uuid.uuid4()),
            "operation_id": operation,
            "subject": subject,
            "authentication_id": authentication_id,
            "outcome": outcome,
            "reasons": reasons,
            "occurred_at_ms": tx.now_ms,
        },
    )


def listed(
    tx: Transaction, limit: int, *, before: str | None = None, subject: str | None = None, outcome: str | None = None
) -> list[AuditView]:
    """Up to `limit` rows, newest first, older than the row of the event id `before` if there is one.

    Raises ValueError for a limit that is not 1 to LISTED, or an event id that is none.
    """
    if not 1 <= limit <= LISTED:
        raise ValueError(f"limit must be 1 to {LISTED}")
    table = security_audit
    statement = select(table).order_by(table.c.occurred_at_ms.desc(), table.c.event_id.desc()).limit(limit)
    if before is not None:
        last = tx.row(select(table.c.occurred_at_ms).where(table.c.event_id == before))
        if last is None:
            raise ValueError("before must be the event id of a row that is there")
        statement = statement.where(tuple_(table.c.occurred_at_ms, table.c.event_id) < (last.occurred_at_ms, before))
    if subject is not None:
        statement = statement.where(table.c.subject == subject)
    if outcome is not None:
        statement = statement.where(table.c.outcome == outcome)
    return [
        AuditView(
            event_id=row.event_id,
            request_id=row.request_id,
            operation=row.operation_id,
            subject=row.subject,
            authentication_id=row.authentication_id,
            outcome=row.outcome,
            reasons=row.reasons,
            occurred_at_ms=row.occurred_at_ms,
        )
        for row in tx.rows(statement)
    ]


def sweep(tx: Transaction, older_than_ms: int, limit: int) -> int:
    """Removes up to `limit` of the oldest rows from before `older_than_ms` and tells how many there were."""
    table = security_audit
    oldest = (
        select(table.c.event_id)
        .where(table.c.occurred_at_ms < older_than_ms)
        .order_by(table.c.occurred_at_ms, table.c.event_id)
        .limit(limit)
    )
    return tx.write(delete(table).where(table.c.event_id.in_(oldest)))
