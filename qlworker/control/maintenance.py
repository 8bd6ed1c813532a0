"""What the control plane does by itself while it serves: one function for one page of each kind of work, and their rhythms.

Every replica does all of it; each step looks again under its run's lock, so that two that meet do nothing twice. Source:
control-plane.md §9.2, §10.6, §11.5, §16, §22 item 4; R321 to R323, R366 to R370.
"""

import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
import trio
from sqlalchemy import delete, insert, select
from sqlalchemy.exc import SQLAlchemyError

from ..domain.errors import QlworkerError
from . import audit, deliveries
from .artifact_retention import sweep_logs
from .artifact_store import ArtifactStore
from .cadence import keep_time
from .config import Settings
from .counting import Counting
from .database import Database, Transaction
from .logs import Log
from .schedule.firing import Firing, fire, held_runs, release, take_due
from .schema import scan_cursors
from .services.convergence_scan import StopCursor, scan_stops
from .services.expiry_scan import ExpiryCursor, scan_expired
from .services.lost_retry_scan import scan_lost
from .services.recovery import RecoveryTerms
from .services.recovery_scan import scan_recovery

RETENTION_INTERVAL_S: Final = 60
DELIVERY_INTERVAL_S: Final = 5
AUDIT_PAGE: Final = 1000
EXPIRY: Final = "lease_expiry"

Rhythm = tuple[str, float, Callable[[], Awaitable[object]]]
"""Its name, the pause between two ticks in seconds, and the tick."""

T = TypeVar("T", bound=msgspec.Struct)


class Maintenance:
    """The ticks. Each is one page (cancellation: a few), reads where it goes on, and says what it could not do."""

    def __init__(self, database: Database, store: ArtifactStore, settings: Settings, log: Log) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._log = log
        self._name = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(8)}"
        self._stops_after: StopCursor | None = None

    def rhythms(self) -> list[Rhythm]:
        """Name, pause in seconds and tick of each kind of work."""
        terms = self._settings.maintenance
        rhythms: list[Rhythm] = [
            ("lease_expiry", terms.expiry_interval_s, self.expire),
            ("lost_retry", terms.lost_retry.interval_s, self.retry),
            ("cancellation", terms.cancellation_interval_s, self.converge),
            ("schedule", self._settings.schedule.interval_s, self.fire),
            ("artifact_retention", RETENTION_INTERVAL_S, self.sweep_logs),
            ("audit_retention", RETENTION_INTERVAL_S, self.sweep_audit),
            ("credential_delivery", DELIVERY_INTERVAL_S, self.end_replaced_credentials),
        ]
        if self._settings.runs.on_lease_expiry == "evidence":
            rhythms.append(("recovery", self._settings.recovery.interval_s, self.recover))
        return rhythms

    async def expire(self) -> None:
        """Ends the leases of one page that ran out. The place is kept in the database, so that a restart goes on there."""
        after = await self._database.run(load_cursor, EXPIRY, ExpiryCursor)
        scan = await scan_expired(
            self._database, after, self._settings.runs.on_lease_expiry, self._settings.maintenance.expiry_page
        )
        if scan.cursor != after:
            await self._database.run(keep_cursor, EXPIRY, scan.cursor)
        if scan.results:
            self._log.info("leases_expired", results=[result.value for result in scan.results])
        if scan.failed is not None:
            self._log.error("lease_expiry_stuck", run=scan.failed, reason=scan.error)

    async def retry(self) -> None:
        """Takes the lost runs of one page a step further."""
        scan = await scan_lost(self._database, self._settings.maintenance.lost_retry.page)
        for run_id, step in scan.steps.items():
            self._log.info("lost_run_followed", run=run_id, step=step.value)
        for run_id, reason in scan.failures.items():
            self._log.error("lost_run_stuck", run=run_id, reason=reason)

    async def converge(self) -> None:
        """Ends what was cancelled and cannot be running; the runs that have to wait get their turn in rotation."""
        for _ in range(self._settings.maintenance.cancellation_pages):
            scan = await scan_stops(
                self._database,
                self._stops_after,
                self._settings.runs.on_lease_expiry,
                self._settings.maintenance.cancellation_page,
            )
            for run_id, reason in scan.failures.items():
                self._log.error("cancellation_stuck", run=run_id, reason=reason)
            self._stops_after = scan.cursor
            if scan.cursor is None:
                return

    async def recover(self) -> None:
        """Looks for evidence about one page of started runs that nobody holds."""
        recovery = self._settings.recovery
        terms = RecoveryTerms(freshness_ms=round(recovery.freshness_s * 1000), retry_ms=round(recovery.retry_s * 1000))
        scan = await scan_recovery(self._database, terms, recovery.page)
        for attempt_id, verdict in scan.verdicts.items():
            if verdict.status == "manual":
                self._log.error("recovery_needs_operator", attempt=attempt_id, reason=verdict.reason)
            elif verdict.is_lost:
                self._log.info("recovery_lost", attempt=attempt_id, reason=verdict.reason)
        for attempt_id, reason in scan.failures.items():
            self._log.error("recovery_stuck", attempt=attempt_id, reason=reason)

    async def fire(self) -> None:
        """Fires one page of triggers that are due, and queues runs whose forerunner is over."""
        terms = self._settings.schedule
        firing = Firing(
            owner=self._name, page=terms.page, lease_ms=round(terms.lease_s * 1000), grace_ms=round(terms.grace_s * 1000)
        )
        for taken in await self._database.run(take_due, firing):
            try:
                outcome = await self._database.run(fire, taken, firing)
            except (QlworkerError, SQLAlchemyError) as error:
                # Its lease runs out and it is tried again; the others must not wait for it.
                self._log.error("trigger_stuck", trigger=taken.trigger_id, error=type(error).__name__)
                continue
            self._log.info("trigger_fired", trigger=taken.trigger_id, outcome=outcome.value)
        for run_id in await self._database.run(held_runs, terms.page):
            if await self._database.run(release, run_id):
                self._log.info("held_run_queued", run=run_id)

    async def sweep_logs(self) -> None:
        """Removes one page of logs whose time is over."""
        removed = await sweep_logs(self._database, self._store, round(self._settings.artifacts.retention_s * 1000))
        if removed:
            self._log.info("logs_removed", count=removed)

    async def sweep_audit(self) -> None:
        """Removes the rows of the security audit whose time is over, a page at a time."""
        retention_ms = round(self._settings.maintenance.audit_retention_s * 1000)
        removed = 0
        while page := await self._database.run(_sweep_audit, retention_ms):
            removed += page
        if removed:
            self._log.info("audit_removed", count=removed)

    async def end_replaced_credentials(self) -> None:
        """Ends the credentials of workers that were seen with a newer one."""
        for credential_id in await self._database.run(deliveries.observed):
            ended = await self._database.run(deliveries.revoke_previous, credential_id)
            self._log.info("previous_credentials_ended", credential=credential_id, count=ended)


