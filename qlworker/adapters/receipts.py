"""Completion receipts as files: `<root>/<first two characters>/<attempt id>.json`, written by launchers, read and removed here.

Nothing read here is a fact yet: `domain.receipt.authenticate` makes it one (R184). A file that is not exactly what a
launcher publishes is left as it is and reported.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

import trio

from ..domain.errors import Corrupt
from ..domain.receipt import RECEIPT_BYTES, Receipt
from ..domain.text import check_launch_id

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class ReceiptFiles:
    """The Receipts port over the private directory `root`, which is made with mode 0700 when it is missing.

    `limiter` bounds the threads for file work; None means trio's default. Raises Corrupt for a root that others may enter.
    """

    def __init__(self, root: Path, limiter: trio.CapacityLimiter | None = None) -> None:
        self._root = root
        self._limiter = limiter
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(root)

    def path(self, attempt_id: str) -> Path:
        """Where the launcher publishes. Makes the directory, durably. Raises Corrupt for one that others may enter,
        ValueError for an id that names no receipt, OSError when it cannot be made."""
        path = self._path(attempt_id)
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
            _sync(self._root)
        _check_private(path.parent)
        return path

    async def read(self, attempt_id: str) -> Receipt | None:
        """The receipt, or None when there is none. Raises Corrupt for a file that is unsafe or not that attempt's receipt,
        OSError when it cannot be read: neither means that there is none (R195)."""
        path = self._path(attempt_id)
        data = await trio.to_thread.run_sync(_read, path, limiter=self._limiter)
        if data is None:
            return None
        try:
            receipt = Receipt.parse(data)
        except ValueError as error:
            raise Corrupt(f"cannot use receipt {path}: {error}; move it away to go on without it") from None
        if receipt.attempt_id != attempt_id:
            raise Corrupt(f"cannot use receipt {path}: it belongs to another attempt; move it away to go on without it")
        return receipt

    async def remove(self, attempt_id: str) -> None:
        """Removes the receipt and what a killed launcher left half-written beside it. Idempotent."""
        await trio.to_thread.run_sync(_remove, self._path(attempt_id), attempt_id, limiter=self._limiter)

    def _path(self, attempt_id: str) -> Path:
        check_launch_id(attempt_id, "attemptId")
        return self._root / attempt_id[:2] / f"{attempt_id}.json"


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise Corrupt(f"cannot trust {directory}: it must be a directory of this user with mode 0700; nothing was changed")


def _read(path: Path) -> bytes | None:
    try:
        # O_NONBLOCK: a FIFO put there instead must not hang the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise Corrupt(f"cannot trust receipt {path}: it is a symbolic link; move it away to go on without it") from error
        raise
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise Corrupt(f"cannot trust receipt {path}: it must be a regular file of this user with mode 0600")
        if status.st_size > RECEIPT_BYTES:
            raise Corrupt(f"cannot use receipt {path}: it must be at most {RECEIPT_BYTES} bytes")
        return file.read(RECEIPT_BYTES + 1)


def _remove(path: Path, attempt_id: str) -> None:
    leftover = re.compile(re.escape(f".{attempt_id}.") + r"[0-9a-f]{32}\.tmp\Z")
    try:
        names = os.listdir(path.parent)  # noqa: PTH208 - names are all that is needed
    except FileNotFoundError:
        return
    found = [name for name in names if name == path.name or leftover.match(name)]
    for name in found:
        with contextlib.suppress(FileNotFoundError):
            (path.parent / name).unlink()
    if found:
        _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system that cannot sync a directory promises a restart only, not a power cut (R50).
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
