"""`python -m qlworker.control.demo`: the main job from end to end, on this machine alone, proven step by step.

Real programs over real mutual TLS on loopback, everything in one temporary directory, nothing left behind. The first fact that
is not as it must be ends the demonstration with its reason and a non-zero exit code. `--idle` only starts the pair, for
measurements: it prints `worker_pid=N` and stops when standard input ends.
"""

import argparse
import hashlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from .demo_stage import Deviation, Stage, require
from .operator_api import EventView, RunDetail, WorkerView

WORKER: Final = "demo-worker"
TICKS: Final = 40
TICK_S: Final = 0.15
KILL_AFTER: Final = 8

FAILED: Final = 1
SIGNALLED: Final = 128
"""What a shell adds to the number of the signal that ended a program."""

# A demonstration should not wait half a minute for a heartbeat, and a small /tmp is room enough for it.
_LIVELY: Final = """
[session]
heartbeat_s = 5
cadence_ms = 200

[output]
minimum_free_bytes = 1048576
"""

_GREET: Final = """\
project = "demo"
id = "greet"
timeout_s = 30

[command]
shell = '''
echo "hello from $PLACE"
sleep 1
printf "the secret's digest is "
printf %s "$PASSWORD" | sha256sum | cut -d" " -f1
exit 7
'''

[environment.public]
PLACE = "a router"

[environment.secret]
PASSWORD = "password"

[placement]
support_tiers = ["tier1", "candidate", "experimental"]
"""

_COUNT: Final = """\
project = "demo"
id = "count"
timeout_s = 60

[command]
shell = '''
echo "executed by process $$" >> "$SIDE_EFFECT"
tick=1
while [ "$tick" -le {ticks} ]; do
  echo "tick $tick"
  sleep {pause}
  tick=$((tick + 1))
done
'''

[environment.public]
SIDE_EFFECT = "{side_effect}"

[placement]
support_tiers = ["tier1", "candidate", "experimental"]
"""


