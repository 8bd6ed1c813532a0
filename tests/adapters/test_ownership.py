"""Ownership of the journal: real directories and processes, and a clock moved by hand where time matters."""

# Real files are the subject of these tests, and nothing else runs beside them.
# ruff: noqa: ASYNC240

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from qlworker.adapters.journal import FileJournal
from qlworker.adapters.ownership import JournalOwnership
from qlworker.adapters.process_table import is_alive, myself, read_place
from qlworker.domain.errors import Corrupt, Misconfigured, OwnershipHeld, OwnershipLost
from qlworker.domain.identity import Place, ProcessId
from qlworker.domain.ownership import OwnerRecord
from tests.adapters.hand_clock import HandClock
from tests.adapters.small_disk import small_disk
from tests.builders import make_record

PROJECT = Path(__file__).parents[2]
HERE = Place(host_id="host", boot_id="boot", pid_namespace=1, time_namespace=2)
ELSEWHERE = Place(host_id="host", boot_id="boot", pid_namespace=9, time_namespace=2)
FIRST, SECOND = ProcessId(101, "1"), ProcessId(102, "2")
WINDOW = 30_000


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def owner(root: Path, clock: HandClock, me: ProcessId = FIRST, *, dead: bool = False, **changes: Any) -> JournalOwnership:
    arguments: dict[str, Any] = {"clock": clock, "place": HERE, "me": me, "is_alive": lambda _: not dead}
    return JournalOwnership(root, **(arguments | changes))


def journal_of(root: Path, ownership: JournalOwnership) -> FileJournal:
    return FileJournal(root, ownership=ownership, file_limiter=trio.CapacityLimiter(1))


def operations(journal: FileJournal) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "page": journal.page,
        "read": lambda: journal.read("offer-1"),
        "create": lambda: journal.create(make_record("offer-2")),
        "replace": lambda: journal.replace(make_record("offer-1")),
        "remove": lambda: journal.remove("offer-1", 0),
        "read_claim": journal.read_claim,
        "read_session": journal.read_session,
        "remove_session": journal.remove_session,
        "open": journal.open,
    }


async def assert_closed(root: Path, journal: FileJournal) -> None:
    """Every operation raises and not a byte below the root changes."""
    before = {path: path.read_bytes() for path in sorted(root.rglob("*.json"))}
    for name, operation in operations(journal).items():
        with pytest.raises(OwnershipLost):
            await operation()
            pytest.fail(f"{name} was allowed")
    assert {path: path.read_bytes() for path in sorted(root.rglob("*.json"))} == before


