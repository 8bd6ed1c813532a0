"""A control plane in one directory, with a clock that stands still, and builders that drive an attempt to any state."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import trio
from sqlalchemy import Executable, insert, select

from qlworker.control import credentials, runs
from qlworker.control.aggregate import Attempt, Run, load_attempt, load_run
from qlworker.control.artifact_directory import ArtifactDirectory
from qlworker.control.artifact_store import ArtifactKey
from qlworker.control.clock import SettableClock
from qlworker.control.config import Settings
from qlworker.control.database import Database
from qlworker.control.ingress import Ingress, create_ingress
from qlworker.control.live_output import LiveOutput
from qlworker.control.schema import metadata, projects, run_events, task_execution_revisions
from qlworker.control.schema import runs as runs_table
from qlworker.control.secret_store import SecretStore
from qlworker.control.services import activation, artifacts, attestations, completion, dispatch, lease_control, session
from qlworker.control.services.dispatch import BUDGET, ScanBudget
from qlworker.control.services.session import Caller
from qlworker.domain.canonical import lease_token_digest, log_artifact_id, sha256_hex
from qlworker.domain.capabilities import Capabilities
from qlworker.domain.revision import ExecutionRevision
from qlworker.wire.activation import ActivationRequest, ActivationResponse, RunningRequest
from qlworker.wire.attestation import AttestationRequest, AttestationResponse
from qlworker.wire.completion import Artifact, CompletionRequest, CompletionResponse, CompletionResult, UploadHeader
from qlworker.wire.lease_control import LeaseControlRequest, LeaseControlResponse
from qlworker.wire.offers import Idle, Offered, OfferRequest
from qlworker.wire.session import HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse, TransitionRequest
from tests.builders import make_revision

START_MS = 1_790_000_000_000
WORKER = "edge-1"
SESSION = "018f5c64-9b9d-7f1a-8c2d-1234567890ac"
OTHER_SESSION = "018f5c64-9b9d-7f1a-8c2d-1234567890ad"
PEPPER = b"p" * 32
CALLBACK_DIGEST = "c" * 64
HANDLE = "ql3lp1.handle"
LOG = b"line one\nline two\n"
LEASE_MS = 90_000
SESSION_MS = 600_000
CAPABILITIES = Capabilities(architecture="amd64", executors=["remote-worker"], protocol_version="1.0.0", support_tier="tier1")


def token(number: int = 1) -> str:
    """A lease token."""
    return f"lease_capability_{number:026d}"


def attestation_id(number: int) -> str:
    """An attestation's id."""
    return f"018f5c64-9b9d-7f1a-8c2d-{number:012d}"


TOKEN = token()
EDGE = Caller(WORKER, SESSION)


