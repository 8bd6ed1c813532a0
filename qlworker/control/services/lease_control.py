"""lease-control: renews a lease, tells of a wanted stop, or that everything is over.

Source: control-plane.md §11, wire-protocol.md §7. A lost answer is replayed from what is stored (D19), so that a worker whose
network drops one packet does not lose its lease.
"""

from ...domain.errors import Fenced
from ...domain.lease import StopReason
from ...wire.lease_control import LEASE_CONTROL_SCHEMA, LeaseControlRequest, LeaseControlResponse, Stop
from ..aggregate import TERMINAL
from ..config import Settings
from ..database import Transaction
from .activation import RUNNING, STARTING
from .authority import COMPLETED, Claim, change_lease, identify, require_lease
from .cancel_dispatch import settle_dispatch
from .claiming import CLAIMED
from .intent import intend_timeout
from .session import Caller, require_session


def control(tx: Transaction, caller: Caller, request: LeaseControlRequest, settings: Settings) -> LeaseControlResponse:
    """Answers one call. A stop answer renews too, so that the worker has time to stop and complete. Raises Fenced."""
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    if claim.lease.status == COMPLETED and claim.run.status == claim.attempt.status and claim.run.status in TERMINAL:
        return _terminal(claim)
    if claim.attempt.status not in (CLAIMED, STARTING, RUNNING):
        raise Fenced("the attempt is over")
    if _is_lost_answer(tx, claim, request):
        return _alive(claim)
    require_lease(tx, claim, request.expected_lease_version)
    claim = intend_timeout(tx, claim, tx.now_ms)
    if claim.run.cancel_requested_at_ms is not None:
        claim = settle_dispatch(tx, claim)
    renewed = change_lease(
        tx,
        claim,
        version=claim.lease.version + 1,
        renewed_at_ms=max(tx.now_ms, claim.lease.renewed_at_ms),
        expires_at_ms=max(tx.now_ms, claim.lease.renewed_at_ms) + settings.run_lease_ms,
    )
    return _alive(renewed)


def _is_lost_answer(tx: Transaction, claim: Claim, request: LeaseControlRequest) -> bool:
    """The stored renewal is exactly the one the caller asked for and never heard of. Its version in a later generation is
    the claim's own, which no holder of this generation can be one behind of."""
    lease = claim.lease
    return lease.is_live(tx.now_ms) and lease.version == request.expected_lease_version + 1


def _alive(claim: Claim) -> LeaseControlResponse:
    run, lease = claim.run, claim.lease
    stop = None
    if run.cancel_reason is not None and run.cancel_requested_at_ms is not None:
        stop = Stop(reason=StopReason(run.cancel_reason), requested_at_ms=run.cancel_requested_at_ms)
    return LeaseControlResponse(
        schema=LEASE_CONTROL_SCHEMA,
        status="renewed" if stop is None else "stop_requested",
        project_id=run.project_id,
        run_id=run.id,
        attempt_id=claim.attempt.id,
        offer_id=lease.offer_id,
        lease_generation=lease.lease_generation,
        lease_version=lease.version,
        renewed_at_ms=lease.renewed_at_ms,
        expires_at_ms=lease.expires_at_ms,
        stop=stop,
        terminal_status=None,
    )


def _terminal(claim: Claim) -> LeaseControlResponse:
    return LeaseControlResponse(
        schema=LEASE_CONTROL_SCHEMA,
        status="terminal",
        project_id=claim.run.project_id,
        run_id=claim.run.id,
        attempt_id=claim.attempt.id,
        offer_id=claim.lease.offer_id,
        lease_generation=claim.lease.lease_generation,
        lease_version=None,
        renewed_at_ms=None,
        expires_at_ms=None,
        stop=None,
        terminal_status=claim.run.status,  # type: ignore[arg-type]
    )
