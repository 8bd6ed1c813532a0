"""Output files: one append-only file per attempt, which the command writes by itself and this worker keeps below a maximum.

The command holds the file open for appending, so it is cut in place: a head, one visible marker with the number of bytes that
were dropped, and the newest tail. A stream position counts what was ever in the file: a file offset, plus, from the marker on,
the shift of all cuts. Source: wire-protocol.md §6.7 and §8.5, design.md §3 "output".
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import trio

from ..domain.document import Document
from ..domain.errors import Corrupt, Misconfigured, Refused
from ..domain.text import check_digest, check_integer, check_log_artifact_id
from ..ports import SealedOutput
from . import durable

MAXIMUM_MIN: Final = 4 * 1024
MAXIMUM_MAX: Final = 64 * 1024 * 1024
CHUNK: Final = 64 * 1024

_SIDE_BYTES: Final = 4096
_CHUNKS_PER_TURN: Final = 8
# The file, its directory and the two files beside it.
_INODES: Final = 4
_MARKER: Final = re.compile(
    rb"\n\[qlworker: ([0-9]{1,16}) bytes of output were dropped here: the limit is [0-9]{1,16} bytes\]\n"
)
_MARKER_MAX: Final = 128

_Result = TypeVar("_Result")
_Side = TypeVar("_Side", bound=Document)


class Cut(Document, frozen=True, kw_only=True):
    """What the cuts of one file took away. All members are bytes; `shift_bytes` is `dropped_bytes` and the earlier markers."""

    schema_version: Literal[1]
    dropped_bytes: int
    head_bytes: int
    marker_bytes: int
    shift_bytes: int

    def __post_init__(self) -> None:
        for name in ("dropped_bytes", "head_bytes", "marker_bytes", "shift_bytes"):
            check_integer(getattr(self, name), name)


class Seal(Document, frozen=True, kw_only=True):
    """The part of a file that is the artifact: its first `byte_length` bytes."""

    schema_version: Literal[1]
    byte_length: int
    sha256: str
    truncated: bool

    def __post_init__(self) -> None:
        check_integer(self.byte_length, "byteLength", 0, MAXIMUM_MAX)
        check_digest(self.sha256, "sha256")


class OutputFiles:
    """The output files below `root`, each of at most `maximum_bytes` (4 KiB..64 MiB, else Misconfigured).

    Space is only promised while `minimum_free_bytes` stay free. Files are called by their log artifact id; any other name is a
    ValueError. Work on one file is done one call at a time, in threads under `file_limiter`.
    """

    def __init__(self, root: Path, *, maximum_bytes: int, minimum_free_bytes: int, file_limiter: trio.CapacityLimiter) -> None:
        if not MAXIMUM_MIN <= maximum_bytes <= MAXIMUM_MAX:
            raise Misconfigured(f"an output file's maximum must be {MAXIMUM_MIN} to {MAXIMUM_MAX} bytes, not {maximum_bytes}")
        self._root = root
        self._maximum = maximum_bytes
        self._minimum_free = minimum_free_bytes
        self._limiter = file_limiter
        self._turns: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def open(self) -> int:
        """Makes or verifies the root and removes what a crash left unpublished; says how many files that were.

        Raises Misconfigured or Corrupt for an unsuitable root.
        """
        return await self._thread(self._open_root)

    async def prepare(self, log_artifact_id: str) -> Path:
        """Makes the file and its directory; a file left by an earlier try is kept.

        Raises Refused when free bytes or inodes do not suffice or the existing file is above the maximum, Corrupt for one that
        is not private.
        """
        async with self._turn(log_artifact_id):
            return await self._thread(lambda: self._prepare(log_artifact_id))

    async def trim(self, log_artifact_id: str) -> None:
        """Cuts the file if it is above the maximum; costs one stat if it is not.

        What the command appends while it is cut may be dropped without being counted. Behind a sealed part the rest goes.
        """
        async with self._turn(log_artifact_id):
            await self._thread(lambda: self._trim(log_artifact_id))

    async def read(self, log_artifact_id: str, offset: int, limit: int) -> tuple[int, bytes]:
        """At most `limit` bytes from stream position `offset`, and the position they start at: higher after a cut.

        A missing file reads as empty.
        """
        if offset < 0 or limit < 0:
            raise ValueError("an output is read from a position and to a limit that are not negative")
        async with self._turn(log_artifact_id):
            return await self._thread(lambda: self._read(log_artifact_id, offset, limit))

    async def seal(self, log_artifact_id: str) -> SealedOutput:
        """Fixes what is there now as the artifact, durably: the same answer for ever, whatever is appended later.

        A file that a power cut took is sealed as an empty one, and truncated.
        """
        async with self._turn(log_artifact_id):
            seal = await self._thread(lambda: self._load(log_artifact_id, Seal))
            if seal is None:
                seal = await self._seal(log_artifact_id)
            return SealedOutput(self._path(log_artifact_id), seal.byte_length, seal.sha256, seal.truncated)

    async def remove(self, log_artifact_id: str) -> None:
        """Removes the file and what belongs to it. Idempotent."""
        async with self._turn(log_artifact_id):
            await self._thread(lambda: self._remove(log_artifact_id))
        self._turns.pop(log_artifact_id, None)

    def _turn(self, log_artifact_id: str) -> trio.Lock:
        return self._turns[check_log_artifact_id(log_artifact_id)]

    async def _thread(self, action: Callable[[], _Result]) -> _Result:
        return await trio.to_thread.run_sync(action, limiter=self._limiter)

    def _path(self, log_artifact_id: str) -> Path:
        return self._root / log_artifact_id[5:7] / f"{log_artifact_id}.log"

    def _side(self, log_artifact_id: str, kind: type[Document]) -> Path:
        name = "cut" if kind is Cut else "sealed"
        return self._path(log_artifact_id).with_name(f".{log_artifact_id}.log.{name}.json")

    def _load(self, log_artifact_id: str, kind: type[_Side]) -> _Side | None:
        path = self._side(log_artifact_id, kind)
        try:
            return msgspec.json.decode(durable.read_private(path, _SIDE_BYTES), type=kind)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise Corrupt(f"{path} is damaged: move it away") from None

    def _open_root(self) -> int:
        durable.private_directory(self._root)
        return durable.remove_temporaries(self._root)

    def _prepare(self, log_artifact_id: str) -> Path:
        path = self._path(log_artifact_id)
        self._admit()
        durable.private_directory(path.parent)
        descriptor = self._open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size > self._maximum:
                raise Refused(f"output {path.name} exists and is above its maximum of {self._maximum} bytes")
        finally:
            os.close(descriptor)
        return path

    def _admit(self) -> None:
        space = os.statvfs(self._root)
        free, needed = space.f_bavail * space.f_frsize, self._minimum_free + self._maximum
        if free < needed:
            raise Refused(f"the disk of {self._root} has {free} bytes free, an output needs {needed}: make room")
        # A file system without a fixed number of inodes says 0 of 0.
        if space.f_files and space.f_favail < _INODES:
            raise Refused(f"the disk of {self._root} has no inodes left: remove files")

    def _open(self, path: Path, flags: int) -> int:
        descriptor = durable.open_private(path, flags)
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            raise Corrupt(f"{path} has more than one name and may be written elsewhere: move it away")
        return descriptor

    def _trim(self, log_artifact_id: str) -> None:
        path = self._path(log_artifact_id)
        try:
            if path.lstat().st_size <= self._maximum:
                return
            descriptor = self._open(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            seal = self._load(log_artifact_id, Seal)
            if seal is None:
                self._cut(log_artifact_id, descriptor)
            else:
                os.ftruncate(descriptor, seal.byte_length)
        finally:
            os.close(descriptor)

    def _cut(self, log_artifact_id: str, descriptor: int) -> None:
        """The marker goes in first and the rest goes off behind it: a crash at any point leaves no silent gap, and what the
        command appends meanwhile lands behind the marker or goes with the rest."""
        before = self._cut_of(log_artifact_id, descriptor)
        size = os.fstat(descriptor).st_size
        head = min(before.head_bytes, self._maximum // 2)
        dropped = before.dropped_bytes + max(size - head - before.marker_bytes, 0)
        marker = f"\n[qlworker: {dropped} bytes of output were dropped here: the limit is {self._maximum} bytes]\n".encode()
        os.pwrite(descriptor, marker, head)
        os.ftruncate(descriptor, head + len(marker))
        cut = Cut(
            schema_version=1,
            dropped_bytes=dropped,
            head_bytes=head,
            marker_bytes=len(marker),
            shift_bytes=before.shift_bytes + max(size - head, 0),
        )
        durable.replace(self._side(log_artifact_id, Cut), cut.to_json() + b"\n", temporaries=self._root)

    def _cut_of(self, log_artifact_id: str, descriptor: int) -> Cut:
        """The cuts so far; all zero but the head when there were none.

        After a crash between a cut and its record the marker in the file knows more than the record.
        """
        stored = self._load(log_artifact_id, Cut) or Cut(
            schema_version=1, dropped_bytes=0, head_bytes=self._maximum // 2, marker_bytes=0, shift_bytes=0
        )
        marker = _MARKER.match(os.pread(descriptor, _MARKER_MAX, stored.head_bytes))
        if marker is None or (dropped := int(marker[1])) <= stored.dropped_bytes:
            return stored
        return Cut(
            schema_version=1,
            dropped_bytes=dropped,
            head_bytes=stored.head_bytes,
            marker_bytes=len(marker[0]),
            shift_bytes=stored.shift_bytes + stored.marker_bytes + dropped - stored.dropped_bytes,
        )

    def _read(self, log_artifact_id: str, offset: int, limit: int) -> tuple[int, bytes]:
        try:
            descriptor = self._open(self._path(log_artifact_id), os.O_RDONLY)
        except FileNotFoundError:
            return offset, b""
        try:
            cut = self._cut_of(log_artifact_id, descriptor)
            if not cut.shift_bytes:
                return offset, os.pread(descriptor, limit, offset)
            if offset < cut.head_bytes:
                return offset, os.pread(descriptor, min(limit, cut.head_bytes - offset), offset)
            start = max(offset, cut.head_bytes + cut.shift_bytes)
            return start, os.pread(descriptor, limit, start - cut.shift_bytes)
        finally:
            os.close(descriptor)

    async def _seal(self, log_artifact_id: str) -> Seal:
        path = self._path(log_artifact_id)
        try:
            await self._thread(lambda: self._trim(log_artifact_id))
            descriptor = await self._thread(lambda: self._open(path, os.O_RDONLY))
        except FileNotFoundError:
            return await self._thread(lambda: self._seal_lost(log_artifact_id))
        try:
            size = os.fstat(descriptor).st_size
            length = min(size, self._maximum)
            hasher = hashlib.sha256()
            position = 0
            # Turn by turn: on a router the digest of a large file takes seconds, and the journal waits for the same thread.
            while position < length:
                step = min(length - position, CHUNK * _CHUNKS_PER_TURN)
                read = await self._thread(partial(_hash, hasher, descriptor, position, step))
                if read == 0:
                    break
                position += read
            return await self._thread(
                lambda: self._fix(log_artifact_id, descriptor, position, hasher.hexdigest(), cut_short=size > length)
            )
        finally:
            os.close(descriptor)

    def _fix(self, log_artifact_id: str, descriptor: int, length: int, digest: str, *, cut_short: bool) -> Seal:
        truncated = cut_short or self._cut_of(log_artifact_id, descriptor).shift_bytes > 0
        # The digest must not outlive the bytes it was taken over.
        os.fsync(descriptor)
        return self._publish(log_artifact_id, length, digest, truncated=truncated)

    def _seal_lost(self, log_artifact_id: str) -> Seal:
        path = self._path(log_artifact_id)
        durable.private_directory(path.parent)
        os.close(self._open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
        return self._publish(log_artifact_id, 0, hashlib.sha256().hexdigest(), truncated=True)

    def _publish(self, log_artifact_id: str, length: int, digest: str, *, truncated: bool) -> Seal:
        seal = Seal(schema_version=1, byte_length=length, sha256=digest, truncated=truncated)
        durable.publish_new(self._side(log_artifact_id, Seal), seal.to_json() + b"\n", temporaries=self._root)
        return seal

    def _remove(self, log_artifact_id: str) -> None:
        for path in (self._path(log_artifact_id), self._side(log_artifact_id, Seal), self._side(log_artifact_id, Cut)):
            try:
                durable.remove(path)
            except FileNotFoundError:
                return


def _hash(hasher: "hashlib._Hash", descriptor: int, position: int, size: int) -> int:
    done = 0
    while done < size and (chunk := os.pread(descriptor, min(CHUNK, size - done), position + done)):
        hasher.update(chunk)
        done += len(chunk)
    return done
