"""register, heartbeat and transition (wire-protocol.md §2)."""

from typing import Final, Literal

from ..domain.canonical import digests_equal, sha256_hex
from ..domain.document import Document
from ..domain.session import SessionStatus
from ..domain.text import INT31, check_digest, check_integer, check_session_id, check_text, check_worker_id

REGISTER_SCHEMA: Final = "qinglong/worker-session-register@v1"
HEARTBEAT_SCHEMA: Final = "qinglong/worker-session-heartbeat@v1"
TRANSITION_SCHEMA: Final = "qinglong/worker-session-transition@v1"
CAPABILITIES_BYTES: Final = 16 * 1024
LEASE_MS: Final = (5_000, 600_000)


class RegisterRequest(Document, frozen=True, kw_only=True):
    """Opens a session, or reads the current one when everything is as stored (§2.3, §2.4)."""

    schema: Literal["qinglong/worker-session-register@v1"]
    capabilities_json: str
    capabilities_hash: str
    max_concurrent_runs: int
    available_slots: int
    lease_duration_ms: int

    def __post_init__(self) -> None:
        check_text(self.capabilities_json, "capabilitiesJson", minimum=2, maximum=CAPABILITIES_BYTES, controls=True)
        check_digest(self.capabilities_hash, "capabilitiesHash")
        if not digests_equal(self.capabilities_hash, sha256_hex(self.capabilities_json.encode())):
            raise ValueError("capabilitiesHash must be the digest of capabilitiesJson")
        check_integer(self.max_concurrent_runs, "maxConcurrentRuns", 1, 1024)
        check_integer(self.available_slots, "availableSlots", 0, self.max_concurrent_runs)
        check_integer(self.lease_duration_ms, "leaseDurationMs", *LEASE_MS)


class HeartbeatRequest(Document, frozen=True, kw_only=True):
    """Extends the session lease and reports free slots (§2.4)."""

    schema: Literal["qinglong/worker-session-heartbeat@v1"]
    generation: int
    expected_version: int
    available_slots: int
    lease_duration_ms: int

    def __post_init__(self) -> None:
        check_integer(self.generation, "generation", 1, INT31)
        check_integer(self.expected_version, "expectedVersion", 0, INT31)
        check_integer(self.available_slots, "availableSlots", 0, 1024)
        check_integer(self.lease_duration_ms, "leaseDurationMs", *LEASE_MS)


class TransitionRequest(Document, frozen=True, kw_only=True):
    """Moves the session to draining or offline (§2.5)."""

    schema: Literal["qinglong/worker-session-transition@v1"]
    generation: int
    expected_version: int
    status: Literal["draining", "offline"]

    def __post_init__(self) -> None:
        check_integer(self.generation, "generation", 1, INT31)
        check_integer(self.expected_version, "expectedVersion", 0, INT31)


class _Projection(Document, frozen=True, kw_only=True):
    worker_id: str
    session_id: str
    generation: int
    version: int
    status: SessionStatus
    lease_expires_at_ms: int

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)
        check_session_id(self.session_id)
        check_integer(self.generation, "generation", 1, INT31)
        check_integer(self.version, "version", 0, INT31)
        check_integer(self.lease_expires_at_ms, "leaseExpiresAtMs")


class RegisterResponse(_Projection, frozen=True, kw_only=True):
    """The session after a registration."""

    schema: Literal["qinglong/worker-session-register@v1"]
    replaced_session: bool


class HeartbeatResponse(_Projection, frozen=True, kw_only=True):
    """The session after a heartbeat."""

    schema: Literal["qinglong/worker-session-heartbeat@v1"]


class TransitionResponse(_Projection, frozen=True, kw_only=True):
    """The session after a transition."""

    schema: Literal["qinglong/worker-session-transition@v1"]


SessionResponse = RegisterResponse | HeartbeatResponse | TransitionResponse
