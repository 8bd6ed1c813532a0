"""The control plane's own end of a lease: what a lease that ran out makes of its attempt and its run.

No worker reaches this. Renewal, completion and expiry meet at the run's lock, so exactly one of them wins; whatever fails here
takes everything back. Source: control-plane.md §9.1, R298 to R309.
"""

from enum import StrEnum
from typing import Any, Final

from ...domain.errors import Corrupt
from ..aggregate import REMOTE_WORKER, RUNTIME, TERMINAL, advance_attempt, advance_run, append_event, load_attempt, load_run
from ..config import ExpiryPolicy
from ..database import Transaction
from .activation import RUNNING, STARTING
from .authority import LEASED, RELEASED, Claim, DispatchLease, change_lease, load_lease
from .claiming import CLAIMED, DISPATCHING
from .completion import LOST

LEASE_EXPIRED: Final = "lease_expired"
EXPIRED_CODE: Final = "REMOTE_RUN_LEASE_EXPIRED"


class Expiry(StrEnum):
    """What an expiry found, and so what it wrote: nothing for the first five, the lease alone for three more."""

    NOT_FOUND = "not_found"
    ALREADY_EXPIRED = "already_expired"
    NOT_ELIGIBLE = "not_eligible"
    NOT_DUE = "not_due"
    AWAITS_EVIDENCE = "awaits_evidence"
    TERMINAL_RELEASED = "terminal_released"
    CANCELLATION_PENDING = "cancellation_pending"
    UNSTARTED_RELEASED = "unstarted_released"
    LOST = "lost"


_RELEASING: Final = frozenset({Expiry.TERMINAL_RELEASED, Expiry.CANCELLATION_PENDING, Expiry.UNSTARTED_RELEASED, Expiry.LOST})


def expire_with_lease(tx: Transaction, run_id: str, attempt_id: str, observed_at_ms: int, policy: ExpiryPolicy) -> Expiry:
    """Ends the lease on an attempt if it had run out at `observed_at_ms`.

    Under the policy `evidence` a started attempt is left alone: that nobody renews says nothing about its process (D1). Raises
    Corrupt for records that do not belong together, Conflict when one of them changed.
    """
    tx.lock("run", run_id)
    lease = load_lease(tx, attempt_id)
    attempt, run = load_attempt(tx, attempt_id), load_run(tx, run_id)
    if lease is None:
        return Expiry.NOT_FOUND
    if attempt is None or run is None or not lease.run_id == attempt.run_id == run_id:
        raise Corrupt(f"the lease of attempt {attempt_id} does not belong to run {run_id}")
    if run.execution_owner != RUNTIME or attempt.executor_type != REMOTE_WORKER:
        raise Corrupt(f"run {run_id} with a lease belongs to another executor")
    claim = Claim(run, attempt, lease)
    verdict = _is_over(lease, observed_at_ms) or _judged(claim, policy)
    if verdict in _RELEASING:
        claim = release(tx, claim)
    if verdict is Expiry.LOST:
        lose(tx, claim, EXPIRED_CODE, f"run-lease-expiry:{attempt_id}:{lease.lease_generation}", {})
    return verdict


def _is_over(lease: DispatchLease, observed_at_ms: int) -> Expiry | None:
    """Why the lease is not one that just ran out, or None."""
    if lease.status == RELEASED and lease.release_reason == LEASE_EXPIRED:
        return Expiry.ALREADY_EXPIRED
    if lease.status != LEASED:
        return Expiry.NOT_ELIGIBLE
    return Expiry.NOT_DUE if lease.expires_at_ms > observed_at_ms else None


def _judged(claim: Claim, policy: ExpiryPolicy) -> Expiry:
    """What becomes of a claim whose lease ran out. Raises Corrupt for a pair of states that cannot be."""
    run, attempt = claim.run, claim.attempt
    states = (run.status, attempt.status)
    if run.status in TERMINAL or attempt.status in TERMINAL | {LOST}:
        return Expiry.TERMINAL_RELEASED
    if states not in {(DISPATCHING, CLAIMED), (DISPATCHING, STARTING), (RUNNING, RUNNING)}:
        raise Corrupt(f"run {run.id} is {run.status} while its attempt is {attempt.status}")
    if policy == "evidence" and attempt.status != CLAIMED:
        return Expiry.AWAITS_EVIDENCE
    if run.cancel_requested_at_ms is not None:
        return Expiry.CANCELLATION_PENDING  # the cancel chain owns the outcome
    return Expiry.UNSTARTED_RELEASED if attempt.status == CLAIMED else Expiry.LOST


def release(tx: Transaction, claim: Claim) -> Claim:
    """Ends the lease as expired; the worker that held it is fenced from now on."""
    return change_lease(
        tx,
        claim,
        status=RELEASED,
        version=claim.lease.version + 1,
        released_at_ms=tx.now_ms,
        release_reason=LEASE_EXPIRED,
    )


def lose(tx: Transaction, claim: Claim, code: str, prefix: str, payload: dict[str, Any]) -> Claim:
    """Attempt and run become lost together, each with its Event by the reconciler. `prefix` begins the dedupe keys."""
    before, run = claim.attempt, claim.run
    ended_at_ms = max(tx.now_ms, run.created_at_ms, before.created_at_ms, before.started_at_ms or 0)
    attempt = advance_attempt(tx, before, LOST, {"finished_at_ms": ended_at_ms, "error_code": code})
    facts = {
        "fromStatus": before.status,
        "toStatus": LOST,
        "errorCode": code,
        "leaseGeneration": claim.lease.lease_generation,
        **payload,
    }
    run = append_event(
        tx,
        run,
        "attempt.lost",
        actor_type="reconciler",
        attempt_id=attempt.id,
        payload=facts,
        dedupe_key=f"{prefix}:attempt",
    )
    run = advance_run(
        tx,
        run,
        LOST,
        "run.lost",
        actor_type="reconciler",
        attempt_id=attempt.id,
        payload={"toStatus": LOST, "errorCode": code},
        dedupe_key=f"{prefix}:run",
        changes={"error_code": code},
    )
    return Claim(run, attempt, claim.lease)
