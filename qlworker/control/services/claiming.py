"""The claim: gives one attempt to one session, or says why not. The only thing that makes or renews a lease's generation.

Source: control-plane.md §4.2, §5.5. Candidate visibility and placement are never a claim.
"""

from enum import StrEnum
from typing import Final

import msgspec
from sqlalchemy import bindparam, func, select

from ...domain.canonical import digests_equal, lease_token_digest
from ...wire.offers import OfferRequest
from ..aggregate import (
    REMOTE_WORKER,
    RUNTIME,
    Attempt,
    Run,
    advance_attempt,
    advance_run,
    latest_attempt,
    load_attempt,
    load_run,
)
from ..database import Transaction
from ..schema import run_dispatch_leases
from .authority import COMPLETED, LEASED, Claim, DispatchLease, load_lease
from .session import ONLINE, Caller, Session, load_session

CLAIMED: Final = "claimed"
QUEUED: Final = "queued"
DISPATCHING: Final = "dispatching"

_HELD: Final = select(func.count()).where(
    run_dispatch_leases.c.worker_id == bindparam("worker"),
    run_dispatch_leases.c.worker_session_id == bindparam("session"),
    run_dispatch_leases.c.status == LEASED,
    run_dispatch_leases.c.expires_at_ms > bindparam("now_ms"),
)


class Outcome(StrEnum):
    """What came of trying to claim one attempt."""

    CLAIMED = "claimed"
    IDEMPOTENT = "idempotent"
    LEASED = "leased"
    NOT_ELIGIBLE = "not_eligible"
    WORKER_UNAVAILABLE = "worker_unavailable"
    CAPACITY_EXHAUSTED = "capacity_exhausted"


class ClaimResult(msgspec.Struct, frozen=True):
    """The outcome, with the claim for `claimed` and `idempotent`."""

    outcome: Outcome
    claim: Claim | None = None


def usable_session(tx: Transaction, caller: Caller, generation: int) -> Session | None:
    """The caller's session when it may take new work: current, online and unexpired; else None."""
    session = load_session(tx, caller.worker_id)
    if session is None or (session.session_id, session.generation) != (caller.session_id, generation):
        return None
    return session if session.status == ONLINE and session.is_live(tx.now_ms) else None


def claim(tx: Transaction, caller: Caller, attempt_id: str, request: OfferRequest, lease_ms: int) -> ClaimResult:
    """Claims `attempt_id` for the caller under the pair of `request`, for `lease_ms` milliseconds."""
    session = usable_session(tx, caller, request.worker_generation)
    attempt = load_attempt(tx, attempt_id)
    run = None if attempt is None else load_run(tx, attempt.run_id)
    lease = load_lease(tx, attempt_id)
    is_over = lease is not None and lease.status == COMPLETED
    if attempt is None or run is None or is_over or not (_is_eligible(run, attempt) and _is_newest(tx, attempt)):
        return ClaimResult(Outcome.NOT_ELIGIBLE)
    if session is None:
        return ClaimResult(Outcome.WORKER_UNAVAILABLE)
    if lease is not None and lease.is_live(tx.now_ms):
        if _is_holder(lease, caller, request):
            return ClaimResult(Outcome.IDEMPOTENT, Claim(run, attempt, lease))
        return ClaimResult(Outcome.LEASED)
    held = _held_by(tx, session)
    if held >= session.max_concurrent_runs or held >= session.available_slots:
        return ClaimResult(Outcome.CAPACITY_EXHAUSTED)
    return ClaimResult(
        Outcome.CLAIMED,
        _grant(tx, caller, Claim(run, attempt, _terms(tx, lease, run, attempt_id, caller, request, lease_ms)), lease),
    )


def _is_eligible(run: Run, attempt: Attempt) -> bool:
    return (
        run.execution_owner == RUNTIME
        and run.cancel_requested_at_ms is None
        and run.status in (QUEUED, DISPATCHING)
        and run.queued_at_ms is not None
        and attempt.status == CLAIMED
        and attempt.executor_type == REMOTE_WORKER
    )


def _is_newest(tx: Transaction, attempt: Attempt) -> bool:
    """Whether no later attempt of its run exists: an older one has had its turn (R353)."""
    newest = latest_attempt(tx, attempt.run_id)
    return newest is not None and newest.id == attempt.id


def _is_holder(lease: DispatchLease, caller: Caller, request: OfferRequest) -> bool:
    held_by = (lease.worker_id, lease.worker_session_id, lease.worker_generation, lease.offer_id)
    asked = (caller.worker_id, caller.session_id, request.worker_generation, request.offer_id)
    return held_by == asked and digests_equal(lease.lease_token_digest, lease_token_digest(request.lease_token))


def _held_by(tx: Transaction, session: Session) -> int:
    """Live leases of this session. The caller holds the worker's lock, so two pulls cannot both count the last slot."""
    row = tx.row(_HELD, {"worker": session.worker_id, "session": session.session_id, "now_ms": tx.now_ms})
    return 0 if row is None else int(row[0])


def _terms(
    tx: Transaction,
    before: DispatchLease | None,
    run: Run,
    attempt_id: str,
    caller: Caller,
    request: OfferRequest,
    lease_ms: int,
) -> DispatchLease:
    return DispatchLease(
        attempt_id=attempt_id,
        run_id=run.id,
        status=LEASED,
        version=0 if before is None else before.version + 1,
        lease_generation=1 if before is None else before.lease_generation + 1,
        worker_id=caller.worker_id,
        worker_session_id=caller.session_id,
        worker_generation=request.worker_generation,
        lease_token_digest=lease_token_digest(request.lease_token),
        offer_id=request.offer_id,
        acquired_at_ms=tx.now_ms,
        renewed_at_ms=tx.now_ms,
        expires_at_ms=tx.now_ms + lease_ms,
        updated_at_ms=tx.now_ms,
    )


def _grant(tx: Transaction, caller: Caller, granted: Claim, before: DispatchLease | None) -> Claim:
    """Lease row, attempt projection, run and Event, all or none."""
    lease = granted.lease
    values = msgspec.structs.asdict(lease)
    if before is None:
        tx.add(run_dispatch_leases, values)
    else:
        tx.change(run_dispatch_leases, {"attempt_id": lease.attempt_id, "version": before.version}, values)
    attempt = advance_attempt(
        tx,
        granted.attempt,
        CLAIMED,
        {
            "worker_id": lease.worker_id,
            "worker_session_id": lease.worker_session_id,
            "worker_generation": lease.worker_generation,
            "lease_generation": lease.lease_generation,
            "lease_version": lease.version,
            "lease_token_digest": lease.lease_token_digest,
            "offer_id": lease.offer_id,
            "lease_expires_at_ms": lease.expires_at_ms,
        },
    )
    run = advance_run(
        tx,
        granted.run,
        DISPATCHING,
        "run.dispatching" if granted.run.status == QUEUED else "run.dispatch_reclaimed",
        actor_type="worker",
        actor_id=caller.worker_id,
        attempt_id=lease.attempt_id,
        payload={
            "offerId": lease.offer_id,
            "workerSessionId": lease.worker_session_id,
            "workerGeneration": lease.worker_generation,
            "leaseGeneration": lease.lease_generation,
            "leaseVersion": lease.version,
            "leaseExpiresAtMs": lease.expires_at_ms,
        },
        dedupe_key=f"run-dispatch:{lease.attempt_id}:{lease.lease_generation}:claimed",
    )
    return Claim(run, attempt, lease)
