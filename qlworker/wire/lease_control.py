"""lease-control: renewal, stop requests and the terminal answer (wire-protocol.md §7)."""

from typing import ClassVar, Final, Literal

from ..domain.document import Document
from ..domain.lease import StopReason
from ..domain.text import INT31, check_integer
from .fence import LeaseFence

LEASE_CONTROL_SCHEMA: Final = "qinglong/remote-worker-lease-control@v1"


class LeaseControlRequest(LeaseFence, frozen=True, kw_only=True):
    """The whole fence of one run lease and nothing else (§7.1)."""

    SCHEMA: ClassVar[str] = LEASE_CONTROL_SCHEMA


class Stop(Document, frozen=True, kw_only=True):
    """Why and since when a stop is wanted."""

    reason: StopReason
    requested_at_ms: int

    def __post_init__(self) -> None:
        check_integer(self.requested_at_ms, "stop.requestedAtMs")


class LeaseControlResponse(Document, frozen=True, kw_only=True):
    """All twelve members are always present; what does not apply is null (§7.2)."""

    schema: Literal["qinglong/remote-worker-lease-control@v1"]
    status: Literal["renewed", "stop_requested", "terminal"]
    project_id: str
    run_id: str
    attempt_id: str
    offer_id: str
    lease_generation: int
    lease_version: int | None
    renewed_at_ms: int | None
    expires_at_ms: int | None
    stop: Stop | None
    terminal_status: Literal["succeeded", "failed", "cancelled", "timed_out", "lost"] | None

    def __post_init__(self) -> None:
        check_integer(self.lease_generation, "leaseGeneration", 1, INT31)
        if (self.stop is not None) is not (self.status == "stop_requested"):
            raise ValueError("stop belongs to stop_requested and to nothing else")
        if (self.terminal_status is not None) is not (self.status == "terminal"):
            raise ValueError("terminalStatus belongs to terminal and to nothing else")
        terms = (self.lease_version, self.renewed_at_ms, self.expires_at_ms)
        if any((term is None) is not (self.status == "terminal") for term in terms):
            raise ValueError("a lease that lives has a version and times, a terminal one has none")
        if self.lease_version is not None and self.renewed_at_ms is not None and self.expires_at_ms is not None:
            check_integer(self.lease_version, "leaseVersion", 1, INT31)
            check_integer(self.renewed_at_ms, "renewedAtMs")
            check_integer(self.expires_at_ms, "expiresAtMs", self.renewed_at_ms + 1)

    def echoes(self, request: LeaseControlRequest) -> bool:
        """Whether this answers `request`: same identities, and a version exactly one higher unless terminal."""
        same = all(
            getattr(self, name) == getattr(request, name)
            for name in ("project_id", "run_id", "attempt_id", "offer_id", "lease_generation")
        )
        return same and self.lease_version in (None, request.expected_lease_version + 1)
