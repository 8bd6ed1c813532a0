"""Worker credentials: issued once, stored as digests, append-only by version.

A credential's newest version is what counts. A rotation makes a new credential and lets the old one run out after an overlap,
so that a worker whose token file is replaced a little later is never locked out. Source: wire-protocol.md §1.3, §9.5,
control-plane.md §15.2.
"""

import hmac
import secrets
import uuid
from typing import Final, Literal

import msgspec
from sqlalchemy import bindparam, func, insert, select

from ..domain.canonical import b64u, credential_digest, from_b64u
from ..domain.errors import Conflict
from ..domain.text import SAFE_INTEGER, check_credential_id, check_integer, check_worker_id
from . import audit
from .database import Transaction
from .ids import new_id
from .schema import credential_deliveries, worker_credentials

SECRET_BYTES: Final = 32
TOKEN_PREFIX: Final = "ql3w_"  # noqa: S105 - the form of a token, not one
SCHEME: Final = "Worker "
HEADER_CHARS: Final = 256

_NO_DIGEST: Final = "0" * 64
_UNKNOWN: Final = "unknown"


_PRESENTED: Final = (
    select(worker_credentials, credential_deliveries.c.state.label("delivery"))
    .outerjoin(credential_deliveries, credential_deliveries.c.credential_id == worker_credentials.c.credential_id)
    .where(worker_credentials.c.credential_id == bindparam("credential_id"))
    .order_by(worker_credentials.c.version.desc())
    .limit(1)
)


class Principal(msgspec.Struct, frozen=True):
    """Who a request comes from, as its credential proves it."""

    worker_id: str
    credential_id: str
    version: int
    is_unobserved: bool = False
    """Whether it came by a rotation and was not used yet."""


class Credential(msgspec.Struct, frozen=True):
    """The newest version of a credential, without its digest. Times in UTC milliseconds."""

    credential_id: str
    version: int
    worker_id: str
    state: Literal["active", "revoked"]
    created_at_ms: int
    not_before_at_ms: int
    expires_at_ms: int


class Issued(msgspec.Struct, frozen=True):
    """A new credential with its token, which is told this one time and never shows in a repr; None when it was told before."""

    credential: Credential
    token: str | None

    def __repr__(self) -> str:
        return f"<Issued credential={self.credential.credential_id}>"


def issue(tx: Transaction, pepper: bytes, worker_id: str, lifetime_ms: int, mutation_id: str | None = None) -> Issued:
    """A first credential for `worker_id`, valid from now for `lifetime_ms`.

    A `mutation_id` that was used before changes nothing and gives the credential without its token. Raises ValueError for a
    malformed id or lifetime, Conflict when the worker has a credential that is active.
    """
    check_worker_id(worker_id)
    tx.lock("worker", worker_id)
    done = _done_before(tx, worker_id, mutation_id)
    if done is not None:
        return done
    require_none_active(tx, worker_id)
    return _append_new(tx, pepper, worker_id, lifetime_ms, "worker_credential_issue", mutation_id)


def rotate(tx: Transaction, pepper: bytes, worker_id: str, lifetime_ms: int, mutation_id: str | None = None) -> Issued:
    """A further credential for `worker_id`; those before it go on for now (see deliveries).

    A `mutation_id` that was used before changes nothing and gives the credential without its token. Raises Conflict when the
    worker has no active credential, ValueError for a bad duration.
    """
    tx.lock("worker", worker_id)
    done = _done_before(tx, worker_id, mutation_id)
    if done is not None:
        return done
    if not _active(tx, worker_id):
        raise Conflict(f"the worker {worker_id} has no active credential; add it first")
    return _append_new(tx, pepper, worker_id, lifetime_ms, "worker_credential_rotate", mutation_id)


def shorten_others(tx: Transaction, worker_id: str, credential_id: str, overlap_ms: int) -> None:
    """Lets every active credential of the worker but this one end after `overlap_ms` at the latest."""
    check_integer(overlap_ms, "overlap")
    # Not before its own creation time: a version whose window is empty would not be one.
    end = max(tx.now_ms + overlap_ms, tx.now_ms + 1)
    for each in _active(tx, worker_id):
        if each.credential_id != credential_id:
            _append(tx, msgspec.structs.replace(each, expires_at_ms=min(each.expires_at_ms, end)), _digest(tx, each))
            _audit(tx, "worker_credential_shorten", each)


def end_others(tx: Transaction, worker_id: str, credential_id: str) -> int:
    """Ends every active credential of the worker but this one at once; tells how many there were."""
    others = [each for each in _active(tx, worker_id) if each.credential_id != credential_id]
    return _end(tx, others)


def revoke(tx: Transaction, worker_id: str) -> int:
    """Ends every credential of `worker_id` at once and tells how many were active. Repeating it changes nothing."""
    tx.lock("worker", worker_id)
    return _end(tx, [each for each in listed(tx, worker_id) if each.state == "active"])


def require_none_active(tx: Transaction, worker_id: str) -> None:
    """Raises Conflict when the worker has a credential that is active."""
    if _active(tx, worker_id):
        raise Conflict(f"the worker {worker_id} has an active credential; rotate or revoke it")


