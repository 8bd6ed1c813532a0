"""The journal on real file systems: publication, replacement, capacity, paging, order, and what a damaged or full disk does."""

# Real files are the subject of these tests, and nothing else runs beside them.
# ruff: noqa: ASYNC240

import errno
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlworker.adapters import durable
from qlworker.adapters.journal import FileJournal
from qlworker.domain.claim import PendingClaim
from qlworker.domain.errors import CapacityExceeded, Conflict, Corrupt, Misconfigured, OwnershipLost, QlworkerError, Refused
from qlworker.domain.record import RECORD_BYTES, Event, InboxRecord, State, accept, advance
from qlworker.domain.server_time import Anchor
from qlworker.domain.session import StoredSession
from tests.adapters.recorded_calls import record_calls
from tests.adapters.small_disk import small_disk
from tests.builders import DIGEST, SESSION_ID, TOKEN, make_offer, make_record

PROJECT = Path(__file__).parents[2]


class Owned:
    """An ownership that is there until it is taken away."""

    lost = False

    def check(self) -> None:
        if self.lost:
            raise OwnershipLost("the journal is not owned by this process")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def journal_of(root: Path, *, ownership: Any = None, threads: int = 1, **changes: Any) -> FileJournal:
    return FileJournal(root, ownership=ownership or Owned(), file_limiter=trio.CapacityLimiter(threads), **changes)


@pytest.fixture
async def journal(root: Path) -> FileJournal:
    opened = journal_of(root)
    await opened.open()
    return opened


def settled(record: InboxRecord) -> list[InboxRecord]:
    """The successors of an accepted record up to a settled one."""
    steps = []
    for event in (Event.STARTING_ACKED, Event.NOT_STARTED, Event.FAILURE_ACKED):
        record = advance(record, event, 2000)
        steps.append(record)
    return steps


async def settle(journal: FileJournal, offer_id: str) -> InboxRecord:
    record = make_record(offer_id)
    await journal.create(record)
    for record in settled(record):  # noqa: B020
        await journal.replace(record)
    return record


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.req("R14", "R15", "R27", "R55", "R56", "R70")
async def test_a_record_is_one_file_that_a_reopened_journal_reads_back_whole(root: Path, journal: FileJournal) -> None:
    record = make_record(now_ms=1234)
    await journal.create(record)
    assert set(contents(root)) == {"offers/offer-1.json"}
    assert contents(root)["offers/offer-1.json"] == record.to_json() + b"\n"
    reopened = journal_of(root)
    assert await reopened.open() == 0
    stored = await reopened.read("offer-1")
    assert stored == record
    assert stored is not None
    assert stored.offer == make_offer()
    assert stored.offer.execution_digest == stored.offer.execution_revision.computed_digest()
    assert (stored.revision, stored.accepted_at_ms, stored.updated_at_ms) == (0, 1234, 1234)
    assert await reopened.read("offer-2") is None


@pytest.mark.req("R3", "R33")
async def test_a_second_creation_of_an_offer_is_a_conflict_also_after_a_restart(root: Path, journal: FileJournal) -> None:
    await journal.create(make_record())
    before = contents(root)
    reopened = journal_of(root)
    await reopened.open()
    with pytest.raises(Conflict, match="in the journal already"):
        await reopened.create(make_record(now_ms=9999))
    assert contents(root) == before


async def test_a_first_record_is_accepted_and_of_revision_0(root: Path, journal: FileJournal) -> None:
    with pytest.raises(Conflict, match="revision 0"):
        await journal.create(advance(make_record(), Event.STARTING_ACKED, 2000))
    assert contents(root) == {}


@pytest.mark.req("R28")
def test_a_relative_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="absolute"):
        journal_of(Path("journal"))
    with pytest.raises(Misconfigured, match="4096"):
        journal_of(Path("/" + "x" * 4096))


