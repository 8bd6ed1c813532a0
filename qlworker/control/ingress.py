"""The worker listener's application: the order in which a request is looked at, and nothing about what it asks for.

URL, probes, prefix, readiness, shield, method, in-flight limit, route, credential, durable audit row, body, operation: no
step may move, because what a stranger can learn or use up depends on it. Source: wire-protocol.md §1.5, §1.8,
control-plane.md §15.3.
"""

import re
import uuid
from typing import Final, Protocol

import msgspec
import trio
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..domain.canonical import js_json
from ..domain.text import check_session_id, check_worker_id
from . import audit
from .answers import failed, json_answer
from .artifact_store import ArtifactStore
from .config import Settings
from .counting import Counting, Uncounted
from .database import Database, Transaction
from .failure import Failure
from .live_output import LiveOutput
from .logs import Log
from .request_body import JSON_TYPE, UPLOAD_TYPE, Incoming, announced_length, open_body
from .secret_store import SecretStore
from .services.session import Caller
from .shield import Shield
from .signing import Signing
from .worker_routes import ROUTES, UPLOAD_BYTES_PER_SECOND, UPLOAD_LIMIT, Route, Services, failure_of

PREFIX: Final = "/api/v3/"
URL_BYTES: Final = 8 * 1024
RESPONSE_BYTES: Final = 256 * 1024
METHODS: Final = frozenset({"DELETE", "GET", "PATCH", "POST", "PUT"})

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_WORKER_PATH: Final = re.compile(r"/api/v3/worker-ingress/workers/([^/]+)/sessions/([^/]+)/([^/]+)\Z")


class Principal(Protocol):
    """Whom a credential belongs to."""

    @property
    def worker_id(self) -> str: ...  # noqa: D102

    @property
    def credential_id(self) -> str: ...  # noqa: D102

    @property
    def is_unobserved(self) -> bool: ...  # noqa: D102


class Authenticate(Protocol):
    """Tells the principal of an Authorization header (None when it is missing), or None when it is not to be trusted."""

    def __call__(self, tx: Transaction, pepper: bytes, authorization: str | None, /) -> Principal | None: ...  # noqa: D102


