"""The operations of the worker listener: which request each takes, what answers it, and how its failures are called.

Source: wire-protocol.md §0.4, §1.8. The twelve of control-plane.md §15.3, and two extensions: `output`, `certificate`.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import trio
from sqlalchemy.exc import SQLAlchemyError

from ..domain.document import Document
from ..domain.errors import Conflict, Corrupt, Fenced, Refused, Transient
from ..wire.activation import ActivationRequest, RunningRequest
from ..wire.attestation import AttestationRequest, AttestationResponse
from ..wire.certificate import CERTIFICATE_SCHEMA, CertificateRequest, CertificateResponse
from ..wire.codec import ARTIFACTS, decode
from ..wire.completion import UPLOAD_HEADER_BYTES, CompletionRequest, OutputRequest, UploadHeader
from ..wire.lease_control import LeaseControlRequest
from ..wire.offers import OfferRequest
from ..wire.secrets import SecretRequestV1, SecretRequestV2
from ..wire.session import HeartbeatRequest, RegisterRequest, TransitionRequest
from . import certificates
from .artifact_store import ArtifactKey, ArtifactStore, Upload
from .config import Settings
from .database import Database, Transaction
from .failure import Failure
from .live_output import LiveOutput
from .request_body import Body, read_whole
from .secret_store import SecretStore
from .services import activation, artifacts, attestations, completion, dispatch, lease_control, output, secrets, session
from .services.session import Caller
from .signing import SIGNING_S, Signing

UPLOAD_BYTES_PER_SECOND: Final = 32 * 1024
"""A log may take its size at this rate longer than other requests, so that a slow uplink can finish one (wire-protocol
§13.2, gap 14)."""
CERTIFICATES_AN_HOUR: Final = 6
WRITE_BYTES: Final = 256 * 1024


class Services(msgspec.Struct, frozen=True):
    """What the operations work with."""

    database: Database
    secrets: SecretStore
    artifacts: ArtifactStore
    live: LiveOutput
    settings: Settings
    signing: Signing | None = None


Handler = Callable[[Services, Caller, Body, trio.CancelScope], Awaitable[Document]]


def _ok(_answer: Document) -> int:
    return 200


def _created_once(answer: AttestationResponse) -> int:
    return 200 if answer.replay else 201


class Route(msgspec.Struct, frozen=True):
    """One operation, the codes of its 409 and 503, and the status of its answer."""

    handler: Handler
    fenced: str
    unavailable: str
    is_upload: bool = False
    status_of: Callable[[Any], int] = _ok


def failure_of(error: Exception, route: Route) -> Failure:
    """What a handler's exception means to the worker. The body never says which fence failed."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, Fenced | Conflict):
        return Failure(409, route.fenced)
    if isinstance(error, Refused):
        return Failure(400, "invalid_worker_request")
    if isinstance(error, Transient | Corrupt | SQLAlchemyError | OSError):
        return Failure(503, route.unavailable)
    return Failure(500, "internal_error")


async def _read_json(body: Body, kind: Any) -> Any:
    data = await read_whole(body)
    try:
        return decode(data, kind)
    except Refused:
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Failure(400, "invalid_json") from None
        raise


def _simple(kind: Any, function: Callable[[Transaction, Caller, Any, Settings], Document]) -> Handler:
    """A handler that is one transaction."""

    async def handle(services: Services, caller: Caller, body: Body, _scope: trio.CancelScope) -> Document:
        request = await _read_json(body, kind)
        return await services.database.run(function, caller, request, services.settings)

    return handle


async def _secrets(services: Services, caller: Caller, body: Body, _scope: trio.CancelScope) -> Document:
    kind = SecretRequestV2 if services.settings.dialect.secrets == "v2" else SecretRequestV1
    request = await _read_json(body, kind)
    delivery = await services.database.run(secrets.authorise, caller, request, services.settings)
    return await trio.to_thread.run_sync(secrets.deliver, services.secrets, delivery)


async def _output(services: Services, caller: Caller, body: Body, _scope: trio.CancelScope) -> Document:
    request: OutputRequest = await _read_json(body, OutputRequest)
    view = await services.database.run(output.look, caller, request, services.settings)
    return await trio.to_thread.run_sync(output.show, services.live, request, view)


async def _completion(services: Services, caller: Caller, body: Body, _scope: trio.CancelScope) -> Document:
    request: CompletionRequest = await _read_json(body, CompletionRequest)
    log = request.artifact
    key = ArtifactKey(request.project_id, request.run_id, request.attempt_id, log.log_artifact_id)
    is_held = await trio.to_thread.run_sync(services.artifacts.holds, key, log.sha256, log.byte_length)
    return await services.database.run(completion.complete, caller, request, services.settings, is_held)


