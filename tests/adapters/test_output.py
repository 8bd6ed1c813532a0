"""Output files on real file systems, with real processes that write while the file is cut."""

# Real files are the subject of these tests, and nothing else runs beside them.
# ruff: noqa: ASYNC240

import hashlib
import os
import re
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from qlworker.adapters import durable, output
from qlworker.adapters.output import OutputFiles
from qlworker.domain.errors import Corrupt, Misconfigured, Refused
from tests.adapters.small_disk import small_disk

NAME = "wlog-ab" + "0" * 28
MAXIMUM = 8192
HEAD = MAXIMUM // 2
MARKER = re.compile(rb"\n\[qlworker: (\d+) bytes of output were dropped here: the limit is 8192 bytes\]\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "output"


def files_of(root: Path, **changes: Any) -> OutputFiles:
    arguments: dict[str, Any] = {"maximum_bytes": MAXIMUM, "minimum_free_bytes": 0}
    return OutputFiles(root, **(arguments | {"file_limiter": trio.CapacityLimiter(1)} | changes))


@pytest.fixture
async def files(root: Path) -> OutputFiles:
    opened = files_of(root)
    await opened.open()
    return opened


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def pattern(start: int, size: int) -> bytes:
    """Bytes that tell their own stream position."""
    text = b"".join(b"%07d\n" % number for number in range(start // 8, (start + size) // 8 + 1))
    return text[start % 8 :][:size]


async def test_a_prepared_file_is_empty_private_and_in_the_shard_of_its_id(root: Path, files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    assert path == root / "ab" / f"{NAME}.log"
    status = path.lstat()
    assert (status.st_size, stat.S_IMODE(status.st_mode), status.st_nlink) == (0, 0o600, 1)
    assert {stat.S_IMODE(directory.stat().st_mode) for directory in (root, path.parent)} == {0o700}


async def test_a_second_preparation_keeps_what_was_written(files: OutputFiles) -> None:
    append(await files.prepare(NAME), b"kept")
    assert (await files.prepare(NAME)).read_bytes() == b"kept"


async def test_an_existing_file_above_the_maximum_is_refused(files: OutputFiles) -> None:
    append(await files.prepare(NAME), b"x" * (MAXIMUM + 1))
    with pytest.raises(Refused, match="8192"):
        await files.prepare(NAME)


async def test_an_unsafe_file_is_refused_and_left_alone(root: Path, files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    path.chmod(0o644)
    with pytest.raises(Corrupt, match="chmod 0600"):
        await files.prepare(NAME)
    path.chmod(0o600)
    os.link(path, root / "second")
    with pytest.raises(Corrupt, match="more than one name"):
        await files.prepare(NAME)
    (root / "second").unlink()
    path.rename(root / "aside")
    path.symlink_to(root / "aside")
    for operation in (lambda: files.prepare(NAME), lambda: files.read(NAME, 0, 10), lambda: files.seal(NAME)):
        with pytest.raises(Corrupt, match="not a regular file"):
            await operation()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Corrupt, match="not a regular file"):
        await files.prepare(NAME)


async def test_a_directory_open_to_others_is_refused(root: Path, files: OutputFiles) -> None:
    await files.prepare(NAME)
    (root / "ab").chmod(0o755)
    with pytest.raises(Corrupt, match="chmod 0700"):
        await files.prepare(NAME)
    root.chmod(0o755)
    with pytest.raises(Corrupt, match="chmod 0700"):
        await files.open()


@pytest.mark.parametrize("name", ["", "wlog-", "../x", "wlog-" + "A" * 30, "wlog-" + "a" * 29 + "/"])
async def test_a_name_that_is_no_log_artifact_id_is_refused(files: OutputFiles, name: str) -> None:
    for operation in (
        lambda: files.prepare(name),
        lambda: files.trim(name),
        lambda: files.read(name, 0, 1),
        lambda: files.seal(name),
        lambda: files.remove(name),
    ):
        with pytest.raises(ValueError, match="logArtifactId"):
            await operation()


@pytest.mark.parametrize("maximum", [4095, 64 * 1024 * 1024 + 1])
def test_a_maximum_out_of_bounds_is_refused(root: Path, maximum: int) -> None:
    with pytest.raises(Misconfigured, match="4096 to 67108864"):
        files_of(root, maximum_bytes=maximum)


async def test_too_few_free_bytes_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="64k"):
        fits = files_of(tmp_path, minimum_free_bytes=64 * 1024 - 3 * 4096)
        await fits.prepare(NAME)
        await fits.remove(NAME)
        (tmp_path / "ab").rmdir()
        for minimum in (64 * 1024, 64 * 1024 - MAXIMUM + 1):
            with pytest.raises(Refused, match="bytes free"):
                await files_of(tmp_path, minimum_free_bytes=minimum).prepare(NAME)
        assert list(tmp_path.iterdir()) == []


async def test_too_few_free_inodes_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="1m", inodes=6):
        (tmp_path / "one").touch()
        await files_of(tmp_path).prepare(NAME)
        await files_of(tmp_path).remove(NAME)
        (tmp_path / "two").touch()
        with pytest.raises(Refused, match="no inodes left"):
            await files_of(tmp_path).prepare(NAME)


async def test_a_file_up_to_the_maximum_is_not_touched(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, pattern(0, MAXIMUM))
    await files.trim(NAME)
    assert path.read_bytes() == pattern(0, MAXIMUM)
    assert names(path.parent) == [path.name]


async def test_a_cut_keeps_the_head_shows_the_gap_and_goes_on_with_the_newest_tail(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    written = 0
    for _ in range(5):
        append(path, pattern(written, 3000))
        written += 3000
        await files.trim(NAME)
        assert path.stat().st_size <= MAXIMUM
    data = path.read_bytes()
    assert data[:HEAD] == pattern(0, HEAD)
    assert len(MARKER.findall(data)) == 1
    marker = MARKER.match(data, HEAD)
    assert marker is not None
    tail = data[marker.end() :]
    assert HEAD + int(marker[1]) + len(tail) == written
    assert tail == pattern(written - len(tail), len(tail))


async def test_a_missing_file_is_neither_trimmed_nor_read(files: OutputFiles) -> None:
    await files.trim(NAME)
    assert await files.read(NAME, 5, 10) == (5, b"")


async def test_a_reader_follows_the_stream_across_cuts(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, pattern(0, 6000))
    assert await files.read(NAME, 0, 100) == (0, pattern(0, 100))
    assert await files.read(NAME, 5990, 100) == (5990, pattern(5990, 10))
    assert await files.read(NAME, 6000, 100) == (6000, b"")
    append(path, pattern(6000, 4000))
    await files.trim(NAME)
    # Who had read everything goes on at the marker; who was inside the gap is told where the stream goes on.
    start, data = await files.read(NAME, 10_000, 1000)
    assert start == 10_000
    assert MARKER.fullmatch(data)
    assert await files.read(NAME, 5000, 1000) == (10_000, data)
    assert await files.read(NAME, HEAD - 10, 1000) == (HEAD - 10, pattern(HEAD - 10, 10))
    end = 10_000 + len(data)
    append(path, pattern(10_000, 50))
    assert await files.read(NAME, end, 1000) == (end, pattern(10_000, 50))
    append(path, pattern(10_050, 6000))
    await files.trim(NAME)
    start, data = await files.read(NAME, end + 50, 1000)
    assert start == end + 6050
    assert MARKER.fullmatch(data)
    assert b"11954 bytes" in data
    with pytest.raises(ValueError, match="not negative"):
        await files.read(NAME, -1, 1)


async def test_a_restarted_worker_goes_on_with_the_same_positions_and_totals(root: Path, files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, pattern(0, 9000))
    await files.trim(NAME)
    append(path, pattern(9000, 5000))
    restarted = files_of(root)
    await restarted.open()
    assert await restarted.read(NAME, 0, 99_999) == await files.read(NAME, 0, 99_999)
    assert await restarted.read(NAME, 9000, 99_999) == await files.read(NAME, 9000, 99_999)
    await restarted.trim(NAME)
    assert b"9904 bytes" in path.read_bytes()


@pytest.mark.parametrize("recorded_cuts", [0, 1, 2])
async def test_a_cut_whose_record_was_lost_in_a_crash_is_read_from_the_file(
    root: Path, files: OutputFiles, monkeypatch: pytest.MonkeyPatch, recorded_cuts: int
) -> None:
    path = await files.prepare(NAME)
    for cut in range(recorded_cuts):
        append(path, pattern(cut * 9000, 9000))
        await files.trim(NAME)
    append(path, pattern(recorded_cuts * 9000, 9000))
    start, tail = await files.read(NAME, 0 if recorded_cuts == 0 else HEAD, 99_999)
    end = start + len(tail)

    def crash(*_: object, **__: object) -> None:
        raise OSError(5, "crash")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "replace", crash)
        with pytest.raises(OSError, match="crash"):
            await files.trim(NAME)
    start, marker = await files_of(root).read(NAME, end, 1000)
    assert start == end
    assert f"{(recorded_cuts + 1) * 9000 - HEAD} bytes" in marker.decode()
    assert (await files_of(root).seal(NAME)).truncated


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 7000), min_size=1, max_size=8))
def test_whatever_is_written_between_cuts_every_byte_is_kept_or_counted(sizes: list[int]) -> None:
    import tempfile

    async def scenario(root: Path) -> None:
        files = files_of(root)
        await files.open()
        path = await files.prepare(NAME)
        written = position = 0
        for size in sizes:
            append(path, pattern(written, size))
            written += size
            await files.trim(NAME)
            start, data = await files.read(NAME, position, 99_999)
            assert start >= position
            position = start + len(data)
        data = path.read_bytes()
        marker = MARKER.match(data, HEAD)
        if marker is None:
            assert data == pattern(0, written)
        else:
            tail = data[marker.end() :]
            assert data[:HEAD] == pattern(0, HEAD)
            assert HEAD + int(marker[1]) + len(tail) == written
            assert tail == pattern(written - len(tail), len(tail))
        assert len(data) <= MAXIMUM
        assert (await files.seal(NAME)).truncated is (marker is not None)

    with tempfile.TemporaryDirectory() as directory:
        trio.run(scenario, Path(directory) / "output")


