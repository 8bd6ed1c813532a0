"""Leases: renewed by one timer, found again after a lost answer, and what follows when one is over."""

import errno
import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from qlworker.domain.identity import DurableHandle, Presence
from qlworker.domain.lease import LeaseAuthority, TrackedLease
from qlworker.domain.record import Event, InboxRecord, RecoveryReason, State, advance
from qlworker.flow.active import ActiveOffer
from qlworker.flow.lease_loss import LeaseLossCoordinator
from qlworker.flow.lease_timer import LeaseTimer
from qlworker.ports import Rejected, StopResult
from tests.builders import DIGEST, make_offer, make_record, make_revision
from tests.flow.rig import PLACE, DrivenClock, RecordingLog, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lost(world: World) -> list[RecoveryReason | Any]:
    return [record.recovery_reason for record in world.records() if record.state is State.RECOVERY_REQUIRED]


# -- renewal


async def test_a_run_of_a_day_keeps_its_lease_and_is_started_once(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(heartbeat_ms=20_000) as worker:
        await worker.until_state("running_acknowledged")
        await worker.pass_time(3 * 3600 * 1000)
        version = world.control.lease_of().version
        assert 900 < version < 1300
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")

    assert world.processes.opened == 1


@pytest.mark.req("R294")
async def test_a_lease_is_renewed_only_after_starting_was_acknowledged(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.always("starting", 503)
    async with world.worker() as worker:
        await worker.until_state("accepted")
        await worker.pass_time(25_000)

    assert world.control.called("lease-control") == []


@pytest.mark.req("R130")
async def test_ten_leases_have_one_timer(world: World) -> None:
    clock = DrivenClock()
    renewed: list[str] = []

    async def renew(offer_id: str) -> TrackedLease:
        renewed.append(offer_id)
        return TrackedLease.granted(make_offer(offer_id, lease_version=1), clock.boot_ms(), clock.boot_ms() + 30_000)

    timer = LeaseTimer(clock, renew, lambda lease: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        for number in range(10):
            timer.track(TrackedLease.granted(make_offer(f"offer-{number}"), clock.boot_ms(), clock.boot_ms() + 30_000 + number))
        await trio.testing.wait_all_tasks_blocked()
        assert len(clock.deadlines) == 1
        clock.advance(10_003)
        await trio.testing.wait_all_tasks_blocked()
        assert len(clock.deadlines) == 1
        nursery.cancel_scope.cancel()

    assert sorted(renewed) == [f"offer-{number}" for number in range(10)]


@pytest.mark.req("R297")
async def test_an_idle_timer_waits_for_nothing_and_one_with_a_lease_for_its_next_moment(world: World) -> None:
    clock = DrivenClock()

    async def renew(offer_id: str) -> None:
        return None

    timer = LeaseTimer(clock, renew, lambda lease: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.testing.wait_all_tasks_blocked()
        assert clock.deadlines == []
        timer.track(TrackedLease.granted(make_offer(), clock.boot_ms(), clock.boot_ms() + 30_000))
        await trio.testing.wait_all_tasks_blocked()
        assert clock.deadlines == [clock.boot_ms() + 10_000]
        timer.untrack("offer-1")
        await trio.testing.wait_all_tasks_blocked()
        assert clock.deadlines == []
        nursery.cancel_scope.cancel()


async def test_a_lease_that_is_untracked_while_its_renewal_begins_ends_nobody() -> None:
    clock = DrivenClock()

    async def renew(offer_id: str) -> None:
        return None

    class Untracking(LeaseTimer):
        def _look(self, renewals: trio.Nursery) -> None:
            super()._look(renewals)
            self.untrack("offer-1")

    timer = Untracking(clock, renew, lambda lease: None)
    timer.track(TrackedLease.granted(make_offer(), clock.boot_ms() - 15_000, clock.boot_ms() + 15_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert len(timer) == 0


@pytest.mark.req("R296", "R297")
async def test_a_renewal_that_is_not_answered_is_tried_each_second_until_the_lease_is_over(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.always("lease-control", 503)
        await worker.until_state("recovery_required", within_ms=31_000)

    assert 15 <= len(world.control.called("lease-control")) <= 22
    assert lost(world) == [RecoveryReason.LEASE_LOST_STOPPED]


@pytest.mark.parametrize("times", [1, 3])
async def test_gap_4_a_lost_renewal_answer_is_found_again_by_asking_for_the_offer(world: World, times: int) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("running_acknowledged")
        world.control.lose("lease-control", times)
        await worker.pass_time(120_000)

        assert worker.is_in("running_acknowledged")
        assert world.read().offer.lease.version == world.control.lease_of().version
        world.processes.command.end(0)
        await worker.until_state("completion_acknowledged")
    assert world.log.said("lease_resynchronised")


@pytest.mark.parametrize("operation", ["running", "artifacts", "completion", "start-failure"])
async def test_gap_4_a_request_behind_a_lost_renewal_finds_the_version_by_itself(world: World, operation: str) -> None:
    attempt = world.control.enqueue(make_revision())
    if operation == "start-failure":
        world.processes.script.append(lambda *_: Rejected("no"))
    async with world.worker(max_concurrent_runs=1) as worker:
        hold = world.control.hold(operation)
        if operation in ("artifacts", "completion"):
            await worker.until_state("running_acknowledged")
            world.processes.command.end(0)
        await worker.until(hold.reached.is_set)
        world.control.lease_of().version += 1
        hold.go_on.set()
        await worker.until(lambda: attempt.status in ("succeeded", "failed", "running"))
        await worker.settle()

        assert world.records()[0].state in (
            State.RUNNING_ACKNOWLEDGED,
            State.COMPLETION_ACKNOWLEDGED,
            State.START_FAILURE_ACKNOWLEDGED,
        )
    assert len(world.log.said("lease_resynchronised")) == 1


async def test_an_answer_with_times_that_contradict_the_lease_is_refused_and_ends_nobody(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("running_acknowledged")
        world.control.change("lease-control", lambda answer: answer.update({"renewedAtMs": 1, "expiresAtMs": 2}))
        await worker.pass_time(60_000)

        assert worker.is_in("running_acknowledged")


async def test_a_renewal_that_cannot_be_stored_does_not_count_and_ends_nobody(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("running_acknowledged")
        world.faults["journal lease"] = [OSError(errno.ENOSPC, "full")] * 3
        await worker.pass_time(60_000)

        assert worker.is_in("running_acknowledged")
        assert world.read().offer.lease.version == world.control.lease_of().version


async def test_the_new_version_is_durable_before_a_stop_follows_from_the_same_answer(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        attempt.cancel = "user"
        await worker.until_state("completion_acknowledged")

    assert world.position("journal lease: done") < world.position("executor stop")
    assert attempt.status == "cancelled"


@pytest.mark.parametrize("reason", ["user", "policy", "shutdown", "reconcile", "timeout"])
async def test_a_wanted_stop_ends_the_command_and_its_receipt_is_completed(world: World, reason: str) -> None:
    attempt = world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        attempt.cancel = reason
        await worker.until_state("completion_acknowledged")

    assert attempt.status == ("timed_out" if reason == "timeout" else "cancelled")
    assert attempt.exit_code == 143


@pytest.mark.parametrize("answer", [StopResult.TIMED_OUT, StopResult.UNKNOWN])
async def test_a_stop_that_proved_nothing_is_tried_again(world: World, answer: StopResult) -> None:
    attempt = world.control.enqueue(make_revision())
    world.processes.stop_answers = [answer, answer]
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        attempt.cancel = "user"
        await worker.until_state("completion_acknowledged")

    assert len(world.processes.stopped) == 3


async def test_a_stop_is_carried_out_although_running_was_never_acknowledged(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    world.control.always("running", 503)
    async with world.worker() as worker:
        await worker.until_state("started")
        await worker.pass_time(5_000)
        attempt.cancel = "user"
        await worker.until_state("completion_acknowledged", within_ms=25_000)

    assert attempt.status == "cancelled"
    assert len(world.processes.stopped) == 1


async def test_a_running_that_is_refused_for_long_is_not_asked_for_each_second_for_ever(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.always("running", 503)
    async with world.worker() as worker:
        await worker.until_state("started")
        await worker.pass_time(3600_000)

    assert 60 <= len(world.control.called("running")) <= 80


@pytest.mark.parametrize("reachable", [True, False])
async def test_the_deadline_is_kept_with_and_without_a_control_plane(world: World, reachable: bool) -> None:
    attempt = world.control.enqueue(make_revision(timeout_ms=12_000))
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        if not reachable:
            await worker.pass_time(9_900)
            world.control.go_away()
        await worker.until(lambda: world.processes.stopped, within_ms=13_000)
        world.control.come_back()
        await worker.until_state("completion_acknowledged")

    assert attempt.status == "timed_out"


async def test_a_deadline_survives_a_restart(world: World) -> None:
    attempt = world.control.enqueue(make_revision(timeout_ms=20_000))
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        await worker.pass_time(5_000)
    async with world.worker() as worker:
        await worker.until_state("completion_acknowledged", within_ms=30_000)

    assert attempt.status == "timed_out"


async def test_an_attempt_that_ended_elsewhere_is_stopped_before_its_record_says_so(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        attempt.status, attempt.finished_at_ms = "lost", world.control.now_ms()
        world.control.lease_of().status = "completed"
        await worker.until_state("recovery_required")

    assert lost(world) == [RecoveryReason.CONTROL_PLANE_TERMINAL]
    assert world.position("executor stop: done") < world.position("journal recovery_required")
    assert world.control.called("completion") == []


@pytest.mark.req("R174", "R241", "R242")
async def test_a_running_acknowledgement_that_finds_the_attempt_over_stops_the_command_first(world: World) -> None:
    world.control.enqueue(make_revision())

    def over(answer: dict[str, Any]) -> None:
        answer["status"] = "already_terminal"
        snapshot = answer["snapshot"]
        for name in ("startedAtMs", "executorHandle"):
            snapshot.pop(name)
        snapshot |= {"runStatus": "failed", "attemptStatus": "failed", "finishedAtMs": 1, "errorCode": "X"}

    world.control.change("running", over)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(60_000)

    assert lost(world) == [RecoveryReason.CONTROL_PLANE_TERMINAL]
    assert world.position("executor stop: done") < world.position("journal recovery_required")
    assert len(world.processes.stopped) == 1


# -- loss


@pytest.mark.req("R168", "R278", "R282", "R289", "R290", "R511")
async def test_a_lost_lease_stops_the_command_says_so_and_never_spawns_again(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        record = world.read()
        world.control.go_away()
        await worker.until_state("recovery_required", within_ms=31_000)
        assert lost(world) == [RecoveryReason.LEASE_LOST_STOPPED]
        [(handle, _)] = world.processes.stopped
        assert handle.text() == record.executor_handle
        world.control.come_back()
        await worker.pass_time(24 * 3600 * 1000 // 8)

    assert len(world.processes.commands) == 1
    assert len(world.processes.stopped) == 1
    assert world.control.called("completion", "start-failure") == []


async def test_the_stop_of_a_lost_lease_does_not_wait_for_a_renewal_that_hangs(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        hold = world.control.hold("lease-control")
        await worker.until(hold.reached.is_set)
        await worker.until(lambda: world.processes.stopped, within_ms=21_000)
        await worker.until_state("recovery_required", within_ms=1)


@pytest.mark.req("R283", "R293")
@pytest.mark.parametrize("answer", [StopResult.TIMED_OUT, StopResult.UNKNOWN])
async def test_a_stop_without_proof_is_called_unverified(world: World, answer: StopResult) -> None:
    world.control.enqueue(make_revision())
    world.processes.stop_answers = [answer]
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.go_away()
        await worker.until_state("recovery_required", within_ms=31_000)

    assert lost(world) == [RecoveryReason.LEASE_LOST_UNVERIFIED]


@pytest.mark.req("R282")
async def test_a_command_that_was_gone_already_counts_as_stopped(world: World) -> None:
    world.control.enqueue(make_revision())
    world.processes.stop_answers = [StopResult.ALREADY_EXITED]
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.go_away()
        await worker.until_state("recovery_required", within_ms=31_000)

    assert lost(world) == [RecoveryReason.LEASE_LOST_STOPPED]


@pytest.mark.req("R284")
@pytest.mark.parametrize("error", [OSError(errno.EPERM, "no"), RuntimeError("broken")])
async def test_a_controller_that_raises_writes_nothing_and_is_asked_again(world: World, error: Exception) -> None:
    world.control.enqueue(make_revision())
    world.processes.stop_answers = [error, error]
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.go_away()
        await worker.until(lambda: len(world.processes.stopped) == 1, within_ms=31_000)
        assert worker.is_in("running_acknowledged")
        await worker.until_state("recovery_required")

    assert len(world.processes.stopped) == 3
    assert lost(world) == [RecoveryReason.LEASE_LOST_STOPPED]


async def test_gap_3_an_offer_that_cannot_be_activated_starves_nobody_and_ends_with_its_lease(world: World) -> None:
    first = world.control.enqueue(make_revision())
    world.control.reply("starting", 503, times=1000)
    async with world.worker() as worker:
        await worker.until_state("accepted")
        sent = len(world.control.called("starting"))
        await worker.until(lambda: lost(world))
        assert len(world.control.called("starting")) - sent <= 12
        assert lost(world) == [RecoveryReason.LEASE_LOST_STOPPED]
        after = len(world.control.called("starting"))
        await worker.pass_time(600_000)
        assert len(world.control.called("starting")) == after
        world.control._faults["starting"].clear()
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: world.processes.opened == 1)

    assert first.status == "claimed"


async def test_gap_3_a_failing_offer_does_not_delay_another_one(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.reply("starting", 503, times=3)
    async with world.worker() as worker:
        await worker.until_state("accepted")
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: world.processes.opened == 2, within_ms=20_000)


async def test_gap_2_a_record_that_needs_recovery_does_not_stop_the_worker(world: World) -> None:
    world.control.enqueue(make_revision())

    def raising(*_: Any) -> Any:
        raise RuntimeError

    world.processes.script.append(raising)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        world.control.enqueue(make_revision(), "run-2", "attempt-2")
        await worker.until(lambda: world.processes.opened == 1)
    async with world.worker() as worker:
        world.control.enqueue(make_revision(), "run-3", "attempt-3")
        await worker.until(lambda: world.processes.opened == 2)


@pytest.mark.req("R166")
@pytest.mark.parametrize("presence", [Presence.EXITED, Presence.OTHER_BOOT, Presence.MISMATCH, Presence.PROBE_FAILED])
async def test_gap_5_without_a_receipt_the_lease_is_not_renewed_for_ever(world: World, presence: Presence) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.processes.command.publishes = False
        world.processes.command.end(0)
        world.processes.presence = presence
        await worker.until_state("recovery_required", within_ms=6_000)
        renewals = len(world.control.called("lease-control"))
        await worker.pass_time(600_000)

    # So the lease runs out, and the control plane is free to call the attempt lost and to make another.
    assert len(world.control.called("lease-control")) == renewals
    assert lost(world) == [RecoveryReason.LAUNCH_OUTCOME_UNKNOWN]
    assert world.control.called("completion") == []
    assert world.processes.stopped == []


# -- the coordinator alone


def started(**changes: Any) -> InboxRecord:
    handle = DurableHandle(v=1, h="h", b=PLACE.boot_id, p=7, g=7, s="1").text()
    record = advance(make_record(**changes), Event.STARTING_ACKED, 2000)
    record = advance(
        record,
        Event.BARRIER_RAISED,
        3000,
        executor_started_at_ms=3000,
        log_artifact_id="wlog-" + "0" * 30,
        completion_receipt_callback_sequence=1,
        completion_receipt_token_digest=DIGEST,
    )
    return advance(record, Event.HANDLE_RECORDED, 4000, executor_handle=handle)


class OneRecord:
    """An inbox of one record; only what the coordinator uses."""

    def __init__(self, record: InboxRecord) -> None:
        self.record = record
        self.reads: list[str] = []
        self.revision_taken: InboxRecord | None = None

    async def read(self, offer_id: str) -> InboxRecord | None:
        await trio.lowlevel.checkpoint()
        self.reads.append(offer_id)
        return self.record if offer_id == self.record.offer_id else None

    async def replace(self, record: InboxRecord) -> None:
        from qlworker.domain.record import check_update

        check_update(self.record, record)
        self.record = record


class Stops:
    def __init__(self) -> None:
        self.stopped: list[DurableHandle] = []

    async def stop(self, handle: DurableHandle, grace_ms: int) -> StopResult:
        await trio.lowlevel.checkpoint()
        self.stopped.append(handle)
        return StopResult.STOPPED


def coordinator(inbox: OneRecord, processes: Stops) -> LeaseLossCoordinator:
    from qlworker.flow.server_clock import ServerClock

    parts: Any = (inbox, processes, ServerClock(DrivenClock()), RecordingLog())
    return LeaseLossCoordinator(*parts, stop_grace_ms=1000)


@pytest.mark.req("R275", "R276", "R280")
@pytest.mark.parametrize("member", LeaseAuthority.__struct_fields__)
async def test_a_loss_of_another_authority_stops_and_writes_nothing(member: str) -> None:
    inbox, processes = OneRecord(started()), Stops()
    authority = LeaseAuthority.of(inbox.record.offer)
    value = getattr(authority, member)
    other = msgspec.structs.replace(authority, **{member: value + 1 if isinstance(value, int) else value + "x"})

    await coordinator(inbox, processes).lose(ActiveOffer("offer-1"), other)

    assert processes.stopped == []
    assert inbox.record == started()


@pytest.mark.req("R275", "R276", "R279")
async def test_a_loss_of_this_authority_is_carried_out_whatever_the_lease_version() -> None:
    inbox, processes = OneRecord(started(lease_version=2)), Stops()

    await coordinator(inbox, processes).lose(ActiveOffer("offer-1"), LeaseAuthority.of(make_offer(lease_version=5)))

    assert len(processes.stopped) == 1
    assert inbox.record.recovery_reason is RecoveryReason.LEASE_LOST_STOPPED


@pytest.mark.req("R277", "R286", "R287", "R288")
async def test_a_record_that_is_over_already_stays_as_it_is() -> None:
    completed = advance(started(), Event.COMPLETION_ACKED, 5000, completion_acknowledged_at_ms=5000)
    in_recovery = advance(started(), Event.RECOVERY_NEEDED, 5000, recovery_reason=RecoveryReason.LEASE_LOST_UNVERIFIED)
    for record in (completed, in_recovery):
        inbox, processes = OneRecord(record), Stops()
        await coordinator(inbox, processes).lose(ActiveOffer("offer-1"), LeaseAuthority.of(record.offer))
        assert processes.stopped == []
        assert inbox.record == record


@pytest.mark.req("R283", "R293")
async def test_a_handle_that_is_missing_or_is_none_is_unverified() -> None:
    launching = advance(
        advance(make_record(), Event.STARTING_ACKED, 2000),
        Event.BARRIER_RAISED,
        3000,
        executor_started_at_ms=3000,
        log_artifact_id="wlog-" + "0" * 30,
        completion_receipt_callback_sequence=1,
        completion_receipt_token_digest=DIGEST,
    )
    forged = msgspec.structs.replace(started(), executor_handle="not-a-handle")
    for record in (launching, forged):
        inbox, processes = OneRecord(record), Stops()
        await coordinator(inbox, processes).lose(ActiveOffer("offer-1"), LeaseAuthority.of(record.offer))
        assert processes.stopped == []
        assert inbox.record.recovery_reason is RecoveryReason.LEASE_LOST_UNVERIFIED


@pytest.mark.req("R285")
async def test_notices_at_the_same_time_are_one_stop() -> None:
    inbox, processes = OneRecord(started()), Stops()
    active = ActiveOffer("offer-1")
    loss = coordinator(inbox, processes)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(loss.lose, active, LeaseAuthority.of(inbox.record.offer))

    assert len(processes.stopped) == 1
    assert inbox.record.revision == started().revision + 1


@pytest.mark.req("R273")
def test_the_notice_of_a_loss_is_synchronous() -> None:
    from qlworker.flow.executions import Executions

    assert not inspect.iscoroutinefunction(Executions._note_loss)
    assert not inspect.iscoroutinefunction(inspect.unwrap(LeaseTimer._look))


@pytest.mark.req("R274", "R291")
def test_the_coordinator_has_no_port_that_could_complete_or_declare_lost() -> None:
    assert set(inspect.signature(LeaseLossCoordinator.__init__).parameters) == {
        "self",
        "inbox",
        "processes",
        "server_clock",
        "log",
        "stop_grace_ms",
    }


@pytest.mark.req("R278")
async def test_a_stop_for_a_lost_lease_names_the_handle_and_the_reason() -> None:
    from qlworker.flow.server_clock import ServerClock

    inbox, processes, log = OneRecord(started()), Stops(), RecordingLog()
    parts: Any = (inbox, processes, ServerClock(DrivenClock()), log)
    await LeaseLossCoordinator(*parts, stop_grace_ms=1000).lose(ActiveOffer("offer-1"), LeaseAuthority.of(inbox.record.offer))

    assert [handle.text() for handle in processes.stopped] == [started().executor_handle]
    assert [line["reason"] for line in log.said("command_stopped")] == ["reconcile"]


@pytest.mark.req("R292")
def test_no_operation_of_the_worker_says_lost() -> None:
    from qlworker.flow.control_plane import ControlPlane
    from qlworker.wire import codec

    operations = {value.name for value in vars(codec).values() if isinstance(value, codec.Operation)}
    assert operations == {
        "register",
        "heartbeat",
        "transition",
        "offers",
        "starting",
        "running",
        "start-failure",
        "certificate",
        "secrets",
        "lease-control",
        "artifacts",
        "completion",
        "output",
    }
    assert not [name for name in dir(ControlPlane) if "lost" in name or "lose" in name or "expire" in name]


@pytest.mark.req("R286", "R287")
@pytest.mark.parametrize("first", ["completion", "loss"])
async def test_a_completion_and_a_loss_that_race_leave_one_honest_record(world: World, first: str) -> None:
    attempt = world.control.enqueue(make_revision())
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")
        world.control.go_away("lease-control")
        hold = world.control.hold("completion" if first == "completion" else "artifacts", performed=first == "completion")
        await worker.pass_time(25_000)
        world.processes.command.end(0)
        await worker.until(hold.reached.is_set)
        await worker.pass_time(6_000)
        hold.go_on.set()
        await worker.until(lambda: world.read().is_settled or lost(world))
        await worker.pass_time(10_000)

    if first == "completion":
        assert (world.read().state, attempt.status) == (State.COMPLETION_ACKNOWLEDGED, "succeeded")
    else:
        assert (world.read().state, attempt.status) == (State.RECOVERY_REQUIRED, "running")