@pytest.mark.req("R30", "R31", "R68", "R70")
async def test_directories_are_0700_and_files_0600(root: Path, journal: FileJournal) -> None:
    record = make_record()
    await journal.create(record)
    await journal.replace(advance(record, Event.STARTING_ACKED, 2000))
    await journal.write_claim(make_claim())
    await journal.write_session(make_session())
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.req("R30", "R70")
@pytest.mark.parametrize("which", ["", "offers"])
async def test_a_directory_open_to_others_is_refused(root: Path, journal: FileJournal, which: str) -> None:
    (root / which).chmod(0o750)
    with pytest.raises(Corrupt, match="chmod 0700"):
        await journal_of(root).open()


@pytest.mark.req("R31", "R70")
async def test_a_record_open_to_others_is_refused(root: Path, journal: FileJournal) -> None:
    await journal.create(make_record())
    (root / "offers" / "offer-1.json").chmod(0o640)
    with pytest.raises(Corrupt, match="chmod 0600"):
        await journal.read("offer-1")
    with pytest.raises(Corrupt, match="chmod 0600"):
        await journal.page()
    with pytest.raises(Corrupt, match="chmod 0600"):
        await journal.replace(advance(make_record(), Event.STARTING_ACKED, 2000))


@pytest.mark.req("R32", "R33", "R34", "R68")
async def test_create_links_and_replace_renames_after_the_sync(
    root: Path, journal: FileJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, target = make_record(), root / "offers" / "offer-1.json"
    calls = record_calls(monkeypatch)
    await journal.create(record)
    await journal.replace(advance(record, Event.STARTING_ACKED, 2000))
    written = [("write", "temporary"), ("fsync", "temporary")]
    assert [call for call in calls if call[1] != "" and not call[1].startswith(("pipe", "socket", "anon"))] == [
        *written,
        ("link", f"temporary -> {target}"),
        ("fsync", str(target.parent)),
        ("unlink", "temporary"),
        *written,
        ("rename", f"temporary -> {target}"),
        ("fsync", str(target.parent)),
    ]


def completed_calls(trace: str) -> list[str]:
    """The system calls of a trace of several threads, the halves of an interrupted line put together."""
    begun: dict[str, str] = {}
    calls = []
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
        elif call.startswith("<... "):
            calls.append(begun.pop(thread, "") + call.partition(" resumed>")[2])
        elif call[0].isalpha():
            calls.append(call)
    return calls


@pytest.mark.skipif(shutil.which("strace") is None, reason="a trace of system calls needs strace")
@pytest.mark.req("R9", "R32", "R34", "R42", "R43", "R44", "R45", "R68", "R69")
def test_a_trace_shows_syncs_before_publications_and_no_watcher_timer_database_or_process(root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-s", "64", "-o", str(trace), "-e", "trace=all"]
    command += [sys.executable, "-m", "tests.adapters.journal_process", "operate", str(root)]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, check=False)
    if b"ptrace" in result.stderr:
        pytest.skip("this system does not let a test trace a process")
    assert result.returncode == 0, result.stderr
    steps = completed_calls(trace.read_text("utf-8", "replace"))
    begin, end = (next(number for number, step in enumerate(steps) if f'"{word}\\n"' in step) for word in ("begin", "end"))
    steps = steps[begin + 1 : end]
    names = [step.partition("(")[0] for step in steps]
    forbidden = ("inotify", "fanotify", "timer", "setitimer", "alarm", "socket", "connect", "fork", "vfork", "execve")
    assert not [name for name in names if name.startswith(forbidden)]
    # A thread of this process is no new one.
    assert not [step for step in steps if step.startswith("clone") and "CLONE_THREAD" not in step]
    opened = [step for step in steps if step.startswith("openat") and ".tmp" not in step and " = -1 " not in step]
    assert all(str(root) in step for step in opened)
    shown = [
        (name, ".tmp" in step)
        for name, step in zip(names, steps, strict=True)
        if name in {"fsync", "link", "linkat", "rename", "renameat"}
    ]
    kinds = [("link" if name.startswith("link") else name.removesuffix("at"), temporary) for name, temporary in shown]
    create = [("fsync", True), ("link", True), ("fsync", False)]
    replace = [("fsync", True), ("rename", True), ("fsync", False)]
    assert kinds == [*create, *replace * 3, ("fsync", False)]


@pytest.mark.req("R43", "R44", "R45", "R69")
async def test_the_journal_leaves_no_timer_no_open_file_and_no_process(root: Path, journal: FileJournal) -> None:
    def descriptors() -> set[str]:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except FileNotFoundError:
                continue
        return {link for link in links if str(root) in link or "socket" in link}

    before = descriptors()
    await settle(journal, "offer-1")
    await journal.page()
    assert descriptors() == before
    assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
    assert "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).strip() == ""


@pytest.mark.req("R35", "R40", "R41", "R70")
async def test_the_default_capacity_is_64_and_a_full_journal_evicts_nothing(root: Path, journal: FileJournal) -> None:
    for number in range(64):
        await journal.create(make_record(f"offer-{number}"))
    before = contents(root)
    with pytest.raises(CapacityExceeded, match="64"):
        await journal.create(make_record("offer-64"))
    assert contents(root) == before
    with pytest.raises(Conflict):
        await journal.create(make_record("offer-63"))


@pytest.mark.req("R41")
async def test_settled_records_count_until_they_are_removed(root: Path) -> None:
    journal = journal_of(root, capacity=1)
    await journal.open()
    record = await settle(journal, "offer-1")
    with pytest.raises(CapacityExceeded):
        await journal.create(make_record("offer-2"))
    assert await journal.remove("offer-1", record.revision)
    await journal.create(make_record("offer-2"))


@pytest.mark.req("R36")
@pytest.mark.parametrize("capacity", [0, -1, 1025])
def test_a_capacity_out_of_bounds_is_refused(root: Path, capacity: int) -> None:
    with pytest.raises(Misconfigured, match="1 to 1024"):
        journal_of(root, capacity=capacity)


@pytest.mark.req("R36")
@pytest.mark.parametrize("capacity", [1, 1024])
def test_the_bounds_of_the_capacity_are_allowed(root: Path, capacity: int) -> None:
    journal_of(root, capacity=capacity)


@pytest.mark.req("R47")
async def test_of_100_parallel_creations_exactly_64_succeed(root: Path) -> None:
    journal = journal_of(root, threads=8)
    await journal.open()
    results: list[str] = []

    async def create(number: int) -> None:
        try:
            await journal.create(make_record(f"offer-{number:03}"))
            results.append("created")
        except CapacityExceeded:
            results.append("full")

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(create, number)
    assert (results.count("created"), results.count("full")) == (64, 36)
    assert len(contents(root)) == 64


def record_of_size(size: int) -> InboxRecord:
    """An accepted record whose file has exactly `size` bytes."""
    record = make_record()
    missing = size - len(record.to_json()) - 1
    offer = msgspec.structs.replace(record.offer, delivery_kind=record.offer.delivery_kind + "x" * missing)
    return accept(offer, 1000)


@pytest.mark.req("R37")
async def test_a_record_is_at_most_192_kib(root: Path, journal: FileJournal) -> None:
    with pytest.raises(Refused, match="196608"):
        await journal.create(record_of_size(192 * 1024 + 1))
    assert contents(root) == {}
    await journal.create(record_of_size(192 * 1024))
    assert len(contents(root)["offers/offer-1.json"]) == RECORD_BYTES == 192 * 1024
    assert await journal.read("offer-1") == record_of_size(192 * 1024)
    with pytest.raises(Refused):
        await journal.replace(advance(record_of_size(192 * 1024), Event.STARTING_ACKED, 2000))


@pytest.mark.req("R38")
@pytest.mark.parametrize("limit", [-1, 0, 65])
async def test_a_page_is_of_1_to_64_records(journal: FileJournal, limit: int) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        await journal.page(limit=limit)
    assert (await journal.page(limit=64)).records == []


@pytest.mark.req("R39", "R70", "R72")
async def test_pages_have_no_gap_and_no_repeat_while_records_come_and_go(root: Path) -> None:
    journal = journal_of(root, capacity=1024)
    await journal.open()
    names = [f"offer-{number:03}" for number in range(0, 400, 2)]
    for name in names:
        path = root / "offers" / f"{name}.json"
        durable.publish_new(path, make_record(name).to_json() + b"\n", temporaries=root)
    seen: list[str] = []
    after = None
    while True:
        page = await journal.page(after, 16)
        assert len(page.records) <= 16
        seen += [record.offer_id for record in page.records]
        if page.next_after is None:
            break
        after = page.next_after
        # One before the cursor and one behind it, as a running worker inserts them.
        place = names.index(after)
        if place < 160:
            await journal.create(make_record(f"offer-{2 * place - 1:03}"))
            await journal.create(make_record(f"offer-{2 * place + 35:03}"))
    assert seen == sorted(set(seen))
    assert set(names) <= set(seen)


@pytest.mark.req("R39")
async def test_pages_are_in_code_unit_order_and_the_cursor_need_not_exist(journal: FileJournal) -> None:
    names = ["B", "a", "Z-1", "_x", "0", "a.b", "a:b", "a-b"]
    for name in names:
        await journal.create(make_record(name))
    assert [record.offer_id for record in (await journal.page()).records] == sorted(names)
    assert [record.offer_id for record in (await journal.page("Z")).records] == [name for name in sorted(names) if name > "Z"]
    page = await journal.page(limit=8)
    assert page.next_after is None
    assert (await journal.page(limit=7)).next_after == sorted(names)[6]
    assert (await journal.page("zzz")).records == []


def intruder_file(offers: Path) -> None:
    (offers / "notes.txt").touch(0o600)


def intruder_directory(offers: Path) -> None:
    (offers / "offer-2.json").mkdir()


def intruder_link(offers: Path) -> None:
    (offers / "offer-2.json").symlink_to(offers / "offer-1.json")


def intruder_name(offers: Path) -> None:
    (offers / "offer 2.json").touch(0o600)


@pytest.mark.parametrize("intrude", [intruder_file, intruder_directory, intruder_link, intruder_name])
async def test_anything_but_a_record_makes_the_listing_fail(
    root: Path, journal: FileJournal, intrude: Callable[[Path], None]
) -> None:
    await journal.create(make_record())
    intrude(root / "offers")
    with pytest.raises(Corrupt, match="move it away"):
        await journal.page()
    with pytest.raises(Corrupt, match="move it away"):
        await journal.create(make_record("offer-3"))
    assert await journal.read("offer-1") == make_record()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: b"\x00" * len(data),
    "another state": lambda data: data.replace(b'"accepted"', f'"{TOKEN}"'.encode()),
    "an extra member": lambda data: data.replace(b'{"schemaVersion"', b'{"extra":1,"schemaVersion"'),
    "another version": lambda data: data.replace(b'"schemaVersion":1', b'"schemaVersion":2'),
    "another offer": lambda data: data.replace(b'"offer-1"', b'"offer-2"'),
    "not text": lambda data: data.replace(b"offer-1", b"offer-\xff"),
    "too long": lambda data: data + b" " * RECORD_BYTES,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_a_damaged_record_is_named_but_neither_shown_nor_touched(
    root: Path, journal: FileJournal, damage: Callable[[bytes], bytes]
) -> None:
    await journal.create(make_record())
    path = root / "offers" / "offer-1.json"
    path.write_bytes(damage(path.read_bytes()))
    before = contents(root)
    for operation in (
        lambda: journal.read("offer-1"),
        journal.page,
        lambda: journal.replace(advance(make_record(), Event.STARTING_ACKED, 2000)),
        lambda: journal.remove("offer-1", 0),
    ):
        with pytest.raises(Corrupt, match=r"offer-1\.json") as caught:
            await operation()
        assert TOKEN not in str(caught.value)
        assert caught.value.__cause__ is None
    assert contents(root) == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "x" * 129])
