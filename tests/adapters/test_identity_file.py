"""Certificate and key in one file: what it says, and how both are replaced at once."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio

from qlworker.adapters import identity_file
from qlworker.adapters.identity_file import IdentityFile, read_validity
from qlworker.control.pki import Identity, sign_request
from qlworker.domain.errors import Misconfigured, Refused
from tests.pki import authority, dated_identity, worker_identity

NOW = datetime.now(UTC).replace(microsecond=0)


def ending(days: int) -> Identity:
    return dated_identity(authority(), "edge-1", NOW - timedelta(days=1), NOW + timedelta(days=days))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "identity.pem"
    identity = ending(1)
    file.touch(0o600)
    file.write_bytes(identity.certificate + identity.key)
    return file


def only_file_beside(path: Path) -> bytes:
    """The content of the one file there is."""
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_bytes()


def opened(path: Path, key: Path | None = None) -> IdentityFile:
    return IdentityFile("edge-1", path, key or path, trio.CapacityLimiter(1))


async def test_a_signed_request_takes_the_place_of_the_present_identity(path: Path) -> None:
    file = opened(path)
    key, request = await file.new_request()
    signed = sign_request(authority(), request.encode(), "edge-1", 30)

    await file.install(signed.certificate.decode(), key)

    assert only_file_beside(path) == signed.certificate + key
    assert (await file.validity()).not_after_ms == signed.not_after_ms


async def test_a_certificate_for_another_key_changes_nothing(path: Path) -> None:
    before = only_file_beside(path)

    with pytest.raises(Refused, match="not for the key of this box"):
        await opened(path).install(ending(30).certificate.decode(), ending(30).key)

    assert only_file_beside(path) == before


@pytest.mark.parametrize("days", [0, 1])
async def test_a_certificate_that_does_not_last_longer_changes_nothing(path: Path, days: int) -> None:
    before, following = only_file_beside(path), ending(days)

    with pytest.raises(Refused, match="does not last longer"):
        await opened(path).install(following.certificate.decode(), following.key)

    assert only_file_beside(path) == before


async def test_a_full_disk_leaves_the_present_identity(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, following = only_file_beside(path), ending(30)

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(identity_file.durable, "replace", full)
    with pytest.raises(OSError, match="No space"):
        await opened(path).install(following.certificate.decode(), following.key)

    assert only_file_beside(path) == before


async def test_two_files_are_not_replaced(path: Path) -> None:
    assert opened(path).is_replaceable
    assert not opened(path, path.with_name("key.pem")).is_replaceable


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"\xff"]
)
def test_what_holds_no_certificate_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(Misconfigured, match=r"identity\.pem: it must begin with a PEM certificate"):
        read_validity(path)


def test_a_missing_file_is_named(path: Path) -> None:
    path.unlink()

    with pytest.raises(Misconfigured, match=r"cannot read .*identity\.pem: no such file"):
        read_validity(path)


def test_a_chain_counts_by_its_first_certificate(path: Path) -> None:
    expected = read_validity(path)
    path.write_bytes(path.read_bytes() + worker_identity().certificate)

    assert read_validity(path) == expected
