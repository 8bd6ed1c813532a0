"""The journal is delivery state; the control plane's rows are the facts."""

import shutil
import signal
import subprocess
import sys

import pytest

from .world import Box


@pytest.mark.req("R13", "R12")
def test_a_deleted_journal_changes_nothing_the_control_plane_knows(box: Box) -> None:
    worker = box.start()
    run_id = box.run("echo kept")
    before = box.finish(run_id)
    worker.wait_event("run_completed")
    worker.stop()

    shutil.rmtree(box.state)
    again = box.start()
    again.wait_event("session_registered")

    assert (box.show(run_id), box.follow(run_id)) == before
    assert box.finish(box.run("true"))[0].run.status == "succeeded"
    again.stop()


@pytest.mark.req("R121")
def test_a_worker_whose_credential_is_refused_is_delivered_nothing(box: Box) -> None:
    worker = box.start()
    worker.wait_event("session_registered")
    with box.world.operator() as operator:
        operator.call(object, "POST", "/workers/revoke", {"worker_id": box.name})
    run_id = box.run("true")

    worker.wait_event("pull_failed")

    assert box.show(run_id).run.status == "queued"
    assert box.records() == []
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


@pytest.mark.req("R73")
def test_check_fails_for_a_journal_that_others_can_read(box: Box) -> None:
    worker = box.start()
    worker.wait_event("session_registered")
    worker.stop()
    (box.state / "journal").chmod(0o755)

    done = subprocess.run(
        [sys.executable, "-m", "qlworker", "check", "--config", str(box.settings)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "chmod 0700" in done.stdout