async def test_an_impossible_id_is_refused_before_any_file_is_touched(journal: FileJournal, name: str) -> None:
    with pytest.raises(ValueError, match="offerId"):
        await journal.read(name)
    with pytest.raises(ValueError, match="offerId"):
        await journal.remove(name, 0)


@pytest.mark.req("R60", "R71")
async def test_one_file_passes_the_acknowledgements_and_the_barrier_by_revision(root: Path, journal: FileJournal) -> None:
    record = make_record()
    await journal.create(record)
    for event, members in (
        (Event.STARTING_ACKED, {}),
        (
            Event.BARRIER_RAISED,
            {
                "executor_started_at_ms": 5,
                "log_artifact_id": "wlog-" + "a" * 30,
                "completion_receipt_callback_sequence": 1,
                "completion_receipt_token_digest": DIGEST,
            },
        ),
        (Event.HANDLE_RECORDED, {"executor_handle": "ql3lp1.h"}),
        (Event.RUNNING_ACKED, {}),
        (Event.COMPLETION_ACKED, {"completion_acknowledged_at_ms": 9}),
    ):
        stale = record
        record = advance(record, event, 2000, **members)
        await journal.replace(record)
        assert await journal.read("offer-1") == record
        before = contents(root)
        for wrong in (record, stale, msgspec.structs.replace(record, revision=record.revision + 2)):
            with pytest.raises(Conflict):
                await journal.replace(wrong)
        assert contents(root) == before
    assert set(contents(root)) == {"offers/offer-1.json"}
    with pytest.raises(Conflict, match="cannot move"):
        await journal.replace(msgspec.structs.replace(make_record(), revision=record.revision + 1, updated_at_ms=9000))