@contextmanager
def process(mode: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.adapters.journal_process", mode, str(root)]
    with subprocess.Popen(command, cwd=PROJECT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def real_owner(root: Path, **changes: Any) -> JournalOwnership:
    arguments: dict[str, Any] = {"clock": HandClock(), "place": read_place("test-host"), "me": myself(), "is_alive": is_alive}
    return JournalOwnership(root, **(arguments | changes))


@asynccontextmanager
async def in_background(action: Callable[[], Awaitable[None]]) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(action)
        await wait_all_tasks_blocked()
        yield nursery
        nursery.cancel_scope.cancel()


@pytest.mark.req("R75")
async def test_every_operation_is_refused_before_ownership_was_acquired(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await assert_closed(root, journal_of(root, ownership))
    assert not root.exists()


@pytest.mark.req("R76")
def test_of_twenty_racing_processes_exactly_one_owns(root: Path) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(process("race", root)) for _ in range(20)]
        assert {line(child) for child in children} == {"ready"}
        for child in children:
            go(child)
        results = [line(child) for child in children]
        assert sorted(results) == ["held"] * 19 + ["owned"]


@pytest.mark.req("R76")
def test_of_racing_processes_exactly_one_displaces_a_dead_owner(root: Path) -> None:
    with process("race", root) as first:
        line(first)
        go(first)
        assert line(first) == "owned"
        with ExitStack() as stack:
            children = [stack.enter_context(process("race", root)) for _ in range(8)]
            assert {line(child) for child in children} == {"ready"}
            first.send_signal(signal.SIGKILL)
            first.wait()
            for child in children:
                go(child)
            assert sorted(line(child) for child in children) == ["held"] * 7 + ["owned"]


@pytest.mark.req("R29", "R76", "R81")
async def test_a_live_owner_in_another_process_is_named_and_nothing_can_be_read_or_written(root: Path) -> None:
    with process("race", root) as child:
        line(child)
        go(child)
        assert await trio.to_thread.run_sync(line, child) == "owned"
        ownership = real_owner(root)
        with pytest.raises(OwnershipHeld, match=rf"process {child.pid} "):
            await ownership.acquire()
        await assert_closed(root, journal_of(root, ownership))


@pytest.mark.req("R76", "R88")
async def test_a_killed_owner_is_replaced_at_once(root: Path) -> None:
    with process("race", root) as child:
        line(child)
        go(child)
        assert await trio.to_thread.run_sync(line, child) == "owned"
        child.send_signal(signal.SIGKILL)
        child.wait()
        # The clock stands still: whoever waited for the window would wait for ever.
        ownership = real_owner(root)
        await ownership.acquire()
        ownership.check()
        await ownership.release()


@pytest.mark.req("R88")
async def test_an_owner_of_another_boot_is_replaced_at_once(root: Path, clock: HandClock) -> None:
    await owner(root, clock).acquire()
    successor = owner(root, clock, SECOND, place=Place("host", "next boot", 1, 2))
    await successor.acquire()
    successor.check()


@pytest.mark.req("R88")
@pytest.mark.parametrize("step_ms", [-10 * 365 * 86_400_000, 10 * 365 * 86_400_000])
async def test_a_step_of_the_wall_clock_displaces_nobody(root: Path, clock: HandClock, step_ms: int) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    clock.step_wall(step_ms)
    ownership.check()
    assert ownership.refresh()
    ownership.check()
    with pytest.raises(OwnershipHeld):
        await owner(root, clock, SECOND).acquire()
    os.utime(root / ".owner.lock", (0, 0))
    with pytest.raises(OwnershipHeld):
        await owner(root, clock, SECOND).acquire()


@pytest.mark.req("R88")
@pytest.mark.parametrize("step_ms", [-10 * 365 * 86_400_000, 10 * 365 * 86_400_000])
async def test_an_unprovable_owner_is_watched_on_the_boot_clock_whatever_the_wall_clock_does(
    root: Path, clock: HandClock, step_ms: int
) -> None:
    await owner(root, clock, place=ELSEWHERE).acquire()
    clock.step_wall(step_ms)
    successor = owner(root, clock, SECOND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(successor.acquire)
        for _ in range(9):
            await wait_all_tasks_blocked()
            clock.advance(WINDOW // 10)
        await wait_all_tasks_blocked()
        with pytest.raises(OwnershipLost):
            successor.check()
        clock.advance(WINDOW // 10)
    successor.check()


@pytest.mark.req("R77")
async def test_the_default_window_is_thirty_seconds(root: Path, clock: HandClock) -> None:
    await owner(root, clock, place=ELSEWHERE).acquire()
    successor = owner(root, clock, SECOND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(successor.acquire)
        await wait_all_tasks_blocked()
        clock.advance(29_999)
        await wait_all_tasks_blocked()
        with pytest.raises(OwnershipLost):
            successor.check()
        clock.advance(1)
    successor.check()


@pytest.mark.req("R79")
async def test_an_unprovable_owner_that_refreshes_is_never_displaced(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock, place=ELSEWHERE)
    await ownership.acquire()
    async with in_background(ownership.refresh_forever):
        refused = False

        async def rival() -> None:
            nonlocal refused
            with pytest.raises(OwnershipHeld):
                await owner(root, clock, SECOND).acquire()
            refused = True

        async with in_background(rival):
            for _ in range(8):
                clock.advance(WINDOW // 8)
                await wait_all_tasks_blocked()
        assert refused
        ownership.check()


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"schemaVersion":1}', b"\x00" * 300])
async def test_a_lock_without_a_readable_record_is_only_taken_after_the_window(
    root: Path, clock: HandClock, content: bytes | None
) -> None:
    root.mkdir(0o700)
    (root / ".owner.lock").mkdir(0o700)
    if content is not None:
        (root / ".owner.lock" / "owner.json").write_bytes(content)
        (root / ".owner.lock" / "owner.json").chmod(0o600)
    ownership = owner(root, clock, dead=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ownership.acquire)
        await wait_all_tasks_blocked()
        clock.advance(WINDOW - 1)
        await wait_all_tasks_blocked()
        with pytest.raises(OwnershipLost):
            ownership.check()
        clock.advance(1)
    ownership.check()


async def test_of_two_that_waited_for_the_same_window_one_is_refused(root: Path, clock: HandClock) -> None:
    await owner(root, clock, place=ELSEWHERE).acquire()
    results: list[str] = []

    async def rival(me: ProcessId) -> None:
        try:
            await owner(root, clock, me).acquire()
            results.append("owned")
        except OwnershipHeld:
            results.append("held")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rival, SECOND)
        nursery.start_soon(rival, ProcessId(103, "3"))
        await wait_all_tasks_blocked()
        clock.advance(WINDOW)
        await wait_all_tasks_blocked()
        clock.advance(WINDOW)
    assert sorted(results) == ["held", "owned"]


@pytest.mark.req("R78")
@pytest.mark.parametrize("window_ms", [4_999, 300_001])
def test_a_window_out_of_bounds_is_refused_at_construction(root: Path, clock: HandClock, window_ms: int) -> None:
    with pytest.raises(Misconfigured):
        owner(root, clock, window_ms=window_ms)


@pytest.mark.req("R79")
@pytest.mark.parametrize("window_ms", [5_000, 30_000, 300_000])
async def test_the_lock_is_refreshed_every_half_window(root: Path, clock: HandClock, window_ms: int) -> None:
    ownership = owner(root, clock, window_ms=window_ms)
    await ownership.acquire()
    lock = root / ".owner.lock"
    async with in_background(ownership.refresh_forever):
        for _ in range(5):
            before = lock.stat().st_mtime_ns
            clock.advance(window_ms // 2 - 1)
            await wait_all_tasks_blocked()
            assert lock.stat().st_mtime_ns == before
            clock.advance(1)
            await wait_all_tasks_blocked()
            assert lock.stat().st_mtime_ns != before
            ownership.check()


@pytest.mark.req("R79")
async def test_a_refresh_is_visible_even_when_the_wall_clock_stands_still(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    seen = set()
    for _ in range(4):
        assert ownership.refresh()
        seen.add((root / ".owner.lock").stat().st_mtime_ns // 2_000_000_000)
    assert len(seen) == 4


@pytest.mark.req("R80")
def test_a_process_with_nothing_else_to_do_ends_while_it_holds_the_lock(root: Path) -> None:
    with process("idle", root) as child:
        assert line(child) == "owned"
        assert child.wait(30) == 0
    assert (root / ".owner.lock" / "owner.json").exists()


@pytest.mark.req("R80")
async def test_a_release_ends_the_refreshing_task(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ownership.refresh_forever)
        await wait_all_tasks_blocked()
        await ownership.release()


def delete_lock(root: Path) -> None:
    (root / ".owner.lock" / "owner.json").unlink()
    (root / ".owner.lock").rmdir()


def replace_lock(root: Path) -> None:
    lock = root / ".owner.lock"
    status, content = lock.stat(), (lock / "owner.json").read_bytes()
    delete_lock(root)
    lock.mkdir(0o700)
    (lock / "owner.json").write_bytes(content)
    (lock / "owner.json").chmod(0o600)
    os.utime(lock, ns=(status.st_mtime_ns, status.st_mtime_ns))


def touch_lock(root: Path) -> None:
    os.utime(root / ".owner.lock")


SPOILERS = {
    "deleted": pytest.param(delete_lock, marks=pytest.mark.req("R82")),
    "replaced": pytest.param(replace_lock, marks=pytest.mark.req("R82")),
    "touched": pytest.param(touch_lock, marks=pytest.mark.req("R83")),
}


@pytest.mark.req("R85", "R86")
@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
async def test_a_lock_that_was_changed_closes_every_operation_for_ever(
    root: Path, clock: HandClock, spoil: Callable[[Path], None]
) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    journal = journal_of(root, ownership)
    await journal.open()
    await journal.create(make_record())
    spoil(root)
    await assert_closed(root, journal)
    with trio.fail_after(10):
        await ownership.wait_compromised()
    assert not ownership.refresh()
    with pytest.raises(OwnershipLost, match="never acquires again"):
        await ownership.acquire()
    await assert_closed(root, journal)


@pytest.mark.req("R82", "R83")
@pytest.mark.parametrize("spoil", [delete_lock, replace_lock, touch_lock])
async def test_the_next_refresh_notices_a_changed_lock_without_any_operation(
    root: Path, clock: HandClock, spoil: Callable[[Path], None]
) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ownership.refresh_forever)
        await wait_all_tasks_blocked()
        spoil(root)
        clock.advance(WINDOW // 2)
        await ownership.wait_compromised()


async def test_a_refresh_notices_another_name_in_the_lock(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    # Written in place, so that neither the directory nor its mtime tells.
    (root / ".owner.lock" / "owner.json").write_bytes(OwnerRecord.of(HERE, SECOND, "f" * 32).to_json())
    assert not ownership.refresh()
    with pytest.raises(OwnershipLost, match="another owner"):
        ownership.check()


@pytest.mark.req("R84", "R85", "R88")
async def test_a_suspend_past_the_window_compromises_the_owner(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    journal = journal_of(root, ownership)
    await journal.open()
    clock.advance(WINDOW - 1)
    await journal.page()
    clock.advance(1)
    await assert_closed(root, journal)
    assert not ownership.refresh()


@pytest.mark.req("R84", "R88")
async def test_the_refreshing_task_reports_a_suspend_past_the_window(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ownership.refresh_forever)
        await wait_all_tasks_blocked()
        clock.advance(10 * WINDOW)
        await ownership.wait_compromised()
    with pytest.raises(OwnershipLost, match="suspend"):
        ownership.check()


@pytest.mark.req("R86")
async def test_a_compromised_owner_stays_without_when_the_lock_comes_back(root: Path, clock: HandClock) -> None:
    ownership = owner(root, clock)
    await ownership.acquire()
    (root / ".owner.lock").rename(root / "aside")
    with pytest.raises(OwnershipLost):
        ownership.check()
    (root / "aside").rename(root / ".owner.lock")
    with pytest.raises(OwnershipLost):
        ownership.check()
    assert not ownership.refresh()


@pytest.mark.req("R87")
async def test_after_a_release_another_process_takes_over(root: Path) -> None:
    ownership = real_owner(root)
    await ownership.acquire()
    await ownership.release()
    assert not (root / ".owner.lock").exists()
    with pytest.raises(OwnershipLost, match="released"):
        ownership.check()
    with process("race", root) as child:
        line(child)
        go(child)
        assert await trio.to_thread.run_sync(line, child) == "owned"
    await ownership.release()


@pytest.mark.req("R87")
async def test_a_late_release_leaves_the_lock_of_a_successor(root: Path, clock: HandClock) -> None:
    first = owner(root, clock)
    await first.acquire()
    successor = owner(root, clock, SECOND, dead=True)
    await successor.acquire()
    await first.release()
    successor.check()
    assert (root / ".owner.lock" / "owner.json").exists()


async def test_an_owner_on_a_disk_that_became_read_only_keeps_the_lock(root: Path, clock: HandClock) -> None:
    root.mkdir(0o700)
    with small_disk(root, size="256k") as disk:
        ownership = owner(root, clock)
        await ownership.acquire()
        disk.make_read_only()
        for _ in range(4):
            clock.advance(WINDOW // 2)
            assert ownership.refresh()
        ownership.check()
        disk.make_writable()
        assert ownership.refresh()
        await ownership.release()


@pytest.mark.req("R30")
async def test_a_root_that_others_may_enter_is_refused_and_not_repaired(root: Path, clock: HandClock) -> None:
    root.mkdir()
    root.chmod(0o750)
    with pytest.raises(Corrupt, match="chmod 0700"):
        await owner(root, clock).acquire()
    assert root.stat().st_mode & 0o777 == 0o750


@pytest.mark.req("R28")
async def test_a_relative_root_is_refused(clock: HandClock) -> None:
    with pytest.raises(Misconfigured, match="absolute"):
        await owner(Path("journal"), clock).acquire()


async def test_a_lock_that_is_no_directory_is_refused(root: Path, clock: HandClock) -> None:
    root.mkdir(0o700)
    (root / ".owner.lock").symlink_to("/tmp")
    with pytest.raises(Corrupt, match="not a directory"):
        await owner(root, clock).acquire()


async def test_foreign_files_in_a_dead_lock_are_kept(root: Path, clock: HandClock) -> None:
    await owner(root, clock).acquire()
    (root / ".owner.lock" / "notes.txt").write_text("mine")
    with pytest.raises(Corrupt, match="move them away"):
        await owner(root, clock, SECOND, dead=True).acquire()
    assert (root / ".owner.lock" / "notes.txt").read_text() == "mine"


@pytest.mark.req("R76")
async def test_a_process_that_hangs_while_deciding_is_reported(root: Path, clock: HandClock) -> None:
    root.mkdir(0o700)
    with (root / ".owner.guard").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        async with trio.open_nursery() as nursery:

            async def attempt() -> None:
                with pytest.raises(OwnershipHeld, match="does not get on"):
                    await owner(root, clock).acquire()

            nursery.start_soon(attempt)
            await wait_all_tasks_blocked()
            clock.advance(60_000)
    assert not (root / ".owner.lock").exists()
