"""How far a rotated credential has come: made, handed over, used, and the one before it ended (control-plane.md §15.2, V112).

A credential that was made but not handed over proves nothing. The one before it ends a while after the handing over, or as soon
as the new one was used.
"""

from typing import Final

import msgspec
from sqlalchemy import insert, select, update

from ..domain.errors import Conflict
from . import audit
from .credentials import end_others, shorten_others
from .database import Transaction
from .schema import credential_deliveries

COMMITTED: Final = "credential_committed"
PUBLISHED: Final = "published"
OBSERVED: Final = "observed"
PREVIOUS_REVOKED: Final = "previous_revoked"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `credential_deliveries`; times in milliseconds."""

    credential_id: str
    worker_id: str
    version: int
    state: str
    overlap_ms: int
    committed_at_ms: int
    published_at_ms: int | None = None
    observed_at_ms: int | None = None
    observed_session_id: str | None = None
    revoked_at_ms: int | None = None


def commit(tx: Transaction, worker_id: str, credential_id: str, overlap_ms: int) -> None:
    """A rotated credential was made. `overlap_ms`: how long the one before it lives after the handing over, at most."""
    row = Delivery(
        credential_id=credential_id,
        worker_id=worker_id,
        version=1,
        state=COMMITTED,
        overlap_ms=overlap_ms,
        committed_at_ms=tx.now_ms,
    )
    tx.write(insert(credential_deliveries).values(msgspec.structs.asdict(row)))


def publish(tx: Transaction, credential_id: str) -> None:
    """The token lies where its worker finds it: from now on it counts, and the overlap begins. Repeating changes nothing.

    Raises Conflict for a credential that was not rotated.
    """
    delivery = _load(tx, credential_id)
    if delivery is None:
        raise Conflict(f"the credential {credential_id} was not made by a rotation")
    tx.lock("worker", delivery.worker_id)
    if delivery.state != COMMITTED:
        return
    _advance(tx, delivery, PUBLISHED, published_at_ms=tx.now_ms)
    shorten_others(tx, delivery.worker_id, credential_id, delivery.overlap_ms)
    audit.note(
        tx,
        "worker_credential_publish",
        "allowed",
        subject=delivery.worker_id,
        authentication_id=credential_id,
        reasons="operator",
    )


def observe(tx: Transaction, credential_id: str, session_id: str) -> None:
    """The first heartbeat or transition with a published credential. The caller has the worker's lock."""
    delivery = _load(tx, credential_id)
    if delivery is not None and delivery.state == PUBLISHED:
        _advance(tx, delivery, OBSERVED, observed_at_ms=tx.now_ms, observed_session_id=session_id)


def observed(tx: Transaction, limit: int = 64) -> list[str]:
    """Up to `limit` credentials that were used and whose forerunners still live, oldest first."""
    table = credential_deliveries
    rows = tx.rows(select(table.c.credential_id).where(table.c.state == OBSERVED).order_by(table.c.observed_at_ms).limit(limit))
    return [row.credential_id for row in rows]


def revoke_previous(tx: Transaction, credential_id: str) -> int:
    """Ends every other credential of the worker, once the new one was used; tells how many were active."""
    delivery = _load(tx, credential_id)
    if delivery is None:
        return 0
    tx.lock("worker", delivery.worker_id)
    delivery = _load(tx, credential_id)
    if delivery is None or delivery.state != OBSERVED:
        return 0
    _advance(tx, delivery, PREVIOUS_REVOKED, revoked_at_ms=tx.now_ms)
    return end_others(tx, delivery.worker_id, credential_id)


def _load(tx: Transaction, credential_id: str) -> Delivery | None:
    row = tx.row(select(credential_deliveries).where(credential_deliveries.c.credential_id == credential_id))
    return None if row is None else Delivery(**row._mapping)


def _advance(tx: Transaction, delivery: Delivery, state: str, **changes: object) -> None:
    table = credential_deliveries
    tx.write_one(
        update(table)
        .where(table.c.credential_id == delivery.credential_id, table.c.version == delivery.version)
        .values(state=state, version=delivery.version + 1, **changes)
    )
