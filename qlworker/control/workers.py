"""Workers as an operator sees them: credentials beside the session."""

from sqlalchemy import select, union_all

from ..domain.errors import Conflict
from .credentials import listed
from .database import Transaction
from .operator_api import WorkerView
from .schema import enrolment_tokens, worker_credentials, worker_sessions


def workers(tx: Transaction) -> list[WorkerView]:
    """Every worker that ever had a credential, by id."""
    sessions = {row.worker_id: row for row in tx.rows(select(worker_sessions))}
    credentials = listed(tx)
    views = []
    for worker_id in dict.fromkeys(each.worker_id for each in credentials):
        valid = [
            each.expires_at_ms
            for each in credentials
            if each.worker_id == worker_id and each.state == "active" and each.expires_at_ms > tx.now_ms
        ]
        session = sessions.get(worker_id)
        status = "none" if session is None else session.status
        if session is not None and status != "offline" and session.lease_expires_at_ms <= tx.now_ms:
            status = "silent"
        views.append(
            WorkerView(
                worker_id=worker_id,
                credentials=len(valid),
                credential_expires_at_ms=max(valid, default=None),
                session=status,
                last_heartbeat_at_ms=None if session is None else session.last_heartbeat_at_ms,
                available_slots=None if session is None else session.available_slots,
                max_concurrent_runs=None if session is None else session.max_concurrent_runs,
            )
        )
    return views


def require_known(tx: Transaction, worker_id: str, what: str) -> None:
    """Raises Conflict unless `worker_id` was added: it has, had, or is invited to take a credential."""
    tables = (worker_credentials, enrolment_tokens)
    known = union_all(*(select(table.c.worker_id).where(table.c.worker_id == worker_id) for table in tables))
    if tx.row(known) is None:
        raise Conflict(f"{what} is for the worker {worker_id}, which nobody added; add it with qlcontrol worker add")
