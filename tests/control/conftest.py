"""The control plane under test, on both databases, checked for its invariants after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qlworker.control.database import Database
from tests.control.fixtures import Plane
from tests.postgres import Postgres, empty_tables, postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One PostgreSQL for all tests of a process."""
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def _tables(postgres_server: Postgres) -> str:
    """A database with all tables, made once."""
    url = postgres_server.new_database()
    database = Database(url)
    database.create_tables()
    database.close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def plane(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plane]:
    """A control plane in a temporary directory, on each database."""
    yield from _checked(tmp_path, None if request.param == "sqlite" else request.getfixturevalue("_tables"))


@pytest.fixture
def sqlite_plane(tmp_path: Path) -> Iterator[Plane]:
    """One on SQLite, for what the other database has no part in."""
    yield from _checked(tmp_path, None)


@pytest.fixture
def postgresql_plane(tmp_path: Path, _tables: str) -> Iterator[Plane]:
    """One on PostgreSQL, for what only replicas need."""
    yield from _checked(tmp_path, _tables)


def _checked(directory: Path, url: str | None) -> Iterator[Plane]:
    """Versions, sequences and dedupe keys must agree at the end."""
    if url is not None:
        empty_tables(url)
    plane = Plane(directory, url=url)
    try:
        yield plane
        plane.check_invariants()
    finally:
        plane.close()
