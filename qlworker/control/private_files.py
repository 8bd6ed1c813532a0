"""Files and directories that only their owner may touch: keys, tokens, the pepper, secrets.

A private file never exists with wider permissions or with half of its content under its own name.
"""

import os
import secrets
import stat
from pathlib import Path

from ..domain.errors import Corrupt, Refused

PEM_BYTES = 1024 * 1024
"""What a file with certificates or a key may hold at most."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private_directory(path: Path) -> None:
    """Makes `path` with mode 0700, and its parents with it. An existing directory must be private already.

    Raises Refused when it is not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        require_private(path, directory=True)


def create_private_file(path: Path, content: bytes) -> None:
    """Writes a new file of mode 0600, durably. Raises FileExistsError, also for a dangling link, and writes nothing then."""
    descriptor = os.open(path, _CREATE, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def replace_private_file(path: Path, content: bytes) -> None:
    """Writes `path` anew with mode 0600 by a rename, so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    create_private_file(temporary, content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_private_file(path: Path, maximum: int) -> bytes:
    """The content of a regular file that nobody but its owner may touch, at most `maximum` bytes.

    Raises Refused when it is missing, open to others, a link or too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        _require(path, os.fstat(descriptor), stat.S_IFREG)
        content = file.read(maximum + 1)
    if len(content) > maximum:
        raise Refused(f"cannot use {path}: it is longer than {maximum} bytes")
    return content


def read_pem(path: Path) -> bytes:
    """The content of a private file of at most PEM_BYTES. Raises as read_private_file does."""
    return read_private_file(path, PEM_BYTES)


def require_private(path: Path, *, directory: bool = False) -> None:
    """Raises Refused unless `path` is a regular file (or a directory) that only its owner may touch."""
    try:
        status = path.lstat()
    except OSError as error:
        raise Refused(f"cannot use {path}: {error.strerror}") from error
    _require(path, status, stat.S_IFDIR if directory else stat.S_IFREG)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:  # pragma: no cover - file systems without directory sync say EINVAL
        raise Corrupt(f"cannot sync the directory {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _require(path: Path, status: os.stat_result, kind: int) -> None:
    name = "directory" if kind == stat.S_IFDIR else "regular file"
    if stat.S_IFMT(status.st_mode) != kind:
        raise Refused(f"cannot use {path}: it is not a {name}")
    if status.st_mode & 0o077:
        mode = 0o700 if kind == stat.S_IFDIR else 0o600
        raise Refused(f"cannot use {path}: mode {stat.S_IMODE(status.st_mode):04o} lets others in; run chmod {mode:04o} on it")
