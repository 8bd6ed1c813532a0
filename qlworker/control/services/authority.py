"""The fence: finds the attempt a request speaks about and proves that the request speaks for its lease.

Three separate questions: is it this lease at all (identify), is the session current (session.require_session), and does the
lease still live at the expected version (require_lease). A first effect needs all three; an exact replay may need fewer.
Source: control-plane.md §4.3, §7.1. The worker never learns which of them failed.
"""

from typing import Any, Final

import msgspec

from ...domain.canonical import digests_equal, lease_token_digest
from ...domain.errors import Corrupt, Fenced
from ...domain.revision import ExecutionRevision
from ...wire.activation import ActivationRequest
from ...wire.attestation import AttestationRequest
from ...wire.fence import LeaseFence
from ..aggregate import REMOTE_WORKER, RUNTIME, Attempt, Run, load_attempt, load_run, project_lease
from ..database import Transaction
from ..schema import run_dispatch_leases, task_execution_revisions
from .session import Caller

LEASED: Final = "leased"
RELEASED: Final = "released"
COMPLETED: Final = "completed"


class DispatchLease(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_dispatch_leases`; times in milliseconds."""

    attempt_id: str
    run_id: str
    status: str
    version: int
    lease_generation: int
    worker_id: str
    worker_session_id: str
    worker_generation: int
    lease_token_digest: str
    offer_id: str
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    released_at_ms: int | None = None
    release_reason: str | None = None
    completed_at_ms: int | None = None
    updated_at_ms: int

    def is_live(self, now_ms: int) -> bool:
        """Whether it is held and unexpired."""
        return self.status == LEASED and self.expires_at_ms > now_ms


class Claim(msgspec.Struct, frozen=True):
    """A run, its attempt and the lease on it, as they are stored."""

    run: Run
    attempt: Attempt
    lease: DispatchLease


def load_lease(tx: Transaction, attempt_id: str) -> DispatchLease | None:
    """The lease on an attempt, whatever its state, or None."""
    row = tx.find(run_dispatch_leases, attempt_id=attempt_id)
    return None if row is None else DispatchLease(**row._mapping)


def is_held(tx: Transaction, attempt_id: str) -> bool:
    """Whether somebody has a live lease on the attempt."""
    lease = load_lease(tx, attempt_id)
    return lease is not None and lease.is_live(tx.now_ms)


def identify(tx: Transaction, caller: Caller, fence: ActivationRequest | LeaseFence | AttestationRequest) -> Claim:
    """The claim `fence` belongs to: every identity equal, the token's digest included. Says nothing about being alive.

    Takes the run's lock first, so that the time and everything read afterwards hold until the end. Raises Fenced.
    """
    tx.lock("run", fence.run_id)
    lease = load_lease(tx, fence.attempt_id)
    attempt = load_attempt(tx, fence.attempt_id)
    run = None if attempt is None else load_run(tx, attempt.run_id)
    if lease is None or attempt is None or run is None:
        raise Fenced("there is no such claim")
    if run.execution_owner != RUNTIME or attempt.executor_type != REMOTE_WORKER:
        raise Fenced("the run belongs to another executor")
    held_by = (lease.worker_id, lease.worker_session_id, lease.worker_generation, lease.lease_generation, lease.offer_id)
    projected = (
        attempt.worker_id,
        attempt.worker_session_id,
        attempt.worker_generation,
        attempt.lease_generation,
        attempt.offer_id,
    )
    sent = (caller.worker_id, caller.session_id, fence.worker_generation, fence.lease_generation, fence.offer_id)
    if held_by != sent or projected != held_by or not run.id == lease.run_id == fence.run_id:
        raise Fenced("the claim belongs to another lease")
    if isinstance(fence, LeaseFence) and run.project_id != fence.project_id:
        raise Fenced("the run belongs to another project")
    if not digests_equal(lease.lease_token_digest, _sent_digest(fence)):
        raise Fenced("the lease token is another one")
    return Claim(run, attempt, lease)


def _sent_digest(fence: ActivationRequest | LeaseFence | AttestationRequest) -> str:
    if isinstance(fence, AttestationRequest):
        return fence.lease_token_digest
    return lease_token_digest(fence.lease_token)


def require_lease(tx: Transaction, claim: Claim, expected_version: int) -> None:
    """Raises Fenced unless the claim's lease is held, unexpired and at `expected_version`."""
    if claim.lease.status != LEASED:
        raise Fenced("the lease is over")
    if claim.lease.version != expected_version or claim.attempt.lease_version != expected_version:
        raise Fenced("the lease is at another version")
    if claim.lease.expires_at_ms <= tx.now_ms:
        raise Fenced("the lease has expired")


def change_lease(tx: Transaction, claim: Claim, **changes: Any) -> Claim:
    """The claim after a compare-and-set of its lease; version and expiry are projected into the attempt."""
    after = msgspec.structs.replace(claim.lease, updated_at_ms=tx.now_ms, **changes)
    lease = claim.lease
    present = {"attempt_id": lease.attempt_id, "version": lease.version, "status": lease.status}
    tx.change(run_dispatch_leases, present, {"updated_at_ms": tx.now_ms, **changes})
    projection = {"lease_version": after.version, "lease_expires_at_ms": after.expires_at_ms}
    return Claim(claim.run, project_lease(tx, claim.attempt, projection), after)


def load_revision(tx: Transaction, project_id: str, task_id: str, task_revision: str) -> ExecutionRevision:
    """The pinned revision, verified; never a newer one (control-plane.md §1.7). Raises Corrupt when missing or drifted."""
    row = tx.find(task_execution_revisions, project_id=project_id, task_id=task_id, task_revision=task_revision)
    if row is None:
        raise Corrupt("the pinned execution revision is missing")
    try:
        revision = msgspec.json.decode(row.content, type=ExecutionRevision)
        revision.verify()
    except (ValueError, msgspec.MsgspecError):
        raise Corrupt("the pinned execution revision is damaged") from None
    pinned = (project_id, task_id, task_revision, row.content_digest)
    if (revision.project_id, revision.task_id, revision.task_revision, revision.content_digest) != pinned:
        raise Corrupt("the pinned execution revision is another one")
    return revision


def require_revision(tx: Transaction, run: Run) -> ExecutionRevision:
    """The pinned revision for a request that cannot go on without it. Raises Fenced (V73)."""
    try:
        return load_revision(tx, run.project_id, run.task_id, run.task_revision)
    except Corrupt as error:
        raise Fenced(str(error)) from None