async def test_a_process_that_writes_while_the_file_is_cut_loses_bytes_only_in_the_gap(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    script = "i=0; while [ $i -lt 20000 ]; do printf '%07d\\n' $i; i=$((i+1)); done"
    with path.open("ab") as out:
        child = subprocess.Popen(["sh", "-c", script], stdout=out, stdin=subprocess.DEVNULL)  # noqa: ASYNC220
    done = threading.Event()

    def wait() -> None:
        child.wait()
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    cuts = 0
    while not done.is_set():
        before = path.stat().st_size
        await files.trim(NAME)
        cuts += before > MAXIMUM
    waiter.join()
    await files.trim(NAME)
    assert cuts >= 1
    data = path.read_bytes()
    assert data[:HEAD] == pattern(0, HEAD)
    assert len(MARKER.findall(data)) == 1
    marker = MARKER.match(data, HEAD)
    assert marker is not None
    tail = data[marker.end() :]
    assert tail == pattern(160_000 - len(tail), len(tail))


async def test_a_seal_tells_length_and_digest_and_stays_the_same_for_ever(root: Path, files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, b"\xff\x00 not text")
    sealed = await files.seal(NAME)
    assert sealed.path == path
    assert (sealed.byte_length, sealed.truncated) == (11, False)
    assert sealed.sha256 == hashlib.sha256(b"\xff\x00 not text").hexdigest()
    append(path, b"an orphan speaks")
    assert await files.seal(NAME) == sealed
    restarted = files_of(root)
    await restarted.open()
    assert await restarted.seal(NAME) == sealed


async def test_a_seal_of_many_turns_is_the_digest_of_the_whole(root: Path) -> None:
    files = files_of(root, maximum_bytes=4 * 1024 * 1024)
    await files.open()
    path = await files.prepare(NAME)
    append(path, data := os.urandom(3 * 1024 * 1024 + 17))
    sealed = await files.seal(NAME)
    assert (sealed.byte_length, sealed.sha256) == (len(data), hashlib.sha256(data).hexdigest())


async def test_the_digest_of_a_large_file_lets_other_work_have_the_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = trio.CapacityLimiter(1)
    files = files_of(root, maximum_bytes=4 * 1024 * 1024, file_limiter=limiter)
    await files.open()
    append(await files.prepare(NAME), b"\x00" * (4 * 1024 * 1024))
    order: list[str] = []
    hashing, waiting = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    real = output._hash

    def hash_part(*arguments: Any) -> int:
        token.run_sync_soon(hashing.set)
        waiting.wait(60)
        order.append("part")
        return real(*arguments)

    monkeypatch.setattr(output, "_hash", hash_part)

    async def other() -> None:
        await trio.to_thread.run_sync(lambda: None, limiter=limiter)
        order.append("other")

    async def seal() -> None:
        await files.seal(NAME)
        order.append("seal")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(seal)
        await hashing.wait()
        nursery.start_soon(other)
        await trio.testing.wait_all_tasks_blocked()
        waiting.set()
    assert order[:2] == ["part", "other"]
    assert order.count("part") > 4
    assert order[-1] == "seal"


async def test_the_content_is_synced_before_its_seal_is_published(files: OutputFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await files.prepare(NAME)
    append(path, b"1")
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def watched_link(source: Any, target: Any, **options: Any) -> None:
        calls.append("link")
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    await files.seal(NAME)
    assert calls[0] == path.name
    assert calls.index(path.name) < calls.index("link")


async def test_a_file_above_the_maximum_is_cut_before_it_is_sealed(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, b"x" * 3 * MAXIMUM)
    sealed = await files.seal(NAME)
    assert sealed.truncated
    assert sealed.byte_length == path.stat().st_size <= MAXIMUM
    assert sealed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


async def test_after_the_seal_a_cut_takes_only_what_came_later(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    append(path, pattern(0, MAXIMUM - 10))
    sealed = await files.seal(NAME)
    append(path, b"y" * 3 * MAXIMUM)
    await files.trim(NAME)
    assert path.read_bytes() == pattern(0, MAXIMUM - 10)
    assert await files.seal(NAME) == sealed


async def test_a_file_that_a_power_cut_took_is_sealed_as_empty_and_truncated(files: OutputFiles) -> None:
    sealed = await files.seal(NAME)
    assert (sealed.byte_length, sealed.truncated, sealed.sha256) == (0, True, hashlib.sha256().hexdigest())
    assert sealed.path.read_bytes() == b""
    assert await files.seal(NAME) == sealed


async def test_a_damaged_seal_is_named(files: OutputFiles) -> None:
    path = await files.prepare(NAME)
    await files.seal(NAME)
    (path.parent / f".{NAME}.log.sealed.json").write_text("{")
    with pytest.raises(Corrupt, match="damaged"):
        await files.seal(NAME)


async def test_a_removal_takes_the_file_and_what_is_beside_it_and_is_idempotent(root: Path, files: OutputFiles) -> None:
    other = "wlog-ab" + "1" * 28
    await files.prepare(other)
    append(await files.prepare(NAME), b"x" * 3 * MAXIMUM)
    await files.seal(NAME)
    assert len(names(root / "ab")) == 4
    await files.remove(NAME)
    assert names(root / "ab") == [f"{other}.log"]
    await files.remove(NAME)
    await files.remove("wlog-ff" + "0" * 28)


async def test_what_a_crash_left_unpublished_is_removed_at_the_start(root: Path, files: OutputFiles) -> None:
    (root / f"..{NAME}.log.cut.json.{'0' * 32}.tmp").touch()
    assert await files.open() == 1
    assert list(root.iterdir()) == []
