"""What the control plane keeps about its own work: the security audit, and where each scan goes on."""

from sqlalchemy import Column, Index, Table, Text

from .columns import metadata, number, optional, text

security_audit = Table(
    "security_audit",
    metadata,
    text("event_id", 36, primary_key=True),
    text("request_id", 128),
    text("operation_id", 64),
    optional("subject", 128),
    optional("authentication_id", 128),
    text("outcome", 64),
    text("reasons", 512),
    number("occurred_at_ms"),
    Index("security_audit_by_age", "occurred_at_ms", "event_id"),
    Index("security_audit_by_subject", "subject", "occurred_at_ms"),
)

scan_cursors = Table(
    "scan_cursors",
    metadata,
    text("scan", 64, primary_key=True),
    Column("cursor", Text, nullable=True),
    number("updated_at_ms"),
)
