"""Settled records leave, a page and a few at a time; the caller keeps cursor and cadence, and flash is left alone."""

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qlworker.domain.errors import Corrupt, Misconfigured
from qlworker.domain.record import Event, InboxRecord, RecoveryReason, State, renew
from qlworker.domain.sweep import SweepPosition, SweepTerms
from qlworker.flow.recovery.retention import Retention
from qlworker.flow.recovery.sweeper import ROUND_MS, Sweeper
from qlworker.flow.server_clock import ServerClock
from qlworker.ports import Page
from tests.builders import make_offer, make_revision
from tests.flow.rig import DrivenClock, RecordingLog, World
from tests.flow.test_startup import in_state

AGE_MS = 60_000
OLD = [State.COMPLETION_ACKNOWLEDGED, State.START_FAILURE_ACKNOWLEDGED]


class Shelf:
    """Records, receipts, outputs and the stored position in one, with one trace."""

    def __init__(self, *records: InboxRecord) -> None:
        self.records = {record.offer_id: record for record in records}
        self.trace: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.position: SweepPosition | None = None
        self.before_remove: Any = None

    async def _step(self, text: str) -> None:
        self.trace.append(text)
        await trio.lowlevel.checkpoint()
        if text in self.faults:
            raise self.faults[text]

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        await self._step(f"page {limit}")
        names = [name for name in sorted(self.records) if after is None or name > after]
        chosen = names[:limit]
        return Page([self.records[name] for name in chosen], chosen[-1] if len(names) > limit else None)

    async def read_sweep(self) -> SweepPosition | None:
        await self._step("read position")
        return self.position

    async def write_sweep(self, position: SweepPosition) -> None:
        await self._step("write position")
        self.position = position


class Inbox:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.page = shelf.page

    async def remove(self, offer_id: str, revision: int) -> bool:
        if self._shelf.before_remove is not None:
            self._shelf.before_remove(offer_id)
        await self._shelf._step(f"record {offer_id}")
        record = self._shelf.records.get(offer_id)
        if record is None or record.revision != revision:
            return False
        del self._shelf.records[offer_id]
        return True


class Files:
    def __init__(self, shelf: Shelf, kind: str) -> None:
        self._shelf = shelf
        self._kind = kind

    async def remove(self, name: str) -> None:
        await self._shelf._step(f"{self._kind} {name}")


class Sweeping:
    """A retention over a shelf, at a time that the control plane told."""

    def __init__(self, shelf: Shelf, *, now_ms: int = 10_000_000, is_proven: bool = True, **terms: Any) -> None:
        self.shelf = shelf
        self.clock = DrivenClock()
        self.log = RecordingLog()
        self.server_clock = ServerClock(self.clock)
        if is_proven:
            self.server_clock.observe(now_ms, self.clock.boot_ms())
        parts: Any = (Inbox(shelf), Files(shelf, "receipt"), Files(shelf, "output"), self.server_clock, self.log)
        self.retention = Retention(*parts, SweepTerms(age_ms=AGE_MS, **terms))
        self.sweeper = Sweeper(self.retention, shelf, self.server_clock, self.log)


def aged(state: State, number: int, at_ms: int = 0) -> InboxRecord:
    record = in_state(state, number)
    return msgspec.structs.replace(record, updated_at_ms=max(at_ms, record.accepted_at_ms))


# -- one call


