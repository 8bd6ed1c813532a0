"""The intent to end an attempt that ran past its deadline: written once, with its Event, before anything acts on it.

Source: control-plane.md §11.2. The deadline is the control plane's own, fixed by the starting acknowledgement.
"""

import msgspec

from ...domain.lease import StopReason
from ..aggregate import append_event
from ..database import Transaction
from .authority import Claim


def intend_timeout(tx: Transaction, claim: Claim, at_ms: int) -> Claim:
    """The claim with a timeout intent, if its attempt was alive at `at_ms`, past its deadline, and nobody asked for a stop
    before; otherwise the claim as it is."""
    run, attempt = claim.run, claim.attempt
    if attempt.deadline_at_ms is None or at_ms < attempt.deadline_at_ms or run.cancel_requested_at_ms is not None:
        return claim
    intended = append_event(
        tx,
        run,
        "run.cancel_requested",
        actor_type="system",
        attempt_id=attempt.id,
        payload={"reason": StopReason.TIMEOUT.value, "deadlineAtMs": attempt.deadline_at_ms},
        dedupe_key=f"remote-timeout:{attempt.id}:{claim.lease.lease_generation}",
        changes={"cancel_requested_at_ms": tx.now_ms, "cancel_reason": StopReason.TIMEOUT.value},
    )
    return msgspec.structs.replace(claim, run=intended)
