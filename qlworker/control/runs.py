"""Runs as an operator sees them: started, cancelled, listed, read.

A run, its first attempt and their events commit together; a cancel is an intent first, and ends at once only what provably
never started. Source: control-plane.md §2, §11.1, §11.5, §12.
"""

from typing import Any, Final, Literal

import msgspec
from sqlalchemy import func, select

from ..domain.errors import Conflict
from ..domain.lease import StopReason
from ..domain.text import SAFE_INTEGER, check_dispatch_id, check_integer
from .admission import Origin, admit
from .aggregate import TERMINAL, Run, latest_attempt, load_run
from .database import Transaction
from .operator_api import ArtifactView, AttemptView, Cancelled, EventView, RunDetail, RunView, Started
from .schema import artifacts, run_attempts, run_events, runs, task_execution_revisions
from .services.authority import is_held
from .services.cancel_dispatch import await_dispatch
from .services.convergence import end_unstarted
from .services.intent import intend_stop
from .tasks import pinned

LIST_LIMIT: Final = 500
EVENT_LIMIT: Final = 1000

_OPERATOR: Final = "operator"


def start(
    tx: Transaction,
    project: str,
    task_id: str,
    *,
    revision: int | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
) -> Started:
    """Queues a run of a task's newest revision, or of `revision`. Higher `priority` goes first.

    The run that `idempotency_key` named before is returned instead of a new one. Raises Conflict when the task does not exist
    or the key belongs to a run of another task, ValueError for a value out of bounds.
    """
    check_integer(priority, "priority", -SAFE_INTEGER, SAFE_INTEGER)
    if idempotency_key is not None:
        check_dispatch_id(idempotency_key, "the idempotency key")
        tx.lock("task", f"{project}:{idempotency_key}")
        known = tx.row(select(runs).where(runs.c.project_id == project, runs.c.idempotency_key == idempotency_key))
        if known is not None:
            if known.task_id != task_id:
                raise Conflict("the idempotency key belongs to a run of another task; use another key")
            return Started(known.id, known.status, created=False)
    run = admit(
        tx,
        pinned(tx, project, task_id, revision),
        Origin(
            trigger_type="manual",
            execution_origin="operator",
            actor_type="user",
            actor_id=_OPERATOR,
            priority=priority,
            idempotency_key=idempotency_key,
        ),
    )
    return Started(run.id, run.status, created=True)


def retry(tx: Transaction, run_id: str) -> Started:
    """Queues a new run of the same revision as a run that is over; the old one stays as it is (control-plane.md §1.1).

    Raises Conflict when the run does not exist or is not over.
    """
    old = _existing(tx, run_id)
    if old.status not in TERMINAL:
        raise Conflict(f"run {run_id} is {old.status}; cancel it, or wait for its end, before it is run again")
    run = admit(
        tx,
        pinned(tx, old.project_id, old.task_id, task_revision=old.task_revision),
        Origin(
            trigger_type="retry",
            execution_origin="operator",
            actor_type="user",
            actor_id=_OPERATOR,
            priority=old.priority,
            retry_of_run_id=old.id,
        ),
    )
    return Started(run.id, run.status, created=True)


def cancel(tx: Transaction, run_id: str) -> Cancelled:
    """Writes the intent to cancel once, and ends the run at once when it provably never started.

    A command that may run is told by lease control and ends as it really ended. Repeating a cancel tries the ending again.
    Raises Conflict when the run does not exist.
    """
    tx.lock("run", run_id)
    run = _existing(tx, run_id)
    if run.status in TERMINAL:
        return Cancelled("already_terminal", run.status)
    result: Literal["requested", "already_requested"] = "already_requested"
    if run.cancel_requested_at_ms is None:
        result = "requested"
        run = intend_stop(tx, run, StopReason.USER, actor_type="user", actor_id=_OPERATOR, dedupe_key=f"run-cancel:{run.id}")
        attempt = latest_attempt(tx, run.id)
        if attempt is not None and is_held(tx, attempt.id):
            await_dispatch(tx, run, attempt)
    return Cancelled(result, end_unstarted(tx, run).status)