@pytest.mark.req("R257", "R258", "R259")
async def test_one_call_reads_one_page_of_16_and_removes_8_at_most() -> None:
    shelf = Shelf(*(aged(State.COMPLETION_ACKNOWLEDGED, number) for number in range(100, 120)))
    sweeping = Sweeping(shelf)
    swept = await sweeping.retention.sweep(None)

    assert [text for text in shelf.trace if text.startswith("page")] == ["page 16"]
    assert (swept.removed, len(shelf.records)) == (8, 12)
    second = await sweeping.retention.sweep(swept.next_after)
    assert (second.removed, len(shelf.records)) == (8, 4)


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param({"page_size": 65}, marks=pytest.mark.req("R258")),
        pytest.param({"page_size": 0}, marks=pytest.mark.req("R258")),
        pytest.param({"max_deletions": 65}, marks=pytest.mark.req("R259")),
        pytest.param({"max_deletions": 0}, marks=pytest.mark.req("R259")),
        pytest.param({"age_ms": 59_999}, marks=pytest.mark.req("R267")),
        pytest.param({"age_ms": 30 * 24 * 3600 * 1000 + 1}, marks=pytest.mark.req("R268")),
    ],
)
def test_terms_out_of_bounds_are_refused(terms: dict[str, int]) -> None:
    SweepTerms(age_ms=AGE_MS, page_size=64, max_deletions=64)
    with pytest.raises(Misconfigured):
        SweepTerms(**{"age_ms": AGE_MS, **terms})


@pytest.mark.req("R114", "R261", "R271", "R272")
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("is_old", [True, False])
async def test_only_the_two_settled_states_leave_and_only_when_they_are_old(state: State, is_old: bool) -> None:
    now_ms = 10_000_000
    shelf = Shelf(aged(state, 1, now_ms - AGE_MS + (0 if is_old else 1)))
    swept = await Sweeping(shelf, now_ms=now_ms).retention.sweep(None)

    assert bool(swept.removed) == (state in OLD and is_old)
    assert bool(shelf.records) == (not swept.removed)


@pytest.mark.req("R272")
@pytest.mark.parametrize("reason", RecoveryReason)
async def test_no_reason_for_recovery_ever_gets_too_old(reason: RecoveryReason) -> None:
    from qlworker.domain.record import advance

    shelf = Shelf(advance(in_state(State.STARTED), Event.RECOVERY_NEEDED, 4000, recovery_reason=reason))
    await Sweeping(shelf, now_ms=4_000_000_000_000).retention.sweep(None)

    assert len(shelf.records) == 1


@pytest.mark.req("R262", "R263")
@pytest.mark.parametrize("state", OLD)
async def test_the_receipt_goes_first_then_the_record_then_its_output(state: State) -> None:
    shelf = Shelf(aged(state, 1))
    await Sweeping(shelf).retention.sweep(None)

    assert [text.split()[0] for text in shelf.trace] == ["page", "receipt", "record", "output"]


@pytest.mark.req("R264")
async def test_a_receipt_that_cannot_be_removed_keeps_its_record_and_no_other() -> None:
    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1), aged(State.COMPLETION_ACKNOWLEDGED, 2))
    shelf.faults["receipt attempt-1"] = OSError(errno.EROFS, "read-only")
    swept = await Sweeping(shelf).retention.sweep(None)

    assert (swept.removed, list(shelf.records)) == (1, ["offer-1"])
    assert "record offer-1" not in shelf.trace


@pytest.mark.req("R263", "R265", "R271")
async def test_a_record_that_changed_after_it_was_read_stays() -> None:
    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1))

    def change(offer_id: str) -> None:
        newer = make_offer(offer_id, attempt_id="attempt-1", lease_version=1, renewed_at_ms=21, expires_at_ms=30_021)
        shelf.records[offer_id] = renew(shelf.records[offer_id], newer, 9_000)

    shelf.before_remove = change
    swept = await Sweeping(shelf).retention.sweep(None)

    assert swept.removed == 0
    assert list(shelf.records) == ["offer-1"]
    assert not [text for text in shelf.trace if text.startswith("output")]


@pytest.mark.req("R266")
async def test_a_record_whose_file_cannot_be_removed_stays() -> None:
    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1))
    shelf.faults["record offer-1"] = OSError(errno.EIO, "no")
    swept = await Sweeping(shelf).retention.sweep(None)

    assert (swept.removed, list(shelf.records)) == (0, ["offer-1"])


