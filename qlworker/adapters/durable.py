"""How a file becomes durable, and what makes a private file or directory safe to read. The only place that knows.

Everything here blocks; callers run it in a thread. Every OSError (no space, read-only, damaged medium) passes through after the
temporary file was removed: a reader sees the old content or the new content, never a part. Source: wire-protocol.md §10.1,
R30 to R34, R50, R52, R68.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ..domain.errors import Corrupt, Misconfigured

ROOT_CHARS: Final = 4096

_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{32}\.tmp\Z")
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_SHARED: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "afs", "9p", "glusterfs", "lustre"})
_MOUNT_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class Abilities(msgspec.Struct, frozen=True):
    """What the file system below a directory can do. `file_system` is the kernel's name for it, empty when unknown.

    Without `syncs_directories` only a restart is survived for certain; a power cut may lose the last change (R50).
    """

    hard_links: bool
    atomic_rename: bool
    exclusive_directories: bool
    file_locks: bool
    syncs_directories: bool
    file_system: str

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may see the same files: unsupported, for locks and renames are then not to be trusted."""
        return self.file_system in _SHARED or self.file_system.startswith("fuse.")

    @property
    def is_supported(self) -> bool:
        """Whether a journal may live there at all (R52)."""
        return self.hard_links and self.atomic_rename and self.exclusive_directories and self.file_locks and not self.is_shared


def publish_new(path: Path, data: bytes, *, temporaries: Path, mode: int = 0o600) -> None:
    """Publishes `data` at `path` by a hard link, which never overwrites. Raises FileExistsError when `path` exists.

    When the final sync of the directory fails, the error passes through and the file is complete but perhaps not durable.
    """
    temporary = _write_temporary(path.name, data, temporaries, mode)
    try:
        path.hardlink_to(temporary)
        sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def replace(path: Path, data: bytes, *, temporaries: Path, mode: int = 0o600) -> None:
    """Puts `data` in the place of whatever `path` holds, by a rename on the same file system."""
    temporary = _write_temporary(path.name, data, temporaries, mode)
    try:
        temporary.rename(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def remove(path: Path) -> bool:
    """Removes the file at `path`, durably; says whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    return True


def sync_directory(path: Path) -> bool:
    """Makes the names in a directory durable; False on a file system that cannot (R50)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def read_private(path: Path, limit: int) -> bytes:
    """The content of a private file of at most `limit` bytes. Raises as `open_private` does; no error tells the content."""
    with os.fdopen(open_private(path, os.O_RDONLY), "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= limit and (part := file.read(limit + 1 - len(data))):
            data += part
    if len(data) > limit:
        raise Corrupt(f"{path} is larger than {limit} bytes: move it away")
    return bytes(data)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a private file, which O_CREAT in `flags` makes with mode 0600 (R31).

    Raises FileNotFoundError when there is none, and Corrupt for anything but a regular file of this user that nobody else
    may touch.
    """
    try:
        # Without O_NONBLOCK a FIFO in the place of the file would hold the thread for ever.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise Corrupt(f"{path} is not a regular file: move it away") from None
        raise
    try:
        _verify_file(path, os.fstat(descriptor))
    except Corrupt:
        os.close(descriptor)
        raise
    return descriptor


def _verify_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Corrupt(f"{path} is not a regular file: move it away")
    if status.st_uid != os.geteuid():
        raise Corrupt(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} that runs this: chown it")
    if status.st_mode & 0o077:
        raise Corrupt(f"{path} is open to group or others and is refused, not repaired: check it, then chmod 0600")


def private_directory(path: Path) -> None:
    """Makes the directory with mode 0700, or verifies the one that exists (R28, R30).

    Raises Misconfigured for a relative path or a missing parent, Corrupt for a directory that is not private.
    """
    if not path.is_absolute() or len(str(path)) > ROOT_CHARS:
        raise Misconfigured(f"{path} must be an absolute path of at most {ROOT_CHARS} characters")
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        raise Misconfigured(f"cannot make {path}: {path.parent} does not exist, make it first") from None
    except FileExistsError:
        _verify_directory(path)
        return
    path.chmod(0o700)
    sync_directory(path.parent)


def _verify_directory(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Corrupt(f"{path} is not a directory: move it away (a symbolic link is refused too)")
    if status.st_uid != os.geteuid():
        raise Corrupt(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} that runs this: chown it")
    if status.st_mode & 0o077:
        raise Corrupt(f"{path} is open to group or others and is refused, not repaired: check its files, then chmod 0700")


def remove_temporaries(directory: Path) -> int:
    """Removes what a crash left between writing and publishing, and says how much. Only the owner of the directory may."""
    removed = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if _TEMPORARY.match(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    Path(entry.path).unlink()
                    removed += 1
    return removed


def probe(directory: Path) -> Abilities:
    """Tries out what the file system below an existing directory can do. Raises OSError when it cannot even be written."""
    first = _write_temporary("probe", b"1", directory, 0o600)
    second, place = first.with_name(_temporary_name("probe")), first.with_name(f"{first.name}.d")
    try:
        return Abilities(
            hard_links=_works(lambda: second.hardlink_to(first)) and not _works(lambda: second.hardlink_to(first)),
            atomic_rename=_works(lambda: first.replace(second)),
            exclusive_directories=_works(lambda: place.mkdir(0o700)) and not _works(lambda: place.mkdir(0o700)),
            file_locks=_locks(directory),
            syncs_directories=sync_directory(directory),
            file_system=_file_system(directory),
        )
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            place.rmdir()


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _locks(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _works(lambda: fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB))
    finally:
        os.close(descriptor)


def _file_system(directory: Path) -> str:
    """The type of the innermost mount above `directory`; a later mount covers an earlier one at the same place."""
    target, best, name = directory.resolve(), -1, ""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(_MOUNT_ESCAPE.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4]))
        if target.is_relative_to(mount) and len(mount.parts) >= best:
            best, name = len(mount.parts), right.split(" ")[0]
    return name


def _temporary_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(16)}.tmp"


def _write_temporary(name: str, data: bytes, directory: Path, mode: int) -> Path:
    """A new, complete, synced file in `directory` (R32). Nothing is left behind when it cannot be made."""
    path = directory / _temporary_name(name)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    return path
