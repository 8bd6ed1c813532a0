"""The next certificate is asked for in time, by the control plane's clock, and never at the cost of anything else."""

from itertools import pairwise
from pathlib import Path

import pytest

from qlworker.domain.certificate import DAY_MS, HOUR_MS, Validity
from qlworker.domain.errors import Misconfigured, Refused, Transient
from qlworker.flow.renewal import LOOK_MS
from tests.flow.pocket_control_plane import EPOCH_MS
from tests.flow.rig import CADENCE_MS, WINDOW_MS, Worker, World

LIFETIME_MS = 90 * DAY_MS
MARGIN_MS = 30 * DAY_MS
JUMP_MS = WINDOW_MS * 2 // 3
SOON_MS = EPOCH_MS + DAY_MS


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def due(world: World) -> None:
    """The worker's certificate has one day left."""
    world.certificate.term = Validity(SOON_MS - LIFETIME_MS, SOON_MS)


async def pass_over(world: World, worker: Worker, by_ms: int) -> None:
    """Lets hours go by in steps as large as the journal's ownership bears, and then the worker have a few ticks."""
    for _ in range(0, by_ms, JUMP_MS):
        world.clock.advance(min(JUMP_MS, by_ms))
        await worker.settle()
    await worker.pass_time(3 * CADENCE_MS)


async def test_a_certificate_with_a_day_left_is_replaced_once(world: World) -> None:
    due(world)
    async with world.worker() as worker:
        await worker.until(lambda: world.certificate.installed)
        await pass_over(world, worker, HOUR_MS)

    assert world.certificate.looks == 2
    assert world.certificate.installed == [("-----BEGIN CERTIFICATE----- 0", b"the key")]
    assert world.log.said("certificate_renewed") == [{"serial": "0", "ends_at_ms": 2**42}]


async def test_nothing_is_asked_before_it_is_due(world: World) -> None:
    end = EPOCH_MS + MARGIN_MS + MARGIN_MS // 4 + 3 * HOUR_MS
    world.certificate.term = Validity(end - LIFETIME_MS, end)
    async with world.worker(fraction=lambda: 1.0) as worker:
        await worker.until(lambda: world.certificate.looks == 1)
        await pass_over(world, worker, 2 * HOUR_MS)
        assert world.control.called("certificate") == []
        await pass_over(world, worker, HOUR_MS + JUMP_MS)

    assert len(world.certificate.installed) == 1


async def test_the_date_is_looked_at_only_now_and_then(world: World) -> None:
    async with world.worker() as worker:
        await worker.until(lambda: world.certificate.looks == 1)
        await pass_over(world, worker, LOOK_MS - 2 * JUMP_MS)
        assert world.certificate.looks == 1
        await pass_over(world, worker, 2 * JUMP_MS)

    assert world.certificate.looks == 2


async def test_a_box_that_does_not_know_the_time_asks_for_nothing(world: World) -> None:
    """Its own clock may say 1970 or 2106; only the control plane's counts."""
    due(world)
    world.control.go_away()
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("register")) == 5, within_ms=HOUR_MS)

        assert world.certificate.looks == 0


async def test_a_refusal_is_told_and_tried_again_with_doubling_waits(world: World) -> None:
    due(world)
    world.control.always("certificate", 503)
    async with world.worker(fraction=lambda: 1.0) as worker:
        times = []
        for count in range(1, 6):
            await worker.until(lambda count=count: len(world.control.called("certificate")) == count, within_ms=HOUR_MS)
            times.append(world.clock.boot_ms())
        assert world.certificate.installed == []
        world.control.come_back()
        await worker.until(lambda: world.certificate.installed, within_ms=HOUR_MS)

    waits = [later - sooner for sooner, later in pairwise(times)]
    assert [round(wait / 30_000) for wait in waits] == [1, 2, 4, 8]
    assert world.log.said("certificate_not_renewed")[0]["ends_at_ms"] == SOON_MS


@pytest.mark.parametrize(
    "error", [Misconfigured("neither library nor program"), Transient("too slow"), OSError(28, "No space left"), Refused("no")]
)
async def test_a_failure_on_the_box_is_told_and_the_work_goes_on(world: World, error: Exception) -> None:
    due(world)
    world.certificate.faults.append(error)
    async with world.worker() as worker:
        await worker.until(lambda: world.log.said("certificate_not_renewed"), within_ms=HOUR_MS)
        pulls = len(world.control.called("offers"))
        await worker.until(lambda: len(world.control.called("offers")) > pulls, within_ms=HOUR_MS)
        await worker.until(lambda: world.certificate.installed, within_ms=HOUR_MS)


async def test_a_control_plane_that_renews_nothing_is_asked_once_a_day(world: World) -> None:
    due(world)
    world.control.always("certificate", 404)
    async with world.worker() as worker:
        await worker.until(lambda: world.control.called("certificate"))
        await pass_over(world, worker, DAY_MS - HOUR_MS)
        assert len(world.control.called("certificate")) == 1
        await pass_over(world, worker, HOUR_MS)

    assert len(world.control.called("certificate")) == 2
    told = world.log.said("certificate_renewal_by_hand")
    assert told[0] == {"reason": "the control plane renews no certificates", "ends_at_ms": SOON_MS}


async def test_certificate_and_key_in_two_files_are_left_to_the_operator(world: World) -> None:
    due(world)
    world.certificate.is_replaceable = False
    async with world.worker() as worker:
        await worker.until(lambda: world.log.said("certificate_renewal_by_hand"), within_ms=HOUR_MS)

    assert world.control.called("certificate") == []