async def test_a_record_that_is_not_there_is_not_replaced(root: Path, journal: FileJournal) -> None:
    with pytest.raises(Conflict, match="not in the journal"):
        await journal.replace(advance(make_record(), Event.STARTING_ACKED, 2000))
    assert contents(root) == {}


@pytest.mark.req("R74")
async def test_only_a_settled_record_of_that_revision_is_removed(root: Path, journal: FileJournal) -> None:
    record = make_record()
    await journal.create(record)
    for following in settled(record):
        with pytest.raises(Conflict, match="settled"):
            await journal.remove("offer-1", record.revision)
        await journal.replace(following)
        record = following
    assert not await journal.remove("offer-1", record.revision - 1)
    assert not await journal.remove("offer-1", record.revision + 1)
    assert await journal.read("offer-1") == record
    assert await journal.remove("offer-1", record.revision)
    assert not await journal.remove("offer-1", record.revision)
    assert contents(root) == {}


@pytest.mark.req("R46")
async def test_mutations_run_one_at_a_time_in_the_order_of_their_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(root, threads=8)
    await journal.open()
    order: list[str] = []
    inside = most = 0
    lock = threading.Lock()

    def counted(real: Any) -> Any:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            order.append(path.stem)
            result = real(path, *arguments, **options)
            with lock:
                inside -= 1
            return result

        return call

    for name in ("publish_new", "replace", "remove"):
        monkeypatch.setattr(durable, name, counted(getattr(durable, name)))
    called: list[str] = []

    async def run(number: int) -> None:
        record = make_record(f"offer-{number}")
        called.append(record.offer_id)
        await journal.create(record)
        for record in settled(record):  # noqa: B020
            called.append(record.offer_id)
            await journal.replace(record)
        called.append(record.offer_id)
        await journal.remove(record.offer_id, record.revision)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(run, number)
    assert most == 1
    assert len(order) == 50
    assert order == called


