"""Both places for logs keep one contract: a directory, and a bucket of a real S3-compatible server (moto's, over HTTP)."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from qlworker.control.artifact_bucket import ArtifactBucket
from qlworker.control.artifact_choice import open_store
from qlworker.control.artifact_directory import ArtifactDirectory
from qlworker.control.artifact_retention import sweep_logs
from qlworker.control.artifact_store import ArtifactKey, ArtifactStore
from qlworker.control.config import Artifacts, Bucket, Settings
from qlworker.control.config_file import load
from qlworker.domain.canonical import sha256_hex
from qlworker.domain.errors import Misconfigured, Refused, Transient
from tests.control.fixtures import LOG, Plane

KEY = ArtifactKey("home", "run-1", "attempt-1", "wlog-1")
OTHER = ArtifactKey("home", "run-1", "attempt-2", "wlog-1")
SECRET = "the-secret-access-key"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3-compatible server."""
    running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path) -> Bucket:
    """A new bucket and a private file with its keys."""
    name = f"logs-{tmp_path.name}".lower().replace("_", "-")[-63:].strip("-")
    boto3.client(
        "s3", endpoint_url=server, region_name="us-east-1", aws_access_key_id="me", aws_secret_access_key=SECRET
    ).create_bucket(Bucket=name)
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(f'access_key_id = "me"\nsecret_access_key = "{SECRET}"\n')
    return Bucket(name=name, endpoint=server, region="us-east-1", prefix="ql/", credentials=keys)


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "directory":
        return ArtifactDirectory(tmp_path / "artifacts")
    return ArtifactBucket(request.getfixturevalue("bucket"))


def put(store: ArtifactStore, content: bytes, key: ArtifactKey = KEY) -> str:
    upload = store.begin(key)
    try:
        for at in range(0, len(content), 1000):
            upload.write(content[at : at + 1000])
        return upload.publish()
    finally:
        upload.discard()


@pytest.mark.parametrize("content", [b"", b"one line\n", bytes(range(256)) * 4096], ids=["empty", "short", "1 MiB"])
def test_what_was_published_is_there_and_can_be_read_in_pieces(store: ArtifactStore, content: bytes) -> None:
    sha256 = put(store, content)
    assert sha256 == sha256_hex(content)
    assert store.holds(KEY, sha256, len(content))
    read = b""
    while piece := store.read(KEY, sha256, len(read), 300_000):
        read += piece
    assert read == content


def test_another_content_or_identity_or_length_is_not_held(store: ArtifactStore) -> None:
    sha256 = put(store, b"one")
    assert not store.holds(KEY, sha256, 4)
    assert not store.holds(KEY, sha256_hex(b"two"), 3)
    assert not store.holds(OTHER, sha256, 3)
    assert store.read(OTHER, sha256, 0, 10) == b""


def test_the_same_content_twice_is_kept_once_and_other_content_beside_it(store: ArtifactStore) -> None:
    first, again, other = put(store, b"one"), put(store, b"one"), put(store, b"two")
    assert first == again != other
    assert store.read(KEY, first, 0, 10) == b"one"
    assert store.read(KEY, other, 0, 10) == b"two"
    store.remove(KEY, other)
    store.remove(KEY, other)
    assert store.holds(KEY, first, 3)
    assert not store.holds(KEY, other, 3)


def test_what_was_discarded_was_never_there(store: ArtifactStore, tmp_path: Path) -> None:
    upload = store.begin(KEY)
    upload.write(b"one")
    upload.discard()
    upload.discard()
    assert not store.holds(KEY, sha256_hex(b"one"), 3)
    assert not list((tmp_path / "artifacts").rglob("*.tmp"))


def test_an_object_is_only_put_where_none_is(bucket: Bucket) -> None:
    """Somebody wrote other bytes under the name meanwhile: they are neither replaced nor taken for the log."""
    store = ArtifactBucket(bucket)
    sha256 = sha256_hex(b"one")
    store._client.put_object(Bucket=bucket.name, Key=bucket.prefix + KEY.name(sha256), Body=b"bad")
    put(store, b"one")
    assert store.read(KEY, sha256, 0, 10) == b"bad"
    assert not store.holds(KEY, sha256, 3)


