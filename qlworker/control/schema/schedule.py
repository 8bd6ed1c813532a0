"""When tasks run by themselves: one row per trigger, with the lease of whoever is firing it (control-plane.md §17)."""

from sqlalchemy import Boolean, CheckConstraint, Column, Index, PrimaryKeyConstraint, String, Table

from .columns import metadata, number, optional, optional_number, text

triggers = Table(
    "triggers",
    metadata,
    text("project_id", 128),
    text("task_id", 128),
    text("name", 64),
    Column("trigger_id", String(36), nullable=False, unique=True),
    number("revision"),
    text("cron", 128),
    text("timezone", 64),
    text("misfire", 16),
    text("if_running", 16),
    Column("enabled", Boolean, nullable=False),
    number("priority"),
    optional("source", 256),
    optional_number("next_fire_at_ms"),
    optional_number("last_fire_at_ms"),
    optional("last_run_id", 36),
    optional("last_outcome", 32),
    optional("lease_owner", 128),
    optional_number("lease_expires_at_ms"),
    number("version"),
    number("created_at_ms"),
    number("updated_at_ms"),
    PrimaryKeyConstraint("project_id", "task_id", "name"),
    CheckConstraint("misfire IN ('skip', 'run_once')", name="triggers_have_a_misfire_policy"),
    CheckConstraint("if_running IN ('skip', 'queue', 'allow', 'kill')", name="triggers_have_a_policy_for_running_ones"),
    CheckConstraint("(lease_owner IS NULL) = (lease_expires_at_ms IS NULL)", name="triggers_lease_is_whole"),
    Index("triggers_by_due", "enabled", "next_fire_at_ms"),
)