def listed(tx: Transaction, limit: int, project: str | None = None, task_id: str | None = None) -> list[RunView]:
    """At most `limit` (1..500) runs, newest first, of one project or task if given."""
    check_integer(limit, "limit", 1, LIST_LIMIT)
    statement = _views()
    if project is not None:
        statement = statement.where(runs.c.project_id == project)
    if task_id is not None:
        statement = statement.where(runs.c.task_id == task_id)
    return [_view(row) for row in tx.rows(statement.order_by(runs.c.created_at_ms.desc(), runs.c.id.desc()).limit(limit))]


def detail(tx: Transaction, run_id: str) -> RunDetail:
    """One run with its attempts. Raises Conflict when it does not exist."""
    row = tx.row(_views().where(runs.c.id == run_id))
    if row is None:
        raise Conflict(f"there is no run {run_id}")
    stored = {each.attempt_id: each for each in tx.rows(select(artifacts).where(artifacts.c.run_id == run_id))}
    attempts = tx.rows(select(run_attempts).where(run_attempts.c.run_id == run_id).order_by(run_attempts.c.attempt))
    return RunDetail(_view(row), [_attempt_view(each, stored.get(each.id)) for each in attempts])


def events(tx: Transaction, run_id: str, after: int = 0, limit: int = EVENT_LIMIT) -> list[EventView]:
    """At most `limit` (1..1000) entries of a run's history with a sequence above `after`. Raises Conflict for no such run."""
    check_integer(limit, "limit", 1, EVENT_LIMIT)
    _existing(tx, run_id)
    statement = select(run_events).where(run_events.c.run_id == run_id, run_events.c.sequence > after)
    return [
        EventView(
            sequence=row.sequence,
            type=row.type,
            created_at_ms=row.created_at_ms,
            actor_type=row.actor_type,
            actor_id=row.actor_id,
            attempt_id=row.attempt_id,
            payload=msgspec.Raw(row.payload.encode()),
        )
        for row in tx.rows(statement.order_by(run_events.c.sequence).limit(limit))
    ]


def _existing(tx: Transaction, run_id: str) -> Run:
    run = load_run(tx, run_id)
    if run is None:
        raise Conflict(f"there is no run {run_id}")
    return run


def _views() -> Any:
    numbered = run_attempts.alias()
    newest = select(func.max(numbered.c.attempt)).where(numbered.c.run_id == runs.c.id).scalar_subquery()
    revision = task_execution_revisions
    joined = runs.outerjoin(run_attempts, (run_attempts.c.run_id == runs.c.id) & (run_attempts.c.attempt == newest)).join(
        revision,
        (revision.c.project_id == runs.c.project_id)
        & (revision.c.task_id == runs.c.task_id)
        & (revision.c.task_revision == runs.c.task_revision),
    )
    return select(runs, run_attempts.c.worker_id, run_attempts.c.exit_code, revision.c.source_revision).select_from(joined)


def _view(row: Any) -> RunView:
    return RunView(
        id=row.id,
        project=row.project_id,
        task=row.task_id,
        revision=row.source_revision,
        status=row.status,
        is_over=row.status in TERMINAL,
        priority=row.priority,
        created_at_ms=row.created_at_ms,
        started_at_ms=row.started_at_ms,
        finished_at_ms=row.finished_at_ms,
        cancel_requested_at_ms=row.cancel_requested_at_ms,
        cancel_reason=row.cancel_reason,
        worker_id=row.worker_id,
        exit_code=row.exit_code,
        error_code=row.error_code,
    )


def _attempt_view(row: Any, stored: Any) -> AttemptView:
    return AttemptView(
        id=row.id,
        attempt=row.attempt,
        status=row.status,
        worker_id=row.worker_id,
        created_at_ms=row.created_at_ms,
        started_at_ms=row.started_at_ms,
        finished_at_ms=row.finished_at_ms,
        deadline_at_ms=row.deadline_at_ms,
        exit_code=row.exit_code,
        error_code=row.error_code,
        error_summary=row.error_summary,
        artifact=None
        if stored is None
        else ArtifactView(stored.log_artifact_id, stored.byte_length, stored.sha256, stored.truncated),
    )
