"""`python -m tests.system.dying_worker STEP SETTINGS`: the real worker, which kills itself with SIGKILL at one step.

STEP is `before NAME` or `after NAME` in one word with a colon, for example `after:write started`. The steps are the durable
writes, the requests, the launch, the gate and the receipt's removal of one run; each kills at its first occurrence.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from qlworker import app, config
from qlworker.adapters import launching
from qlworker.adapters.journal import FileJournal
from qlworker.adapters.output import OutputFiles
from qlworker.adapters.processes import LinuxProcesses
from qlworker.adapters.receipts import ReceiptFiles
from qlworker.adapters.transport import HttpsLink

Method = Callable[..., Awaitable[Any]]

STEPS = (
    "write claim",
    "ask offers",
    "write accepted",
    "remove claim",
    "ask starting",
    "write starting_acknowledged",
    "ask secrets",
    "prepare output",
    "write launching",
    "launch",
    "write started",
    "open gate",
    "ask running",
    "write running_acknowledged",
    "seal output",
    "ask artifacts",
    "ask completion",
    "write completion_acknowledged",
    "remove receipt",
)


def main() -> int:
    when, _, step = sys.argv[1].partition(":")

    def die(now: str, name: str) -> None:
        if (now, name) == (when, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(owner: type, method: str, name: Callable[..., str]) -> None:
        original: Method = getattr(owner, method)

        @wraps(original)
        async def around(self: Any, *args: Any, **kwargs: Any) -> Any:
            die("before", name(*args))
            result = await original(self, *args, **kwargs)
            die("after", name(*args))
            return result

        setattr(owner, method, around)

    watched(FileJournal, "write_claim", lambda claim: "write claim")
    watched(FileJournal, "create", lambda record: "write accepted")
    watched(FileJournal, "remove_claim", lambda claim: "remove claim")
    watched(FileJournal, "replace", lambda record: f"write {record.state}")
    watched(HttpsLink, "call", lambda session, operation, body: f"ask {operation}")
    watched(HttpsLink, "upload", lambda session, preamble, output: "ask artifacts")
    watched(OutputFiles, "prepare", lambda name: "prepare output")
    watched(OutputFiles, "seal", lambda name: "seal output")
    watched(LinuxProcesses, "launch", lambda plan: "launch")
    watched(launching.PipeGate, "open", lambda: "open gate")
    watched(ReceiptFiles, "remove", lambda attempt: "remove receipt")
    return app.run(config.load(Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
