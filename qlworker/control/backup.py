"""A copy of the SQLite database while it is served, and its way back in.

Nobody knows what became, since the copy, of a run that was not over in it: it may have been carried out. So a restore ends each
of them before anybody can be offered it, and every session, so that no worker goes on under a lease of the time after the copy.
Everything here blocks. Source: R519, control-plane.md §17.
"""

import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy import delete, func, insert, select, update

from ..domain.errors import Misconfigured, QlworkerError, Refused
from ..domain.lease import StopReason
from .aggregate import TERMINAL, append_event, latest_attempt, load_run
from .database import Database, Transaction
from .engine import lock_file, parse_url
from .private_files import sync_directory
from .schema import runs, scan_cursors, security_audit, triggers, worker_sessions
from .services.authority import LEASED, Claim, load_lease
from .services.convergence import converge
from .services.expiry import release
from .services.intent import intend_stop
from .services.session import OFFLINE, RESTORED

_SIDE_FILES: Final = ("-wal", "-shm")


class Copied(msgspec.Struct, frozen=True):
    """A finished copy: its file, its length in bytes, and how many runs are in it."""

    path: Path
    size: int
    runs: int


class Restored(msgspec.Struct, frozen=True):
    """A database that is in its place again. `made_at_ms`: the last thing that it knows of. `former`: what was there before."""

    path: Path
    former: Path | None
    made_at_ms: int | None
    ended: int


def copy_database(url: str, out: Path) -> Copied:
    """Writes a consistent copy of the database at `url` to the new file `out`, mode 0600, durably.

    Raises Misconfigured for a PostgreSQL, a database that is not there or a file that is, Refused when what was copied is
    damaged.
    """
    path = _file_of(url)
    if not path.is_file():
        raise Misconfigured(f"cannot copy {path}: there is no such database; start qlcontrol serve once")
    part = _private_part(out)
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
            # In one step, which is one snapshot: in steps it would begin again with every write of the server.
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            _require_whole(copy, part)
            count = int(copy.execute("SELECT count(*) FROM runs").fetchone()[0])
        _sync(part)
        _publish(part, out)
    except sqlite3.Error as error:
        raise Refused(f"cannot copy {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return Copied(out, out.stat().st_size, count)


def restore_database(url: str, copy: Path) -> Restored:
    """Puts a copy of `copy_database` in the place of the database at `url`, with every run in it over and every session ended.

    The database that was there is kept beside it. Raises OwnershipHeld while a control plane serves it, Misconfigured for a
    PostgreSQL or a copy that is not there, Refused for a file that is no whole database of this program. Then nothing changed.
    """
    path = _file_of(url)
    if not copy.is_file():
        raise Misconfigured(f"cannot restore {copy}: there is no such file")
    existed = path.exists()
    descriptor = lock_file(path)
    try:
        part = _private_part(path)
        try:
            made_at_ms, ended = _prepare(copy, part)
            former = _keep_aside(path) if existed else None
            part.replace(path)
        finally:
            for name in (part.name, f"{part.name}.lock", *(f"{part.name}{side}" for side in _SIDE_FILES)):
                part.with_name(name).unlink(missing_ok=True)
        sync_directory(path.parent)
    finally:
        if not existed and path.stat().st_size == 0:
            path.unlink()
        os.close(descriptor)
    return Restored(path, former, made_at_ms, ended)


def _prepare(copy: Path, part: Path) -> tuple[int | None, int]:
    """Makes `part` what will be restored."""
    try:
        with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
            _require_whole(target, copy)
    except sqlite3.Error as error:
        raise Refused(f"cannot restore {copy}: {error}") from error
    database = Database(f"sqlite:///{part}")
    try:
        database.upgrade()
        with database.transaction() as tx:
            newest = tx.row(select(func.max(security_audit.c.occurred_at_ms)))
            open_runs = [row.id for row in tx.rows(select(runs.c.id).where(runs.c.status.not_in(TERMINAL)).order_by(runs.c.id))]
        for run_id in open_runs:
            database.transact(_end_run, run_id)
        database.transact(_end_authority)
    except QlworkerError as error:
        raise Refused(f"cannot restore {copy}: {error}") from error
    finally:
        database.close()
    _sync(part)
    return None if newest is None else newest[0], len(open_runs)


def _end_run(tx: Transaction, run_id: str) -> None:
    """Takes its lease away and ends it as cancelled; an attempt that had begun is lost, which is what is known of it."""
    tx.lock("run", run_id)
    run, attempt = load_run(tx, run_id), latest_attempt(tx, run_id)
    assert run is not None, "it was found a moment ago"
    run = append_event(
        tx, run, "run.restored_from_copy", actor_type="user", actor_id="operator", dedupe_key=f"restore:{run.id}:{run.version}"
    )
    if run.cancel_requested_at_ms is None:
        key = f"restore:{run.id}:{run.version}:stop"
        run = intend_stop(tx, run, StopReason.USER, actor_type="user", actor_id="operator", dedupe_key=key)
    lease = None if attempt is None else load_lease(tx, attempt.id)
    if attempt is not None and lease is not None and lease.status == LEASED:
        run = release(tx, Claim(run, attempt, lease)).run
    converge(tx, run, "lost")


def _end_authority(tx: Transaction) -> None:
    """No session goes on: each runs out in its worker, which then registers anew. No trigger makes up for a time of which
    nobody knows what it fired."""
    tx.write(update(worker_sessions).values(status=OFFLINE, lease_expires_at_ms=tx.now_ms, updated_at_ms=tx.now_ms))
    tx.write(delete(scan_cursors).where(scan_cursors.c.scan == RESTORED))
    tx.write(insert(scan_cursors).values(scan=RESTORED, cursor=None, updated_at_ms=tx.now_ms))
    tx.write(update(triggers).values(next_fire_at_ms=None, lease_owner=None, lease_expires_at_ms=None))


def _keep_aside(path: Path) -> Path:
    """A second name for the present database, whole in its one file unless it is damaged; then its side files go along."""
    former = path.with_name(f"{path.name}.before-{time.time_ns() // 1_000_000}")
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as present:
        present.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    former.hardlink_to(path)
    for side in _SIDE_FILES:
        # Left here they would be taken for those of the restored database.
        with suppress(FileNotFoundError):
            path.with_name(path.name + side).rename(former.with_name(former.name + side))
    return former


def _file_of(url: str) -> Path:
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        raise Misconfigured("this command is for SQLite: use the tools of PostgreSQL, pg_dump and pg_restore")
    return Path(parsed.database or "")


def _private_part(path: Path) -> Path:
    """A new empty private file beside `path`, to be renamed to it."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise Misconfigured(f"cannot write {part}: {error.strerror}") from error
    return part


def _require_whole(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise Refused(f"cannot use {path}: the database in it is damaged: {found}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(part: Path, out: Path) -> None:
    """By a hard link, which never overwrites."""
    try:
        out.hardlink_to(part)
    except FileExistsError:
        raise Misconfigured(f"cannot write {out}: it exists already; name a new file") from None
    sync_directory(out.parent)
