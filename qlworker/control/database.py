"""Transactions of the control plane: short, with one time each that is read after the locks are held.

The embedded database is SQLite, one writing transaction at a time; replicas share a PostgreSQL, where the locks of `locks`
keep transactions on the same run or worker apart. All writes go through Transaction.write, where tests inject faults.
Source: control-plane.md §17.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio
from sqlalchemy import Connection, Executable, Row, Table, text
from sqlalchemy.exc import DBAPIError

from ..domain.errors import Conflict
from .clock import Clock, SystemClock
from .engine import is_worth_another_try, lock_file, parse_url, postgresql_engine, sqlite_engine
from .gathering import Gathering, Job, Result
from .locks import Kind, LockOrder, advisory_key
from .schema import metadata
from .statements import changed_to, insert_into, looked_up, select_by, update_by

WAITS_S: Final = (0.001, 0.002, 0.004, 0.008)
"""Between the tries of a transaction that the database gave up for another one's sake (control-plane.md §17)."""

DATABASE_TIME: Final = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)")

WAIT_FOR_LOCK: Final = text("SELECT pg_advisory_xact_lock(:key)")
TRY_LOCK: Final = text("SELECT pg_try_advisory_xact_lock(:key)")

T = TypeVar("T")
P = ParamSpec("P")


class Transaction:
    """One open transaction. Without `clock` its time is the database's own."""

    def __init__(
        self, connection: Connection, clock: Clock | None, on_write: Callable[[Executable], None] | None = None
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._on_write = on_write
        self._now_ms: int | None = None
        self._locks = LockOrder()
        self._is_shared = connection.dialect.name == "postgresql"

    @property
    def now_ms(self) -> int:
        """The time in milliseconds of everything decided in this transaction. Read once, and after the locks (§17)."""
        if self._now_ms is None:
            self._now_ms = self._clock.now_ms() if self._clock else int(self._connection.execute(DATABASE_TIME).scalar_one())
        return self._now_ms

    def lock(self, kind: Kind, key: str) -> None:
        """Waits until no other transaction has this lock; it is kept until the end. To be taken before anything it protects
        is read. Raises RuntimeError when the order of `locks` is not kept."""
        if self._locks.is_held(kind, key):
            return
        self._locks.require(kind, key)
        if self._is_shared:
            self._connection.execute(WAIT_FOR_LOCK, {"key": advisory_key(kind, key)})
        self._locks.note(kind, key)

    def try_lock(self, kind: Kind, key: str) -> bool:
        """Takes the lock if it is free. Does not wait, so any order will do."""
        must_ask = self._is_shared and not self._locks.is_held(kind, key)
        if must_ask and not self._connection.execute(TRY_LOCK, {"key": advisory_key(kind, key)}).scalar_one():
            return False
        self._locks.note(kind, key)
        return True

    def find(self, table: Table, **where: Any) -> Row[Any] | None:
        """The first row of `table` whose columns have these values, or None."""
        return self.row(select_by(table, tuple(where)), looked_up(where))

    def row(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Row[Any] | None:
        """The first row of `statement`, or None."""
        return self._connection.execute(statement, parameters).first()

    def rows(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> list[Row[Any]]:
        """All rows of `statement`."""
        return list(self._connection.execute(statement, parameters))

    def add(self, table: Table, values: Mapping[str, Any]) -> None:
        """A new row."""
        self.write(insert_into(table), values)

    def change(self, table: Table, where: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """A compare-and-set: new `values` for the one row whose columns are still as `where` says. Raises as `write_one`."""
        self.write_one(update_by(table, tuple(where), tuple(values)), looked_up(where) | changed_to(values))

    def write(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> int:
        """Executes a writing `statement` and tells how many rows it changed."""
        if self._on_write is not None:
            self._on_write(statement)
        return self._connection.execute(statement, parameters).rowcount

    def write_one(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> None:
        """Executes a compare-and-set. Raises Conflict unless exactly one row changed; the caller's transaction ends then."""
        if self.write(statement, parameters) != 1:
            raise Conflict("the stored row changed in the meantime")


class Database:
    """The database behind `url`, an SQLAlchemy URL. `on_write` sees every writing statement before it is executed.

    Without `clock`, SQLite uses this host's time and PostgreSQL its own (D6). `connections` is for PostgreSQL, 1 to 16. Raises
    Misconfigured for a database that is not supported, OwnershipHeld when another process uses the same SQLite file.
    """

    def __init__(
        self,
        url: str,
        clock: Clock | None = None,
        on_write: Callable[[Executable], None] | None = None,
        connections: int = 4,
    ) -> None:
        self.on_write = on_write
        parsed = parse_url(url)
        self.is_shared = parsed.get_backend_name() == "postgresql"
        self.clock: Clock | None = clock if self.is_shared else clock or SystemClock()
        self._lock = None if self.is_shared else lock_file(Path(parsed.database or ""))
        self.engine = postgresql_engine(parsed, connections) if self.is_shared else sqlite_engine(parsed)
        self._limiter = trio.CapacityLimiter(connections)
        self._gathering = Gathering(self._together)

    def create_tables(self) -> None:
        """Creates what is missing, without migrations."""
        metadata.create_all(self.engine)

    def upgrade(self) -> None:
        """Brings the tables to this program's version. Blocks. Raises Refused for tables it does not know."""
        from .migrations import upgrade

        upgrade(self.engine)

    def close(self) -> None:
        """Closes every connection and gives the file free."""
        self.engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that commits at the end and rolls back on any exception. Blocks; from trio use `run`."""
        with self.engine.connect() as connection, connection.begin():
            yield Transaction(connection, self.clock, self.on_write)

    async def run(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`transact` in a thread. A cancelled caller still waits for the transaction's end, so that nobody is told "no" about
        something that happened without knowing it."""
        if self.is_shared:
            return await trio.to_thread.run_sync(lambda: self.transact(function, *args, **kwargs), limiter=self._limiter)
        value: T = await self._gathering.run(lambda tx: function(tx, *args, **kwargs))
        return value

    def transact(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(tx, *args)` in one transaction; one that was given up for another's sake is tried again a few times.
        Blocks; from trio use `run`."""
        for wait in WAITS_S:
            try:
                return self._once(function, *args, **kwargs)
            except DBAPIError as error:
                if not is_worth_another_try(error):
                    raise
                time.sleep(wait)
        return self._once(function, *args, **kwargs)

    def _once(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.transaction() as tx:
            return function(tx, *args, **kwargs)

    def _together(self, jobs: Sequence[Job]) -> list[Result]:
        if len(jobs) == 1:
            return [Result(self.transact(jobs[0]))]
        with self.engine.connect() as connection, connection.begin():
            return [self._saved(connection, job) for job in jobs]

    def _saved(self, connection: Connection, job: Job) -> Result:
        try:
            with connection.begin_nested():
                return Result(job(Transaction(connection, self.clock, self.on_write)))
        except Exception as error:
            return Result(error=error)
