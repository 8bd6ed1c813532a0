"""From accepted to running: acknowledgements, the barrier, what an executor may answer, and the variables of a command."""

import ast
import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from msgspec import UNSET

from qlworker.domain.canonical import b64u, callback_token_digest, js_json
from qlworker.domain.environment import Variable
from qlworker.domain.errors import Refused
from qlworker.domain.record import RecoveryReason, State
from qlworker.domain.revision import Binding
from qlworker.flow import launch as launch_module
from qlworker.flow.launch import Launcher
from qlworker.flow.materialise import Materialised, Materialiser
from qlworker.ports import Held, Rejected
from tests.builders import make_record, make_revision
from tests.flow.rig import World, outlive

SECRET = "s3cr3t-value-that-must-stay-in-memory"
REFERENCE = "qlsecret:v1:" + b64u(js_json({"projectId": "project-1", "name": "api-key"}))
BUNDLE = "qlsecret:v1:" + b64u(js_json({"projectId": "project-1", "name": "bundle", "version": 3}))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def unknown(record: Any) -> bool:
    return (record.state, record.recovery_reason) == (State.RECOVERY_REQUIRED, RecoveryReason.LAUNCH_OUTCOME_UNKNOWN)


# -- acknowledgements


@pytest.mark.req("R140", "R142", "R160")
@pytest.mark.parametrize("operation", ["starting", "running", "start-failure"])
async def test_a_lost_acknowledgement_is_replayed_and_starts_nothing_again(world: World, operation: str) -> None:
    attempt = world.control.enqueue(make_revision())
    world.control.lose(operation, times=3)
    if operation == "start-failure":
        world.processes.script.append(lambda *_: Rejected("no_such_file"))
    async with world.worker() as worker:
        await worker.until(lambda: worker.is_in("running_acknowledged") or worker.is_in("start_failure_acknowledged"))

    assert len(world.processes.commands) == 1
    assert attempt.status == ("failed" if operation == "start-failure" else "running")
    assert len(world.control.called(operation)) == 4


