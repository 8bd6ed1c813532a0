"""The intent to stop a run: written once, with its Event, before anything acts on it.

A repeated request writes nothing, and nobody's later reason replaces the first one. Source: control-plane.md §11.1, §11.2.
"""

from typing import Any

import msgspec

from ...domain.lease import StopReason
from ..aggregate import Run, append_event
from ..database import Transaction
from .authority import Claim


def intend_stop(
    tx: Transaction,
    run: Run,
    reason: StopReason,
    *,
    actor_type: str,
    actor_id: str | None = None,
    attempt_id: str | None = None,
    payload: dict[str, Any] | None = None,
    dedupe_key: str,
) -> Run:
    """The run with the intent. The caller has looked that there is none."""
    return append_event(
        tx,
        run,
        "run.cancel_requested",
        actor_type=actor_type,
        actor_id=actor_id,
        attempt_id=attempt_id,
        payload={"reason": reason.value, **(payload or {})},
        dedupe_key=dedupe_key,
        changes={"cancel_requested_at_ms": tx.now_ms, "cancel_reason": reason.value},
    )


def intend_timeout(tx: Transaction, claim: Claim, at_ms: int) -> Claim:
    """The claim with a timeout intent, if its attempt was alive at `at_ms`, past its deadline, and nobody asked for a stop
    before; otherwise the claim as it is."""
    run, attempt = claim.run, claim.attempt
    if attempt.deadline_at_ms is None or at_ms < attempt.deadline_at_ms or run.cancel_requested_at_ms is not None:
        return claim
    intended = intend_stop(
        tx,
        run,
        StopReason.TIMEOUT,
        actor_type="system",
        attempt_id=attempt.id,
        payload={"deadlineAtMs": attempt.deadline_at_ms},
        dedupe_key=f"remote-timeout:{attempt.id}:{claim.lease.lease_generation}",
    )
    return msgspec.structs.replace(claim, run=intended)
