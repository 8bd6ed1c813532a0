"""One worker's flow on real files, with time, processes and the control plane in the test's hands, and one ordered trace.

`World` is what survives the worker: the disk, the clock, the control plane and the commands. `Worker` is one process's life in
it. Every durable write, request, executor call and receipt removal is a step of the trace; a fault, a wait or the worker's
sudden end can be placed at any step.
"""

import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio
from trio.testing import wait_all_tasks_blocked

from qlworker.adapters.journal import FileJournal
from qlworker.adapters.output import OutputFiles
from qlworker.adapters.ownership import JournalOwnership
from qlworker.adapters.receipts import ReceiptFiles
from qlworker.domain.audit import Audit, AuditBudget
from qlworker.domain.canonical import b64u, sha256_hex
from qlworker.domain.certificate import Validity
from qlworker.domain.claim import PendingClaim
from qlworker.domain.identity import DurableHandle, Place, Presence, ProcessId
from qlworker.domain.receipt import Ending, Receipt, authenticate
from qlworker.domain.record import InboxRecord
from qlworker.domain.session import StoredSession
from qlworker.domain.sweep import SweepPosition, SweepTerms
from qlworker.flow.acknowledge import Acknowledger
from qlworker.flow.cadence import Cadence, CadenceTerms
from qlworker.flow.completion import Completion
from qlworker.flow.control_plane import ControlPlane
from qlworker.flow.delivery import OfferDelivery
from qlworker.flow.executions import Executions
from qlworker.flow.launch import Launcher, LaunchTerms
from qlworker.flow.lease_control import LeaseControl
from qlworker.flow.lease_loss import LeaseLossCoordinator
from qlworker.flow.materialise import Materialiser, RemoteMaterialiser
from qlworker.flow.output import OutputKeeper
from qlworker.flow.receiver import Receiver
from qlworker.flow.recovery.audit import StartupAuditor
from qlworker.flow.recovery.evidence import EvidenceReconciler
from qlworker.flow.recovery.lifecycle import JournalLifecycle
from qlworker.flow.recovery.retention import Retention
from qlworker.flow.recovery.supervisor import StartupRecovery
from qlworker.flow.recovery.sweeper import Sweeper
from qlworker.flow.renewal import CertificateRenewal
from qlworker.flow.server_clock import ServerClock
from qlworker.flow.session import CapabilitiesText, SessionKeeper, SessionTerms
from qlworker.flow.watch import Watcher
from qlworker.ports import Held, LaunchPlan, Rejected, StopResult
from tests.adapters.hand_clock import HandClock
from tests.flow.pocket_control_plane import PocketControlPlane

PLACE = Place(host_id="host", boot_id="boot", pid_namespace=1, time_namespace=2)
CAPABILITIES = '{"architecture":"amd64","executors":["remote-worker"]}'
WINDOW_MS = 300_000
CADENCE_MS = 2_000
RESTLESS_S = 30


class Killed(BaseException):
    """The worker is gone, as by SIGKILL."""


class DrivenClock(HandClock):
    """Knows what everybody waits for, so that a test can go from one moment to the next."""

    def __init__(self, boot_ms: int = 1_000_000, wall_ms: int = 1_700_000_000_000) -> None:
        super().__init__(boot_ms, wall_ms)
        self.deadlines: list[int] = []

    async def sleep_until(self, boot_ms: int) -> None:
        self.deadlines.append(boot_ms)
        try:
            await super().sleep_until(boot_ms)
        finally:
            self.deadlines.remove(boot_ms)

    def reboot(self, boot_id: str, wall_ms: int) -> None:
        self.boot_id = boot_id
        self._wall_ms = wall_ms


