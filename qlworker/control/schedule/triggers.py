"""The triggers of a task as they are stored: put in the place of those before, and listed.

A trigger fires the revision it was published with. One whose line did not change keeps its time. Source: control-plane.md §17.
"""

import uuid
from typing import Any, Literal

from sqlalchemy import delete, insert, select, update

from ...domain.text import check_integer
from ..database import Transaction
from ..operator_api import TriggerChange, TriggerView
from ..schema import triggers
from ..task_file import TaskDefinition, TriggerDefinition
from .cron import next_fire_ms


def replace_triggers(tx: Transaction, definition: TaskDefinition, revision: int, source: str | None) -> list[TriggerChange]:
    """Makes the triggers of a task those of its definition; tells what changed. The caller has the project's lock."""
    table = triggers
    rows = tx.rows(select(table).where(table.c.project_id == definition.project, table.c.task_id == definition.id))
    stored = {row.name: row for row in rows}
    changes = []
    for wanted in definition.triggers:
        change = _put(tx, definition, wanted, stored.pop(wanted.name, None), revision, source)
        changes.append(TriggerChange(wanted.name, change))
    for name, row in sorted(stored.items()):
        _remove(tx, row)
        changes.append(TriggerChange(name, "removed"))
    return changes


def remove_orphans(tx: Transaction, source: str, kept: set[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Removes the triggers that came from `source` with tasks that are not in it any more. The caller has the locks."""
    removed = []
    for row in of_source(tx, source):
        if (row.project_id, row.task_id) not in kept:
            _remove(tx, row)
            removed.append((row.project_id, row.task_id, row.name))
    return removed


def of_source(tx: Transaction, source: str) -> list[Any]:
    """The triggers that came from `source`, in order."""
    table = triggers
    return tx.rows(select(table).where(table.c.source == source).order_by(table.c.project_id, table.c.task_id, table.c.name))


def listed(tx: Transaction, limit: int) -> list[TriggerView]:
    """At most `limit` (1..1000) triggers, by project, task and name."""
    check_integer(limit, "limit", 1, 1000)
    table = triggers
    statement = select(table).order_by(table.c.project_id, table.c.task_id, table.c.name).limit(limit)
    return [
        TriggerView(
            project=row.project_id,
            task=row.task_id,
            name=row.name,
            revision=row.revision,
            cron=row.cron,
            timezone=row.timezone,
            misfire=row.misfire,
            if_running=row.if_running,
            enabled=row.enabled,
            source=row.source,
            next_fire_at_ms=row.next_fire_at_ms,
            last_fire_at_ms=row.last_fire_at_ms,
            last_run_id=row.last_run_id,
            last_outcome=row.last_outcome,
        )
        for row in tx.rows(statement)
    ]


def _put(
    tx: Transaction, definition: TaskDefinition, wanted: TriggerDefinition, row: Any, revision: int, source: str | None
) -> Literal["new", "changed", "unchanged"]:
    facts: dict[str, Any] = {
        "cron": wanted.cron,
        "timezone": wanted.timezone,
        "misfire": wanted.misfire,
        "if_running": wanted.if_running,
        "enabled": wanted.enabled,
        "priority": wanted.priority,
        "revision": revision,
        "source": source,
    }
    following = next_fire_ms(wanted.cron, wanted.timezone, tx.now_ms) if wanted.enabled else None
    if row is None:
        tx.write(
            insert(triggers).values(
                project_id=definition.project,
                task_id=definition.id,
                name=wanted.name,
                trigger_id=str(uuid.uuid4()),
                next_fire_at_ms=following,
                version=0,
                created_at_ms=tx.now_ms,
                updated_at_ms=tx.now_ms,
                **facts,
            )
        )
        return "new"
    if all(getattr(row, name) == value for name, value in facts.items()):
        return "unchanged"
    if row.enabled and wanted.enabled and (row.cron, row.timezone) == (wanted.cron, wanted.timezone):
        following = row.next_fire_at_ms
    values = {**facts, "next_fire_at_ms": following, "version": row.version + 1, "updated_at_ms": tx.now_ms}
    tx.write_one(update(triggers).where(*_this(row)).values(lease_owner=None, lease_expires_at_ms=None, **values))
    return "changed"


def _remove(tx: Transaction, row: Any) -> None:
    tx.write_one(delete(triggers).where(*_this(row)))


def _this(row: Any) -> tuple[Any, ...]:
    table = triggers
    return (table.c.trigger_id == row.trigger_id, table.c.version == row.version)
