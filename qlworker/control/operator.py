"""The operator's application, served on a Unix socket that only its owner may open: JSON over HTTP.

Being able to open the socket is the authority; nothing here is reachable from the network. Source: control-plane.md §22 item 5.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from .. import __version__
from ..domain.errors import Conflict, QlworkerError
from ..domain.text import check_text
from . import audit, credentials, deliveries, recovery_view, runs, tasks, worker_desk
from .artifact_store import ArtifactStore
from .database import Database
from .live_output import LiveOutput
from .logs import JsonLog
from .operator_api import (
    BODY_BYTES,
    AddWorker,
    Failure,
    Invitation,
    InviteWorker,
    IssuedToken,
    PublishCredential,
    RevokeWorker,
    RotateWorker,
    StartRun,
    Status,
    StoredSecret,
)
from .operator_operations import OPERATIONS, ApplyTasks
from .revocation import Revocations
from .run_log import RunLog
from .schedule import triggers
from .schedule.plan import PlanOnly, apply, put_task
from .secret_store import SecretStore
from .secret_writer import put_secret
from .services.recovery import vouch_stopped
from .task_file import TaskDefinition
from .task_secrets import require_secrets
from .workers import workers

T = TypeVar("T")


class _Operator:
    """The handlers and what they work on; each has the name of its operation."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        secrets: Path,
        log: RunLog,
        origin: str,
        enrolment_origin: str | None,
        authority: Path,
        revocations: Revocations,
        stopping: trio.Event,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._secrets = secrets
        self._log = log
        self._origin = origin
        self._enrolment_origin = enrolment_origin
        self._authority = authority
        self._revocations = revocations
        self._stopping = stopping

    async def status(self, _request: Request) -> Any:
        return Status(origin=self._origin, pid=os.getpid(), version=__version__)

    async def list_workers(self, _request: Request) -> Any:
        return await self._database.run(workers)

    async def add_worker(self, request: Request) -> Any:
        return _told(await self._database.run(worker_desk.add, self._pepper, await _decoded(request, AddWorker)))

    async def invite_worker(self, request: Request) -> Any:
        body = await _decoded(request, InviteWorker)
        if self._enrolment_origin is None:
            raise Conflict("there is no enrolment listener: set enrolment.port, or write a kit with --out")
        pin = await trio.to_thread.run_sync(worker_desk.authority_digest, self._authority)
        invited = await self._database.run(worker_desk.invite, self._pepper, body, pin)
        return Invitation(
            worker_id=body.worker_id,
            invitation=invited.invitation.text(),
            origin=self._enrolment_origin,
            expires_at_ms=invited.expires_at_ms,
        )

    async def rotate_worker(self, request: Request) -> Any:
        return _told(await self._database.run(worker_desk.rotate, self._pepper, await _decoded(request, RotateWorker)))

    async def publish_credential(self, request: Request) -> Any:
        body = await _decoded(request, PublishCredential)
        await self._database.run(deliveries.publish, body.credential_id)
        return body

    async def revoke_worker(self, request: Request) -> Any:
        body = await _decoded(request, RevokeWorker)
        revoked = await self._database.run(worker_desk.revoke, body.worker_id)
        await self._revocations.refresh()
        return revoked

    async def retry_run(self, request: Request) -> Any:
        return await self._database.run(runs.retry, request.path_params["run_id"])

    async def list_recoveries(self, request: Request) -> Any:
        return await self._database.run(recovery_view.waiting, _number(request, "limit", 100))

    async def vouch_stopped(self, request: Request) -> Any:
        await self._database.run(vouch_stopped, request.path_params["run_id"])
        return await self._database.run(runs.detail, request.path_params["run_id"])

    async def put_task(self, request: Request) -> Any:
        definition = await _decoded(request, TaskDefinition)
        await trio.to_thread.run_sync(require_secrets, SecretStore(self._secrets), definition)
        return await self._database.run(put_task, definition)

    async def apply_tasks(self, request: Request) -> Any:
        wanted = await _decoded(request, ApplyTasks)
        check_text(wanted.source, "source", minimum=1, maximum=256)
        store = SecretStore(self._secrets)
        for definition in wanted.tasks:
            await trio.to_thread.run_sync(require_secrets, store, definition)
        try:
            return await self._database.run(apply, wanted.tasks, wanted.source, is_plan=wanted.is_plan)
        except PlanOnly as plan:
            return plan.applied

    async def list_triggers(self, request: Request) -> Any:
        return await self._database.run(triggers.listed, _number(request, "limit", 1000))

    async def list_tasks(self, request: Request) -> Any:
        return await self._database.run(tasks.tasks, _number(request, "limit", 1000))

    async def show_task(self, request: Request) -> Any:
        project, task_id = _text(request, "project"), _text(request, "id")
        return await self._database.run(tasks.task, project, task_id, _number(request, "revision", None))

    async def put_secret(self, request: Request) -> Any:
        project, name, version = _text(request, "project"), _text(request, "name"), _number(request, "version", None)
        value = await _body(request)
        changed = await trio.to_thread.run_sync(put_secret, self._secrets, project, name, version, value)
        return StoredSecret(changed=changed)

    async def start_run(self, request: Request) -> Any:
        body = await _decoded(request, StartRun)
        return await self._database.run(
            runs.start,
            body.project,
            body.task,
            revision=body.revision,
            priority=body.priority,
            idempotency_key=body.idempotency_key,
        )

    async def list_runs(self, request: Request) -> Any:
        project, task_id = request.query_params.get("project"), request.query_params.get("task")
        return await self._database.run(runs.listed, _number(request, "limit", 50), project, task_id)

    async def show_run(self, request: Request) -> Any:
        return await self._database.run(runs.detail, request.path_params["run_id"])

    async def cancel_run(self, request: Request) -> Any:
        return await self._database.run(runs.cancel, request.path_params["run_id"])

    async def run_events(self, request: Request) -> Any:
        after = _number(request, "after", 0)
        return await self._database.run(runs.events, request.path_params["run_id"], after)

    async def list_audit(self, request: Request) -> Any:
        given = request.query_params.get
        return await self._database.run(
            audit.listed,
            _number(request, "limit", 100),
            before=given("before"),
            subject=given("subject"),
            outcome=given("outcome"),
        )

    async def openapi(self, _request: Request) -> Any:
        from .openapi import document

        return document()

    async def run_log(self, request: Request) -> Any:
        run_id = request.path_params["run_id"]
        await self._database.run(runs.detail, run_id)  # an unknown run is an error, not an empty log
        stopping = self._stopping if request.query_params.get("follow") == "1" else None
        return _LogResponse(self._log.stream(run_id, stopping))


