"""The worker's session with the control plane: what is durable, what is observed, and what it allows.

Source: ADR-0012, wire-protocol.md §2 and §13.3, R374 to R380.
"""

from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from .document import Document
from .server_time import Anchor
from .text import INT31, check_digest, check_integer, check_session_id, check_worker_id


class SessionStatus(StrEnum):
    """The control plane's view of a session."""

    ONLINE = "online"
    DRAINING = "draining"
    OFFLINE = "offline"


class StoredSession(Document, frozen=True, kw_only=True):
    """What a restarted worker needs to go on in its session (wire-protocol §13.3).

    The version is not here: it changes with every heartbeat and flash must not. `register` with the same session id and the
    same capabilities tells it (§2.4), which is why both are stored.
    """

    schema_version: Literal[1]
    worker_id: str
    session_id: str
    generation: int
    capabilities_json: str
    capabilities_hash: str
    max_concurrent_runs: int
    lease_duration_ms: int
    anchor: Anchor | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)
        check_session_id(self.session_id)
        check_integer(self.generation, "generation", 1, INT31)
        check_digest(self.capabilities_hash, "capabilitiesHash")
        check_integer(self.max_concurrent_runs, "maxConcurrentRuns", 1, 1024)
        check_integer(self.lease_duration_ms, "leaseDurationMs", 5_000, 600_000)


class LiveSession(msgspec.Struct, frozen=True):
    """The session as last observed. `expires_at` is boot clock milliseconds, counted from before the request."""

    worker_id: str
    session_id: str
    generation: int
    version: int
    status: SessionStatus
    expires_at: int

    def is_over(self, now_ms: int) -> bool:
        """Whether the last observed session lease has run out."""
        return now_ms >= self.expires_at or self.status is SessionStatus.OFFLINE


class Access(StrEnum):
    """What the control plane lets this process do at present."""

    OPEN = "open"
    SUSPENDED = "suspended"
    FENCED = "fenced"


def may_pull(session: LiveSession | None, access: Access, now_ms: int) -> bool:
    """Whether a new offer may be asked for: online, not over, neither suspended nor fenced (wire-protocol §2.7)."""
    return (
        session is not None and access is Access.OPEN and session.status is SessionStatus.ONLINE and not session.is_over(now_ms)
    )


def may_process(session: LiveSession | None, access: Access, now_ms: int) -> bool:
    """Whether work already owned may still be acknowledged and completed: draining counts too (R380)."""
    return session is not None and access is not Access.FENCED and not session.is_over(now_ms)
