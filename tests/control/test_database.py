"""Transactions: control-plane.md §17."""

import multiprocessing
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from sqlalchemy import event, insert, select
from sqlalchemy.exc import OperationalError
from trio.testing import wait_all_tasks_blocked

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
    waiting, times = threading.Event(), []

    def second() -> None:
        waiting.set()
        with plane.database.transaction() as tx:
            tx.lock("run", "run-1")
            times.append(tx.now_ms)

    with plane.database.transaction() as tx:
        tx.lock("run", "run-1")
        started = tx.now_ms
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        plane.clock.advance(500)
    thread.join()
    assert times == [started + 500]


def test_a_transaction_has_one_time(plane: Plane) -> None:
    with plane.database.transaction() as tx:
        first = tx.now_ms
        plane.clock.advance(500)
        assert tx.now_ms == first


def test_replicas_share_the_databases_time(postgresql_plane: Plane) -> None:  # D6
    database = Database(postgresql_plane.url)
    try:
        before = time.time_ns() // 1_000_000
        with database.transaction() as tx:
            assert before - 1_000 <= tx.now_ms <= time.time_ns() // 1_000_000 + 1_000
    finally:
        database.close()


def test_a_lock_that_could_be_waited_for_in_a_circle_is_refused(plane: Plane) -> None:
    for first, second in ((("run", "a"), ("worker", "a")), (("run", "b"), ("run", "a")), (("worker", "a"), ("scan", "z"))):
        with plane.database.transaction() as tx:
            tx.lock(*first)  # type: ignore[arg-type]
            tx.lock(*first)  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match="is taken after"):
                tx.lock(*second)  # type: ignore[arg-type]


def test_a_lock_that_somebody_else_has_is_not_taken(postgresql_plane: Plane) -> None:
    database = postgresql_plane.database
    with database.transaction() as tx:
        assert tx.try_lock("run", "run-1")
        with database.transaction() as other:
            assert not other.try_lock("run", "run-1")
            assert other.try_lock("run", "run-2")
            assert not other.try_lock("run", "run-1")
    with database.transaction() as tx:
        assert tx.try_lock("run", "run-1")


def test_a_lock_is_not_waited_for_longer_than_a_second(postgresql_plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlworker.control.database.WAITS_S", ())
    database = postgresql_plane.database
    with database.transaction() as tx:
        tx.lock("run", "run-1")
        with pytest.raises(OperationalError, match="lock timeout"):
            database.transact(lambda other: other.lock("run", "run-1"))


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


async def test_jobs_that_wait_for_a_commit_share_the_next_one_and_fail_alone(sqlite_plane: Plane) -> None:
    database = sqlite_plane.database
    commits: list[object] = []
    event.listen(database.engine, "commit", commits.append)
    entered, go = threading.Event(), threading.Event()
    outcomes: dict[str, object] = {}

    def first(tx: Transaction) -> None:
        add(tx, "first")
        entered.set()
        assert go.wait(10)

    def refused(tx: Transaction) -> None:
        add(tx, "refused")
        raise Conflict("no")

    async def call(name: str, function: Any) -> None:
        try:
            outcomes[name] = await database.run(function)
        except Conflict as error:
            outcomes[name] = str(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "first", first)
        await trio.to_thread.run_sync(entered.wait)
        for name in ("one", "two"):
            nursery.start_soon(call, name, partial(add, name=name))
        nursery.start_soon(call, "refused", refused)
        await wait_all_tasks_blocked()
        go.set()

    assert names(sqlite_plane) == ["first", "one", "two"]
    assert outcomes["refused"] == "no"
    assert len(commits) == 2 + 1  # the first, the three together, and the look at the names


async def test_a_commit_that_fails_fails_for_all_that_shared_it(sqlite_plane: Plane) -> None:
    def fail(_connection: object) -> None:
        raise OSError("the disk is gone")

    entered, go = threading.Event(), threading.Event()
    refused = []

    def first(_tx: Transaction) -> None:
        entered.set()
        assert go.wait(10)

    async def call(name: str) -> None:
        with pytest.raises(OSError, match="gone"):
            await sqlite_plane.database.run(add, name)
        refused.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sqlite_plane.database.run, first)
        await trio.to_thread.run_sync(entered.wait)
        nursery.start_soon(call, "one")
        nursery.start_soon(call, "two")
        await wait_all_tasks_blocked()
        sqlite_plane.database.on_write = lambda statement: event.listen(sqlite_plane.database.engine, "commit", fail, once=True)
        go.set()
    sqlite_plane.database.on_write = None
    assert sorted(refused) == ["one", "two"]
    assert names(sqlite_plane) == []


def test_a_second_process_on_the_same_file_is_refused(sqlite_plane: Plane) -> None:  # V120
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=_open, args=(str(sqlite_plane.directory / "control.sqlite"), results))
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


def test_the_database_file_is_private(sqlite_plane: Plane) -> None:
    for file in sqlite_plane.directory.glob("control.sqlite*"):
        assert file.stat().st_mode & 0o077 == 0, file.name


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "hidden"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match="database") as raised:
        Database(url)
    assert "hidden" not in str(raised.value)


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
