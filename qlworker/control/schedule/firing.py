"""Fires triggers that are due: each is taken with a lease, and one transaction fires it and moves it on, or does nothing.

Two replicas that meet at a trigger fire it once: its version moves with the run it made, and the run's idempotency key is made
of trigger, revision and fire time. Source: control-plane.md §17, A-0105, A-0107.
"""

from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import or_, select, update

from ...domain.errors import Conflict
from ..admission import Origin, admit, queue_held
from ..aggregate import RUN_TRANSITIONS, Run, latest_attempt, load_run
from ..database import Transaction
from ..runs import cancel
from ..schema import runs, triggers
from ..tasks import pinned
from .cron import next_fire_ms

HELD: Final = "created"
OPEN: Final = tuple(RUN_TRANSITIONS)


class Outcome(StrEnum):
    """What became of one fire time."""

    STARTED = "started"
    HELD = "held"
    SKIPPED = "skipped_while_running"
    MISSED = "missed"
    REPEATED = "already_fired"
    GONE = "gone"


class Taken(msgspec.Struct, frozen=True):
    """A trigger under a lease of its own."""

    trigger_id: str
    version: int
    owner: str


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """How firing goes, in milliseconds: the lease on a trigger, and how late a fire time may be before it was missed."""

    owner: str
    page: int
    lease_ms: int
    grace_ms: int


def take_due(tx: Transaction, terms: Firing) -> list[Taken]:
    """Takes up to a page of triggers that are due and that nobody else has taken."""
    table = triggers
    is_free = or_(table.c.lease_expires_at_ms.is_(None), table.c.lease_expires_at_ms <= tx.now_ms)
    is_due = or_(table.c.next_fire_at_ms.is_(None), table.c.next_fire_at_ms <= tx.now_ms)
    due = tx.rows(
        select(table.c.trigger_id, table.c.version)
        .where(table.c.enabled.is_(True), is_due, is_free)
        .order_by(table.c.next_fire_at_ms, table.c.trigger_id)
        .limit(terms.page)
        .with_for_update(skip_locked=True)
    )
    taken = []
    for row in due:
        lease = {"lease_owner": terms.owner, "lease_expires_at_ms": tx.now_ms + terms.lease_ms, "version": row.version + 1}
        if tx.write(update(table).where(table.c.trigger_id == row.trigger_id, table.c.version == row.version).values(**lease)):
            taken.append(Taken(row.trigger_id, row.version + 1, terms.owner))
    return taken


def fire(tx: Transaction, taken: Taken, terms: Firing) -> Outcome:
    """Does what the trigger's policies say about its fire time, and gives it its next one.

    `gone`: it was changed or taken over meanwhile, and nothing was done. Raises Conflict when that happens in between.
    """
    table = triggers
    row = tx.row(select(table).where(table.c.trigger_id == taken.trigger_id))
    if row is None or (row.version, row.lease_owner) != (taken.version, taken.owner):
        return Outcome.GONE
    due_ms = row.next_fire_at_ms
    if due_ms is None:  # after a restore: what was missed, nobody knows
        _move_on(tx, row, next_fire_ms(row.cron, row.timezone, tx.now_ms), {})
        return Outcome.MISSED
    is_late = tx.now_ms - due_ms > terms.grace_ms
    after_ms = tx.now_ms if is_late else due_ms
    outcome, run = (Outcome.MISSED, None) if is_late and row.misfire == "skip" else _start(tx, row, due_ms)
    facts = {"last_fire_at_ms": due_ms, "last_outcome": outcome.value}
    _move_on(
        tx, row, next_fire_ms(row.cron, row.timezone, after_ms), facts if run is None else {**facts, "last_run_id": run.id}
    )
    return outcome


def held_runs(tx: Transaction, limit: int) -> list[str]:
    """Up to `limit` runs that were held for an earlier one of their trigger and need not wait any more, oldest first."""
    earlier = runs.alias()
    is_waiting = select(earlier.c.id).where(
        earlier.c.trigger_id == runs.c.trigger_id,
        earlier.c.scheduled_for_ms < runs.c.scheduled_for_ms,
        earlier.c.status.in_(OPEN),
    )
    statement = select(runs.c.id).where(runs.c.status == HELD, runs.c.trigger_id.is_not(None), ~is_waiting.exists())
    return [row.id for row in tx.rows(statement.order_by(runs.c.created_at_ms, runs.c.id).limit(limit))]


def release(tx: Transaction, run_id: str) -> bool:
    """Queues a run that `held_runs` found, unless it was cancelled meanwhile. Tells whether it did."""
    tx.lock("run", run_id)
    run, attempt = load_run(tx, run_id), latest_attempt(tx, run_id)
    if run is None or attempt is None or run.status != HELD or run.cancel_requested_at_ms is not None:
        return False
    queue_held(tx, run, attempt.id)
    return True


def _start(tx: Transaction, row: Any, due_ms: int) -> tuple[Outcome, Run | None]:
    key = f"trigger:{row.trigger_id}:{row.revision}:{due_ms}"
    if tx.row(select(runs.c.id).where(runs.c.project_id == row.project_id, runs.c.idempotency_key == key)) is not None:
        return Outcome.REPEATED, None
    still_open = _open_runs(tx, row.trigger_id)
    if still_open and row.if_running == "skip":
        return Outcome.SKIPPED, None
    if row.if_running == "queue" and len(still_open) > 1:
        return Outcome.SKIPPED, None  # one runs and one waits for it: more would only pile up
    if row.if_running == "kill":
        for run_id in still_open:
            cancel(tx, run_id)
        still_open = _open_runs(tx, row.trigger_id)
    is_held = bool(still_open) and row.if_running in ("queue", "kill")
    run = admit(
        tx,
        pinned(tx, row.project_id, row.task_id, row.revision),
        Origin(
            trigger_type="schedule",
            execution_origin="scheduler",
            actor_type="scheduler",
            actor_id=row.name,
            priority=row.priority,
            idempotency_key=key,
            trigger_id=row.trigger_id,
            scheduled_for_ms=due_ms,
            is_held=is_held,
        ),
    )
    return (Outcome.HELD if is_held else Outcome.STARTED), run


def _open_runs(tx: Transaction, trigger_id: str) -> list[str]:
    """By id, which is the order their locks are taken in."""
    statement = select(runs.c.id).where(runs.c.trigger_id == trigger_id, runs.c.status.in_(OPEN)).order_by(runs.c.id)
    return [row.id for row in tx.rows(statement)]


def _move_on(tx: Transaction, row: Any, next_ms: int, facts: dict[str, Any]) -> None:
    values = {"next_fire_at_ms": next_ms, "version": row.version + 1, "updated_at_ms": tx.now_ms, **facts}
    changed = tx.write(
        update(triggers)
        .where(triggers.c.trigger_id == row.trigger_id, triggers.c.version == row.version)
        .values(lease_owner=None, lease_expires_at_ms=None, **values)
    )
    if changed != 1:
        raise Conflict(f"the trigger {row.name} of {row.project_id}/{row.task_id} changed in the meantime")
