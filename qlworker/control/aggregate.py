"""The one place where a Run or an Attempt changes: a transition, its Event and the Run's version are one unit.

Every appended Event raises the Run's version and its eventSequence by one (control-plane.md §1.1, §2.3), and every change is
a compare-and-set. Nothing else may write the tables runs, run_attempts or run_events, apart from their creation.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, select

from ..domain.canonical import js_json
from ..domain.errors import Conflict
from .database import Transaction
from .ids import new_id
from .schema import run_attempts, run_events, runs

REMOTE_WORKER: Final = "remote_worker"
RUNTIME: Final = "runtime"
TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})

RUN_TRANSITIONS: Final[Mapping[str, frozenset[str]]] = {
    "created": frozenset({"queued", "cancelled", "timed_out"}),
    "queued": frozenset({"dispatching", "cancelled", "timed_out"}),
    "dispatching": frozenset({"dispatching", "running", "succeeded", "failed", "cancelled", "timed_out", "retry_wait", "lost"}),
    "running": frozenset({"waiting_approval", "succeeded", "failed", "cancelled", "timed_out", "retry_wait", "lost"}),
    "waiting_approval": frozenset({"running", "cancelled", "timed_out"}),
    "retry_wait": frozenset({"queued", "cancelled", "timed_out"}),
    "lost": frozenset({"retry_wait", "queued", "failed", "cancelled", "timed_out"}),
}
"""What may follow what (§2.1). `succeeded` out of dispatching belongs to completion alone (D22)."""

ATTEMPT_TRANSITIONS: Final[Mapping[str, frozenset[str]]] = {
    "claimed": frozenset({"claimed", "starting", "cancelled", "timed_out", "lost"}),
    "starting": frozenset({"running", "succeeded", "failed", "cancelled", "timed_out", "lost"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "timed_out", "lost"}),
}
"""What may follow what (§2.2). Everything that is not a key is terminal and immutable."""


_NEWEST: Final = (
    select(run_attempts).where(run_attempts.c.run_id == bindparam("run_id")).order_by(run_attempts.c.attempt.desc()).limit(1)
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `runs`; times in milliseconds."""

    id: str
    project_id: str
    task_id: str
    task_revision: str
    parent_run_id: str | None = None
    retry_of_run_id: str | None = None
    trigger_id: str | None = None
    trigger_type: str
    execution_origin: str
    execution_owner: str = RUNTIME
    triggered_by: str | None = None
    request_id: str | None = None
    scheduled_for_ms: int | None = None
    status: str
    version: int = 0
    event_sequence: int = 0
    priority: int = 0
    idempotency_key: str | None = None
    required_worker_id: str | None = None
    input_ref: str | None = None
    output_ref: str | None = None
    created_at_ms: int
    queued_at_ms: int | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    cancel_requested_at_ms: int | None = None
    cancel_reason: str | None = None
    error_code: str | None = None
    error_summary: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_attempts`; times in milliseconds. The fence members are all set or all None."""

    id: str
    run_id: str
    attempt: int
    status: str
    executor_type: str = REMOTE_WORKER
    worker_id: str | None = None
    worker_session_id: str | None = None
    worker_generation: int | None = None
    lease_generation: int | None = None
    lease_version: int | None = None
    lease_token_digest: str | None = None
    offer_id: str | None = None
    lease_expires_at_ms: int | None = None
    executor_handle: str | None = None
    pid: int | None = None
    log_artifact_id: str | None = None
    deadline_at_ms: int | None = None
    callback_sequence: int = 0
    callback_token_digest: str | None = None
    created_at_ms: int
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    exit_code: int | None = None
    error_code: str | None = None
    error_summary: str | None = None


def load_run(tx: Transaction, run_id: str) -> Run | None:
    """The run, or None."""
    row = tx.find(runs, id=run_id)
    return None if row is None else Run(**row._mapping)


def load_attempt(tx: Transaction, attempt_id: str) -> Attempt | None:
    """The attempt, or None."""
    row = tx.find(run_attempts, id=attempt_id)
    return None if row is None else Attempt(**row._mapping)


def latest_attempt(tx: Transaction, run_id: str) -> Attempt | None:
    """The attempt with the highest number, or None."""
    row = tx.row(_NEWEST, {"run_id": run_id})
    return None if row is None else Attempt(**row._mapping)


def insert_run(tx: Transaction, run: Run) -> None:
    """Stores a new run."""
    tx.add(runs, msgspec.structs.asdict(run))


def insert_attempt(tx: Transaction, attempt: Attempt) -> None:
    """Stores a new attempt."""
    tx.add(run_attempts, msgspec.structs.asdict(attempt))


def append_event(
    tx: Transaction,
    run: Run,
    event_type: str,
    *,
    actor_type: str,
    actor_id: str | None = None,
    attempt_id: str | None = None,
    payload: Mapping[str, Any] | None = None,
    dedupe_key: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Appends one Event to `run`, raises its version and sequence by one, applies `changes`, and returns the run after it.

    `payload` holds identifiers, enumerations, times, digests and sizes only (control-plane.md §12). Raises Conflict when the
    stored run is at another version. A dedupe key used before aborts the transaction.
    """
    after = msgspec.structs.replace(run, version=run.version + 1, event_sequence=run.event_sequence + 1, **(changes or {}))
    values = {"version": after.version, "event_sequence": after.event_sequence, **(changes or {})}
    tx.change(runs, {"id": run.id, "version": run.version}, values)
    tx.add(
        run_events,
        {
            "id": new_id(tx.now_ms),
            "run_id": run.id,
            "sequence": after.event_sequence,
            "type": event_type,
            "dedupe_key": dedupe_key,
            "actor_type": actor_type,
            "actor_id": actor_id,
            "attempt_id": attempt_id,
            "payload": js_json(payload or {}).decode(),
            "created_at_ms": tx.now_ms,
        },
    )
    return after


def advance_run(
    tx: Transaction,
    run: Run,
    status: str,
    event_type: str,
    *,
    actor_type: str,
    actor_id: str | None = None,
    attempt_id: str | None = None,
    payload: Mapping[str, Any] | None = None,
    dedupe_key: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Moves `run` to `status` with one Event. Raises Conflict when the table does not allow it or the stored run changed."""
    if status not in RUN_TRANSITIONS.get(run.status, frozenset()):
        raise Conflict(f"a run cannot go from {run.status} to {status}")
    return append_event(
        tx,
        run,
        event_type,
        actor_type=actor_type,
        actor_id=actor_id,
        attempt_id=attempt_id,
        payload=payload,
        dedupe_key=dedupe_key,
        changes={**(changes or {}), "status": status},
    )


def advance_attempt(tx: Transaction, attempt: Attempt, status: str, changes: Mapping[str, Any] | None = None) -> Attempt:
    """Moves `attempt` to `status`, compared on its status and callback sequence. The caller appends the Event.

    Raises Conflict when the table does not allow it or the stored attempt changed.
    """
    if status not in ATTEMPT_TRANSITIONS.get(attempt.status, frozenset()):
        raise Conflict(f"an attempt cannot go from {attempt.status} to {status}")
    return _store(tx, attempt, {**(changes or {}), "status": status})


def project_lease(tx: Transaction, attempt: Attempt, changes: Mapping[str, Any]) -> Attempt:
    """Writes the lease's moving facts into the attempt without a transition: no Event belongs to a renewal."""
    return _store(tx, attempt, changes)


def _store(tx: Transaction, attempt: Attempt, changes: Mapping[str, Any]) -> Attempt:
    present = {"id": attempt.id, "status": attempt.status, "callback_sequence": attempt.callback_sequence}
    tx.change(run_attempts, present, changes)
    return msgspec.structs.replace(attempt, **changes)
