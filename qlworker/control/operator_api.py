"""What commands and server say to each other over the operator's socket: JSON documents, one struct each.

Light on purpose: a command must not load the database's library to show an answer.
"""

from typing import Final, Literal

import msgspec

from ..domain.revision import ExecutionRevision
from .retry_policy import RetryTerms

DAY_S: Final = 86_400
BODY_BYTES: Final = 1024 * 1024


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request or an answer; an unknown member is refused."""


class Status(_Body, frozen=True, kw_only=True):
    """The running server."""

    origin: str
    pid: int
    version: str


class AddWorker(_Body, frozen=True, kw_only=True):
    """Issue a first credential, valid for `lifetime_s` seconds. `serial` and `not_after_ms` are those of the certificate in its
    kit. `mutation_id`, a UUID, makes a repeat harmless: it gets the same answer without the token."""

    worker_id: str
    lifetime_s: int
    serial: str
    not_after_ms: int
    mutation_id: str | None = None


class InviteWorker(_Body, frozen=True, kw_only=True):
    """Invite a box to become this worker within `lifetime_s` seconds; its credential lasts `credential_lifetime_s`."""

    worker_id: str
    lifetime_s: int
    credential_lifetime_s: int


class Invitation(_Body, frozen=True, kw_only=True):
    """An invitation, told once, and where it is spent. Never shown in a repr."""

    worker_id: str
    invitation: str
    origin: str
    expires_at_ms: int

    def __repr__(self) -> str:
        return f"<Invitation of {self.worker_id}>"


class RotateWorker(_Body, frozen=True, kw_only=True):
    """Issue a further credential. It counts once it is published; those before it end `overlap_s` seconds later, or as soon as
    it was used."""

    worker_id: str
    lifetime_s: int
    overlap_s: int
    mutation_id: str | None = None


class PublishCredential(_Body, frozen=True, kw_only=True):
    """The token of a rotated credential lies where its worker finds it."""

    credential_id: str


class RevokeWorker(_Body, frozen=True, kw_only=True):
    """End every credential at once."""

    worker_id: str


class Revoked(_Body, frozen=True, kw_only=True):
    """How many credentials were active, how many certificates were good, how many invitations could have been spent."""

    revoked: int
    certificates: int
    invitations: int


class IssuedToken(_Body, frozen=True, kw_only=True):
    """A token, told once: None when its mutation was repeated. Never shown in a repr."""

    worker_id: str
    credential_id: str
    expires_at_ms: int
    token: str | None

    def __repr__(self) -> str:
        return f"<IssuedToken credential={self.credential_id}>"


class WorkerView(_Body, frozen=True, kw_only=True):
    """A worker: what its credentials allow and when it was last heard. `session` is `none`, `online`, `draining`,
    `offline` or `silent` (its session lease is over)."""

    worker_id: str
    credentials: int
    credential_expires_at_ms: int | None
    session: str
    last_heartbeat_at_ms: int | None
    available_slots: int | None
    max_concurrent_runs: int | None


class StoredSecret(_Body, frozen=True, kw_only=True):
    """Whether the value was written or was there already."""

    changed: bool


class StartRun(_Body, frozen=True, kw_only=True):
    """Queue a run."""

    project: str
    task: str
    revision: int | None = None
    priority: int = 0
    idempotency_key: str | None = None


class Started(msgspec.Struct, frozen=True):
    """A run as it was started. `created` is false when its idempotency key named one that exists."""

    run_id: str
    status: str
    created: bool


class Cancelled(msgspec.Struct, frozen=True):
    """What a cancel did, and the run's status after it."""

    result: Literal["requested", "already_requested", "already_terminal"]
    status: str


class ArtifactView(msgspec.Struct, frozen=True):
    """A stored log. `truncated` is None when the worker did not know."""

    log_artifact_id: str
    byte_length: int
    sha256: str
    truncated: bool | None


class AttemptView(msgspec.Struct, frozen=True):
    """An attempt without anything that authorises: no digests, no handle."""

    id: str
    attempt: int
    status: str
    worker_id: str | None
    created_at_ms: int
    started_at_ms: int | None
    finished_at_ms: int | None
    deadline_at_ms: int | None
    exit_code: int | None
    error_code: str | None
    error_summary: str | None
    artifact: ArtifactView | None


class RunView(msgspec.Struct, frozen=True):
    """A run in a list: with its newest attempt's worker and exit code. `is_over`: nothing will change any more."""

    id: str
    project: str
    task: str
    revision: int
    status: str
    is_over: bool
    priority: int
    created_at_ms: int
    started_at_ms: int | None
    finished_at_ms: int | None
    cancel_requested_at_ms: int | None
    cancel_reason: str | None
    worker_id: str | None
    exit_code: int | None
    error_code: str | None


class RunDetail(msgspec.Struct, frozen=True):
    """A run with all its attempts, oldest first."""

    run: RunView
    attempts: list[AttemptView]


class RecoveryView(msgspec.Struct, frozen=True):
    """A started run that nobody holds: `status` is `retry`, looked at again, or `manual`, for an operator to decide."""

    run_id: str
    attempt_id: str
    worker_id: str | None
    status: str
    reason: str
    looks: int
    next_look_at_ms: int | None
    updated_at_ms: int


class EventView(msgspec.Struct, frozen=True):
    """One entry of a run's history."""

    sequence: int
    type: str
    created_at_ms: int
    actor_type: str
    actor_id: str | None
    attempt_id: str | None
    payload: msgspec.Raw


class AuditView(msgspec.Struct, frozen=True):
    """One row of the security audit: who was allowed or refused what, and why."""

    event_id: str
    request_id: str
    operation: str
    subject: str | None
    authentication_id: str | None
    outcome: str
    reasons: str
    occurred_at_ms: int


class Published(msgspec.Struct, frozen=True):
    """A published revision. `created` is false when it was there already."""

    project: str
    id: str
    revision: int
    task_revision: str
    content_digest: str
    created_at_ms: int
    created: bool


class TriggerChange(msgspec.Struct, frozen=True):
    """What became of one trigger of a task."""

    name: str
    change: Literal["new", "changed", "unchanged", "removed"]


class TaskChange(msgspec.Struct, frozen=True):
    """What became of one task. `revision` is 0 for one that is not in the files any more."""

    project: str
    id: str
    revision: int
    change: Literal["new", "changed", "unchanged"]
    triggers: list[TriggerChange]


class Applied(msgspec.Struct, frozen=True):
    """What applying a directory did, or would do, in order."""

    tasks: list[TaskChange]


class TriggerView(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger and what it did last."""

    project: str
    task: str
    name: str
    revision: int
    cron: str
    timezone: str
    misfire: str
    if_running: str
    enabled: bool
    source: str | None
    next_fire_at_ms: int | None
    last_fire_at_ms: int | None
    last_run_id: str | None
    last_outcome: str | None


class TaskView(msgspec.Struct, frozen=True):
    """One revision in full; secrets stand in it as references only."""

    published: Published
    execution: ExecutionRevision
    worker: str | None = None
    retry: RetryTerms | None = None


class Failure(_Body, frozen=True, kw_only=True):
    """Why a request was refused: one line without secrets."""

    error: str
