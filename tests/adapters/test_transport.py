"""The link to the control plane against a real TLS server: what gets through, what is refused, and what never leaks."""

import hashlib
import json
import socket
import ssl
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from qlworker.adapters.credentials import Material
from qlworker.adapters.transport import HttpsLink
from qlworker.domain.canonical import js_json
from qlworker.domain.errors import (
    Corrupt,
    Fenced,
    Malformed,
    Misconfigured,
    QlworkerError,
    Refused,
    Transient,
    Unauthorized,
    Unsupported,
)
from qlworker.ports import SealedOutput

from .. import pki
from ..builders import SESSION_ID, TOKEN
from ..tls_server import Seen, TlsServer, half_then_silence, mute, reply, silence, tls_server

LONG_S = 30.0
BODY = json.dumps({"leaseToken": TOKEN}).encode()


@pytest.fixture
def files(tmp_path: Path) -> pki.Files:
    return pki.Files(tmp_path / "credentials").write()


def make_link(server: TlsServer | str, files: pki.Files, *, timeout_s: float = LONG_S) -> HttpsLink:
    origin = server if isinstance(server, str) else server.origin
    return HttpsLink(origin, "edge-1", files.credentials(), request_timeout_s=timeout_s, log=pki.Events())


async def call(link: HttpsLink, operation: str = "heartbeat", *, limit: int = 4096) -> bytes:
    return await link.call(SESSION_ID, operation, BODY, request_limit=4096, response_limit=limit)


async def failure(link: HttpsLink, kind: type[QlworkerError], *, limit: int = 4096) -> str:
    """The text of the error a call ends with, after looking that it shows no token."""
    with pytest.raises(kind) as caught:
        await call(link, limit=limit)
    assert type(caught.value) is kind
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(link) + str(vars(link))
    for token in (pki.make_token(), pki.make_token()[-43:], TOKEN):
        assert token not in shown
    return str(caught.value)


