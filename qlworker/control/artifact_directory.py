"""Logs in a directory: of one control plane, or of replicas that share a file system (control-plane.md §14)."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import IO, Final

from .artifact_store import ArtifactKey
from .private_files import make_private_directory, sync_directory

READ_BYTES: Final = 1024 * 1024


class DirectoryUpload:
    """One log on its way into the directory."""

    def __init__(self, directory: Path, key: ArtifactKey) -> None:
        self._directory = directory
        self._key = key
        self._temporary = directory / f".{secrets.token_hex(16)}.tmp"
        self._hasher = hashlib.sha256()
        self._file: IO[bytes] = os.fdopen(
            os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        )

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        self._file.write(data)
        self._hasher.update(data)

    def publish(self) -> str:
        """Makes the content durable under its own name and returns its SHA-256. The same content twice is one file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = self._hasher.hexdigest()
        target = self._directory / self._key.name(sha256)
        make_private_directory(target.parent)
        self._temporary.replace(target)
        sync_directory(target.parent)
        return sha256

    def discard(self) -> None:
        """Removes what was not published. May be called after `publish` and twice."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class ArtifactDirectory:
    """Logs below `directory`, two levels deep."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, key: ArtifactKey) -> DirectoryUpload:
        """A new upload for `key`. Blocks. Raises OSError when the disk does not take it."""
        make_private_directory(self._directory)
        return DirectoryUpload(self._directory, key)

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

    def read(self, key: ArtifactKey, sha256: str, position: int, size: int) -> bytes:
        """Up to `size` bytes from `position`. Blocks."""
        try:
            with self.path(key, sha256).open("rb") as file:
                file.seek(position)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        """Removes a content. Blocks."""
        self.path(key, sha256).unlink(missing_ok=True)

    def path(self, key: ArtifactKey, sha256: str) -> Path:
        """Where the content with digest `sha256` lies, or would lie."""
        return self._directory / key.name(sha256)
