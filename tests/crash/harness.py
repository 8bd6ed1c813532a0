"""One box of one world: runs that leave a line per execution, a worker with faults, and the facts when all has settled."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from qlworker.control.operator_client import Operator
from qlworker.control.runs import RunDetail
from tests.system.world import PATIENCE_S, PROJECT, Box, WorkerProcess, World

from .faults import Faults
from .outcome import Expected, Seen

# Nothing here waits for a lease to run out: a fault must be survived, not waited out.
RUN_LEASE = "[runs]\nlease_s = 600\n"
SETTINGS = """
worker.profile = "node"
worker.max_concurrent_runs = 64
session.lease_s = 600
session.heartbeat_s = 30
state.journal_capacity = 1024
execution.stop_grace_ms = 200
output.minimum_free_bytes = 1048576
output.maximum_bytes = 131072
log.format = "json"
"""
DONE = {"completion_acknowledged", "start_failure_acknowledged", "recovery_required"}
LOOK_S = 0.05
ENROLMENT = threading.Lock()
"""An enrolment runs in this process and catches what it prints, which two at a time cannot."""


class Kind(msgspec.Struct, frozen=True):
    """A command: what it does after it has left its line, and how it ends. `timeout_s` 0 is none."""

    name: str
    shell: str
    expected: Expected
    timeout_s: float = 0
    secret: bool = False
    program: str = ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("quick", "end", Expected("succeeded", 0)),
        Kind("secret", 'end; test "$WORD" = hidden', Expected("succeeded", 0), secret=True),
        Kind("three", "sleep 0.1; end; exit 3", Expected("failed", 3)),
        Kind("looks-killed", "end; exit 137", Expected("failed", 137)),
        Kind("killed", "end; kill -9 $$", Expected("failed", 137)),
        Kind("stubborn", "trap '' TERM; sleep 0.7; end; exit 5", Expected("failed", 5)),
        Kind("loud", "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; end", Expected("succeeded", 0)),
        Kind("slow", "sleep 1.5; end; exit 7", Expected("failed", 7)),
        Kind("endless", "echo begun; sleep 1000", Expected("timed_out", 143), timeout_s=2),
        Kind("missing", "", Expected("failed", None), program="/nowhere/program"),
    )
}


def make_world(root: Path) -> World:
    """A started control plane whose leases outlast every fault."""
    root.mkdir(parents=True)
    with ENROLMENT:
        world = World(root)
    world.configure(RUN_LEASE)
    world.start()
    world.put_secret("word", "hidden")
    return world


class Site:
    """A box for crashes. `state` is forgotten with `forget`, the control plane's runs and the executions are not."""

    def __init__(self, world: World) -> None:
        self.world = world
        with ENROLMENT:
            self.box: Box = world.add_worker(SETTINGS)
        self.executions = self.box.directory / "executions"
        self.trace = self.box.directory / "plans"
        self.worker: WorkerProcess | None = None
        self.faults = Faults()
        self._published: set[str] = set()

    def start(self, faults: Faults) -> WorkerProcess:
        """Starts a worker with `faults` and the trace of plans."""
        self.faults = msgspec.structs.replace(faults, trace=str(self.trace))
        self.worker = self.box.start("-m", "tests.crash.dying_worker", msgspec.json.encode(self.faults).decode())
        return self.worker

    def run(self, *kinds: Kind) -> list[str]:
        """Starts a run of each kind; their ids. One connection for all: to make one costs more than to use it."""
        with self.world.operator() as operator:
            return [self._run(operator, kind) for kind in kinds]

    def _run(self, operator: Operator, kind: Kind) -> str:
        task = f"{self.box.name}-{kind.name}"
        if kind.name not in self._published:
            operator.call(Any, "PUT", "/tasks", self._task(kind, task))
            self._published.add(kind.name)
        return str(operator.call(dict[str, Any], "POST", "/runs", {"project": PROJECT, "task": task})["run_id"])

    def _task(self, kind: Kind, name: str) -> dict[str, Any]:
        # One line each, appended by one write: O_APPEND keeps them whole whoever writes at the same time.
        shell = f'end() {{ echo "end $QL_ATTEMPT_ID" >> {self.executions}; }}; echo "start $QL_ATTEMPT_ID" >> {self.executions}'
        return {
            "project": PROJECT,
            "id": name,
            "command": {"program": kind.program} if kind.program else {"shell": f"{shell}\n{kind.shell}\n"},
            "placement": {"labels": {"box": self.box.name}, **self.world.placement},
            **({"timeout_s": kind.timeout_s} if kind.timeout_s else {}),
            **({"environment": {"secret": {"WORD": "word"}}} if kind.secret else {}),
        }

    def settle(self, run_ids: Iterable[str]) -> bool:
        """Waits until each run is over, or its record says that it needs recovery, and every record has come to rest. False
        when that takes too long or the worker ends."""
        waiting = set(run_ids)
        deadline = time.monotonic() + PATIENCE_S
        with self.world.operator() as operator:
            while time.monotonic() < deadline:
                records = self.records()
                waiting = {run_id for run_id in waiting if not self._is_settled(operator, run_id, records)}
                if not waiting and self._is_at_rest(records):
                    return True
                if self.worker is None or not self.worker.is_running():
                    return False
                time.sleep(LOOK_S)
        return False

    @staticmethod
    def _is_settled(operator: Operator, run_id: str, records: dict[str, dict[str, Any]]) -> bool:
        state = records.get(run_id, {}).get("state")
        if state == "recovery_required":
            return True
        return state in {*DONE, None} and operator.call(RunDetail, "GET", f"/runs/{run_id}").run.is_over

    def _is_at_rest(self, records: dict[str, dict[str, Any]]) -> bool:
        """Whether no record asks for anything. A receipt may stay beside a record that is done: as evidence when it needs
        recovery, or for retention after a kill between the last write and the removal. Alone it never does."""
        known = {record["offer"]["attemptId"] for record in records.values()}
        receipts = {path.stem for path in (self.box.state / "receipts").rglob("*.json")}
        return receipts <= known and all(record["state"] in DONE for record in records.values())

    def records(self) -> dict[str, dict[str, Any]]:
        """The journal by run. A record that is being replaced is looked at again by the caller."""
        found = {}
        for path in (self.box.state / "journal/offers").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                record = json.loads(path.read_bytes())
                found[record["offer"]["candidate"]["runId"]] = record | {"offer": record["offer"]["candidate"]}
        return found

    def look(self, run_ids: Iterable[str]) -> Iterator[Seen]:
        """The facts of each run."""
        lines = Counter(self.executions.read_text().splitlines() if self.executions.exists() else [])
        sent = set(self.trace.read_text().splitlines() if self.trace.exists() else [])
        records = self.records()
        with self.world.operator() as operator:
            for run_id in run_ids:
                detail = operator.call(RunDetail, "GET", f"/runs/{run_id}")
                record = records.get(run_id)
                attempt = detail.attempts[-1].id
                yield Seen(
                    run_id=run_id,
                    attempt_id=attempt,
                    status=detail.run.status,
                    is_over=detail.run.is_over,
                    exit_code=detail.run.exit_code,
                    error_code=detail.run.error_code,
                    # The most of any attempt: one attempt twice is the double, not two attempts.
                    started=max(lines[f"start {each.id}"] for each in detail.attempts),
                    ended=lines[f"end {attempt}"],
                    record=None if record is None else record["state"],
                    is_behind_barrier=record is not None and "executorStartedAtMs" in record,
                    has_handle=record is not None and "executorHandle" in record,
                    has_receipt=bool(list((self.box.state / "receipts").rglob(f"{attempt}.json"))),
                    plan_sent=attempt in sent,
                )
