"""The commands' side of the operator's socket. Synchronous: a command does one thing and ends."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from ..domain.errors import Misconfigured, QlworkerError, Transient
from .operator_api import Failure

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(30, connect=5)


class Operator:
    """Talks to the server behind the Unix socket `path`."""

    def __init__(self, path: Path) -> None:
        self._socket = path
        # The environment's proxies have no business on a Unix socket.
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://qlcontrol", timeout=_TIMEOUT, trust_env=False
        )

    def __enter__(self) -> "Operator":
        # Looked at first because httpcore leaves a Unix socket that cannot be connected to the garbage collector.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError as error:
                raise self._unreachable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def call(self, kind: type[T], method: str, path: str, body: object = None, **query: object) -> T:
        """The answer as `kind`. `body` is sent as JSON, or as it is when it is bytes; a query member that is None is left out.

        Raises Misconfigured for a request the server finds malformed, Transient when there is no server, QlworkerError for
        everything it refuses.
        """
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        with self._translated():
            response = self._client.request(method, path, content=content, params=_given(query))
        _require_success(response.status_code, response.content)
        return msgspec.json.decode(response.content, type=kind)

    def stream(self, path: str, **query: object) -> Iterator[bytes]:
        """The answer's bytes as they come, without a limit on the silence between them."""
        with (
            self._translated(),
            self._client.stream("GET", path, params=_given(query), timeout=httpx.Timeout(None, connect=5)) as response,
        ):
            if response.status_code != 200:
                response.read()
                _require_success(response.status_code, response.content)
            yield from response.iter_raw()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Transient:
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        return Transient(f"cannot reach the control plane at {self._socket}: {reason}; is qlcontrol serve running?")


def _given(query: dict[str, object]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _require_success(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        text = msgspec.json.decode(content, type=Failure).error
    except msgspec.MsgspecError:
        text = f"the control plane answered with status {status}"
    raise Misconfigured(text) if status == 400 else QlworkerError(text)