def open_sockets() -> int:
    return sum(str(fd.readlink()).startswith("socket:") for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def has_ipv6_loopback() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


# What is sent


async def test_an_exchange_carries_exactly_the_headers_of_the_contract(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = reply(body=b'{"a":1}')
        link = make_link(server, files)
        assert await call(link, "start-failure") == b'{"a":1}'
        await link.aclose()
    [seen] = server.seen
    request_id = seen.headers.pop("x-request-id")
    assert 1 <= len(request_id) <= 128 and request_id.isalnum()
    assert seen.method == "POST"
    assert seen.path == f"/api/v3/worker-ingress/workers/edge-1/sessions/{SESSION_ID}/start-failure"
    assert seen.body == BODY
    assert seen.subject == "edge-1"
    assert seen.headers == {
        "host": f"localhost:{server.port}",
        "authorization": f"Worker {pki.make_token()}",
        "accept": "application/json",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": str(len(BODY)),
        "user-agent": "qlworker/0.1.0",
    }


async def test_exchanges_one_after_another_share_a_connection_and_store_no_cookie(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = reply(headers={"Set-Cookie": "a=b"})
        link = make_link(server, files)
        for _ in range(5):
            await call(link)
        await link.aclose()
    assert server.handshakes == 1
    assert all("cookie" not in seen.headers for seen in server.seen)


async def test_a_connection_the_server_closed_in_between_is_replaced_unnoticed(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = reply(headers={"Connection": "close"})
        link = make_link(server, files)
        for _ in range(3):
            await call(link)
        await link.aclose()
    assert server.handshakes == 3


async def test_an_unknown_operation_or_an_oversized_body_never_reaches_the_wire(files: pki.Files) -> None:
    link = make_link("https://localhost:1", files)
    for operation in ("artifacts", "attestations", "../heartbeat", ""):
        with pytest.raises(ValueError, match="not an operation"):
            await call(link, operation)
    with pytest.raises(ValueError, match="at most 10 bytes"):
        await link.call(SESSION_ID, "heartbeat", b"x" * 11, request_limit=10, response_limit=10)
    with pytest.raises(ValueError, match="sessionId"):
        await link.call("../x", "heartbeat", b"{}", request_limit=10, response_limit=10)


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "https://user@localhost",
        "https://user:secret-word@localhost",
        "https://localhost/api",
        "https://localhost//",
        "https://localhost?",
        "https://localhost/?a=b",
        "https://localhost#",
        "https://localhost:0",
        "https://localhost:65536",
        "https://local host",
        "https://localhost\n",
        "https://[::g]",
        "https://[::1%25eth0]",
        "https://" + "a" * 64,
        "https://" + "a." * 1100 + "a",
        "https://",
        "localhost",
        "",
    ],
)
def test_an_origin_with_anything_but_https_host_and_port_is_refused(files: pki.Files, origin: str) -> None:
    with pytest.raises(Misconfigured, match="origin must be https") as caught:
        make_link(origin, files)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(("bind", "host"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "LOCALHOST"), ("::1", "[::1]")])
async def test_names_and_address_literals_are_verified_alike(files: pki.Files, bind: str, host: str) -> None:
    if bind == "::1" and not has_ipv6_loopback():
        pytest.skip("no IPv6 loopback here")
    async with tls_server(host=bind) as server:
        link = make_link(f"https://{host}:{server.port}/", files)
        assert await call(link) == b"{}"
        await link.aclose()


async def test_nothing_of_the_environment_is_used(files: pki.Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login a password b\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        await link.aclose()
    assert server.seen[0].headers["authorization"].startswith("Worker ")
    assert not (tmp_path / "keys").exists()


async def test_no_public_certificate_bundle_is_ever_loaded(files: pki.Files, monkeypatch: pytest.MonkeyPatch) -> None:
    import certifi

    def forbidden(*_: object, **__: object) -> None:
        pytest.fail("a default trust store was loaded")

    monkeypatch.setattr(certifi, "where", forbidden)
    for name in ("load_default_certs", "set_default_verify_paths"):
        monkeypatch.setattr(ssl.SSLContext, name, forbidden)
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        await link.aclose()


def test_importing_the_link_loads_nothing_a_steady_worker_does_not_need() -> None:
    code = (
        "import sys, qlworker.adapters.transport; sys.exit(bool({'cryptography', 'psutil', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Who answers


async def test_without_a_client_certificate_there_is_no_exchange(files: pki.Files) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=pki.authority().certificate.decode())

    class Bare:
        def load(self) -> Material:
            return msgspec.structs.replace(files.credentials().load(), context=bare)

    async with tls_server() as server:
        link = HttpsLink(server.origin, "edge-1", Bare(), request_timeout_s=LONG_S, log=pki.Events())
        await failure(link, Transient)
        await link.aclose()
    assert server.seen == [] and server.handshakes == 0


async def test_a_server_that_trusts_another_ca_gets_no_exchange(files: pki.Files) -> None:
    async with tls_server(pki.server_context(client_ca="other CA")) as server:
        link = make_link(server, files)
        assert await failure(link, Transient)
        await link.aclose()
    assert server.seen == []


@pytest.mark.req("R504")
async def test_a_server_of_another_ca_is_not_told_anything(files: pki.Files) -> None:
    async with tls_server(pki.server_context("other CA", client_ca="test CA")) as server:
        link = make_link(server, files)
        assert "tls: certificate verify failed" in await failure(link, Transient)
        await link.aclose()
    assert server.seen == [] and server.handshakes == 0


@pytest.mark.req("R504")
async def test_a_server_with_another_name_is_not_told_anything(files: pki.Files) -> None:
    async with tls_server(pki.server_context(identity=pki.server_identity(names=("elsewhere.lan",)))) as server:
        link = make_link(server, files)
        assert "hostname mismatch" in await failure(link, Transient)
        await link.aclose()
    assert server.seen == []


async def test_a_server_that_stops_at_tls_1_2_is_refused(files: pki.Files) -> None:
    context = pki.server_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with tls_server(context) as server:
        link = make_link(server, files)
        text = await failure(link, Transient)
        assert text.startswith("tls: ") and "handshake" in text
        await link.aclose()
    assert server.handshakes == 0


async def test_a_server_that_is_not_there_cannot_be_connected_to(files: pki.Files) -> None:
    async with tls_server() as server:
        pass
    assert "cannot connect: connection refused" in await failure(make_link(server, files), Transient)


async def test_a_name_that_does_not_resolve_cannot_be_connected_to(files: pki.Files) -> None:
    assert (await failure(make_link("https://control.invalid", files), Transient)).startswith("cannot connect: ")


async def test_a_server_that_speaks_no_tls_is_a_clear_error(files: pki.Files) -> None:
    async def plain(tcp: trio.SocketStream) -> None:
        await tcp.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await trio.sleep_forever()

    async with tls_server() as server:
        server.greeting = plain
        assert "tls: " in await failure(make_link(server, files), Transient)


# What is answered


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Malformed),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, Unsupported),
        (405, Transient),
        (409, Fenced),
        (413, Malformed),
        (415, Malformed),
        (418, Transient),
        (429, Transient),
        (500, Transient),
        (502, Transient),
        (503, Transient),
        (504, Transient),
        (201, Transient),
        (599, Transient),
    ],
)
@pytest.mark.req("R381")
async def test_each_status_is_its_error_and_shows_only_a_well_formed_code(
    files: pki.Files, status: int, kind: type[QlworkerError]
) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        server.answer = reply(status, b'{"code":"worker_offer_fenced","leaseToken":"' + TOKEN.encode() + b'"}')
        assert await failure(link, kind) == f"the control plane answered {status} worker_offer_fenced"
        for body in (b'{"code":"' + TOKEN.encode() + b'-X"}', b'{"code":"' + b"a" * 65 + b'"}', b"\xff", b"[]", b""):
            server.answer = reply(status, body)
            assert await failure(link, kind) == f"the control plane answered {status}"
        await link.aclose()
    assert server.handshakes == 1


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("601", 600.0),
        ("9" * 10, 600.0),
        ("9" * 40, None),
        ("-1", None),
        ("Wed, 21 Oct", None),
        ("", None),
    ],
)
async def test_retry_after_is_understood_in_seconds_and_capped(files: pki.Files, value: str, wait_s: float | None) -> None:
    async with tls_server() as server:
        server.answer = reply(429, headers={"Retry-After": value})
        link = make_link(server, files)
        with pytest.raises(Transient) as caught:
            await call(link)
        await link.aclose()
    assert caught.value.retry_after_s == wait_s


