"""A real control plane and real workers as processes, on a loopback address of their own. Nothing here is a fake.

Waiting is for something that comes: a line on a worker's standard error, or the end of a run's log stream.
"""

import contextlib
import io
import json
import random
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from qlworker.control.cli import main as qlcontrol
from qlworker.control.operator_client import Operator
from qlworker.control.runs import EventView, RunDetail

PATIENCE_S = 60.0
PROJECT = "home"


class World:
    """One installation of qlcontrol below `root`, and the workers added to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = f"127.{random.randint(16, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self.settings = root / "control/qlcontrol.toml"
        # Any box of the tests' machines; a world of the older dialect knows no tiers.
        self.placement: dict[str, Any] = {"support_tiers": ["tier1", "candidate", "experimental", "legacy-only"]}
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self.control("init", "--data", str(root / "control"), "--name", self.address, "--listen", f"{self.address}:5801")

    def configure(self, text: str) -> None:
        """Appends sections to the control plane's settings, before it is started."""
        with self.settings.open("a") as file:
            file.write("\n" + text)

    def start(self) -> None:
        """Starts the control plane and returns when it listens."""
        log = (self.root / "control.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qlworker.control.cli", "serve", "--config", str(self.settings)],
            stdout=subprocess.PIPE,
            stderr=log,
        )
        log.close()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert b'"ready"' in line, (self.root / "control.log").read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the control plane and waits for it."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def add_worker(self, settings: str = "") -> "Box":
        """Enrols a worker that only takes tasks put for it; `settings` are further TOML sections, or `section.key = value`."""
        self._count += 1
        name = f"box-{self._count}"
        directory = self.root / name
        directory.mkdir(mode=0o700)
        kit = directory / "kit"
        self.control(
            "worker", "add", name, "--out", str(kit), "--state", str(directory / "state"), "--config", str(self.settings)
        )
        file = kit / "qlworker.toml"
        settings_table = _merge(tomllib.loads(file.read_text()), tomllib.loads(settings))
        # Quick to react, and quick to start: where no interpreter is, none is asked for its version.
        defaults = {
            "worker": {"labels": {"box": name}},
            "session": {"cadence_ms": 100, "pull_backoff_ms": 100},
            "execution": {"search_path": "/usr/sbin:/sbin"},
        }
        file.write_text(_toml(_merge(defaults, settings_table)))
        return Box(self, name, directory)

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """The operator's socket."""
        with Operator(self.root / "control/run/operator.sock") as operator:
            yield operator

    def put_secret(self, name: str, value: str) -> None:
        """Stores a secret of the project."""
        with self.operator() as operator:
            operator.call(Any, "PUT", "/secrets", value.encode(), project=PROJECT, name=name)

    def remove_secret(self, name: str) -> None:
        """As an operator who deletes its file."""
        (self.root / "control/secrets" / PROJECT / name).unlink()

    def control(self, *arguments: str) -> None:
        """A qlcontrol command, in this process: a new one would spend most of its time importing."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = qlcontrol(arguments)
        assert code == 0, said.getvalue()


class Box:
    """One worker: its directory, its tasks and its process."""

    def __init__(self, world: World, name: str, directory: Path) -> None:
        self.world = world
        self.name = name
        self.directory = directory
        self.settings = directory / "kit/qlworker.toml"
        self.state = directory / "state"
        self._tasks = 0

    def start(self, *program: str) -> "WorkerProcess":
        """Starts `qlworker run`, or `program` with the settings' path as its last argument."""
        command = [*program, str(self.settings)] if program else ["-m", "qlworker", "run", "--config", str(self.settings)]
        return WorkerProcess([sys.executable, *command])

    def run(self, shell: str, **task: Any) -> str:
        """Publishes a task for this box alone and starts a run of it; returns the run's id."""
        return self.run_command({"shell": shell}, **task)

    def run_command(self, command: dict[str, Any], **task: Any) -> str:
        """The same with a whole command table."""
        self._tasks += 1
        definition = {
            "project": PROJECT,
            "id": f"{self.name}-{self._tasks}",
            "command": command,
            "placement": {"labels": {"box": self.name}, **self.world.placement},
            **task,
        }
        with self.world.operator() as operator:
            operator.call(Any, "PUT", "/tasks", definition)
        return self.run_again(definition["id"])

    def run_again(self, task: str) -> str:
        """Starts a run of a task that is published; its id."""
        with self.world.operator() as operator:
            body = {"project": PROJECT, "task": task}
            return str(operator.call(dict[str, Any], "POST", "/runs", body)["run_id"])

    def cancel(self, run_id: str) -> None:
        """Asks for the run to be cancelled."""
        with self.world.operator() as operator:
            operator.call(Any, "POST", f"/runs/{run_id}/cancel")

    def show(self, run_id: str) -> RunDetail:
        """The run as it stands."""
        with self.world.operator() as operator:
            return operator.call(RunDetail, "GET", f"/runs/{run_id}")

    def events(self, run_id: str) -> list[str]:
        """The types of the run's events, in order."""
        with self.world.operator() as operator:
            return [event.type for event in operator.call(list[EventView], "GET", f"/runs/{run_id}/events")]

    def follow(self, run_id: str, until: bytes | None = None) -> bytes:
        """The run's output until it is over, or until `until` has come. One that hangs is cancelled, so that its test fails."""
        output = b""
        watchdog = threading.Timer(PATIENCE_S, self.cancel, [run_id])
        watchdog.daemon = True
        watchdog.start()
        try:
            with self.world.operator() as operator:
                stream = operator.stream(f"/runs/{run_id}/log", follow=1)
                with contextlib.closing(stream):
                    for part in stream:
                        output += part
                        if until is not None and until in output:
                            break
        finally:
            watchdog.cancel()
        return output

    def finish(self, run_id: str) -> tuple[RunDetail, bytes]:
        """Waits until the run is over; the run and its output."""
        output = self.follow(run_id)
        return self.show(run_id), output

    def records(self) -> list[dict[str, Any]]:
        """The journal's records as they are on disk."""
        return [json.loads(path.read_bytes()) for path in sorted((self.state / "journal/offers").glob("*.json"))]


class WorkerProcess:
    """A running worker whose log lines are collected."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_event(self, name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The `count`th event of that name with those fields."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                found = [
                    event
                    for event in self.events
                    if event.get("event") == name and all(event.get(key) == value for key, value in fields.items())
                ]
                if len(found) >= count:
                    return found[count - 1]
                assert not self._is_over, f"the worker ended without {name} {fields}:\n{self.text()}"
                assert self._changed.wait(max(deadline - time.monotonic(), 0)), f"no {name} {fields}:\n{self.text()}"

    def has_event(self, name: str) -> bool:
        """Whether such an event was logged so far."""
        with self._changed:
            return any(event.get("event") == name for event in self.events)

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self._process.kill()
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and waits; the exit code."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits for the end; the exit code."""
        code = self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def text(self) -> str:
        """All that was logged."""
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                with self._changed:
                    self.lines.append(line)
                    with contextlib.suppress(ValueError):
                        self.events.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _toml(document: dict[str, Any]) -> str:
    lines: list[str] = []
    for section, table in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    return msgspec.json.encode(value).decode()
