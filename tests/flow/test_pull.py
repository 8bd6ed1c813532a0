"""The pull: the durable pair, its retries, what is refused before any file exists, and what an idle worker does not do."""

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker.domain.errors import Refused
from qlworker.domain.record import State
from qlworker.domain.revision import ArgvCommand
from qlworker.flow.delivery import Delivered
from tests.builders import make_offer, make_revision
from tests.flow.rig import World, outlive


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def pairs(world: World) -> list[tuple[str, str]]:
    return [(call.body["offerId"], call.body["leaseToken"]) for call in world.control.called("offers")]


async def test_the_pair_is_durable_before_the_first_request_and_the_same_on_every_retry(world: World) -> None:
    world.control.fail("offers", times=3)
    async with world.worker() as worker:
        await worker.until(lambda: len(pairs(world)) == 1)
        claim = world.claim()
        assert claim is not None
        assert world.position("claim write: done") < world.position("request offers")
        await worker.until(lambda: len(pairs(world)) == 4)

    assert set(pairs(world)) == {(claim.offer_id, claim.lease_token)}


async def test_a_restart_pulls_with_the_pair_on_disk(world: World) -> None:
    async with world.worker() as worker:
        await worker.until(lambda: pairs(world))
    async with world.worker() as worker:
        await worker.until(lambda: len(pairs(world)) == 2)

    assert len(set(pairs(world))) == 1


async def test_a_thousand_idle_pulls_write_nothing_after_the_first(world: World) -> None:
    async with world.worker(heartbeat_ms=20_000) as worker:
        await worker.until(lambda: len(pairs(world)) == 1)
        before = len(world.steps("journal", "claim", "session", "receipt", "output"))
        await worker.until(lambda: len(pairs(world)) == 1001, within_ms=3_000_000)

        assert len(set(pairs(world))) == 1
        assert len(world.steps("journal", "claim", "session", "receipt", "output")) == before


async def test_after_sixteen_failures_a_new_pair_asks(world: World) -> None:
    world.control.fail("offers", times=40)
    async with world.worker() as worker:
        await worker.until(lambda: len(pairs(world)) == 40, within_ms=3_000_000)

    counts = [pairs(world).count(pair) for pair in dict.fromkeys(pairs(world))]
    assert counts == [16, 16, 8]


@pytest.mark.parametrize(
    "fraction, expected",
    [(0.0, [0, 0, 0]), (0.5, [500, 1000, 2000, 4000]), (1.0, [1000, 2000, 4000, 8000, 16000, 32000, 60000])],
)
async def test_failures_wait_a_fraction_of_a_doubling_time(world: World, fraction: float, expected: list[int]) -> None:
    world.control.fail("offers", times=len(expected) + 1)
    async with world.worker(fraction=lambda: fraction) as worker:
        for wait_ms in expected:
            seen = len(pairs(world))
            await worker.until(lambda seen=seen: len(pairs(world)) == seen + 1)
            failed_at = world.control.called("offers")[-1].boot_ms
            assert worker.delivery._not_before - failed_at == wait_ms


async def test_no_pull_before_the_server_said_so(world: World) -> None:
    world.control.reply("offers", 429, retry_after=40)
    async with world.worker() as worker:
        await worker.until(lambda: pairs(world))
        await worker.pass_time(39_000)
        assert len(pairs(world)) == 1
        await worker.pass_time(3_000)
        assert len(pairs(world)) >= 2


async def test_a_pair_the_server_fences_is_of_no_use_any_more(world: World) -> None:
    world.control.reply("offers", 409)
    async with world.worker() as worker:
        await worker.until(lambda: len(pairs(world)) == 2)

    assert len(set(pairs(world))) == 2


