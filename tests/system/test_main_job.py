"""The main job over real mutual TLS: a worker takes runs, carries them out and reports them."""

import os
import signal
from pathlib import Path

import pytest

from qlworker.adapters.process_table import every_stat

from .world import Box, World


@pytest.fixture
def worker(box: Box):
    process = box.start()
    yield process
    process.stop()


@pytest.mark.req("R517", "R516", "R530", "R525")
def test_a_run_is_carried_out_and_reported_with_its_log_code_and_history(box: Box, worker) -> None:
    run_id = box.run("echo out; echo err >&2; exit 3")

    detail, output = box.finish(run_id)

    assert (detail.run.status, detail.run.exit_code) == ("failed", 3)
    assert output == b"out\nerr\n"
    assert detail.attempts[0].artifact is not None
    assert detail.attempts[0].artifact.byte_length == len(output)
    assert box.events(run_id) == [
        "run.created",
        "run.queued",
        "run.dispatching",
        "attempt.starting",
        "attempt.running",
        "run.running",
        "attempt.failed",
        "run.failed",
    ]


@pytest.mark.req("R529")
def test_public_empty_and_secret_values_reach_the_command_and_nothing_else_does(box: Box, worker) -> None:
    box.world.put_secret("password", "s3cret value")
    run_id = box.run(
        "env | sort",
        environment={"public": {"A": "1", "EMPTY": ""}, "secret": {"PW": "password"}},
    )

    detail, output = box.finish(run_id)

    lines = set(output.decode().splitlines())
    attempt = detail.attempts[0]
    assert {"A=1", "EMPTY=", "PW=s3cret value", f"QL_ATTEMPT_ID={attempt.id}", f"QL_RUN_ID={run_id}"} <= lines
    # What a shell sets by itself is the shell's own business.
    names = {line.split("=")[0] for line in lines} - {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {name for name in names if not name.startswith("QL_")} == {"A", "EMPTY", "PW"}


def test_an_environment_bundle_reaches_the_command(box: Box, worker) -> None:
    bundle = '{"schema":"qinglong/environment-bundle@v1","entries":[{"name":"B","value":"2"},{"name":"C","value":""}]}'
    with box.world.operator() as operator:
        operator.call(object, "PUT", "/secrets", bundle.encode(), project="home", name="bundle", version=1)
    run_id = box.run('echo "$B-$C-"', environment={"bundle": "bundle@1"})

    detail, output = box.finish(run_id)

    assert (detail.run.status, output) == ("succeeded", b"2--\n")


def test_arguments_arrive_as_they_are_even_empty_ones(box: Box, worker) -> None:
    run_id = box.run_command({"program": "/usr/bin/printf", "arguments": ["[%s]", "", "a b", "ü"]})

    _, output = box.finish(run_id)

    assert output == "[][a b][ü]".encode()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ({"program": "/nowhere/program"}, "command_not_found"),
        ({"program": "/etc/passwd"}, "not_executable"),
    ],
)
def test_a_command_that_cannot_start_is_a_start_failure_and_nothing_ran(
    box: Box, worker, command: dict[str, str], reason: str
) -> None:
    run_id = box.run_command(command)

    detail, _ = box.finish(run_id)

    assert (detail.run.status, detail.run.error_code, detail.run.exit_code) == ("failed", "EXECUTOR_START_FAILED", None)
    assert reason in worker.wait_event("start_refused")["reason"]


def test_a_missing_working_directory_is_a_start_failure(box: Box, worker) -> None:
    detail, _ = box.finish(box.run("true", working_directory="/nowhere"))

    assert detail.run.error_code == "EXECUTOR_START_FAILED"


def test_a_secret_that_is_gone_is_a_start_failure_in_bounded_time(world: World, box: Box, worker) -> None:
    """The control plane answers "unavailable" for a secret it does not have; the run must not hang for ever."""
    world.put_secret("short-lived", "x")
    first, _ = box.finish(box.run("true", environment={"secret": {"X": "short-lived"}}))
    world.remove_secret("short-lived")
    detail, _ = box.finish(box.run_again(first.run.task))

    assert detail.run.error_code == "EXECUTOR_START_FAILED"


def test_binary_output_is_kept_byte_for_byte(box: Box, worker) -> None:
    detail, output = box.finish(box.run(r"printf '\377\000\001\n'"))

    assert (detail.run.status, output) == ("succeeded", b"\xff\x00\x01\n")


def test_output_above_the_maximum_is_bounded_and_says_so(world: World) -> None:
    box = world.add_worker("[output]\nmaximum_bytes = 65536\n")
    worker = box.start()

    detail, output = box.finish(box.run("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo last"))
    worker.stop()

    assert detail.run.status == "succeeded"
    assert detail.attempts[0].artifact is not None
    assert detail.attempts[0].artifact.truncated is True
    assert detail.attempts[0].artifact.byte_length <= 65536 + 200
    assert output.startswith(b"line 0\n")
    assert b"[qlworker: " in output


