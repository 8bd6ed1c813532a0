"""`qlcontrol serve`: the worker listener and the operator's socket in one process, from start to SIGTERM.

When both listen, one JSON line on standard output tells the port; everything else goes to the log on standard error.
"""

import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partial

import trio

from ..domain.errors import Misconfigured
from .artifact_choice import open_store
from .config import Settings
from .credentials import authenticate
from .database import Database
from .ingress import create_ingress
from .installation import PEPPER_BYTES
from .listener import bind_tcp, bind_unix, serve_listener, server_context
from .live_output import LiveOutput
from .logs import JsonLog
from .maintenance import maintain
from .operator import create_operator
from .private_files import make_private_directory, read_private_file
from .secret_store import SecretStore
from .terminal import show_line_json


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises Misconfigured, Refused or OwnershipHeld when it cannot start; nothing is listening then.
    """
    os.umask(0o077)
    trio.run(_serve, settings, JsonLog())


async def _serve(settings: Settings, log: JsonLog) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        pepper = read_private_file(settings.storage.pepper, 4096)
        if len(pepper) != PEPPER_BYTES:
            raise Misconfigured(f"cannot use {settings.storage.pepper}: a pepper is exactly {PEPPER_BYTES} bytes")
        context = server_context(settings.tls)
        make_private_directory(settings.storage.data)
        database = Database(settings.database_url, connections=settings.storage.connections)
        try:
            database.upgrade()
            # Both are taken over by their listeners; until then, leaving closes them.
            with (
                bind_tcp(settings.listen.host, settings.listen.port) as workers,
                bind_unix(settings.operator.socket) as commands,
            ):
                await _listen(settings, log, database, pepper, context, workers, commands, signals)
        finally:
            database.close()
        log.info("control_plane_stopped")


async def _listen(
    settings: Settings,
    log: JsonLog,
    database: Database,
    pepper: bytes,
    context: ssl.SSLContext,
    workers: socket.socket,
    commands: socket.socket,
    signals: AsyncIterator[int],
) -> None:
    port: int = workers.getsockname()[1]
    origin = settings.origin(port)
    stopping = trio.Event()
    artifacts, live = open_store(settings), LiveOutput(settings.storage.live)
    ingress = create_ingress(
        database,
        authenticate=authenticate,
        pepper=pepper,
        secrets=SecretStore(settings.storage.secrets),
        artifacts=artifacts,
        live=live,
        settings=settings,
        log=log,
    )
    operator = create_operator(
        database,
        pepper=pepper,
        secrets=settings.storage.secrets,
        artifacts=artifacts,
        live=live,
        origin=origin,
        stopping=stopping,
        log=log,
    )
    serve = partial(serve_listener, handshake_timeout_s=settings.tls.handshake_timeout_s, stopping=stopping, log=log)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, ingress, workers, context=context), name="worker listener")
        await nursery.start(partial(serve, operator, commands, context=None), name="operator listener")
        nursery.start_soon(maintain, database, artifacts, settings, stopping, log)
        log.info("control_plane_ready", port=port, origin=origin)
        show_line_json({"event": "ready", "port": port, "origin": origin, "pid": os.getpid()})
        received = await anext(aiter(signals))
        log.info("control_plane_stopping", signal=signal.Signals(received).name)
        ingress.draining = True
        stopping.set()
    settings.operator.socket.unlink(missing_ok=True)
