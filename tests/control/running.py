"""A real qlcontrol as a process of its own, and its commands."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qlworker.control.installation import initialise
from qlworker.control.operator_client import Operator

PROGRAM = [sys.executable, "-W", "error", "-m", "qlworker.control.cli"]
DEADLINE_S = 60


def command(
    *arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs one command to its end."""
    return subprocess.run(
        [*PROGRAM, *arguments], input=stdin, capture_output=True, check=False, timeout=DEADLINE_S, env=environment
    )


class ControlPlane:
    """An installation in `directory`, with a server while the context lasts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "qlcontrol.toml"
        if not self.config.exists():
            initialise(directory, ["127.0.0.1", "localhost"], "127.0.0.1", 0)
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}
        self.log = directory.parent / f"{directory.name}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()

    def start(self) -> None:
        """Starts the server and waits for its ready line."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "serve", "--config", str(self.config)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code. The descriptor tells the end without a poll."""
        assert self.process is not None
        descriptor = os.pidfd_open(self.process.pid)
        try:
            self.process.send_signal(number)
            assert select.select([descriptor], [], [], DEADLINE_S)[0], "the server did not end"
        finally:
            os.close(descriptor)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()

    @property
    def port(self) -> int:
        port: int = self.ready["port"]
        return port

    def operator(self) -> Operator:
        return Operator(self.directory / "run/operator.sock")

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """One command against this installation."""
        return command(*arguments, "--config", str(self.config), stdin=stdin)

    def out(self, *arguments: str, stdin: bytes = b"") -> str:
        """The output of a command that must succeed."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()
