"""A box becomes a worker: a real control plane invites, a real `qlworker enroll` spends."""

import contextlib
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from cryptography import x509
from sqlalchemy import select

from qlworker.adapters import durable
from qlworker.adapters.credentials import CredentialFiles
from qlworker.adapters.enrolment import Enrolment, enrol
from qlworker.certificate_request import make_with_library, make_with_openssl
from qlworker.config import load
from qlworker.control import credentials, enrolment
from qlworker.control.operator_api import Invitation, InviteWorker, WorkerView
from qlworker.control.schema import security_audit
from qlworker.control.worker_routes import CERTIFICATES_AN_HOUR
from qlworker.domain.errors import Conflict
from qlworker.wire.certificate import CERTIFICATE_SCHEMA, CertificateRequest
from qlworker.wire.enrolment import ENROLMENT_SCHEMA, EnrolmentRequest
from tests.control.fixtures import PEPPER, SESSION, Plane
from tests.control.running import ControlPlane

HOUR = 3_600_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("enrolment") / "control") as running:
        yield running


def invited(server: ControlPlane, worker_id: str) -> str:
    with server.operator() as operator:
        request = InviteWorker(worker_id=worker_id, lifetime_s=3600, credential_lifetime_s=86_400)
        return operator.call(Invitation, "POST", "/workers/invite", request).invitation


class Enrolled:
    """A box that became a worker, and what it may ask with its files."""

    def __init__(self, server: ControlPlane, directory: Path, worker_id: str) -> None:
        self.server = server
        self.worker_id = worker_id
        self.directory = directory / worker_id
        done = enroll(server, self.directory, worker_id, invited(server, worker_id))
        assert done.returncode == 0, done.stderr
        self.identity = self.directory / "identity.pem"

    def post(self, operation: str, body: bytes, identity: Path | None = None) -> httpx.Response:
        """One request on a connection of its own, with the installed certificate or another one."""
        context = ssl.create_default_context(cafile=self.directory / "ca.pem")
        context.load_cert_chain(identity or self.identity)
        token = (self.directory / "token").read_text().strip()
        headers = {"Authorization": f"Worker {token}", "Content-Type": "application/json"}
        path = f"/api/v3/worker-ingress/workers/{self.worker_id}/sessions/{SESSION}/{operation}"
        with httpx.Client(verify=context, trust_env=False, timeout=60) as client:
            return client.post(self.server.ready["origin"] + path, content=body, headers=headers)

    def renew(self, subject: str | None = None) -> tuple[httpx.Response, bytes]:
        """The answer to a request for the next certificate, and the key it is for."""
        key, request = make_with_library(subject or self.worker_id)
        document = CertificateRequest(schema=CERTIFICATE_SCHEMA, certificate_request=request.decode())
        return self.post("certificate", document.to_json()), key