@pytest.mark.req("R49")
async def test_reads_do_not_queue_behind_each_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(root, threads=3)
    await journal.open()
    await journal.create(make_record())
    meeting = threading.Barrier(3)
    real = durable.read_private

    def read(path: Path, limit: int) -> bytes:
        meeting.wait(60)
        return real(path, limit)

    monkeypatch.setattr(durable, "read_private", read)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.read, "offer-1")
        nursery.start_soon(journal.read, "offer-1")
        nursery.start_soon(journal.page)


async def test_a_read_does_not_wait_for_a_mutation(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(root, threads=2)
    await journal.open()
    await journal.create(make_record())
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    real = durable.replace

    def slow(*arguments: Any, **options: Any) -> None:
        token.run_sync_soon(begun.set)
        go_on.wait(60)
        real(*arguments, **options)

    monkeypatch.setattr(durable, "replace", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.replace, advance(make_record(), Event.STARTING_ACKED, 2000))
        await begun.wait()
        assert await journal.read("offer-1") == make_record()
        go_on.set()


async def test_a_mutation_that_began_is_ended_whatever_is_cancelled(
    root: Path, journal: FileJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    real = durable.publish_new

    def slow(*arguments: Any, **options: Any) -> None:
        token.run_sync_soon(begun.set)
        go_on.wait(60)
        real(*arguments, **options)

    monkeypatch.setattr(durable, "publish_new", slow)
    finished = False
    async with trio.open_nursery() as nursery:

        async def create() -> None:
            nonlocal finished
            await journal.create(make_record())
            finished = True

        nursery.start_soon(create)
        await begun.wait()
        nursery.cancel_scope.cancel()
        go_on.set()
    assert finished
    assert await journal.read("offer-1") == make_record()


@pytest.mark.req("R85")
async def test_ownership_is_asked_again_right_before_the_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ownership = Owned()
    journal = journal_of(root, ownership=ownership)
    await journal.open()
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    real = durable.publish_new

    def slow(*arguments: Any, **options: Any) -> None:
        token.run_sync_soon(begun.set)
        go_on.wait(60)
        real(*arguments, **options)

    monkeypatch.setattr(durable, "publish_new", slow)
    refused: list[str] = []

    async def second() -> None:
        with pytest.raises(OwnershipLost):
            await journal.create(make_record("offer-2"))
        refused.append("offer-2")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.create, make_record("offer-1"))
        await begun.wait()
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        ownership.lost = True
        go_on.set()
    assert refused == ["offer-2"]
    assert set(contents(root)) == {"offers/offer-1.json"}


@pytest.mark.req("R34", "R70")
def test_a_writer_that_is_killed_leaves_the_old_or_the_new_record_never_a_part(root: Path) -> None:
    command = [sys.executable, "-m", "tests.adapters.journal_process", "write", str(root)]
    path = root / "offers" / "offer-1.json"
    said = 0
    for _ in range(12):
        with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            goal = said + 5
            for line in child.stdout:
                said = int(line)
                if said >= goal:
                    break
            child.send_signal(signal.SIGKILL)
            said = max([said, *(int(line) for line in child.stdout.read().split(b"\n")[:-1] if line)])
        stored = msgspec.json.decode(durable.read_private(path, RECORD_BYTES), type=InboxRecord)
        assert stored.revision in {said, said + 1}
        assert stored == msgspec.structs.replace(make_record(), revision=stored.revision)
        said = stored.revision


async def test_what_a_crash_left_unpublished_is_removed_when_the_journal_is_opened(root: Path, journal: FileJournal) -> None:
    await journal.create(make_record())
    before = contents(root)
    for name in ("offer-1.json", "pending-claim.json"):
        (root / f".{name}.{'0' * 32}.tmp").write_bytes(b"{")
    assert await journal_of(root).open() == 2
    assert contents(root) == before


@pytest.mark.req("R536")
async def test_a_full_disk_refuses_new_records_and_keeps_the_others(root: Path) -> None:
    root.mkdir(0o700)
    with small_disk(root, size="64k"):
        journal = journal_of(root)
        await journal.open()
        created = 0
        with pytest.raises(OSError, match="No space") as caught:
            for number in range(64):
                await journal.create(make_record(f"offer-{number:02}"))
                created += 1
        assert caught.value.errno == errno.ENOSPC
        assert 0 < created < 64
        assert not [name for name in contents(root) if name.endswith(".tmp")]
        assert len((await journal.page(limit=64)).records) == created
        with pytest.raises(OSError, match="No space"):
            await journal.replace(advance(make_record("offer-00"), Event.STARTING_ACKED, 2000))
        assert await journal.read("offer-00") == make_record("offer-00")
        (root / "offers" / f"offer-{created - 1:02}.json").unlink()
        await journal.replace(advance(make_record("offer-00"), Event.STARTING_ACKED, 2000))


async def test_a_read_only_disk_is_read_and_nothing_is_lost(root: Path) -> None:
    root.mkdir(0o700)
    with small_disk(root, size="256k") as disk:
        journal = journal_of(root)
        await journal.open()
        await journal.create(make_record())
        disk.make_read_only()
        following = advance(make_record(), Event.STARTING_ACKED, 2000)
        for operation in (lambda: journal.create(make_record("offer-2")), lambda: journal.replace(following)):
            with pytest.raises(OSError, match="Read-only"):
                await operation()
        assert (await journal.page()).records == [make_record()]
        disk.make_writable()
        await journal.replace(following)
        assert await journal.read("offer-1") == following


STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "replace", "remove"]), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6
)
MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
CHAIN = [make_record(), *settled(make_record())]