@pytest.mark.req("R142", "R143", "R158", "R173")
async def test_a_refused_start_is_on_disk_before_it_is_reported_and_a_restart_only_repeats_the_report(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    world.processes.script.append(lambda *_: Rejected("no_such_file"))
    world.control.go_away("start-failure")
    async with world.worker() as worker:
        await worker.until_state("start_failed")
        await worker.pass_time(5_000)
    world.control.come_back()
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert world.position("journal start_failed: done") < world.position("request start-failure")
    assert (attempt.status, attempt.error_code) == ("failed", "EXECUTOR_START_FAILED")
    assert len(world.processes.commands) == 1


@pytest.mark.req("R157", "R174")
@pytest.mark.parametrize("status", ["already_running", "already_terminal", "applied-running", "applied-terminal"])
async def test_a_control_plane_that_is_ahead_of_this_worker_spawns_nothing(world: World, status: str) -> None:
    world.control.enqueue(make_revision())

    def ahead(answer: dict[str, Any]) -> None:
        running = status.endswith("running")
        answer["status"] = status.partition("-")[0]
        more = (
            {"runStatus": "running", "attemptStatus": "running", "startedAtMs": 1, "executorHandle": "of-somebody"}
            if running
            else {"runStatus": "failed", "attemptStatus": "failed", "finishedAtMs": 1, "errorCode": "X"}
        )
        answer["snapshot"].update(more)

    world.control.change("starting", ahead)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(60_000)

    expected = "CONTROL_PLANE_ALREADY_RUNNING" if status.endswith("running") else "CONTROL_PLANE_TERMINAL"
    assert world.read().recovery_reason is RecoveryReason[expected]
    assert world.processes.commands == []
    assert world.control.called("start-failure") == []


@pytest.mark.req("R139", "R295")
async def test_running_is_told_under_the_lease_version_of_a_renewal_in_between(world: World) -> None:
    world.control.enqueue(make_revision())
    async with world.worker() as worker:
        world.control.fail("running", times=5)
        await worker.until_state("started")
        await worker.until_state("running_acknowledged")

        assert world.control.lease_of().version >= 1
        running = world.control.called("running")[-1].body
        assert running["expectedLeaseVersion"] == world.read().offer.lease.version
    assert len(world.control.called("offers")) <= 4 + len(world.control.called("heartbeat")) * 6


@pytest.mark.req("R139", "R295")
@pytest.mark.parametrize("operation", ["running", "start-failure"])
async def test_an_acknowledgement_that_waited_for_a_renewal_uses_the_renewed_lease(world: World, operation: str) -> None:
    world.control.enqueue(make_revision())
    if operation == "start-failure":
        world.processes.script.append(lambda *_: Rejected("no_such_file"))
    world.control.fail(operation, times=5 if operation == "running" else 4)
    async with world.worker() as worker:
        await worker.until_state("started" if operation == "running" else "start_failed")
        hold = world.control.hold("lease-control", performed=True)
        await worker.until(hold.reached.is_set)
        # the acknowledgement read its record and waits for the lock that the renewal holds
        await worker.pass_time(9_000)
        hold.go_on.set()
        await worker.until(lambda: worker.is_in("running_acknowledged") or worker.is_in("start_failure_acknowledged"))

    last = world.control.called(operation)[-1].body
    assert last["expectedLeaseVersion"] == 1
    assert world.log.said("lease_resynchronised") == []


@pytest.mark.req("R121")
@pytest.mark.parametrize("status", [401, 403])
async def test_an_exchange_that_is_not_authenticated_delivers_nothing(world: World, status: int) -> None:
    world.control.enqueue(make_revision())
    world.control.always("offers", status)
    async with world.worker() as worker:
        await worker.pass_time(30_000)

    assert world.records() == []


@pytest.mark.req("R145")
async def test_an_offer_that_is_not_in_the_inbox_is_not_processed(world: World) -> None:
    async with world.worker() as worker:
        await worker.pass_time(1_000)
        worker.executions.carry(make_record())
        await worker.pass_time(60_000)

        assert len(worker.executions.active) == 0
    assert world.processes.commands == []
    assert world.control.called("starting") == []


@pytest.mark.req("R127", "R146", "R161")
@pytest.mark.parametrize("violated", ["replaced", "generation", "offline", "expired", "run-lease"])
async def test_session_and_lease_are_checked_again_before_each_step(world: World, violated: str) -> None:
    from qlworker.domain.session import SessionStatus

    world.control.enqueue(make_revision())
    world.control.always("starting", 503)
    async with world.worker(heartbeat_ms=22_000) as worker:
        await worker.until_state("accepted")
        await worker.settle()
        changes: dict[str, dict[str, Any]] = {
            "replaced": {"session_id": "018f0000-0000-7000-8000-00000000ffff"},
            "generation": {"generation": 9},
            "offline": {"status": SessionStatus.OFFLINE},
            "expired": {"expires_at": world.clock.boot_ms()},
            "run-lease": {},
        }
        assert worker.sessions.live is not None
        worker.sessions.live = msgspec.structs.replace(worker.sessions.live, **changes[violated])
        world.control.always("starting", None)
        if violated == "run-lease":
            world.clock.advance(30_000)
        else:
            world.control.go_away("register", "heartbeat")
        sent = len(world.control.called("starting"))
        await worker.pass_time(20_000)

        assert len(world.control.called("starting")) == sent
    assert world.processes.commands == []


@pytest.mark.req("R244")
async def test_a_fence_that_stays_is_not_argued_with(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.always("running", 409)
    async with world.worker(max_concurrent_runs=1) as worker:
        await worker.until_state("started")
        await worker.pass_time(600_000)

        assert worker.is_in("started")
    assert len(world.control.called("running")) <= 20
    assert len(world.control.called("offers")) <= 22
    assert world.processes.opened == 1


# -- the barrier


@pytest.mark.req("R136", "R149", "R150", "R162", "R185", "R192")
async def test_the_executor_finds_the_barrier_on_disk_with_sequence_and_digest_and_no_token(world: World) -> None:
    world.control.enqueue(make_revision())
    seen: list[Any] = []

    def look(command: Any, gate: Any) -> Any:
        seen.append((world.read(), next((world.root / "journal" / "offers").iterdir()).read_bytes()))
        return Held(command.handle, gate)

    world.processes.script.append(look)
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    record, stored = seen[0]
    command = world.processes.command
    assert record.state is State.LAUNCHING
    assert record.completion_receipt_callback_sequence == command.plan.callback_sequence == 1
    assert record.completion_receipt_token_digest == callback_token_digest(command.token)
    assert record.executor_started_at_ms == command.plan.started_at_ms
    assert b64u(command.token).encode() not in stored
    assert len(command.token) == 32


@pytest.mark.req("R150", "R542", "R552")
async def test_a_barrier_that_cannot_be_written_calls_no_executor(world: World) -> None:
    world.control.enqueue(make_revision())
    world.faults["journal launching"] = [OSError(errno.ENOSPC, "full")]
    async with world.worker() as worker:
        await worker.until(lambda: world.faults["journal launching"] == [])
        await worker.settle()
        assert world.processes.commands == []
        await worker.until_state("running_acknowledged")

    assert len(world.processes.commands) == 1


@pytest.mark.req("R150", "R163")
async def test_a_barrier_whose_write_may_have_got_through_is_never_passed(world: World) -> None:
    world.control.enqueue(make_revision())
    world.faults["journal launching: done"] = [OSError(errno.EIO, "sync failed")]
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert unknown(world.read())
    assert world.processes.commands == []


@pytest.mark.req("R163", "R164", "R168", "R175", "R177", "R178", "R543")
async def test_a_restart_that_finds_launching_calls_neither_materialiser_nor_executor_nor_acknowledgement(world: World) -> None:
    world.control.enqueue(make_revision(environment=[Binding(name="KEY", kind="secret", secret_ref=REFERENCE)]))
    world.control.secrets[REFERENCE] = SECRET

    async def life() -> None:
        world.kill_at = None
        async with world.worker() as worker:
            reached, go_on = world.pause("executor launch")
            await worker.until(reached.is_set)
            world.is_dead = True
            go_on.set()

    await outlive(life)
    assert world.read().state is State.LAUNCHING
    before = len(world.control.called("secrets", "starting", "running", "start-failure"))

    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(24 * 3600 * 1000)

    assert unknown(world.read())
    assert len(world.control.called("secrets", "starting", "running", "start-failure")) == before
    assert world.processes.commands == []


@pytest.mark.req("R164", "R178")
async def test_launching_without_a_receipt_is_unknown_only_after_the_grace(world: World) -> None:
    world.control.enqueue(make_revision())
    world.processes.script.append(raising(OSError("lost")))
    async with world.worker() as worker:
        await worker.until_state("launching")
        await worker.pass_time(4_700)
        assert worker.is_in("launching")
        await worker.pass_time(1_000)
        assert worker.is_in("recovery_required")


@pytest.mark.req("R138", "R151", "R390")
@pytest.mark.parametrize("when", ["", ": done"], ids=["not-written", "written-all-the-same"])
async def test_a_handle_that_may_not_be_durable_closes_the_gate_and_the_receipt_proves_that_nothing_ran(
    world: World, when: str
) -> None:
    attempt = world.control.enqueue(make_revision())
    world.faults[f"journal started{when}"] = [OSError(errno.ENOSPC, "full")]
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert world.processes.opened == 0
    assert world.processes.gates[0].abandoned
    assert world.control.called("running") == []
    assert attempt.error_code == "EXECUTOR_START_FAILED"


@pytest.mark.req("R390", "R391")
@pytest.mark.parametrize("when", ["", ": done"], ids=["not-written", "written-all-the-same"])
async def test_without_that_receipt_it_stays_unknown_and_no_start_failure_is_told(world: World, when: str) -> None:
    world.control.enqueue(make_revision())
    world.faults[f"journal started{when}"] = [OSError(errno.ENOSPC, "full")]

    def silent(command: Any, gate: Any) -> Held:
        command.publishes = False
        return Held(command.handle, gate)

    world.processes.script.append(silent)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")

    assert unknown(world.read())
    assert world.control.called("start-failure", "running") == []


async def test_a_gate_that_cannot_be_opened_is_closed_and_nothing_is_told_to_run(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    world.faults["gate open"] = [BrokenPipeError("the launcher is gone")]
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert (attempt.status, world.processes.opened) == ("failed", 0)
    assert world.control.called("running") == []


async def test_a_disk_that_hangs_behind_the_barrier_lets_go_after_a_while_with_the_gate_closed(
    world: World, mock_clock: trio.testing.MockClock
) -> None:
    world.control.enqueue(make_revision())
    reached, _ = world.pause("journal started")
    async with world.worker() as worker:
        await worker.until(reached.is_set)
        mock_clock.jump(launch_module.BARRIER_LIMIT_S + 1)
        await worker.settle()

        assert world.processes.gates[0].abandoned
        assert world.processes.opened == 0


async def test_a_shutdown_does_not_interrupt_between_the_barrier_and_the_gate(world: World) -> None:
    world.control.enqueue(make_revision())
    reached, go_on = world.pause("executor launch")
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def life() -> None:
            with scope:
                async with world.worker() as worker:
                    await worker.until(reached.is_set)
                    await trio.sleep_forever()

        nursery.start_soon(life)
        await reached.wait()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

    assert world.read().state is State.STARTED
    assert world.processes.opened == 1


# -- what an executor may answer (group O)


def raising(error: BaseException) -> Any:
    def answer(*_: Any) -> Any:
        raise error

    return answer


class Imitation:
    """Has what a Held has and is none."""

    def __init__(self, command: Any, gate: Any) -> None:
        self.handle = command.handle
        self.gate = gate


UNCERTAIN = {
    "os-error": raising(OSError("spawn failed half-way")),
    "value-error": raising(ValueError("no")),
    "timeout": raising(TimeoutError("stuck")),
    "nothing": lambda *_: None,
    "unknown-tag": Imitation,
    "text": lambda *_: "rejected",
    "handle-of-text": lambda command, gate: Held(command.handle.text(), gate),
    "no-handle": lambda _, gate: Held(None, gate),
    "handle-too-long": lambda command, gate: Held(msgspec.structs.replace(command.handle, h="h" * 255, m="m" * 400), gate),
}


@pytest.mark.req("R6", "R383", "R387", "R388", "R389", "R391", "R551")
@pytest.mark.parametrize("answer", UNCERTAIN)
async def test_an_answer_of_the_executor_that_proves_nothing_is_unknown_and_never_a_start_failure(
    world: World, answer: str
) -> None:
    attempt = world.control.enqueue(make_revision())

    def silent(command: Any, gate: Any) -> Any:
        command.publishes = False
        return UNCERTAIN[answer](command, gate)

    world.processes.script.append(silent)
    async with world.worker() as worker:
        await worker.until_state("recovery_required")
        await worker.pass_time(60_000)

    assert unknown(world.read())
    assert world.control.called("start-failure", "running") == []
    assert attempt.status == "starting"
    assert (len(world.processes.commands), world.processes.opened) == (1, 0)


@pytest.mark.parametrize("answer", ["handle-of-text", "no-handle", "handle-too-long"])
async def test_a_gate_that_came_with_an_unusable_handle_is_closed(world: World, answer: str) -> None:
    world.control.enqueue(make_revision())
    world.processes.script.append(UNCERTAIN[answer])
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert world.processes.gates[0].abandoned


@pytest.mark.req("R141", "R383", "R385", "R392")
async def test_a_rejection_is_on_disk_before_it_is_reported_and_is_reported_once(world: World) -> None:
    world.control.enqueue(make_revision())
    world.processes.script.append(lambda *_: Rejected("no_such_file"))
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    steps = world.steps("journal", "request start", "executor")
    assert steps[-4:] == [
        "executor launch",
        "journal start_failed",
        "request start-failure",
        "journal start_failure_acknowledged",
    ]
    assert world.control.called("running") == []


@pytest.mark.req("R386")
async def test_a_held_command_with_its_handle_is_started(world: World) -> None:
    world.control.enqueue(make_revision())
    reached, go_on = world.pause("gate open")
    async with world.worker() as worker:
        await worker.until(reached.is_set)

        assert world.read().state is State.STARTED
        assert world.read().executor_handle == world.processes.command.handle.text()
        assert world.processes.opened == 0
        go_on.set()


async def test_what_can_be_foreseen_is_refused_before_the_barrier(world: World) -> None:
    attempt = world.control.enqueue(make_revision())
    world.processes.precheck_answer = Rejected("command_not_found")
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert "journal launching" not in world.trace
    assert attempt.error_code == "EXECUTOR_START_FAILED"
    assert world.read().completion_receipt_token_digest is UNSET


async def test_a_stop_that_comes_before_the_launch_starts_nothing(world: World) -> None:
    attempt = world.control.enqueue(make_revision(environment=[Binding(name="KEY", kind="secret", secret_ref=REFERENCE)]))
    world.control.secrets[REFERENCE] = SECRET
    world.control.always("secrets", 503)
    async with world.worker() as worker:
        await worker.until_state("starting_acknowledged")
        attempt.cancel = "user"
        await worker.until_state("start_failure_acknowledged")

    assert attempt.status == "cancelled"
    assert world.processes.commands == []


# -- variables and secrets (groups D and P)


@pytest.mark.req("R148", "R393", "R394", "R395")
async def test_a_command_gets_its_public_and_secret_variables_and_those_of_its_bundle(world: World) -> None:
    bundle = (
        '{"schema":"qinglong/environment-bundle@v1","entries":[{"name":"B","value":""},{"name":"A","value":"from bundle"}]}'
    )
    world.control.secrets[REFERENCE] = SECRET
    world.control.bundles[BUNDLE] = bundle
    bindings = [
        Binding(name="EMPTY", kind="public", value=""),
        Binding(name="KEY", kind="secret", secret_ref=REFERENCE),
        Binding(name="PUBLIC", kind="public", value="p"),
    ]
    world.control.enqueue(make_revision(environment=bindings, environment_bundle_ref=BUNDLE))
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    environment = world.processes.command.plan.environment
    assert {name: environment[name] for name in ("EMPTY", "KEY", "PUBLIC", "A", "B")} == {
        "EMPTY": "",
        "KEY": SECRET,
        "PUBLIC": "p",
        "A": "from bundle",
        "B": "",
    }
    assert environment["QL_ATTEMPT_ID"] == "attempt-1"
    assert [call.body["schema"] for call in world.control.called("secrets")] == ["qinglong/remote-secret-delivery@v2"]


async def test_gap_8_a_bundle_alone_is_enough(world: World) -> None:
    world.control.bundles[BUNDLE] = '{"schema":"qinglong/environment-bundle@v1","entries":[{"name":"A","value":"1"}]}'
    world.control.enqueue(make_revision(environment_bundle_ref=BUNDLE))
    async with world.worker() as worker:
        await worker.until_state("running_acknowledged")

    assert world.processes.command.plan.environment["A"] == "1"


@pytest.mark.parametrize("dialect", ["auto", "v1"])
async def test_an_older_server_is_asked_in_its_own_form_and_remembered(world: World, dialect: str) -> None:
    world.control.knows_secrets_v2 = False
    world.control.secrets[REFERENCE] = SECRET
    for number in (1, 2):
        revision = make_revision(environment=[Binding(name="KEY", kind="secret", secret_ref=REFERENCE)])
        world.control.enqueue(revision, f"run-{number}", f"attempt-{number}")
    async with world.worker(secrets_dialect=dialect) as worker:
        await worker.until(lambda: world.processes.opened == 2)

    forms = [call.body["schema"][-2:] for call in world.control.called("secrets")]
    assert forms == (["v2", "v1", "v1"] if dialect == "auto" else ["v1", "v1"])


def wrong_materialiser(change: Any) -> Any:
    class Wrong:
        def __init__(self, real: Materialiser) -> None:
            self._real = real

        async def materialise(self, offer: Any) -> Materialised:
            made = await self._real.materialise(offer)
            return Materialised(change(list(made.bindings)), made.bundle)

    return Wrong


DRIFT = {
    "public-byte-changed": lambda items: [items[0], Variable("PUBLIC", "q")],
    "missing": lambda items: items[:1],
    "extra": lambda items: [*items, Variable("MORE", "1")],
    "renamed": lambda items: [items[0], Variable("PUBLIc", "p")],
    "out-of-order": lambda items: items[::-1],
    "bad-secret": lambda items: [Variable("KEY", "nul\x00"), items[1]],
}


@pytest.mark.req("R132", "R148", "R393", "R394", "R401")
@pytest.mark.parametrize("drift", DRIFT)
async def test_variables_that_differ_from_the_revision_end_before_the_barrier_and_the_spawn(world: World, drift: str) -> None:
    world.control.secrets[REFERENCE] = SECRET
    bindings = [Binding(name="KEY", kind="secret", secret_ref=REFERENCE), Binding(name="PUBLIC", kind="public", value="p")]
    attempt = world.control.enqueue(make_revision(environment=bindings))
    async with world.worker(materialiser=wrong_materialiser(DRIFT[drift])) as worker:
        await worker.until_state("start_failure_acknowledged")

    assert "journal launching" not in world.trace
    assert world.processes.commands == []
    assert attempt.error_code == "EXECUTOR_START_FAILED"


@pytest.mark.parametrize("status", [503, 404])
async def test_secrets_that_cannot_be_had_for_long_are_a_start_failure_and_not_an_endless_retry(
    world: World, status: int
) -> None:
    attempt = world.control.enqueue(make_revision(environment=[Binding(name="KEY", kind="secret", secret_ref=REFERENCE)]))
    world.control.always("secrets", status)
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert attempt.status == "failed"
    assert 2 <= len(world.control.called("secrets")) <= 16


async def test_an_output_that_cannot_be_prepared_is_refused_before_the_barrier(world: World) -> None:
    world.control.enqueue(make_revision())
    world.faults["output prepare"] = [Refused("the disk has no room")]
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert "journal launching" not in world.trace


@pytest.mark.req("R397", "R398", "R400", "R401")
@pytest.mark.parametrize("answer", ["held", "rejected", *UNCERTAIN])
async def test_the_callback_token_is_wiped_after_every_outcome_and_only_its_digest_is_kept(world: World, answer: str) -> None:
    world.control.enqueue(make_revision())
    given: list[bytes] = []

    def script(command: Any, gate: Any) -> Any:
        given.append(bytes(command.plan.token))
        if answer == "held":
            return Held(command.handle, gate)
        return Rejected("no") if answer == "rejected" else UNCERTAIN[answer](command, gate)

    world.processes.script.append(script)
    async with world.worker() as worker:
        await worker.until(lambda: given)
        await worker.settle()

    command = world.processes.command
    assert len(given[0]) == 32
    assert any(given[0])
    assert bytes(command.buffer) == bytes(32)
    record = world.read()
    assert record.completion_receipt_callback_sequence == 1
    assert record.completion_receipt_token_digest == callback_token_digest(given[0])


async def test_each_attempt_has_a_token_of_its_own(world: World) -> None:
    for number in range(1, 5):
        world.control.enqueue(make_revision(), f"run-{number}", f"attempt-{number}")
    async with world.worker(max_concurrent_runs=4) as worker:
        await worker.until(lambda: world.processes.opened == 4)

    assert len({command.token for command in world.processes.commands}) == 4


@pytest.mark.req("R18", "R135", "R137", "R381", "R395", "R400", "R402", "R553")
@pytest.mark.parametrize("outcome", ["success", "rejected", "unknown", "lost"])
async def test_no_token_secret_or_command_is_on_disk_in_a_log_or_in_an_error(world: World, outcome: str) -> None:
    from qlworker.domain.revision import ShellCommand

    world.control.secrets[REFERENCE] = SECRET
    command_text = "echo a-very-private-command"
    world.control.enqueue(
        make_revision(ShellCommand(command=command_text), [Binding(name="KEY", kind="secret", secret_ref=REFERENCE)])
    )
    if outcome == "rejected":
        world.processes.script.append(lambda *_: Rejected("no_such_file"))
    if outcome == "unknown":
        world.processes.script.append(raising(RuntimeError(f"{SECRET} {command_text}")))
    async with world.worker(live_output=True) as worker:
        await worker.until(lambda: world.processes.commands)
        await worker.settle()
        if outcome == "success":
            world.processes.command.end(3)
        if outcome == "lost":
            world.control.go_away()
        await worker.until(lambda: world.records()[0].is_settled or worker.is_in("recovery_required"))
        await worker.settle()
        lease_token = world.read().offer.lease_token
        spoken = repr(world.log.lines) + repr(worker.__dict__) + repr(worker.executions.active)

    token = b64u(world.processes.command.token)
    raw = bytes(world.processes.command.token)
    for text in (token, SECRET, lease_token, command_text):
        assert text not in spoken
    for path in world.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert SECRET.encode() not in data, path
            assert raw not in data, path
            if "receipts" not in path.parts:
                assert token.encode() not in data, path
            if "offers" not in path.parts:
                assert lease_token.encode() not in data, path
                assert command_text.encode() not in data, path


# -- imports


FLOW = Path(__file__).parents[2] / "qlworker" / "flow"


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


@pytest.mark.req("R11", "R153")
@pytest.mark.parametrize("path", sorted(FLOW.rglob("*.py")), ids=lambda path: path.name)
def test_the_flow_implements_no_connection_no_database_and_no_process(path: Path) -> None:
    outside = {name.split(".")[0] for name in imported(path) if not name.startswith(".")}

    standard = {"collections", "contextlib", "enum", "functools", "random", "secrets", "typing", "uuid"}
    assert outside <= standard | {"msgspec", "trio"}
    assert not any("adapters" in name or "control." in name for name in imported(path) if name.startswith("."))


@pytest.mark.req("R154")
def test_the_worker_runtime_depends_on_no_database_no_web_framework_and_no_control_plane() -> None:
    root = FLOW.parent
    forbidden = {"sqlite3", "sqlalchemy", "psycopg", "starlette", "hypercorn", "flask", "fastapi", "aiohttp"}
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] == "control":
            continue
        names = imported(path)
        assert not {name.split(".")[0] for name in names if not name.startswith(".")} & forbidden, path
        if path.name != "__init__.py" or path.parent.name != "control":
            assert not any(name.lstrip(".").startswith("control") and name != ".control_plane" for name in names), path


def test_the_launch_has_no_port_that_could_acknowledge(world: World) -> None:
    import inspect

    assert set(inspect.signature(Launcher.__init__).parameters) == {
        "self",
        "inbox",
        "processes",
        "receipts",
        "outputs",
        "materialiser",
        "server_clock",
        "log",
        "terms",
    }


@pytest.mark.req("R131")
async def test_what_was_prepared_for_a_start_that_failed_leaves_nothing_behind(world: World) -> None:
    world.control.enqueue(make_revision())
    world.processes.script.append(lambda *_: Rejected("resources"))
    async with world.worker(retention_ms=120_000) as worker:
        await worker.until_state("start_failure_acknowledged")
        output = world.processes.commands[0].plan.output
        assert output.exists()
        await worker.until(lambda: world.records() == [])

        assert not output.exists()
        assert world.receipt_files() == []


@pytest.mark.req("R134")
@pytest.mark.parametrize("stored", [-1, 2**31])
async def test_a_callback_sequence_out_of_range_is_no_answer_to_launch_on(world: World, stored: int) -> None:
    world.control.enqueue(make_revision())
    world.control.change("starting", lambda answer: answer["snapshot"].update(callbackSequence=stored), times=100)
    async with world.worker() as worker:
        await worker.until(lambda: len(world.control.called("starting")) >= 3)

    assert world.processes.commands == []
    assert world.steps("journal launching") == []


@pytest.mark.req("R134")
async def test_a_callback_that_no_receipt_could_carry_is_a_start_failure_before_the_barrier(world: World) -> None:
    world.control.enqueue(make_revision())
    world.control.change("starting", lambda answer: answer["snapshot"].update(callbackSequence=2**31 - 1), times=100)
    async with world.worker() as worker:
        await worker.until_state("start_failure_acknowledged")

    assert world.processes.commands == []
    assert world.steps("journal launching") == []
