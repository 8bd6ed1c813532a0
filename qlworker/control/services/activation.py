"""starting, running and start-failure: the acknowledgements around the start of a process, each exactly replayable.

Source: control-plane.md §7, wire-protocol.md §5. Times are the control plane's own.
"""

from typing import Any, Final, TypeVar

from msgspec import UNSET, UnsetType

from ...domain.canonical import digests_equal
from ...domain.errors import Fenced
from ...wire.activation import (
    ACTIVATION_SCHEMA,
    ActivationRequest,
    ActivationResponse,
    ActivationStatus,
    RunningRequest,
    Snapshot,
)
from ..aggregate import TERMINAL, advance_attempt, advance_run, append_event
from ..config import Settings
from ..database import Transaction
from .authority import COMPLETED, Claim, identify, require_lease, require_revision
from .claiming import CLAIMED, DISPATCHING
from .outcome import ending_of_start_failure, finish
from .session import Caller, require_session

STARTING: Final = "starting"
RUNNING: Final = "running"

T = TypeVar("T")


def starting(tx: Transaction, caller: Caller, request: ActivationRequest, settings: Settings) -> ActivationResponse:
    """Lets the worker start the process, once; fixes the deadline on the control plane's clock. Raises Fenced."""
    claim = _live_claim(tx, caller, request)
    statuses = (claim.run.status, claim.attempt.status)
    if statuses == (DISPATCHING, STARTING):
        return _answer("already_starting", claim)
    if statuses == (RUNNING, RUNNING):
        return _answer("already_running", claim)
    if statuses != (DISPATCHING, CLAIMED):
        raise Fenced("the attempt cannot start")
    timeout_ms = require_revision(tx, claim.run).timeout_ms
    deadline = None if timeout_ms is UNSET else tx.now_ms + timeout_ms
    attempt = advance_attempt(tx, claim.attempt, STARTING, {"deadline_at_ms": deadline})
    run = append_event(
        tx,
        claim.run,
        "attempt.starting",
        actor_type="worker",
        actor_id=caller.worker_id,
        attempt_id=attempt.id,
        payload={"fromStatus": CLAIMED, "toStatus": STARTING, "deadlineAtMs": deadline},
        dedupe_key=_dedupe_key(claim, "starting"),
    )
    return _answer("applied", Claim(run, attempt, claim.lease))


def running(tx: Transaction, caller: Caller, request: RunningRequest, settings: Settings) -> ActivationResponse:
    """Records that the process runs, with its handle, log and callback. Raises Fenced, also for a replay that differs."""
    claim = _live_claim(tx, caller, request)
    statuses = (claim.run.status, claim.attempt.status)
    if statuses == (RUNNING, RUNNING):
        if not _same_running(claim, request):
            raise Fenced("the run was acknowledged with other facts")
        return _answer("already_running", claim)
    if statuses != (DISPATCHING, STARTING):
        raise Fenced("the attempt was not starting")
    if request.callback_sequence != claim.attempt.callback_sequence + 1:
        raise Fenced("the callback sequence is not the next one")
    started_at_ms = max(tx.now_ms, claim.run.created_at_ms, claim.attempt.created_at_ms)
    attempt = advance_attempt(
        tx,
        claim.attempt,
        RUNNING,
        {
            "started_at_ms": started_at_ms,
            "executor_handle": request.executor_handle,
            "log_artifact_id": request.log_artifact_id,
            "callback_sequence": request.callback_sequence,
            "callback_token_digest": request.callback_token_digest,
        },
    )
    run = append_event(
        tx,
        claim.run,
        "attempt.running",
        actor_type="worker",
        actor_id=caller.worker_id,
        attempt_id=attempt.id,
        payload={
            "fromStatus": STARTING,
            "toStatus": RUNNING,
            "callbackSequence": request.callback_sequence,
            "callbackTokenDigest": request.callback_token_digest,
            "logArtifactId": request.log_artifact_id,
        },
        dedupe_key=_dedupe_key(claim, "running-attempt"),
    )
    changes: dict[str, Any] = {} if run.started_at_ms is not None else {"started_at_ms": started_at_ms}
    run = advance_run(
        tx,
        run,
        RUNNING,
        "run.running",
        actor_type="worker",
        actor_id=caller.worker_id,
        attempt_id=attempt.id,
        payload={"fromStatus": DISPATCHING, "toStatus": RUNNING},
        dedupe_key=_dedupe_key(claim, "running-run"),
        changes=changes,
    )
    return _answer("applied", Claim(run, attempt, claim.lease))


