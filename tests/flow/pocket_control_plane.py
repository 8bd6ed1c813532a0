"""A control plane in memory, at the Link port: session row, offers, activation, secrets, lease-control, logs and completion.

It answers as wire-protocol.md §2 to §8 says and nothing more; faults are put in front of or behind single operations.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from qlworker.domain.canonical import lease_token_digest
from qlworker.domain.errors import Transient
from qlworker.domain.offer import Candidate, LeaseTerms, WorkerFence
from qlworker.domain.revision import ExecutionRevision
from qlworker.ports import Clock, SealedOutput
from qlworker.wire.activation import ACTIVATION_SCHEMA, ActivationRequest, ActivationResponse, RunningRequest, Snapshot
from qlworker.wire.certificate import CERTIFICATE_SCHEMA, CertificateRequest, CertificateResponse
from qlworker.wire.completion import (
    COMPLETION_SCHEMA,
    OUTPUT_SCHEMA,
    UPLOAD_SCHEMA,
    CompletionRequest,
    CompletionResponse,
    OutputRequest,
    OutputResponse,
    UploadHeader,
    UploadResponse,
)
from qlworker.wire.ingress import refusal
from qlworker.wire.lease_control import LEASE_CONTROL_SCHEMA, LeaseControlRequest, LeaseControlResponse, Stop
from qlworker.wire.offers import OFFER_SCHEMA, Idle, Offered, OfferRequest, ScanStats, WireOffer
from qlworker.wire.secrets import (
    SECRETS_V1,
    SECRETS_V2,
    SecretRequestV1,
    SecretRequestV2,
    SecretResponseV1,
    SecretResponseV2,
    SecretValue,
)
from qlworker.wire.session import (
    HEARTBEAT_SCHEMA,
    REGISTER_SCHEMA,
    TRANSITION_SCHEMA,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    TransitionRequest,
    TransitionResponse,
)

EPOCH_MS = 1_790_000_000_000
LEASE_MS = 30_000
NO_STATS = ScanStats(pages=1, candidates=0, plans_unavailable=0, placement_mismatches=0, claim_attempts=0, claim_races=0)


class Reject(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str = "fenced") -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass
class Session:
    """The one row of a worker."""

    session_id: str
    generation: int
    version: int
    capabilities_json: str
    max_runs: int
    slots: int
    expires_at_ms: int
    status: str = "online"


@dataclass
class Lease:
    """The run lease of an attempt."""

    offer_id: str
    token_digest: str
    session_id: str
    worker_generation: int
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    version: int = 0
    generation: int = 1
    status: str = "leased"


@dataclass
class Attempt:
    """One attempt of one run. `cancel` is the reason of a stored cancel request."""

    run_id: str
    attempt_id: str
    revision: ExecutionRevision
    created_at_ms: int
    status: str = "queued"
    lease: Lease | None = None
    callback_sequence: int = 0
    deadline_at_ms: int | None = None
    cancel: str | None = None
    handle: str | None = None
    log_id: str | None = None
    token_digest: str | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    exit_code: int | None = None
    error_code: str | None = None
    completed_by: tuple[Any, ...] | None = None
    completion_bodies: list[bytes] = field(default_factory=list)

    @property
    def is_terminal(self) -> bool:
        return self.finished_at_ms is not None


@dataclass
class Call:
    """One request as it arrived."""

    operation: str
    session_id: str
    body: dict[str, Any]
    boot_ms: int


class Hold:
    """A request that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.go_on = trio.Event()


Perform = Callable[[], Awaitable[bytes]]
Fault = Callable[[Perform], Awaitable[bytes]]
Around = Callable[[str], AbstractAsyncContextManager[None]]


