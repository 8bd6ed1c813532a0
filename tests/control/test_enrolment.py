"""A box becomes a worker: a real control plane invites, a real `qlworker enroll` spends."""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from sqlalchemy import select

from qlworker.certificate_request import make_with_library, make_with_openssl
from qlworker.config import load
from qlworker.control import enrolment
from qlworker.control.operator_api import Invitation, InviteWorker
from qlworker.control.schema import security_audit
from qlworker.wire.enrolment import ENROLMENT_SCHEMA, EnrolmentRequest
from tests.control.fixtures import PEPPER, Plane
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
