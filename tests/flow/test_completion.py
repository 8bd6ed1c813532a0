"""The end of a run: what a receipt proves, upload, completion, the journal, and what happens to the evidence."""

import errno
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qlworker.domain.canonical import b64u
from qlworker.domain.errors import Conflict
from qlworker.domain.evidence import ObservedEnd
from qlworker.domain.identity import Presence
from qlworker.domain.receipt import Ending
from qlworker.domain.record import RecoveryReason, State
from qlworker.flow.active import ActiveOffer
from tests.builders import make_revision
from tests.flow.rig import World, outlive, publish


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def running(world: World) -> None:
    """A run in running_acknowledged whose worker went away in an orderly way."""
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
    world.trace.clear()
    world.processes.inspected.clear()


def put_receipt(world: World, **changes: Any) -> Path:
    """The launcher's receipt with something changed, published in its place."""
    command = world.processes.command
    receipt = msgspec.structs.replace(command.receipt(0, Ending.EXITED), **changes)
    path = command.plan.receipt
    publish(receipt, path)
    return path


# -- what a receipt proves


@pytest.mark.req("R179", "R196", "R198")
async def test_a_trusted_receipt_is_read_first_and_makes_a_probe_unnecessary(world: World) -> None:
    await running(world)
    world.processes.command.end(7)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")

    assert world.processes.inspected == []
    assert world.control.attempts["attempt-1"].exit_code == 7


@pytest.mark.req("R199", "R200", "R201")
async def test_a_receipt_that_shows_up_late_is_found_within_the_grace(world: World) -> None:
    await running(world)
    world.processes.command.publishes = False
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until(lambda: len(world.steps("receipt read")) >= 3)
        assert len(world.processes.inspected) == 1
        put_receipt(world)
        await worker.until_state("completion_acknowledged", within_ms=5_000)


FORGED = {
    "run": ("R180", {"run_id": "run-9"}),
    "start-later": ("R181", {"started_at_ms": 1}),
    "token": ("R182", {"token": b64u(b"x" * 32)}),
    "short-token": ("R182", {"token": b64u(b"x" * 31)}),
    "sequence": ("R188", {"callback_sequence": 2}),
    "finished-in-the-future": ("R209", {"finished_at_ms": 2_000_000_000_000}),
}


@pytest.mark.req("R180", "R181", "R182", "R184", "R188", "R193", "R205")
@pytest.mark.parametrize("forged", FORGED)
async def test_a_receipt_that_is_not_this_attempts_is_never_sent_kept_and_asks_no_process(world: World, forged: str) -> None:
    await running(world)
    path = put_receipt(world, **FORGED[forged][1])
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert world.read().recovery_reason is RecoveryReason.LAUNCH_OUTCOME_UNKNOWN
    assert world.control.called("completion", "artifacts", "start-failure") == []
    assert world.processes.inspected == []
    assert world.processes.stopped == []
    assert path.exists()


@pytest.mark.req("R181")
@pytest.mark.parametrize("by_ms", [-1, 1])
async def test_a_start_time_that_is_off_by_a_millisecond_is_refused(world: World, by_ms: int) -> None:
    await running(world)
    put_receipt(world, started_at_ms=world.processes.command.plan.started_at_ms + by_ms)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")


@pytest.mark.req("R195", "R193")
@pytest.mark.parametrize("kind", ["io-error", "not-json", "other-attempt"])
async def test_a_receipt_that_cannot_be_read_stops_everything_about_that_run_and_nothing_else(world: World, kind: str) -> None:
    await running(world)
    path = world.processes.command.plan.receipt
    if kind == "io-error":
        world.faults["receipt read"] = [OSError(errno.EIO, "unreadable")] * 1000
    elif kind == "not-json":
        path.write_bytes(b"{")
        path.chmod(0o600)
    else:
        publish(msgspec.structs.replace(world.processes.command.receipt(0, Ending.EXITED), attempt_id="attempt-2"), path)
        assert path.exists()
    async with world.worker() as worker:
        await worker.pass_time(60_000)
        assert worker.is_in("running_acknowledged")
        assert world.processes.inspected == []
        assert world.control.called("completion") == []
        world.control.enqueue(make_revision(), "run-2", "attempt-2x")
        if kind != "io-error":
            await worker.until(lambda: world.processes.opened == 2)
            path.unlink()
        world.faults.clear()
        world.processes.commands[0].gone.set()
        publish(world.processes.commands[0].receipt(0, Ending.EXITED), path)
        await worker.until(lambda: world.control.attempts["attempt-1"].status == "succeeded", within_ms=120_000)