def test_output_is_seen_while_the_command_runs(box: Box, worker, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    run_id = box.run(f"echo early; cat {go_on}; echo late")

    assert box.follow(run_id, until=b"early\n") == b"early\n"
    assert box.show(run_id).run.status == "running"
    go_on.write_text("between\n")

    detail, output = box.finish(run_id)
    assert (detail.run.status, output) == ("succeeded", b"early\nbetween\nlate\n")


def test_a_cancelled_run_is_stopped_with_all_its_children(world: World, tmp_path: Path) -> None:
    box = world.add_worker("[execution]\nstop_grace_ms = 200\n")
    worker = box.start()
    pids = tmp_path / "pids"
    run_id = box.run(f"sleep 1000 & echo $! $$ > {pids}; echo ready; trap '' TERM; sleep 1000")
    box.follow(run_id, until=b"ready\n")

    box.cancel(run_id)
    detail, _ = box.finish(run_id)

    assert (detail.run.status, detail.run.cancel_reason) == ("cancelled", "user")
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]
    worker.stop()


def test_a_run_cancelled_before_it_starts_never_runs(box: Box, tmp_path: Path) -> None:
    run_id = box.run(f"touch {tmp_path}/ran")
    box.cancel(run_id)
    worker = box.start()
    worker.wait_event("pull_idle")

    assert box.finish(run_id)[0].run.status == "cancelled"
    assert not (tmp_path / "ran").exists()
    worker.stop()


def test_a_run_past_its_deadline_is_timed_out(world: World) -> None:
    box = world.add_worker("[execution]\nstop_grace_ms = 200\n")
    worker = box.start()

    detail, _ = box.finish(box.run("trap '' TERM; echo on; sleep 1000", timeout_s=1))
    worker.stop()

    assert (detail.run.status, detail.run.error_code) == ("timed_out", "EXECUTION_TIMED_OUT")
    assert detail.run.exit_code == 128 + signal.SIGKILL


def test_several_runs_go_on_at_once_up_to_the_workers_maximum(world: World, tmp_path: Path) -> None:
    """Each command waits for the other: they only end when both run at the same time (gap 6)."""
    box = world.add_worker("[worker]\nmax_concurrent_runs = 2\n")
    worker = box.start()
    left, right = tmp_path / "left", tmp_path / "right"
    os.mkfifo(left)
    os.mkfifo(right)

    one = box.run(f"echo hello > {left}; cat {right}")
    two = box.run(f"cat {left}; echo hello > {right}")

    assert box.finish(one)[0].run.status == box.finish(two)[0].run.status == "succeeded"
    worker.stop()


@pytest.mark.req("R381", "R402", "R400", "R18")
def test_no_secret_token_or_command_shows_in_any_log_or_durable_file(box: Box, worker) -> None:
    box.world.put_secret("hidden", "very-hidden-value")
    run_id = box.run("echo marker-command >/dev/null; sleep 0", environment={"secret": {"H": "hidden"}})
    box.finish(run_id)
    worker.wait_event("run_completed")
    token = (box.directory / "kit/token").read_text().strip()
    (record,) = box.records()
    control_log = (box.world.root / "control.log").read_text()

    for text in (worker.text(), control_log):
        for secret in ("very-hidden-value", token, record["offer"]["leaseToken"], "marker-command"):
            assert secret not in text
    for path in box.state.rglob("*"):
        if path.is_file():
            assert b"very-hidden-value" not in path.read_bytes(), path
            assert token.encode() not in path.read_bytes(), path


def test_the_worker_never_leaves_a_core_dump_but_a_command_may_ask_for_one(box: Box, worker) -> None:
    worker.wait_event("session_registered")
    limits = Path(f"/proc/{worker.pid}/limits").read_text()
    (core,) = [line.split() for line in limits.splitlines() if line.startswith("Max core file size")]

    _, output = box.finish(box.run("ulimit -Hc"))

    assert core[4] == "0"
    assert output.decode().strip() == core[5]


@pytest.mark.req("R9", "R45", "R544", "R548")
def test_a_running_command_costs_one_launcher_and_nothing_else(box: Box, worker, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    run_id = box.run(f"echo there; read line < {go_on}")
    box.follow(run_id, until=b"there\n")

    children = [stat.process.pid for stat in every_stat() if stat.parent == worker.pid]
    below = [stat.process.pid for stat in every_stat() if stat.parent in children]
    go_on.write_text("\n")

    assert (len(children), len(below)) == (1, 1)
    assert box.finish(run_id)[0].run.status == "succeeded"
