"""The tables of the control plane (control-plane.md §1, §22). Portable types only, so that they fit SQLite and PostgreSQL.

Times are UTC milliseconds, statuses lower-case text, documents canonical JSON. A raw token or a secret is in no column. Tables
that only expiry, retry and recovery need come with them: `create_tables` adds what is missing.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()


def _text(name: str, length: int, **options: Any) -> "Column[str]":
    return Column(name, String(length), nullable=False, **options)


def _optional(name: str, length: int) -> "Column[str]":
    return Column(name, String(length), nullable=True)


def _number(name: str) -> "Column[int]":
    return Column(name, BigInteger, nullable=False)


def _optional_number(name: str) -> "Column[int]":
    return Column(name, BigInteger, nullable=True)


projects = Table("projects", metadata, _text("id", 128, primary_key=True))

task_execution_revisions = Table(
    "task_execution_revisions",
    metadata,
    Column("project_id", String(128), ForeignKey("projects.id"), nullable=False),
    _text("task_id", 128),
    _text("task_revision", 128),
    _number("source_revision"),
    _text("source_content_digest", 64),
    Column("content", Text, nullable=False),  # the whole ExecutionRevision as js-json
    _text("content_digest", 64),
    _number("created_at_ms"),
    PrimaryKeyConstraint("project_id", "task_id", "task_revision"),
    UniqueConstraint("project_id", "task_id", "source_revision"),
)

runs = Table(
    "runs",
    metadata,
    _text("id", 36, primary_key=True),
    _text("project_id", 128),
    _text("task_id", 128),
    _text("task_revision", 128),
    _optional("parent_run_id", 36),
    _optional("retry_of_run_id", 36),
    _optional("trigger_id", 128),
    _text("trigger_type", 32),
    _text("execution_origin", 32),
    _text("execution_owner", 16),
    _optional("triggered_by", 128),
    _optional("request_id", 128),
    _optional_number("scheduled_for_ms"),
    _text("status", 32),
    _number("version"),
    _number("event_sequence"),
    _number("priority"),
    _optional("idempotency_key", 128),
    _optional("input_ref", 512),
    _optional("output_ref", 512),
    _number("created_at_ms"),
    _optional_number("queued_at_ms"),
    _optional_number("started_at_ms"),
    _optional_number("finished_at_ms"),
    _optional_number("cancel_requested_at_ms"),
    _optional("cancel_reason", 16),
    _optional("error_code", 128),
    _optional("error_summary", 1024),
    CheckConstraint("(cancel_requested_at_ms IS NULL) = (cancel_reason IS NULL)", name="runs_cancel_intent_is_whole"),
    UniqueConstraint("project_id", "idempotency_key"),
    Index("runs_by_queue", "status", "priority", "queued_at_ms"),
)

run_attempts = Table(
    "run_attempts",
    metadata,
    _text("id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    _number("attempt"),
    _text("status", 32),
    _text("executor_type", 32),
    _optional("worker_id", 128),
    _optional("worker_session_id", 36),
    _optional_number("worker_generation"),
    _optional_number("lease_generation"),
    _optional_number("lease_version"),
    _optional("lease_token_digest", 64),
    _optional("offer_id", 128),
    _optional_number("lease_expires_at_ms"),
    _optional("executor_handle", 512),
    _optional_number("pid"),
    _optional("log_artifact_id", 36),
    _optional_number("deadline_at_ms"),
    _number("callback_sequence"),
    _optional("callback_token_digest", 64),
    _number("created_at_ms"),
    _optional_number("started_at_ms"),
    _optional_number("finished_at_ms"),
    Column("exit_code", Integer, nullable=True),
    _optional("error_code", 128),
    _optional("error_summary", 1024),
    UniqueConstraint("run_id", "attempt"),
    CheckConstraint(
        "(worker_id IS NULL) = (worker_session_id IS NULL) AND (worker_id IS NULL) = (worker_generation IS NULL)"
        " AND (worker_id IS NULL) = (lease_generation IS NULL) AND (worker_id IS NULL) = (lease_version IS NULL)"
        " AND (worker_id IS NULL) = (lease_token_digest IS NULL) AND (worker_id IS NULL) = (offer_id IS NULL)",
        name="run_attempts_fence_is_whole",
    ),
)

run_events = Table(
    "run_events",
    metadata,
    _text("id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    _number("sequence"),
    _text("type", 64),
    _optional("dedupe_key", 256),
    _text("actor_type", 32),
    _optional("actor_id", 128),
    _optional("attempt_id", 36),
    _optional("step_run_id", 36),
    Column("payload", Text, nullable=False),
    _number("created_at_ms"),
    UniqueConstraint("run_id", "sequence"),
    UniqueConstraint("run_id", "dedupe_key"),
)

worker_sessions = Table(
    "worker_sessions",
    metadata,
    _text("worker_id", 128, primary_key=True),
    _text("session_id", 36),
    _number("generation"),
    _text("status", 16),
    _number("version"),
    Column("capabilities_json", Text, nullable=False),
    _text("capabilities_hash", 64),
    _number("max_concurrent_runs"),
    _number("available_slots"),
    _number("registered_at_ms"),
    _number("last_heartbeat_at_ms"),
    _number("lease_expires_at_ms"),
    _number("updated_at_ms"),
)

run_dispatch_leases = Table(
    "run_dispatch_leases",
    metadata,
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    _text("status", 16),
    _number("version"),
    _number("lease_generation"),
    _text("worker_id", 128),
    _text("worker_session_id", 36),
    _number("worker_generation"),
    _text("lease_token_digest", 64),
    _text("offer_id", 128),
    _number("acquired_at_ms"),
    _number("renewed_at_ms"),
    _number("expires_at_ms"),
    _optional_number("released_at_ms"),
    _optional("release_reason", 32),
    _optional_number("completed_at_ms"),
    _number("updated_at_ms"),
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

worker_credentials = Table(
    "worker_credentials",
    metadata,
    _text("credential_id", 64),
    _number("version"),
    _text("state", 16),
    _text("worker_id", 128),
    _text("secret_digest", 64),
    _number("created_at_ms"),
    _number("not_before_at_ms"),
    _number("expires_at_ms"),
    Column("mutation_id", String(36), nullable=True, unique=True),
    PrimaryKeyConstraint("credential_id", "version"),
    Index("worker_credentials_by_worker", "worker_id"),
)

security_audit = Table(
    "security_audit",
    metadata,
    _text("event_id", 36, primary_key=True),
    _text("request_id", 128),
    _text("operation_id", 64),
    _optional("subject", 128),
    _optional("authentication_id", 128),
    _text("outcome", 64),
    _text("reasons", 512),
    _number("occurred_at_ms"),
)

artifacts = Table(
    "artifacts",
    metadata,
    _text("attempt_id", 36),
    _text("log_artifact_id", 36),
    _text("project_id", 128),
    _text("run_id", 36),
    _number("byte_length"),
    _text("sha256", 64),
    Column("truncated", Boolean, nullable=True),
    _number("stored_at_ms"),
    PrimaryKeyConstraint("attempt_id", "log_artifact_id"),
)

worker_execution_attestations = Table(
    "worker_execution_attestations",
    metadata,
    _text("attestation_id", 36, primary_key=True),
    Column("run_id", String(36), ForeignKey("runs.id"), nullable=False),
    Column("attempt_id", String(36), ForeignKey("run_attempts.id"), nullable=False),
    _number("sequence"),
    _text("state", 16),
    _text("worker_id", 128),
    _text("worker_session_id", 36),
    _number("worker_generation"),
    _text("lease_token_digest", 64),
    _number("lease_generation"),
    _number("lease_version"),
    _text("offer_id", 128),
    _number("callback_sequence"),
    _text("executor_handle", 512),
    _number("journal_revision"),
    _number("received_at_ms"),
    UniqueConstraint("attempt_id", "sequence"),
    CheckConstraint("state IN ('running', 'stopped')", name="worker_execution_attestations_have_a_state"),
)
