"""What commands and server say to each other over the operator's socket: JSON documents, one struct each."""

from typing import Final

import msgspec

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
    """Issue a first credential, valid for `lifetime_s` seconds."""

    worker_id: str
    lifetime_s: int


class RotateWorker(_Body, frozen=True, kw_only=True):
    """Issue a further credential; those before it end after `overlap_s` seconds."""

    worker_id: str
    lifetime_s: int
    overlap_s: int


class RevokeWorker(_Body, frozen=True, kw_only=True):
    """End every credential at once."""

    worker_id: str


class Revoked(_Body, frozen=True, kw_only=True):
    """How many credentials were active."""

    revoked: int


class IssuedToken(_Body, frozen=True, kw_only=True):
    """A token, told once. Never shown in a repr."""

    worker_id: str
    credential_id: str
    expires_at_ms: int
    token: str

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


class Failure(_Body, frozen=True, kw_only=True):
    """Why a request was refused: one line without secrets."""

    error: str
