"""The control plane as typed calls: encodes, sends, decodes and checks that an answer is the answer to its request.

Every call raises Transient, Unauthorized, Fenced, Malformed or Unsupported by status, and Refused for a 200 answer that
breaks the contract or answers something else. Nothing is retried here: each caller decides (wire-protocol.md §1.7).
"""

from typing import TYPE_CHECKING, Any, TypeVar

from ..domain.document import Document
from ..domain.errors import Malformed, Refused
from ..domain.offer import Offer, WorkerFence
from ..domain.revision import ExecutionRevision
from ..ports import Link, SealedOutput
from ..wire import codec
from ..wire.activation import ActivationRequest, ActivationResponse, RunningRequest
from ..wire.completion import (
    CompletionRequest,
    CompletionResponse,
    OutputRequest,
    OutputResponse,
    UploadHeader,
    UploadResponse,
)
from ..wire.lease_control import LeaseControlRequest, LeaseControlResponse
from ..wire.offers import Idle, OfferRequest, read_answer
from ..wire.secrets import SecretRequestV1, SecretRequestV2, SecretResponseV1, SecretResponseV2
from ..wire.session import (
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    TransitionRequest,
    TransitionResponse,
)

if TYPE_CHECKING:
    from ..wire.certificate import CertificateResponse

T = TypeVar("T")


