"""The journal as an operator's command sees it: read without owning it, and one file at a time set aside by an owner.

A snapshot may be outdated a moment later, and never decides anything about an execution: the worker reads through FileJournal
alone. Unlike there a damaged file is shown, not raised, so that one bad record hides no other (field case F44). Everything
here blocks. Source: design.md §5, wire-protocol.md §10, R30, R31, R52.
"""

import errno
import os
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec

from ..domain.claim import PendingClaim
from ..domain.document import Document
from ..domain.errors import Conflict, Corrupt, Misconfigured, QlworkerError
from ..domain.record import RECORD_BYTES, InboxRecord
from ..domain.session import StoredSession
from ..domain.text import check_offer_id
from . import durable

_SUFFIX: Final = ".json"
_QUARANTINE: Final = "quarantine"


class Kind(StrEnum):
    """What a file of the journal is by its place and name."""

    RECORD = "record"
    CLAIM = "pending claim"
    SESSION = "session"
    STRANGER = "stranger"


_TYPES: Final[dict[Kind, type[Document]]] = {
    Kind.RECORD: InboxRecord,
    Kind.CLAIM: PendingClaim,
    Kind.SESSION: StoredSession,
}
# as the worker reads them
_LIMITS: Final = {Kind.CLAIM: 4 * 1024, Kind.SESSION: 64 * 1024}
_SINGLE: Final = {"pending-claim.json": Kind.CLAIM, "session.json": Kind.SESSION}


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a file and what to do, neither of which tells its content."""

    what: str
    remedy: str


class Sight(msgspec.Struct, frozen=True):
    """What tells a file from its successor under the same name."""

    inode: int
    size: int
    mtime_ns: int


class Entry(msgspec.Struct, frozen=True):
    """One file of the journal. Exactly one of `document` and `fault` is there. Holds tokens: it is never shown as it is."""

    path: Path
    kind: Kind
    sight: Sight
    document: Document | None
    fault: Fault | None

    def __repr__(self) -> str:
        return f"<Entry {self.path.name}>"

    @property
    def record(self) -> InboxRecord | None:
        """The record, where the file is a sound one."""
        return self.document if isinstance(self.document, InboxRecord) else None

    @property
    def offer_id(self) -> str | None:
        """The offer's id by the file's name, known also of a damaged record."""
        return self.path.name.removesuffix(_SUFFIX) if self.kind is Kind.RECORD else None


class Ownership(Protocol):
    """Who knows whether the root is ours."""

    def check(self) -> None:
        """Raises OwnershipLost unless this process owns the root."""


class JournalSnapshot:
    """Reads the journal below `root` without owning it and changes nothing.

    Raises QlworkerError when there is none, Misconfigured for another user's, Corrupt for a directory that is not private.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._offers = root / "offers"
        try:
            owner = root.lstat().st_uid
        except FileNotFoundError:
            raise QlworkerError(f"there is no journal at {root}: no worker has run with this configuration") from None
        if owner != os.geteuid():
            raise Misconfigured(f"journal {root} belongs to user {owner}: run this as that user")
        for directory in (root, self._offers):
            if directory is root or directory.exists() or directory.is_symlink():
                durable.private_directory(directory)  # verifies only: it exists

    def entries(self) -> Iterator[Entry]:
        """Every file among the records in the order of their names, then a damaged claim or session. One is read at a time:
        a full journal may be larger than a router's memory."""
        try:
            names = sorted(os.listdir(self._offers))  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            names = []
        for name in names:
            if (entry := self._look(self._offers / name)) is not None:
                yield entry
        for name in _SINGLE:
            if (entry := self._look(self._root / name)) is not None and entry.fault is not None:
                yield entry

    def find(self, name: str) -> Entry:
        """The file that an offer id or a file name means. Raises QlworkerError when there is none, Misconfigured when two are
        meant."""
        if name in {"", ".", ".."} or "/" in name or "\x00" in name:
            raise Misconfigured("a record is called by its offer id or its file name, without a directory")
        looked = [self._look(self._offers / each) for each in (f"{name}{_SUFFIX}", name)]
        found = [entry for entry in looked if entry is not None]
        if len(found) > 1:
            raise Misconfigured(f"{name} means two records: call the one {name}{_SUFFIX}, the other {name[: -len(_SUFFIX)]}")
        if not found and name in _SINGLE:
            found = [entry for entry in (self._look(self._root / name),) if entry is not None]
        if not found:
            raise QlworkerError(f"journal {self._root} holds no such record: qlworker journal list shows what it holds")
        return found[0]

    def again(self, entry: Entry) -> Entry | None:
        """What is in the place of `entry` now: an equal one when nothing changed, None when it is gone."""
        return self._look(entry.path)

    def claim(self) -> Entry | None:
        """The pending claim, sound or not, or None."""
        return self._look(self._root / "pending-claim.json")

    def _look(self, path: Path) -> Entry | None:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise
        kind = self._kind(path)
        sight = Sight(status.st_ino, status.st_size, status.st_mtime_ns)
        try:
            read = _read(path, kind)
        except FileNotFoundError:
            return None
        if isinstance(read, Fault):
            return Entry(path, kind, sight, None, read)
        return Entry(path, kind, sight, read, None)

    def _kind(self, path: Path) -> Kind:
        if path.parent == self._root:
            return _SINGLE[path.name]
        if not path.name.endswith(_SUFFIX):
            return Kind.STRANGER
        try:
            check_offer_id(path.name.removesuffix(_SUFFIX))
        except ValueError:
            return Kind.STRANGER
        return Kind.RECORD


