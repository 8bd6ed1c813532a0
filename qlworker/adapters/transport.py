"""The worker's mutual-TLS connection to the control plane: one POST, one bounded answer, one clear outcome.

It never retries and never looks into a body; callers decide. It speaks through httpx's transport rather than through its
client, which would keep cookies, write a line per request and read the environment. Every exchange has a connection to
itself while it lasts, so httpcore's own queue is never entered; whatever does not end cleanly takes its connection with it,
because httpcore (issue 1093) loses the slot and the socket of a request cancelled while it connects.
Source: wire-protocol.md §1.2 to §1.8, §13.2 gap 14.
"""

import os
import secrets
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

import httpx
import trio

from .. import __version__
from ..domain.errors import Corrupt, QlworkerError, Refused, Transient
from ..domain.text import check_worker_id
from ..ports import Log, SealedOutput
from ..wire.ingress import OPERATIONS, UPLOAD, checked_origin, form_problem, ingress_path, refusal

MAXIMUM_PREAMBLE_BYTES: Final = 4096
ERROR_BODY_BYTES: Final = 1024
CHUNK_BYTES: Final = 64 * 1024
SLOWEST_UPLOAD_BYTES_PER_S: Final = 8 * 1024
CALL_CONNECTIONS: Final = 2
# The server closes an idle connection after 5 s: be sooner, or a request meets the closing half way.
KEEPALIVE_S: Final = 4.0
CLOSE_S: Final = 2.0

_CONNECTING: Final = "while connecting"
_SENDING: Final = "http11.send_request_headers.started"
_WAITING: Final = "http11.receive_response_headers.started"
_PHASES: Final = {
    "connection.start_tls.started": "in the tls handshake",
    _SENDING: "while sending the request",
    _WAITING: "while waiting for the answer",
    "http11.receive_response_body.started": "while reading the answer",
}
# NOT_YET_VALID and HAS_EXPIRED of OpenSSL: on a box without a battery-backed clock its own clock is the likelier culprit.
_DATE_ERRORS: Final = frozenset({9, 10})


class Bearer(Protocol):
    """The token's text, behind a repr that hides it."""

    def reveal(self) -> str:
        """The text itself."""


class TlsMaterial(Protocol):
    """What one exchange authenticates with."""

    @property
    def token(self) -> Bearer:
        """For the Authorization header."""

    @property
    def pool_key(self) -> str:
        """Changes when a new connection is needed."""

    @property
    def context(self) -> ssl.SSLContext:
        """Verifies the control plane and presents the worker's certificate."""


class Credentials(Protocol):
    """Where the material comes from, asked before every exchange."""

    def load(self) -> TlsMaterial:
        """The material now. Raises Misconfigured when there is none."""