def enroll(server: ControlPlane, directory: Path, worker_id: str, invitation: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qlworker", "enroll", "--id", worker_id, "--directory", str(directory)]
    return subprocess.run(
        [*command, "--control-plane", server.ready["enrolment"]],
        input=invitation + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.req("R505")
def test_an_invited_box_gets_everything_a_worker_needs(server: ControlPlane, tmp_path: Path) -> None:
    directory = tmp_path / "qlworker"

    done = enroll(server, directory, "edge-1", invited(server, "edge-1"))

    assert done.returncode == 0, done.stderr
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == dict.fromkeys(("identity.pem", "ca.pem", "token", "qlworker.toml"), 0o600)
    settings = load(directory / "qlworker.toml")
    assert (settings.worker.id, settings.control_plane.origin) == ("edge-1", server.ready["origin"])
    (directory / "state").mkdir(mode=0o700)
    check = [sys.executable, "-m", "qlworker", "check", "--config", str(directory / "qlworker.toml")]
    assert subprocess.run(check, check=False, capture_output=True, timeout=60).returncode == 0


@pytest.mark.req("R505")
def test_an_invitation_is_spent_once_and_the_second_box_is_told_so(server: ControlPlane, tmp_path: Path) -> None:
    invitation = invited(server, "edge-2")
    assert enroll(server, tmp_path / "first", "edge-2", invitation).returncode == 0

    second = enroll(server, tmp_path / "second", "edge-2", invitation)

    assert second.returncode == 1
    assert "invitation was refused" in second.stderr
    assert not (tmp_path / "second/identity.pem").exists()
    assert invitation not in second.stderr + server.log.read_text()


def test_a_box_that_is_a_worker_already_stays_as_it_is(server: ControlPlane, tmp_path: Path) -> None:
    directory = tmp_path / "qlworker"
    assert enroll(server, directory, "edge-3", invited(server, "edge-3")).returncode == 0
    before = (directory / "identity.pem").read_bytes()

    again = enroll(server, directory, "edge-3", "ql3e_018f5c64-9b9d-7f1a-8c2d-1234567890ac_" + "A" * 43 + "_" + "0" * 64)

    assert again.returncode == 2
    assert "a worker already" in again.stderr
    assert (directory / "identity.pem").read_bytes() == before


def test_a_server_that_the_invitation_does_not_name_is_told_nothing(server: ControlPlane, tmp_path: Path) -> None:
    invitation = invited(server, "edge-4")

    refused = enroll(server, tmp_path / "box", "edge-4", invitation[:-64] + "0" * 64)

    assert refused.returncode == 1
    assert "not the control plane that made the invitation" in refused.stderr
    assert enroll(server, tmp_path / "box", "edge-4", invitation).returncode == 0  # it was not spent


def test_what_is_no_invitation_is_refused_before_anything_is_written(server: ControlPlane, tmp_path: Path) -> None:
    done = enroll(server, tmp_path / "box", "edge-5", "nonsense")

    assert done.returncode == 2
    assert "qlcontrol worker add" in done.stderr
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize("make", [make_with_library, make_with_openssl])
def test_a_request_names_the_worker_and_nothing_else(make: object) -> None:
    key, request = make("edge-1")  # type: ignore[operator]

    assert key.startswith(b"-----BEGIN PRIVATE KEY-----")
    wanted = x509.load_pem_x509_csr(request)
    assert wanted.subject.rfc4514_string() == "CN=edge-1"
    assert wanted.is_signature_valid


def test_the_same_request_may_be_sent_again_and_another_may_not(plane: Plane) -> None:
    def request(number: int) -> EnrolmentRequest:
        return EnrolmentRequest(
            schema=ENROLMENT_SCHEMA, invitation=text, certificate_request=f"-----BEGIN CERTIFICATE REQUEST-----{number}"
        )

    with plane.database.transaction() as tx:
        text = enrolment.invite(tx, PEPPER, "edge-9", "a" * 64, lifetime_ms=HOUR, credential_lifetime_ms=HOUR).invitation.text()
    for serial in ("2a", "2b"):
        with plane.database.transaction() as tx:
            admission = enrolment.admit(tx, PEPPER, request(1), "r")
            assert admission is not None
            enrolment.conclude(tx, PEPPER, admission, request(1), serial, tx.now_ms + HOUR, "r")

    with plane.database.transaction() as tx:
        assert enrolment.admit(tx, PEPPER, request(2), "r") is None
        rows = tx.rows(select(security_audit.c.reasons).where(security_audit.c.outcome == "authentication_rejected"))
    assert ["spent" in str(row.reasons) for row in rows] == [True]


@pytest.mark.req("R509")
@pytest.mark.parametrize(("change", "reason"), [("expired", "expired"), ("revoked", "revoked"), ("secret", "unknown")])
def test_an_invitation_that_is_not_good_is_refused_with_an_audit_row_that_says_why(
    plane: Plane, change: str, reason: str
) -> None:
    with plane.database.transaction() as tx:
        invitation = enrolment.invite(tx, PEPPER, "edge-9", "a" * 64, lifetime_ms=HOUR, credential_lifetime_ms=HOUR).invitation
    text = invitation.text()
    if change == "expired":
        plane.clock.advance(HOUR)
    elif change == "revoked":
        plane.database.transact(enrolment.end_invitations, "edge-9")
    else:
        text = msgspec.structs.replace(invitation, secret=b"x" * 32).text()
    request = EnrolmentRequest(
        schema=ENROLMENT_SCHEMA, invitation=text, certificate_request="-----BEGIN CERTIFICATE REQUEST-----"
    )

    assert plane.database.transact(enrolment.admit, PEPPER, request, "request-1") is None

    assert refusals(plane) == [(reason, invitation.token_id)]


def test_a_line_that_is_no_invitation_is_refused_and_not_written_down(plane: Plane) -> None:
    request = EnrolmentRequest(
        schema=ENROLMENT_SCHEMA, invitation="ql3e_nonsense", certificate_request="-----BEGIN CERTIFICATE REQUEST-----"
    )

    assert plane.database.transact(enrolment.admit, PEPPER, request, "request-1") is None

    assert refusals(plane) == [("malformed", None)]


def test_a_second_invitation_ends_the_first_and_an_active_worker_gets_none(plane: Plane) -> None:
    def invite() -> str:
        with plane.database.transaction() as tx:
            return enrolment.invite(
                tx, PEPPER, "edge-9", "a" * 64, lifetime_ms=HOUR, credential_lifetime_ms=HOUR
            ).invitation.text()

    first = invite()
    invite()
    request = EnrolmentRequest(
        schema=ENROLMENT_SCHEMA, invitation=first, certificate_request="-----BEGIN CERTIFICATE REQUEST-----"
    )
    assert plane.database.transact(enrolment.admit, PEPPER, request, "request-1") is None
    plane.database.transact(credentials.issue, PEPPER, "edge-9", HOUR)

    with pytest.raises(Conflict, match="active credential"):
        invite()


def refusals(plane: Plane) -> list[tuple[str, str | None]]:
    with plane.database.transaction() as tx:
        table = security_audit
        rows = tx.rows(select(table.c.reasons, table.c.authentication_id).where(table.c.outcome == "authentication_rejected"))
    return [(row.reasons, row.authentication_id) for row in rows]


def test_a_worker_gets_its_next_certificate_a_bounded_number_of_times_an_hour(server: ControlPlane, tmp_path: Path) -> None:
    box = Enrolled(server, tmp_path, "renewing")
    answers = []
    for _ in range(CERTIFICATES_AN_HOUR - 1):  # the enrolment was the first
        answer, key = box.renew()
        answers.append(answer.status_code)

    assert answers == [200] * len(answers)
    certificate = x509.load_pem_x509_certificate(answer.json()["certificate"].encode())
    assert certificate.subject.rfc4514_string() == "CN=renewing"
    assert answer.json()["notAfterMs"] == certificate.not_valid_after_utc.timestamp() * 1000
    following = tmp_path / "following.pem"
    following.write_bytes(answer.json()["certificate"].encode() + key)
    refused = box.post("certificate", b"{}", following)
    assert refused.status_code == 400  # the connection was accepted, the present certificate is as good as before
    too_many, _ = box.renew()
    assert (too_many.status_code, too_many.json()["code"]) == (429, "worker_certificate_limit")
    assert too_many.headers["retry-after"] == "3600"


def test_a_worker_gets_no_certificate_for_another_id(server: ControlPlane, tmp_path: Path) -> None:
    box = Enrolled(server, tmp_path, "curious")

    answer, _ = box.renew("edge-1")

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_worker_request")


@pytest.mark.req("R506")
def test_a_revoked_workers_certificate_opens_no_connection_any_more(server: ControlPlane, tmp_path: Path) -> None:
    revoked, other = Enrolled(server, tmp_path, "leaving"), Enrolled(server, tmp_path, "staying")
    assert revoked.post("heartbeat", b"{}").status_code == 400

    said = server.out("worker", "revoke", "leaving")

    assert "1 token, 1 certificate" in said
    with pytest.raises(httpx.TransportError):
        revoked.post("heartbeat", b"{}")
    assert other.post("heartbeat", b"{}").status_code == 400


DURABLE = ("publish_new", "replace", "remove", "sync_directory")


class Killed(BaseException):
    """The box lost its power."""


@pytest.mark.parametrize("step", range(1, 10))
def test_an_enrolment_interrupted_at_any_step_goes_on_when_it_is_called_again(
    server: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before the step, and for the last one there is none: then the first call is already through."""
    directory = tmp_path / "qlworker"
    wanted = Enrolment(
        worker_id=f"interrupted-{step}", origin=server.ready["enrolment"], directory=directory, state=directory / "state"
    )
    invitation, steps = invited(server, wanted.worker_id), 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal steps
            steps += 1
            if steps == step:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in DURABLE:
            patch.setattr(durable, name, counted(getattr(durable, name)))
        with contextlib.suppress(Killed):
            enrol(wanted, invitation)
    if not (directory / "identity.pem").exists() or (directory / "enrolling.pem").exists():
        enrol(wanted, invitation)

    assert {path.name for path in directory.iterdir()} == {"identity.pem", "ca.pem", "token", "qlworker.toml"}
    assert CredentialFiles(
        directory / "identity.pem", directory / "identity.pem", directory / "ca.pem", directory / "token"
    ).load()
    with server.operator() as operator:
        (worker,) = [each for each in operator.call(list[WorkerView], "GET", "/workers") if each.worker_id == wanted.worker_id]
    assert worker.credentials == 1


def test_what_another_workers_enrolment_left_is_not_taken_up(server: ControlPlane, tmp_path: Path) -> None:
    directory = tmp_path / "qlworker"
    directory.mkdir(mode=0o700)
    left = directory / "enrolling.pem"
    left.touch(0o600)
    left.write_text("enrolling somebody-else\n")

    done = enroll(server, directory, "edge-6", invited(server, "edge-6"))

    assert done.returncode == 2
    assert f"{left} is not of an enrolment of edge-6: remove it" in done.stderr
    assert left.read_text() == "enrolling somebody-else\n"
