"""Publishing tasks as immutable revisions, and reading them.

Publishing is append-only. The same content as the newest revision is that revision; other content is the next number, and
other content under a number that exists is a conflict. Source: control-plane.md §1.7, ADR-0023.
"""

from typing import Any

import msgspec
from sqlalchemy import insert, select

from ..domain.errors import Conflict
from ..domain.revision import ExecutionRevision
from ..domain.text import INT31, check_integer
from .database import Transaction
from .operator_api import Published, TaskView
from .retry_policy import RetryTerms
from .schema import projects, task_execution_revisions
from .task_file import TaskDefinition
from .workers import require_known


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs to know of the revision it is of; the execution itself is read when it is offered."""

    project_id: str
    task_id: str
    task_revision: str
    required_worker_id: str | None
    retry: RetryTerms | None


def publish(tx: Transaction, definition: TaskDefinition) -> Published:
    """Publishes `definition` as the next revision, or as the number it pins.

    Raises Conflict when the pinned number exists with other content or would not be the newest, or when the task is for a
    worker that nobody added; ValueError when the revision is larger than a plan may be.
    """
    tx.lock("task", definition.project)
    newest = _newest(tx, definition.project, definition.id)
    latest = newest_revision(tx, definition.project, definition.id)
    number = definition.revision
    if number is None:
        same = newest is not None and newest.content_digest == definition.execution(latest).content_digest
        number = latest if same else latest + 1
    check_integer(number, "revision", 1, INT31)
    execution = definition.execution(number, tx.now_ms)
    execution.verify()
    stored = _numbered(tx, definition.project, definition.id, number)
    if stored is not None:
        if stored.content_digest != execution.content_digest:
            raise Conflict(
                f"revision {number} of {definition.project}/{definition.id} exists with other content; use a new number"
            )
        return _published(stored, created=False)
    if number <= latest:
        raise Conflict(f"revision {number} of {definition.project}/{definition.id} would not be the newest, which is {latest}")
    if definition.worker is not None:
        require_known(tx, definition.worker, f"the task {definition.project}/{definition.id}")
    if tx.row(select(projects).where(projects.c.id == definition.project)) is None:
        tx.write(insert(projects).values(id=definition.project))
    tx.write(
        insert(task_execution_revisions).values(
            project_id=definition.project,
            task_id=definition.id,
            task_revision=execution.task_revision,
            source_revision=number,
            source_content_digest=execution.source_content_digest,
            content=execution.to_json().decode(),
            content_digest=execution.content_digest,
            required_worker_id=definition.worker,
            retry=None if definition.retry is None else msgspec.json.encode(definition.retry).decode(),
            created_at_ms=tx.now_ms,
        )
    )
    return _published(_numbered(tx, definition.project, definition.id, number), created=True)


def newest_revision(tx: Transaction, project: str, task_id: str) -> int:
    """The number of a task's newest revision, 0 where there is none."""
    newest = _newest(tx, project, task_id)
    return 0 if newest is None else int(newest.source_revision)


def pinned(
    tx: Transaction, project: str, task_id: str, number: int | None = None, *, task_revision: str | None = None
) -> Pinned:
    """Revision `number` of a task, the one called `task_revision`, or its newest, for a new run.

    Raises Conflict when it does not exist.
    """
    if task_revision is not None:
        number = _number_of(tx, project, task_id, task_revision)
    row = _existing(tx, project, task_id, number)
    return Pinned(
        project_id=project,
        task_id=task_id,
        task_revision=row.task_revision,
        required_worker_id=row.required_worker_id,
        retry=None if row.retry is None else msgspec.json.decode(row.retry, type=RetryTerms),
    )


def task(tx: Transaction, project: str, task_id: str, number: int | None = None) -> TaskView:
    """Revision `number` of a task, or its newest. Raises Conflict when it does not exist."""
    row = _existing(tx, project, task_id, number)
    execution = msgspec.json.decode(row.content, type=ExecutionRevision)
    execution.verify()
    retry = None if row.retry is None else msgspec.json.decode(row.retry, type=RetryTerms)
    return TaskView(_published(row, created=False), execution, row.required_worker_id, retry)


def tasks(tx: Transaction, limit: int) -> list[Published]:
    """The newest revision of at most `limit` (1..1000) tasks, by project and id."""
    check_integer(limit, "limit", 1, 1000)
    table = task_execution_revisions
    later = table.alias()
    newer = select(later.c.task_id).where(
        later.c.project_id == table.c.project_id,
        later.c.task_id == table.c.task_id,
        later.c.source_revision > table.c.source_revision,
    )
    rows = tx.rows(select(table).where(~newer.exists()).order_by(table.c.project_id, table.c.task_id).limit(limit))
    return [_published(row, created=False) for row in rows]


def _number_of(tx: Transaction, project: str, task_id: str, task_revision: str) -> int:
    table = task_execution_revisions
    row = tx.row(
        select(table.c.source_revision).where(
            table.c.project_id == project, table.c.task_id == task_id, table.c.task_revision == task_revision
        )
    )
    if row is None:
        raise Conflict(f"there is no revision {task_revision} of task {project}/{task_id}")
    return int(row.source_revision)


def _existing(tx: Transaction, project: str, task_id: str, number: int | None) -> Any:
    row = _newest(tx, project, task_id) if number is None else _numbered(tx, project, task_id, number)
    if row is None:
        wanted = "" if number is None else f" revision {number} of"
        raise Conflict(f"there is no{wanted} task {project}/{task_id}; publish it with qlcontrol task put")
    return row


def _newest(tx: Transaction, project: str, task_id: str) -> Any:
    table = task_execution_revisions
    return tx.row(
        select(table)
        .where(table.c.project_id == project, table.c.task_id == task_id)
        .order_by(table.c.source_revision.desc())
        .limit(1)
    )


def _numbered(tx: Transaction, project: str, task_id: str, number: int) -> Any:
    table = task_execution_revisions
    return tx.row(
        select(table).where(table.c.project_id == project, table.c.task_id == task_id, table.c.source_revision == number)
    )


def _published(row: Any, *, created: bool) -> Published:
    return Published(
        project=row.project_id,
        id=row.task_id,
        revision=row.source_revision,
        task_revision=row.task_revision,
        content_digest=row.content_digest,
        created_at_ms=row.created_at_ms,
        created=created,
    )