class Ingress:
    """An ASGI application. `draining` makes it answer 503 to everything but the probes; running requests finish."""

    def __init__(
        self, services: Services, authenticate: Authenticate, pepper: bytes, log: Log | None, counting: Counting
    ) -> None:
        self.draining = False
        self._services = services
        self._authenticate = authenticate
        self._pepper = pepper
        self._log = log
        self._counting = counting
        self._limits = services.settings.limits
        self._shield = Shield(self._limits)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        incoming = Incoming(receive)
        request = Request(scope, incoming)
        sent_id = request.headers.get("x-request-id", "")
        request_id = sent_id if _REQUEST_ID.match(sent_id) else str(uuid.uuid4())
        began = trio.current_time()
        try:
            response = await self._answer(request, request_id)
        except Failure as failure:
            response = failed(failure)
            await incoming.discard(self._patience(request, failure))
        except ClientDisconnect:
            return  # nobody is there to be told
        self._counting.request(_counted(scope["path"]), response.status_code, trio.current_time() - began)
        response.headers["X-Request-Id"] = request_id
        await response(scope, receive, send)

    async def _answer(self, request: Request, request_id: str) -> Response:
        path, query = request.scope["path"], request.scope["query_string"]
        if len(request.scope.get("raw_path") or path.encode()) + len(query) > URL_BYTES or "\x00" in path:
            raise Failure(400, "invalid_url")
        if request.method in ("GET", "HEAD") and path in ("/livez", "/readyz"):
            return self._probe(request.method, path)
        if not path.startswith(PREFIX):
            raise Failure(404, "not_found")
        if self.draining:
            raise Failure(503, "admission_draining")
        reservation = self._shield.reserve(request.client.host if request.client else "unknown")
        if request.method not in METHODS:
            raise Failure(405, "method_not_allowed")
        if self._in_flight >= self._limits.in_flight:
            raise Failure(503, "admission_capacity_exhausted")
        self._in_flight += 1
        try:
            with trio.move_on_after(self._limits.request_timeout_s) as scope:
                caller, operation, route = _find(request)
                principal = await self._admit(request, request_id, caller, operation)
                if principal.is_unobserved:
                    caller = msgspec.structs.replace(caller, unobserved_credential=principal.credential_id)
                self._shield.give_back(reservation)
                return await self._perform(request, request_id, caller, operation, route, scope)
            raise Failure(504, "request_timeout")
        finally:
            self._in_flight -= 1

    def _probe(self, method: str, path: str) -> Response:
        status, word = (503, "not_ready") if path == "/readyz" and self.draining else (200, path[1:-1])
        body = js_json({"status": {"live": "live", "ready": "ready"}.get(word, word)})
        return json_answer(status, b"" if method == "HEAD" else body)

    def _patience(self, request: Request, failure: Failure) -> float:
        """How many seconds the rest of a refused request is still read. None are for those who send too much or too often."""
        length = announced_length(request)
        if length is None or length > UPLOAD_LIMIT or failure.status in (413, 429, 504) or self.draining:
            return 0
        return self._limits.request_timeout_s + length / UPLOAD_BYTES_PER_SECOND

    async def _admit(self, request: Request, request_id: str, caller: Caller, operation: str) -> Principal:
        """The proven principal. Raises Failure unless the credential is the path's worker's and a durable audit row says so."""
        header = request.headers.get("authorization")
        try:
            principal = await self._services.database.run(self._judge, header, request_id, caller, operation)
        except Failure:
            raise
        except Exception as error:
            self._tell("worker_authentication_unavailable", operation, error)
            raise Failure(503, "worker_authentication_unavailable") from None
        if principal is None:
            raise Failure(401, "worker_authentication_required")
        return principal

    def _judge(self, tx: Transaction, header: str | None, request_id: str, caller: Caller, operation: str) -> Principal | None:
        principal = self._authenticate(tx, self._pepper, header)
        is_allowed = principal is not None and principal.worker_id == caller.worker_id
        try:
            audit.note(
                tx,
                operation,
                "allowed" if is_allowed else "authentication_rejected",
                subject=caller.worker_id,
                authentication_id=None if principal is None else principal.credential_id,
                reasons="" if is_allowed else "credential" if principal is None else "worker_mismatch",
                request_id=request_id,
            )
        except Exception as error:
            self._tell("worker_audit_unavailable", operation, error)
            raise Failure(503, "worker_audit_unavailable") from None
        return principal if is_allowed else None

    async def _perform(
        self, request: Request, request_id: str, caller: Caller, operation: str, route: Route, scope: trio.CancelScope
    ) -> Response:
        try:
            body = (
                open_body(request, UPLOAD_TYPE, UPLOAD_LIMIT, minimum=1)
                if route.is_upload
                else open_body(request, JSON_TYPE, self._limits.body_bytes)
            )
            answer = await route.handler(self._services, caller, body, scope)
        except ClientDisconnect:
            raise
        except Exception as error:
            failure = failure_of(error, route)
            self._tell(failure.code, operation, error, request_id=request_id, status=failure.status)
            raise failure from None
        content = answer.to_json()
        if len(content) > RESPONSE_BYTES:
            raise Failure(500, "response_too_large")
        return json_answer(route.status_of(answer), content)

    def _tell(self, code: str, operation: str, error: Exception, **fields: object) -> None:
        """Errors of this program carry no secret in their texts; foreign ones may quote values, so only their class is told."""
        if self._log is None:
            return
        reason = str(error) if type(error).__module__.startswith("qlworker.") else type(error).__name__
        tell = self._log.error if isinstance(error, SQLAlchemyError) or code == "internal_error" else self._log.info
        tell("worker_request_failed", code=code, operation=operation, reason=reason, **fields)


def create_ingress(
    database: Database,
    *,
    authenticate: Authenticate,
    pepper: bytes,
    secrets: SecretStore,
    artifacts: ArtifactStore,
    live: LiveOutput,
    settings: Settings,
    signing: Signing | None = None,
    log: Log | None = None,
    counting: Counting | None = None,
) -> Ingress:
    """The ASGI application of the worker listener. It needs trio, and TLS with client certificates around it."""
    services = Services(database, secrets, artifacts, live, settings, signing)
    return Ingress(services, authenticate, pepper, log, counting or Uncounted())


def _counted(path: str) -> str:
    """The operation's name if it is one: a stranger's paths are counted together."""
    name = path.rpartition("/")[2]
    return name if name in ROUTES else "other"


def _find(request: Request) -> tuple[Caller, str, Route]:
    """Who calls what. The prefix's other paths, other methods and any query are one answer: there is nothing to explore."""
    match = _WORKER_PATH.match(request.scope["path"])
    route = None if match is None else ROUTES.get(match[3])
    if match is None or route is None or request.method != "POST" or request.scope["query_string"]:
        raise Failure(404, "worker_route_not_found")
    try:
        caller = Caller(check_worker_id(match[1]), check_session_id(match[2]))
    except ValueError:
        raise Failure(404, "worker_route_not_found") from None
    return caller, match[3], route


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