def listed(tx: Transaction, worker_id: str | None = None) -> list[Credential]:
    """The newest version of every credential, or of every one of `worker_id`, by worker and creation time."""
    table = worker_credentials
    newest = (
        select(table.c.credential_id, func.max(table.c.version).label("version")).group_by(table.c.credential_id).subquery()
    )
    statement = select(table).join(
        newest, (table.c.credential_id == newest.c.credential_id) & (table.c.version == newest.c.version)
    )
    if worker_id is not None:
        statement = statement.where(table.c.worker_id == worker_id)
    rows = tx.rows(statement.order_by(table.c.worker_id, table.c.created_at_ms, table.c.credential_id))
    return [
        Credential(
            credential_id=row.credential_id,
            version=row.version,
            worker_id=row.worker_id,
            state=row.state,
            created_at_ms=row.created_at_ms,
            not_before_at_ms=row.not_before_at_ms,
            expires_at_ms=row.expires_at_ms,
        )
        for row in rows
    ]


def _end(tx: Transaction, ending: list[Credential]) -> int:
    for each in ending:
        _append(tx, msgspec.structs.replace(each, state="revoked"), _digest(tx, each))
        _audit(tx, "worker_credential_revoke", each)
    return len(ending)


def _active(tx: Transaction, worker_id: str) -> list[Credential]:
    return [each for each in listed(tx, worker_id) if each.state == "active" and each.expires_at_ms > tx.now_ms]


def _done_before(tx: Transaction, worker_id: str, mutation_id: str | None) -> Issued | None:
    """What this mutation made before: the fact without the secret. Raises Conflict when it was another worker's."""
    if mutation_id is None:
        return None
    table = worker_credentials
    row = tx.row(select(table.c.credential_id, table.c.worker_id).where(table.c.mutation_id == mutation_id))
    if row is None:
        return None
    if row.worker_id != worker_id:
        raise Conflict("the mutation id was used for another worker; use another one")
    (credential,) = [each for each in listed(tx, worker_id) if each.credential_id == row.credential_id]
    return Issued(credential, None)


def authenticate(tx: Transaction, pepper: bytes, authorization: str | None) -> Principal | None:
    """Whom the header `Authorization: Worker ql3w_<id>_<secret>` proves, or None for everything that is not right.

    A rotated credential that was not handed over yet proves nothing. An unknown one costs the same work as a known one, so that
    the time tells nobody which ids exist.
    """
    parsed = _parse(authorization)
    if parsed is None:
        return None
    credential_id, secret = parsed
    row = tx.row(_PRESENTED, {"credential_id": credential_id})
    presented = credential_digest(pepper, credential_id if row is not None else _UNKNOWN, secret)
    matches = hmac.compare_digest(presented, _NO_DIGEST if row is None else row.secret_digest)
    if row is None or not matches:
        return None
    if row.state != "active" or not row.not_before_at_ms <= tx.now_ms < row.expires_at_ms:
        return None
    if row.delivery == "credential_committed":
        return None
    return Principal(row.worker_id, credential_id, row.version, is_unobserved=row.delivery == "published")


def _parse(authorization: str | None) -> tuple[str, bytes] | None:
    if authorization is None or len(authorization) > HEADER_CHARS or not authorization.startswith(SCHEME + TOKEN_PREFIX):
        return None
    # The id holds no underscore, the secret may: the first one divides them (wire-protocol §1.3).
    credential_id, _, text = authorization.removeprefix(SCHEME + TOKEN_PREFIX).partition("_")
    try:
        check_credential_id(credential_id)
        secret = from_b64u(text)
    except ValueError:
        return None
    return (credential_id, secret) if len(secret) == SECRET_BYTES else None


def _append_new(
    tx: Transaction, pepper: bytes, worker_id: str, lifetime_ms: int, operation: str, mutation_id: str | None
) -> Issued:
    check_integer(lifetime_ms, "lifetime", 1, SAFE_INTEGER - tx.now_ms)
    secret = secrets.token_bytes(SECRET_BYTES)
    credential = Credential(
        credential_id=new_id(tx.now_ms),
        version=0,
        worker_id=worker_id,
        state="active",
        created_at_ms=tx.now_ms,
        not_before_at_ms=tx.now_ms,
        expires_at_ms=tx.now_ms + lifetime_ms,
    )
    credential = _append(tx, credential, credential_digest(pepper, credential.credential_id, secret), mutation_id)
    _audit(tx, operation, credential)
    return Issued(credential, f"{TOKEN_PREFIX}{credential.credential_id}_{b64u(secret)}")


def _append(tx: Transaction, credential: Credential, digest: str, mutation_id: str | None = None) -> Credential:
    """Writes the next version; the primary key refuses it when somebody else wrote that version first."""
    following = msgspec.structs.replace(credential, version=credential.version + 1, created_at_ms=tx.now_ms)
    tx.write(
        insert(worker_credentials).values(
            **msgspec.structs.asdict(following), secret_digest=digest, mutation_id=mutation_id or str(uuid.uuid4())
        )
    )
    return following


def _digest(tx: Transaction, credential: Credential) -> str:
    table = worker_credentials
    row = tx.row(
        select(table.c.secret_digest).where(
            table.c.credential_id == credential.credential_id, table.c.version == credential.version
        )
    )
    if row is None:
        raise Conflict(f"the credential {credential.credential_id} changed in the meantime")
    digest: str = row.secret_digest
    return digest


def _audit(tx: Transaction, operation: str, credential: Credential) -> None:
    audit.note(
        tx,
        operation,
        "allowed",
        subject=credential.worker_id,
        authentication_id=credential.credential_id,
        reasons="operator",
    )
