"""The processes and files of the demonstration: starting, watching, stopping them, and looking at what they leave."""

import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final, TypeVar

import msgspec
import trio

T = TypeVar("T")

COMMAND_S: Final = 30
EVIDENCE_LINES: Final = 12


class Deviation(Exception):
    """Something is not as the demonstration says."""


class _Ready(msgspec.Struct, frozen=True):
    """The control plane's first line."""

    port: int
    origin: str


def require(holds: bool, reason: str) -> None:
    """Raises Deviation with `reason` unless the fact holds."""
    if not holds:
        raise Deviation(reason)


class Following:
    """`qlcontrol run start --follow`: its lines as they come."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._changed = trio.Condition()
        self._ended = trio.Event()
        self.lines: list[str] = []
        self.run_id = ""

    async def read(self) -> None:
        """Collects the output until it ends."""
        assert self._process.stdout is not None
        rest = b""
        async for chunk in self._process.stdout:
            *whole, rest = (rest + bytes(chunk)).split(b"\n")
            async with self._changed:
                self.lines += [line.decode() for line in whole]
                self._changed.notify_all()

    async def read_identity(self) -> None:
        """Waits for the line on standard error that names the run."""
        assert self._process.stderr is not None
        line = b""
        while not line.endswith(b"\n"):
            chunk = await self._process.stderr.receive_some(1)
            require(bool(chunk), "qlcontrol run start --follow ended without naming a run")
            line += bytes(chunk)
        require(line.startswith(b"run "), f"qlcontrol run start --follow said: {line.decode().strip()}")
        self.run_id = line.split()[1].decode()

    async def line_containing(self, text: str, seconds: float) -> None:
        """Waits until a line is `text`, for `seconds` at most."""
        with trio.move_on_after(seconds):
            async with self._changed:
                while text not in self.lines:
                    await self._changed.wait()
                return
        raise Deviation(f"the line {text!r} did not come within {seconds:g} s; seen: {self.lines[-3:]}")

    async def wait(self, seconds: float) -> int:
        """The command's exit code, within `seconds`."""
        with trio.move_on_after(seconds):
            code = await self._process.wait()
            await self._ended.wait()
            return code
        raise Deviation(f"the run did not end within {seconds:g} s")

    async def run(self) -> None:
        """Reads both streams to their end, so that neither can block the command."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain)
            await self.read()
        self._ended.set()

    async def _drain(self) -> None:
        assert self._process.stderr is not None
        async for _ in self._process.stderr:
            pass


class Stage:
    """One temporary directory and everything that runs in it."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.directory = directory
        self.data = directory / "control"
        self.kit = directory / "kit"
        self._nursery = nursery
        self._server: trio.Process | None = None
        self._worker: trio.Process | None = None
        self._started: list[trio.Process] = []
        self._port = 0
        self._steps = 0
        self._mark = "\u2713" if _can_print("\u2713") else "ok"

    def say(self, line: str) -> None:
        """One line on standard output."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def step(self, title: str) -> None:
        """The heading of the next step."""
        self._steps += 1
        self.say(f"\n{self._steps}. {title}")

    def proved(self, fact: str, value: str) -> None:
        """One proven fact with what was measured."""
        self.say(f"   {self._mark} {fact}: {value}")

    @property
    def worker_pid(self) -> int:
        """The pid of the worker that was started last."""
        return 0 if self._worker is None else self._worker.pid

    async def control(self, *arguments: str, stdin: bytes = b"", config: bool = True) -> bytes:
        """Runs one `qlcontrol` command and returns its output. Raises Deviation when it fails."""
        command = self._command(*arguments, config=config)
        with trio.move_on_after(COMMAND_S):
            done = await trio.run_process(
                command, stdin=stdin, capture_stdout=True, capture_stderr=True, check=False, start_new_session=True
            )
            said = done.stderr.decode(errors="replace").strip()
            require(done.returncode == 0, f"qlcontrol {arguments[0]} {arguments[1]} exited {done.returncode}: {said}")
            return done.stdout
        raise Deviation(f"qlcontrol {arguments[0]} {arguments[1]} did not end within {COMMAND_S} s")

    async def start_control_plane(self) -> str:
        """Starts `qlcontrol serve` and returns its origin once it listens."""
        self._server = await self._start(self._command("serve"), "control.log", stdout=PIPE)
        assert self._server.stdout is not None
        line = b""
        with trio.move_on_after(20):
            while not line.endswith(b"\n"):
                chunk = bytes(await self._server.stdout.receive_some(4096))
                require(bool(chunk), "qlcontrol serve ended before it listened")
                line += chunk
            ready = msgspec.json.decode(line, type=_Ready)
            self._port = ready.port
            return ready.origin
        raise Deviation("qlcontrol serve did not listen within 20 s")

    async def start_worker(self) -> None:
        """Starts `qlworker run`."""
        command = [sys.executable, "-m", "qlworker", "run", "--config", str(self.kit / "qlworker.toml")]
        self._worker = await self._start(command, "worker.log", stdout=DEVNULL)

    async def kill_worker(self) -> None:
        """SIGKILL, and nothing else."""
        assert self._worker is not None
        self._worker.kill()
        await self._worker.wait()

    async def stop_worker(self) -> float:
        """SIGTERM; the seconds it took. Raises Deviation unless it exits 0."""
        return await self._stop(self._worker, "the worker")

    async def stop_control_plane(self) -> float:
        """SIGTERM; the seconds it took. Raises Deviation unless it exits 0."""
        return await self._stop(self._server, "the control plane")

    async def watch(self) -> None:
        """Returns never; raises Deviation when worker or control plane end by themselves."""
        async with trio.open_nursery() as nursery:
            for process, name in ((self._worker, "the worker"), (self._server, "the control plane")):
                assert process is not None
                nursery.start_soon(_require_running, process, name)

    async def put_task(self, name: str, text: str) -> None:
        """Publishes a task file."""
        file = self.directory / f"{name}.toml"
        file.write_text(text)
        await self.control("task", "put", str(file))

    async def follow(self, task: str) -> Following:
        """Starts a run and follows it."""
        process = await trio.lowlevel.open_process(
            self._command("run", "start", task, "--follow"), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        self._started.append(process)
        following = Following(process)
        with trio.move_on_after(COMMAND_S):
            await following.read_identity()
            self._nursery.start_soon(following.run)
            return following
        raise Deviation(f"qlcontrol run start did not start a run within {COMMAND_S} s")

    async def until(self, what: str, seconds: float, look: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
        """What `look` finds once it `holds`. Raises Deviation after `seconds`, or when a process ended meanwhile."""
        with trio.move_on_after(seconds):
            while True:
                found = await look()
                if holds(found):
                    return found
                for process, name in ((self._worker, "the worker"), (self._server, "the control plane")):
                    code = None if process is None else process.poll()
                    require(code is None, f"{name} ended with exit code {code}")
                await trio.sleep(0.1)
        raise Deviation(f"{what} did not come within {seconds:g} s")

    async def handshake(self, *, with_certificate: bool) -> tuple[str, str]:
        """TLS version and cipher of a connection to the worker listener, after a request on it was answered."""
        context = ssl.create_default_context(cafile=str(self.kit / "ca.pem"))
        if with_certificate:
            context.load_cert_chain(self.kit / "identity.pem")
        with trio.move_on_after(10):
            stream = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", self._port), context, server_hostname="127.0.0.1")
            try:
                # In TLS 1.3 the client learns only with the first read that its certificate was refused.
                await stream.send_all(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                answer = bytes(await stream.receive_some(4096))
                require(answer.startswith(b"HTTP/1.1 200"), "the worker listener did not answer /livez")
                return str(stream.version()), str((stream.cipher() or ("",))[0])
            finally:
                await trio.aclose_forcefully(stream)
        raise Deviation("the worker listener did not answer within 10 s")

    async def refusal(self) -> str:
        """How the listener turns a client without a certificate away. Raises Deviation when it does not."""
        try:
            await self.handshake(with_certificate=False)
        except trio.BrokenResourceError:
            return "the listener ends the connection"
        raise Deviation("a client without a certificate got in")

    def evidence(self) -> str:
        """The last lines of both logs."""
        text = ""
        for name in ("control.log", "worker.log"):
            file = self.directory / name
            if file.exists():
                lines = file.read_text(errors="replace").splitlines()[-EVIDENCE_LINES:]
                text += f"\n\nend of {name}:\n" + "\n".join(f"  {line}" for line in lines)
        return text

    def files_with(self, value: bytes) -> list[str]:
        """The files that hold `value`, apart from where secrets are kept on purpose."""
        return [file.name for file in self._files() if value in file.read_bytes()]

    def file_count(self) -> int:
        """How many files `files_with` looks into."""
        return len(self._files())

    def leftovers(self) -> list[int]:
        """Processes of ours that still run: those whose command line or environment names the directory."""
        return [pid for pid in _pids() if pid != os.getpid() and self._belongs(pid)]

    async def clear(self) -> None:
        """Stops whatever still runs, the tasks' commands included."""
        for process in [self._worker, self._server, *self._started]:
            if process is not None and process.poll() is None:
                process.terminate()
                with trio.move_on_after(5) as patience:
                    await process.wait()
                if patience.cancelled_caught:
                    process.kill()
                    await process.wait()
        # Again until none is seen: one that was just being forked is not in the list, and a killed one takes a moment to go.
        with trio.move_on_after(5):
            while left := self.leftovers():
                for pid in left:
                    _kill(pid, self._belongs)
                await trio.sleep(0.01)

    def _command(self, *arguments: str, config: bool = True) -> list[str]:
        named = ["--config", str(self.data / "qlcontrol.toml")] if config else []
        return [sys.executable, "-m", "qlworker.control.cli", *arguments, *named]

    async def _start(self, command: list[str], log: str, stdout: int) -> trio.Process:
        with (self.directory / log).open("ab") as file:
            # A session of its own: Ctrl-C on the terminal must reach the demonstration alone, which stops the others in order.
            process = await trio.lowlevel.open_process(
                command, stdin=DEVNULL, stdout=stdout, stderr=file, start_new_session=True
            )
        self._started.append(process)
        return process

    async def _stop(self, process: trio.Process | None, name: str) -> float:
        assert process is not None
        begin = trio.current_time()
        process.terminate()
        with trio.move_on_after(10):
            code = await process.wait()
            require(code == 0, f"{name} exited {code} on SIGTERM")
            return trio.current_time() - begin
        raise Deviation(f"{name} did not stop within 10 s of SIGTERM")

    def _files(self) -> list[Path]:
        kept = self.data / "secrets"
        return [file for file in self.directory.rglob("*") if file.is_file() and kept not in file.parents]

    def _belongs(self, pid: int) -> bool:
        name = os.fsencode(self.directory)
        return any(name in _proc(pid, part) for part in ("cmdline", "environ"))


async def _require_running(process: trio.Process, name: str) -> None:
    code = await process.wait()
    raise Deviation(f"{name} ended with exit code {code}")


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _proc(pid: int, part: str) -> bytes:
    try:
        return (Path("/proc") / str(pid) / part).read_bytes()
    except OSError:
        return b""


def _kill(pid: int, belongs: Callable[[int], bool]) -> None:
    """SIGKILL through a pidfd, looked at again after opening it: a reused pid is a stranger's."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if belongs(pid):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
