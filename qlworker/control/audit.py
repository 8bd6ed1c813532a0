"""The security audit: one row per decision about who may do what; never a body, a token or a key (control-plane.md §12)."""

import uuid
from typing import Literal

from sqlalchemy import insert

from .database import Transaction
from .ids import new_id
from .schema import security_audit

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
    tx.write(
        insert(security_audit).values(
            event_id=new_id(tx.now_ms),
            request_id=request_id or str(uuid.uuid4()),
            operation_id=operation,
            subject=subject,
            authentication_id=authentication_id,
            outcome=outcome,
            reasons=reasons,
            occurred_at_ms=tx.now_ms,
        )
    )
