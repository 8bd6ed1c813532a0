"""Running a launcher by hand: one pipe in, one pipe out, as a worker does it, but step by step."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qlworker.domain.canonical import b64u
from qlworker.domain.receipt import Receipt

DEADLINE_S = 60
TOKEN = bytes(range(32))
LAUNCHERS = {"python": [sys.executable, "-I", "-S", str(Path(__file__).parents[2] / "qlworker/launcher.py")]}


def eventually(check: Callable[[], Any]) -> Any:
    """The first true answer of `check`; for facts that nothing announces."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := check()):
        assert time.monotonic() < deadline, "it never came true"
        os.sched_yield()
        select.select([], [], [], 0.01)
    return answer


def wait_gone(pid: int) -> None:
    """Waits until the process has ended, or was gone already."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(pidfd) as watched:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        assert poll.poll(DEADLINE_S * 1000), f"process {pid} did not end"


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Makes this process the parent of orphans below it for a while, so that a test can see how they end."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(36, 0, 0, 0, 0)


def obey_file_modes() -> None:
    """For a child about to execute: root, too, meets closed doors."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)


class Fifo:
    """Where a command tells the test something; reading waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def line(self) -> str:
        data = b""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not data.endswith(b"\n"):
            assert poll.poll(DEADLINE_S * 1000), "nobody wrote into the FIFO"
            data += os.read(self._reader, 1)
        return data.decode().strip()


class Box:
    """A directory with everything one command needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        self.log.touch(0o600)
        self.receipts = root / "receipts"
        self.receipts.mkdir(0o700)
        self.target = self.receipts / "attempt-1.json"
        self.marker = root / "ran"

    def plan(self, *argv: str, **changes: Any) -> dict[str, Any]:
        return {
            "run_id": "run-1",
            "attempt_id": "attempt-1",
            "callback_sequence": 7,
            "token": b64u(TOKEN),
            "started_at_ms": 1_000_000,
            "argv": list(argv),
            "environment": {},
            "working_directory": str(self.root),
            "output": str(self.log),
            "receipt": str(self.target),
        } | changes

    def marking(self) -> list[str]:
        """A command that leaves a mark."""
        return ["/bin/sh", "-c", f"echo ran >> {self.marker}"]

    def receipt(self) -> Receipt:
        return Receipt.parse(self.target.read_bytes())

    def leftovers(self) -> set[str]:
        return {path.name for path in self.receipts.iterdir()} - {self.target.name}


class Launch:
    """One launcher, from its start on."""

    def __init__(self, command_line: list[str], plan: dict[str, Any] | bytes, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [*command_line, "title"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            **popen,
        )
        text = plan if isinstance(plan, bytes) else json.dumps(plan).encode()
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdin is not None and self.stdout is not None
        try:
            self.stdin.write(len(text).to_bytes(4, "big") + text)
            self.stdin.flush()
        except BrokenPipeError:
            pass  # it has made up its mind already

    @property
    def pid(self) -> int:
        return self.process.pid

    def answer(self) -> dict[str, Any]:
        assert self.stdout is not None
        line = self.stdout.readline()
        return json.loads(line) if line else {}

    def held(self) -> int:
        """The pid of the held command."""
        answer = self.answer()
        assert set(answer) == {"held"}, answer
        return answer["held"]

    def gate(self, byte: bytes = b"G") -> None:
        assert self.stdin is not None
        self.stdin.write(byte)
        self.stdin.close()

    def close(self) -> None:
        assert self.stdin is not None and self.stdout is not None
        self.stdin.close()
        self.stdout.close()

    def ended(self) -> int:
        """The launcher's exit status."""
        wait_gone(self.pid)
        self.close()
        return self.process.wait()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.close()
