"""The session: opened, continued, kept, fenced, suspended, run out, drained and signed off."""

import errno
from pathlib import Path

import pytest

from qlworker.domain.session import Access
from tests.builders import make_revision
from tests.flow.rig import CAPABILITIES, World

OTHER = '{"architecture":"amd64","executors":["remote-worker"],"labels":{"site":"b"}}'


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_steady_session_heartbeats_at_its_interval_and_writes_nothing_after_the_first(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        before = len(world.steps("session write"))
        await worker.pass_time(100_000)

    assert 8 <= len(world.control.called("heartbeat")) <= 11
    assert len(world.steps("session write")) == before


async def test_a_restarted_worker_goes_on_in_the_same_session_at_the_version_the_server_has(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(25_000)
    first = world.control.session.session_id
    version = world.control.session.version

    async with world.worker() as worker:
        await worker.pass_time(25_000)

        assert worker.sessions.live is not None
        assert worker.sessions.live.session_id == first
        assert world.control.session.generation == 1
        assert world.control.session.version > version
        assert worker.sessions.access is Access.OPEN


async def test_a_restart_after_a_lost_heartbeat_answer_goes_on_in_the_same_session_too(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.lose("heartbeat")
        await worker.pass_time(10_000)

    async with world.worker() as worker:
        await worker.pass_time(1_000)

        assert world.control.session.generation == 1
        assert worker.sessions.may_pull


async def test_a_session_that_ran_out_during_the_restart_is_followed_by_a_new_one(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
    world.clock.advance(60_000)

    async with world.worker() as worker:
        await worker.pass_time(1_000)

        assert world.control.session.generation == 2
        assert worker.sessions.may_pull


async def test_changed_capabilities_open_a_new_session_when_no_work_depends_on_the_old_one(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)

    async with world.worker(capabilities=(OTHER,)) as worker:
        await worker.pass_time(1_000)

    assert world.control.session.capabilities_json == OTHER
    assert world.control.session.generation == 2


@pytest.mark.parametrize("terms", [{"capabilities": (OTHER,)}, {"max_concurrent_runs": 5}, {"max_concurrent_runs": 1}])
async def test_changed_terms_do_not_end_the_session_that_running_work_depends_on(
    world: World, terms: dict[str, object]
) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    async with world.worker(**terms) as worker:
        await worker.pass_time(5_000)
        assert world.control.session.generation == 1
        assert world.control.session.capabilities_json == CAPABILITIES
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")


@pytest.mark.parametrize("times", [1, 3])
async def test_gap_4_a_lost_heartbeat_answer_is_found_again_within_the_session(world: World, times: int) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.lose("heartbeat", times)
        await worker.pass_time(30_000)

        assert worker.sessions.access is Access.OPEN
        assert worker.sessions.live is not None
        assert worker.sessions.live.version == world.control.session.version
        assert world.control.session.generation == 1
        assert len(world.control.called("register")) == 1


async def test_a_heartbeat_that_was_lost_on_the_way_is_simply_sent_again(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.fail("heartbeat", times=3)
        await worker.pass_time(30_000)

        assert worker.sessions.access is Access.OPEN
        assert world.control.session.generation == 1


async def register_another(world: World) -> str:
    """Another box with the same worker id comes along."""
    from qlworker.domain.canonical import sha256_hex
    from qlworker.domain.text import new_session_id
    from qlworker.wire.session import REGISTER_SCHEMA, RegisterRequest

    session_id = new_session_id(1)
    request = RegisterRequest(
        schema=REGISTER_SCHEMA,
        capabilities_json=CAPABILITIES,
        capabilities_hash=sha256_hex(CAPABILITIES.encode()),
        max_concurrent_runs=2,
        available_slots=2,
        lease_duration_ms=45_000,
    )
    world.control._register(session_id, request.to_json())
    return session_id


@pytest.mark.parametrize("is_unsure", [False, True])
async def test_a_replaced_worker_stops_for_good_and_leaves_its_replacement_alone(world: World, is_unsure: bool) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        other = await register_another(world)
        if is_unsure:
            world.control.fail("heartbeat")
        await worker.pass_time(1_000_000)

        assert worker.sessions.access is Access.FENCED
        assert not worker.sessions.may_pull
        assert (world.control.session.session_id, world.control.session.generation) == (other, 2)
        sent = len(world.control.calls)
        await worker.pass_time(1_000_000)
        assert len(world.control.calls) == sent
    assert len(world.log.said("session_fenced")) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_a_rejected_credential_suspends_the_pull_and_an_accepted_heartbeat_lifts_it(world: World, status: int) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.always("heartbeat", status)
        await worker.pass_time(12_000)
        assert worker.sessions.access is Access.SUSPENDED
        pulls = len(world.control.called("offers"))
        await worker.pass_time(8_000)
        assert len(world.control.called("offers")) == pulls
        world.control.always("heartbeat", None)
        await worker.pass_time(12_000)

        assert worker.sessions.access is Access.OPEN
        assert len(world.control.called("offers")) > pulls
        assert world.control.session.generation == 1


@pytest.mark.parametrize("status", [404, 400, 500, 503, 504])
async def test_an_answer_that_decides_nothing_keeps_the_session_and_the_worker(world: World, status: int) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.always("heartbeat", status)
        await worker.pass_time(20_000)
        assert worker.sessions.may_pull
        world.control.always("heartbeat", None)
        await worker.pass_time(20_000)

        assert worker.sessions.may_pull
        assert world.control.session.generation == 1
    assert len(world.log.said("control_plane_unreachable")) == 1
    assert len(world.log.said("control_plane_reachable")) == 1


@pytest.mark.parametrize("status", [404, 400, 401, 409, 503])
async def test_a_registration_that_is_refused_is_tried_again(world: World, status: int) -> None:
    world.control.reply("register", status, times=3)
    async with world.worker() as worker:
        await worker.pass_time(60_000)

        assert worker.sessions.may_pull


async def test_a_retry_after_of_the_server_is_respected(world: World) -> None:
    world.control.reply("register", 503, retry_after=30)
    async with world.worker() as worker:
        await worker.pass_time(29_000)
        assert len(world.control.called("register")) == 1
        await worker.pass_time(4_000)
        assert len(world.control.called("register")) == 2


async def test_gap_11_a_session_that_ran_out_here_is_followed_by_a_new_registration(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.go_away()
        await worker.pass_time(60_000)
        assert not worker.sessions.may_pull
        world.control.come_back()
        await worker.pass_time(5_000)

        assert worker.sessions.may_pull
        assert world.control.session.generation == 2


@pytest.mark.parametrize("wall_ms", [0, 4_000_000_000_000])
async def test_gap_12_a_session_continued_under_a_wrong_clock_is_not_believed_longer_than_its_lease(
    world: World, wall_ms: int
) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
    world.clock.reboot("another-boot", wall_ms)
    world.control.go_away("heartbeat")

    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.go_away()
        await worker.pass_time(100_000)
        assert not worker.sessions.may_pull
        world.control.come_back()
        await worker.pass_time(5_000)

        assert worker.sessions.access is Access.OPEN
        assert worker.sessions.may_pull


async def test_an_older_server_gets_the_capabilities_it_understands(world: World) -> None:
    world.control.refused_capabilities.add(OTHER)
    async with world.worker(capabilities=(OTHER, CAPABILITIES)) as worker:
        await worker.pass_time(1_000)

        assert worker.sessions.may_pull
    assert world.control.session.capabilities_json == CAPABILITIES


async def test_a_lost_registration_answer_does_not_make_a_second_session(world: World) -> None:
    world.control.lose("register")
    async with world.worker() as worker:
        await worker.pass_time(5_000)

        assert worker.sessions.may_pull
    assert world.control.session.generation == 1


@pytest.mark.parametrize(
    "member, value",
    [("workerId", "edge-2"), ("sessionId", "018f0000-0000-7000-8000-00000000ffff"), ("version", 7), ("generation", 9)],
)
async def test_an_answer_for_another_session_or_version_is_not_taken(world: World, member: str, value: object) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        before = worker.sessions.live
        world.control.change("heartbeat", lambda answer: answer.update({member: value}))
        await worker.until(lambda: len(world.control.called("heartbeat")) == 2)

        assert worker.sessions.live == before
        await worker.pass_time(10_000)
        assert worker.sessions.may_pull


@pytest.mark.req("R379")
async def test_a_drain_tells_draining_finishes_the_work_and_only_then_signs_off(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        worker.cadence.drain()
        await worker.pass_time(30_000)
        assert world.control.session.status == "draining"
        assert not worker.drained.is_set()
        world.processes.command.end(0)
        await worker.until(worker.drained.is_set)

    assert world.control.session.status == "offline"
    assert world.control.attempts["attempt-1"].status == "succeeded"
    assert world.control.attempts["attempt-2"].status == "queued"
    told = [call.body["status"] for call in world.control.called("transition")]
    assert told == ["draining", "offline"]
    assert world.position("request completion") < world.position("session remove")
    assert world.stored_session() is None


@pytest.mark.parametrize("status", ["draining", "offline"])
async def test_a_drain_whose_answer_was_lost_comes_to_its_end(world: World, status: str) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        if status == "offline":
            worker.cadence.drain()
            world.control.hold("transition").go_on.set()
        world.control.lose("transition")
        worker.cadence.drain()
        await worker.until(worker.drained.is_set, within_ms=60_000)

    assert world.control.session.status == "offline"
    assert world.log.said("session_fenced") == []


async def test_a_drain_without_a_control_plane_waits_for_it_and_a_restart_goes_back_to_work(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        world.control.go_away()
        worker.cadence.drain()
        await worker.pass_time(20_000)
        assert not worker.drained.is_set()
        world.control.come_back()
        await worker.pass_time(1_000)

    async with world.worker() as worker:
        await worker.pass_time(5_000)
        assert worker.sessions.may_pull


async def test_a_worker_restarted_in_the_middle_of_a_drain_takes_new_work_once_the_old_is_done(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        worker.cadence.drain()
        await worker.pass_time(5_000)
    assert world.control.session.status == "draining"

    async with world.worker() as worker:
        await worker.pass_time(5_000)
        assert world.control.session.generation == 1
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")
        await worker.pass_time(20_000)

        assert worker.sessions.may_pull


async def test_a_session_that_the_disk_did_not_take_is_not_used(world: World) -> None:
    world.faults["session write"] = [OSError(errno.ENOSPC, "No space left on device")] * 2
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("register")) == 2)
        assert not worker.sessions.may_pull
        assert world.control.called("heartbeat") == []
        await worker.pass_time(10_000)
        assert worker.sessions.may_pull
    generation = world.control.session.generation

    async with world.worker() as worker:
        await worker.pass_time(1_000)

    assert world.control.session.generation == generation
