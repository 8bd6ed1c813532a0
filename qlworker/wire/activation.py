"""starting, running and start-failure (wire-protocol.md §5)."""

from typing import Any, Final, Literal, Self

from msgspec import UNSET, UnsetType

from ..domain.document import Document
from ..domain.offer import Offer
from ..domain.text import (
    INT31,
    check_digest,
    check_dispatch_id,
    check_integer,
    check_lease_token,
    check_offer_id,
    check_text,
)

ACTIVATION_SCHEMA: Final = "qinglong/remote-run-activation@v1"

ActivationStatus = Literal["applied", "already_starting", "already_running", "already_terminal"]

_TERMINAL: Final = frozenset({"failed", "cancelled", "timed_out"})


class ActivationRequest(Document, frozen=True, kw_only=True):
    """The fence that `starting` and `start-failure` send: who, under which lease, at which version (§5.1)."""

    run_id: str
    attempt_id: str
    worker_generation: int
    offer_id: str
    lease_generation: int
    lease_token: str
    expected_lease_version: int

    def __post_init__(self) -> None:
        check_dispatch_id(self.run_id, "runId", 36)
        check_dispatch_id(self.attempt_id, "attemptId", 36)
        check_integer(self.worker_generation, "workerGeneration", 1, INT31)
        check_offer_id(self.offer_id)
        check_integer(self.lease_generation, "leaseGeneration", 1, INT31)
        check_lease_token(self.lease_token)
        check_integer(self.expected_lease_version, "expectedLeaseVersion", 0, INT31)

    @classmethod
    def of(cls, offer: Offer, **members: Any) -> Self:
        """The fence of `offer` under its present lease, with the other `members` of its class."""
        return cls(
            run_id=offer.run_id,
            attempt_id=offer.attempt_id,
            worker_generation=offer.worker.generation,
            offer_id=offer.offer_id,
            lease_generation=offer.lease.lease_generation,
            lease_token=offer.lease_token,
            expected_lease_version=offer.lease.version,
            **members,
        )


class RunningRequest(ActivationRequest, frozen=True, kw_only=True):
    """The fence, and what is fixed when the run becomes running."""

    executor_handle: str
    log_artifact_id: str | None
    callback_sequence: int
    callback_token_digest: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text(self.executor_handle, "executorHandle", minimum=1, maximum=512)
        if self.log_artifact_id is not None:
            check_dispatch_id(self.log_artifact_id, "logArtifactId", 36)
        check_integer(self.callback_sequence, "callbackSequence", 1, INT31)
        check_digest(self.callback_token_digest, "callbackTokenDigest")


class Snapshot(Document, frozen=True, kw_only=True):
    """Run and attempt after the call. Only three shapes are legal: starting, running and terminal (§5.2)."""

    run_id: str
    attempt_id: str
    run_status: str
    attempt_status: str
    lease_version: int
    lease_generation: int
    callback_sequence: int
    deadline_at_ms: int | UnsetType = UNSET
    started_at_ms: int | UnsetType = UNSET
    finished_at_ms: int | UnsetType = UNSET
    executor_handle: str | UnsetType = UNSET
    log_artifact_id: str | UnsetType = UNSET
    error_code: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_dispatch_id(self.run_id, "runId", 36)
        check_dispatch_id(self.attempt_id, "attemptId", 36)
        check_integer(self.lease_version, "leaseVersion", 0, INT31)
        check_integer(self.lease_generation, "leaseGeneration", 1, INT31)
        check_integer(self.callback_sequence, "callbackSequence", 0, INT31)
        for name in ("deadline_at_ms", "started_at_ms", "finished_at_ms"):
            if (value := getattr(self, name)) is not UNSET:
                check_integer(value, name)
        for name, maximum in (("executor_handle", 512), ("log_artifact_id", 36), ("error_code", 128)):
            if (text := getattr(self, name)) is not UNSET:
                check_dispatch_id(text, name, maximum)
        _ = self.shape

    @property
    def shape(self) -> Literal["starting", "running", "terminal"]:
        """Which of the three shapes this is. Raises ValueError for any other combination."""
        ended = self.finished_at_ms is not UNSET and self.error_code is not UNSET
        open_end = self.finished_at_ms is UNSET and self.error_code is UNSET
        begun = self.executor_handle is not UNSET and self.started_at_ms is not UNSET
        not_begun = self.executor_handle is UNSET and self.started_at_ms is UNSET
        statuses = (self.run_status, self.attempt_status)
        if statuses == ("dispatching", "starting") and not_begun and open_end:
            return "starting"
        if statuses == ("running", "running") and begun and open_end:
            return "running"
        if self.run_status == self.attempt_status and self.run_status in _TERMINAL and not_begun and ended:
            return "terminal"
        raise ValueError("a snapshot must have the shape of a starting, a running or a terminal attempt")


class ActivationResponse(Document, frozen=True, kw_only=True):
    """What the call did, and the facts after it. `already_x` comes with shape x only."""

    schema: Literal["qinglong/remote-run-activation@v1"]
    status: ActivationStatus
    snapshot: Snapshot

    def __post_init__(self) -> None:
        if self.status not in ("applied", f"already_{self.snapshot.shape}"):
            raise ValueError("status and snapshot disagree")