def test_a_bucket_that_is_not_there_is_named_and_no_key_is_told(bucket: Bucket) -> None:
    import msgspec

    missing = msgspec.structs.replace(bucket, name="no-such-bucket")
    with pytest.raises(Transient, match="cannot use the bucket no-such-bucket: it answered 404") as raised:
        open_store(Settings(artifacts=Artifacts(bucket=missing)))
    assert SECRET not in repr(raised.value.__context__) + str(raised.value)
    with pytest.raises(Transient, match="cannot store a log in the bucket no-such-bucket"):
        put(ArtifactBucket(missing), b"one")


def test_a_server_that_does_not_answer_is_an_error_that_can_pass(bucket: Bucket) -> None:
    import msgspec

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store = ArtifactBucket(msgspec.structs.replace(bucket, endpoint=f"http://127.0.0.1:{port}"))
    with pytest.raises(Transient, match="EndpointConnectionError"):
        store.holds(KEY, "0" * 64, 1)


@pytest.mark.parametrize("content", ["", 'access_key_id = "me"\n', "secret", 'access_key_id = "a"\nsecret_access_key = 5\n'])
def test_a_credentials_file_that_cannot_be_used_is_named_without_its_content(bucket: Bucket, content: str) -> None:
    assert bucket.credentials is not None
    bucket.credentials.write_text(content)
    with pytest.raises(Misconfigured, match=r"keys\.toml: it must be TOML") as raised:
        ArtifactBucket(bucket)
    assert "secret_access_key and nothing else" in str(raised.value)


def test_a_credentials_file_that_others_may_read_is_refused(bucket: Bucket) -> None:
    assert bucket.credentials is not None
    bucket.credentials.chmod(0o644)
    with pytest.raises(Refused, match="chmod 0600"):
        ArtifactBucket(bucket)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('name = "A"', "3 to 63"),
        ('name = "logs"\nendpoint = "ftp://x"', "begins with https"),
        ('name = "logs"\nendpoint = "http://example.org"', "only a server on this host"),
        ('name = "logs"\nkey = "x"', "key"),
        ('endpoint = "https://x"', "name"),
    ],
)
def test_a_bucket_that_cannot_be_meant_is_refused(tmp_path: Path, lines: str, reason: str) -> None:
    file = tmp_path / "qlcontrol.toml"
    file.write_text(f"[artifacts.bucket]\n{lines}\n")
    with pytest.raises(Misconfigured, match=reason):
        load(file)


def test_the_credentials_file_is_looked_for_beside_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "qlcontrol.toml"
    file.write_text('[artifacts.bucket]\nname = "logs"\ncredentials = "keys.toml"\n')
    bucket = load(file).artifacts.bucket
    assert bucket is not None
    assert bucket.credentials == tmp_path / "keys.toml"


class Failing(ArtifactDirectory):
    """Removes nothing."""

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        raise OSError("the disk is gone")


async def test_old_logs_of_runs_that_are_over_are_removed_a_page_at_a_time(plane: Plane) -> None:
    held = plane.drive("succeeded")
    key = ArtifactKey(held.project_id, held.run_id, held.attempt_id, held.log_id)
    sha256 = sha256_hex(LOG)
    plane.clock.advance(59_999)
    assert await sweep_logs(plane.database, plane.artifacts, 60_000) == 0
    plane.clock.advance(1)
    with pytest.raises(OSError, match="gone"):
        await sweep_logs(plane.database, Failing(plane.directory), 60_000)
    assert plane.artifacts.holds(key, sha256, len(LOG))
    assert await sweep_logs(plane.database, plane.artifacts, 60_000) == 1
    assert not plane.artifacts.holds(key, sha256, len(LOG))
    assert await sweep_logs(plane.database, plane.artifacts, 60_000) == 0
    assert plane.complete(held).status == "already_completed"  # a repeat is still told what is stored


async def test_the_log_of_a_run_that_is_not_over_stays(plane: Plane) -> None:
    held = plane.drive("running")
    plane.store(held)
    plane.clock.advance(10**9)
    assert await sweep_logs(plane.database, plane.artifacts, 60_000) == 0


def test_without_boto3_a_bucket_is_refused_with_the_remedy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "qlworker.control.artifact_bucket", None)
    settings: Any = Settings(artifacts=Artifacts(bucket=bucket))
    with pytest.raises(Misconfigured, match=r"install qlworker\[control,s3\]"):
        open_store(settings)
