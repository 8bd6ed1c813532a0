"""A worker's certificate comes near its end while it runs, with a real control plane that signs the next one."""

from datetime import UTC, datetime, timedelta

import pytest

from qlworker.adapters.identity_file import read_validity
from qlworker.control.pki import Identity
from tests.pki import dated_identity

from .world import Box


def test_a_running_worker_replaces_its_certificate_before_it_ends_and_goes_on(box: Box) -> None:
    ca, identity = box.world.root / "control/ca", box.directory / "kit/identity.pem"
    authority = Identity((ca / "certificate.pem").read_bytes(), (ca / "key.pem").read_bytes())
    now = datetime.now(UTC).replace(microsecond=0)
    ending = dated_identity(authority, box.name, now - timedelta(days=60), now + timedelta(hours=1))
    identity.write_bytes(ending.certificate + ending.key)
    worker = box.start()
    try:
        renewed = worker.wait_event("certificate_renewed")
        worker.wait_event("credential_swapped", certificate=True)
        detail, output = box.finish(box.run("echo after the exchange"))

        assert read_validity(identity).not_after_ms == renewed["ends_at_ms"] > (now + timedelta(days=80)).timestamp() * 1000
        assert (detail.run.status, output) == ("succeeded", b"after the exchange\n")
        assert ending.key not in identity.read_bytes()
        assert not worker.has_event("certificate_not_renewed")
    finally:
        worker.stop()


@pytest.mark.req("R507")
def test_a_running_worker_takes_a_rotated_token_without_a_lost_heartbeat(box: Box) -> None:
    worker = box.start()
    try:
        box.finish(box.run("true"))
        former = (box.directory / "kit/token").read_text()

        box.world.control(
            "worker", "rotate", box.name, "--out", str(box.directory / "kit"), "--config", str(box.world.settings)
        )
        worker.wait_event("credential_swapped")
        detail, _ = box.finish(box.run("true"))

        assert (box.directory / "kit/token").read_text() != former
        assert detail.run.status == "succeeded"
        for trouble in ("session_access_suspended", "session_fenced", "session_expired", "control_plane_unreachable"):
            assert not worker.has_event(trouble)
    finally:
        worker.stop()
