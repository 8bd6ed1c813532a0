"""Builders of valid values for tests; every argument changes one thing."""

from typing import Any

import msgspec

from qlworker.domain.canonical import lease_token_digest
from qlworker.domain.offer import Candidate, Lease, Offer, WorkerFence
from qlworker.domain.record import InboxRecord, accept
from qlworker.domain.revision import ArgvCommand, Binding, ExecutionRevision, ShellCommand, task_revision

TOKEN = "worker_generated_lease_capability_0000000000000001"
SESSION_ID = "018f0000-0000-7000-8000-000000000001"
DIGEST = "a" * 64


def make_revision(
    command: ArgvCommand | ShellCommand | None = None, environment: list[Binding] | None = None, **changes: Any
) -> ExecutionRevision:
    """A published revision with its digest computed."""
    revision = ExecutionRevision(
        project_id="project-1",
        task_id="task-1",
        task_revision=task_revision(1, DIGEST),
        source_revision=1,
        source_content_digest=DIGEST,
        executor_type="remote_worker",
        plan_schema="qinglong/command-execution@v1",
        command=command or ArgvCommand(file="/bin/true", args=[]),
        environment=environment or [],
        created_at_ms=1,
        content_digest="0" * 64,
    )
    return msgspec.structs.replace(revision, **changes).canonical()


def make_offer(
    offer_id: str = "offer-1",
    *,
    revision: ExecutionRevision | None = None,
    session_id: str = SESSION_ID,
    generation: int = 2,
    run_id: str = "run-1",
    attempt_id: str = "attempt-1",
    lease_version: int = 0,
    lease_token: str = TOKEN,
    renewed_at_ms: int = 20,
    expires_at_ms: int = 30_020,
    delivery_kind: str = "new_claim",
) -> Offer:
    """A valid stored offer."""
    revision = revision or make_revision()
    return Offer(
        offer_id=offer_id,
        delivery_kind=delivery_kind,
        execution_digest=revision.content_digest,
        candidate=Candidate(
            run_id=run_id,
            attempt_id=attempt_id,
            project_id=revision.project_id,
            task_id=revision.task_id,
            task_revision=revision.task_revision,
            priority=1,
            queued_at_ms=10,
            attempt_created_at_ms=11,
            attempt_number=1,
            executor_type="remote_worker",
        ),
        worker=WorkerFence(worker_id="edge-1", session_id=session_id, generation=generation),
        lease=Lease(
            attempt_id=attempt_id,
            run_id=run_id,
            status="leased",
            version=lease_version,
            lease_generation=1,
            worker_id="edge-1",
            worker_session_id=session_id,
            worker_generation=generation,
            lease_token_digest=lease_token_digest(lease_token),
            acquired_at_ms=20,
            renewed_at_ms=renewed_at_ms,
            expires_at_ms=expires_at_ms,
            updated_at_ms=renewed_at_ms,
        ),
        lease_token=lease_token,
        execution_revision=revision,
        placement_score=0,
    )


def make_record(offer_id: str = "offer-1", now_ms: int = 1000, **changes: Any) -> InboxRecord:
    """An accepted record of `make_offer(offer_id, **changes)`."""
    return accept(make_offer(offer_id, **changes), now_ms)