class HttpsLink:
    """The Link of ports.py over HTTPS.

    `origin` is `https://host[:port]` and nothing else, at most 2048 bytes, else Misconfigured. `request_timeout_s` bounds a
    call as a whole, and in an upload each wait for the network; an upload as a whole gets the time that 8 KiB/s need on top.
    At most two calls run at once, and one upload beside them; a call waits up to `request_timeout_s` for its turn.
    """

    def __init__(self, origin: str, worker_id: str, credentials: Credentials, *, request_timeout_s: float, log: Log) -> None:
        self._origin = httpx.URL(checked_origin(origin))
        self._worker_id = check_worker_id(worker_id)
        self._credentials = credentials
        self._timeout_s = request_timeout_s
        self._log = log
        self._calls = trio.CapacityLimiter(CALL_CONNECTIONS)
        self._uploads = trio.CapacityLimiter(1)
        self._idle: _Connection | None = None
        self._pool_key = ""
        self._closed = False

    async def call(self, session_id: str, operation: str, body: bytes, *, request_limit: int, response_limit: int) -> bytes:
        """Posts `body` and returns the answer's body, 2 to `response_limit` bytes of JSON not yet looked at.

        Raises Transient, Malformed, Unsupported, Unauthorized or Fenced by status; Refused when a 200 answer breaks the
        contract; ValueError for an unknown operation or a body above `request_limit` bytes, before anything is sent.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"internal error: {operation!r} is not an operation of the worker ingress")
        if len(body) > request_limit:
            raise ValueError(f"internal error: a {operation} request must be at most {request_limit} bytes")
        url = self._url(session_id, operation)
        with trio.move_on_after(self._timeout_s) as turn:
            await self._calls.acquire()
        if turn.cancelled_caught:
            raise Transient("timed out while waiting for the exchanges before this one")
        try:
            material = self._material()
            connection = await self._take(material)
            request = self._request(url, material, "application/json", len(body), _Bytes(body))
            outcome = await self._exchange(connection, request, response_limit, self._timeout_s)
            await self._give_back(connection)
        finally:
            self._calls.release()
        if isinstance(outcome, QlworkerError):
            raise outcome
        return outcome

    async def upload(self, session_id: str, preamble: bytes, output: SealedOutput, *, response_limit: int) -> bytes:
        """Streams 4 bytes of header length, `preamble` (2 bytes to 4 KiB of JSON) and the sealed bytes, not chunked.

        It has a connection of its own, so it never delays a heartbeat (wire-protocol §13.2, gap 14). Raises what `call`
        raises, and Corrupt when the file cannot be read or is shorter than `output.byte_length`.
        """
        if not 2 <= len(preamble) <= MAXIMUM_PREAMBLE_BYTES:
            raise ValueError(f"internal error: an artifact preamble must be 2 to {MAXIMUM_PREAMBLE_BYTES} bytes")
        url = self._url(session_id, UPLOAD)
        head = len(preamble).to_bytes(4, "big") + preamble
        async with self._uploads:
            material = self._material()
            body = _Artifact(head, output)
            try:
                request = self._request(
                    url, material, "application/vnd.qinglong.worker-artifact", len(head) + output.byte_length, body
                )
                total_s = self._timeout_s + output.byte_length / SLOWEST_UPLOAD_BYTES_PER_S
                connection = _Connection(material)
                outcome = await self._exchange(connection, request, response_limit, total_s)
                await connection.retire()
            finally:
                body.close()
        if isinstance(outcome, QlworkerError):
            raise outcome
        return outcome

    async def aclose(self) -> None:
        """Closes the idle connection now and every other one when its exchange ends. Later exchanges raise Transient."""
        self._closed = True
        idle, self._idle = self._idle, None
        if idle is not None:
            await idle.retire()

    def _url(self, session_id: str, operation: str) -> httpx.URL:
        return self._origin.copy_with(path=ingress_path(self._worker_id, session_id, operation))

    def _material(self) -> TlsMaterial:
        if self._closed:
            raise Transient("the link to the control plane is closed")
        material = self._credentials.load()
        if self._pool_key not in {"", material.pool_key}:
            self._log.info("link_credentials_changed", origin=str(self._origin))
        self._pool_key = material.pool_key
        return material

    def _request(
        self, url: httpx.URL, material: TlsMaterial, content_type: str, length: int, body: httpx.AsyncByteStream
    ) -> httpx.Request:
        headers = {
            "Host": url.netloc.decode("ascii"),
            "Authorization": f"Worker {material.token.reveal()}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": content_type,
            "Content-Length": str(length),
            "User-Agent": f"qlworker/{__version__}",
            "X-Request-Id": secrets.token_hex(16),
        }
        wait = httpx.Timeout(connect=self._timeout_s, read=self._timeout_s, write=self._timeout_s, pool=self._timeout_s)
        return httpx.Request("POST", url, headers=headers, stream=body, extensions={"timeout": wait.as_dict()})

    async def _take(self, material: TlsMaterial) -> "_Connection":
        """The idle connection if it was made with this TLS material, else a new one."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.pool_key == material.pool_key:
            return idle
        if idle is not None:
            await idle.retire()
        return _Connection(material)

    async def _give_back(self, connection: "_Connection") -> None:
        """One idle connection is enough: the second serves the moment and goes."""
        if self._closed or self._idle is not None or connection.pool_key != self._pool_key:
            await connection.retire()
        elif not connection.is_retired:
            self._idle = connection

    @staticmethod
    async def _exchange(
        connection: "_Connection", request: httpx.Request, response_limit: int, total_s: float
    ) -> bytes | QlworkerError:
        """Errors are returned, for the caller to raise: foreign exceptions, whose frames hold headers, stay behind here."""
        progress = _Progress()
        request.extensions["trace"] = progress
        outcome: bytes | QlworkerError | None = None
        try:
            # Waits for the network are bounded one by one; a peer that drips bytes is only cut by the deadline of the whole.
            with trio.move_on_after(total_s):
                outcome = await _round_trip(connection, request, response_limit)
        except (httpx.HTTPError, OSError) as error:
            outcome = Transient(_describe(error, progress))
            await connection.retire(progress.stream)
        except BaseException:
            await connection.retire(progress.stream)
            raise
        if outcome is None:
            await connection.retire(progress.stream)
            outcome = Transient(f"timed out {progress.phase}")
        return outcome


class _Connection:
    """An httpx transport that is only ever used by one exchange at a time, and so holds at most one connection."""

    def __init__(self, material: TlsMaterial) -> None:
        self.pool_key = material.pool_key
        self.is_retired = False
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        self.transport = httpx.AsyncHTTPTransport(verify=material.context, trust_env=False, http2=False, limits=limits)

    async def retire(self, stream: Any = None) -> None:
        """Closes for good, also when the task is being cancelled. `stream` is the socket that an unfinished exchange opened:
        until the handshake is done nobody but us would close it."""
        self.is_retired = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            if stream is not None:
                await stream.aclose()
            await self.transport.aclose()


