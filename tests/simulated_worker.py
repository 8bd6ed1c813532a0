"""A worker that speaks the whole protocol and runs nothing: many fit into one process, for load and for replicas that die.

Every request is sent again, unchanged, until it is answered, to the next address when one does not answer: as the real worker
does it, with the real documents. A run is "carried out" by noting its attempt, once per start.
"""

import random
import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from qlworker.control.request_body import JSON_TYPE, UPLOAD_TYPE
from qlworker.domain.canonical import log_artifact_id, sha256_hex
from qlworker.domain.capabilities import Capabilities
from qlworker.domain.document import Document
from qlworker.domain.offer import Offer, WorkerFence
from qlworker.domain.text import new_session_id
from qlworker.wire.activation import ActivationRequest, ActivationResponse, RunningRequest
from qlworker.wire.codec import decode
from qlworker.wire.completion import Artifact, CompletionRequest, CompletionResult, UploadHeader
from qlworker.wire.offers import Idle, OfferRequest, read_answer
from qlworker.wire.session import HeartbeatRequest, RegisterRequest

LEASE_MS: Final = 120_000
ANSWER_S: Final = 30
RETRY_S: Final = 0.05
LOG: Final = b"one line of output\n"
CALLBACK: Final = "c" * 64
CAPABILITIES: Final = Capabilities(
    architecture="amd64", executors=["remote-worker"], protocol_version="1.0.0", support_tier="tier1"
)

Address = tuple[str, int]
Measure = Callable[[str, float, int, int], None]
"""Operation, seconds, bytes sent, bytes received."""


