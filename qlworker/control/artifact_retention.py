"""Forgetting old logs: a page per sweep, and only those of runs that are over (control-plane.md §14).

The content goes first and its row afterwards, so a sweep that is interrupted is carried on by the next one.
"""

from typing import Final

import msgspec
import trio
from sqlalchemy import delete, select

from .aggregate import TERMINAL
from .artifact_store import ArtifactKey, ArtifactStore
from .database import Database, Transaction
from .schema import artifacts, runs

DELETIONS: Final = 16


class OldLog(msgspec.Struct, frozen=True):
    """A log whose time is over."""

    key: ArtifactKey
    sha256: str


def old_logs(tx: Transaction, keep_ms: int, limit: int = DELETIONS) -> list[OldLog]:
    """Up to `limit` logs of runs that are over, stored longer than `keep_ms` milliseconds ago, oldest first."""
    statement = (
        select(artifacts)
        .join(runs, runs.c.id == artifacts.c.run_id)
        .where(artifacts.c.stored_at_ms <= tx.now_ms - keep_ms, runs.c.status.in_(TERMINAL))
        .order_by(artifacts.c.stored_at_ms, artifacts.c.attempt_id)
        .limit(limit)
    )
    return [
        OldLog(ArtifactKey(row.project_id, row.run_id, row.attempt_id, row.log_artifact_id), row.sha256)
        for row in tx.rows(statement)
    ]


def forget(tx: Transaction, log: OldLog) -> None:
    """Removes the row of a log whose content is gone."""
    table = artifacts
    tx.write(
        delete(table).where(
            table.c.attempt_id == log.key.attempt_id,
            table.c.log_artifact_id == log.key.log_artifact_id,
            table.c.sha256 == log.sha256,
        )
    )


async def sweep_logs(database: Database, store: ArtifactStore, keep_ms: int) -> int:
    """Removes one page of old logs and tells how many. Raises OSError or Transient when the store cannot be used."""
    page = await database.run(old_logs, keep_ms)
    for log in page:
        await trio.to_thread.run_sync(store.remove, log.key, log.sha256)
        await database.run(forget, log)
    return len(page)
