"""A copy of a database that is written meanwhile is whole, and one that comes back offers nobody what may have been done."""

import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from qlworker.control.backup import Restored, copy_database, restore_database
from qlworker.control.database import Database
from qlworker.control.schema import run_attempts, run_dispatch_leases, runs
from qlworker.domain.errors import Fenced, Misconfigured, OwnershipHeld, Refused, Transient
from qlworker.wire.offers import Idle
from tests.builders import make_revision
from tests.control.fixtures import OTHER_SESSION, WORKER, Caller, Plane, token


def url_of(directory: Path) -> str:
    return f"sqlite:///{directory / 'control.sqlite'}"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """On SQLite, with the tables that the migrations make."""
    database = Database(url_of(tmp_path))
    database.upgrade()
    database.close()
    plane = Plane(tmp_path, url=url_of(tmp_path))
    yield plane
    plane.close()


def reopened(plane: Plane) -> Plane:
    """The same control plane, started again."""
    plane.close()
    return Plane(plane.directory, url=plane.url)


def restored(plane: Plane, copy: Path) -> tuple[Plane, Restored]:
    plane.close()
    result = restore_database(plane.url, copy)
    return Plane(plane.directory, url=plane.url), result


def test_a_copy_of_a_database_that_is_written_all_the_time_is_whole(plane: Plane, tmp_path: Path) -> None:
    revision, stop, started = plane.publish(make_revision()), threading.Event(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            plane.start_run(revision)
            started.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        started.wait()
        copies = [copy_database(plane.url, tmp_path / f"copy-{number}") for number in range(5)]
    finally:
        stop.set()
        writer.join()

    assert [each.runs for each in copies] == sorted(each.runs for each in copies)
    for each in copies:
        assert stat.S_IMODE(each.path.stat().st_mode) == 0o600
        assert each.size == each.path.stat().st_size
        with sqlite3.connect(each.path) as connection:
            loose = connection.execute(
                "SELECT count(*) FROM runs WHERE event_sequence <> (SELECT count(*) FROM run_events WHERE run_id = runs.id)"
            )
            assert loose.fetchone() == (0,)
    assert sorted(path.name for path in tmp_path.glob("*copy*")) == [f"copy-{number}" for number in range(5)]


@pytest.mark.req("R519")
@pytest.mark.parametrize(
    ("state", "attempt_status"), [("queued", "cancelled"), ("claimed", "cancelled"), ("starting", "lost"), ("running", "lost")]
)
def test_a_run_that_was_not_over_in_the_copy_is_ended_and_never_offered(
    plane: Plane, tmp_path: Path, state: str, attempt_status: str
) -> None:
    if state == "queued":
        plane.start_run(plane.publish(make_revision()))
    else:
        plane.drive(state)
    copy = copy_database(plane.url, tmp_path / "copy").path

    plane, result = restored(plane, copy)

    with plane.database.transaction() as tx:
        (run,) = tx.rows(select(runs))
        (attempt,) = tx.rows(select(run_attempts))
        leases = tx.rows(select(run_dispatch_leases.c.status))
    assert (result.ended, run.status, attempt.status) == (1, "cancelled", attempt_status)
    assert "run.restored_from_copy" in plane.events(run.id)
    assert {each.status for each in leases} <= {"released"}
    again = Caller(WORKER, OTHER_SESSION)
    generation = plane.register(again).generation
    assert isinstance(plane.pull("offer-2", token(2), again, generation), Idle)
    plane.check_invariants()
    plane.close()


def test_what_a_worker_held_before_the_restore_gives_it_no_authority_after_it(plane: Plane, tmp_path: Path) -> None:
    held = plane.drive("running")
    copy = copy_database(plane.url, tmp_path / "copy").path

    plane, _ = restored(plane, copy)

    for ask in (plane.running, plane.control):
        with pytest.raises(Fenced):
            ask(held)
    plane.close()


def test_a_session_of_before_is_left_to_run_out_and_is_fenced_after_that(plane: Plane, tmp_path: Path) -> None:
    """A worker that is fenced waits for its operator, and behind a restore that would be the whole fleet."""
    plane.register()
    copy = copy_database(plane.url, tmp_path / "copy").path
    plane.heartbeat(0)

    plane, _ = restored(plane, copy)
    plane.clock.advance(round(time.time() * 1000) - plane.clock.now_ms())

    for version in (0, 1):
        with pytest.raises(Transient, match="have to run out"):
            plane.heartbeat(version)
    plane.clock.advance(plane.settings.session_lease_max_ms)
    with pytest.raises(Fenced):
        plane.heartbeat(1)
    assert plane.register(Caller(WORKER, OTHER_SESSION)).generation == 2
    plane.close()


def test_a_run_that_was_over_stays_as_it_was(plane: Plane, tmp_path: Path) -> None:
    held = plane.drive("failed")
    before = plane.facts(held)
    copy = copy_database(plane.url, tmp_path / "copy").path

    plane, result = restored(plane, copy)

    assert (result.ended, plane.facts(held)) == (0, before)
    plane.close()


def test_the_database_that_was_there_is_kept_whole(plane: Plane, tmp_path: Path) -> None:
    copy = copy_database(plane.url, tmp_path / "copy").path
    plane.drive("succeeded")

    plane, result = restored(plane, copy)

    assert result.former is not None
    with sqlite3.connect(result.former) as former:
        assert former.execute("SELECT status FROM runs").fetchall() == [("succeeded",)]
    with plane.database.transaction() as tx:
        assert tx.rows(select(runs)) == []
    plane.close()


def test_a_copy_can_begin_a_new_installation(plane: Plane, tmp_path: Path) -> None:
    plane.drive("succeeded")
    copy = copy_database(plane.url, tmp_path / "copy").path
    other = tmp_path / "other"
    other.mkdir()

    result = restore_database(url_of(other), copy)

    assert (result.former, result.path) == (None, other / "control.sqlite")
    assert {path.name for path in other.iterdir()} == {"control.sqlite", "control.sqlite.lock"}


def everything(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_nothing_is_restored_while_a_control_plane_serves(plane: Plane, tmp_path: Path) -> None:
    copy = copy_database(plane.url, tmp_path / "copy").path
    before = everything(tmp_path)

    with pytest.raises(OwnershipHeld, match="stop it first"):
        restore_database(plane.url, copy)

    assert everything(tmp_path) == before


@pytest.mark.parametrize("damage", ["text", "cut off", "other tables", "a newer step", "missing"])
def test_what_is_no_whole_database_of_this_program_is_refused_and_changes_nothing(
    plane: Plane, tmp_path: Path, damage: str
) -> None:
    plane.drive("succeeded")
    copy = copy_database(plane.url, tmp_path / "copy").path
    plane.close()
    if damage == "text":
        copy.write_text("not a database, but long enough to be looked at " * 100)
    elif damage == "cut off":
        copy.write_bytes(copy.read_bytes()[:20_000])
    elif damage == "missing":
        copy.unlink()
    else:
        with sqlite3.connect(copy) as connection:
            change = "DELETE FROM alembic_version" if damage == "other tables" else "UPDATE alembic_version SET version_num='9'"
            connection.execute(change)
    before = everything(tmp_path)

    with pytest.raises((Refused, Misconfigured), match=str(copy)):
        restore_database(plane.url, copy)

    assert everything(tmp_path) == before


def test_a_copy_never_overwrites_and_leaves_nothing_behind(plane: Plane, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    before = set(tmp_path.iterdir())

    with pytest.raises(Misconfigured, match=f"{taken}: it exists already"):
        copy_database(plane.url, taken)

    assert taken.read_text() == "mine"
    assert set(tmp_path.iterdir()) == before


def test_postgresql_is_left_to_its_own_tools(tmp_path: Path) -> None:
    for command in (copy_database, restore_database):
        with pytest.raises(Misconfigured, match="pg_dump"):
            command("postgresql://localhost/qlcontrol", tmp_path / "copy")


def test_a_database_that_is_not_there_is_not_made_by_copying_it(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="there is no such database"):
        copy_database(url_of(tmp_path), tmp_path / "copy")

    assert list(tmp_path.iterdir()) == []
