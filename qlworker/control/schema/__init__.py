"""The tables of the control plane, one module per subject."""

from .columns import metadata
from .execution import (
    artifacts,
    cancellation_dispatches,
    projects,
    recovery_controls,
    run_attempts,
    run_dispatch_leases,
    run_events,
    run_retry_policies,
    runs,
    task_execution_revisions,
    worker_execution_attestations,
)
from .operations import scan_cursors, security_audit
from .schedule import triggers
from .workers import credential_deliveries, enrolment_tokens, worker_certificates, worker_credentials, worker_sessions

__all__ = [
    "artifacts",
    "cancellation_dispatches",
    "credential_deliveries",
    "enrolment_tokens",
    "metadata",
    "projects",
    "recovery_controls",
    "run_attempts",
    "run_dispatch_leases",
    "run_events",
    "run_retry_policies",
    "runs",
    "scan_cursors",
    "security_audit",
    "task_execution_revisions",
    "triggers",
    "worker_certificates",
    "worker_credentials",
    "worker_execution_attestations",
    "worker_sessions",
]
