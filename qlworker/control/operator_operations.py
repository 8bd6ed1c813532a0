"""Every operation of the operator listener, once: the routes are made of this table and so is the OpenAPI document."""

from typing import Any, Final, Literal

import msgspec

from .operator_api import (
    AddWorker,
    Applied,
    AuditView,
    Cancelled,
    EventView,
    Invitation,
    InviteWorker,
    IssuedToken,
    PublishCredential,
    Published,
    RecoveryView,
    Revoked,
    RevokeWorker,
    RotateWorker,
    RunDetail,
    RunView,
    Started,
    StartRun,
    Status,
    StoredSecret,
    TaskView,
    TriggerView,
    WorkerView,
)
from .task_file import TaskDefinition


class ApplyTasks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publish all these tasks with their triggers, or only tell what that would do. Triggers that came from `source` before and
    whose task is missing here are removed."""

    source: str
    tasks: list[TaskDefinition]
    is_plan: bool = False


BYTES: Final = bytes
"""The type of a body or an answer that is no JSON."""


class Query(msgspec.Struct, frozen=True):
    """A member of the query."""

    name: str
    kind: Literal["string", "integer"]
    meaning: str
    is_required: bool = False


class Operation(msgspec.Struct, frozen=True):
    """One request. `name` is that of the method which answers it, `answer` and `body` the documents' types."""

    name: str
    method: Literal["GET", "POST", "PUT"]
    path: str
    summary: str
    answer: Any
    body: Any = None
    query: tuple[Query, ...] = ()


_PROJECT: Final = Query("project", "string", "the project's name")
_TASK: Final = Query("task", "string", "the task's id")

OPERATIONS: Final = (
    Operation("status", "GET", "/status", "The running server", Status),
    Operation("list_workers", "GET", "/workers", "All workers", list[WorkerView]),
    Operation("add_worker", "POST", "/workers", "Issue a worker's first token, for a kit", IssuedToken, AddWorker),
    Operation("invite_worker", "POST", "/workers/invite", "Invite a box to become a worker", Invitation, InviteWorker),
    Operation("rotate_worker", "POST", "/workers/rotate", "Issue a further token", IssuedToken, RotateWorker),
    Operation(
        "publish_credential",
        "POST",
        "/workers/published",
        "A rotated token was handed over",
        PublishCredential,
        PublishCredential,
    ),
    Operation("revoke_worker", "POST", "/workers/revoke", "End all that makes a box this worker", Revoked, RevokeWorker),
    Operation("put_task", "PUT", "/tasks", "Publish a task; the same content again changes nothing", Published, TaskDefinition),
    Operation("apply_tasks", "POST", "/apply", "Publish a directory of tasks, all or none, or plan it", Applied, ApplyTasks),
    Operation(
        "list_triggers",
        "GET",
        "/triggers",
        "When tasks run by themselves",
        list[TriggerView],
        query=(Query("limit", "integer", "at most so many, 1000 unless told"),),
    ),
    Operation(
        "list_tasks",
        "GET",
        "/tasks",
        "The newest revision of each task",
        list[Published],
        query=(Query("limit", "integer", "at most so many, 1000 unless told"),),
    ),
    Operation(
        "show_task",
        "GET",
        "/task",
        "One revision of a task in full",
        TaskView,
        TriggerView,
        query=(
            Query("project", "string", "the project's name", is_required=True),
            Query("id", "string", "the task's id", is_required=True),
            Query("revision", "integer", "its number; the newest unless told"),
        ),
    ),
    Operation(
        "put_secret",
        "PUT",
        "/secrets",
        "Store a secret's value, which is the body",
        StoredSecret,
        BYTES,
        query=(
            Query("project", "string", "the project's name", is_required=True),
            Query("name", "string", "the secret's name", is_required=True),
            Query("version", "integer", "its version; without one it has a single value"),
        ),
    ),
    Operation("start_run", "POST", "/runs", "Queue a run", Started, StartRun),
    Operation(
        "list_runs",
        "GET",
        "/runs",
        "Runs, newest first",
        list[RunView],
        query=(Query("limit", "integer", "at most so many, 50 unless told"), _PROJECT, _TASK),
    ),
    Operation("show_run", "GET", "/runs/{run_id}", "One run with its attempts", RunDetail),
    Operation("cancel_run", "POST", "/runs/{run_id}/cancel", "Ask for the end of a run", Cancelled),
    Operation("retry_run", "POST", "/runs/{run_id}/retry", "Queue a run that is over once more, as a new one", Started),
    Operation(
        "vouch_stopped",
        "POST",
        "/runs/{run_id}/stopped",
        "Vouch that a run's process is gone, on an operator's word",
        RunDetail,
    ),
    Operation(
        "list_recoveries",
        "GET",
        "/recoveries",
        "Started runs that nobody holds",
        list[RecoveryView],
        query=(Query("limit", "integer", "at most so many, 100 unless told"),),
    ),
    Operation(
        "run_events",
        "GET",
        "/runs/{run_id}/events",
        "A run's history, oldest first",
        list[EventView],
        query=(Query("after", "integer", "only events behind this sequence number"),),
    ),
    Operation(
        "run_log",
        "GET",
        "/runs/{run_id}/log",
        "A run's output",
        BYTES,
        query=(Query("follow", "string", "1: go on until the run is over"),),
    ),
    Operation(
        "list_audit",
        "GET",
        "/audit",
        "The security audit, newest first",
        list[AuditView],
        query=(
            Query("limit", "integer", "at most so many, 1 to 1000, 100 unless told"),
            Query("before", "string", "only rows older than the one of this event id"),
            Query("subject", "string", "only rows about this worker"),
            Query("outcome", "string", "only rows with this outcome"),
        ),
    ),
    Operation("openapi", "GET", "/openapi.json", "This document", dict[str, Any]),
)
