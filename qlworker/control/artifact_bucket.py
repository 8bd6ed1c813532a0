"""Logs in an S3-compatible bucket, for replicas without a common file system. boto3 is loaded only with this module.

A log is spooled to a private temporary file first, because a bucket wants to know an object's length and digest before its
content. An object's name holds the digest of its content, and it is put only if it is absent, so nothing stored ever changes.
Source: control-plane.md §14.
"""

import base64
import hashlib
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import boto3
import botocore.config
import botocore.exceptions
import msgspec

from ..domain.errors import Misconfigured, Transient
from .artifact_store import ArtifactKey
from .config import Bucket
from .private_files import read_private_file

TIMEOUT_S: Final = 10
SPOOL_BYTES: Final = 256 * 1024

_ABSENT: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_EXISTS: Final = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_RANGE: Final = frozenset({"416", "InvalidRange"})


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a credentials file. Never shown."""

    access_key_id: str
    secret_access_key: str

    def __repr__(self) -> str:
        return "<_Keys>"


class BucketUpload:
    """One log on its way into the bucket."""

    def __init__(self, client: Any, bucket: Bucket, key: ArtifactKey) -> None:
        self._client = client
        self._bucket = bucket
        self._key = key
        self._hasher = hashlib.sha256()
        self._length = 0
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - lives as long as this

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        self._spool.write(data)
        self._hasher.update(data)
        self._length += len(data)

    def publish(self) -> str:
        """Puts the object if it is absent and returns the content's SHA-256."""
        sha256 = self._hasher.hexdigest()
        self._spool.seek(0)
        with _translated("store a log in", self._bucket):
            try:
                self._client.put_object(
                    Bucket=self._bucket.name,
                    Key=self._bucket.prefix + self._key.name(sha256),
                    Body=self._spool,
                    ContentLength=self._length,
                    ContentType="application/octet-stream",
                    ChecksumSHA256=base64.b64encode(self._hasher.digest()).decode(),
                    IfNoneMatch="*",
                )
            except botocore.exceptions.ClientError as error:
                if _code(error) not in _EXISTS:
                    raise
        return sha256

    def discard(self) -> None:
        """Forgets the spooled content."""
        self._spool.close()


class ArtifactBucket:
    """Logs below the prefix of a bucket. Raises Misconfigured for a credentials file that cannot be used."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        keys = None if bucket.credentials is None else _read_keys(bucket.credentials)
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=bucket.endpoint or None,
            region_name=bucket.region or None,
            aws_access_key_id=None if keys is None else keys.access_key_id,
            aws_secret_access_key=None if keys is None else keys.secret_access_key,
            config=botocore.config.Config(
                connect_timeout=TIMEOUT_S,
                read_timeout=TIMEOUT_S,
                retries={"mode": "standard", "max_attempts": 3},
                s3={"addressing_style": "path"} if bucket.endpoint else {},
            ),
        )

    def check(self) -> None:
        """Looks for the bucket. Blocks. Raises Transient when it cannot be used."""
        with _translated("use", self._bucket):
            self._client.head_bucket(Bucket=self._bucket.name)

    def begin(self, key: ArtifactKey) -> BucketUpload:
        """A new upload for `key`."""
        return BucketUpload(self._client, self._bucket, key)

    def holds(self, key: ArtifactKey, sha256: str, byte_length: int) -> bool:
        """Whether the object has this content: as the bucket itself computed it, or read again where it does not tell."""
        with _translated("look into", self._bucket):
            try:
                head = self._client.head_object(ChecksumMode="ENABLED", **self._object(key, sha256))
                if head["ContentLength"] != byte_length:
                    return False
                told = head.get("ChecksumSHA256")
                if told is not None:
                    return bool(base64.b64decode(told).hex() == sha256)
                body = self._client.get_object(**self._object(key, sha256))["Body"]
                hasher = hashlib.sha256()
                for chunk in body.iter_chunks(SPOOL_BYTES):
                    hasher.update(chunk)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _ABSENT:
                    return False
                raise
        return hasher.hexdigest() == sha256

    def read(self, key: ArtifactKey, sha256: str, position: int, size: int) -> bytes:
        """Up to `size` bytes from `position`."""
        with _translated("read a log in", self._bucket):
            try:
                wanted = f"bytes={position}-{position + size - 1}"
                content: bytes = self._client.get_object(Range=wanted, **self._object(key, sha256))["Body"].read()
            except botocore.exceptions.ClientError as error:
                if _code(error) in _ABSENT | _RANGE:
                    return b""
                raise
        return content

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        """Removes an object."""
        with _translated("remove a log in", self._bucket):
            self._client.delete_object(**self._object(key, sha256))

    def _object(self, key: ArtifactKey, sha256: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": self._bucket.prefix + key.name(sha256)}


@contextmanager
def _translated(what: str, bucket: Bucket) -> Iterator[None]:
    """boto's errors as ours. Their texts are not passed on: they may quote a request."""
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise Transient(f"cannot {what} the bucket {bucket.name}: it answered {_code(error)}") from None
    except (botocore.exceptions.BotoCoreError, OSError) as error:
        raise Transient(f"cannot {what} the bucket {bucket.name}: {type(error).__name__}") from None


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "nothing"))


def _read_keys(path: Path) -> _Keys:
    try:
        return msgspec.convert(tomllib.loads(read_private_file(path, 4096).decode()), _Keys)
    except (ValueError, msgspec.ValidationError):
        raise Misconfigured(
            f"cannot use {path}: it must be TOML with access_key_id and secret_access_key and nothing else"
        ) from None