async def _certificate(services: Services, caller: Caller, body: Body, scope: trio.CancelScope) -> Document:
    """Authority is the certificate of the connection and the credential; a session is not looked at: a worker whose session
    ran out renews all the same."""
    request: CertificateRequest = await _read_json(body, CertificateRequest)
    if services.signing is None:
        raise Transient("nothing is signed here")
    if await services.database.run(certificates.signed_lately, caller.worker_id) >= CERTIFICATES_AN_HOUR:
        raise Failure(429, "worker_certificate_limit", retry_after_s=3600)
    scope.deadline += SIGNING_S
    days = services.settings.enrolment.certificate_days
    signed = await services.signing.worker(caller.worker_id, request.certificate_request, days)
    await services.database.run(certificates.remember, caller.worker_id, signed.serial, signed.not_after_ms)
    return CertificateResponse(
        schema=CERTIFICATE_SCHEMA, serial=signed.serial, certificate=signed.pem, not_after_ms=signed.not_after_ms
    )


async def _artifacts(services: Services, caller: Caller, body: Body, scope: trio.CancelScope) -> Document:
    """Header, authority, content, row: in this order, so that nobody without authority makes the disk busy."""
    size = int.from_bytes(await body.read(4), "big")
    if not 2 <= size <= UPLOAD_HEADER_BYTES or 4 + size > body.length:
        raise Failure(400, "invalid_worker_request")
    header: UploadHeader = decode(await body.read(size), UploadHeader)
    if 4 + size + header.byte_length != body.length:
        raise Failure(400, "content_length_mismatch")
    await services.database.run(artifacts.authorise, caller, header, services.settings)
    scope.deadline += header.byte_length / UPLOAD_BYTES_PER_SECOND
    key = artifacts.artifact_key(header)
    upload = await trio.to_thread.run_sync(services.artifacts.begin, key)
    try:
        await _receive(upload, body)
        sha256 = await trio.to_thread.run_sync(upload.publish)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(upload.discard)
    try:
        response = await services.database.run(artifacts.record, header, sha256)
    except artifacts.OtherContent:
        await trio.to_thread.run_sync(services.artifacts.remove, key, sha256)
        raise
    # The whole log is there now; whoever follows the live view goes on with it.
    await trio.to_thread.run_sync(services.live.remove, header.attempt_id)
    return response


async def _receive(upload: Upload, body: Body) -> None:
    pending = bytearray()
    while piece := await body.piece():
        pending += piece
        if len(pending) >= WRITE_BYTES:
            await trio.to_thread.run_sync(upload.write, bytes(pending))
            pending.clear()
    await trio.to_thread.run_sync(upload.write, bytes(pending))


_session = partial(Route, fenced="worker_session_fenced", unavailable="worker_ingress_unavailable")
_activation = partial(Route, fenced="worker_activation_fenced", unavailable="worker_activation_unavailable")
_log = partial(Route, fenced="worker_completion_fenced", unavailable="worker_artifact_unavailable")

ROUTES: Final[Mapping[str, Route]] = {
    "register": _session(_simple(RegisterRequest, session.register)),
    "heartbeat": _session(_simple(HeartbeatRequest, session.heartbeat)),
    "transition": _session(_simple(TransitionRequest, session.transition)),
    "offers": Route(_simple(OfferRequest, dispatch.pull), "worker_offer_fenced", "worker_offer_unavailable"),
    "starting": _activation(_simple(ActivationRequest, activation.starting)),
    "running": _activation(_simple(RunningRequest, activation.running)),
    "start-failure": _activation(_simple(ActivationRequest, activation.start_failure)),
    "secrets": Route(_secrets, "worker_secret_delivery_fenced", "worker_secret_delivery_unavailable"),
    "lease-control": Route(
        _simple(LeaseControlRequest, lease_control.control),
        "worker_lease_control_fenced",
        "worker_lease_control_unavailable",
    ),
    "attestations": Route(
        _simple(AttestationRequest, attestations.attest),
        "worker_attestation_fenced",
        "worker_ingress_unavailable",  # the contract has no 503 code of its own for it (wire-protocol §1.8)
        status_of=_created_once,
    ),
    "artifacts": _log(_artifacts, is_upload=True),
    "completion": Route(_completion, "worker_completion_fenced", "worker_completion_unavailable"),
    "output": _log(_output),
    "certificate": _session(_certificate),
}
UPLOAD_LIMIT: Final = ARTIFACTS.request_limit