@pytest.mark.req("R48")
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans=st.lists(STEPS, min_size=2, max_size=4))
def test_any_interleaving_of_mutations_equals_a_serial_order(plans: list[list[tuple[str, int, int]]]) -> None:
    import tempfile

    def record(offer: int, revision: int) -> InboxRecord:
        return msgspec.structs.replace(CHAIN[revision], offer=make_offer(f"offer-{offer}"))

    def expected(model: dict[int, int], kind: str, offer: int, revision: int) -> str:
        stored = model.get(offer)
        if kind == "create":
            if stored is not None or revision:
                return "Conflict"
            if len(model) >= 2:
                return "CapacityExceeded"
            model[offer] = 0
        elif kind == "replace":
            if stored is None or revision != stored + 1:
                return "Conflict"
            model[offer] = revision
        elif stored is None:
            return "False"
        elif stored < 3:
            return "Conflict"
        elif revision != stored:
            return "False"
        else:
            del model[offer]
            return "True"
        return "None"

    async def scenario(root: Path) -> None:
        journal = journal_of(root, threads=4, capacity=2)
        await journal.open()
        called: list[tuple[str, int, int]] = []
        results: dict[int, str] = {}

        async def run(plan: list[tuple[str, int, int]]) -> None:
            for kind, offer, revision in plan:
                number = len(called)
                called.append((kind, offer, revision))
                try:
                    if kind == "remove":
                        results[number] = str(await journal.remove(f"offer-{offer}", revision))
                    else:
                        operation = journal.create if kind == "create" else journal.replace
                        results[number] = str(await operation(record(offer, revision)))
                except QlworkerError as error:
                    results[number] = type(error).__name__

        async with trio.open_nursery() as nursery:
            for plan in plans:
                nursery.start_soon(run, plan)
        model: dict[int, int] = {}
        assert [results[number] for number in range(len(called))] == [expected(model, *call) for call in called]
        stored = {each.offer_id: each for each in (await journal.page()).records}
        assert stored == {f"offer-{offer}": record(offer, revision) for offer, revision in model.items()}

    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        trio.run(scenario, Path(directory))