class Quarantine:
    """Sets files of the journal below `root` aside into `quarantine/`, only while `ownership` says that the root is ours.

    Deletes nothing and overwrites nothing. The journal opens afterwards as if the files had never been there.
    """

    def __init__(self, root: Path, ownership: Ownership) -> None:
        self._root = root
        self._ownership = ownership

    def set_aside(self, entry: Entry) -> list[Path]:
        """Moves the file of `entry`, durably, and says where to. The pending claim of the same offer goes first.

        While the claim lives, the next pull brings the same offer again; without its record the worker would take it for
        new work and launch it a second time. Raises Conflict for a settled record, a sound claim or session, a file that
        changed since `entry` was read, and while a claim cannot be read that may be of this offer.
        """
        self._ownership.check()
        snapshot = JournalSnapshot(self._root)
        check_may_leave(entry)
        if snapshot.again(entry) != entry:
            raise Conflict(f"{entry.path.name} has changed meanwhile: look at it again")
        leaving = [entry]
        if entry.kind is Kind.RECORD and (claim := snapshot.claim()) is not None:
            if claim.fault is not None:
                raise Conflict(
                    "pending-claim.json cannot be read and may be of this offer: see to it first, journal list tells how"
                )
            if isinstance(claim.document, PendingClaim) and claim.document.offer_id == entry.offer_id:
                leaving.insert(0, claim)
        directory = self._root / _QUARANTINE
        durable.private_directory(directory)
        return [self._move(each.path, directory) for each in leaving]

    def _move(self, path: Path, directory: Path) -> Path:
        target, number = directory / path.name, 0
        while target.exists() or target.is_symlink():
            number += 1
            target = directory / f"{path.name}.{number}"
        self._ownership.check()
        path.rename(target)
        # The new name first: after a power cut the file may be seen twice, never nowhere.
        durable.sync_directory(directory)
        durable.sync_directory(path.parent)
        return target


def check_may_leave(entry: Entry) -> None:
    """Raises Conflict for what is never set aside: a settled record, and a claim or session that is in order."""
    if entry.record is not None:
        if entry.record.is_settled:
            raise Conflict(
                f"offer {entry.record.offer_id} is {entry.record.state}: retention removes settled records by itself"
            )
    elif entry.document is not None:
        raise Conflict(f"{entry.path.name} is in order: there is nothing to set aside")


def _read(path: Path, kind: Kind) -> Document | Fault:
    """The document, or what is wrong. Raises FileNotFoundError for a file that is gone by now."""
    try:
        data = durable.read_private(path, _LIMITS.get(kind, RECORD_BYTES))
    except FileNotFoundError:
        raise
    except Corrupt as error:
        return Fault("is refused", str(error))
    except OSError as error:
        what = f"cannot be read ({(error.strerror or 'unknown error').lower()})"
        return Fault(what, f"check the disk and the file's mode; {_set_aside(path)}")
    found = _decode(path, kind, data)
    return Fault(found, _set_aside(path)) if isinstance(found, str) else found


def _decode(path: Path, kind: Kind, data: bytes) -> Document | str:
    """The document, or what is wrong with it: never the decoder's text, which may quote a stored value."""
    if kind is Kind.STRANGER:
        return "is not a record of the journal"
    if not data:
        return "is empty, as a power cut may leave it"
    try:
        document = msgspec.json.decode(data, type=_TYPES[kind])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "is damaged"
    if isinstance(document, InboxRecord) and f"{document.offer_id}{_SUFFIX}" != path.name:
        return "holds the record of another offer"
    return document


def _set_aside(path: Path) -> str:
    return f"stop the worker, then: qlworker journal quarantine {shlex.quote(path.name)}"
