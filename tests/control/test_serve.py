"""`qlcontrol serve` as a process: TLS, the ready line, signals, and what it refuses to start with."""

import json
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlworker.control.operator_api import AddWorker, IssuedToken, Published, Started, StartRun, Status
from qlworker.control.pki import Identity, issue_server, issue_worker, new_authority
from qlworker.control.task_file import parse_task
from tests.control.running import PROGRAM, ControlPlane

REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("serve") / "control") as running:
        yield running


def adding(worker_id: str) -> AddWorker:
    return AddWorker(worker_id=worker_id, lifetime_s=60, serial="2a", not_after_ms=2**42)


def authority(server: ControlPlane) -> Identity:
    ca = server.directory / "ca"
    return Identity((ca / "certificate.pem").read_bytes(), (ca / "key.pem").read_bytes())


def client(server: ControlPlane, directory: Path, issuer: Identity | None = None) -> ssl.SSLContext:
    """A client context; without `issuer` it shows no certificate."""
    context = ssl.create_default_context(cafile=server.directory / "ca/certificate.pem")
    if issuer is not None:
        identity = issue_worker(issuer, "edge-1")
        (directory / "certificate.pem").write_bytes(identity.certificate)
        (directory / "key.pem").write_bytes(identity.key)
        context.load_cert_chain(directory / "certificate.pem", directory / "key.pem")
    return context