async def test_a_redirect_is_refused_and_not_followed(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        for status in (301, 302, 307, 308):
            server.answer = reply(status, headers={"Location": f"{server.origin}/elsewhere"})
            assert "redirect refused" in await failure(link, Transient)
        await link.aclose()
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"Content-Type": "text/html"}, "captive portal"),
        ({"Content-Type": ""}, "must be application/json"),
        ({"Content-Type": "application/jsonp"}, "must be application/json"),
        ({"Content-Encoding": "gzip"}, "must not be compressed"),
        ({"Content-Length": "4097"}, "at most 4096 bytes"),
        ({"Content-Length": "99999999999999999"}, "at most 4096 bytes"),
    ],
)
async def test_a_200_answer_of_the_wrong_form_is_refused_unread(files: pki.Files, headers: dict[str, str], text: str) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        server.answer = reply(body=b"<html>login</html>", headers=headers)
        assert text in await failure(link, Refused)
        server.answer = reply()
        assert await call(link) == b"{}"
        await link.aclose()


async def test_identity_encoding_and_a_bare_media_type_are_fine(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = reply(headers={"Content-Type": "Application/JSON", "Content-Encoding": "identity"})
        link = make_link(server, files)
        assert await call(link) == b"{}"
        await link.aclose()


async def test_an_answer_may_fill_its_limit_but_not_pass_it(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        server.answer = reply(body=b"x" * 4096)
        assert len(await call(link)) == 4096
        server.answer = reply(body=b"x")
        assert "at least 2 bytes" in await failure(link, Refused)
        await link.aclose()


@pytest.mark.parametrize("status", [200, 500])
async def test_an_endless_answer_is_cut_while_it_is_read(
    files: pki.Files, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    received = 0
    original = trio.SSLStream.receive_some

    async def endless(stream: trio.abc.Stream, seen: Seen) -> None:
        await stream.send_all(f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\n".encode())
        await stream.send_all(b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            await stream.send_all(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")

    async def counted(stream: "trio.SSLStream[trio.SocketStream]", max_bytes: int | None = None) -> bytes | bytearray:
        nonlocal received
        data = await original(stream, max_bytes)
        if not stream.server_side:
            received += len(data)
        return data

    monkeypatch.setattr(trio.SSLStream, "receive_some", counted)
    async with tls_server() as server:
        server.answer = endless
        link = make_link(server, files)
        if status == 200:
            assert "at most 100000 bytes" in await failure(link, Refused, limit=100_000)
        else:
            assert await failure(link, Transient) == "the control plane answered 500"
        await server.until(lambda: server.live == 0)
        server.answer = reply()
        assert await call(link) == b"{}"
        await link.aclose()
    assert received < 100_000 + 2 * 65536


async def test_an_answer_that_ends_half_way_is_no_answer(files: pki.Files) -> None:
    async def half(stream: trio.abc.Stream, seen: Seen) -> None:
        await reply(body=b'{"a":', length=100)(stream, seen)
        await stream.aclose()

    async with tls_server() as server:
        link = make_link(server, files)
        server.answer = half
        assert "while reading the answer" in await failure(link, Transient)
        server.answer = reply()
        assert await call(link) == b"{}"
        await link.aclose()


async def test_an_answer_that_is_not_http_is_a_clear_error(files: pki.Files) -> None:
    async def noise(stream: trio.abc.Stream, seen: Seen) -> None:
        await stream.send_all(b"SSH-2.0-x\r\n" + seen.headers["authorization"].encode() + b"\r\n\r\n")
        await trio.sleep_forever()

    async with tls_server() as server:
        server.answer = noise
        assert "no valid http" in await failure(make_link(server, files), Transient)


async def test_a_server_that_never_answers_times_out_and_says_where(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = silence
        assert "timed out while waiting for the answer" in await failure(make_link(server, files, timeout_s=0.3), Transient)
        server.answer = half_then_silence
        assert "timed out while reading the answer" in await failure(make_link(server, files, timeout_s=0.3), Transient)
        server.greeting = mute
        assert "timed out in the tls handshake" in await failure(make_link(server, files, timeout_s=0.3), Transient)


async def test_a_dripping_answer_is_cut_by_the_deadline_of_the_whole(files: pki.Files) -> None:
    async def drip(stream: trio.abc.Stream, seen: Seen) -> None:
        await stream.send_all(b"HTTP/1.1 200 x\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n")
        while True:
            await stream.send_all(b"x")
            await trio.sleep(0.01)

    async with tls_server() as server:
        server.answer = drip
        assert "timed out while reading the answer" in await failure(make_link(server, files, timeout_s=0.4), Transient)


# Rotation


async def test_a_new_certificate_on_disk_is_used_by_the_next_exchange(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        files.write(pki.worker_identity("edge-1-renewed"))
        await call(link)
        await call(link)
        await server.until(lambda: server.live == 1)
        await link.aclose()
    assert [seen.subject for seen in server.seen] == ["edge-1", "edge-1-renewed", "edge-1-renewed"]
    assert server.handshakes == 2


async def test_a_half_swapped_pair_goes_on_with_the_old_one(files: pki.Files) -> None:
    renewed = pki.worker_identity("edge-1-renewed")
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        files.put(files.certificate, renewed.certificate, 0o644)
        await call(link)
        files.put(files.key, renewed.key, 0o600)
        await call(link)
        await link.aclose()
    assert [seen.subject for seen in server.seen] == ["edge-1", "edge-1", "edge-1-renewed"]


async def test_a_new_token_changes_the_header_and_keeps_the_connection(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        files.write(token=pki.make_token("cred-2", 8))
        await call(link)
        await link.aclose()
    tokens = [seen.headers["authorization"] for seen in server.seen]
    assert tokens == [f"Worker {pki.make_token()}", f"Worker {pki.make_token('cred-2', 8)}"]
    assert server.handshakes == 1


# Cancellation and concurrency


async def test_two_hundred_cancelled_exchanges_leak_neither_slot_nor_socket(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        before = open_sockets()

        async def cancel_when(ready: Callable[[], bool]) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, link)
                await server.until(ready)
                nursery.cancel_scope.cancel()

        async def cancel_after(checkpoints: int) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, link)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()

        for _ in range(50):
            accepted, asked = server.accepted, len(server.seen)
            server.greeting, server.answer = mute, reply()
            # The idle connection is still good the first time; then each exchange connects and hangs before TLS.
            await cancel_when(lambda a=accepted, n=asked: server.accepted > a or len(server.seen) > n)
            server.greeting = None
            for answer in (silence, half_then_silence):
                asked, server.answer = len(server.seen), answer
                await cancel_when(lambda n=asked: len(server.seen) > n)
        server.answer = reply()
        for checkpoints in range(50):
            await cancel_after(checkpoints)
        await link.aclose()
        await server.until(lambda: server.live == 0)
        link = make_link(server, files)
        assert await call(link) == b"{}"
        assert open_sockets() <= before
        await link.aclose()


async def test_the_same_link_still_works_after_being_cancelled_at_every_point(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        for checkpoints in range(120):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(call, link)
                    for _ in range(checkpoints):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert await call(link) == b"{}"
        await server.until(lambda: server.live <= 1)
        await link.aclose()
        await server.until(lambda: server.live == 0)


async def test_many_callers_share_two_connections_and_all_are_served(files: pki.Files) -> None:
    together = 0
    most = 0

    async def counting(stream: trio.abc.Stream, seen: Seen) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await trio.lowlevel.checkpoint()
        together -= 1
        await reply()(stream, seen)

    async with tls_server() as server:
        server.answer = counting
        link = make_link(server, files)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(call, link)
        assert len(server.seen) == 20 and most <= 2
        await server.until(lambda: server.live == 1)
        await link.aclose()


async def test_a_caller_that_gets_no_turn_is_told(files: pki.Files) -> None:
    async with tls_server() as server:
        server.answer = silence
        link = make_link(server, files, timeout_s=0.3)
        texts: list[str] = []

        async def one() -> None:
            texts.append(await failure(link, Transient))

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(one)
        assert any("before this one" in text for text in texts) and any("for the answer" in text for text in texts)
        await link.aclose()


async def test_a_closed_link_closes_its_connection_and_refuses_more(files: pki.Files) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        await call(link)
        await link.aclose()
        await server.until(lambda: server.live == 0)
        assert "closed" in await failure(link, Transient)
        await link.aclose()


# Uploads

PREAMBLE = json.dumps({"schema": "x", "leaseToken": TOKEN}).encode()


def sealed(path: Path, data: bytes, *, length: int | None = None) -> SealedOutput:
    path.write_bytes(data)
    return SealedOutput(
        path=path, byte_length=len(data) if length is None else length, sha256=hashlib.sha256(data).hexdigest(), truncated=False
    )


async def test_an_upload_is_length_preamble_and_exactly_the_sealed_bytes(files: pki.Files, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    output = sealed(tmp_path / "log", data + b"appended later", length=len(data))
    async with tls_server() as server:
        link = make_link(server, files)
        assert await link.upload(SESSION_ID, PREAMBLE, output, response_limit=4096) == b"{}"
        await server.until(lambda: server.live == 0)
        await link.aclose()
    [seen] = server.seen
    assert seen.body == struct.pack(">I", len(PREAMBLE)) + PREAMBLE + data
    assert seen.headers["content-length"] == str(4 + len(PREAMBLE) + len(data))
    assert seen.headers["content-type"] == "application/vnd.qinglong.worker-artifact"
    assert "transfer-encoding" not in seen.headers
    assert seen.path.endswith("/artifacts")


async def test_the_framing_is_that_of_the_golden_vectors(files: pki.Files, tmp_path: Path) -> None:
    vectors = json.loads((Path(__file__).parent.parent / "vectors" / "vectors.json").read_bytes())
    cases = [case for case in vectors["digests"] if case["kind"] == "artifactPreamble"]
    assert cases
    async with tls_server() as server:
        link = make_link(server, files)
        for case in cases:
            length = case["input"]["byteLength"]
            header = js_json(case["input"])
            await link.upload(SESSION_ID, header, sealed(tmp_path / "log", b"x" * length), response_limit=4096)
            framed = server.seen[-1].body[: len(server.seen[-1].body) - length]
            assert framed.hex() == case["expected"]
        await link.aclose()


@pytest.mark.parametrize("length", [0, 1, 65536, 65537])
async def test_uploads_of_edge_lengths_arrive_whole(files: pki.Files, tmp_path: Path, length: int) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        await link.upload(SESSION_ID, PREAMBLE, sealed(tmp_path / "log", b"y" * length), response_limit=4096)
        await link.aclose()
    assert len(server.seen[0].body) == 4 + len(PREAMBLE) + length


async def test_calls_are_answered_while_uploads_hang(files: pki.Files, tmp_path: Path) -> None:
    release = trio.Event()
    output = sealed(tmp_path / "log", b"z" * 10_000)

    async def answer(stream: trio.abc.Stream, seen: Seen) -> None:
        if seen.path.endswith("/artifacts"):
            await release.wait()
        await reply()(stream, seen)

    async with tls_server() as server:
        server.answer = answer
        link = make_link(server, files)

        async def upload() -> None:
            await link.upload(SESSION_ID, PREAMBLE, output, response_limit=4096)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(upload)
            await server.until(lambda: len(server.seen) == 1)
            for _ in range(3):
                assert await call(link) == b"{}"
            release.set()
        await link.aclose()
    assert sum(seen.path.endswith("/artifacts") for seen in server.seen) == 4


async def test_a_sealed_file_that_is_too_short_missing_or_no_file_is_corrupt(files: pki.Files, tmp_path: Path) -> None:
    async with tls_server() as server:
        link = make_link(server, files)
        wrong = [
            sealed(tmp_path / "short", b"abc", length=4),
            SealedOutput(path=tmp_path / "absent", byte_length=1, sha256="", truncated=False),
            SealedOutput(path=tmp_path, byte_length=1, sha256="", truncated=False),
        ]
        for output in wrong:
            with pytest.raises(Corrupt, match=str(output.path)):
                await link.upload(SESSION_ID, PREAMBLE, output, response_limit=4096)
        await link.aclose()
    assert server.accepted == 0


async def test_a_file_that_shrinks_during_the_upload_is_corrupt(files: pki.Files, tmp_path: Path) -> None:
    output = sealed(tmp_path / "log", b"x" * 300_000)

    async def shrink(tcp: trio.SocketStream) -> None:
        output.path.write_bytes(b"x" * 70_000)

    async with tls_server() as server:
        server.greeting = shrink
        link = make_link(server, files)
        with pytest.raises(Corrupt, match="must have 300000 bytes, has 70000"):
            await link.upload(SESSION_ID, PREAMBLE, output, response_limit=4096)
        await server.until(lambda: server.accepted == 1 and server.live == 0)
        await link.aclose()
    assert server.seen == []


@pytest.mark.parametrize("status", [409, 413, 503])
async def test_a_refused_upload_is_the_error_of_its_status(files: pki.Files, tmp_path: Path, status: int) -> None:
    kinds = {409: Fenced, 413: Malformed, 503: Transient}
    async with tls_server() as server:
        server.answer = reply(status)
        link = make_link(server, files)
        with pytest.raises(kinds[status]):
            await link.upload(SESSION_ID, PREAMBLE, sealed(tmp_path / "log", b"abc"), response_limit=4096)
        await link.aclose()


async def test_cancelled_uploads_leave_no_descriptor(files: pki.Files, tmp_path: Path) -> None:
    async with tls_server() as server:
        server.answer = silence
        link = make_link(server, files)
        output = sealed(tmp_path / "log", b"x" * 1_000_000)
        before = descriptors()
        for number in range(20):
            async with trio.open_nursery() as nursery:

                async def upload() -> None:
                    await link.upload(SESSION_ID, PREAMBLE, output, response_limit=4096)

                nursery.start_soon(upload)
                await server.until(lambda n=number: len(server.seen) > n)
                nursery.cancel_scope.cancel()
        await server.until(lambda: server.live == 0)
        assert descriptors() <= before
        await link.aclose()


async def test_a_preamble_outside_its_bounds_is_a_programming_error(files: pki.Files, tmp_path: Path) -> None:
    link = make_link("https://localhost:1", files)
    for preamble in (b"", b"x", b"x" * 4097):
        with pytest.raises(ValueError, match="preamble"):
            await link.upload(SESSION_ID, preamble, sealed(tmp_path / "log", b""), response_limit=4096)
