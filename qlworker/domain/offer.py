"""An offer: one claimed Run Lease with the revision to execute, as the worker stores it.

Source: wire-protocol.md §4.1, §4.2, §10.4; control-plane.md §1.8. The lease is the only remote execution authority (R12).
"""

from typing import Literal

import msgspec

from .canonical import digests_equal, lease_token_digest
from .document import Document
from .revision import ExecutionRevision
from .text import (
    INT31,
    SAFE_INTEGER,
    check_digest,
    check_dispatch_id,
    check_integer,
    check_lease_token,
    check_offer_id,
    check_session_id,
    check_worker_id,
)


class Candidate(Document, frozen=True, kw_only=True):
    """Which attempt of which run this is (wire-protocol §4.1)."""

    run_id: str
    attempt_id: str
    project_id: str
    task_id: str
    task_revision: str
    priority: int
    queued_at_ms: int
    attempt_created_at_ms: int
    attempt_number: int
    executor_type: Literal["remote_worker"]

    def __post_init__(self) -> None:
        for name in ("run_id", "attempt_id", "project_id", "task_id", "task_revision"):
            check_dispatch_id(getattr(self, name), f"candidate.{name}")
        check_integer(self.priority, "candidate.priority", -SAFE_INTEGER)
        check_integer(self.queued_at_ms, "candidate.queuedAtMs")
        check_integer(self.attempt_created_at_ms, "candidate.attemptCreatedAtMs")
        check_integer(self.attempt_number, "candidate.attemptNumber", 1, INT31)


class WorkerFence(Document, frozen=True, kw_only=True):
    """The session an offer belongs to."""

    worker_id: str
    session_id: str
    generation: int

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)
        check_session_id(self.session_id)
        check_integer(self.generation, "generation", 1, INT31)


class LeaseTerms(Document, frozen=True, kw_only=True):
    """The moving part of a Run Lease. Times are the control plane's; a worker counts durations, never dates."""

    version: int
    lease_generation: int
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    updated_at_ms: int

    def __post_init__(self) -> None:
        check_integer(self.version, "lease.version", 0, INT31)
        check_integer(self.lease_generation, "lease.leaseGeneration", 1, INT31)
        check_integer(self.acquired_at_ms, "lease.acquiredAtMs")
        check_integer(self.renewed_at_ms, "lease.renewedAtMs", self.acquired_at_ms)
        check_integer(self.expires_at_ms, "lease.expiresAtMs", self.renewed_at_ms + 1)
        check_integer(self.updated_at_ms, "lease.updatedAtMs", self.acquired_at_ms)


class Lease(Document, frozen=True, kw_only=True):
    """A full Run Lease as the worker rebuilds and stores it (wire-protocol §4.2)."""

    attempt_id: str
    run_id: str
    status: Literal["leased"]
    version: int
    lease_generation: int
    worker_id: str
    worker_session_id: str
    worker_generation: int
    lease_token_digest: str
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    updated_at_ms: int

    def __post_init__(self) -> None:
        check_digest(self.lease_token_digest, "lease.leaseTokenDigest")
        _ = self.terms

    @property
    def terms(self) -> LeaseTerms:
        """The moving part."""
        return LeaseTerms(
            version=self.version,
            lease_generation=self.lease_generation,
            acquired_at_ms=self.acquired_at_ms,
            renewed_at_ms=self.renewed_at_ms,
            expires_at_ms=self.expires_at_ms,
            updated_at_ms=self.updated_at_ms,
        )

    @property
    def duration_ms(self) -> int:
        """How long the lease runs from its last renewal, in milliseconds."""
        return self.expires_at_ms - self.renewed_at_ms


class Offer(Document, frozen=True, kw_only=True):
    """A validated offer with the opaque lease capability that the worker made itself (R14)."""

    offer_id: str
    delivery_kind: str
    execution_digest: str
    candidate: Candidate
    worker: WorkerFence
    lease: Lease
    lease_token: str
    execution_revision: ExecutionRevision
    placement_score: int

    def __post_init__(self) -> None:
        check_offer_id(self.offer_id)
        check_digest(self.execution_digest, "executionDigest")
        check_lease_token(self.lease_token)
        check_integer(self.placement_score, "placementScore")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Every fact that is stated twice must be stated alike (R123 to R126)."""
        candidate, revision, lease = self.candidate, self.execution_revision, self.lease
        for name in ("project_id", "task_id", "task_revision"):
            if getattr(candidate, name) != getattr(revision, name):
                raise ValueError(f"candidate and executionRevision disagree on {name}")
        if not digests_equal(self.execution_digest, revision.content_digest):
            raise ValueError("executionDigest and contentDigest disagree")
        if (lease.run_id, lease.attempt_id) != (candidate.run_id, candidate.attempt_id):
            raise ValueError("lease and candidate disagree on the attempt")
        if (lease.worker_id, lease.worker_session_id, lease.worker_generation) != (
            self.worker.worker_id,
            self.worker.session_id,
            self.worker.generation,
        ):
            raise ValueError("lease and worker disagree on the session")
        if not digests_equal(lease.lease_token_digest, lease_token_digest(self.lease_token)):
            raise ValueError("leaseTokenDigest does not belong to the lease token")

    @property
    def run_id(self) -> str:
        """The run this offer is for."""
        return self.candidate.run_id

    @property
    def attempt_id(self) -> str:
        """The attempt this offer is for."""
        return self.candidate.attempt_id

    def has_same_authority(self, other: "Offer") -> bool:
        """Whether everything but the lease's version and times is equal (R26, R61). The kind of delivery does not count:
        the first value is kept (control-plane.md D23)."""
        fixed = set(self.__struct_fields__) - {"lease", "delivery_kind"}
        held = set(Lease.__struct_fields__) - set(LeaseTerms.__struct_fields__) | {"lease_generation"}
        return all(getattr(self, name) == getattr(other, name) for name in fixed) and all(
            getattr(self.lease, name) == getattr(other.lease, name) for name in held
        )

    def with_lease(self, lease: Lease, delivery_kind: str | None = None) -> "Offer":
        """This offer under other lease terms."""
        kind = self.delivery_kind if delivery_kind is None else delivery_kind
        return msgspec.structs.replace(self, lease=lease, delivery_kind=kind)

    def with_terms(self, version: int, renewed_at_ms: int, expires_at_ms: int) -> "Offer":
        """This offer after a renewal to `version`. Times are the control plane's, in milliseconds."""
        lease = msgspec.structs.replace(
            self.lease,
            version=version,
            renewed_at_ms=renewed_at_ms,
            expires_at_ms=expires_at_ms,
            updated_at_ms=max(renewed_at_ms, self.lease.updated_at_ms),
        )
        return self.with_lease(lease)