def make_claim(**changes: Any) -> PendingClaim:
    claim = PendingClaim(
        schema_version=1,
        revision=0,
        worker_id="edge-1",
        worker_session_id=SESSION_ID,
        worker_generation=2,
        offer_id="offer-1",
        lease_token=TOKEN,
        attempt_count=0,
        created_at_ms=1000,
        updated_at_ms=1000,
        last_attempt_at_ms=None,
        next_attempt_at_ms=1000,
    )
    return msgspec.structs.replace(claim, **changes)


def make_session(**changes: Any) -> StoredSession:
    session = StoredSession(
        schema_version=1,
        worker_id="edge-1",
        session_id=SESSION_ID,
        generation=2,
        capabilities_json="{}",
        capabilities_hash=DIGEST,
        max_concurrent_runs=1,
        lease_duration_ms=30_000,
        anchor=Anchor(boot_id="boot", server_ms=5, boot_ms=6),
    )
    return msgspec.structs.replace(session, **changes)


async def test_a_claim_is_durable_and_goes_on_by_one_revision_with_the_same_pair(root: Path, journal: FileJournal) -> None:
    assert await journal.read_claim() is None
    claim = make_claim()
    await journal.write_claim(claim)
    following = claim.attempted(2000)
    await journal.write_claim(following)
    reopened = journal_of(root)
    assert await reopened.read_claim() == following
    assert contents(root)["pending-claim.json"] == following.to_json() + b"\n"
    later = following.attempted(3000)
    other = "another_lease_capability_00000000000000000000000001"
    for wrong in (
        following,
        msgspec.structs.replace(later, revision=9),
        msgspec.structs.replace(later, lease_token=other),
        msgspec.structs.replace(later, offer_id="offer-2"),
        msgspec.structs.replace(later, attempt_count=0),
    ):
        with pytest.raises(Conflict) as caught:
            await journal.write_claim(wrong)
        assert TOKEN not in str(caught.value)
        assert other not in str(caught.value)
    assert await journal.read_claim() == following


