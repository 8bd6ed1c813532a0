"""Which certificates workers have: remembered when they are signed, so that they can be revoked (control-plane.md §15.3)."""

import re
from typing import Final

from sqlalchemy import func, insert, select, update

from .database import Transaction
from .schema import worker_certificates

_SERIAL: Final = re.compile(r"[1-9a-f][0-9a-f]{0,39}\Z")


def remember(tx: Transaction, worker_id: str, serial: str, not_after_ms: int) -> None:
    """Notes a signed certificate. Before it is handed over: an unknown one could not be revoked.

    Raises ValueError for a serial number that no certificate has: it would spoil every revocation list.
    """
    if not _SERIAL.match(serial):
        raise ValueError("serial must be a certificate's serial number: 1 to 40 of [0-9a-f], the first one not 0")
    tx.write(
        insert(worker_certificates).values(
            serial=serial, worker_id=worker_id, not_after_ms=not_after_ms, created_at_ms=tx.now_ms
        )
    )


def signed_lately(tx: Transaction, worker_id: str) -> int:
    """How many certificates the worker got within the last hour."""
    table = worker_certificates
    row = tx.row(select(func.count()).where(table.c.worker_id == worker_id, table.c.created_at_ms > tx.now_ms - 3_600_000))
    return 0 if row is None else int(row[0])


def revoke(tx: Transaction, worker_id: str) -> int:
    """Revokes every certificate of `worker_id` that has not ended and tells how many there were."""
    table = worker_certificates
    return tx.write(
        update(table)
        .where(table.c.worker_id == worker_id, table.c.revoked_at_ms.is_(None), table.c.not_after_ms > tx.now_ms)
        .values(revoked_at_ms=tx.now_ms)
    )


def revoked_serials(tx: Transaction) -> list[str]:
    """The serial numbers of what was revoked and has not ended yet, in order."""
    table = worker_certificates
    rows = tx.rows(
        select(table.c.serial)
        .where(table.c.revoked_at_ms.is_not(None), table.c.not_after_ms > tx.now_ms)
        .order_by(table.c.serial)
    )
    return [row.serial for row in rows]
