"""Admission: the one way a run comes into being, with its first attempt, its retry policy and both Events, or not at all.

Source: control-plane.md §2.1, §10.1, §12, §17; R324, R325.
"""

from typing import Literal

import msgspec
from sqlalchemy import insert

from .aggregate import Attempt, Run, advance_run, append_event, insert_attempt, insert_run
from .database import Transaction
from .ids import new_id
from .retry_policy import RetryPolicy
from .schema import run_retry_policies
from .tasks import Pinned


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants a run, and why. `scheduled_for_ms` is the fire time a trigger stands for; `is_held`: the run waits for another
    one and is queued by `queue_held`."""

    trigger_type: Literal["manual", "schedule", "retry"]
    execution_origin: Literal["operator", "scheduler"]
    actor_type: Literal["user", "scheduler"]
    actor_id: str
    priority: int = 0
    idempotency_key: str | None = None
    trigger_id: str | None = None
    scheduled_for_ms: int | None = None
    retry_of_run_id: str | None = None
    is_held: bool = False


def admit(tx: Transaction, pinned: Pinned, origin: Origin) -> Run:
    """Makes a run of exactly this revision, queued unless it is held. The retry policy is the revision's own (R332 to R334)."""
    run = Run(
        id=new_id(tx.now_ms),
        project_id=pinned.project_id,
        task_id=pinned.task_id,
        task_revision=pinned.task_revision,
        retry_of_run_id=origin.retry_of_run_id,
        trigger_id=origin.trigger_id,
        trigger_type=origin.trigger_type,
        execution_origin=origin.execution_origin,
        triggered_by=origin.actor_id,
        scheduled_for_ms=origin.scheduled_for_ms,
        status="created",
        priority=origin.priority,
        idempotency_key=origin.idempotency_key,
        required_worker_id=pinned.required_worker_id,
        created_at_ms=tx.now_ms,
    )
    attempt = Attempt(id=new_id(tx.now_ms), run_id=run.id, attempt=1, status="claimed", created_at_ms=tx.now_ms)
    insert_run(tx, run)
    insert_attempt(tx, attempt)
    if pinned.retry is not None:
        policy = RetryPolicy.of(run.id, pinned.retry, tx.now_ms)
        tx.write(insert(run_retry_policies).values(msgspec.structs.asdict(policy)))
    run = append_event(
        tx,
        run,
        "run.created",
        actor_type=origin.actor_type,
        actor_id=origin.actor_id,
        payload={"taskRevision": run.task_revision, "priority": run.priority},
        dedupe_key=f"admission:{run.id}:created",
    )
    return run if origin.is_held else _queue(tx, run, attempt.id, origin.actor_type, origin.actor_id)


def queue_held(tx: Transaction, run: Run, attempt_id: str) -> Run:
    """Queues a run that was held. The caller has its lock and has looked that nothing is left to wait for."""
    return _queue(tx, run, attempt_id, "scheduler", run.triggered_by)


def _queue(tx: Transaction, run: Run, attempt_id: str, actor_type: str, actor_id: str | None) -> Run:
    return advance_run(
        tx,
        run,
        "queued",
        "run.queued",
        actor_type=actor_type,
        actor_id=actor_id,
        attempt_id=attempt_id,
        dedupe_key=f"admission:{run.id}:queued",
        changes={"queued_at_ms": tx.now_ms},
    )
