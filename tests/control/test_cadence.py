"""One rhythm for everything the control plane does by itself."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from qlworker.control.cadence import STOP_WAIT_S, keep_time
from qlworker.control.counting import Uncounted


class Recorder:
    """A log that keeps errors."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []

    def info(self, event: str, **fields: object) -> None:
        """Nothing is kept."""

    def error(self, event: str, **fields: object) -> None:
        self.errors.append({"event": event, **fields})


@pytest.mark.req("R366", "R367")
async def test_a_slow_tick_is_never_overlapped_by_the_next(autojump_clock: MockClock) -> None:
    running, most, begun, stopping = 0, 0, [], trio.Event()

    async def tick() -> None:
        nonlocal running, most
        begun.append(trio.current_time())
        running += 1
        most = max(most, running)
        await trio.sleep(7)
        running -= 1
        if len(begun) == 3:
            stopping.set()

    start = trio.current_time()
    await keep_time("slow", 5, tick, stopping=stopping, log=Recorder(), counting=Uncounted())
    assert most == 1
    assert [moment - start for moment in begun] == [0, 12, 24]


@pytest.mark.req("R366")
async def test_a_pause_ends_at_once_when_the_server_stops(autojump_clock: MockClock) -> None:
    stopping, start = trio.Event(), trio.current_time()

    async def tick() -> None:
        return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_time("idle", 3600, tick, stopping=stopping, log=Recorder(), counting=Uncounted()))
        await trio.sleep(1)
        stopping.set()
    assert trio.current_time() - start == 1


@pytest.mark.req("R368")
async def test_a_tick_that_hangs_holds_a_stop_up_for_a_bounded_time(autojump_clock: MockClock) -> None:
    stopping, start = trio.Event(), trio.current_time()
    stopping_at = 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: keep_time("hanging", 1, trio.sleep_forever, stopping=stopping, log=Recorder(), counting=Uncounted())
        )
        await trio.sleep(stopping_at)
        stopping.set()
    assert trio.current_time() - start == stopping_at + STOP_WAIT_S


async def test_a_tick_that_fails_is_told_by_its_kind_and_the_next_one_comes(autojump_clock: MockClock) -> None:
    log, ticks, stopping = Recorder(), [], trio.Event()

    async def tick() -> None:
        ticks.append(1)
        if len(ticks) == 2:
            stopping.set()
            return
        raise ValueError("a secret value")

    await keep_time("failing", 5, tick, stopping=stopping, log=log, counting=Uncounted())
    await wait_all_tasks_blocked()
    assert log.errors == [{"event": "cadence_failed", "cadence": "failing", "error": "ValueError"}]