class Held(msgspec.Struct, frozen=True):
    """What a worker holds after a pull: everything a request needs."""

    caller: Caller
    project_id: str
    run_id: str
    attempt_id: str
    offer_id: str
    generation: int
    lease_generation: int
    lease_version: int
    token: str

    @property
    def log_id(self) -> str:
        return log_artifact_id(self.project_id, self.run_id, self.attempt_id, self.offer_id)

    def activation(self, **changes: Any) -> ActivationRequest:
        request = ActivationRequest(
            run_id=self.run_id,
            attempt_id=self.attempt_id,
            worker_generation=self.generation,
            offer_id=self.offer_id,
            lease_generation=self.lease_generation,
            lease_token=self.token,
            expected_lease_version=self.lease_version,
        )
        return msgspec.structs.replace(request, **changes)

    def running(self, **changes: Any) -> RunningRequest:
        request = RunningRequest(
            **msgspec.structs.asdict(self.activation()),
            executor_handle=HANDLE,
            log_artifact_id=self.log_id,
            callback_sequence=1,
            callback_token_digest=CALLBACK_DIGEST,
        )
        return msgspec.structs.replace(request, **changes)

    def fence(self) -> dict[str, Any]:
        return {**msgspec.structs.asdict(self.activation()), "project_id": self.project_id}

    def lease_control(self, **changes: Any) -> LeaseControlRequest:
        request = LeaseControlRequest(schema=LeaseControlRequest.SCHEMA, **self.fence())
        return msgspec.structs.replace(request, **changes)

    def attestation(self, sequence: int = 1, **changes: Any) -> AttestationRequest:
        request = AttestationRequest(
            attestation_id=attestation_id(sequence),
            run_id=self.run_id,
            attempt_id=self.attempt_id,
            sequence=sequence,
            state="running",
            worker_generation=self.generation,
            lease_token_digest=lease_token_digest(self.token),
            lease_generation=self.lease_generation,
            lease_version=self.lease_version,
            offer_id=self.offer_id,
            callback_sequence=1,
            executor_handle=HANDLE,
            journal_revision=10 * sequence,
        )
        return msgspec.structs.replace(request, **changes)

    def upload(self, content: bytes = LOG, **changes: Any) -> UploadHeader:
        request = UploadHeader(
            schema=UploadHeader.SCHEMA,
            **self.fence(),
            log_artifact_id=self.log_id,
            byte_length=len(content),
            truncated=False,
        )
        return msgspec.structs.replace(request, **changes)

    def completion(
        self, exit_code: int = 0, started_at_ms: int = START_MS + 10, finished_at_ms: int = START_MS + 20, **changes: Any
    ) -> CompletionRequest:
        request = CompletionRequest(
            schema=CompletionRequest.SCHEMA,
            **self.fence(),
            callback_sequence=1,
            callback_token_digest=CALLBACK_DIGEST,
            result=CompletionResult(
                outcome="failed" if exit_code else "succeeded",
                started_at_ms=started_at_ms,
                finished_at_ms=finished_at_ms,
                exit_code=exit_code,
            ),
            artifact=Artifact(log_artifact_id=self.log_id, byte_length=len(LOG), sha256=sha256_hex(LOG), truncated=False),
        )
        return msgspec.structs.replace(request, **changes)


