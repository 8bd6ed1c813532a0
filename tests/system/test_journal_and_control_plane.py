"""The journal is delivery state; the control plane's rows are the facts."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import TOKEN, make_record

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


def fill(box: Box, count: int) -> list[Path]:
    """A journal of `count` records that were accepted and never more."""
    offers = box.state / "journal/offers"
    for directory in (box.state, offers.parent, offers):
        directory.mkdir(mode=0o700, exist_ok=True)
    paths = [offers / f"offer-{number:03}.json" for number in range(count)]
    for path in paths:
        path.write_bytes(make_record(path.stem).to_json() + b"\n")
        path.chmod(0o600)
    return paths


@pytest.mark.req("R96", "R100", "R107")
def test_a_journal_beyond_the_audits_budget_refuses_to_start_says_so_and_is_free_again(box: Box) -> None:
    before = {path: path.read_bytes() for path in fill(box, 65)}

    refused = box.start()
    assert refused.wait() == 3
    assert "audit budget is exhausted: more than 64 records" in refused.text()
    assert "Traceback" not in refused.text()
    assert TOKEN not in refused.text()
    assert {path: path.read_bytes() for path in before} == before
    assert not (box.state / "journal/.owner.lock").exists()

    next(iter(before)).unlink()
    accepted = box.start()
    accepted.wait_event("journal_read", unsettled=64)
    assert accepted.stop() == 0


@pytest.mark.req("R102")
def test_a_damaged_record_refuses_to_start_and_leaves_the_lock_free(box: Box) -> None:
    paths = fill(box, 3)
    paths[1].write_bytes(b"{}\n")

    refused = box.start()
    assert refused.wait() == 3
    assert paths[1].name in refused.text()
    assert not (box.state / "journal/.owner.lock").exists()
    assert paths[1].read_bytes() == b"{}\n"


@pytest.mark.req("R548")
def test_an_idle_worker_is_one_process_and_starts_no_service_beside_it(box: Box) -> None:
    worker = box.start()
    worker.wait_event("pull_idle")

    children = [path.read_text().split() for path in Path(f"/proc/{worker.pid}/task").glob("*/children")]

    assert children
    assert [child for each in children for child in each] == []
    assert worker.stop() == 0
