"""What a running command has written so far, for whoever is watching: best effort, and gone once the log is stored.

One file per attempt, `<directory>/<attemptId>.log`, with every byte at its stream offset; a part that never came reads as
NUL bytes. Never evidence, never part of an outcome.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from ..domain.text import check_launch_id
from ..wire.completion import ARTIFACT_BYTES
from .private_files import make_private_directory

LIVE_BYTES: Final = ARTIFACT_BYTES


class LiveOutput:
    """Live views below `directory`, each at most 64 MiB."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, attempt_id: str) -> Path:
        """The file of one attempt. Raises ValueError for an id that cannot name a file."""
        return self._directory / f"{check_launch_id(attempt_id, 'attemptId')}.log"

    def write(self, attempt_id: str, offset: int, data: bytes) -> int:
        """Puts `data` at `offset`, cut at 64 MiB, and returns how far the view reaches now. Blocks.

        An answer below `offset` plus the length of `data` tells the worker that the view is full.
        """
        make_private_directory(self._directory)
        descriptor = os.open(self.path(attempt_id), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fitting = data[: max(LIVE_BYTES - offset, 0)]
            if fitting:
                os.pwrite(descriptor, fitting, offset)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, attempt_id: str, position: int, size: int) -> bytes:
        """Up to `size` bytes from `position`; b"" where there is nothing. Blocks."""
        try:
            with self.path(attempt_id).open("rb") as file:
                file.seek(position)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def remove(self, attempt_id: str) -> None:
        """Forgets the view of one attempt. Blocks. A view that cannot be removed is left: nobody depends on it."""
        with contextlib.suppress(OSError, ValueError):
            self.path(attempt_id).unlink(missing_ok=True)