class Plane:
    """One control plane. Every method is one transaction, as the listener would make it."""

    def __init__(self, directory: Path, settings: Settings | None = None, url: str | None = None) -> None:
        self.directory = directory
        self.settings = settings or Settings()
        self.clock = SettableClock(START_MS)
        self.url = url or f"sqlite:///{directory / 'control.sqlite'}"
        self.database = Database(self.url, self.clock)
        if url is None:
            self.database.create_tables()
        self.secrets = SecretStore(directory / "secrets")
        self.artifacts = ArtifactDirectory(directory / "artifacts")
        self.live = LiveOutput(directory / "live")
        self._count = 0

    def close(self) -> None:
        self.database.close()

    def app(self) -> Ingress:
        return create_ingress(
            self.database,
            authenticate=credentials.authenticate,
            pepper=PEPPER,
            secrets=self.secrets,
            artifacts=self.artifacts,
            live=self.live,
            settings=self.settings,
        )

    def credential(self, worker_id: str = WORKER) -> str:
        """A fresh token of `worker_id`."""
        return self.database.transact(credentials.issue, PEPPER, worker_id, 10**9).token

    def publish(self, revision: ExecutionRevision | None = None) -> ExecutionRevision:
        revision = revision or make_revision()
        with self.database.transaction() as tx:
            if tx.row(select(projects).where(projects.c.id == revision.project_id)) is None:
                tx.write(insert(projects).values(id=revision.project_id))
            tx.write(
                insert(task_execution_revisions).values(
                    project_id=revision.project_id,
                    task_id=revision.task_id,
                    task_revision=revision.task_revision,
                    source_revision=revision.source_revision,
                    source_content_digest=revision.source_content_digest,
                    content=revision.to_json().decode(),
                    content_digest=revision.content_digest,
                    created_at_ms=revision.created_at_ms,
                )
            )
        return revision

    def start_run(self, revision: ExecutionRevision, priority: int = 0) -> str:
        """Queues a run and returns its id."""
        return self.database.transact(runs.start, revision.project_id, revision.task_id, priority=priority).run_id

    def cancel(self, run_id: str) -> None:
        with self.database.transaction() as tx:
            runs.cancel(tx, run_id)

    def register(self, caller: Caller = EDGE, slots: int = 1, **changes: Any) -> RegisterResponse:
        capabilities = changes.pop("capabilities", CAPABILITIES)
        request = RegisterRequest(
            schema="qinglong/worker-session-register@v1",
            capabilities_json=capabilities.text(),
            capabilities_hash=capabilities.digest(),
            max_concurrent_runs=slots,
            available_slots=slots,
            lease_duration_ms=SESSION_MS,
        )
        return self.database.transact(session.register, caller, msgspec.structs.replace(request, **changes), self.settings)

    def heartbeat(self, version: int, caller: Caller = EDGE, **changes: Any) -> HeartbeatResponse:
        request = HeartbeatRequest(
            schema="qinglong/worker-session-heartbeat@v1",
            generation=1,
            expected_version=version,
            available_slots=1,
            lease_duration_ms=SESSION_MS,
        )
        return self.database.transact(session.heartbeat, caller, msgspec.structs.replace(request, **changes), self.settings)

    def transition(self, version: int, status: Any, caller: Caller = EDGE, generation: int = 1) -> Any:
        request = TransitionRequest(
            schema="qinglong/worker-session-transition@v1", generation=generation, expected_version=version, status=status
        )
        return self.database.transact(session.transition, caller, request, self.settings)

    def pull(
        self,
        offer_id: str = "offer-1",
        lease_token: str = TOKEN,
        caller: Caller = EDGE,
        generation: int = 1,
        budget: ScanBudget = BUDGET,
    ) -> Idle | Offered:
        request = OfferRequest(worker_generation=generation, offer_id=offer_id, lease_token=lease_token)
        return self.database.transact(dispatch.pull, caller, request, self.settings, budget)

    def claim(self, revision: ExecutionRevision | None = None, caller: Caller = EDGE) -> Held:
        """Publishes, queues, registers and pulls: an attempt in `claimed` under a live lease."""
        revision = self.publish(revision)
        self.start_run(revision)
        registered = self.register(caller)
        return self.hold(self.pull(caller=caller, generation=registered.generation), token())

    def hold(self, answer: Idle | Offered, lease_token: str) -> Held:
        assert isinstance(answer, Offered), answer
        offer = answer.offer
        return Held(
            caller=Caller(offer.worker.worker_id, offer.worker.session_id),
            project_id=offer.candidate.project_id,
            run_id=offer.candidate.run_id,
            attempt_id=offer.candidate.attempt_id,
            offer_id=offer.offer_id,
            generation=offer.worker.generation,
            lease_generation=offer.lease.lease_generation,
            lease_version=offer.lease.version,
            token=lease_token,
        )

    def starting(self, held: Held, **changes: Any) -> ActivationResponse:
        return self.database.transact(activation.starting, held.caller, held.activation(**changes), self.settings)

    def running(self, held: Held, **changes: Any) -> ActivationResponse:
        return self.database.transact(activation.running, held.caller, held.running(**changes), self.settings)

    def start_failure(self, held: Held, **changes: Any) -> ActivationResponse:
        return self.database.transact(activation.start_failure, held.caller, held.activation(**changes), self.settings)

    def control(self, held: Held, **changes: Any) -> LeaseControlResponse:
        return self.database.transact(lease_control.control, held.caller, held.lease_control(**changes), self.settings)

    def attest(self, held: Held, sequence: int = 1, **changes: Any) -> AttestationResponse:
        return self.database.transact(attestations.attest, held.caller, held.attestation(sequence, **changes), self.settings)

    def store(self, held: Held, content: bytes = LOG) -> None:
        """Uploads the log."""
        header = held.upload(content)
        with self.database.transaction() as tx:
            artifacts.authorise(tx, held.caller, header, self.settings)
        upload = self.artifacts.begin(artifacts.artifact_key(header))
        upload.write(content)
        sha256 = upload.publish()
        with self.database.transaction() as tx:
            artifacts.record(tx, header, sha256)

    def complete(self, held: Held, request: CompletionRequest | None = None) -> CompletionResponse:
        request = request or held.completion()
        log = request.artifact
        key = ArtifactKey(request.project_id, request.run_id, request.attempt_id, log.log_artifact_id)
        is_held = self.artifacts.holds(key, log.sha256, log.byte_length)
        return self.database.transact(completion.complete, held.caller, request, self.settings, is_held)

    def drive(self, state: str, revision: ExecutionRevision | None = None) -> Held:
        """An attempt in `state`: claimed, starting, running, start_failed, succeeded or failed; the log is stored for the
        last two."""
        held = self.claim(revision)
        if state == "claimed":
            return held
        self.starting(held)
        if state == "start_failed":
            self.start_failure(held)
            return held
        if state == "starting":
            return held
        self.running(held)
        if state == "running":
            return held
        self.store(held)
        self.complete(held, held.completion(0 if state == "succeeded" else 3))
        return held

    def facts(self, held: Held) -> tuple[Run, Attempt]:
        """Run and attempt as they are stored."""
        with self.database.transaction() as tx:
            run, attempt = load_run(tx, held.run_id), load_attempt(tx, held.attempt_id)
        assert run is not None
        assert attempt is not None
        return run, attempt

    def events(self, run_id: str) -> list[str]:
        """The types of a run's Events in order."""
        with self.database.transaction() as tx:
            rows = tx.rows(select(run_events).where(run_events.c.run_id == run_id).order_by(run_events.c.sequence))
        return [row.type for row in rows]

    def actors(self, run_id: str) -> list[str]:
        """Who wrote a run's Events, in order."""
        with self.database.transaction() as tx:
            rows = tx.rows(select(run_events).where(run_events.c.run_id == run_id).order_by(run_events.c.sequence))
        return [row.actor_type for row in rows]

    def snapshot(self, *, without: tuple[str, ...] = ()) -> dict[str, list[Any]]:
        """Every row of every table, to prove that nothing changed."""
        with self.database.transaction() as tx:
            return {
                table.name: [tuple(row) for row in tx.rows(select(table).order_by(*table.primary_key))]
                for table in metadata.sorted_tables
                if table.name not in without
            }

    @contextlib.contextmanager
    def failing_at(self, write: int) -> Iterator[list[int]]:
        """Makes the `write`-th writing statement fail; the list counts those that were tried."""
        seen = [0]

        def fail(_statement: Executable) -> None:
            seen[0] += 1
            if seen[0] == write:
                raise OSError("the disk is gone")

        self.database.on_write = fail
        try:
            yield seen
        finally:
            self.database.on_write = None

    def check_invariants(self) -> None:
        """Event sequences without gaps, one version per Event, no dedupe key twice (V104, V105)."""
        with self.database.transaction() as tx:
            for run in tx.rows(select(runs_table)):
                rows = tx.rows(select(run_events).where(run_events.c.run_id == run.id).order_by(run_events.c.sequence))
                assert [row.sequence for row in rows] == list(range(1, len(rows) + 1))
                assert run.version == run.event_sequence == len(rows)
                keys = [row.dedupe_key for row in rows if row.dedupe_key is not None]
                assert len(keys) == len(set(keys))


class Answer(msgspec.Struct, frozen=True):
    """What the listener answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        code: str = self.json["code"]
        return code


async def call(
    app: Callable[..., Any],
    path: str,
    body: bytes | list[bytes] = b"",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    query: bytes = b"",
    peer: str = "192.0.2.1",
    hang: trio.Event | None = None,
) -> Answer:
    """One request to an ASGI application. A list is a body in pieces; With `hang` the rest never
    comes, and the event is set once it is waited for."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    given = {"content-length": str(sum(map(len, chunks))), **{key.lower(): value for key, value in (headers or {}).items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(key.encode(), value.encode()) for key, value in given.items() if value],
        "client": (peer, 1),
        "http_version": "1.1",
    }
    pending = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if hang is None:
        pending.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not pending:
            if hang is not None:
                hang.set()
            await trio.sleep_forever()
        return pending.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    found = {key.decode().lower(): value.decode() for key, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
