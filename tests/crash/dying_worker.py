"""`python -m tests.crash.dying_worker FAULTS SETTINGS`: the real worker with the faults of tests/crash/faults.py in it.

Nothing of the worker is replaced: its own methods run, with a point before and one after each.
"""

import inspect
import json
import os
import random
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from qlworker import app, config
from qlworker.adapters import launching, processes
from qlworker.adapters.journal import FileJournal
from qlworker.adapters.output import OutputFiles
from qlworker.adapters.processes import LinuxProcesses
from qlworker.adapters.receipts import ReceiptFiles
from qlworker.adapters.transport import HttpsLink
from qlworker.domain.errors import QlworkerError, Transient

from .faults import Faults, Points

DYING_LAUNCHER = Path(__file__).with_name("dying_launcher.py")


def watch(points: Points, owner: Any, method: str, name: Callable[..., str]) -> None:
    """Puts a point before and after `owner.method`, which is a coroutine or a plain function; `name` gets its arguments."""
    original = getattr(owner, method)

    @wraps(original)
    async def around(*args: Any, **kwargs: Any) -> Any:
        step = name(*args)
        points.reach(f"before:{step}")
        result = await original(*args, **kwargs)
        points.reach(f"after:{step}")
        return result

    @wraps(original)
    def around_plain(*args: Any, **kwargs: Any) -> Any:
        step = name(*args)
        points.reach(f"before:{step}")
        result = original(*args, **kwargs)
        points.reach(f"after:{step}")
        return result

    setattr(owner, method, around if inspect.iscoroutinefunction(original) else around_plain)


def watch_everything(points: Points) -> None:
    """The points of faults.py. A step with a space in its name is one of them; `disk` steps are only counted."""
    watch(points, FileJournal, "write_session", lambda self, session: "write session")
    watch(points, FileJournal, "write_claim", lambda self, claim: "write claim")
    watch(points, FileJournal, "create", lambda self, record: "write accepted")
    watch(points, FileJournal, "remove_claim", lambda self, claim: "remove claim")
    watch(points, FileJournal, "replace", lambda self, record: f"write {record.state}")
    watch(points, HttpsLink, "call", lambda self, session, operation, body: f"ask {operation}")
    watch(points, HttpsLink, "upload", lambda self, session, preamble, output: "ask artifacts")
    watch(points, OutputFiles, "prepare", lambda self, name: "prepare output")
    watch(points, OutputFiles, "seal", lambda self, name: "seal output")
    watch(points, LinuxProcesses, "launch", lambda self, plan: "launch")
    watch(points, LinuxProcesses, "stop", lambda self, handle, grace_ms: "stop command")
    watch(points, processes, "spawn", lambda command_line, title: "spawn")
    watch(points, launching, "_send", lambda descriptor, data: "send plan")
    watch(points, launching.PipeGate, "open", lambda self: "open gate")
    watch(points, ReceiptFiles, "path", lambda self, attempt: "name receipt")
    watch(points, ReceiptFiles, "read", lambda self, attempt: "read receipt")
    watch(points, ReceiptFiles, "remove", lambda self, attempt: "remove receipt")
    for call in ("fsync", "link", "rename", "replace", "unlink"):
        watch(points, os, call, lambda *arguments: "disk")


def lose_answers(faults: Faults) -> None:
    """Drops answers and repeats requests. The choice depends on the seed and on how many requests came before."""
    chance = random.Random(faults.seed)
    original = HttpsLink.call

    @wraps(original)
    async def call(self: HttpsLink, *args: Any, **kwargs: Any) -> bytes:
        luck = chance.random()
        answer = await original(self, *args, **kwargs)
        if luck < faults.drop:
            raise Transient("the answer was lost on the way")
        if luck < faults.drop + faults.twice:
            try:
                answer = await original(self, *args, **kwargs)
            except QlworkerError:
                # Whoever repeats a request on the way may answer with either of the two.
                return answer
        return answer

    HttpsLink.call = call  # type: ignore[method-assign]


def trace_plans(path: str) -> None:
    """Notes every attempt whose launcher certainly has, or will read, its whole plan. A line outlives a SIGKILL unsynced."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    original = launching._send

    async def send(descriptor: int, data: bytes) -> None:
        await original(descriptor, data)
        os.write(file, json.loads(data[4:])["attempt_id"].encode() + b"\n")

    launching._send = send


def let_launchers_die(faults: Faults) -> None:
    """Runs the launcher below tests/crash/dying_launcher.py."""
    original = LinuxProcesses.__init__
    fate = "stop" if faults.launcher_stops else str(os.getpid() if faults.with_worker else 0)
    launcher = str(processes._LAUNCHER)

    def construct(self: LinuxProcesses, *args: Any, **kwargs: Any) -> None:
        wrapped = (sys.executable, "-I", "-S", str(DYING_LAUNCHER), faults.launcher, fate, launcher)
        original(self, *args, **{**kwargs, "launcher": wrapped})

    LinuxProcesses.__init__ = construct  # type: ignore[method-assign]


def main() -> int:
    faults = msgspec.json.decode(sys.argv[1], type=Faults)
    if faults.drop or faults.twice:
        lose_answers(faults)
    if faults.trace:
        trace_plans(faults.trace)
    if faults.launcher:
        let_launchers_die(faults)
    watch_everything(Points(faults))
    return app.run(config.load(Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
