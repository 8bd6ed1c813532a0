"""The directory where uploaded logs are kept, write-once and content-addressed.

A file's name is the digest of the log's identity and of its content, so that two uploads under one identity never touch each
other; which of them counts is decided by the row in `artifacts`. A replica-local directory serves one control plane only
(control-plane.md §14).
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import IO, Final

import msgspec

from ..domain.canonical import sha256_hex
from .private_files import make_private_directory, sync_directory

READ_BYTES: Final = 1024 * 1024


class ArtifactKey(msgspec.Struct, frozen=True):
    """What identifies one log."""

    project_id: str
    run_id: str
    attempt_id: str
    log_artifact_id: str

    def digest(self) -> str:
        """A name for it that is safe in any file system."""
        parts = (self.project_id, self.run_id, self.attempt_id, self.log_artifact_id)
        return sha256_hex(b"qlcontrol/artifact\x00" + b"\x00".join(part.encode() for part in parts))


class Upload:
    """One log on its way into the store. `discard` it, or `publish` it; neither leaves a temporary file behind. Blocks."""

    def __init__(self, temporary: Path, target: Path) -> None:
        self._temporary = temporary
        self._target = target
        self._hasher = hashlib.sha256()
        self._file: IO[bytes] = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        self.byte_length = 0

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        self._file.write(data)
        self._hasher.update(data)
        self.byte_length += len(data)

    def publish(self) -> str:
        """Makes the content durable under its own name and returns its SHA-256. The same content twice is one file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = self._hasher.hexdigest()
        self._temporary.replace(self._target.with_name(f"{self._target.name}-{sha256}"))
        sync_directory(self._target.parent)
        return sha256

    def discard(self) -> None:
        """Removes what was not published. May be called after `publish` and twice."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class ArtifactStore:
    """Logs below `directory`, two levels deep."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, key: ArtifactKey) -> Upload:
        """A new upload for `key`. Blocks. Raises OSError when the disk does not take it."""
        make_private_directory(self._directory)
        target = self._target(key)
        make_private_directory(target.parent)
        return Upload(self._directory / f".{secrets.token_hex(16)}.tmp", target)

    def path(self, key: ArtifactKey, sha256: str) -> Path:
        """Where the content with digest `sha256` lies, or would lie."""
        target = self._target(key)
        return target.with_name(f"{target.name}-{sha256}")

    def holds(self, key: ArtifactKey, sha256: str, byte_length: int) -> bool:
        """Whether the stored file really has this content: it is read again. Blocks."""
        hasher, length = hashlib.sha256(), 0
        try:
            with self.path(key, sha256).open("rb") as file:
                while chunk := file.read(READ_BYTES):
                    hasher.update(chunk)
                    length += len(chunk)
        except FileNotFoundError:
            return False
        return length == byte_length and hasher.hexdigest() == sha256

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        """Removes a content that does not count. Blocks."""
        self.path(key, sha256).unlink(missing_ok=True)

    def _target(self, key: ArtifactKey) -> Path:
        digest = key.digest()
        return self._directory / digest[:2] / digest