def exchange(server: ControlPlane, context: ssl.SSLContext, request: bytes = REQUEST) -> bytes:
    """The start of the answer; in TLS 1.3 a refused client certificate shows with the first read only."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(request)
        return secure.recv(65_536)


def test_a_client_with_a_certificate_of_the_authority_is_served_over_tls_1_3(server: ControlPlane, tmp_path: Path) -> None:
    context = client(server, tmp_path, authority(server))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(REQUEST)

        assert secure.recv(65_536).startswith(b"HTTP/1.1 200")
        assert secure.version() == "TLSv1.3"
        assert secure.selected_alpn_protocol() == "http/1.1"
        session = secure.session
        assert session is None or not session.has_ticket  # a resumed session would skip the certificate


@pytest.mark.req("R506")
def test_a_client_without_a_certificate_is_refused(server: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        assert exchange(server, client(server, tmp_path)) == b""
        raise ConnectionResetError("closed without an alert")


def test_a_client_with_a_certificate_of_another_authority_is_refused(server: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        assert exchange(server, client(server, tmp_path, new_authority("another authority"))) == b""
        raise ConnectionResetError("closed without an alert")


def test_a_server_certificate_does_not_let_a_client_in(server: ControlPlane, tmp_path: Path) -> None:
    context = client(server, tmp_path)
    context.load_cert_chain(server.directory / "tls/certificate.pem", server.directory / "tls/key.pem")

    with pytest.raises(OSError):
        assert exchange(server, context) == b""
        raise ConnectionResetError("closed without an alert")


def test_tls_1_2_is_refused(server: ControlPlane, tmp_path: Path) -> None:
    context = client(server, tmp_path, authority(server))
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    with pytest.raises(OSError):
        exchange(server, context)


def test_plain_http_is_refused(server: ControlPlane) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
        plain.sendall(REQUEST)
        try:
            answer = plain.recv(65_536)
        except ConnectionResetError:
            answer = b""

    assert b"HTTP" not in answer


@pytest.mark.req("R503")
def test_the_operators_commands_are_not_on_the_network(server: ControlPlane, tmp_path: Path) -> None:
    context = client(server, tmp_path, authority(server))

    for path in (b"/status", b"/workers", b"/runs", b"/task", b"/secrets"):
        answer = exchange(server, context, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.split(b" ", 2)[1] == b"404"


@pytest.mark.parametrize(
    "extra",
    [
        b"X-Filler: " + b"x" * 20_000 + b"\r\n",  # in one piece
        b"X-Filler: " + b"x" * 200_000 + b"\r\n",  # in several
        b"".join(b"X-%d: y\r\n" % number for number in range(70)),
    ],
)
def test_headers_above_16_kib_or_above_64_of_them_are_refused(server: ControlPlane, tmp_path: Path, extra: bytes) -> None:
    context = client(server, tmp_path, authority(server))

    try:
        answer = exchange(server, context, REQUEST[:-2] + extra + b"\r\n")
    except OSError:
        return  # the server may close while the rest is still on its way

    assert answer.split(b" ", 2)[1] in {b"400", b"431"}


def test_the_ready_line_tells_the_bound_port_and_the_log_is_json(server: ControlPlane) -> None:
    with server.operator() as operator:
        status = operator.call(Status, "GET", "/status")

    assert server.ready["event"] == "ready"
    assert server.port > 0
    assert status.origin == server.ready["origin"] == f"https://127.0.0.1:{server.port}"
    assert status.pid == server.ready["pid"]
    events = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert events[0]["event"] == "control_plane_ready"


def test_socket_and_files_are_open_to_their_owner_only(server: ControlPlane) -> None:
    socket_file = server.directory / "run/operator.sock"

    assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
    assert [path for path in server.directory.rglob("*") if path.stat().st_mode & 0o077] == []


def test_a_token_never_reaches_the_log(server: ControlPlane, tmp_path: Path) -> None:
    with server.operator() as operator:
        token = operator.call(IssuedToken, "POST", "/workers", adding("quiet")).token
    context = client(server, tmp_path, authority(server))
    path = "/api/v3/worker-ingress/workers/other/sessions/018f0000-0000-7000-8000-000000000001/heartbeat"
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Worker {token}\r\nContent-Length: 2\r\n\r\n{{}}"

    assert exchange(server, context, request.encode()).split(b" ", 2)[1] == b"401"
    assert token.split("_", 2)[2] not in server.log.read_text()


def test_a_second_server_on_the_same_database_is_refused_for_safety(server: ControlPlane) -> None:
    second = server.run("serve")

    assert second.returncode == 3
    assert b"another control plane" in second.stderr
    with server.operator() as operator:
        assert operator.call(Status, "GET", "/status").pid == server.ready["pid"]


def test_sigterm_ends_it_at_once_with_a_follower_and_an_idle_connection_open(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "control") as server:
        with server.operator() as operator:
            task = parse_task(b'project = "p"\nid = "t"\n[command]\nshell = "true"\n', "t.toml")
            operator.call(Published, "PUT", "/tasks", task)
            run_id = operator.call(Started, "POST", "/runs", StartRun(project="p", task="t")).run_id
        follower = subprocess.Popen(
            [*PROGRAM, "run", "logs", run_id, "--follow", "--config", str(server.config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        context = client(server, tmp_path, authority(server))
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall(REQUEST)
            assert secure.recv(65_536)

            assert server.stop(signal.SIGTERM) == 0

        follower.wait(30)
        assert not (server.directory / "run/operator.sock").exists()


def test_a_killed_server_starts_again_with_what_it_committed(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "control") as server:
        with server.operator() as operator:
            operator.call(IssuedToken, "POST", "/workers", adding("edge-1"))
        server.stop(signal.SIGKILL)
        assert (server.directory / "run/operator.sock").exists()

        server.start()

        with server.operator() as operator:
            assert [each["worker_id"] for each in operator.call(list[dict[str, object]], "GET", "/workers")] == ["edge-1"]


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda directory: (directory / "tls/key.pem").chmod(0o640), 3, ["key.pem", "chmod 0600"]),
        (lambda directory: (directory / "pepper").chmod(0o644), 3, ["pepper", "chmod 0600"]),
        (lambda directory: (directory / "pepper").write_bytes(b"short"), 2, ["pepper", "32 bytes"]),
        (lambda directory: (directory / "pepper").unlink(), 3, ["pepper", "No such file"]),
        (lambda directory: (directory / "tls/certificate.pem").write_bytes(b"nothing"), 2, ["certificate.pem"]),
        (lambda directory: (directory / "ca/certificate.pem").unlink(), 2, ["ca/certificate.pem"]),
        (lambda directory: (directory / "run").chmod(0o755), 3, ["run", "chmod 0700"]),
        (lambda directory: (directory / "qlcontrol.toml").write_text("[listen]\nport = -1\n"), 2, ["listen.port", "-1"]),
        (lambda directory: (directory / "qlcontrol.toml").write_text('[listen]\nhost = "192.0.2.1"\n'), 2, ["192.0.2.1"]),
        (
            lambda directory: (directory / "qlcontrol.toml").write_text('[storage]\ndatabase = "mysql://u:hunter2@h/d"\n'),
            2,
            ["database"],
        ),
    ],
)
def test_it_refuses_to_start_with_a_clear_line(tmp_path: Path, spoil: object, code: int, words: list[str]) -> None:
    server = ControlPlane(tmp_path / "control")
    spoil(server.directory)  # type: ignore[operator]

    done = server.run("serve")

    assert done.returncode == code
    said = done.stderr.decode()
    assert said.count("\n") == 1
    for word in words:
        assert word in said
    assert "hunter2" not in said
    assert done.stdout == b""


def test_a_port_in_use_is_named(server: ControlPlane, tmp_path: Path) -> None:
    other = ControlPlane(tmp_path / "control")
    other.config.write_text(f'[listen]\nhost = "127.0.0.1"\nport = {server.port}\n')

    done = other.run("serve")

    assert done.returncode == 2
    assert str(server.port) in done.stderr.decode()


def shown(server: ControlPlane, port: int) -> bytes:
    """The certificate that a listener shows."""
    context = ssl.create_default_context(cafile=server.directory / "ca/certificate.pem")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def ports(server: ControlPlane) -> list[int]:
    """Of the worker listener and the enrolment listener."""
    return [server.port, int(server.ready["enrolment"].rpartition(":")[2])]


def test_sighup_shows_a_replaced_certificate_on_every_listener_and_keeps_it_when_the_next_is_bad(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "control") as server:
        tls = server.directory / "tls"
        former = shown(server, server.port)
        following = issue_server(authority(server), ["localhost"])
        (tls / "certificate.pem").write_bytes(following.certificate)
        (tls / "key.pem").write_bytes(following.key)
        expected = ssl.PEM_cert_to_DER_cert(following.certificate.decode())
        assert [shown(server, port) for port in ports(server)] == [former, former]

        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        while "tls_context_reloaded" not in server.log.read_text():
            shown(server, server.port)
        assert [shown(server, port) for port in ports(server)] == [expected, expected]

        (tls / "certificate.pem").write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        while "tls_context_kept" not in server.log.read_text():
            shown(server, server.port)
        assert [shown(server, port) for port in ports(server)] == [expected, expected]
        assert f"cannot use {tls / 'certificate.pem'}" in server.log.read_text()