class RecordingLog:
    """Keeps every event."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: object) -> None:
        self.lines.append(("error", event, fields))

    def said(self, event: str) -> list[dict[str, object]]:
        return [fields for _, name, fields in self.lines if name == event]


@dataclass
class Command:
    """A launcher and its command, which live apart from the worker. Keeps its own copy of what the plan held."""

    clock: DrivenClock
    plan: LaunchPlan
    token: bytes
    buffer: bytearray
    handle: DurableHandle
    ends_at: int | None = None
    opened: bool = False
    exit_code: int = 0
    publishes: bool = True
    stops_dead: bool = False
    gone: trio.Event = field(default_factory=trio.Event)

    def begin(self, runs_ms: int | None) -> None:
        self.opened = True
        self.ends_at = None if runs_ms is None else self.clock.boot_ms() + runs_ms
        with self.plan.output.open("ab") as output:
            output.write(b"hello from the command\n")

    def catch_up(self) -> None:
        """What the launcher did by itself until now."""
        if self.opened and self.ends_at is not None and self.clock.boot_ms() >= self.ends_at:
            self.end(self.exit_code)

    def end(self, exit_code: int = 0, *, signal: int | None = None) -> None:
        """The command is over: the launcher publishes, then goes."""
        if self.gone.is_set():
            return
        if self.publishes:
            ending = Ending.EXITED if signal is None else Ending.SIGNALED
            publish(self.receipt(exit_code, ending, signal), self.plan.receipt)
        self.gone.set()

    def never_opened(self) -> None:
        """The gate closed without a byte."""
        if not self.opened and not self.gone.is_set():
            if self.publishes:
                publish(self.receipt(125, Ending.NOT_STARTED, None), self.plan.receipt)
            self.gone.set()

    def receipt(self, exit_code: int, ending: Ending, signal: int | None = None) -> Receipt:
        members: dict[str, Any] = {} if signal is None else {"signal": signal}
        return Receipt(
            schema_version=2,
            run_id=self.plan.run_id,
            attempt_id=self.plan.attempt_id,
            callback_sequence=self.plan.callback_sequence,
            token=b64u(self.token),
            started_at_ms=self.plan.started_at_ms,
            finished_at_ms=self.plan.started_at_ms + 1_000,
            exit_code=exit_code,
            ending=ending,
            **members,
        )


def publish(receipt: Receipt, path: Path) -> None:
    """A receipt the way a launcher publishes it: a temporary file and a hard link; the first one stays."""
    temporary = path.with_name(f".{receipt.attempt_id}.{secrets.token_hex(16)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(receipt.to_json())
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


class SpyGate:
    def __init__(self, world: "World", command: Command) -> None:
        self._world = world
        self._command = command
        self.abandoned = False

    async def open(self) -> None:
        async with self._world.around("gate open"):
            self._command.begin(self._world.processes.runs_ms)

    async def abandon(self) -> None:
        self.abandoned = True
        self._command.never_opened()


class SpyProcesses:
    """The Processes port. `script` holds what the next launches do instead of holding a command."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.commands: list[Command] = []
        self.gates: list[SpyGate] = []
        self.script: list[Callable[[Command, SpyGate], Any]] = []
        self.precheck_answer: Rejected | None = None
        self.runs_ms: int | None = None
        self.presence: Presence | None = None
        self.stop_answers: list[StopResult | Exception] = []
        self.stopped: list[tuple[DurableHandle, int]] = []
        self.inspected: list[DurableHandle] = []

    @property
    def command(self) -> Command:
        return self.commands[-1]

    @property
    def opened(self) -> int:
        return sum(command.opened for command in self.commands)

    def precheck(
        self, argv: list[str], working_directory: str, path: str, environment: Mapping[str, str] | None = None
    ) -> Rejected | None:
        self._world.check()
        return self.precheck_answer

    async def launch(self, plan: LaunchPlan) -> Any:
        async with self._world.around("executor launch"):
            number = len(self.commands) + 1
            handle = DurableHandle.of(f"handle-{number}", PLACE, ProcessId(5000 + number, "7"), ProcessId(6000 + number, "8"))
            command = Command(self._world.clock, plan, bytes(plan.token), plan.token, handle)
            gate = SpyGate(self._world, command)
            self.commands.append(command)
            self.gates.append(gate)
            return self.script.pop(0)(command, gate) if self.script else Held(handle, gate)

    async def inspect(self, handle: DurableHandle) -> Presence:
        self._world.check()
        self.inspected.append(handle)
        if self.presence is not None:
            return self.presence
        command = self._find(handle)
        if command is None:
            return Presence.EXITED
        command.catch_up()
        return Presence.EXITED if command.gone.is_set() else Presence.RUNNING

    async def wait_gone(self, handle: DurableHandle) -> None:
        self._world.check()
        command = self._find(handle)
        if command is None:
            return
        if command.ends_at is not None and not command.gone.is_set():
            await self._world.clock.sleep_until(command.ends_at)
            command.catch_up()
        await command.gone.wait()

    async def stop(self, handle: DurableHandle, grace_ms: int) -> StopResult:
        async with self._world.around("executor stop"):
            self.stopped.append((handle, grace_ms))
            answer = self.stop_answers.pop(0) if self.stop_answers else None
            if isinstance(answer, Exception):
                raise answer
            command = self._find(handle)
            if answer is not None:
                return answer
            if command is None or command.gone.is_set():
                return StopResult.ALREADY_EXITED
            command.end(143, signal=15)
            return StopResult.STOPPED

    def _find(self, handle: DurableHandle) -> Command | None:
        return next((command for command in self.commands if command.handle == handle), None)


