"""Who may work and who does: sessions, credentials and how they reach a worker, certificates, invitations
(control-plane.md §1.5, §1.9, §15)."""

from sqlalchemy import CheckConstraint, Column, Index, PrimaryKeyConstraint, String, Table, Text

from .columns import metadata, number, optional, optional_number, text

worker_sessions = Table(
    "worker_sessions",
    metadata,
    text("worker_id", 128, primary_key=True),
    text("session_id", 36),
    number("generation"),
    text("status", 16),
    number("version"),
    Column("capabilities_json", Text, nullable=False),
    text("capabilities_hash", 64),
    number("max_concurrent_runs"),
    number("available_slots"),
    number("registered_at_ms"),
    number("last_heartbeat_at_ms"),
    number("lease_expires_at_ms"),
    number("updated_at_ms"),
)

worker_credentials = Table(
    "worker_credentials",
    metadata,
    text("credential_id", 64),
    number("version"),
    text("state", 16),
    text("worker_id", 128),
    text("secret_digest", 64),
    number("created_at_ms"),
    number("not_before_at_ms"),
    number("expires_at_ms"),
    Column("mutation_id", String(36), nullable=True, unique=True),
    PrimaryKeyConstraint("credential_id", "version"),
    Index("worker_credentials_by_worker", "worker_id"),
)

credential_deliveries = Table(
    "credential_deliveries",
    metadata,
    text("credential_id", 64, primary_key=True),
    text("worker_id", 128),
    number("version"),
    text("state", 32),
    number("overlap_ms"),
    number("committed_at_ms"),
    optional_number("published_at_ms"),
    optional_number("observed_at_ms"),
    optional("observed_session_id", 36),
    optional_number("revoked_at_ms"),
    CheckConstraint(
        "(state = 'credential_committed' AND version = 1) OR (state = 'published' AND version = 2)"
        " OR (state = 'observed' AND version = 3) OR (state = 'previous_revoked' AND version = 4)",
        name="credential_deliveries_count_their_states",
    ),
    Index("credential_deliveries_by_worker", "worker_id", "state"),
)

enrolment_tokens = Table(
    "enrolment_tokens",
    metadata,
    text("token_id", 36, primary_key=True),
    text("worker_id", 128),
    text("secret_digest", 64),
    number("credential_lifetime_ms"),
    number("created_at_ms"),
    number("expires_at_ms"),
    optional_number("spent_at_ms"),
    optional("spent_request_digest", 64),
    optional_number("revoked_at_ms"),
    Index("enrolment_tokens_by_worker", "worker_id"),
)

worker_certificates = Table(
    "worker_certificates",
    metadata,
    text("serial", 40, primary_key=True),
    text("worker_id", 128),
    number("not_after_ms"),
    number("created_at_ms"),
    optional_number("revoked_at_ms"),
    Index("worker_certificates_by_worker", "worker_id", "not_after_ms"),
)
