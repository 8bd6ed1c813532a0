"""`python -I -S dying_launcher.py POINT FATE LAUNCHER TITLE`: qlworker/launcher.py, killed at a named point of its own.

FATE is the pid of a worker to be killed a moment earlier, 0 for none, or `stop` to be stopped instead of killed. Standard
library only, as the launcher itself.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ME = os.getpid()


def main() -> int:
    point, fate, path = sys.argv[1:4]
    del sys.argv[1:4]
    spec = importlib.util.spec_from_file_location("launcher", path)
    assert spec is not None and spec.loader is not None
    launcher: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)

    def reach(now: str) -> None:
        # The forked process of the command passes through here too, and is not the one to die.
        if now == point and os.getpid() == ME:
            if str(os.getppid()) == fate:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(ME, signal.SIGSTOP if fate == "stop" else signal.SIGKILL)

    def watched(call: Callable[..., Any], step: str) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            reach(f"before:{step}")
            result = call(*args, **kwargs)
            reach(f"after:{step}")
            return result

        return around

    quietly = launcher.quietly

    def quietly_watched(call: Callable[..., Any], *args: Any) -> None:
        # The one quiet write of this byte is what lets the command run.
        step = "pass gate" if call is os.write and args[-1] == b"G" else ""
        reach(f"before:{step}")
        quietly(call, *args)
        reach(f"after:{step}")

    launcher.quietly = quietly_watched
    launcher.read_plan = watched(launcher.read_plan, "read plan")
    launcher.hold = watched(launcher.hold, "hold")
    launcher.say = watched(launcher.say, "say")
    launcher.publish_surely = watched(launcher.publish_surely, "receipt")
    launcher.os = SimpleNamespace(**vars(os))
    launcher.os.fork = watched(os.fork, "fork")
    launcher.os.fsync = watched(os.fsync, "temporary")
    launcher.os.link = watched(os.link, "link")
    return int(launcher.main())


if __name__ == "__main__":
    sys.exit(main())
