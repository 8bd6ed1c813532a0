"""A real TLS server on loopback whose every answer is scripted by the test."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from . import pki


class Seen(msgspec.Struct, frozen=True):
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    subject: str


Answer = Callable[[trio.abc.Stream, Seen], Awaitable[None]]
Greeting = Callable[[trio.SocketStream], Awaitable[None]]


def reply(
    status: int = 200, body: bytes = b"{}", headers: dict[str, str] | None = None, *, length: int | None = None
) -> Answer:
    """An answer with these headers over the defaults of the contract; `length` lies about the body."""
    merged = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body) if length is None else length)}
    merged |= headers or {}
    head = f"HTTP/1.1 {status} x\r\n" + "".join(f"{name}: {value}\r\n" for name, value in merged.items() if value) + "\r\n"

    async def answer(stream: trio.abc.Stream, seen: Seen) -> None:
        await stream.send_all(head.encode() + body)

    return answer


async def until_gone(stream: trio.abc.Stream) -> None:
    """Reads until the peer closes: a silent server whose connection still counts as live exactly as long as it is."""
    while await stream.receive_some(65536):
        pass


async def mute(tcp: trio.SocketStream) -> None:
    """A greeting that never comes to TLS."""
    await until_gone(tcp)


async def silence(stream: trio.abc.Stream, seen: Seen) -> None:
    """Never answers."""
    await until_gone(stream)


async def half_then_silence(stream: trio.abc.Stream, seen: Seen) -> None:
    """Answers half and stays open."""
    await stream.send_all(b"HTTP/1.1 200 x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    await until_gone(stream)


class TlsServer:
    """State of a running server. `answer` and `greeting` may be replaced at any time.

    `greeting` gets each accepted socket before TLS; when it returns the handshake begins.
    """

    def __init__(self, context: ssl.SSLContext, port: int) -> None:
        self.context = context
        self.port = port
        self.answer: Answer = reply()
        self.greeting: Greeting | None = None
        self.seen: list[Seen] = []
        self.accepted = 0
        self.handshakes = 0
        self.live = 0
        self._change = trio.Condition()

    @property
    def origin(self) -> str:
        return f"https://localhost:{self.port}"

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Returns once `predicate()` holds; looked at whenever the server's state changed. 20 s at most."""
        with trio.fail_after(20):
            async with self._change:
                while not predicate():
                    await self._change.wait()

    async def notify(self) -> None:
        """Says that something changed."""
        async with self._change:
            self._change.notify_all()

    async def _count(self, live: int) -> None:
        self.live += live
        self.accepted += live > 0
        with trio.CancelScope(shield=True):
            await self.notify()

    async def serve(self, tcp: trio.SocketStream) -> None:
        await self._count(1)
        stream = trio.SSLStream(tcp, self.context, server_side=True, https_compatible=True)
        try:
            if self.greeting is not None:
                await self.greeting(tcp)
            await stream.do_handshake()
            self.handshakes += 1
            await self._requests(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
                await tcp.aclose()
            await self._count(-1)

    async def _requests(self, stream: "trio.SSLStream[trio.SocketStream]") -> None:
        certificate = stream.getpeercert() or {}
        subject = dict(pair for group in certificate.get("subject", ()) for pair in group).get("commonName", "")
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some(65536)
                if not more:
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", 0))
            while len(data) < length:
                more = await stream.receive_some(65536)
                if not more:
                    return
                data += more
            method, path, _ = first.split(" ")
            seen = Seen(method, path, headers, data[:length], subject)
            data = data[length:]
            self.seen.append(seen)
            await self.notify()
            await self.answer(stream, seen)


@asynccontextmanager
async def tls_server(context: ssl.SSLContext | None = None, *, host: str = "127.0.0.1") -> AsyncIterator[TlsServer]:
    """A server on a free port; every connection is closed at the end."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host=host)
        server = TlsServer(context or pki.server_context(), listener.socket.getsockname()[1])
        nursery.start_soon(trio.serve_listeners, server.serve, [listener])
        yield server
        nursery.cancel_scope.cancel()
