"""The enrolment listener's application: two requests for boxes that have no certificate yet, and nothing else.

Who presents an invitation proves it before anything is signed; refusals look alike and are audited. Source: control-plane.md
§15.3, R505, R509.
"""

import uuid
from pathlib import Path

import msgspec
import trio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ..domain.document import Document
from ..domain.errors import QlworkerError, Refused, Transient, Unauthorized
from ..wire.codec import decode
from ..wire.enrolment import (
    AUTHORITY_PATH,
    AUTHORITY_SCHEMA,
    ENROLMENT_BYTES,
    ENROLMENT_PATH,
    ENROLMENT_SCHEMA,
    AuthorityResponse,
    EnrolmentRequest,
    EnrolmentResponse,
)
from . import enrolment
from .answers import failed, json_answer
from .config import Limits
from .database import Database
from .failure import Failure
from .logs import Log
from .private_files import read_pem
from .request_body import JSON_TYPE, open_body, read_whole
from .shield import Shield
from .signing import SIGNING_S, Signing


class EnrolmentDesk(msgspec.Struct, frozen=True):
    """What enrolling needs. `origin` is where workers connect afterwards; `authority` holds the authority's certificate."""

    database: Database
    pepper: bytes
    signing: Signing
    authority: Path
    origin: str
    certificate_days: int
    limits: Limits
    log: Log


class EnrolmentApplication:
    """An ASGI application."""

    def __init__(self, desk: EnrolmentDesk) -> None:
        self._desk = desk
        self._shield = Shield(desk.limits)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = json_answer(200, (await self._answer(request)).to_json())
        except Failure as failure:
            response = failed(failure)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Document:
        path, method = request.scope["path"], request.method
        if (method, path) == ("GET", AUTHORITY_PATH):
            return await self._authority()
        if (method, path) != ("POST", ENROLMENT_PATH) or request.scope["query_string"]:
            raise Failure(404, "not_found")
        reservation = self._shield.reserve(request.client.host if request.client else "unknown")
        if self._in_flight >= self._desk.limits.in_flight:
            raise Failure(503, "admission_capacity_exhausted")
        self._in_flight += 1
        try:
            with trio.move_on_after(self._desk.limits.request_timeout_s + SIGNING_S):
                answer = await self._enrol(request)
                self._shield.give_back(reservation)
                return answer
            raise Failure(504, "request_timeout")
        finally:
            self._in_flight -= 1

    async def _authority(self) -> AuthorityResponse:
        try:
            content = await trio.to_thread.run_sync(read_pem, self._desk.authority)
        except QlworkerError as error:
            self._desk.log.error("enrolment_unavailable", reason=str(error))
            raise Failure(503, "enrolment_unavailable") from None
        return AuthorityResponse(schema=AUTHORITY_SCHEMA, certificate=content.decode())

    async def _enrol(self, request: Request) -> EnrolmentResponse:
        desk, request_id = self._desk, str(uuid.uuid4())
        try:
            wanted: EnrolmentRequest = decode(
                await read_whole(open_body(request, JSON_TYPE, ENROLMENT_BYTES)), EnrolmentRequest
            )
        except Refused:
            raise Failure(400, "invalid_enrolment_request") from None
        admission = await desk.database.run(enrolment.admit, desk.pepper, wanted, request_id)
        if admission is None:
            raise Failure(401, "enrolment_refused")
        try:
            signed = await desk.signing.worker(admission.worker_id, wanted.certificate_request, desk.certificate_days)
            issued = await desk.database.run(
                enrolment.conclude, desk.pepper, admission, wanted, signed.serial, signed.not_after_ms, request_id
            )
        except Refused as error:
            await desk.database.run(enrolment.note_refused_request, admission, request_id)
            desk.log.info("enrolment_refused", worker=admission.worker_id, reason=str(error))
            raise Failure(400, "invalid_certificate_request") from None
        except Unauthorized:
            raise Failure(401, "enrolment_refused") from None
        except Transient as error:
            desk.log.error("enrolment_unavailable", worker=admission.worker_id, reason=str(error))
            raise Failure(503, "enrolment_unavailable") from None
        assert issued.token is not None, "a new credential has a token"
        desk.log.info("worker_enrolled", worker=admission.worker_id, credential=issued.credential.credential_id)
        return EnrolmentResponse(
            schema=ENROLMENT_SCHEMA,
            worker_id=admission.worker_id,
            origin=desk.origin,
            certificate=signed.pem,
            token=issued.token,
            expires_at_ms=min(issued.credential.expires_at_ms, signed.not_after_ms),
        )