def start_failure(tx: Transaction, caller: Caller, request: ActivationRequest, settings: Settings) -> ActivationResponse:
    """Ends an attempt of which nothing was started, and closes its callback so that no receipt can be accepted later.

    Raises Fenced.
    """
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    if claim.lease.status == COMPLETED:
        return _start_failure_again(claim, request)
    require_lease(tx, claim, request.expected_lease_version)
    if (claim.run.status, claim.attempt.status) != (DISPATCHING, STARTING):
        raise Fenced("the attempt was not starting")
    ended = finish(
        tx,
        claim,
        ending_of_start_failure(claim.run),
        finished_at_ms=max(tx.now_ms, claim.run.created_at_ms, claim.attempt.created_at_ms),
        attempt_changes={"callback_sequence": claim.attempt.callback_sequence + 1},
        payload={"callbackSequence": claim.attempt.callback_sequence + 1},
        dedupe_keys=(_dedupe_key(claim, "start-failed-attempt"), _dedupe_key(claim, "start-failed-run")),
    )
    return _answer("applied", ended)


def _start_failure_again(claim: Claim, request: ActivationRequest) -> ActivationResponse:
    """The same start failure told twice. A completion ends with an exit code, a start failure never has one."""
    attempt, run = claim.attempt, claim.run
    ending = ending_of_start_failure(run)
    exact = (
        claim.lease.version == attempt.lease_version == request.expected_lease_version + 1
        and attempt.status == run.status == ending.status
        and attempt.error_code == ending.error_code
        and attempt.exit_code is None
    )
    if not exact:
        raise Fenced("the attempt ended in another way")
    return _answer("already_terminal", claim)


def _live_claim(tx: Transaction, caller: Caller, request: ActivationRequest) -> Claim:
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    require_lease(tx, claim, request.expected_lease_version)
    return claim


def _same_running(claim: Claim, request: RunningRequest) -> bool:
    attempt = claim.attempt
    return (
        attempt.executor_handle == request.executor_handle
        and attempt.log_artifact_id == request.log_artifact_id
        and attempt.callback_sequence == request.callback_sequence
        and digests_equal(attempt.callback_token_digest or "", request.callback_token_digest)
    )


def _dedupe_key(claim: Claim, what: str) -> str:
    return f"remote-activation:{claim.attempt.id}:{claim.lease.lease_generation}:{what}"


def _known(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def _answer(status: ActivationStatus, claim: Claim) -> ActivationResponse:
    """The facts after the call. A terminal snapshot shows no start, as the contract's three shapes demand (§5.2)."""
    attempt, lease = claim.attempt, claim.lease
    ended = attempt.status in TERMINAL
    snapshot = Snapshot(
        run_id=claim.run.id,
        attempt_id=attempt.id,
        run_status=claim.run.status,
        attempt_status=attempt.status,
        lease_version=lease.version,
        lease_generation=lease.lease_generation,
        callback_sequence=attempt.callback_sequence,
        deadline_at_ms=_known(attempt.deadline_at_ms),
        started_at_ms=UNSET if ended else _known(attempt.started_at_ms),
        finished_at_ms=_known(attempt.finished_at_ms),
        executor_handle=UNSET if ended else _known(attempt.executor_handle),
        log_artifact_id=_known(attempt.log_artifact_id),
        error_code=_known(attempt.error_code),
    )
    return ActivationResponse(schema=ACTIVATION_SCHEMA, status=status, snapshot=snapshot)
