"""Log upload: authority before the content is read, write-once afterwards (control-plane.md §14, wire-protocol.md §8.2)."""

from ...domain.canonical import log_artifact_id
from ...domain.errors import Fenced, Transient
from ...wire.completion import UPLOAD_SCHEMA, Artifact, OutputRequest, UploadHeader, UploadResponse
from ..artifact_store import ArtifactKey
from ..config import Settings
from ..database import Transaction
from ..schema import artifacts
from .activation import RUNNING, STARTING
from .authority import Claim, identify, require_lease
from .session import Caller, require_session


class OtherContent(Transient):
    """The log of this attempt is stored already and is another one; what was uploaded may go."""


def authorise(tx: Transaction, caller: Caller, request: UploadHeader | OutputRequest, settings: Settings) -> Claim:
    """Proves that the caller may write the log it names: of its own starting or running attempt. Raises Fenced."""
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    require_lease(tx, claim, request.expected_lease_version)
    attempt = claim.attempt
    if attempt.status not in (STARTING, RUNNING):
        raise Fenced("the attempt has no log to write")
    expected = log_artifact_id(claim.run.project_id, claim.run.id, attempt.id, claim.lease.offer_id)
    registered = attempt.log_artifact_id if attempt.status == RUNNING else expected
    if request.log_artifact_id != expected or registered != expected:
        raise Fenced("the log belongs to another attempt")
    return claim


def artifact_key(request: UploadHeader) -> ArtifactKey:
    """The identity of the uploaded log."""
    return ArtifactKey(request.project_id, request.run_id, request.attempt_id, request.log_artifact_id)


def load_artifact(tx: Transaction, attempt_id: str, log_id: str) -> Artifact | None:
    """What is stored under this log id, or None."""
    row = tx.find(artifacts, attempt_id=attempt_id, log_artifact_id=log_id)
    if row is None:
        return None
    return Artifact(log_artifact_id=log_id, byte_length=row.byte_length, sha256=row.sha256, truncated=row.truncated)


def record(tx: Transaction, header: UploadHeader, sha256: str) -> UploadResponse:
    """Makes an uploaded content the log of its attempt, unless there is one.

    The lease is not looked at again: a renewal during a long upload is normal, and the log's id binds it to this offer.
    Raises OtherContent when another content is stored already.
    """
    offered = Artifact(
        log_artifact_id=header.log_artifact_id,
        byte_length=header.byte_length,
        sha256=sha256,
        truncated=header.truncated,
    )
    tx.lock("run", header.run_id)
    stored = load_artifact(tx, header.attempt_id, header.log_artifact_id)
    if stored is not None and stored != offered:
        raise OtherContent("another content is stored for this log")
    if stored is None:
        tx.add(
            artifacts,
            {
                "attempt_id": header.attempt_id,
                "log_artifact_id": header.log_artifact_id,
                "project_id": header.project_id,
                "run_id": header.run_id,
                "byte_length": header.byte_length,
                "sha256": sha256,
                "truncated": header.truncated,
                "stored_at_ms": tx.now_ms,
            },
        )
    return UploadResponse(
        schema=UPLOAD_SCHEMA,
        status="stored" if stored is None else "already_stored",
        project_id=header.project_id,
        run_id=header.run_id,
        attempt_id=header.attempt_id,
        log_artifact_id=header.log_artifact_id,
        byte_length=header.byte_length,
        sha256=sha256,
        truncated=header.truncated,
    )