class PocketCertificate:
    """The worker's certificate at its port: good until a century from now, unless a test says otherwise."""

    def __init__(self) -> None:
        self.term = Validity(0, 2**42)
        self.following = Validity(2**41, 2**42)
        self.is_replaceable = True
        self.looks = 0
        self.installed: list[tuple[str, bytes]] = []
        self.faults: list[Exception] = []

    async def validity(self) -> Validity:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        return self.term

    async def new_request(self) -> tuple[bytes, str]:
        await trio.lowlevel.checkpoint()
        if self.faults:
            raise self.faults.pop(0)
        return b"the key", "-----BEGIN CERTIFICATE REQUEST-----"

    async def install(self, certificate: str, key: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.installed.append((certificate, key))
        self.term = self.following


class World:
    """Everything outside the worker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = DrivenClock()
        self.trace: list[str] = []
        self.faults: defaultdict[str, list[Exception]] = defaultdict(list)
        self.pauses: dict[str, tuple[trio.Event, trio.Event]] = {}
        self.kill_at: int | None = None
        self.is_dead = False
        self.control = PocketControlPlane(self.clock, self.around, self.step)
        self.processes = SpyProcesses(self)
        self.living: set[int] = set()
        self.lives = 0
        self.log = RecordingLog()
        self.certificate = PocketCertificate()

    def check(self) -> None:
        if self.is_dead:
            raise Killed

    def step(self, text: str) -> None:
        """One step of the trace; the worker may end here."""
        self.check()
        self.trace.append(text)
        if self.kill_at is not None and len(self.trace) == self.kill_at:
            self.is_dead = True
            raise Killed

    @asynccontextmanager
    async def around(self, text: str) -> AsyncIterator[None]:
        self.step(text)
        if text in self.pauses:
            reached, go_on = self.pauses.pop(text)
            reached.set()
            await go_on.wait()
            self.check()
        if self.faults[text]:
            raise self.faults[text].pop(0)
        yield
        if self.faults[f"{text}: done"]:
            raise self.faults[f"{text}: done"].pop(0)
        self.step(f"{text}: done")

    def pause(self, text: str) -> tuple[trio.Event, trio.Event]:
        """The next `text` waits: (it got there, it may go on)."""
        self.pauses[text] = (trio.Event(), trio.Event())
        return self.pauses[text]

    def steps(self, *beginnings: str) -> list[str]:
        """The steps of the trace that begin so, without those that only say that one ended."""
        return [text for text in self.trace if text.startswith(beginnings) and not text.endswith(": done")]

    def position(self, text: str) -> int:
        """Where `text` is in the trace."""
        return self.trace.index(text)

    @asynccontextmanager
    async def worker(self, **terms: Any) -> AsyncIterator["Worker"]:
        """A worker that lives as long as the block. It takes up what the one before left."""
        self.is_dead = False
        self.lives += 1
        worker = Worker(self, self.lives, **terms)
        self.living.add(worker.pid)
        try:
            async with worker.lifecycle.hold() as audit:
                worker.audit = audit
                await worker.sessions.load(has_work=bool(audit.unfinished))
                async with trio.open_nursery() as nursery:
                    await worker.run_in(nursery)
                    yield worker
                    nursery.cancel_scope.cancel()
        finally:
            self.living.discard(worker.pid)
            await worker.bury()
        self.check()

    def read(self, offer_id: str | None = None) -> InboxRecord:
        """The one record on disk, or the one of `offer_id`, read past the worker."""
        records = self.records()
        if offer_id is None:
            assert len(records) == 1, records
            return records[0]
        return next(record for record in records if record.offer_id == offer_id)

    def records(self) -> list[InboxRecord]:
        paths = sorted((self.root / "journal" / "offers").glob("*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=InboxRecord) for path in paths]

    def claim(self) -> PendingClaim | None:
        path = self.root / "journal" / "pending-claim.json"
        return msgspec.json.decode(path.read_bytes(), type=PendingClaim) if path.exists() else None

    def stored_session(self) -> StoredSession | None:
        path = self.root / "journal" / "session.json"
        return msgspec.json.decode(path.read_bytes(), type=StoredSession) if path.exists() else None

    def receipt_files(self) -> list[Path]:
        return [path for path in (self.root / "receipts").rglob("*") if path.is_file()]


class TracedJournal(FileJournal):
    """The real journal; each mutation is a step."""

    world: World

    async def page(self, after: str | None = None, limit: int = 16) -> Any:
        self.world.check()
        return await super().page(after, limit)

    async def read(self, offer_id: str) -> InboxRecord | None:
        self.world.check()
        return await super().read(offer_id)

    async def create(self, record: InboxRecord) -> None:
        async with self.world.around(f"journal {record.state}"):
            await super().create(record)

    async def replace(self, record: InboxRecord) -> None:
        before = await super().read(record.offer_id)
        moved = before is None or before.state is not record.state
        async with self.world.around(f"journal {record.state if moved else 'lease'}"):
            await super().replace(record)

    async def remove(self, offer_id: str, revision: int) -> bool:
        async with self.world.around("journal remove"):
            return await super().remove(offer_id, revision)

    async def write_claim(self, claim: PendingClaim) -> None:
        async with self.world.around("claim write"):
            await super().write_claim(claim)

    async def remove_claim(self, claim: PendingClaim) -> None:
        async with self.world.around("claim remove"):
            await super().remove_claim(claim)

    async def write_session(self, session: StoredSession) -> None:
        async with self.world.around("session write"):
            await super().write_session(session)

    async def remove_session(self) -> None:
        async with self.world.around("session remove"):
            await super().remove_session()

    async def write_sweep(self, position: SweepPosition) -> None:
        async with self.world.around("sweep write"):
            await super().write_sweep(position)


class TracedReceipts(ReceiptFiles):
    """The real receipts; reading first lets the launchers do what they did meanwhile."""

    world: World

    async def read(self, attempt_id: str) -> Receipt | None:
        self.world.check()
        for command in self.world.processes.commands:
            command.catch_up()
        async with self.world.around("receipt read"):
            return await super().read(attempt_id)

    async def remove(self, attempt_id: str) -> None:
        async with self.world.around("receipt remove"):
            await super().remove(attempt_id)


class TracedOutput(OutputFiles):
    """The real output files; preparing and sealing are steps."""

    world: World

    async def prepare(self, log_artifact_id: str) -> Path:
        async with self.world.around("output prepare"):
            return await super().prepare(log_artifact_id)

    async def seal(self, log_artifact_id: str) -> Any:
        async with self.world.around("output seal"):
            return await super().seal(log_artifact_id)


class MortalOwnership:
    """The real ownership. A dead worker releases nothing."""

    def __init__(self, world: World, real: JournalOwnership) -> None:
        self._world = world
        self._real = real

    async def acquire(self) -> None:
        await self._real.acquire()

    async def release(self) -> None:
        if not self._world.is_dead:
            await self._real.release()


class Worker:
    """One process's life: the parts put together as the composition root does."""

    def __init__(
        self,
        world: World,
        number: int,
        *,
        max_concurrent_runs: int = 2,
        capabilities: tuple[str, ...] = (CAPABILITIES,),
        lease_duration_ms: int = 45_000,
        heartbeat_ms: int = 10_000,
        journal_capacity: int = 64,
        secrets_dialect: str = "auto",
        materialiser: Callable[[Materialiser], Materialiser] = lambda real: real,
        live_output: bool = False,
        retention_ms: int = 3_600_000,
        fraction: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self.world = world
        self.pid = 100 + number
        clock, log = world.clock, world.log
        self.files = trio.CapacityLimiter(1)
        self.drained = trio.Event()
        self.ownership = JournalOwnership(
            world.root / "journal",
            clock=clock,
            place=Place("host", clock.boot_id, 1, 2),
            me=ProcessId(self.pid, "1"),
            is_alive=lambda process: process.pid in world.living,
            window_ms=WINDOW_MS,
        )
        self.audit = Audit(())
        self.server_clock = server_clock = ServerClock(clock)
        self.journal = journal = TracedJournal(
            world.root / "journal", ownership=self.ownership, capacity=journal_capacity, file_limiter=self.files
        )
        self.outputs = outputs = TracedOutput(
            world.root / "output", maximum_bytes=64 * 1024, minimum_free_bytes=0, file_limiter=self.files
        )
        self.receipts = receipts = TracedReceipts(world.root / "receipts", self.files)
        journal.world = outputs.world = receipts.world = world
        self.control_plane = control_plane = ControlPlane(world.control, "edge-1", secrets_dialect)
        terms = SessionTerms(
            worker_id="edge-1",
            capabilities=[CapabilitiesText(text, sha256_hex(text.encode())) for text in capabilities],
            max_concurrent_runs=max_concurrent_runs,
            lease_duration_ms=lease_duration_ms,
            heartbeat_ms=heartbeat_ms,
        )
        self.sessions = sessions = SessionKeeper(control_plane, journal, clock, server_clock, log, terms)
        self.lease_control = lease_control = LeaseControl(control_plane, journal, clock, server_clock, log)
        self.acknowledger = acknowledger = Acknowledger(control_plane, journal, lease_control, server_clock, log)
        self.evidence = EvidenceReconciler(receipts, world.processes, clock, authenticate)
        self.completion = completion = Completion(control_plane, journal, receipts, outputs, lease_control, server_clock, log)
        self.launcher = Launcher(
            journal,
            world.processes,
            receipts,
            outputs,
            materialiser(RemoteMaterialiser(control_plane)),
            server_clock,
            log,
            LaunchTerms(directory="/", search_path="/usr/bin:/bin"),
        )
        self.watcher = Watcher(
            sessions=sessions,
            inbox=journal,
            processes=world.processes,
            evidence=self.evidence,
            acknowledger=acknowledger,
            completion=completion,
            lease_control=lease_control,
            clock=clock,
            server_clock=server_clock,
            log=log,
            stop_grace_ms=1000,
        )
        self.recovery = StartupRecovery(
            journal,
            receipts,
            self.evidence,
            log,
        )
        self.lifecycle = JournalLifecycle(
            MortalOwnership(world, self.ownership),
            StartupAuditor(journal, AuditBudget.for_capacity(journal_capacity)),
            self.recovery,
            prepare=self.prepare,
        )
        self.lease_loss = LeaseLossCoordinator(journal, world.processes, server_clock, log, stop_grace_ms=1000)
        self.executions = executions = Executions(
            sessions=sessions,
            inbox=journal,
            receipts=receipts,
            acknowledger=acknowledger,
            launcher=self.launcher,
            watcher=self.watcher,
            lease_control=lease_control,
            lease_loss=self.lease_loss,
            clock=clock,
            server_clock=server_clock,
            log=log,
            retry_base_ms=1000,
            fraction=fraction,
        )
        self.output = OutputKeeper(
            control_plane,
            journal,
            outputs,
            executions.active,
            log,
            hasten=executions.hasten,
            is_view_wanted=live_output,
        )
        self.delivery = OfferDelivery(control_plane, journal, clock, log, backoff_base_ms=1000, fraction=fraction)
        self.receiver = Receiver(journal, clock, server_clock)
        self.retention = Retention(journal, receipts, outputs, server_clock, log, SweepTerms(age_ms=retention_ms))
        self.sweeper = Sweeper(self.retention, journal, server_clock, log)
        self.renewal = CertificateRenewal(
            control_plane, world.certificate, sessions, clock, server_clock, log, fraction=fraction
        )
        self.cadence = Cadence(
            sessions=sessions,
            delivery=self.delivery,
            receiver=self.receiver,
            executions=executions,
            output=self.output,
            sweeper=self.sweeper,
            renewal=self.renewal,
            clock=clock,
            log=log,
            terms=CadenceTerms(cadence_ms=CADENCE_MS, drain_timeout_ms=60_000),
            fraction=fraction,
        )

    async def prepare(self) -> None:
        await self.journal.open()
        await self.outputs.open()

    async def run_in(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.ownership.refresh_forever)
        nursery.start_soon(self.output.run)
        nursery.start_soon(self.renewal.run)
        await nursery.start(self.executions.run)
        for finding in self.audit.unfinished:
            self.executions.resume(finding)
        nursery.start_soon(self._run_cadence)

    async def _run_cadence(self) -> None:
        await self.cadence.run()
        self.drained.set()

    async def bury(self) -> None:
        """A dead process's descriptors close, and with them the gates it did not open."""
        if self.world.is_dead:
            if self.ownership._descriptor >= 0:
                os.close(self.ownership._descriptor)
                self.ownership._descriptor = -1
            for command in self.world.processes.commands:
                command.never_opened()

    async def settle(self) -> None:
        """Returns once everybody waits for time or for the test. Fails when somebody never comes to rest."""
        with trio.fail_after(RESTLESS_S):
            while True:
                await wait_all_tasks_blocked()
                if not self.files.borrowed_tokens:
                    return
                async with self.files:
                    pass

    async def until(self, reached: Callable[[], object], within_ms: int = 600_000) -> None:
        """Lets time pass, from one deadline to the next, until `reached` says so."""
        clock = self.world.clock
        end = clock.boot_ms() + within_ms
        await self.settle()
        while not reached():
            due = min((deadline for deadline in clock.deadlines if deadline > clock.boot_ms()), default=end + 1)
            assert due <= end, f"not reached within {within_ms} ms; the trace ends with {self.world.trace[-12:]}"
            clock.advance(due - clock.boot_ms())
            await self.settle()

    async def pass_time(self, by_ms: int) -> None:
        """Lets that much time pass."""
        clock = self.world.clock
        end = clock.boot_ms() + by_ms
        await self.settle()
        while clock.boot_ms() < end:
            due = min((deadline for deadline in clock.deadlines if clock.boot_ms() < deadline < end), default=end)
            clock.advance(due - clock.boot_ms())
            await self.settle()

    async def until_state(self, state: str, within_ms: int = 600_000) -> None:
        """Until the one record on disk is in `state`."""
        await self.until(lambda: self.is_in(state), within_ms)

    def is_in(self, state: str) -> bool:
        records = self.world.records()
        return len(records) == 1 and records[0].state == state

    def alive(self) -> bool:
        return not self.world.is_dead


async def outlive(block: Callable[[], Awaitable[None]]) -> None:
    """Runs a worker's life that may end suddenly."""
    try:
        await block()
    except* Killed:
        pass