class PocketControlPlane:
    """`around` surrounds each exchange with the world's trace. Server time runs with the boot clock from EPOCH_MS on."""

    def __init__(self, clock: Clock, around: Around, step: Callable[[str], None]) -> None:
        self._clock = clock
        self._around = around
        self._step = step
        self._faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self._standing: dict[str, Fault] = {}
        self.offset_ms = 0
        self.sessions: dict[str, Session] = {}
        self.attempts: dict[str, Attempt] = {}
        self.secrets: dict[str, str] = {}
        self.bundles: dict[str, str] = {}
        self.artifacts: dict[str, bytes] = {}
        self.output: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.refused_capabilities: set[str] = set()
        self.certificate_requests: list[str] = []
        self.knows_secrets_v2 = True
        self.knows_output = True

    # -- what tests set up and look at

    def now_ms(self) -> int:
        return EPOCH_MS + self._clock.boot_ms() + self.offset_ms

    @property
    def session(self) -> Session:
        return self.sessions["edge-1"]

    def enqueue(self, revision: ExecutionRevision, run_id: str = "run-1", attempt_id: str = "attempt-1") -> Attempt:
        attempt = self.attempts[attempt_id] = Attempt(run_id, attempt_id, revision, self.now_ms())
        return attempt

    def called(self, *operations: str) -> list[Call]:
        return [call for call in self.calls if call.operation in operations]

    def lease_of(self, attempt_id: str = "attempt-1") -> Lease:
        lease = self.attempts[attempt_id].lease
        assert lease is not None
        return lease

    def fail(self, operation: str, error: Exception | None = None, times: int = 1) -> None:
        """The request never arrives."""

        async def fault(_: Perform) -> bytes:
            raise error or Transient("no route")

        self._faults[operation] += [fault] * times

    def lose(self, operation: str, times: int = 1) -> None:
        """The request is carried out, and its answer never comes."""

        async def fault(perform: Perform) -> bytes:
            await perform()
            raise Transient("the answer was lost")

        self._faults[operation] += [fault] * times

    def reply(
        self, operation: str, status: int, code: str = "scripted", times: int = 1, retry_after: int | None = None
    ) -> None:
        """Another answer than the true one."""
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}

        async def fault(_: Perform) -> bytes:
            raise refusal(status, headers, json.dumps({"code": code}).encode())

        self._faults[operation] += [fault] * times

    def always(self, operation: str, status: int | None, code: str = "scripted") -> None:
        """`status` to every request from now on; None ends it."""
        if status is None:
            self._standing.pop(operation, None)
            return

        async def fault(_: Perform) -> bytes:
            raise refusal(status, {}, json.dumps({"code": code}).encode())

        self._standing[operation] = fault

    def go_away(self, *operations: str) -> None:
        """Nothing of `operations` (everything if none is named) arrives from now on."""

        async def fault(_: Perform) -> bytes:
            raise Transient("no route")

        for operation in operations or ("*",):
            self._standing[operation] = fault

    def come_back(self) -> None:
        self._standing.clear()

    def change(self, operation: str, change: Callable[[dict[str, Any]], None], times: int = 1) -> None:
        """The true answer with something changed."""

        async def fault(perform: Perform) -> bytes:
            answer = json.loads(await perform())
            change(answer)
            return json.dumps(answer).encode()

        self._faults[operation] += [fault] * times

    def hold(self, operation: str, *, performed: bool = False) -> Hold:
        """The request waits; before it is carried out, or after."""
        hold = Hold()

        async def fault(perform: Perform) -> bytes:
            answer = await perform() if performed else None
            hold.reached.set()
            await hold.go_on.wait()
            return answer if answer is not None else await perform()

        self._faults[operation].append(fault)
        return hold

    # -- the Link port

    async def call(self, session_id: str, operation: str, body: bytes, *, request_limit: int, response_limit: int) -> bytes:
        assert len(body) <= request_limit
        handler = {
            "register": self._register,
            "heartbeat": self._heartbeat,
            "transition": self._transition,
            "offers": self._offers,
            "starting": self._starting,
            "running": self._running,
            "start-failure": self._start_failure,
            "secrets": self._secrets,
            "lease-control": self._lease_control,
            "completion": self._completion,
            "output": self._output,
            "certificate": self._certificate,
        }[operation]

        answer = await self._exchange(session_id, operation, json.loads(body), lambda: handler(session_id, body))
        assert len(answer) <= response_limit
        return answer

    async def upload(self, session_id: str, preamble: bytes, output: SealedOutput, *, response_limit: int) -> bytes:
        data = output.path.read_bytes()[: output.byte_length]
        assert len(data) == output.byte_length
        answer = await self._exchange(
            session_id, "artifacts", json.loads(preamble), lambda: self._artifacts(session_id, preamble, data)
        )
        assert len(answer) <= response_limit
        return answer

    async def _exchange(self, session_id: str, operation: str, body: dict[str, Any], handler: Callable[[], bytes]) -> bytes:
        async def perform() -> bytes:
            try:
                answer = handler()
            except Reject as reject:
                raise refusal(reject.status, {}, json.dumps({"code": reject.code}).encode()) from None
            except (msgspec.MsgspecError, ValueError):
                raise refusal(400, {}, b'{"code":"invalid_worker_request"}') from None
            self._step(f"performed {operation}")
            return answer

        async with self._around(f"request {operation}"):
            self.calls.append(Call(operation, session_id, body, self._clock.boot_ms()))
            await trio.lowlevel.checkpoint()
            if self._faults[operation]:
                return await self._faults[operation].pop(0)(perform)
            standing = self._standing.get(operation) or self._standing.get("*")
            return await (standing(perform) if standing else perform())

    def _certificate(self, _session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=CertificateRequest)
        number = len(self.certificate_requests)
        self.certificate_requests.append(request.certificate_request)
        return CertificateResponse(
            schema=CERTIFICATE_SCHEMA,
            serial=f"{number:x}",
            certificate=f"-----BEGIN CERTIFICATE----- {number}",
            not_after_ms=2**42,
        ).to_json()

    # -- §2 the session

    def _register(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=RegisterRequest)
        if request.capabilities_json in self.refused_capabilities:
            raise Reject(400, "invalid_worker_request")
        stored = self.sessions.get("edge-1")
        if stored is not None and stored.session_id == session_id:
            same = (stored.capabilities_json, stored.max_runs, stored.slots) == (
                request.capabilities_json,
                request.max_concurrent_runs,
                request.available_slots,
            )
            if not same or not self._is_live(stored):
                raise Reject(409, "worker_session_fenced")
            return self._session(RegisterResponse, REGISTER_SCHEMA, stored, replaced_session=False)
        self.sessions["edge-1"] = new = Session(
            session_id,
            1 if stored is None else stored.generation + 1,
            0 if stored is None else stored.version + 1,
            request.capabilities_json,
            request.max_concurrent_runs,
            request.available_slots,
            self.now_ms() + request.lease_duration_ms,
        )
        return self._session(RegisterResponse, REGISTER_SCHEMA, new, replaced_session=stored is not None)

    def _heartbeat(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=HeartbeatRequest)
        session = self._fenced(session_id, request.generation, request.expected_version)
        if request.available_slots > session.max_runs:
            raise Reject(400, "invalid_worker_request")
        session.version += 1
        session.expires_at_ms = self.now_ms() + request.lease_duration_ms
        session.slots = 0 if session.status == "draining" else request.available_slots
        return self._session(HeartbeatResponse, HEARTBEAT_SCHEMA, session)

    def _transition(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=TransitionRequest)
        session = self._fenced(session_id, request.generation, request.expected_version)
        session.version += 1
        session.slots = 0
        session.status = request.status
        if request.status == "offline":
            session.expires_at_ms = self.now_ms()
        return self._session(TransitionResponse, TRANSITION_SCHEMA, session)

    def _session(self, kind: Any, schema: str, session: Session, replaced_session: bool | None = None) -> bytes:
        members = {
            "schema": schema,
            "workerId": "edge-1",
            "sessionId": session.session_id,
            "generation": session.generation,
            "version": session.version,
            "status": session.status,
            "leaseExpiresAtMs": session.expires_at_ms,
            **({"replacedSession": replaced_session} if replaced_session is not None else {}),
        }
        return bytes(msgspec.convert(members, kind).to_json())

    def _is_live(self, session: Session) -> bool:
        return session.status != "offline" and session.expires_at_ms > self.now_ms()

    def _fenced(self, session_id: str, generation: int, version: int) -> Session:
        session = self._current(session_id, generation)
        if session.version != version:
            raise Reject(409, "worker_session_fenced")
        return session

    def _current(self, session_id: str, generation: int, code: str = "worker_session_fenced") -> Session:
        session = self.sessions.get("edge-1")
        same = session is not None and (session.session_id, session.generation) == (session_id, generation)
        if session is None or not same or not self._is_live(session):
            raise Reject(409, code)
        return session

    # -- §3 offers

    def _offers(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=OfferRequest)
        known = [a for a in self.attempts.values() if a.lease is not None and a.lease.offer_id == request.offer_id]
        if known:
            lease = known[0].lease
            assert lease is not None
            self._current(session_id, request.worker_generation, "worker_offer_fenced")
            self._live_lease(known[0], request.offer_id, request.lease_token, session_id, request.worker_generation)
            return self._offer(known[0], lease, "lease_recovery")
        session = self.sessions.get("edge-1")
        live = sum(
            1
            for a in self.attempts.values()
            if a.lease and a.lease.status == "leased" and a.lease.expires_at_ms > self.now_ms()
        )
        usable = (
            session is not None
            and (session.session_id, session.generation) == (session_id, request.worker_generation)
            and session.status == "online"
            and self._is_live(session)
            and live < min(session.max_runs, session.slots)
        )
        if not usable:
            return Idle(schema=OFFER_SCHEMA, reason="worker_unavailable", stats=NO_STATS, truncated=False).to_json()
        queued = [a for a in self.attempts.values() if a.status == "queued"]
        if not queued:
            return Idle(schema=OFFER_SCHEMA, reason="no_candidates", stats=NO_STATS, truncated=False).to_json()
        now = self.now_ms()
        attempt = queued[0]
        attempt.status = "claimed"
        attempt.lease = Lease(
            request.offer_id,
            lease_token_digest(request.lease_token),
            session_id,
            request.worker_generation,
            now,
            now,
            now + LEASE_MS,
        )
        return self._offer(attempt, attempt.lease, "new_claim")

    def _offer(self, attempt: Attempt, lease: Lease, kind: str) -> bytes:
        revision = attempt.revision
        offer = WireOffer(
            offer_id=lease.offer_id,
            delivery_kind=kind,
            execution_digest=revision.content_digest,
            candidate=Candidate(
                run_id=attempt.run_id,
                attempt_id=attempt.attempt_id,
                project_id=revision.project_id,
                task_id=revision.task_id,
                task_revision=revision.task_revision,
                priority=0,
                queued_at_ms=attempt.created_at_ms,
                attempt_created_at_ms=attempt.created_at_ms,
                attempt_number=1,
                executor_type="remote_worker",
            ),
            worker=WorkerFence(worker_id="edge-1", session_id=lease.session_id, generation=lease.worker_generation),
            lease=LeaseTerms(
                version=lease.version,
                lease_generation=lease.generation,
                acquired_at_ms=lease.acquired_at_ms,
                renewed_at_ms=lease.renewed_at_ms,
                expires_at_ms=lease.expires_at_ms,
                updated_at_ms=lease.renewed_at_ms,
            ),
            execution_revision=revision,
            placement_score=0,
        )
        return Offered(schema=OFFER_SCHEMA, offer=offer, stats=NO_STATS, truncated=False).to_json()

    def _live_lease(
        self, attempt: Attempt, offer_id: str, token: str, session_id: str, generation: int, code: str = "worker_offer_fenced"
    ) -> Lease:
        lease = attempt.lease
        same = lease is not None and (lease.offer_id, lease.token_digest, lease.session_id, lease.worker_generation) == (
            offer_id,
            lease_token_digest(token),
            session_id,
            generation,
        )
        if lease is None or not same or lease.status != "leased" or lease.expires_at_ms <= self.now_ms():
            raise Reject(409, code)
        return lease

    def _fence(self, session_id: str, request: Any, code: str) -> tuple[Attempt, Lease]:
        self._current(session_id, request.worker_generation, code)
        attempt = self.attempts.get(request.attempt_id)
        if attempt is None or attempt.run_id != request.run_id:
            raise Reject(409, code)
        lease = self._live_lease(attempt, request.offer_id, request.lease_token, session_id, request.worker_generation, code)
        if (lease.version, lease.generation) != (request.expected_lease_version, request.lease_generation):
            raise Reject(409, code)
        return attempt, lease

    # -- §5 activation

    def _starting(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=ActivationRequest)
        attempt, _ = self._fence(session_id, request, "worker_activation_fenced")
        if attempt.status == "claimed":
            attempt.status = "starting"
            if isinstance(attempt.revision.timeout_ms, int):
                attempt.deadline_at_ms = self.now_ms() + attempt.revision.timeout_ms
            return self._activation(attempt, "applied")
        if attempt.status in ("starting", "running"):
            return self._activation(attempt, f"already_{attempt.status}")
        raise Reject(409, "worker_activation_fenced")

    def _running(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=RunningRequest)
        attempt, _ = self._fence(session_id, request, "worker_activation_fenced")
        facts = (request.executor_handle, request.log_artifact_id, request.callback_sequence, request.callback_token_digest)
        if attempt.status == "starting" and request.callback_sequence == attempt.callback_sequence + 1:
            attempt.status = "running"
            attempt.handle, attempt.log_id, attempt.callback_sequence, attempt.token_digest = facts
            attempt.started_at_ms = self.now_ms()
            return self._activation(attempt, "applied")
        if attempt.status == "running" and facts == (
            attempt.handle,
            attempt.log_id,
            attempt.callback_sequence,
            attempt.token_digest,
        ):
            return self._activation(attempt, "already_running")
        raise Reject(409, "worker_activation_fenced")

    def _start_failure(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=ActivationRequest)
        attempt = self.attempts.get(request.attempt_id)
        lease = None if attempt is None else attempt.lease
        if attempt is not None and lease is not None and lease.status == "completed":
            if attempt.exit_code is None and lease.version == request.expected_lease_version + 1:
                return self._activation(attempt, "already_terminal")
            raise Reject(409, "worker_activation_fenced")
        attempt, lease = self._fence(session_id, request, "worker_activation_fenced")
        if attempt.status != "starting":
            raise Reject(409, "worker_activation_fenced")
        outcome = {None: ("failed", "EXECUTOR_START_FAILED"), "timeout": ("timed_out", "EXECUTION_TIMED_OUT")}
        attempt.status, attempt.error_code = outcome.get(attempt.cancel, ("cancelled", "EXECUTION_CANCELLED"))
        attempt.finished_at_ms = self.now_ms()
        attempt.callback_sequence += 1
        lease.status = "completed"
        lease.version += 1
        return self._activation(attempt, "applied")

    def _activation(self, attempt: Attempt, status: str) -> bytes:
        lease = attempt.lease
        assert lease is not None
        run_status = {"starting": "dispatching"}.get(attempt.status, attempt.status)
        members: dict[str, Any] = {
            "runId": attempt.run_id,
            "attemptId": attempt.attempt_id,
            "runStatus": run_status,
            "attemptStatus": attempt.status,
            "leaseVersion": lease.version,
            "leaseGeneration": lease.generation,
            "callbackSequence": attempt.callback_sequence,
            "deadlineAtMs": attempt.deadline_at_ms,
        }
        if attempt.status == "running":
            members |= {
                "startedAtMs": attempt.started_at_ms,
                "executorHandle": attempt.handle,
                "logArtifactId": attempt.log_id,
            }
        if attempt.is_terminal:
            members |= {"finishedAtMs": attempt.finished_at_ms, "errorCode": attempt.error_code or "EXIT"}
        snapshot = msgspec.convert({name: value for name, value in members.items() if value is not None}, Snapshot)
        return ActivationResponse(schema=ACTIVATION_SCHEMA, status=status, snapshot=snapshot).to_json()  # type: ignore[arg-type]

    # -- §6 secrets

    def _secrets(self, session_id: str, body: bytes) -> bytes:
        is_v2 = json.loads(body)["schema"] == SECRETS_V2
        if is_v2 and not self.knows_secrets_v2:
            raise Reject(400, "invalid_worker_request")
        request: Any = msgspec.json.decode(body, type=SecretRequestV2 if is_v2 else SecretRequestV1)
        attempt, _ = self._fence(session_id, request, "worker_secret_delivery_fenced")
        if attempt.status != "starting" or attempt.cancel is not None:
            raise Reject(409, "worker_secret_delivery_fenced")
        facts = {
            "run_id": request.run_id,
            "attempt_id": request.attempt_id,
            "offer_id": request.offer_id,
            "execution_digest": request.execution_digest,
            "values": [SecretValue(secret_ref=ref, value=self.secrets[ref]) for ref in request.secret_refs],
        }
        if not is_v2:
            return SecretResponseV1(schema=SECRETS_V1, **facts).to_json()
        bundles = [SecretValue(secret_ref=ref, value=self.bundles[ref]) for ref in request.environment_bundle_refs]
        return SecretResponseV2(schema=SECRETS_V2, environment_bundles=bundles, **facts).to_json()

    # -- §7 lease control

    def _lease_control(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=LeaseControlRequest)
        self._current(session_id, request.worker_generation, "worker_lease_control_fenced")
        attempt = self.attempts.get(request.attempt_id)
        lease = None if attempt is None else attempt.lease
        if attempt is not None and lease is not None and attempt.is_terminal and lease.status == "completed":
            return self._lease_answer(request, "terminal", terminal_status=attempt.status)
        attempt, lease = self._fence(session_id, request, "worker_lease_control_fenced")
        if attempt.deadline_at_ms is not None and self.now_ms() >= attempt.deadline_at_ms and attempt.cancel is None:
            attempt.cancel = "timeout"
        lease.version += 1
        lease.renewed_at_ms = self.now_ms()
        lease.expires_at_ms = self.now_ms() + LEASE_MS
        stop = None if attempt.cancel is None else Stop(reason=attempt.cancel, requested_at_ms=self.now_ms())  # type: ignore[arg-type]
        return self._lease_answer(request, "renewed" if stop is None else "stop_requested", lease=lease, stop=stop)

    def _lease_answer(
        self,
        request: LeaseControlRequest,
        status: str,
        *,
        lease: Lease | None = None,
        stop: Stop | None = None,
        terminal_status: str | None = None,
    ) -> bytes:
        return LeaseControlResponse(
            schema=LEASE_CONTROL_SCHEMA,
            status=status,  # type: ignore[arg-type]
            project_id=request.project_id,
            run_id=request.run_id,
            attempt_id=request.attempt_id,
            offer_id=request.offer_id,
            lease_generation=request.lease_generation,
            lease_version=None if lease is None else lease.version,
            renewed_at_ms=None if lease is None else lease.renewed_at_ms,
            expires_at_ms=None if lease is None else lease.expires_at_ms,
            stop=stop,
            terminal_status=terminal_status,  # type: ignore[arg-type]
        ).to_json()

    # -- §8 artifacts and completion

    def _artifacts(self, session_id: str, preamble: bytes, data: bytes) -> bytes:
        header = msgspec.json.decode(preamble, type=UploadHeader)
        attempt, _ = self._fence(session_id, header, "worker_completion_fenced")
        if attempt.status not in ("starting", "running") or attempt.log_id not in (None, header.log_artifact_id):
            raise Reject(409, "worker_completion_fenced")
        known = self.artifacts.setdefault(header.log_artifact_id, data)
        if known != data:
            raise Reject(503, "worker_artifact_unavailable")
        return UploadResponse(
            schema=UPLOAD_SCHEMA,
            status="stored",
            project_id=header.project_id,
            run_id=header.run_id,
            attempt_id=header.attempt_id,
            log_artifact_id=header.log_artifact_id,
            byte_length=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            truncated=header.truncated,
        ).to_json()

    def _completion(self, session_id: str, body: bytes) -> bytes:
        request = msgspec.json.decode(body, type=CompletionRequest)
        attempt = self.attempts.get(request.attempt_id)
        if attempt is None:
            raise Reject(409, "worker_completion_fenced")
        attempt.completion_bodies.append(body)
        lease = attempt.lease
        facts = (
            request.callback_sequence,
            request.callback_token_digest,
            request.artifact.log_artifact_id,
            request.result,
            request.offer_id,
            request.lease_generation,
            request.lease_token,
        )
        if lease is not None and attempt.is_terminal:
            is_repeat = attempt.completed_by == facts and lease.version == request.expected_lease_version + 1
            return self._completed(request, "already_completed" if is_repeat else "already_terminal")
        attempt, lease = self._fence(session_id, request, "worker_completion_fenced")
        sequence = attempt.callback_sequence + (1 if attempt.status == "starting" else 0)
        stored = self.artifacts.get(request.artifact.log_artifact_id)
        sound = (
            attempt.status in ("starting", "running")
            and request.callback_sequence == sequence
            and attempt.token_digest in (None, request.callback_token_digest)
            and stored is not None
            and hashlib.sha256(stored).hexdigest() == request.artifact.sha256
            and attempt.created_at_ms <= request.result.started_at_ms <= self.now_ms() + 300_000
            and request.result.finished_at_ms <= self.now_ms() + 300_000
        )
        if not sound:
            raise Reject(409, "worker_completion_fenced")
        by_cancel = {None: request.result.outcome, "timeout": "timed_out"}
        attempt.status = by_cancel.get(attempt.cancel, "cancelled")
        attempt.exit_code = request.result.exit_code
        attempt.finished_at_ms = self.now_ms()
        attempt.completed_by = facts
        lease.status = "completed"
        lease.version += 1
        return self._completed(request, "applied")

    def _completed(self, request: CompletionRequest, status: str) -> bytes:
        return CompletionResponse(
            schema=COMPLETION_SCHEMA,
            status=status,  # type: ignore[arg-type]
            run_id=request.run_id,
            attempt_id=request.attempt_id,
            callback_sequence=request.callback_sequence,
        ).to_json()

    def _output(self, session_id: str, body: bytes) -> bytes:
        if not self.knows_output:
            raise Reject(404, "worker_route_not_found")
        request = msgspec.json.decode(body, type=OutputRequest)
        attempt, _ = self._fence(session_id, request, "worker_completion_fenced")
        known = self.output.get(request.log_artifact_id, b"")
        self.output[request.log_artifact_id] = known[: request.offset].ljust(request.offset, b"?") + request.data
        return OutputResponse(
            schema=OUTPUT_SCHEMA,
            next_offset=request.offset + len(request.data),
            stop_requested=attempt.cancel is not None,
        ).to_json()
