"""What is executed and how it went: revisions, runs, attempts, events, leases, logs (control-plane.md §1, §22).

Documents are canonical JSON. A raw token or a secret is in no column.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from .columns import metadata, number, optional, optional_number, text

projects = Table("projects", metadata, text("id", 128, primary_key=True))

task_execution_revisions = Table(
    "task_execution_revisions",
    metadata,
    Column("project_id", String(128), ForeignKey("projects.id"), nullable=False),
    text("task_id", 128),
    text("task_revision", 128),
    number("source_revision"),
    text("source_content_digest", 64),
    Column("content", Text, nullable=False),  # the whole ExecutionRevision as js-json
    text("content_digest", 64),
    # What the control plane keeps to itself of a task: neither belongs to what a worker executes.
    optional("required_worker_id", 128),
    Column("retry", Text, nullable=True),  # a RetryTerms as js-json
    number("created_at_ms"),
    PrimaryKeyConstraint("project_id", "task_id", "task_revision"),
    UniqueConstraint("project_id", "task_id", "source_revision"),
)

runs = Table(
    "runs",
    metadata,
    text("id", 36, primary_key=True),
    text("project_id", 128),
    text("task_id", 128),
    text("task_revision", 128),
    optional("parent_run_id", 36),
    optional("retry_of_run_id", 36),
    optional("trigger_id", 128),
    text("trigger_type", 32),
    text("execution_origin", 32),
    text("execution_owner", 16),
    optional("triggered_by", 128),
    optional("request_id", 128),
    optional_number("scheduled_for_ms"),
    text("status", 32),
    number("version"),
    number("event_sequence"),
    number("priority"),
    optional("idempotency_key", 128),
    optional("required_worker_id", 128),
    optional("input_ref", 512),
    optional("output_ref", 512),
    number("created_at_ms"),
    optional_number("queued_at_ms"),
    optional_number("started_at_ms"),
    optional_number("finished_at_ms"),
    optional_number("cancel_requested_at_ms"),
    optional("cancel_reason", 16),
    optional("error_code", 128),
    optional("error_summary", 1024),
    CheckConstraint("(cancel_requested_at_ms IS NULL) = (cancel_reason IS NULL)", name="runs_cancel_intent_is_whole"),
    UniqueConstraint("project_id", "idempotency_key"),
    Index("runs_by_queue", "status", "priority", "queued_at_ms"),
    Index("runs_by_task", "project_id", "task_id", "created_at_ms"),
    Index("runs_by_age", "created_at_ms", "id"),
    Index("runs_by_trigger", "trigger_id", "status"),
)

run_attempts = Table(
    "run_attempts",
    metadata,
    text("id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    number("attempt"),
    text("status", 32),
    text("executor_type", 32),
    optional("worker_id", 128),
    optional("worker_session_id", 36),
    optional_number("worker_generation"),
    optional_number("lease_generation"),
    optional_number("lease_version"),
    optional("lease_token_digest", 64),
    optional("offer_id", 128),
    optional_number("lease_expires_at_ms"),
    optional("executor_handle", 512),
    optional_number("pid"),
    optional("log_artifact_id", 36),
    optional_number("deadline_at_ms"),
    number("callback_sequence"),
    optional("callback_token_digest", 64),
    number("created_at_ms"),
    optional_number("started_at_ms"),
    optional_number("finished_at_ms"),
    Column("exit_code", Integer, nullable=True),
    optional("error_code", 128),
    optional("error_summary", 1024),
    UniqueConstraint("run_id", "attempt"),
    CheckConstraint(
        "(worker_id IS NULL) = (worker_session_id IS NULL) AND (worker_id IS NULL) = (worker_generation IS NULL)"
        " AND (worker_id IS NULL) = (lease_generation IS NULL) AND (worker_id IS NULL) = (lease_version IS NULL)"
        " AND (worker_id IS NULL) = (lease_token_digest IS NULL) AND (worker_id IS NULL) = (offer_id IS NULL)",
        name="run_attempts_fence_is_whole",
    ),
)

run_retry_policies = Table(
    "run_retry_policies",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id"), primary_key=True),
    number("max_attempts"),
    Column("retry_on_lost", Boolean, nullable=False),
    text("safety", 16),
    number("backoff_base_ms"),
    number("backoff_max_ms"),
    optional_number("next_attempt_at_ms"),
    number("version"),
    number("created_at_ms"),
    number("updated_at_ms"),
    CheckConstraint("max_attempts BETWEEN 1 AND 16", name="run_retry_policies_are_bounded"),
    CheckConstraint("safety IN ('unknown', 'idempotent', 'deduplicated')", name="run_retry_policies_have_a_safety"),
    CheckConstraint(
        "backoff_base_ms BETWEEN 0 AND 86400000 AND backoff_max_ms BETWEEN backoff_base_ms AND 86400000",
        name="run_retry_policies_wait_within_a_day",
    ),
    # Admission's own rule once more: nothing may retry by itself what nobody declared safe.
    CheckConstraint(
        "NOT (retry_on_lost AND max_attempts > 1 AND safety = 'unknown')", name="run_retry_policies_retry_what_is_safe"
    ),
    Index("run_retry_policies_by_due", "next_attempt_at_ms", "run_id"),
)

run_events = Table(
    "run_events",
    metadata,
    text("id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    number("sequence"),
    text("type", 64),
    optional("dedupe_key", 256),
    text("actor_type", 32),
    optional("actor_id", 128),
    optional("attempt_id", 36),
    optional("step_run_id", 36),
    Column("payload", Text, nullable=False),
    number("created_at_ms"),
    UniqueConstraint("run_id", "sequence"),
    UniqueConstraint("run_id", "dedupe_key"),
    Index("run_events_by_age", "created_at_ms", "id"),
)

run_dispatch_leases = Table(
    "run_dispatch_leases",
    metadata,
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    text("status", 16),
    number("version"),
    number("lease_generation"),
    text("worker_id", 128),
    text("worker_session_id", 36),
    number("worker_generation"),
    text("lease_token_digest", 64),
    text("offer_id", 128),
    number("acquired_at_ms"),
    number("renewed_at_ms"),
    number("expires_at_ms"),
    optional_number("released_at_ms"),
    optional("release_reason", 32),
    optional_number("completed_at_ms"),
    number("updated_at_ms"),
    UniqueConstraint("offer_id"),
    CheckConstraint("expires_at_ms > renewed_at_ms", name="run_dispatch_leases_run_forward"),
    CheckConstraint(
        "(status = 'leased' AND released_at_ms IS NULL AND release_reason IS NULL AND completed_at_ms IS NULL)"
        " OR (status = 'released' AND released_at_ms IS NOT NULL AND release_reason IS NOT NULL AND completed_at_ms IS NULL)"
        " OR (status = 'completed' AND released_at_ms IS NULL AND release_reason IS NULL AND completed_at_ms IS NOT NULL)",
        name="run_dispatch_leases_have_one_shape",
    ),
    Index("run_dispatch_leases_by_expiry", "status", "expires_at_ms", "attempt_id"),
    Index("run_dispatch_leases_by_session", "worker_id", "worker_session_id", "status"),
)

artifacts = Table(
    "artifacts",
    metadata,
    text("attempt_id", 36),
    text("log_artifact_id", 36),
    text("project_id", 128),
    text("run_id", 36),
    number("byte_length"),
    text("sha256", 64),
    Column("truncated", Boolean, nullable=True),
    number("stored_at_ms"),
    PrimaryKeyConstraint("attempt_id", "log_artifact_id"),
    Index("artifacts_by_run", "run_id"),
    Index("artifacts_by_age", "stored_at_ms", "attempt_id"),
)

worker_execution_attestations = Table(
    "worker_execution_attestations",
    metadata,
    text("attestation_id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), nullable=False),
    number("sequence"),
    text("state", 16),
    text("worker_id", 128),
    text("worker_session_id", 36),
    number("worker_generation"),
    text("lease_token_digest", 64),
    number("lease_generation"),
    number("lease_version"),
    text("offer_id", 128),
    number("callback_sequence"),
    text("executor_handle", 512),
    number("journal_revision"),
    number("received_at_ms"),
    UniqueConstraint("attempt_id", "sequence"),
    CheckConstraint("state IN ('running', 'stopped')", name="worker_execution_attestations_have_a_state"),
)

cancellation_dispatches = Table(
    "cancellation_dispatches",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), nullable=False),
    text("status", 16),
    number("version"),
    number("dispatch_count"),
    optional_number("last_dispatched_at_ms"),
    number("created_at_ms"),
    number("updated_at_ms"),
    CheckConstraint("status IN ('pending', 'dispatched', 'blocked')", name="cancellation_dispatches_have_a_status"),
    CheckConstraint(
        "(dispatch_count = 0) = (last_dispatched_at_ms IS NULL)", name="cancellation_dispatches_know_their_last_one"
    ),
    Index("cancellation_dispatches_by_status", "status", "created_at_ms"),
)

recovery_controls = Table(
    "recovery_controls",
    metadata,
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    text("status", 16),
    text("reason", 64),
    number("version"),
    number("looks"),
    optional_number("next_look_at_ms"),
    number("updated_at_ms"),
    CheckConstraint("status IN ('retry', 'manual', 'resolved')", name="recovery_controls_have_a_status"),
    CheckConstraint("(status = 'retry') = (next_look_at_ms IS NOT NULL)", name="recovery_controls_look_again_or_do_not"),
    Index("recovery_controls_by_status", "status", "next_look_at_ms"),
)
