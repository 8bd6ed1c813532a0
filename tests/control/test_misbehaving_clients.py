"""Clients that are slow, greedy or silent on real sockets: each loses its own connection and nobody else's.

Nothing here measures how long something takes: a client waits until the control plane ends it, and would wait for ever if it
did not. Source: wire-protocol.md §1.5, control-plane.md §15.3, R508, R509.
"""

import json
import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.fixtures import SESSION
from tests.control.running import ControlPlane

PATIENCE_S = 60.0
DRIP_S = 0.1
SHORT = "\n[limits]\nrequest_timeout_s = 1\nauthentication_per_peer = 20\n"
NARROW = "\n[limits]\nrequest_timeout_s = 30\nin_flight = 2\n"


class Box:
    """A worker's credentials and the requests it can make of them, on sockets of its own."""

    def __init__(self, server: ControlPlane, directory: Path) -> None:
        self.server = server
        kit = directory / "kit"
        server.out("worker", "add", "edge-1", "--out", str(kit))
        self._context = ssl.create_default_context(cafile=kit / "ca.pem")
        self._context.load_cert_chain(kit / "identity.pem")
        self._token = (kit / "token").read_text().strip()

    def connect(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        """An open connection from that address."""
        plain = socket.create_connection(("127.0.0.1", self.server.port), PATIENCE_S, (source, 0))
        return self._context.wrap_socket(plain, server_hostname="localhost")

    def head(self, length: int, token: str | None = None) -> bytes:
        """Line and headers of a heartbeat whose body has `length` bytes."""
        lines = [
            f"POST /api/v3/worker-ingress/workers/edge-1/sessions/{SESSION}/heartbeat HTTP/1.1",
            "Host: localhost",
            f"Authorization: Worker {token or self._token}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def ask(self, body: bytes = b"{}", *, token: str | None = None, source: str = "127.0.0.1") -> tuple[int, dict[str, Any]]:
        """One whole request on a connection of its own: status and answer."""
        with self.connect(source) as connection:
            connection.sendall(self.head(len(body), token) + body)
            return answer(connection)


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The next answer on a connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65_536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    while len(body) < length:
        body += connection.recv(65_536)
    return int(lines[0].split(" ")[1]), json.loads(body)


def drip(connection: socket.socket, piece: bytes = b"a") -> None:
    """Sends a byte now and then until the other side has something to say, or has gone."""
    while not select.select([connection], [], [], DRIP_S)[0]:
        try:
            connection.sendall(piece)
        except OSError:
            return


def await_end(connection: socket.socket) -> None:
    """Returns when the other side has ended the connection. Raises TimeoutError when it does not."""
    try:
        while connection.recv(65_536):
            pass
    except (ConnectionResetError, ssl.SSLError):
        return


def running(directory: Path, limits: str) -> Iterator[Box]:
    server = ControlPlane(directory / "control")
    with server.config.open("a") as file:
        file.write(limits + "\n[tls]\nhandshake_timeout_s = 1\n")
    with server:
        yield Box(server, directory)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Against a control plane of little patience."""
    yield from running(tmp_path_factory.mktemp("impatient"), SHORT)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Against one that carries out two requests at a time."""
    yield from running(tmp_path_factory.mktemp("narrow"), NARROW)


@pytest.mark.parametrize("listener", ["worker", "enrolment"])
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_does_not_go_on_is_ended(box: Box, listener: str, first: bytes) -> None:
    port = box.server.port if listener == "worker" else int(box.server.ready["enrolment"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as silent:
        silent.sendall(first)

        await_end(silent)
    assert box.ask(source="127.0.0.20")[0] == 400  # a heartbeat without members: it was looked at


def test_headers_that_come_a_byte_at_a_time_are_ended(box: Box) -> None:
    with box.connect() as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")

        drip(slow)

        await_end(slow)


def test_a_connection_that_asks_nothing_is_ended_and_keeps_nobody_else_out(box: Box) -> None:
    idle = [box.connect() for _ in range(20)]

    assert box.ask(source="127.0.0.21")[0] == 400
    for connection in idle:
        with connection:
            await_end(connection)


@pytest.mark.parametrize("piece", [b"", b"a"])
def test_a_body_that_does_not_come_in_time_is_answered_504_and_ended(box: Box, piece: bytes) -> None:
    with box.connect("127.0.0.22") as slow:
        slow.sendall(box.head(60_000) + b"{")

        drip(slow, piece)

        assert answer(slow) == (504, {"code": "request_timeout"})
        await_end(slow)


@pytest.mark.req("R508")
def test_a_body_one_byte_too_long_is_refused_before_it_is_read(box: Box) -> None:
    with box.connect("127.0.0.23") as greedy:
        greedy.sendall(box.head(65_537))

        assert answer(greedy) == (413, {"code": "request_too_large"})
        await_end(greedy)
    assert box.ask(b" " * 65_536, source="127.0.0.23") == (400, {"code": "invalid_json"})


def test_a_client_that_goes_away_in_the_middle_leaves_nothing_behind(narrow: Box) -> None:
    for _ in range(10):
        with narrow.connect() as gone:
            gone.sendall(narrow.head(1_000) + b"{")

    # Each had taken one of two places.
    statuses = {narrow.ask()[0]}
    while 400 not in statuses:
        statuses.add(narrow.ask()[0])
    assert statuses <= {400, 503}


def test_requests_beyond_those_under_way_are_turned_away_and_taken_again_later(narrow: Box) -> None:
    with narrow.connect() as first, narrow.connect() as second:
        for connection in (first, second):
            connection.sendall(narrow.head(2) + b"{")
        status, told = narrow.ask()
        while status != 503:  # until both are under way
            status, told = narrow.ask()
        assert told == {"code": "admission_capacity_exhausted"}

        for connection in (first, second):
            connection.sendall(b"}")
            assert answer(connection)[0] == 400

    while narrow.ask()[0] == 503:
        pass
    assert narrow.ask()[0] == 400


@pytest.mark.req("R509")
def test_a_flood_of_wrong_tokens_shuts_out_its_own_address_alone(box: Box) -> None:
    wrong = "ql3w_018f5c64-9b9d-7f1a-8c2d-1234567890ac_" + "A" * 43

    statuses = [box.ask(token=wrong, source="127.0.0.30")[0] for _ in range(25)]

    assert statuses == [401] * 20 + [429] * 5
    assert box.ask(source="127.0.0.30")[0] == 429  # even with the right one, until the window is over
    assert box.ask(source="127.0.0.31")[0] == 400
