"""The two databases: SQLite in one file that one process owns, and PostgreSQL 15 or newer that replicas share.

What differs between them is here and in `locks`: how a connection is set up, and which failures are worth another try.
Source: control-plane.md §17.
"""

import fcntl
import os
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from ..domain.errors import Misconfigured, OwnershipHeld

BUSY_TIMEOUT_MS: Final = 1_000
STATEMENT_TIMEOUT_MS: Final = 5_000
LOCK_TIMEOUT_MS: Final = 1_000
IDLE_TIMEOUT_MS: Final = 10_000
CONNECT_TIMEOUT_S: Final = 5
POSTGRESQL_MINIMUM: Final = 150_000

_TRY_AGAIN: Final = frozenset({"40001", "40P01", "55P03"})
"""PostgreSQL's serialization failure, deadlock and lock timeout: the transaction was rolled back and did nothing."""


def parse_url(url: str) -> URL:
    """The URL of a supported database, with the driver that is used. The error never shows the URL: it may hold a password.

    Raises Misconfigured.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise Misconfigured("cannot use storage.database: it is not a database URL") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise Misconfigured("cannot use storage.database: it must be sqlite:///FILE or postgresql://USER@HOST/NAME")


def lock_file(database: Path) -> int:
    """An open descriptor whose lock lasts as long as this process keeps it; the kernel drops it when the process dies.

    Raises OwnershipHeld: a shared file is not a cluster (V120).
    """
    descriptor = os.open(database.with_name(database.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OwnershipHeld("another control plane uses this database file; stop it first") from None
    # SQLite would create it with the process's umask; its side files inherit these permissions.
    os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return descriptor


def sqlite_engine(url: URL) -> Engine:
    """Immediate transactions in write-ahead mode, durable at each commit."""
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


def postgresql_engine(url: URL, connections: int) -> Engine:
    """At most `connections` connections with the contract's time limits. Raises Misconfigured without the driver."""
    options = (
        f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c lock_timeout={LOCK_TIMEOUT_MS}"
        f" -c idle_in_transaction_session_timeout={IDLE_TIMEOUT_MS} -c default_transaction_isolation=read\\ committed"
    )
    try:
        return create_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=CONNECT_TIMEOUT_S,
            pool_pre_ping=True,
            connect_args={"options": options, "connect_timeout": CONNECT_TIMEOUT_S},
        )
    except ModuleNotFoundError:
        raise Misconfigured("cannot use PostgreSQL: its driver is missing; install qlworker[control,postgresql]") from None


def is_worth_another_try(error: DBAPIError) -> bool:
    """Whether the database rolled the transaction back for the sake of another one."""
    if getattr(error.orig, "sqlstate", None) in _TRY_AGAIN:
        return True
    return isinstance(error, OperationalError) and ("locked" in str(error.orig) or "busy" in str(error.orig))
