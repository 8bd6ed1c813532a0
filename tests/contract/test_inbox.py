"""One suite for every inbox behind the port: the journal as an edge box and as a server has it, and one in memory."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio

from qlworker.adapters import process_table
from qlworker.adapters.journal import FileJournal
from qlworker.adapters.ownership import JournalOwnership
from qlworker.domain.errors import CapacityExceeded, Conflict, OwnershipLost
from qlworker.domain.record import Event, InboxRecord, advance, renew
from qlworker.ports import Inbox

from ..adapters.hand_clock import HandClock
from ..builders import make_offer, make_record
from .inboxes import MemoryInbox

CAPACITIES = {"edge": 64, "node": 256, "memory": 8}


class Case:
    """An inbox, its capacity and how its owner loses it."""

    def __init__(self, inbox: Inbox, capacity: int, lose: Callable[[], Awaitable[None]]) -> None:
        self.inbox = inbox
        self.capacity = capacity
        self.lose = lose


@pytest.fixture(params=CAPACITIES)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    capacity = CAPACITIES[request.param]
    if request.param == "memory":
        memory = MemoryInbox(capacity)

        async def disown() -> None:
            memory.is_owned = False

        yield Case(memory, capacity, disown)
        return
    ownership = JournalOwnership(
        tmp_path / "journal",
        clock=HandClock(),
        place=process_table.read_place("host"),
        me=process_table.myself(),
        is_alive=process_table.is_alive,
    )
    await ownership.acquire()
    journal = FileJournal(tmp_path / "journal", ownership=ownership, capacity=capacity, file_limiter=trio.CapacityLimiter(1))
    await journal.open()
    yield Case(journal, capacity, ownership.release)
    await ownership.release()


def settled(record: InboxRecord) -> list[InboxRecord]:
    """The record's way to a settled start failure."""
    acknowledged = advance(record, Event.STARTING_ACKED, 1001)
    failed = advance(acknowledged, Event.NOT_STARTED, 1002)
    return [acknowledged, failed, advance(failed, Event.FAILURE_ACKED, 1003)]


@pytest.mark.req("R10", "R53")
async def test_what_is_created_is_read_back_equal(case: Case) -> None:
    record = make_record("offer-1")

    await case.inbox.create(record)

    assert await case.inbox.read("offer-1") == record
    assert await case.inbox.read("offer-2") is None


@pytest.mark.req("R10", "R53")
async def test_an_offer_is_created_once(case: Case) -> None:
    await case.inbox.create(make_record("offer-1"))

    with pytest.raises(Conflict):
        await case.inbox.create(make_record("offer-1", now_ms=2000))


@pytest.mark.req("R10", "R53")
async def test_a_stale_or_illegal_successor_is_refused_and_changes_nothing(case: Case) -> None:
    record = make_record("offer-1")
    await case.inbox.create(record)
    acknowledged, failed, _ = settled(record)

    with pytest.raises(Conflict):
        await case.inbox.replace(failed)
    await case.inbox.replace(acknowledged)
    with pytest.raises(Conflict):
        await case.inbox.replace(acknowledged)

    assert await case.inbox.read("offer-1") == acknowledged


@pytest.mark.req("R10", "R53")
async def test_a_newer_lease_of_the_same_authority_is_stored_and_another_authority_is_not(case: Case) -> None:
    record = make_record("offer-1")
    await case.inbox.create(record)
    renewed = renew(record, make_offer("offer-1", lease_version=3, renewed_at_ms=40, expires_at_ms=50), 2000)

    await case.inbox.replace(renewed)

    assert await case.inbox.read("offer-1") == renewed
    with pytest.raises(Conflict):
        renew(renewed, make_offer("offer-1", lease_version=4, lease_token="another_capability_of_the_worker_00000000001"), 3000)


@pytest.mark.req("R10", "R53")
async def test_a_full_inbox_refuses_and_evicts_nothing(case: Case) -> None:
    for number in range(case.capacity):
        await case.inbox.create(make_record(f"offer-{number:04}"))

    with pytest.raises(CapacityExceeded):
        await case.inbox.create(make_record("one-more"))

    assert await case.inbox.read("offer-0000") is not None
    assert await case.inbox.read("one-more") is None


@pytest.mark.req("R10", "R53")
async def test_only_a_settled_record_of_the_known_revision_is_removed(case: Case) -> None:
    record = make_record("offer-1")
    await case.inbox.create(record)
    with pytest.raises(Conflict):
        await case.inbox.remove("offer-1", record.revision)
    for step in settled(record):
        await case.inbox.replace(step)

    assert await case.inbox.remove("offer-1", 0) is False
    assert await case.inbox.remove("offer-1", 3) is True
    assert await case.inbox.read("offer-1") is None


@pytest.mark.req("R10", "R53")
async def test_pages_go_through_every_record_in_order_once(case: Case) -> None:
    names = [f"offer-{number}" for number in range(case.capacity)]
    for name in names:
        await case.inbox.create(make_record(name))

    seen: list[str] = []
    after: str | None = None
    while True:
        page = await case.inbox.page(after, 3)
        seen += [record.offer_id for record in page.records]
        if (after := page.next_after) is None:
            break

    assert seen == sorted(names)


@pytest.mark.req("R10", "R53")
async def test_without_ownership_every_operation_fails_closed(case: Case) -> None:
    record = make_record("offer-1")
    await case.inbox.create(record)
    await case.lose()

    operations: list[Callable[[], Awaitable[object]]] = [
        case.inbox.page,
        lambda: case.inbox.read("offer-1"),
        lambda: case.inbox.create(make_record("offer-2")),
        lambda: case.inbox.replace(settled(record)[0]),
        lambda: case.inbox.remove("offer-1", 0),
    ]
    for operation in operations:
        with pytest.raises(OwnershipLost):
            await operation()
