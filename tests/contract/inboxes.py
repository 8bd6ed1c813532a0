"""A second inbox behind the same port: everything in memory. It exists to hold the contract suite to the port."""

from qlworker.domain.errors import CapacityExceeded, Conflict, OwnershipLost
from qlworker.domain.record import InboxRecord, State, check_update
from qlworker.ports import Page


class MemoryInbox:
    """Keeps at most `capacity` records. `is_owned` stands for the ownership of the journal."""

    def __init__(self, capacity: int) -> None:
        self.is_owned = True
        self._capacity = capacity
        self._records: dict[str, InboxRecord] = {}

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        self._check()
        if not 1 <= limit <= 64:
            raise ValueError("limit must be 1 to 64")
        names = sorted(name for name in self._records if after is None or name > after)
        page = [self._records[name] for name in names[:limit]]
        return Page(page, names[limit - 1] if len(names) > limit else None)

    async def read(self, offer_id: str) -> InboxRecord | None:
        self._check()
        return self._records.get(offer_id)

    async def create(self, record: InboxRecord) -> None:
        self._check()
        if record.state is not State.ACCEPTED or record.revision != 0 or record.offer_id in self._records:
            raise Conflict("only a new offer can be accepted")
        if len(self._records) >= self._capacity:
            raise CapacityExceeded("the journal is full")
        self._records[record.offer_id] = record

    async def replace(self, record: InboxRecord) -> None:
        self._check()
        stored = self._records.get(record.offer_id)
        if stored is None:
            raise Conflict("no such record")
        check_update(stored, record)
        self._records[record.offer_id] = record

    async def remove(self, offer_id: str, revision: int) -> bool:
        self._check()
        stored = self._records.get(offer_id)
        if stored is None or stored.revision != revision:
            return False
        if not stored.is_settled:
            raise Conflict("an unsettled record stays")
        del self._records[offer_id]
        return True

    def _check(self) -> None:
        if not self.is_owned:
            raise OwnershipLost("not owned")