async def maintain(
    database: Database,
    store: ArtifactStore,
    settings: Settings,
    stopping: trio.Event,
    log: Log,
    counting: Counting,
    further: Sequence[Rhythm] = (),
) -> None:
    """All rhythms, and `further` ones of whoever calls, until `stopping` is set."""
    async with trio.open_nursery() as nursery:
        for name, pause_s, tick in [*Maintenance(database, store, settings, log).rhythms(), *further]:
            nursery.start_soon(partial(keep_time, name, pause_s, tick, stopping=stopping, log=log, counting=counting))


def load_cursor(tx: Transaction, scan: str, kind: type[T]) -> T | None:
    """Where `scan` goes on, or None for the beginning."""
    row = tx.row(select(scan_cursors.c.cursor).where(scan_cursors.c.scan == scan))
    return None if row is None or row.cursor is None else msgspec.json.decode(row.cursor, type=kind)


def keep_cursor(tx: Transaction, scan: str, cursor: msgspec.Struct | None) -> None:
    """Remembers where `scan` goes on."""
    tx.lock("scan", scan)
    tx.write(delete(scan_cursors).where(scan_cursors.c.scan == scan))
    if cursor is not None:
        text = msgspec.json.encode(cursor).decode()
        tx.write(insert(scan_cursors).values(scan=scan, cursor=text, updated_at_ms=tx.now_ms))


def _sweep_audit(tx: Transaction, retention_ms: int) -> int:
    return audit.sweep(tx, tx.now_ms - retention_ms, AUDIT_PAGE)
