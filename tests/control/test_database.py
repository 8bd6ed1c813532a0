"""Transactions: control-plane.md §17."""

import multiprocessing
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import OperationalError

from qlworker.control.aggregate import ATTEMPT_TRANSITIONS, RUN_TRANSITIONS, advance_attempt, advance_run
from qlworker.control.clock import SettableClock, SystemClock
from qlworker.control.database import Database, Transaction
from qlworker.control.schema import metadata, projects
from qlworker.domain.errors import Conflict, Misconfigured, OwnershipHeld
from tests.control.fixtures import Plane


def add(tx: Transaction, name: str) -> int:
    tx.write(insert(projects).values(id=name))
    return tx.now_ms


def names(plane: Plane) -> list[str]:
    with plane.database.transaction() as tx:
        return [row.id for row in tx.rows(select(projects).order_by(projects.c.id))]


async def test_a_transaction_commits_with_the_planes_time(plane: Plane) -> None:
    assert await plane.database.run(add, "one") == plane.clock.now_ms()
    assert names(plane) == ["one"]


async def test_an_exception_rolls_everything_back(plane: Plane) -> None:
    def fail(tx: Transaction) -> None:
        add(tx, "one")
        raise Conflict("no")

    with pytest.raises(Conflict):
        await plane.database.run(fail)
    assert names(plane) == []


def test_the_time_is_read_after_the_lock_is_held(plane: Plane) -> None:  # D6
    inside, waiting, times = threading.Event(), threading.Event(), []

    def second() -> None:
        waiting.set()
        with plane.database.transaction() as tx:
            times.append(tx.now_ms)

    with plane.database.transaction() as tx:
        started = tx.now_ms
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        plane.clock.advance(500)
        inside.set()
    thread.join()
    assert times == [started + 500]


async def test_a_busy_database_is_tried_again_and_then_given_up(plane: Plane, monkeypatch: Any) -> None:
    tries = []

    def busy(tx: Transaction) -> None:
        tries.append(tx)
        raise OperationalError("BEGIN", None, sqlite3.OperationalError("database is locked"))

    with pytest.raises(OperationalError):
        await plane.database.run(busy)
    assert len(tries) == 5


def _open(path: str, results: Any) -> None:
    try:
        Database(f"sqlite:///{path}").close()
        results.put("opened")
    except OwnershipHeld:
        results.put("refused")


def test_a_second_process_on_the_same_file_is_refused(plane: Plane) -> None:  # V120
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=_open, args=(str(plane.directory / "control.sqlite"), results))
    process.start()
    assert results.get(timeout=60) == "refused"
    process.join()
    results.close()
    results.join_thread()


def test_the_file_can_be_opened_again_after_it_was_closed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'c.sqlite'}"
    first = Database(url)
    with pytest.raises(OwnershipHeld, match="stop it first"):
        Database(url)
    first.close()
    Database(url).close()


def test_the_database_file_is_private(plane: Plane) -> None:
    for file in plane.directory.glob("control.sqlite*"):
        assert file.stat().st_mode & 0o077 == 0, file.name


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match="sqlite"):
        Database(url)


@pytest.mark.req("R545")
def test_there_is_no_table_of_offers_beside_the_lease() -> None:
    assert not [name for name in metadata.tables if "offer" in name]


def test_the_wall_clock_never_runs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    first = clock.now_ms()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert clock.now_ms() == first
    assert SettableClock(5).now_ms() == 5


def test_a_run_moves_only_along_its_table(plane: Plane) -> None:
    held = plane.drive("running")
    run, attempt = plane.facts(held)
    before = plane.snapshot()
    for status in {*RUN_TRANSITIONS, "succeeded"} - RUN_TRANSITIONS["running"]:
        with plane.database.transaction() as tx, pytest.raises(Conflict, match="a run cannot go"):
            advance_run(tx, run, status, "run.x", actor_type="system")
    for status in {*ATTEMPT_TRANSITIONS} - ATTEMPT_TRANSITIONS["running"]:
        with plane.database.transaction() as tx, pytest.raises(Conflict, match="an attempt cannot go"):
            advance_attempt(tx, attempt, status)
    assert plane.snapshot() == before


def test_a_run_that_changed_in_the_meantime_is_not_overwritten(plane: Plane) -> None:
    held = plane.drive("starting")
    run, attempt = plane.facts(held)
    plane.running(held)
    before = plane.snapshot()
    with plane.database.transaction() as tx, pytest.raises(Conflict, match="changed"):
        advance_run(tx, run, "running", "run.running", actor_type="system")
    with plane.database.transaction() as tx, pytest.raises(Conflict, match="changed"):
        advance_attempt(tx, attempt, "failed")
    assert plane.snapshot() == before
