"""What an operator does about workers, each in one transaction: add, invite, rotate, revoke."""

from pathlib import Path

from ..domain.canonical import sha256_hex
from ..domain.text import check_integer
from . import certificates, credentials, deliveries, enrolment
from .database import Transaction
from .operator_api import AddWorker, InviteWorker, Revoked, RotateWorker
from .private_files import read_pem


def add(tx: Transaction, pepper: bytes, wanted: AddWorker) -> credentials.Issued:
    """A first credential for a worker that gets a kit; the certificate in it is remembered, so that it can be revoked.

    Raises ValueError for a value out of bounds, Conflict when the worker has an active credential.
    """
    lifetime_ms = _milliseconds(wanted.lifetime_s, "lifetime_s")
    issued = credentials.issue(tx, pepper, wanted.worker_id, lifetime_ms, wanted.mutation_id)
    enrolment.end_invitations(tx, wanted.worker_id)
    if issued.token is not None:
        certificates.remember(tx, wanted.worker_id, wanted.serial, wanted.not_after_ms)
    return issued


def invite(tx: Transaction, pepper: bytes, wanted: InviteWorker, authority_sha256: str) -> enrolment.Invited:
    """An invitation. Raises as enrolment.invite does."""
    return enrolment.invite(
        tx,
        pepper,
        wanted.worker_id,
        authority_sha256,
        lifetime_ms=_milliseconds(wanted.lifetime_s, "lifetime_s"),
        credential_lifetime_ms=_milliseconds(wanted.credential_lifetime_s, "credential_lifetime_s"),
    )


def rotate(tx: Transaction, pepper: bytes, wanted: RotateWorker) -> credentials.Issued:
    """A further credential, which counts once it is published. Raises as credentials.rotate does."""
    lifetime_ms, overlap_ms = _milliseconds(wanted.lifetime_s, "lifetime_s"), _milliseconds(wanted.overlap_s, "overlap_s")
    issued = credentials.rotate(tx, pepper, wanted.worker_id, lifetime_ms, wanted.mutation_id)
    if issued.token is not None:
        deliveries.commit(tx, wanted.worker_id, issued.credential.credential_id, overlap_ms)
    return issued


def revoke(tx: Transaction, worker_id: str) -> Revoked:
    """Ends everything that lets a box be this worker. Repeating it changes nothing. Raises Conflict for an unknown worker."""
    tx.lock("worker", worker_id)
    enrolment.require_known_worker(tx, worker_id)
    return Revoked(
        revoked=credentials.revoke(tx, worker_id),
        certificates=certificates.revoke(tx, worker_id),
        invitations=enrolment.end_invitations(tx, worker_id),
    )


def authority_digest(certificate: Path) -> str:
    """SHA-256 of the authority's certificate, which an invitation carries. Blocks. Raises Refused when it cannot be read."""
    import ssl

    return sha256_hex(ssl.PEM_cert_to_DER_cert(read_pem(certificate).decode()))


def _milliseconds(seconds: int, name: str) -> int:
    return check_integer(seconds, name, 0, 100 * 366 * 86_400) * 1000
