"""The journal on disk: one JSON file per offer, the pending claim and the session, below one private root.

Serves the ports Inbox, ClaimStore, SessionStore and SweepStore. Keeps nothing in memory: what the directory says is true, also
after a write that failed half-way. Has no timer, no watcher and no database. Every file is replaced whole, by one queue of
mutations, and only while this process owns the root. Source: wire-protocol.md §10, R27 to R50, R60 to R74.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from ..domain.claim import PendingClaim
from ..domain.document import Document
from ..domain.errors import CapacityExceeded, Conflict, Corrupt, Misconfigured, Refused
from ..domain.record import RECORD_BYTES, InboxRecord, State, check_update
from ..domain.session import StoredSession
from ..domain.sweep import SweepPosition
from ..domain.text import check_offer_id
from ..ports import Page
from . import durable

CAPACITY: Final = 64
CAPACITY_MAX: Final = 1024
PAGE_MAX: Final = 64
CLAIM_BYTES: Final = 4 * 1024
SESSION_BYTES: Final = 64 * 1024
SWEEP_BYTES: Final = 4 * 1024

_SUFFIX: Final = ".json"
_CLAIM_IDENTITY: Final = (
    "worker_id",
    "worker_session_id",
    "worker_generation",
    "offer_id",
    "lease_token",
    "created_at_ms",
)

_Result = TypeVar("_Result")
_Stored = TypeVar("_Stored", bound=Document)


class Ownership(Protocol):
    """Who knows whether the root is ours."""

    def check(self) -> None:
        """Raises OwnershipLost unless this process owns the root. Cheap, and callable from any thread."""


class FileJournal:
    """The journal below `root`. `capacity` (1..1024, default 64) counts every record, settled ones too (R35, R36, R41).

    File work runs in threads under `file_limiter`. A mutation that has begun ends, whatever is cancelled meanwhile. An OSError
    (no space, read-only, damaged medium) passes through and leaves each file whole. Raises Misconfigured for a relative root
    or a capacity out of bounds.
    """

    def __init__(
        self, root: Path, *, ownership: Ownership, capacity: int = CAPACITY, file_limiter: trio.CapacityLimiter
    ) -> None:
        if not root.is_absolute() or len(str(root)) > durable.ROOT_CHARS:
            raise Misconfigured(f"the journal root must be an absolute path of at most {durable.ROOT_CHARS} characters")
        if not 1 <= capacity <= CAPACITY_MAX:
            raise Misconfigured(f"the journal's capacity must be 1 to {CAPACITY_MAX} records, not {capacity}")
        self._root = root
        self._offers = root / "offers"
        self._claim = root / "pending-claim.json"
        self._session = root / "session.json"
        self._sweep = root / "retention.json"
        self._ownership = ownership
        self._capacity = capacity
        self._limiter = file_limiter
        self._queue = trio.Lock()

    async def open(self) -> int:
        """Makes or verifies the directories and removes what a crash left unpublished; says how many files that were.

        Raises OwnershipLost before the root is owned, and Corrupt for a directory that others may enter.
        """
        return await self._mutate(self._prepare)

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        """At most `limit` (1..64, else ValueError) records whose offer id is above `after`, ascending (R38, R39).

        Raises Corrupt when the directory holds anything but records, or a damaged one.
        """
        if not 1 <= limit <= PAGE_MAX:
            raise ValueError(f"a page must be of 1 to {PAGE_MAX} records")
        return await self._look(lambda: self._read_page(after, limit))

    async def read(self, offer_id: str) -> InboxRecord | None:
        """The record, or None. Raises Corrupt for a damaged one, ValueError for an impossible id."""
        check_offer_id(offer_id)
        return await self._look(lambda: self._read_record(offer_id))

    async def create(self, record: InboxRecord) -> None:
        """Publishes a first record: accepted, revision 0.

        Raises Conflict when the id exists or the record is not a first one, CapacityExceeded when the journal is full, Refused
        above 192 KiB.
        """
        data = _encoded(record)
        if record.revision != 0 or record.state is not State.ACCEPTED:
            raise Conflict(f"the first record of offer {record.offer_id} must be accepted and of revision 0")
        await self._mutate(lambda: self._publish(record.offer_id, data))

    async def replace(self, record: InboxRecord) -> None:
        """Writes the successor of the stored record (R60 to R67). Raises Conflict for anything else, Refused above 192 KiB."""
        data = _encoded(record)
        await self._mutate(lambda: self._succeed(record, data))

    async def remove(self, offer_id: str, revision: int) -> bool:
        """Removes a settled record if it still has `revision`; says whether it did. Raises Conflict if it is unsettled."""
        check_offer_id(offer_id)
        return await self._mutate(lambda: self._discard(offer_id, revision))

    async def read_claim(self) -> PendingClaim | None:
        """The pending claim, or None."""
        return await self._look(lambda: self._load(self._claim, PendingClaim, CLAIM_BYTES))

    async def write_claim(self, claim: PendingClaim) -> None:
        """Makes a new claim durable, or the next revision of the stored one. Raises Conflict for anything else."""
        await self._mutate(lambda: self._store_claim(claim))

    async def remove_claim(self, claim: PendingClaim) -> None:
        """Removes the stored claim if it has this offer id and revision, else leaves it."""
        await self._mutate(lambda: self._discard_claim(claim))

    async def read_session(self) -> StoredSession | None:
        """The session to continue, or None."""
        return await self._look(lambda: self._load(self._session, StoredSession, SESSION_BYTES))

    async def write_session(self, session: StoredSession) -> None:
        """Makes the session durable in the place of the one before."""
        data = session.to_json() + b"\n"
        await self._mutate(lambda: durable.replace(self._session, data, temporaries=self._root))

    async def remove_session(self) -> None:
        """Forgets the session. Idempotent."""
        await self._mutate(lambda: durable.remove(self._session))

    async def read_sweep(self) -> SweepPosition | None:
        """Where the sweep of old records stands, or None."""
        return await self._look(lambda: self._load(self._sweep, SweepPosition, SWEEP_BYTES))

    async def write_sweep(self, position: SweepPosition) -> None:
        """Makes that position durable in the place of the one before."""
        data = position.to_json() + b"\n"
        await self._mutate(lambda: durable.replace(self._sweep, data, temporaries=self._root))

    async def _look(self, action: Callable[[], _Result]) -> _Result:
        """Reads take no turn in the queue: a file is replaced whole, so any moment is a good one (R49)."""
        self._ownership.check()
        return await trio.to_thread.run_sync(self._as_owner(action), limiter=self._limiter)

    async def _mutate(self, action: Callable[[], _Result]) -> _Result:
        """One mutation at a time, in the order of the calls (R46). Once its thread runs, a cancellation waits for its end."""
        self._ownership.check()
        async with self._queue:
            return await trio.to_thread.run_sync(self._as_owner(action), limiter=self._limiter)

    def _as_owner(self, action: Callable[[], _Result]) -> Callable[[], _Result]:
        """Asks again at the last moment: waiting for the turn and for a thread may have taken longer than the lock lasted."""

        def run() -> _Result:
            self._ownership.check()
            return action()

        return run

    def _prepare(self) -> int:
        durable.private_directory(self._root)
        durable.private_directory(self._offers)
        return durable.remove_temporaries(self._root)

    def _names(self) -> list[str]:
        """Offer ids in code unit order: they are ASCII, so it is the order of str."""
        names = []
        with os.scandir(self._offers) as entries:
            for entry in entries:
                if not _names_a_record(entry.name) or not entry.is_file(follow_symlinks=False):
                    raise Corrupt(f"{entry.path} is not a record of the journal: move it away")
                names.append(entry.name.removesuffix(_SUFFIX))
        return sorted(names)

    def _read_page(self, after: str | None, limit: int) -> Page:
        names = [name for name in self._names() if after is None or name > after]
        chosen = names[:limit]
        # One that was removed since the listing is simply gone; the cursor does not depend on it.
        records = [record for name in chosen if (record := self._read_record(name)) is not None]
        return Page(records, chosen[-1] if len(names) > limit else None)

    def _path(self, offer_id: str) -> Path:
        return self._offers / f"{offer_id}{_SUFFIX}"

    def _read_record(self, offer_id: str) -> InboxRecord | None:
        path = self._path(offer_id)
        record = self._load(path, InboxRecord, RECORD_BYTES)
        if record is not None and record.offer_id != offer_id:
            raise _damaged(path)
        return record

    def _load(self, path: Path, kind: type[_Stored], limit: int) -> _Stored | None:
        try:
            data = durable.read_private(path, limit)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Without its cause: the decoder's text may quote a stored value.
            raise _damaged(path) from None

    def _publish(self, offer_id: str, data: bytes) -> None:
        names = self._names()
        # A second delivery must be told apart from a full journal, or it could not be merged there.
        if offer_id in names:
            raise Conflict(f"offer {offer_id} is in the journal already")
        if len(names) >= self._capacity:
            raise CapacityExceeded(
                f"the journal holds {len(names)} records, its capacity is {self._capacity}: nothing is evicted"
            )
        durable.publish_new(self._path(offer_id), data, temporaries=self._root)

    def _succeed(self, record: InboxRecord, data: bytes) -> None:
        stored = self._read_record(record.offer_id)
        if stored is None:
            raise Conflict(f"offer {record.offer_id} is not in the journal")
        check_update(stored, record)
        durable.replace(self._path(record.offer_id), data, temporaries=self._root)

    def _discard(self, offer_id: str, revision: int) -> bool:
        stored = self._read_record(offer_id)
        if stored is None:
            return False
        if not stored.is_settled:
            raise Conflict(f"offer {offer_id} is {stored.state}: only a settled record may be removed")
        return stored.revision == revision and durable.remove(self._path(offer_id))

    def _store_claim(self, claim: PendingClaim) -> None:
        data = claim.to_json() + b"\n"
        stored = self._load(self._claim, PendingClaim, CLAIM_BYTES)
        if stored is None:
            durable.publish_new(self._claim, data, temporaries=self._root)
            return
        if any(getattr(stored, name) != getattr(claim, name) for name in _CLAIM_IDENTITY):
            raise Conflict(f"a claim of offer {stored.offer_id} is pending: remove it before another one is made")
        if claim.revision != stored.revision + 1 or claim.attempt_count < stored.attempt_count:
            raise Conflict(f"expected revision {stored.revision + 1} of the claim of offer {stored.offer_id}")
        durable.replace(self._claim, data, temporaries=self._root)

    def _discard_claim(self, claim: PendingClaim) -> None:
        stored = self._load(self._claim, PendingClaim, CLAIM_BYTES)
        if stored is not None and (stored.offer_id, stored.revision) == (claim.offer_id, claim.revision):
            durable.remove(self._claim)


def _encoded(record: InboxRecord) -> bytes:
    data = record.to_json() + b"\n"
    if len(data) > RECORD_BYTES:
        raise Refused(f"the record of offer {record.offer_id} would be {len(data)} bytes, the limit is {RECORD_BYTES}")
    return data


def _names_a_record(name: str) -> bool:
    if not name.endswith(_SUFFIX):
        return False
    try:
        check_offer_id(name.removesuffix(_SUFFIX))
    except ValueError:
        return False
    return True


def _damaged(path: Path) -> Corrupt:
    return Corrupt(
        f"{path.name} in {path.parent} is damaged: stop the worker and set it aside with qlworker journal quarantine"
    )
