"""Receipts as files: what is read is exactly what a launcher publishes, and nothing else is taken for it."""

import os
from pathlib import Path

import pytest
import trio

from qlworker.adapters.receipts import ReceiptFiles
from qlworker.domain.canonical import b64u
from qlworker.domain.errors import Corrupt
from qlworker.domain.receipt import Ending, Receipt


def make_receipt(attempt_id: str = "attempt-1") -> Receipt:
    return Receipt(
        schema_version=2,
        run_id="run-1",
        attempt_id=attempt_id,
        callback_sequence=1,
        token=b64u(bytes(32)),
        started_at_ms=1,
        finished_at_ms=2,
        exit_code=0,
        ending=Ending.EXITED,
    )


def publish(path: Path, data: bytes, mode: int = 0o600) -> None:
    path.write_bytes(data)
    path.chmod(mode)


@pytest.fixture
def receipts(tmp_path: Path) -> ReceiptFiles:
    return ReceiptFiles(tmp_path / "receipts", trio.CapacityLimiter(1))


async def test_a_published_receipt_is_read_and_removed(receipts: ReceiptFiles) -> None:
    path = receipts.path("attempt-1")
    assert await receipts.read("attempt-1") is None
    publish(path, make_receipt().to_json())
    assert await receipts.read("attempt-1") == make_receipt()
    await receipts.remove("attempt-1")
    assert await receipts.read("attempt-1") is None
    await receipts.remove("attempt-1")


async def test_reading_and_removing_need_no_directory(receipts: ReceiptFiles) -> None:
    assert await receipts.read("never-launched") is None
    await receipts.remove("never-launched")


async def test_a_receipt_of_the_first_schema_is_readable(receipts: ReceiptFiles) -> None:
    text = make_receipt().to_json().replace(b'"schemaVersion":2', b'"schemaVersion":1').replace(b',"ending":"exited"', b"")
    publish(receipts.path("attempt-1"), text)
    receipt = await receipts.read("attempt-1")
    assert receipt is not None
    assert receipt.schema_version == 1
    assert not receipt.says_not_started


def test_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = ReceiptFiles(tmp_path / "deep" / "receipts").path("attempt-1")
    finally:
        os.umask(before)
    assert path == tmp_path / "deep" / "receipts" / "at" / "attempt-1.json"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o750, 0o777])
def test_a_root_that_others_may_enter_is_refused_and_left(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(Corrupt, match="mode 0700"):
        ReceiptFiles(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == mode


def test_a_root_or_shard_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Corrupt, match="directory of this user"):
        ReceiptFiles(tmp_path / "link")
    receipts = ReceiptFiles(tmp_path / "receipts")
    (tmp_path / "receipts" / "at").symlink_to(tmp_path / "real")
    with pytest.raises(Corrupt, match="directory of this user"):
        receipts.path("attempt-1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        make_receipt().to_json()[:-1],
        make_receipt().to_json() + b"{}",
        make_receipt().to_json().replace(b'"exitCode":0', b'"exitCode":256'),
        make_receipt().to_json().replace(b'"exitCode":0', b'"exitCode":0,"extra":1'),
        make_receipt("attempt-2").to_json(),
        make_receipt().to_json() + b" " * 4096,
    ],
    ids=["empty", "no members", "null", "cut", "two", "exit code", "extra", "other attempt", "too large"],
)
async def test_any_other_content_is_corrupt_and_stays(receipts: ReceiptFiles, data: bytes) -> None:
    path = receipts.path("attempt-1")
    publish(path, data)
    with pytest.raises(Corrupt, match="receipt") as caught:
        await receipts.read("attempt-1")
    assert b64u(bytes(32)) not in str(caught.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
async def test_a_receipt_that_others_can_reach_is_corrupt(receipts: ReceiptFiles, mode: int) -> None:
    publish(receipts.path("attempt-1"), make_receipt().to_json(), mode)
    with pytest.raises(Corrupt, match="mode 0600"):
        await receipts.read("attempt-1")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
async def test_a_receipt_of_another_user_is_corrupt(receipts: ReceiptFiles) -> None:
    path = receipts.path("attempt-1")
    publish(path, make_receipt().to_json())
    os.chown(path, 65534, 65534)
    with pytest.raises(Corrupt, match="this user"):
        await receipts.read("attempt-1")


async def test_what_is_not_a_file_is_corrupt_and_never_hangs(receipts: ReceiptFiles, tmp_path: Path) -> None:
    path = receipts.path("attempt-1")
    publish(tmp_path / "elsewhere", make_receipt().to_json())
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt, match="symbolic link"):
        await receipts.read("attempt-1")
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Corrupt, match="regular file"):
        await receipts.read("attempt-1")


@pytest.mark.parametrize("attempt_id", ["", ".", "..", "../x", "a/b", "-a", "a" * 37, "a\0"])
async def test_an_id_that_could_name_another_file_is_refused(receipts: ReceiptFiles, attempt_id: str) -> None:
    with pytest.raises(ValueError, match="attemptId"):
        receipts.path(attempt_id)
    with pytest.raises(ValueError, match="attemptId"):
        await receipts.read(attempt_id)
    with pytest.raises(ValueError, match="attemptId"):
        await receipts.remove(attempt_id)


async def test_removing_takes_the_leftovers_of_that_attempt_alone(receipts: ReceiptFiles) -> None:
    path = receipts.path("attempt-1")
    mine = path.parent / f".attempt-1.{'0' * 32}.tmp"
    other = path.parent / f".attempt-1.x.{'0' * 32}.tmp"
    for each in (path, mine, other):
        publish(each, b"x")
    await receipts.remove("attempt-1")
    assert list(path.parent.iterdir()) == [other]
