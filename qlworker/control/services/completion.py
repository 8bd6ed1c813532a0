"""completion: ends run, attempt and lease in one transaction, and tells an exact repeat from "somebody else ended it".

Source: control-plane.md §8 with D2 to D5, wire-protocol.md §8.3.
"""

from typing import Any, Final

import msgspec

from ...domain.canonical import digests_equal, js_json
from ...domain.errors import Fenced
from ...wire.completion import COMPLETION_SCHEMA, CompletionRequest, CompletionResponse
from ..aggregate import TERMINAL
from ..config import Settings
from ..database import Transaction
from ..schema import run_events
from .activation import RUNNING, STARTING
from .artifacts import load_artifact
from .authority import COMPLETED, Claim, identify, require_lease
from .claiming import DISPATCHING
from .intent import intend_timeout
from .outcome import ending_of_exit, finish
from .session import Caller, require_session

CLOCK_SKEW_MS: Final = 5 * 60 * 1000
"""How far a worker's times may lie ahead of the control plane's clock (D17)."""

LOST: Final = "lost"


def complete(
    tx: Transaction, caller: Caller, request: CompletionRequest, settings: Settings, is_held: bool
) -> CompletionResponse:
    """Answers one completion. `is_held` says whether the store was read again just before and has exactly this content.

    The exact repeat needs neither a current session nor a live lease (D2); everything else does. Raises Fenced.
    """
    claim = identify(tx, caller, request)
    ended = claim.attempt.status in TERMINAL or claim.attempt.status == LOST
    if ended and claim.lease.status == COMPLETED and claim.lease.version == request.expected_lease_version + 1:
        _require_exact_repeat(tx, claim, request)
        return _answer("already_completed", request)
    require_session(tx, caller, request.worker_generation)
    if ended:
        return _answer("already_terminal", request)
    require_lease(tx, claim, request.expected_lease_version)
    _require_callback(claim, request)
    _require_times(tx, claim, request)
    stored = load_artifact(tx, claim.attempt.id, request.artifact.log_artifact_id)
    if not is_held or stored != request.artifact:
        raise Fenced("the log is not stored as the request says")
    _apply(tx, claim, request)
    return _answer("applied", request)


def _apply(tx: Transaction, claim: Claim, request: CompletionRequest) -> None:
    result = request.result
    if result.exit_code != 0:
        # A worker that died between the stop and its report cannot tell why the command failed; the deadline can.
        claim = intend_timeout(tx, claim, result.finished_at_ms)
    attempt, run = claim.attempt, claim.run
    known = [tx.now_ms, result.finished_at_ms, run.created_at_ms, attempt.created_at_ms, attempt.started_at_ms or 0]
    prefix = f"remote-completion:{attempt.id}:{claim.lease.lease_generation}:{request.callback_sequence}"
    finish(
        tx,
        claim,
        ending_of_exit(run, result.exit_code),
        finished_at_ms=max(known),
        attempt_changes={
            "exit_code": result.exit_code,
            "callback_sequence": request.callback_sequence,
            "callback_token_digest": request.callback_token_digest,
            "log_artifact_id": request.artifact.log_artifact_id,
        },
        payload=_evidence(request),
        dedupe_keys=(f"{prefix}:attempt", f"{prefix}:run"),
    )


def _evidence(request: CompletionRequest) -> dict[str, Any]:
    """What the attempt's Event keeps of the request, and what a repeat is compared with (§8.4)."""
    return {
        "offerId": request.offer_id,
        "leaseGeneration": request.lease_generation,
        "leaseVersion": request.expected_lease_version + 1,
        "callbackSequence": request.callback_sequence,
        "callbackTokenDigest": request.callback_token_digest,
        "result": request.result.members(),
        "artifact": request.artifact.members(),
    }


def _require_exact_repeat(tx: Transaction, claim: Claim, request: CompletionRequest) -> None:
    attempt = claim.attempt
    same_row = (
        attempt.lease_version == claim.lease.version
        and attempt.status == claim.run.status
        and attempt.callback_sequence == request.callback_sequence
        and digests_equal(attempt.callback_token_digest or "", request.callback_token_digest)
        and attempt.log_artifact_id == request.artifact.log_artifact_id
        and attempt.exit_code == request.result.exit_code
    )
    key = f"remote-completion:{attempt.id}:{claim.lease.lease_generation}:{request.callback_sequence}:attempt"
    event = tx.find(run_events, run_id=claim.run.id, dedupe_key=key)
    if not same_row or event is None or event.type != f"attempt.{attempt.status}":
        raise Fenced("the attempt was completed with other facts")
    told = msgspec.json.decode(event.payload)
    from_status = told.get("fromStatus")
    expected = {
        "fromStatus": from_status,
        "toStatus": attempt.status,
        "errorCode": attempt.error_code,
        **_evidence(request),
    }
    if from_status not in (STARTING, RUNNING) or event.payload.encode() != js_json(expected):
        raise Fenced("the attempt was completed with other facts")


def _require_callback(claim: Claim, request: CompletionRequest) -> None:
    """Running: the callback and the log fixed by the running acknowledgement. Starting: the next callback (D4, D5)."""
    attempt, statuses = claim.attempt, (claim.run.status, claim.attempt.status)
    if statuses == (RUNNING, RUNNING):
        if (
            attempt.callback_sequence != request.callback_sequence
            or not digests_equal(attempt.callback_token_digest or "", request.callback_token_digest)
            or attempt.log_artifact_id != request.artifact.log_artifact_id
        ):
            raise Fenced("the callback is another one")
        return
    if statuses != (DISPATCHING, STARTING):
        raise Fenced("the attempt was never started")
    conflicting = attempt.callback_token_digest not in (None, request.callback_token_digest) or attempt.log_artifact_id not in (
        None,
        request.artifact.log_artifact_id,
    )
    if conflicting or request.callback_sequence != attempt.callback_sequence + 1:
        raise Fenced("the callback is not the next one")


def _require_times(tx: Transaction, claim: Claim, request: CompletionRequest) -> None:
    latest = tx.now_ms + CLOCK_SKEW_MS
    if request.result.started_at_ms < claim.attempt.created_at_ms:
        raise Fenced("the reported start is before the attempt was created")
    if request.result.started_at_ms > latest or request.result.finished_at_ms > latest:
        raise Fenced("the reported times are too far ahead")


def _answer(status: Any, request: CompletionRequest) -> CompletionResponse:
    return CompletionResponse(
        schema=COMPLETION_SCHEMA,
        status=status,
        run_id=request.run_id,
        attempt_id=request.attempt_id,
        callback_sequence=request.callback_sequence,
    )
