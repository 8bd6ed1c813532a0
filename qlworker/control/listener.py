"""One HTTP listener of the control plane: an application on a bound socket, with or without TLS, served by Hypercorn on trio.

What a client may send, and how long it may take, is bounded here; what the TLS side asks of it, in `tls`.
"""

import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import hypercorn
import hypercorn.trio
import trio

from ..domain.errors import Misconfigured, OwnershipHeld
from .logs import JsonLog
from .private_files import make_private_directory
from .tls import TlsSide

HEADER_BYTES: Final = 16 * 1024
HEADERS: Final = 64
KEEP_ALIVE_S: Final = 5
REQUESTS_PER_CONNECTION: Final = 100
BACKLOG: Final = 128
GRACE_S: Final = 3
"""How long requests under way may take after a stop."""

Application = Callable[[Any, Any, Any], Awaitable[None]]


def bind_tcp(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Raises Misconfigured when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Misconfigured(f"cannot listen on {host}: {error.strerror}; correct listen.host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise Misconfigured(f"cannot listen on {host} port {port}: {error.strerror}; correct listen.port") from error
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A bound, not yet listening Unix socket of mode 0600 in a private directory; one left by a dead process is replaced.

    Raises OwnershipHeld when somebody answers there, Refused when the directory is open to others.
    """
    make_private_directory(path.parent)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                raise OwnershipHeld(f"another control plane answers on {path}; stop it first")
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        # Nobody can connect before listen(), so there is no moment at which a wider mode matters.
        path.chmod(0o600)
    except OSError as error:
        bound.close()
        raise Misconfigured(f"cannot make the socket {path}: {error.strerror}") from error
    return bound


async def serve_listener(
    application: Application,
    bound: socket.socket,
    *,
    tls: TlsSide | None,
    handshake_timeout_s: float,
    stopping: trio.Event,
    log: JsonLog,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stopping` is set and then finishes what is under way, for 3 s at most. Takes the socket over."""
    config = _Listener(tls, log)
    config.bind = [f"fd://{bound.detach()}"]
    config.ssl_handshake_timeout = handshake_timeout_s
    async with trio.open_nursery() as nursery:
        await nursery.start(_serve, _guarded(application, tls), config, stopping)
        task_status.started()


async def _serve(
    application: Application,
    config: hypercorn.Config,
    stopping: trio.Event,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    await hypercorn.trio.serve(
        application,
        config,
        shutdown_trigger=stopping.wait,
        task_status=task_status,
        mode="asgi",
    )


class _Listener(hypercorn.Config):
    """Hypercorn's settings, and its TLS context replaced by ours: its own one starts at TLS 1.2."""

    def __init__(self, tls: TlsSide | None, log: JsonLog) -> None:
        super().__init__()
        self._tls = tls
        self.accesslog = None
        self.errorlog = None
        self._log = _ServerLog(self, log)
        self.backlog = BACKLOG
        self.graceful_timeout = GRACE_S
        self.h11_max_incomplete_size = HEADER_BYTES
        self.include_server_header = False
        self.keep_alive_timeout = KEEP_ALIVE_S
        self.keep_alive_max_requests = REQUESTS_PER_CONNECTION

    @property
    def ssl_enabled(self) -> bool:
        return self._tls is not None

    def create_ssl_context(self) -> Any:
        """Not an ssl.SSLContext, but all that trio's listener asks of one."""
        return self._tls


class _ServerLog(hypercorn.logging.Logger):
    """Hypercorn's messages as JSON events. An exception is told by type and place: its text may quote a request."""

    def __init__(self, config: hypercorn.Config, log: JsonLog) -> None:
        super().__init__(config)
        self._json = log

    async def access(self, request: Any, response: Any, request_time: float) -> None:
        return

    async def critical(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        self._json.error("listener", message=message)

    async def error(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        self._json.error("listener", message=message)

    async def warning(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        self._json.warning("listener", message=message)

    async def info(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        return

    async def debug(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        return

    async def exception(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        kind, error, _ = sys.exc_info()
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        self._json.error("listener_failed", message=message, kind=kind.__name__ if kind else "", place=place)

    async def log(self, level: int, message: str, *_args: Any, **_kwargs: Any) -> None:
        self._json.info("listener", message=message, level_number=level)


def _guarded(application: Application, tls: TlsSide | None) -> Application:
    """`application` for plain requests with bounded headers; a WebSocket is refused and the lifespan needs nothing.

    Hypercorn bounds only headers that come in pieces: what fits into one read of 64 KiB passes it.
    """

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if len(headers) > HEADERS or sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
                await _refuse_headers(send)
            elif tls is not None and scope.get("client") and tls.is_outdated(tuple(scope["client"])):
                await application(scope, receive, _closing(send))
            else:
                await application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})

    return guarded


def _closing(send: Any) -> Any:
    """Ends the connection behind the answer: it was made under files that have been replaced since."""

    async def closing(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return closing


async def _refuse_headers(send: Any) -> None:
    body = b'{"code":"request_header_too_large"}'
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": body})