class ControlPlane:
    """The worker ingress of one control plane, for one worker.

    `secrets_dialect` is "v1", "v2" or "auto": try the later form, remember what the server understood (§0.1).
    """

    def __init__(self, link: Link, worker_id: str, secrets_dialect: str = "auto") -> None:
        self._link = link
        self._worker_id = worker_id
        self._secrets_dialect = secrets_dialect

    async def register(self, session_id: str, request: RegisterRequest) -> RegisterResponse:
        """Opens or reads the session."""
        answer = await self._call(session_id, codec.REGISTER, request, RegisterResponse)
        self._check_session(answer, session_id)
        return answer

    async def heartbeat(self, session_id: str, request: HeartbeatRequest) -> HeartbeatResponse:
        """Extends the session."""
        answer = await self._call(session_id, codec.HEARTBEAT, request, HeartbeatResponse)
        self._check_session(answer, session_id, request.generation, request.expected_version + 1)
        return answer

    async def transition(self, session_id: str, request: TransitionRequest) -> TransitionResponse:
        """Moves the session to draining or offline."""
        answer = await self._call(session_id, codec.TRANSITION, request, TransitionResponse)
        self._check_session(answer, session_id, request.generation, request.expected_version + 1)
        if answer.status != request.status:
            raise Refused("cannot use the answer: it tells another status than the one asked for")
        return answer

    async def pull(self, worker: WorkerFence, request: OfferRequest) -> Offer | Idle:
        """Asks for work, or for the current lease of an offer already owned."""
        body = await self._link.call(
            worker.session_id,
            codec.OFFERS.name,
            request.to_json(),
            request_limit=codec.OFFERS.request_limit,
            response_limit=codec.OFFERS.response_limit,
        )
        return read_answer(body, worker, request)

    async def starting(self, offer: Offer) -> ActivationResponse:
        """Acknowledges that the offer is durable here and about to start."""
        return await self._activate(codec.STARTING, offer, ActivationRequest.of(offer))

    async def running(self, offer: Offer, request: RunningRequest) -> ActivationResponse:
        """Acknowledges that the command runs."""
        return await self._activate(codec.RUNNING, offer, request)

    async def start_failure(self, offer: Offer) -> ActivationResponse:
        """Reports that nothing was started, provably."""
        return await self._activate(codec.START_FAILURE, offer, ActivationRequest.of(offer))

    async def secrets(self, offer: Offer) -> tuple[dict[str, str], str | None]:
        """The secret values by reference, and the text of the environment bundle if there is one."""
        revision = offer.execution_revision
        needs_v2 = isinstance(revision.environment_bundle_ref, str)
        if self._secrets_dialect == "v1" and not needs_v2:
            return await self._secrets_v1(offer)
        try:
            return await self._secrets_v2(offer)
        except Malformed:
            if needs_v2 or self._secrets_dialect == "v2":
                raise
        values = await self._secrets_v1(offer)
        self._secrets_dialect = "v1"
        return values

    async def lease_control(self, offer: Offer) -> LeaseControlResponse:
        """Renews the lease and learns of a stop or an end."""
        request = LeaseControlRequest.of(offer)
        answer = await self._call(offer.worker.session_id, codec.LEASE_CONTROL, request, LeaseControlResponse)
        if not answer.echoes(request):
            raise Refused("cannot use the answer: it is for another lease or another version")
        return answer

    async def upload(self, offer: Offer, log_artifact_id: str, output: SealedOutput) -> UploadResponse:
        """Stores the log. The store's own measure must equal ours."""
        header = UploadHeader.of(
            offer, log_artifact_id=log_artifact_id, byte_length=output.byte_length, truncated=output.truncated
        )
        body = await self._link.upload(
            offer.worker.session_id, header.to_json(), output, response_limit=codec.ARTIFACTS.response_limit
        )
        answer: UploadResponse = codec.decode(body, UploadResponse)
        self._check_attempt(answer, offer)
        measured = (answer.log_artifact_id, answer.byte_length, answer.sha256, answer.truncated)
        if measured != (log_artifact_id, output.byte_length, output.sha256, output.truncated):
            raise Refused("cannot use the answer: the store measured another artifact than the one sent")
        return answer

    async def complete(self, offer: Offer, request: CompletionRequest) -> CompletionResponse:
        """Reports the end of the attempt."""
        answer = await self._call(offer.worker.session_id, codec.COMPLETION, request, CompletionResponse)
        self._check_attempt(answer, offer)
        if answer.callback_sequence != request.callback_sequence:
            raise Refused("cannot use the answer: it is for another callback sequence")
        return answer

    async def output(self, offer: Offer, request: OutputRequest) -> OutputResponse:
        """Sends a chunk of live output. Raises Unsupported where the server has no such extension."""
        return await self._call(offer.worker.session_id, codec.OUTPUT, request, OutputResponse)

    async def certificate(self, session_id: str, request: str) -> "CertificateResponse":
        """The next certificate, for a request in PEM. Raises Unsupported where the server has no such extension."""
        # Once in months: a steady worker keeps neither document in memory.
        from ..wire.certificate import CERTIFICATE_SCHEMA, CertificateRequest, CertificateResponse

        document = CertificateRequest(schema=CERTIFICATE_SCHEMA, certificate_request=request)
        return await self._call(session_id, codec.CERTIFICATE, document, CertificateResponse)

    async def _call(self, session_id: str, operation: codec.Operation, request: Document, kind: type[T]) -> T:
        body = await self._link.call(
            session_id,
            operation.name,
            request.to_json(),
            request_limit=operation.request_limit,
            response_limit=operation.response_limit,
        )
        return codec.decode(body, kind)

    async def _activate(self, operation: codec.Operation, offer: Offer, request: ActivationRequest) -> ActivationResponse:
        answer = await self._call(offer.worker.session_id, operation, request, ActivationResponse)
        snapshot = answer.snapshot
        self._check_attempt(snapshot, offer)
        versions = {request.expected_lease_version}
        if operation is codec.START_FAILURE:
            versions.add(request.expected_lease_version + 1)
        if snapshot.lease_generation != offer.lease.lease_generation or snapshot.lease_version not in versions:
            raise Refused("cannot use the answer: it is for another lease or another version")
        if snapshot.shape == "starting" and not _deadline_agrees(snapshot.deadline_at_ms, offer.execution_revision):
            raise Refused("cannot use the answer: a deadline must be there exactly when the revision has a timeout")
        return answer

    async def _secrets_v1(self, offer: Offer) -> tuple[dict[str, str], None]:
        request = SecretRequestV1.of(offer)
        answer = await self._call(offer.worker.session_id, codec.SECRETS_V1, request, SecretResponseV1)
        self._check_secrets(answer, offer)
        return _by_reference(answer.values, request.secret_refs), None

    async def _secrets_v2(self, offer: Offer) -> tuple[dict[str, str], str | None]:
        request = SecretRequestV2.of(offer)
        answer = await self._call(offer.worker.session_id, codec.SECRETS_V2, request, SecretResponseV2)
        self._check_secrets(answer, offer)
        bundles = _by_reference(answer.environment_bundles, request.environment_bundle_refs)
        return _by_reference(answer.values, request.secret_refs), next(iter(bundles.values()), None)

    def _check_session(self, answer: Any, session_id: str, generation: int | None = None, version: int | None = None) -> None:
        same = (answer.worker_id, answer.session_id) == (self._worker_id, session_id)
        if not same or generation not in (None, answer.generation) or version not in (None, answer.version):
            raise Refused("cannot use the answer: it is for another session or another version")

    def _check_attempt(self, answer: Any, offer: Offer) -> None:
        if (answer.run_id, answer.attempt_id) != (offer.run_id, offer.attempt_id):
            raise Refused("cannot use the answer: it is for another attempt")

    def _check_secrets(self, answer: SecretResponseV1 | SecretResponseV2, offer: Offer) -> None:
        self._check_attempt(answer, offer)
        if (answer.offer_id, answer.execution_digest) != (offer.offer_id, offer.execution_digest):
            raise Refused("cannot use the answer: it is for another offer or another revision")


def _deadline_agrees(deadline_at_ms: object, revision: ExecutionRevision) -> bool:
    return isinstance(deadline_at_ms, int) is isinstance(revision.timeout_ms, int)


def _by_reference(values: list[Any], references: list[str]) -> dict[str, str]:
    """Values come in the order of the request, each with its reference (wire-protocol §6.3)."""
    if [value.secret_ref for value in values] != references:
        raise Refused("cannot use the answer: the delivered secrets are not the ones asked for")
    return {value.secret_ref: value.value for value in values}