def create_operator(
    database: Database,
    *,
    pepper: bytes,
    secrets: Path,
    artifacts: ArtifactStore,
    live: LiveOutput,
    origin: str,
    enrolment_origin: str | None,
    authority: Path,
    revocations: Revocations,
    stopping: trio.Event,
    log: JsonLog,
) -> Starlette:
    """The ASGI application. `origin` is how workers reach this server, `enrolment_origin` how boxes do that are none yet;
    `stopping` ends the logs that are being followed."""
    operator = _Operator(
        database,
        pepper,
        secrets,
        RunLog(database, artifacts, live),
        origin,
        enrolment_origin,
        authority,
        revocations,
        stopping,
    )
    return Starlette(
        routes=[Route(each.path, _answering(getattr(operator, each.name), log), methods=[each.method]) for each in OPERATIONS]
    )


def _answering(handler: Callable[[Request], Awaitable[Any]], log: JsonLog) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            answer = await handler(request)
        except (ValueError, msgspec.MsgspecError) as error:
            return _json(Failure(error=str(error)), 400)
        except Conflict as error:
            return _json(Failure(error=str(error)), 409)
        except (QlworkerError, OSError) as error:
            log.warning("operator_request_failed", path=request.url.path, error=str(error))
            return _json(Failure(error=str(error)), 500)
        return answer if isinstance(answer, Response) else _json(answer, 200)

    return endpoint


def _json(value: object, status: int) -> Response:
    return Response(msgspec.json.encode(value), status, {"Cache-Control": "no-store"}, "application/json")


async def _body(request: Request) -> bytes:
    """The request's body, counted while it is read. Raises ValueError above 1 MiB."""
    body = b""
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > BODY_BYTES:
                raise ValueError(f"a request must be at most {BODY_BYTES} bytes")
    return body


class _LogResponse(StreamingResponse):
    """Closes the log's generator when its reader goes away, instead of leaving that to the garbage collector."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(chunks, media_type="application/octet-stream")
        self._chunks = chunks

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().stream_response(send)


async def _decoded(request: Request, kind: type[T]) -> T:
    return msgspec.json.decode(await _body(request), type=kind)


def _told(issued: credentials.Issued) -> IssuedToken:
    credential = issued.credential
    return IssuedToken(
        worker_id=credential.worker_id,
        credential_id=credential.credential_id,
        expires_at_ms=credential.expires_at_ms,
        token=issued.token,
    )


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise ValueError(f"the query must have {name}")
    return value


def _number(request: Request, name: str, default: int | None) -> Any:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 10:
        raise ValueError(f"{name} must be a whole number")
    return int(value)