@pytest.mark.req("R198", "R202", "R203", "R204", "R205", "R206")
@pytest.mark.parametrize("presence", [p for p in Presence if p not in (Presence.RUNNING, Presence.PENDING)])
async def test_what_is_seen_of_a_process_without_a_receipt_is_never_turned_into_an_end(
    world: World, presence: Presence
) -> None:
    await running(world)
    world.processes.presence = presence
    async with world.worker() as worker:
        await worker.until_state("recovery_required", within_ms=6_000)

    assert world.read().recovery_reason is RecoveryReason.LAUNCH_OUTCOME_UNKNOWN
    assert world.processes.stopped == []
    assert world.control.called("completion", "start-failure") == []
    assert len(world.processes.commands) == 1


@pytest.mark.req("R206", "R239")
async def test_a_command_whose_launcher_has_not_spoken_yet_is_neither_called_running_nor_given_up(world: World) -> None:
    """The first worker died before it opened the gate, and the launcher is slow to say so."""
    attempt = world.control.enqueue(make_revision())

    async def life() -> None:
        async with world.worker() as worker:
            reached, go_on = world.pause("gate open")
            await worker.until(reached.is_set)
            world.processes.command.publishes = False
            world.is_dead = True
            go_on.set()

    await outlive(life)
    world.processes.presence = Presence.PENDING
    async with world.worker() as worker:
        await worker.pass_time(20_000)
        assert (world.read().state, attempt.status) == (State.STARTED, "starting")
        command = world.processes.command
        publish(command.receipt(125, Ending.NOT_STARTED), command.plan.receipt)
        await worker.until_state("start_failure_acknowledged")

    assert world.control.called("running") == []


@pytest.mark.req("R184")
async def test_not_started_contradicts_an_acknowledged_running_and_stays_unknown(world: World) -> None:
    await running(world)
    put_receipt(world, ending=Ending.NOT_STARTED)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert world.control.called("start-failure", "completion") == []


# -- the order of the end


@pytest.mark.req("R197", "R225", "R224")
async def test_the_receipt_goes_only_after_the_end_is_durable(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")
        await worker.settle()

    order = world.steps("request artifacts", "request completion", "journal completion", "receipt remove")
    assert order == ["request artifacts", "request completion", "journal completion_acknowledged", "receipt remove"]
    assert world.receipt_files() == []
    assert world.read().completion_acknowledged_at_ms is not msgspec.UNSET


@pytest.mark.req("R226", "R227")
async def test_a_completion_that_could_not_be_journalled_is_sent_again_byte_by_byte_and_keeps_its_receipt(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    world.faults["journal completion_acknowledged"] = [OSError(errno.ENOSPC, "full")] * 2
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("completion")) == 1)
        await worker.settle()
        assert world.receipt_files()
        await worker.until_state("completion_acknowledged")

    bodies = world.control.attempts["attempt-1"].completion_bodies
    assert len(bodies) == 3
    assert len(set(bodies)) == 1


@pytest.mark.req("R222", "R227")
@pytest.mark.parametrize("restart", [False, True])
async def test_a_lost_completion_answer_is_replayed_exactly(world: World, restart: bool) -> None:
    await running(world)
    world.processes.command.end(0)
    world.control.lose("completion")
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("completion")) == 1)
        await worker.settle()
        assert worker.is_in("running_acknowledged")
        if not restart:
            await worker.until_state("completion_acknowledged")
    if restart:
        async with world.worker() as worker:
            await worker.until_state("completion_acknowledged")

    bodies = world.control.attempts["attempt-1"].completion_bodies
    assert len(bodies) == 2
    assert len(set(bodies)) == 1
    assert world.receipt_files() == []