@pytest.mark.req("R2")
async def test_the_offer_is_in_the_inbox_before_its_claim_goes(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until(lambda: "claim remove: done" in world.trace)

    assert world.position("journal accepted: done") < world.position("claim remove")


async def test_gap_1_a_leftover_claim_of_an_old_session_blocks_nothing(world: World) -> None:
    async with world.worker() as worker:
        await worker.until(lambda: pairs(world))
    old = world.claim()
    world.clock.advance(100_000)
    world.control.enqueue(make_revision())

    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    assert old is not None
    assert world.control.session.generation == 2
    assert world.read().offer_id != old.offer_id


async def test_gap_1_unsettled_records_do_not_keep_a_worker_from_starting(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
    async with world.worker() as worker:
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: len(world.records()) == 2)


@pytest.mark.req("R40")
async def test_a_full_journal_refuses_the_offer_and_keeps_what_it_has(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(journal_capacity=1) as worker:
        await worker.until_state("running_acknowledged")
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: world.log.said("journal_full"))

        assert [record.offer.attempt_id for record in world.records()] == ["attempt-1"]
        assert world.processes.opened == 1


async def test_a_full_journal_asks_for_nothing_until_a_record_has_left(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(journal_capacity=1, retention_ms=120_000) as worker:
        await worker.until_state("running_acknowledged")
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: world.log.said("journal_full"))
        asked = len(world.control.called("offers"))
        await worker.pass_time(60_000)
        assert len(world.control.called("offers")) == asked

        world.processes.command.end(0)
        await worker.until(lambda: world.log.said("records_removed"))
        world.control.enqueue(make_revision(), "run-3", "attempt-3")
        await worker.until(lambda: world.processes.opened == 2)


@pytest.mark.parametrize("when", ["", ": done"], ids=["nothing-written", "written-all-the-same"])
async def test_a_disk_that_takes_no_writes_does_not_end_the_worker(world: World, when: str) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for step in ("session write", "claim write", "journal accepted", "claim remove"):
        world.faults[step + when] = [full, full]
    world.control.enqueue(make_revision())
    world.control.fail("offers", times=2)
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    assert world.processes.opened == 1


@pytest.mark.req("R144", "R155", "R547", "R549")
async def test_fifty_deliveries_of_one_offer_are_one_run(world: World) -> None:
    import trio

    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until(lambda: "claim remove: done" in world.trace)
        record = world.read()
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(redeliver, worker, record.offer)
        await worker.until_state("running_acknowledged")

        assert len(world.records()) == 1
    assert len(world.processes.commands) == 1
    assert len(world.control.called("starting")) == 1
    assert len(world.control.called("running")) == 1


async def redeliver(worker: Any, offer: Any) -> None:
    record = await worker.receiver.receive(Delivered(offer, worker.world.clock.boot_ms()), worker.sessions.live)
    worker.executions.carry(record)


# -- what is refused before a file exists


async def refusal_of(world: World, change: Any) -> str:
    """Runs until the changed answer was refused; says why. There must be no file."""
    world.control.enqueue(make_revision())
    world.control.change("offers", lambda answer: change(answer.get("offer")))
    async with world.worker() as worker:
        await worker.until(lambda: "request offers" in world.trace)
        await worker.settle()
        assert world.records() == []
        assert world.processes.commands == []
        assert world.claim() is not None
    said = world.log.said("pull_failed") + world.log.said("offer_refused")
    return str(said[0]["reason"])


def put(path: str, value: object) -> Any:
    def change(offer: dict[str, Any]) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            offer = offer[parent]
        offer[name] = value

    return change


BAD = {
    "offerId": ("R122", "offer-of-somebody-else"),
    "executionRevision.contentDigest": ("R123", "b" * 64),
    "executionDigest": ("R123", "b" * 64),
    "executionRevision.command.file": ("R123", "/bin/false"),
    "candidate.projectId": ("R124", "project-2"),
    "candidate.taskId": ("R124", "task-2"),
    "candidate.taskRevision": ("R124", "qltd:v1:2:" + "a" * 64),
    "candidate.runId": ("R124", "run with spaces"),
    "candidate.attemptId": ("R124", "../../attempt"),
    "worker.workerId": ("R125", "edge-2"),
    "worker.sessionId": ("R125", "018f0000-0000-7000-8000-00000000ffff"),
    "worker.generation": ("R125", 7),
    "lease.expiresAtMs": ("R126", 1),
    "lease.leaseGeneration": ("R126", 0),
    "deliveryKind": ("R122", "gift"),
}


@pytest.mark.req("R8", "R122", "R123", "R124", "R125", "R126", "R156", "R374")
@pytest.mark.parametrize("path", BAD)
async def test_an_offer_that_disagrees_with_its_request_or_with_itself_leaves_no_file(world: World, path: str) -> None:
    reason = await refusal_of(world, put(path, BAD[path][1]))

    assert reason


async def delivered_to(world: World, worker: Any, **changes: Any) -> Delivered:
    """An offer as the pocket control plane would make it for the present session."""
    live = worker.sessions.live
    now = world.control.now_ms()
    offer = make_offer(
        session_id=live.session_id,
        generation=live.generation,
        **{"renewed_at_ms": now, "expires_at_ms": now + 30_000, **changes},
    )
    return Delivered(offer, world.clock.boot_ms())


@pytest.mark.req("R126", "R161", "R377")
@pytest.mark.parametrize("kind", ["new_claim", "lease_recovery"])
async def test_an_expired_run_lease_is_refused_before_the_journal(world: World, kind: str) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        now = world.control.now_ms()
        delivered = await delivered_to(
            world, worker, renewed_at_ms=now - 40_000, expires_at_ms=now - 10_000, delivery_kind=kind
        )
        world.clock.advance(31_000)
        with pytest.raises(Refused, match="lease is over"):
            await worker.receiver.receive(delivered, worker.sessions.live)

    assert world.records() == []


@pytest.mark.req("R127", "R161", "R374", "R378")
@pytest.mark.parametrize(
    "change", [{"session_id": "018f0000-0000-7000-8000-00000000ffff"}, {"generation": 8}, {"worker_id": "x"}]
)
async def test_an_offer_of_a_replaced_session_is_refused_before_the_journal(world: World, change: dict[str, Any]) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        delivered = await delivered_to(world, worker)
        replaced = msgspec.structs.replace(worker.sessions.live, **change)
        with pytest.raises(Refused, match="another session"):
            await worker.receiver.receive(delivered, replaced)

    assert world.records() == []


@pytest.mark.req("R375", "R376")
@pytest.mark.parametrize("change", [{"status": "offline"}, {"expires_at": 1}])
async def test_an_offline_or_expired_session_takes_nothing(world: World, change: dict[str, Any]) -> None:
    from qlworker.domain.session import SessionStatus

    if "status" in change:
        change = {"status": SessionStatus.OFFLINE}
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        delivered = await delivered_to(world, worker)
        with pytest.raises(Refused, match="offline or its lease is over"):
            await worker.receiver.receive(delivered, msgspec.structs.replace(worker.sessions.live, **change))

    assert world.records() == []


@pytest.mark.req("R379", "R380")
async def test_a_draining_session_refuses_new_claims_and_takes_its_own_leases_back(world: World) -> None:
    from qlworker.domain.session import SessionStatus

    async with world.worker() as worker:
        await worker.pass_time(1_000)
        draining = msgspec.structs.replace(worker.sessions.live, status=SessionStatus.DRAINING)
        with pytest.raises(Refused, match="draining"):
            await worker.receiver.receive(await delivered_to(world, worker), draining)
        assert world.records() == []
        recovered = await delivered_to(world, worker, delivery_kind="lease_recovery")
        await worker.receiver.receive(recovered, draining)

        assert world.read().state is State.ACCEPTED


@pytest.mark.req("R24", "R25", "R26", "R156")
async def test_the_same_offer_again_only_moves_its_lease_and_another_authority_changes_nothing(world: World) -> None:
    from qlworker.domain.errors import Conflict

    async with world.worker() as worker:
        await worker.pass_time(1_000)
        first = await delivered_to(world, worker)
        await worker.receiver.receive(first, worker.sessions.live)
        stored = next((world.root / "journal" / "offers").iterdir())
        before = stored.read_bytes()
        await worker.receiver.receive(first, worker.sessions.live)
        others = [
            {"lease_token": "another_worker_generated_capability_0000000000000001"},
            {"run_id": "run-9"},
            {"attempt_id": "attempt-9"},
            {"revision": make_revision(ArgvCommand(file="/bin/false", args=[]))},
        ]
        for other in others:
            with pytest.raises(Conflict):
                await worker.receiver.receive(await delivered_to(world, worker, **other), worker.sessions.live)
        assert stored.read_bytes() == before
        newer = await delivered_to(world, worker, lease_version=3)
        await worker.receiver.receive(newer, worker.sessions.live)

        assert world.read().offer.lease.version == 3
        assert world.read().state is State.ACCEPTED


@pytest.mark.req("R3", "R159")
async def test_an_offer_whose_answer_was_lost_comes_again_under_the_same_lease(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.lose("offers", times=2)
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    assert len(set(pairs(world)[:3])) == 1
    assert world.control.lease_of().generation == 1
    assert world.processes.opened == 1


@pytest.mark.req("R2")
async def test_an_end_between_inbox_and_claim_meets_the_same_offer_again(world: World) -> None:
    world.control.enqueue(make_revision())

    async def life() -> None:
        async with world.worker() as worker:
            await worker.until(lambda: False)

    world.kill_at = 18  # "claim remove"
    await outlive(life)
    assert world.trace[-1] == "claim remove"
    world.kill_at = None
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        await worker.until(lambda: world.claim() is None or world.claim().offer_id != world.read().offer_id)  # type: ignore[union-attr]

    assert len(world.records()) == 1
    assert world.processes.opened == 1


async def test_an_exhausted_budget_is_told_apart_from_no_work(world: World) -> None:
    def exhaust(answer: dict[str, Any]) -> None:
        answer.update({"reason": "scan_budget_exhausted", "truncated": True})

    world.control.change("offers", exhaust, times=3)
    async with world.worker() as worker:
        await worker.until(lambda: len(pairs(world)) == 6)

    assert [line["reason"] for line in world.log.said("pull_idle")] == ["scan_budget_exhausted", "no_candidates"]


async def test_gap_6_a_box_for_two_runs_runs_two_and_never_a_third(world: World) -> None:
    for number in range(1, 5):
        world.control.enqueue(make_revision(), f"run-{number}", f"attempt-{number}")
    async with world.worker(max_concurrent_runs=2) as worker:
        await worker.until(lambda: world.processes.opened == 2)
        await worker.pass_time(60_000)
        assert world.processes.opened == 2
        assert {call.body["availableSlots"] for call in world.control.called("heartbeat", "register")} == {2}
        world.processes.commands[0].end(0)
        await worker.until(lambda: world.processes.opened == 3)
