"""Transactions of the control plane: immediate, short, and with one time each, read after the lock is held.

The embedded database is SQLite. One control plane process owns its file; a second one is refused, because a shared file is
not a cluster (control-plane.md §17, V120). All writes go through Transaction.write, where tests inject faults.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio
from sqlalchemy import Connection, Engine, Executable, Row, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from ..domain.errors import Conflict, Misconfigured, OwnershipHeld
from .clock import Clock, SystemClock
from .schema import metadata

BUSY_TIMEOUT_MS: Final = 1_000
BUSY_WAITS_S: Final = (0.001, 0.002, 0.004, 0.008)

T = TypeVar("T")
P = ParamSpec("P")


class Transaction:
    """One open transaction. `now_ms` is the control plane's time in milliseconds for everything decided in it."""

    def __init__(self, connection: Connection, now_ms: int, on_write: Callable[[Executable], None] | None = None) -> None:
        self.now_ms = now_ms
        self._connection = connection
        self._on_write = on_write

    def row(self, statement: Executable) -> Row[Any] | None:
        """The first row of `statement`, or None."""
        return self._connection.execute(statement).first()

    def rows(self, statement: Executable) -> list[Row[Any]]:
        """All rows of `statement`."""
        return list(self._connection.execute(statement))

    def write(self, statement: Executable) -> int:
        """Executes a writing `statement` and tells how many rows it changed."""
        if self._on_write is not None:
            self._on_write(statement)
        return self._connection.execute(statement).rowcount

    def write_one(self, statement: Executable) -> None:
        """Executes a compare-and-set. Raises Conflict unless exactly one row changed; the caller's transaction ends then."""
        if self.write(statement) != 1:
            raise Conflict("the stored row changed in the meantime")


class Database:
    """The database behind `url`, an SQLAlchemy URL. `on_write` sees every writing statement before it is executed.

    Raises Misconfigured for a dialect that is not supported, OwnershipHeld when another process uses the same SQLite file.
    """

    def __init__(self, url: str, clock: Clock | None = None, on_write: Callable[[Executable], None] | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.on_write = on_write
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
            raise Misconfigured("cannot use this database url: only sqlite files are supported")
        self._lock = _lock_file(Path(parsed.database))
        self._engine = _sqlite_engine(url)
        self._limiter = trio.CapacityLimiter(1)

    def create_tables(self) -> None:
        """Creates what is missing."""
        metadata.create_all(self._engine)

    def close(self) -> None:
        """Closes every connection and gives the file free."""
        self._engine.dispose()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that commits at the end and rolls back on any exception. Blocks; from trio use `run`."""
        with self._engine.connect() as connection, connection.begin():
            yield Transaction(connection, self.clock.now_ms(), self.on_write)

    async def run(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`transact` in a thread. A cancelled caller still waits for the transaction's end, so that nobody is told "no" about
        something that happened without knowing it."""
        return await trio.to_thread.run_sync(lambda: self.transact(function, *args, **kwargs), limiter=self._limiter)

    def transact(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(tx, *args)` in one transaction; a busy database is tried again a few times. Blocks; from trio use `run`."""
        for wait in BUSY_WAITS_S:
            try:
                return self._once(function, *args, **kwargs)
            except OperationalError as error:
                if not _is_busy(error):
                    raise
                time.sleep(wait)
        return self._once(function, *args, **kwargs)

    def _once(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.transaction() as tx:
            return function(tx, *args, **kwargs)


def _is_busy(error: OperationalError) -> bool:
    return "locked" in str(error.orig) or "busy" in str(error.orig)


def _lock_file(database: Path) -> int:
    """An open descriptor whose lock lasts as long as this process keeps it; the kernel drops it when the process dies."""
    descriptor = os.open(database.with_name(database.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OwnershipHeld("another control plane uses this database file; stop it first") from None
    # SQLite would create it with the process's umask; its side files inherit these permissions.
    os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return descriptor


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # The driver must not open transactions of its own: they would be deferred ones.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