class _Progress:
    """How far an exchange got, told by httpcore's trace extension."""

    def __init__(self) -> None:
        self.phase = _CONNECTING
        self.stream: Any = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        self.phase = _PHASES.get(event, self.phase)
        if event == "connection.connect_tcp.complete":
            self.stream = info["return_value"]


class _Bytes(httpx.AsyncByteStream):
    """A request body in one piece. An iterator and not a generator: httpcore drops it half way when writing fails, and trio
    complains of a dropped asynchronous generator."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(iter([self._data]))


class _Artifact(httpx.AsyncByteStream):
    """Head and sealed bytes of an upload. Raises Corrupt for a file that is missing, no regular file, or too short."""

    def __init__(self, head: bytes, output: SealedOutput) -> None:
        self._head = head
        self._output = output
        try:
            self._descriptor = os.open(output.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Corrupt(f"cannot open sealed output {output.path}: {os.strerror(error.errno or 0).lower()}") from None
        facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < output.byte_length:
            self.close()
            raise Corrupt(f"sealed output {output.path} must be a regular file of at least {output.byte_length} bytes")

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        yield self._head
        offset = 0
        while offset < self._output.byte_length:
            # Read in place: 64 KiB that were just written cost less than a thread does on a router.
            try:
                piece = os.pread(self._descriptor, min(CHUNK_BYTES, self._output.byte_length - offset), offset)
            except OSError as error:
                reason = os.strerror(error.errno or 0).lower()
                raise Corrupt(f"cannot read sealed output {self._output.path}: {reason}") from None
            if not piece:
                raise Corrupt(f"sealed output {self._output.path} must have {self._output.byte_length} bytes, has {offset}")
            offset += len(piece)
            yield piece

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


class _Pieces(AsyncIterator[bytes]):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    async def __anext__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            raise StopAsyncIteration from None


async def _round_trip(connection: _Connection, request: httpx.Request, limit: int) -> bytes | QlworkerError:
    response = await connection.transport.handle_async_request(request)
    try:
        if response.status_code != 200:
            body, _ = await _read(connection, response, ERROR_BODY_BYTES)
            return refusal(response.status_code, response.headers, body)
        problem = form_problem(response.headers, limit)
        if problem is not None:
            return Refused(f"the control plane's answer {problem}")
        body, is_whole = await _read(connection, response, limit)
        if not is_whole:
            return Refused(f"the control plane's answer must be at most {limit} bytes")
        return body if len(body) >= 2 else Refused("the control plane's answer must have at least 2 bytes")
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            await response.aclose()


async def _read(connection: _Connection, response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes of the body, as sent, and whether that is all of it.

    Beyond the limit the connection is closed and the loop goes on until it notices, rather than being left: httpcore's
    generators then end by themselves and not in the garbage collector.
    """
    assert isinstance(response.stream, httpx.AsyncByteStream)
    body = bytearray()
    is_whole = True
    try:
        async for piece in response.stream:
            room = limit - len(body)
            body += piece[:room]
            if len(piece) > room and is_whole:
                is_whole = False
                await connection.retire()
    except httpx.TransportError:
        if is_whole:
            raise
    return bytes(body), is_whole


def _describe(error: BaseException, progress: _Progress) -> str:
    """What went wrong and in which phase, from codes and fixed texts alone: a foreign text may quote a header."""
    phase = progress.phase
    if isinstance(error, httpx.TimeoutException):
        return f"timed out {phase}"
    cause = _root(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        hint = "; check this box's clock and the certificate's dates" if cause.verify_code in _DATE_ERRORS else ""
        return f"tls: certificate verify failed: {cause.verify_message[:120].lower()}{hint}"
    if isinstance(cause, ssl.SSLError):
        return f"tls: {(cause.reason or 'protocol error').lower().replace('_', ' ')} {phase}"
    what = "connection lost or no valid http" if isinstance(error, httpx.ProtocolError) else "connection lost"
    what = f"{what} {phase}"
    if cause is not None and cause.errno:
        # Name resolution has negative codes of its own, whose texts come from the C library.
        reason = str(cause.strerror) if cause.errno < 0 else os.strerror(cause.errno)
        what = f"{what}: {reason.lower()}"
    if phase == _CONNECTING:
        return what.replace(f"connection lost {phase}", "cannot connect", 1)
    # In TLS 1.3 a server looks at the client's certificate only after the client thinks that the handshake is done.
    is_new = progress.stream is not None and phase in {_PHASES[_SENDING], _PHASES[_WAITING]}
    return what + ("; does the control plane trust this worker's certificate?" if is_new else "")


def _root(error: BaseException) -> OSError | None:
    """The operating system's or OpenSSL's error below httpx's and httpcore's; the deepest that has a code."""
    found: OSError | None = None
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            break
        if isinstance(seen, OSError) and (seen.errno or isinstance(seen, ssl.SSLError)):
            found = seen
        inner = seen.exceptions[0] if isinstance(seen, BaseExceptionGroup) else None
        seen = inner or seen.__cause__ or seen.__context__
    return found