def main() -> int:
    """Runs the demonstration and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m qlworker.control.demo", description=__doc__)
    parser.add_argument("--idle", action="store_true", help="start the pair, print worker_pid=N, stop at end of standard input")
    idle: bool = parser.parse_args().idle
    # A Unix socket's path holds 107 bytes, which some TMPDIRs alone exceed.
    short = "/tmp" if len(tempfile.gettempdir()) > 50 else None
    directory = Path(tempfile.mkdtemp(prefix="qlworker-demo-", dir=short))
    try:
        return trio.run(_on_stage, directory, _idle if idle else _demonstrate)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _on_stage(directory: Path, play: Callable[[Stage], Awaitable[None]]) -> int:
    """Plays and clears the stage whatever happens; returns the exit code."""
    code, reason = 0, ""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            stage = Stage(directory, nursery)

            async def obey_signals() -> None:
                nonlocal code
                number = await anext(aiter(signals))
                code = SIGNALLED + number
                nursery.cancel_scope.cancel()

            nursery.start_soon(obey_signals)
            try:
                await play(stage)
            except Deviation as deviation:
                code, reason = FAILED, f"{deviation}{stage.evidence()}"
            except BaseExceptionGroup as group:
                # the watch over both processes runs in a nursery of its own
                deviations, others = group.split(Deviation)
                if deviations is None or others is not None:
                    raise
                code, reason = FAILED, f"{_first(deviations)}{stage.evidence()}"
            finally:
                with trio.CancelScope(shield=True):
                    await stage.clear()
            nursery.cancel_scope.cancel()
    sys.stdout.flush()
    if reason:
        sys.stderr.write(f"\nthe demonstration failed: {reason}\n")
    elif code:
        sys.stderr.write("\nstopped; nothing is left behind\n")
    return code


def _first(group: BaseExceptionGroup[Deviation]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _idle(stage: Stage) -> None:
    await _control_plane(stage)
    await stage.start_worker()
    await _online(stage)
    stage.say(f"worker_pid={stage.worker_pid}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.watch)
        await _end_of_input()
        nursery.cancel_scope.cancel()


async def _end_of_input() -> None:
    """Returns once standard input ends. Not through sys.stdin, whose lock a left-behind reader would hold at exit."""

    def read() -> bytes:
        return os.read(0, 4096)

    while await trio.to_thread.run_sync(read, abandon_on_cancel=True):
        continue


async def _demonstrate(stage: Stage) -> None:
    begin = trio.current_time()
    stage.step("A private authority, a control plane, and one worker enrolled")
    origin = await _control_plane(stage)
    stage.proved("qlcontrol listens", f"{origin}, SQLite in {stage.directory}")
    await _mutual_tls(stage)
    stage.proved("the worker's kit is private", _kit_modes(stage))

    stage.step("A worker with one TOML file")
    with (stage.kit / "qlworker.toml").open("a") as settings:
        settings.write(_LIVELY)
    await stage.start_worker()
    first = await _online(stage)
    stage.proved("the worker registered", f"session {first.session}, {first.available_slots} free, pid {stage.worker_pid}")
    later = await _heartbeat(stage, first)
    stage.proved(
        "the worker's heartbeat arrived",
        f"{((later.last_heartbeat_at_ms or 0) - (first.last_heartbeat_at_ms or 0)) / 1000:.1f} s later",
    )

    stage.step("A task with a public variable and a secret, followed live")
    await _greet(stage)

    stage.step("The worker is killed in the middle of a run")
    await _count(stage)

    stage.step("Everything is stopped")
    await _stop(stage)
    stage.say(f"\nEverything held, in {trio.current_time() - begin:.1f} s.")


async def _control_plane(stage: Stage) -> str:
    await stage.control("init", "--data", str(stage.data), "--name", "127.0.0.1", "--listen", "127.0.0.1:0", config=False)
    origin = await stage.start_control_plane()
    await stage.control("worker", "add", WORKER, "--out", str(stage.kit))
    return origin


async def _mutual_tls(stage: Stage) -> None:
    version, cipher = await stage.handshake(with_certificate=True)
    require(version == "TLSv1.3", f"the listener speaks {version}, not TLS 1.3")
    stage.proved("mutual TLS", f"{version}, {cipher}")
    refused = await stage.refusal()
    stage.proved("nobody gets in without a certificate", refused)


def _kit_modes(stage: Stage) -> str:
    files = sorted(stage.kit.iterdir())
    exposed = [file.name for file in [stage.kit, *files] if file.stat().st_mode & 0o077]
    require(not exposed, f"others may read {exposed}")
    return f"{len(files)} files of mode 0600: {', '.join(file.name for file in files)}"


async def _workers(stage: Stage) -> WorkerView:
    found = msgspec.json.decode(await stage.control("worker", "list", "--json"), type=list[WorkerView])
    require(len(found) == 1, f"{len(found)} workers are listed, not one")
    return found[0]


async def _online(stage: Stage) -> WorkerView:
    return await stage.until(
        "the worker's registration", 15, partial(_workers, stage), lambda worker: worker.session == "online"
    )


async def _heartbeat(stage: Stage, first: WorkerView) -> WorkerView:
    def is_later(worker: WorkerView) -> bool:
        return (worker.last_heartbeat_at_ms or 0) > (first.last_heartbeat_at_ms or 0)

    return await stage.until("a heartbeat", 15, partial(_workers, stage), is_later)


async def _greet(stage: Stage) -> None:
    password = secrets.token_urlsafe(24)
    await stage.control("secret", "put", "password", "--project", "demo", stdin=password.encode())
    await stage.put_task("greet", _GREET)
    stage.proved("the task is published", "demo/greet, its secret by reference only")
    run = await stage.follow("demo/greet")
    await run.line_containing("hello from a router", 15)
    seen = trio.current_time()
    exit_code = await run.wait(20)
    ahead = trio.current_time() - seen
    require(ahead > 0.5, f"the first line came only {ahead:.2f} s before the end, so not live")
    stage.proved("its first line was seen live", f"{ahead:.1f} s before the end")
    digest = hashlib.sha256(password.encode()).hexdigest()
    require(f"the secret's digest is {digest}" in run.lines, "the command did not get the secret's value")
    stage.proved("the secret reached the command", f"sha256 {digest[:16]}...")
    require(exit_code == 7, f"qlcontrol run start --follow exited {exit_code}, not with the task's exit code 7")
    detail = await _detail(stage, run.run_id)
    require(
        (detail.run.status, detail.run.exit_code) == ("failed", 7), f"the run is {detail.run.status}, {detail.run.exit_code}"
    )
    took = ((detail.run.finished_at_ms or 0) - (detail.run.started_at_ms or 0)) / 1000
    stage.proved("its exit code came through", f"7, after {took:.3f} s")
    stage.proved("its history is whole", await _history(stage, run.run_id))
    leaked = stage.files_with(password.encode())
    require(not leaked, f"the secret's value is in {leaked}")
    stage.proved("its value is in no database, journal or log", f"{stage.file_count()} files searched")


async def _count(stage: Stage) -> None:
    side_effect = stage.directory / "side-effect"
    await stage.put_task("count", _COUNT.format(ticks=TICKS, pause=TICK_S, side_effect=side_effect))
    run = await stage.follow("demo/count")
    await run.line_containing(f"tick {KILL_AFTER}", 20)
    old = stage.worker_pid
    await stage.kill_worker()
    stage.proved("the worker got SIGKILL", f"pid {old}, at tick {len(run.lines)} of {TICKS}")
    before = await _detail(stage, run.run_id)
    require(before.run.status == "running", f"the run is {before.run.status}, it should be running")
    await stage.start_worker()
    stage.proved("a new worker was started", f"pid {stage.worker_pid}, same TOML file")
    exit_code = await run.wait(40)
    require(exit_code == 0, f"the run ended with exit code {exit_code}")
    executions = side_effect.read_text().splitlines()
    require(len(executions) == 1, f"the command ran {len(executions)} times: {executions}")
    stage.proved("the command ran exactly once", f"one line in {side_effect.name}: {executions[0]}")
    whole = [f"tick {number}" for number in range(1, TICKS + 1)]
    log = (await stage.control("run", "logs", run.run_id)).decode().splitlines()
    require(log == whole, f"the stored log has {len(log)} lines that are not the {TICKS} ticks")
    require(run.lines == whole, f"the live view has {len(run.lines)} lines that are not the {TICKS} ticks")
    detail = await _detail(stage, run.run_id)
    artifact = detail.attempts[0].artifact
    require(artifact is not None and artifact.truncated is not True, "the stored log is missing or cut")
    stage.proved("the log is whole, live and stored", f"{TICKS} lines, no gap, none twice")
    status, attempts = detail.run.status, len(detail.attempts)
    require(status == "succeeded", f"the run is {status}")
    require(attempts == 1, f"the run has {attempts} attempts")
    took = ((detail.run.finished_at_ms or 0) - (detail.run.started_at_ms or 0)) / 1000
    stage.proved("the run succeeded", f"exit code {detail.run.exit_code}, one attempt, after {took:.1f} s")
    stage.proved("its history is whole", await _history(stage, run.run_id))


async def _stop(stage: Stage) -> None:
    took = await stage.stop_worker()
    require(took < 4, f"the worker needed {took:.1f} s to stop, more than the 4 s it has")
    stage.proved("the worker stopped on SIGTERM", f"exit code 0 after {took:.2f} s")
    took = await stage.stop_control_plane()
    stage.proved("the control plane stopped on SIGTERM", f"exit code 0 after {took:.2f} s")
    left = stage.leftovers()
    require(not left, f"processes are left: {left}")
    stage.proved("no process is left", "0 found")


async def _detail(stage: Stage, run_id: str) -> RunDetail:
    return msgspec.json.decode(await stage.control("run", "show", run_id, "--json"), type=RunDetail)


async def _history(stage: Stage, run_id: str) -> str:
    events = msgspec.json.decode(await stage.control("run", "events", run_id, "--json"), type=list[EventView])
    require([each.sequence for each in events] == list(range(1, len(events) + 1)), "the event history has gaps")
    types = [each.type for each in events]
    for once in ("run.queued", "run.dispatching", "attempt.starting", "attempt.running", "run.running"):
        require(types.count(once) == 1, f"the history has {once} {types.count(once)} times: {types}")
    return " > ".join(types)


if __name__ == "__main__":
    sys.exit(main())
