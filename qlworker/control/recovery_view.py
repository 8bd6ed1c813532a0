"""Started runs that nobody holds, as an operator sees them (control-plane.md §16)."""

from sqlalchemy import select

from ..domain.text import check_integer
from .database import Transaction
from .operator_api import RecoveryView
from .schema import recovery_controls, run_attempts


def waiting(tx: Transaction, limit: int) -> list[RecoveryView]:
    """Up to `limit` (1..1000) runs that wait for evidence or for an operator, those for the operator first."""
    check_integer(limit, "limit", 1, 1000)
    control = recovery_controls
    statement = (
        select(control, run_attempts.c.worker_id)
        .join(run_attempts, run_attempts.c.id == control.c.attempt_id)
        .where(control.c.status != "resolved")
        .order_by(control.c.status, control.c.updated_at_ms, control.c.attempt_id)
        .limit(limit)
    )
    return [
        RecoveryView(
            run_id=row.run_id,
            attempt_id=row.attempt_id,
            worker_id=row.worker_id,
            status=row.status,
            reason=row.reason,
            looks=row.looks,
            next_look_at_ms=row.next_look_at_ms,
            updated_at_ms=row.updated_at_ms,
        )
        for row in tx.rows(statement)
    ]
