"""Applying a directory of task files: all of it in one transaction, or nothing; the same again changes nothing.

A plan is an application that is taken back, so it cannot say anything else than what would be done.
"""

import msgspec

from ...domain.errors import Conflict, QlworkerError
from ..database import Transaction
from ..operator_api import Applied, Published, TaskChange, TriggerChange
from ..task_file import TaskDefinition
from ..tasks import newest_revision, publish
from .triggers import of_source, remove_orphans, replace_triggers


class PlanOnly(QlworkerError):
    """Takes an application back and carries what it would have done."""

    def __init__(self, applied: Applied) -> None:
        super().__init__("this was only a plan")
        self.applied = applied


def put_task(tx: Transaction, definition: TaskDefinition) -> Published:
    """Publishes one task with its triggers. Raises as tasks.publish does."""
    tx.lock("task", definition.project)
    published = publish(tx, definition)
    replace_triggers(tx, definition, published.revision, None)
    return published


def apply(tx: Transaction, definitions: list[TaskDefinition], source: str, *, is_plan: bool) -> Applied:
    """Publishes all `definitions`, and removes the triggers that came from `source` with tasks that are not among them.

    Raises Conflict for two definitions of one task and for whatever tasks.publish refuses, with the task's name in front;
    PlanOnly with the answer if `is_plan`. Then nothing changed.
    """
    by_name = {(each.project, each.id): each for each in definitions}
    if len(by_name) != len(definitions):
        twice = sorted({f"{each.project}/{each.id}" for each in definitions if by_name[each.project, each.id] is not each})
        raise Conflict(f"two files define {', '.join(twice)}; keep one of them")
    for project in sorted({project for project, _ in by_name} | {row.project_id for row in of_source(tx, source)}):
        tx.lock("task", project)
    changes = [_applied(tx, by_name[name], source) for name in sorted(by_name)]
    removed = [
        TaskChange(project, task_id, 0, "unchanged", [TriggerChange(name, "removed")])
        for project, task_id, name in remove_orphans(tx, source, set(by_name))
    ]
    applied = Applied(changes + removed)
    if is_plan:
        raise PlanOnly(applied)
    return applied


def _applied(tx: Transaction, definition: TaskDefinition, source: str) -> TaskChange:
    name = f"{definition.project}/{definition.id}"
    before = newest_revision(tx, definition.project, definition.id)
    try:
        published = publish(tx, definition)
    except (Conflict, ValueError) as error:
        raise Conflict(f"{name}: {error}") from error
    changes = replace_triggers(tx, definition, published.revision, source)
    change = TaskChange(definition.project, definition.id, published.revision, "unchanged", changes)
    if not published.created:
        return change
    return msgspec.structs.replace(change, change="new" if before == 0 else "changed")
