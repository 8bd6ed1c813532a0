"""Invitations: made for one worker id, good once and for a while, spent by the box that becomes that worker.

A box whose answer was lost sends the same request again and gets a new token; the one it never saw is ended. Source:
control-plane.md §15.1, R505.
"""

import hashlib
import hmac
import secrets
from typing import Final

import msgspec
from sqlalchemy import insert, select, update

from ..domain.canonical import sha256_hex
from ..domain.errors import Conflict, Unauthorized
from ..domain.text import SAFE_INTEGER, check_integer
from ..wire.enrolment import SECRET_BYTES, EnrolmentRequest, Invitation
from . import audit, certificates, credentials
from .credentials import Issued
from .database import Transaction
from .ids import new_id
from .pki import check_worker_subject
from .schema import enrolment_tokens

INVITATION_S: Final = 86_400

_OPERATION: Final = "worker_enrolment"


class Invited(msgspec.Struct, frozen=True):
    """A new invitation, told this one time."""

    invitation: Invitation
    expires_at_ms: int


class Admission(msgspec.Struct, frozen=True):
    """What a valid invitation stands for."""

    token_id: str
    worker_id: str
    credential_lifetime_ms: int


def invite(
    tx: Transaction, pepper: bytes, worker_id: str, authority_sha256: str, *, lifetime_ms: int, credential_lifetime_ms: int
) -> Invited:
    """Invites a box to be `worker_id`. An invitation of that worker that was not spent ends with it.

    Raises ValueError for an id that fits into no certificate or a lifetime out of bounds, Conflict when the worker has an
    active credential.
    """
    check_worker_subject(worker_id)
    check_integer(lifetime_ms, "lifetime", 1, SAFE_INTEGER - 2**52)
    check_integer(credential_lifetime_ms, "credential lifetime", 1, SAFE_INTEGER - 2**52)
    tx.lock("worker", worker_id)
    credentials.require_none_active(tx, worker_id)
    end_invitations(tx, worker_id)
    invitation = Invitation(new_id(tx.now_ms), secrets.token_bytes(SECRET_BYTES), authority_sha256)
    expires_at_ms = tx.now_ms + lifetime_ms
    tx.write(
        insert(enrolment_tokens).values(
            token_id=invitation.token_id,
            worker_id=worker_id,
            secret_digest=_digest(pepper, invitation),
            credential_lifetime_ms=credential_lifetime_ms,
            created_at_ms=tx.now_ms,
            expires_at_ms=expires_at_ms,
        )
    )
    audit.note(
        tx,
        "worker_invitation",
        "allowed",
        subject=worker_id,
        authentication_id=invitation.token_id,
        reasons="operator",
    )
    return Invited(invitation, expires_at_ms)


def admit(tx: Transaction, pepper: bytes, request: EnrolmentRequest, request_id: str) -> Admission | None:
    """What the request's invitation is good for, or None with an audit row that says why.

    Spent already is good for the same request alone. Nothing is spent yet: that is for `conclude`.
    """
    try:
        invitation = Invitation.parse(request.invitation)
    except ValueError:
        _refuse(tx, request_id, None, None, "malformed")
        return None
    table = enrolment_tokens
    row = tx.row(select(table).where(table.c.token_id == invitation.token_id))
    known = "0" * 64 if row is None else row.secret_digest
    if not hmac.compare_digest(_digest(pepper, invitation), known) or row is None:
        _refuse(tx, request_id, None, invitation.token_id, "unknown")
        return None
    reason = None
    if row.revoked_at_ms is not None:
        reason = "revoked"
    elif row.expires_at_ms <= tx.now_ms:
        reason = "expired"
    elif row.spent_at_ms is not None and row.spent_request_digest != _request_digest(request):
        reason = "spent"
    if reason is not None:
        _refuse(tx, request_id, row.worker_id, invitation.token_id, reason)
        return None
    return Admission(row.token_id, row.worker_id, row.credential_lifetime_ms)


def conclude(
    tx: Transaction,
    pepper: bytes,
    admission: Admission,
    request: EnrolmentRequest,
    serial: str,
    not_after_ms: int,
    request_id: str,
) -> Issued:
    """Spends the invitation for this request and issues the credential; a repeat ends the credential before.

    Raises Unauthorized when somebody else spent or revoked it meanwhile.
    """
    tx.lock("worker", admission.worker_id)
    table = enrolment_tokens
    row = tx.row(select(table).where(table.c.token_id == admission.token_id))
    digest = _request_digest(request)
    if row is None or row.revoked_at_ms is not None or row.spent_request_digest not in (None, digest):
        raise Unauthorized("the invitation was spent or revoked meanwhile")
    if row.spent_at_ms is None:
        tx.write_one(
            update(table)
            .where(table.c.token_id == admission.token_id, table.c.spent_at_ms.is_(None))
            .values(spent_at_ms=tx.now_ms, spent_request_digest=digest)
        )
    credentials.end_others(tx, admission.worker_id, "")
    certificates.remember(tx, admission.worker_id, serial, not_after_ms)
    issued = credentials.issue(tx, pepper, admission.worker_id, admission.credential_lifetime_ms)
    audit.note(
        tx,
        _OPERATION,
        "allowed",
        subject=admission.worker_id,
        authentication_id=admission.token_id,
        request_id=request_id,
    )
    return issued


def end_invitations(tx: Transaction, worker_id: str) -> int:
    """Ends every invitation of `worker_id` that could still be spent; tells how many there were."""
    table = enrolment_tokens
    return tx.write(
        update(table)
        .where(table.c.worker_id == worker_id, table.c.revoked_at_ms.is_(None), table.c.spent_at_ms.is_(None))
        .values(revoked_at_ms=tx.now_ms)
    )


def note_refused_request(tx: Transaction, admission: Admission, request_id: str) -> None:
    """The invitation was good, the certificate request was not: nothing is spent."""
    _refuse(tx, request_id, admission.worker_id, admission.token_id, "certificate_request")


def require_known_worker(tx: Transaction, worker_id: str) -> None:
    """Raises Conflict unless the worker was invited or has a credential."""
    table = enrolment_tokens
    invited = tx.row(select(table.c.token_id).where(table.c.worker_id == worker_id))
    if invited is None and not credentials.listed(tx, worker_id):
        raise Conflict(f"the worker {worker_id} is not known")


def _refuse(tx: Transaction, request_id: str, worker_id: str | None, token_id: str | None, reason: str) -> None:
    audit.note(
        tx,
        _OPERATION,
        "authentication_rejected",
        subject=worker_id,
        authentication_id=token_id,
        reasons=reason,
        request_id=request_id,
    )


def _digest(pepper: bytes, invitation: Invitation) -> str:
    content = b"qlcontrol/invitation\x00" + invitation.token_id.encode() + b"\x00" + invitation.secret
    return hmac.new(pepper, content, hashlib.sha256).hexdigest()


def _request_digest(request: EnrolmentRequest) -> str:
    return sha256_hex(request.certificate_request.encode())
