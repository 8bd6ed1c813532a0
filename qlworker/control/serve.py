"""`qlcontrol serve`: its listeners and what it does by itself, in one process, from start to SIGTERM.

When all listen, one JSON line on standard output tells the ports; everything else goes to the log on standard error. SIGHUP
reads certificate, authorities and revocation list again.
"""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from ..domain.errors import Misconfigured, QlworkerError
from .artifact_choice import open_store
from .config import Settings
from .counting import Uncounted
from .credentials import authenticate
from .database import Database
from .enrolment_app import EnrolmentApplication, EnrolmentDesk
from .ingress import create_ingress
from .installation import PEPPER_BYTES
from .listener import bind_tcp, bind_unix, serve_listener
from .live_output import LiveOutput
from .logs import JsonLog
from .maintenance import maintain
from .operator import create_operator
from .private_files import make_private_directory, read_private_file
from .revocation import INTERVAL_S, Revocations
from .secret_store import SecretStore
from .signing import Signing
from .terminal import show_line_json
from .tls import TlsSide

if TYPE_CHECKING:
    from .metrics import Metrics


class _Bound(msgspec.Struct, frozen=True):
    """The sockets, taken over by their listeners; until then, leaving closes them."""

    workers: socket.socket
    operator: socket.socket
    enrolment: socket.socket | None
    metrics: socket.socket | None


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises Misconfigured, Refused, Transient or OwnershipHeld when it cannot start; nothing is listening then.
    """
    os.umask(0o077)
    trio.run(_serve, settings, JsonLog())


async def _serve(settings: Settings, log: JsonLog) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        pepper = read_private_file(settings.storage.pepper, 4096)
        if len(pepper) != PEPPER_BYTES:
            raise Misconfigured(f"cannot use {settings.storage.pepper}: a pepper is exactly {PEPPER_BYTES} bytes")
        side, front = TlsSide(settings.tls, wants_clients=True), TlsSide(settings.tls, wants_clients=False)
        make_private_directory(settings.storage.data)
        database = Database(settings.database_url, connections=settings.storage.connections)
        try:
            await trio.to_thread.run_sync(database.upgrade)
            with ExitStack() as sockets:

                def bind(host: str, port: int | None) -> socket.socket | None:
                    return None if port is None else sockets.enter_context(bind_tcp(host, port))

                bound = _Bound(
                    sockets.enter_context(bind_tcp(settings.listen.host, settings.listen.port)),
                    sockets.enter_context(bind_unix(settings.operator.socket)),
                    bind(settings.listen.host, settings.enrolment.port),
                    bind(settings.metrics.host, settings.metrics.port),
                )
                await _listen(settings, log, database, pepper, side, front, bound, signals)
        finally:
            database.close()
        log.info("control_plane_stopped")


async def _listen(
    settings: Settings,
    log: JsonLog,
    database: Database,
    pepper: bytes,
    side: TlsSide,
    front: TlsSide,
    bound: _Bound,
    signals: AsyncIterator[int],
) -> None:
    port: int = bound.workers.getsockname()[1]
    origin = settings.origin(port)
    enrolment_origin = None if bound.enrolment is None else settings.origin(bound.enrolment.getsockname()[1])
    metrics_port = None if bound.metrics is None else bound.metrics.getsockname()[1]
    metrics = None if bound.metrics is None else _metrics()
    stopping = trio.Event()
    artifacts, live = await trio.to_thread.run_sync(open_store, settings), LiveOutput(settings.storage.live)
    signing = Signing(settings.authority, log)

    def reload() -> None:
        side.reload()
        front.reload()

    revocations = Revocations(database, signing, settings.tls.revoked, reload, log)
    ingress = create_ingress(
        database,
        authenticate=authenticate,
        pepper=pepper,
        secrets=SecretStore(settings.storage.secrets),
        artifacts=artifacts,
        live=live,
        settings=settings,
        signing=signing,
        log=log,
        counting=metrics,
    )
    operator = create_operator(
        database,
        pepper=pepper,
        secrets=settings.storage.secrets,
        artifacts=artifacts,
        live=live,
        origin=origin,
        enrolment_origin=enrolment_origin,
        authority=settings.authority.certificate,
        revocations=revocations,
        stopping=stopping,
        log=log,
    )
    serve = partial(serve_listener, handshake_timeout_s=settings.tls.handshake_timeout_s, stopping=stopping, log=log)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, ingress, bound.workers, tls=side), name="worker listener")
        await nursery.start(partial(serve, operator, bound.operator, tls=None), name="operator listener")
        if bound.enrolment is not None:
            newcomers = EnrolmentApplication(
                EnrolmentDesk(
                    database=database,
                    pepper=pepper,
                    signing=signing,
                    authority=settings.authority.certificate,
                    origin=origin,
                    certificate_days=settings.enrolment.certificate_days,
                    limits=settings.limits,
                    log=log,
                )
            )
            await nursery.start(partial(serve, newcomers, bound.enrolment, tls=front), name="enrolment listener")
        if bound.metrics is not None and metrics is not None:
            from .metrics_app import create_metrics

            page = create_metrics(database, metrics, policy=settings.runs.on_lease_expiry, stopping=stopping, log=log)
            await nursery.start(partial(serve, page, bound.metrics, tls=None), name="metrics listener")
        further = [("revocation", INTERVAL_S, revocations.tick)]
        nursery.start_soon(maintain, database, artifacts, settings, stopping, log, metrics or Uncounted(), further)
        log.info("control_plane_ready", port=port, origin=origin, enrolment=enrolment_origin or "")
        show_line_json(
            {
                "event": "ready",
                "port": port,
                "origin": origin,
                "enrolment": enrolment_origin or "",
                "metrics": metrics_port,
                "pid": os.getpid(),
            }
        )
        await _obey(signals, reload, log)
        ingress.draining = True
        stopping.set()
    settings.operator.socket.unlink(missing_ok=True)


def _metrics() -> "Metrics":
    """Only where somebody asks for them is their library loaded."""
    from .metrics import Metrics

    return Metrics()


async def _obey(signals: AsyncIterator[int], reload: Callable[[], None], log: JsonLog) -> None:
    """Returns when it is time to stop."""
    async for number in signals:
        if number != signal.SIGHUP:
            log.info("control_plane_stopping", signal=signal.Signals(number).name)
            return
        try:
            reload()
        except QlworkerError as error:
            log.error("tls_context_kept", reason=str(error))
        else:
            log.info("tls_context_reloaded")