class Refusal(Exception):
    """An answer that sending again does not change."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body[:200]!r}")
        self.status = status


class Line:
    """One connection at a time to one of several addresses."""

    def __init__(self, addresses: Sequence[Address], context: ssl.SSLContext) -> None:
        self._addresses = list(addresses)
        self._context = context
        self._stream: trio.SSLStream[trio.SocketStream] | None = None

    async def post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes, int, int]:
        """Status, body, bytes sent, bytes received. Raises OSError or trio.BrokenResourceError when there is no answer."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        request = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body
        is_kept = self._stream is not None
        try:
            return await self._exchange(request)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            await self.close()
            if not is_kept:
                self._addresses.append(self._addresses.pop(0))
                raise
        return await self._exchange(request)  # the server had closed an idle connection

    async def close(self) -> None:
        """Drops the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time()):
                await trio.aclose_forcefully(stream)

    async def _exchange(self, request: bytes) -> tuple[int, bytes, int, int]:
        with trio.fail_after(ANSWER_S):
            if self._stream is None:
                plain = await trio.open_tcp_stream(*self._addresses[0])
                self._stream = trio.SSLStream(plain, self._context, server_hostname="localhost", https_compatible=True)
            await self._stream.send_all(request)
            received = b""
            while b"\r\n\r\n" not in received:
                received += await self._piece(self._stream)
            head, _, body = received.partition(b"\r\n\r\n")
            fields = head.decode().lower().split("\r\n")
            length = next(int(line.split(":")[1]) for line in fields if line.startswith("content-length:"))
            while len(body) < length:
                body += await self._piece(self._stream)
            if "connection: close" in fields:
                await self.close()
            return int(fields[0].split(" ")[1]), body, len(request), len(head) + 4 + len(body)

    @staticmethod
    async def _piece(stream: "trio.SSLStream[trio.SocketStream]") -> bytes:
        piece = bytes(await stream.receive_some(65_536))
        if not piece:
            raise trio.BrokenResourceError("the connection ended")
        return piece


class SimulatedWorker:
    """One worker. `started` collects the attempts it carried out, `completed` those whose completion was accepted."""

    def __init__(
        self,
        worker_id: str,
        token: str,
        addresses: Sequence[Address],
        context: ssl.SSLContext,
        measure: Measure = lambda *_: None,
    ) -> None:
        self.worker_id = worker_id
        self.started: list[str] = []
        self.completed: list[tuple[str, str, int]] = []
        self.retries = 0
        self._session_id = new_session_id(time.time_ns() // 1_000_000)
        self._headers = {"Authorization": f"Worker {token}"}
        self._line = Line(addresses, context)
        self._measure = measure
        self._generation = 0
        self._version = 0
        self._pair = self._new_pair()

    async def register(self) -> None:
        """Opens the session."""
        request = RegisterRequest(
            schema="qinglong/worker-session-register@v1",
            capabilities_json=CAPABILITIES.text(),
            capabilities_hash=CAPABILITIES.digest(),
            max_concurrent_runs=1,
            available_slots=1,
            lease_duration_ms=LEASE_MS,
        )
        answer = await self._ask("register", request)
        self._generation, self._version = answer["generation"], answer["version"]

    async def heartbeat(self) -> None:
        """Keeps the session; after a lost answer the version is one further."""
        for version in (self._version, self._version + 1):
            request = HeartbeatRequest(
                schema="qinglong/worker-session-heartbeat@v1",
                generation=self._generation,
                expected_version=version,
                available_slots=1,
                lease_duration_ms=LEASE_MS,
            )
            try:
                self._version = (await self._ask("heartbeat", request))["version"]
            except Refusal as refusal:
                if refusal.status != 409:
                    raise
            else:
                return
        raise Refusal(409, b"the session is gone")

    async def work(self, exit_code: int = 0) -> Offer | None:
        """Pulls once, and carries out and reports what comes. The pair of a pull stays until it brought something."""
        worker = WorkerFence(worker_id=self.worker_id, session_id=self._session_id, generation=self._generation)
        request = OfferRequest(worker_generation=self._generation, offer_id=self._pair[0], lease_token=self._pair[1])
        answer = read_answer(await self._post("offers", JSON_TYPE, request.to_json()), worker, request)
        if isinstance(answer, Idle):
            return None
        self._pair = self._new_pair()
        starting = await self._ask("starting", ActivationRequest.of(answer), ActivationResponse)
        if starting.status == "applied" or answer.candidate.attempt_id not in self.started:
            self.started.append(answer.candidate.attempt_id)
        await self._report(answer, exit_code)
        self.completed.append((answer.candidate.run_id, answer.candidate.attempt_id, exit_code))
        return answer

    async def close(self) -> None:
        """Drops the connection."""
        await self._line.close()

    async def _report(self, offer: Offer, exit_code: int) -> None:
        candidate = offer.candidate
        # As the real worker: a transaction that claims may have begun before the one that made the attempt.
        started_at_ms = max(offer.lease.renewed_at_ms, candidate.attempt_created_at_ms)
        log_id = log_artifact_id(candidate.project_id, candidate.run_id, candidate.attempt_id, offer.offer_id)
        activation = msgspec.structs.asdict(ActivationRequest.of(offer))
        await self._ask(
            "running",
            RunningRequest(
                **activation,
                executor_handle="ql3lp1.simulated",
                log_artifact_id=log_id,
                callback_sequence=1,
                callback_token_digest=CALLBACK,
            ),
        )
        header = UploadHeader.of(offer, log_artifact_id=log_id, byte_length=len(LOG), truncated=False)
        await self._post("artifacts", UPLOAD_TYPE, header.preamble() + LOG)
        artifact = Artifact(log_artifact_id=log_id, byte_length=len(LOG), sha256=sha256_hex(LOG), truncated=False)
        completion = CompletionRequest.of(
            offer,
            callback_sequence=1,
            callback_token_digest=CALLBACK,
            result=CompletionResult(
                outcome="failed" if exit_code else "succeeded",
                started_at_ms=started_at_ms,
                finished_at_ms=started_at_ms,
                exit_code=exit_code,
            ),
            artifact=artifact,
        )
        await self._ask("completion", completion)

    async def _ask(self, operation: str, document: Document, kind: Any = dict[str, Any]) -> Any:
        return decode(await self._post(operation, JSON_TYPE, document.to_json()), kind)

    async def _post(self, operation: str, content_type: str, body: bytes) -> bytes:
        path = f"/api/v3/worker-ingress/workers/{self.worker_id}/sessions/{self._session_id}/{operation}"
        while True:
            began = trio.current_time()
            try:
                status, answer, sent, received = await self._line.post(
                    path, {**self._headers, "Content-Type": content_type}, body
                )
            except (OSError, trio.BrokenResourceError, trio.TooSlowError):
                status, answer = 0, b""
            if status == 200:
                self._measure(operation, trio.current_time() - began, sent, received)
                return answer
            if status and status < 500 and status != 429:
                raise Refusal(status, answer)
            self.retries += 1
            await trio.sleep(RETRY_S * (1 + random.random()))

    @staticmethod
    def _new_pair() -> tuple[str, str]:
        return str(uuid.uuid4()), f"lease_capability_{uuid.uuid4().hex}"
