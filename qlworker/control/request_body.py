"""Reading a request's body while counting: never more than was announced or is allowed (wire-protocol.md §1.4)."""

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from .failure import Failure

JSON_TYPE = "application/json"
UPLOAD_TYPE = "application/vnd.qinglong.worker-artifact"


class Incoming:
    """What a client sends, with a memory of whether all of it came."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_over = False

    async def __call__(self) -> Message:
        """The next message of the server."""
        message = await self._receive()
        self.is_over = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self, seconds: float) -> None:
        """Reads what is left and throws it away, for at most `seconds`.

        A client looks for an answer when it has written its request. One that is refused in the middle would wait for
        somebody to read, until its own time is up, and never learn why.
        """
        with trio.move_on_after(seconds):
            while not self.is_over:
                await self()


class Body:
    """The body of one request, whose headers were checked. Read it once, front to back.

    It asks the server itself and not a generator: one that is left half read would be reported when it is collected.
    """

    def __init__(self, receive: Receive, length: int) -> None:
        self.length = length
        self._receive = receive
        self._buffer = bytearray()
        self._seen = 0
        self._is_over = False

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises Failure 400 when the body ends before."""
        while len(self._buffer) < size:
            chunk = await self._next()
            if not chunk:
                raise Failure(400, "content_length_mismatch")
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def piece(self) -> bytes:
        """Some of what is left, or b"" at the end. Raises Failure 400 when the length was not the announced one."""
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            return data
        chunk = await self._next()
        if not chunk and self._seen != self.length:
            raise Failure(400, "content_length_mismatch")
        return chunk

    async def _next(self) -> bytes:
        while not self._is_over:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            self._is_over = not message.get("more_body", False)
            self._seen += len(chunk)
            if self._seen > self.length:
                raise Failure(400, "content_length_mismatch")
            if chunk:
                return chunk
        return b""


def open_body(request: Request, media_type: str, limit: int, minimum: int = 0) -> Body:
    """The body of `request` after its headers were found in order. Raises Failure 400, 413 or 415."""
    sent_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type == UPLOAD_TYPE:
        sent_type = sent_type.lower()
    if sent_type != media_type:
        raise Failure(415, "unsupported_content_type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Failure(415, "unsupported_content_encoding")
    length = announced_length(request)
    if length is None:
        raise Failure(400, "invalid_content_length")
    if length > limit:
        raise Failure(413, "request_too_large")
    if length < minimum:
        raise Failure(400, "invalid_content_length")
    return Body(request.receive, length)


async def read_whole(body: Body) -> bytes:
    """All of a body that may be kept in memory. Raises Failure 400 when it is not as long as was announced."""
    data = bytearray()
    while piece := await body.piece():
        data += piece
    return bytes(data)


def announced_length(request: Request) -> int | None:
    """The body's length in bytes as its headers tell it, or None when they do not."""
    lengths = request.headers.getlist("content-length")
    if len(lengths) != 1 or not _is_decimal(lengths[0]) or "transfer-encoding" in request.headers:
        return None
    return int(lengths[0])


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 16