async def test_a_claim_is_removed_only_by_its_offer_and_revision(root: Path, journal: FileJournal) -> None:
    claim = make_claim()
    await journal.write_claim(claim)
    await journal.remove_claim(claim.attempted(2000))
    await journal.remove_claim(make_claim(offer_id="offer-2"))
    assert await journal.read_claim() == claim
    await journal.remove_claim(claim)
    assert await journal.read_claim() is None
    await journal.remove_claim(claim)
    await journal.write_claim(make_claim(offer_id="offer-2"))
    assert contents(root).keys() == {"pending-claim.json"}


async def test_a_kill_between_inbox_and_claim_leaves_both_so_that_the_replay_meets_the_record(
    root: Path, journal: FileJournal
) -> None:
    await journal.write_claim(make_claim())
    await journal.create(make_record())
    reopened = journal_of(root)
    await reopened.open()
    claim = await reopened.read_claim()
    assert claim is not None
    with pytest.raises(Conflict):
        await reopened.create(make_record(claim.offer_id))
    assert len((await reopened.page()).records) == 1


@pytest.mark.parametrize("name", ["pending-claim.json", "session.json"])
async def test_a_damaged_claim_or_session_is_named_and_not_shown(root: Path, journal: FileJournal, name: str) -> None:
    (root / name).write_text(f'{{"leaseToken":"{TOKEN}"')
    (root / name).chmod(0o600)
    read = journal.read_claim if name == "pending-claim.json" else journal.read_session
    with pytest.raises(Corrupt, match=name) as caught:
        await read()
    assert TOKEN not in str(caught.value)


async def test_the_session_is_kept_replaced_and_forgotten(root: Path, journal: FileJournal) -> None:
    assert await journal.read_session() is None
    await journal.write_session(make_session())
    await journal.write_session(make_session(generation=3))
    assert await journal_of(root).read_session() == make_session(generation=3)
    await journal.remove_session()
    await journal.remove_session()
    assert await journal.read_session() is None


async def test_the_claim_and_the_session_are_no_offers(journal: FileJournal) -> None:
    await journal.write_claim(make_claim())
    await journal.write_session(make_session())
    assert (await journal.page()).records == []


def test_the_chain_of_these_tests_ends_settled() -> None:
    assert [record.state for record in CHAIN][-1] is State.START_FAILURE_ACKNOWLEDGED


# -- where the sweep stands


@pytest.mark.req("R260")
async def test_the_place_of_the_sweep_is_kept_whole_and_private(root: Path, journal: FileJournal) -> None:
    from qlworker.domain.sweep import SweepPosition

    assert await journal.read_sweep() is None
    for position in (SweepPosition(after="offer-7", due_at_ms=0), SweepPosition(after=None, due_at_ms=5)):
        await journal.write_sweep(position)
        assert await journal.read_sweep() == position
    path = root / "retention.json"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"{")
    with pytest.raises(Corrupt):
        await journal.read_sweep()