@pytest.mark.req("R228", "R229")
async def test_a_receipt_that_cannot_be_removed_changes_nothing_and_is_removed_later(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    world.faults["receipt remove"] = [OSError(errno.EROFS, "read-only")]
    async with world.worker(retention_ms=60_000) as worker:
        await worker.until_state("completion_acknowledged")
        await worker.settle()
        assert world.receipt_files()
        assert worker.is_in("completion_acknowledged")
        await worker.until(lambda: not world.records())

    assert world.receipt_files() == []
    assert len(world.control.called("completion")) == 1


@pytest.mark.req("R223")
async def test_the_completion_carries_the_journals_authority_and_the_receipts_result(world: World) -> None:
    await running(world)
    world.processes.command.end(3)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")

    body = json.loads(world.control.attempts["attempt-1"].completion_bodies[0])
    record, command = world.read(), world.processes.command
    offer = record.offer
    assert body["leaseToken"] == offer.lease_token
    assert body["leaseGeneration"] == offer.lease.lease_generation
    assert body["workerGeneration"] == offer.worker.generation
    assert body["expectedLeaseVersion"] == offer.lease.version
    assert body["callbackSequence"] == command.plan.callback_sequence
    assert body["callbackTokenDigest"] == record.completion_receipt_token_digest
    started = command.plan.started_at_ms
    assert body["result"] == {
        "outcome": "failed",
        "startedAtMs": started,
        "finishedAtMs": started + 1000,
        "exitCode": 3,
    }
    [call] = world.control.called("completion")
    assert call.session_id == offer.worker.session_id


@pytest.mark.req("R212")
async def test_a_completion_of_an_attempt_that_ended_otherwise_keeps_the_evidence(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    world.control.change("completion", lambda answer: answer.update({"status": "already_terminal"}))
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(60_000)

    assert world.read().recovery_reason is RecoveryReason.CONTROL_PLANE_TERMINAL
    assert world.receipt_files()
    assert len(world.control.called("completion")) == 1


@pytest.mark.req("R211", "R213")
async def test_a_new_session_never_completes_an_old_ones_run_even_with_a_good_receipt(world: World) -> None:
    await running(world)
    world.control.sessions.clear()
    world.clock.advance(46_000)
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(60_000)

    assert world.control.called("completion", "artifacts") == []
    assert world.read().recovery_reason is RecoveryReason.LEASE_LOST_STOPPED
    assert world.receipt_files()


@pytest.mark.req("R171", "R240")
async def test_a_started_command_that_runs_is_adopted_and_only_running_is_told(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.lose("running", times=50)

    async with world.worker() as worker:
        await worker.until_state("started")
    world.control._faults.clear()
    world.trace.clear()
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")

    assert world.steps("executor") == []
    assert world.steps("request starting", "request secrets") == []
    assert len(world.processes.commands) == 1


@pytest.mark.req("R230")
async def test_a_restart_and_a_redelivery_complete_a_run_once(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    record = world.read()
    async with world.worker() as worker:
        for _ in range(20):
            worker.executions.carry(record)
        await worker.until_state("completion_acknowledged")

    assert len(world.control.called("completion")) == 1
    assert len(world.control.called("artifacts")) == 1


@pytest.mark.req("R172")
async def test_a_record_in_running_acknowledged_is_not_acknowledged_again(world: World) -> None:
    await running(world)
    before = len(world.control.called("running", "starting"))
    async with world.worker() as worker:
        await worker.pass_time(60_000)

    assert len(world.control.called("running", "starting")) == before


async def test_a_run_that_ended_before_running_could_be_told_is_completed_all_the_same(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    world.control.always("running", 503)
    async with world.worker() as worker:
        await worker.until_state("started")
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")

    assert attempt.status == "succeeded"


async def test_the_upload_goes_on_while_the_lease_is_renewed(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        hold = world.control.hold("artifacts", performed=True)
        world.processes.command.end(0)
        await worker.until(hold.reached.is_set)
        await worker.pass_time(120_000)
        assert world.control.lease_of().version >= 8
        hold.go_on.set()
        await worker.until_state("completion_acknowledged")

    assert len(world.control.called("artifacts")) == 1


async def test_the_output_that_was_written_is_the_artifact(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")

    assert list(world.control.artifacts.values()) == [b"hello from the command\n"]


async def test_an_upload_that_is_measured_differently_is_not_completed(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    world.control.change("artifacts", lambda answer: answer.update({"sha256": "0" * 64}))
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("artifacts")) == 1)
        await worker.settle()
        assert world.control.called("completion") == []
        await worker.until_state("completion_acknowledged")


# -- the coordinator: who decides, and under which authority


def observed_end(world: World) -> ObservedEnd:
    return ObservedEnd.of(world.processes.command.receipt(0, Ending.EXITED))


@pytest.mark.req("R231")
async def test_of_two_who_complete_one_record_the_journals_revision_lets_one_through(world: World) -> None:
    await running(world)
    async with world.worker() as worker:
        await worker.settle()
        outcomes: list[str] = []

        async def complete() -> None:
            try:
                await worker.completion.complete(ActiveOffer(world.read().offer_id), observed_end(world))
                outcomes.append("completed")
            except Conflict:
                outcomes.append("came second")

        reached, go_on = world.pause("journal completion_acknowledged")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete)
            await reached.wait()
            nursery.start_soon(complete)
            while len(world.control.called("completion")) < 2 or not outcomes:
                await trio.lowlevel.checkpoint()
            go_on.set()

        assert sorted(outcomes) == ["came second", "completed"]
        assert worker.is_in("completion_acknowledged")
        assert world.control.attempts["attempt-1"].status == "succeeded"


@pytest.mark.req("R220")
async def test_a_completion_goes_by_the_record_on_disk_and_not_by_what_was_seen_before(world: World) -> None:
    await running(world)
    before = world.read().offer.lease.version
    async with world.worker() as worker:
        await worker.until(lambda: world.read().offer.lease.version > before)
        await worker.completion.complete(ActiveOffer(world.read().offer_id), observed_end(world))

        body = json.loads(world.control.attempts["attempt-1"].completion_bodies[0])
        assert body["expectedLeaseVersion"] == world.read().offer.lease.version > before


@pytest.mark.req("R220", "R221")
async def test_a_record_that_is_settled_or_in_recovery_is_not_completed(world: World) -> None:
    await running(world)
    world.processes.presence = Presence.MISMATCH
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.completion.complete(ActiveOffer(world.read().offer_id), observed_end(world))

    assert world.control.called("completion") == []


@pytest.mark.req("R211", "R213", "R221")
@pytest.mark.parametrize("blocked", ["offline", "fenced", "session-expired"])
async def test_an_end_without_a_current_authority_waits_where_it_is(world: World, blocked: str) -> None:
    await running(world)
    world.processes.command.end(0)
    if blocked == "offline":
        world.control.go_away()
    elif blocked == "fenced":
        world.control.always("heartbeat", 409)
        world.control.always("register", 409)
    else:
        world.control.always("heartbeat", 503)
        world.control.always("register", 503)
    async with world.worker() as worker:
        await worker.pass_time(10_000)
        assert worker.is_in("running_acknowledged")
        assert world.control.called("completion", "artifacts") == []
        assert world.receipt_files()
        assert [line["authority"] for line in world.log.said("completion_blocked")][:1] != []


@pytest.mark.req("R239", "R240", "R243")
async def test_a_late_running_goes_out_under_the_version_in_the_journal(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.lose("running", times=50)
    async with world.worker() as worker:
        await worker.until_state("started")
        await worker.pass_time(20_000)
    version = world.read().offer.lease.version
    assert version > 0
    world.control._faults.clear()
    sent = len(world.control.called("running"))
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    assert world.control.called("running")[sent].body["expectedLeaseVersion"] == version


@pytest.mark.req("R239", "R242")
async def test_running_is_not_told_for_a_process_that_cannot_be_seen_to_run(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.fail("running", times=50)
    async with world.worker() as worker:
        await worker.until_state("started")
    world.control._faults.clear()
    sent = len(world.control.called("running"))
    world.processes.presence = Presence.PROBE_FAILED
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert len(world.control.called("running")) == sent
    assert world.control.called("completion") == []


@pytest.mark.req("R232")
async def test_what_is_said_about_an_end_holds_no_capability(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")
        await worker.settle()

    said = repr(world.log.lines)
    record = world.read()
    assert world.log.said("run_completed")
    for hidden in (record.offer.lease_token, b64u(world.processes.command.token), str(record.completion_receipt_token_digest)):
        assert hidden not in said


@pytest.mark.req("R546")
async def test_a_record_in_the_journal_never_stands_for_the_lease(world: World) -> None:
    """The journal says that the run is this worker's; the control plane says that its lease is over: that decides."""
    await running(world)
    attempt = world.control.attempts["attempt-1"]
    world.control.lease_of().status = "released"
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert attempt.status == "running"
    assert world.receipt_files()


# -- the live view


async def test_the_live_view_shows_the_output_and_a_hint_brings_the_stop_early(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    async with world.worker(live_output=True) as worker:
        await worker.until_state("running_acknowledged")
        await worker.until(lambda: world.control.output)
        assert list(world.control.output.values()) == [b"hello from the command\n"]
        attempt.cancel = "user"
        await worker.until(lambda: world.processes.stopped, within_ms=4_000)


async def test_a_server_without_a_live_view_is_asked_once(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.knows_output = False
    async with world.worker(live_output=True) as worker:
        await worker.until_state("running_acknowledged")
        await worker.pass_time(60_000)

    assert len(world.control.called("output")) == 1


async def test_an_output_file_that_is_made_unsafe_by_the_command_ends_nobody(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(live_output=True) as worker:
        await worker.until_state("running_acknowledged")
        path = world.processes.command.plan.output
        (world.root / "elsewhere").hardlink_to(path)
        await worker.pass_time(10_000)
        assert world.log.said("live_output_deferred")
        (world.root / "elsewhere").unlink()
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")


# -- settled records


async def test_gap_10_settled_records_leave_with_their_output_and_others_stay(world: World) -> None:
    for number in (1, 2, 3):
        world.control.enqueue(make_revision(), f"run-{number}", f"attempt-{number}")

    def raising(*_: Any) -> Any:
        raise RuntimeError

    async with world.worker(max_concurrent_runs=3, retention_ms=120_000) as worker:
        world.processes.script.append(raising)
        await worker.until(lambda: world.processes.opened == 2)
        world.processes.commands[1].end(0)
        await worker.until(lambda: len([r for r in world.records() if r.is_settled]) == 1)
        await worker.pass_time(100_000)
        assert len(world.records()) == 3
        await worker.until(lambda: len(world.records()) == 2)

        states = sorted(record.state for record in world.records())
        assert states == [State.RECOVERY_REQUIRED, State.RUNNING_ACKNOWLEDGED]
        assert not world.processes.commands[1].plan.output.exists()
        assert world.processes.commands[2].plan.output.exists()


async def test_nothing_is_removed_by_age_before_the_control_planes_time_is_known(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged")
    world.clock.reboot("next-boot", 4_000_000_000_000)
    world.control.go_away()
    async with world.worker(retention_ms=60_000) as worker:
        await worker.pass_time(600_000)
        assert len(world.records()) == 1


# -- gap 12: clocks


WALLS = {"1970": 0, "3-hours-late": -3 * 3600_000, "5-hours-early": 5 * 3600_000, "right": None}


@pytest.mark.parametrize("wall", WALLS)
async def test_gap_12_a_run_ends_right_whatever_the_wall_clock_says_and_however_it_steps(world: World, wall: str) -> None:
    value = WALLS[wall]
    server = world.control.now_ms()
    world.clock.reboot("boot", server if value is None else (value if value == 0 else server + value))
    attempt = world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.clock.step_wall(7 * 3600_000)
        await worker.pass_time(60_000)
        assert worker.is_in("running_acknowledged")
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")

    result = json.loads(attempt.completion_bodies[-1])["result"]
    assert attempt.status == "succeeded"
    assert attempt.created_at_ms <= result["startedAtMs"] <= world.control.now_ms()


async def test_gap_12_a_result_that_was_published_before_a_reboot_into_1970_is_not_distrusted(world: World) -> None:
    await running(world)
    world.processes.command.end(0)
    world.clock.reboot("next-boot", 0)
    world.control.go_away()
    async with world.worker() as worker:
        await worker.pass_time(10_000)
        assert worker.is_in("running_acknowledged")
        world.control.come_back()
        await worker.until_state("completion_acknowledged")

    assert world.control.attempts["attempt-1"].status == "succeeded"


async def test_gap_12_a_restarted_worker_that_does_not_know_the_time_yet_does_not_ask_again_and_again(world: World) -> None:
    world.control.enqueue(make_revision())

    async def life() -> None:
        async with world.worker() as worker:
            reached, go_on = world.pause("output prepare")
            await worker.until(reached.is_set)
            world.is_dead = True
            go_on.set()

    await outlive(life)
    assert world.read().state is State.STARTING_ACKNOWLEDGED
    world.clock.reboot("next-boot", 0)
    world.control.always("heartbeat", 503)
    async with world.worker() as worker:
        with trio.move_on_after(20) as scope:
            await worker.pass_time(10_000)
        assert not scope.cancelled_caught
        assert len(world.control.called("starting")) <= 8
        world.control.always("heartbeat", None)
        await worker.until(lambda: world.processes.opened == 1 or worker.is_in("recovery_required"))


# -- gap 13


@pytest.mark.req("R123", "R550")
@pytest.mark.parametrize("is_true", [True, False])
async def test_gap_13_the_digest_is_taken_in_the_order_received(world: World, is_true: bool) -> None:
    from qlworker.domain.revision import Binding

    foreign = [Binding(name=name, kind="public", value="1") for name in ("D_", "b", "a", "_c", "B")]
    revision = msgspec.structs.replace(make_revision(), environment=foreign)
    assert revision.canonical().environment != foreign
    digest = revision.computed_digest() if is_true else revision.canonical().content_digest
    world.control.enqueue(msgspec.structs.replace(revision, content_digest=digest))
    async with world.worker() as worker:
        await worker.until(lambda: "request offers: done" in world.trace)
        await worker.settle()

        assert bool(world.records()) == is_true
        if is_true:
            stored = world.read().offer
            assert stored.execution_digest == stored.execution_revision.computed_digest() == digest
            assert stored.execution_revision.environment == foreign