@pytest.mark.req("R271")
async def test_a_page_with_more_than_may_go_is_finished_by_the_next_call_and_skips_nobody() -> None:
    states = [State.COMPLETION_ACKNOWLEDGED, State.RUNNING_ACKNOWLEDGED]
    shelf = Shelf(*(aged(states[number % 2], number) for number in range(100, 140)))
    sweeping = Sweeping(shelf, max_deletions=3)
    after, calls = None, 0
    while True:
        swept = await sweeping.retention.sweep(after)
        after, calls = swept.next_after, calls + 1
        assert swept.removed <= 3
        if after is None:
            break

    assert calls < 20
    assert {record.state for record in shelf.records.values()} == {State.RUNNING_ACKNOWLEDGED}
    assert len(shelf.records) == 20


async def test_nothing_is_looked_at_before_the_control_planes_time_is_known() -> None:
    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1))
    sweeping = Sweeping(shelf, is_proven=False)

    assert await sweeping.sweeper.tick() == 0
    assert shelf.trace == []


# -- the caller


@pytest.mark.req("R260", "R270")
async def test_the_service_keeps_nothing_and_its_caller_goes_on_after_a_restart() -> None:
    shelf = Shelf(*(aged(State.COMPLETION_ACKNOWLEDGED, number) for number in range(100, 124)))
    first = Sweeping(shelf)
    before = dict(vars(first.retention))
    assert await first.sweeper.tick() == 8
    assert vars(first.retention) == before
    assert shelf.position == SweepPosition(after="offer-107", due_at_ms=0)

    second = Sweeping(shelf)
    assert await second.sweeper.tick() == 8
    assert shelf.position == SweepPosition(after="offer-115", due_at_ms=0)
    assert await second.sweeper.tick() == 8
    assert shelf.position == SweepPosition(after=None, due_at_ms=10_000_000 + ROUND_MS)
    third = Sweeping(shelf)
    shelf.trace.clear()
    await third.sweeper.tick()
    assert shelf.trace == ["read position"]


@pytest.mark.req("R260")
async def test_an_idle_worker_writes_nothing_and_looks_once_a_round() -> None:
    shelf = Shelf(*(aged(State.RUNNING_ACKNOWLEDGED, number) for number in range(100, 140)))
    sweeping = Sweeping(shelf)
    for _ in range(100):
        await sweeping.sweeper.tick()
        sweeping.clock.advance(2_000)

    assert "write position" not in shelf.trace
    assert len([text for text in shelf.trace if text.startswith("page")]) <= 4 * 3


async def test_a_damaged_or_absurd_position_only_means_that_the_round_begins_again() -> None:
    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1))
    shelf.faults["read position"] = Corrupt("damaged")
    assert await Sweeping(shelf).sweeper.tick() == 1

    shelf = Shelf(aged(State.COMPLETION_ACKNOWLEDGED, 1))
    shelf.position = SweepPosition(due_at_ms=4_000_000_000_000)
    assert await Sweeping(shelf).sweeper.tick() == 1


# -- the whole worker


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.req("R271")
async def test_a_wall_clock_that_jumps_ahead_deletes_nothing_and_what_is_unsent_is_never_deleted(world: World) -> None:
    for number in (1, 2):
        world.control.enqueue(make_revision(), f"run-{number}", f"attempt-{number}")
    async with world.worker(retention_ms=3_600_000) as worker:
        await worker.until(lambda: world.processes.opened == 2)
        world.processes.commands[0].end(0)
        await worker.until(lambda: any(record.is_settled for record in world.records()))
        world.control.always("completion", 503)
        world.processes.commands[1].end(0)
        world.clock.step_wall(20 * 365 * 24 * 3600 * 1000)
        await worker.pass_time(600_000)
        assert len(world.records()) == 2
        await worker.pass_time(3_600_000)
        [left] = world.records()
        assert not left.is_settled
        assert world.receipt_files()


@pytest.mark.req("R260", "R518")
async def test_the_position_is_written_with_the_removals_and_never_by_an_idle_worker(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(retention_ms=120_000) as worker:
        await worker.until_state("running_acknowledged")
        world.processes.command.end(0)
        await worker.until(lambda: not world.records())
        await worker.settle()
        assert len(world.steps("sweep write")) == 1
        world.trace.clear()
        await worker.pass_time(600_000)
        assert world.steps("sweep write", "journal") == []

    assert (world.root / "journal" / "retention.json").stat().st_mode & 0o777 == 0o600
