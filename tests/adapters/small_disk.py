"""A small file system of memory for tests of a full or read-only disk."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def make_read_only(self) -> None:
        """From now on every change fails with EROFS."""
        self._mount("-o", "remount,ro")

    def make_writable(self) -> None:
        """The opposite."""
        self._mount("-o", "remount,rw")

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.place)], check=True, capture_output=True)


@contextmanager
def small_disk(place: Path, *, size: str, inodes: int = 0) -> Iterator[SmallDisk]:
    """Mounts a tmpfs of `size` at `place`, with at most `inodes` (0: no bound). Skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    options = f"size={size},mode=0700" + (f",nr_inodes={inodes}" if inodes else "")
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, check=False)
    if result.returncode:
        pytest.skip("this system does not let a test mount a tmpfs")
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)
