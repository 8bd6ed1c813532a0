"""What the control plane makes of a worker that does not come back, with real processes from end to end."""

import signal
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from .world import World

QUICK = """
[runs]
lease_s = 5

[maintenance]
expiry_interval_s = 0.25
cancellation_interval_s = 0.25
"""
ANYWHERE = {"support_tiers": ["tier1", "candidate", "experimental", "legacy-only"], "labels": {"pair": "one"}}
PAIR = 'worker.labels = { pair = "one" }\n'
RETRY = {"max_attempts": 2, "safety": "idempotent", "backoff_s": 0, "backoff_max_s": 0}


@pytest.fixture
def quick_world(tmp_path: Path) -> Iterator[World]:
    """Leases of 5 s, so that a lost worker is noticed soon."""
    world = World(tmp_path)
    world.configure(QUICK)
    world.start()
    yield world
    world.stop()


@pytest.mark.req("R166", "R512", "R513", "R514", "R532")
def test_a_run_whose_worker_was_lost_is_done_by_another_one_if_its_task_allows_it(quick_world: World) -> None:
    first, second = quick_world.add_worker(PAIR), quick_world.add_worker(PAIR)
    lost_worker = first.start()
    run_id = first.run("echo begun; sleep 1000", placement=ANYWHERE, retry=RETRY)
    first.follow(run_id, until=b"\n")
    lost_worker.kill()

    other = second.start()
    other.wait_event("offer_accepted")
    second.cancel(run_id)
    detail, _ = second.finish(run_id)
    other.stop()

    events = second.events(run_id)
    assert [attempt.worker_id for attempt in detail.attempts] == [first.name, second.name]
    assert detail.attempts[0].error_code == "REMOTE_RUN_LEASE_EXPIRED"
    for expected in ("attempt.lost", "run.lost", "run.retry_wait", "run.queued", "attempt.claimed"):
        assert expected in events
    assert detail.run.status == "cancelled"


@pytest.mark.req("R511")
def test_the_lost_worker_stops_its_command_when_it_comes_back_and_changes_nothing(quick_world: World) -> None:
    box = quick_world.add_worker()
    worker = box.start()
    run_id = box.run("echo begun; sleep 1000")
    box.follow(run_id, until=b"begun\n")
    worker.kill()
    detail, _ = box.finish(run_id)
    assert (detail.run.status, detail.run.error_code) == ("failed", "RUN_LOST_RETRY_DISABLED")

    worker = box.start()
    worker.wait_event("command_stopped")
    worker.stop()
    assert box.records()[0]["state"] == "recovery_required"
    assert box.show(run_id).run.status == "failed"


def test_a_cancel_outlives_a_control_plane_that_is_killed_at_once(world: World) -> None:
    """The word is on disk before the operator is told; the worker hears it from the next control plane."""
    box = world.add_worker()
    worker = box.start()
    run_id = box.run("trap 'echo told; exit 9' TERM; echo begun; while :; do sleep 0.1; done")
    box.follow(run_id, until=b"begun\n")
    box.cancel(run_id)
    world.stop(signal.SIGKILL)
    world.start()

    detail, output = box.finish(run_id)
    worker.stop()
    assert (detail.run.status, detail.run.exit_code) == ("cancelled", 9)
    assert output.endswith(b"told\n")
    assert "run.cancel_dispatched" in box.events(run_id)


def test_a_run_that_nobody_ever_took_ends_without_a_worker(world: World) -> None:
    box = world.add_worker()
    run_id = box.run("true")
    box.cancel(run_id)
    assert box.show(run_id).run.status == "cancelled"


def test_the_log_of_a_real_worker_reaches_a_bucket_and_is_read_from_there(tmp_path: Path) -> None:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "me", "aws_secret_access_key": "hidden"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="logs")
        world = World(tmp_path)
        (tmp_path / "control/keys.toml").touch(0o600)
        (tmp_path / "control/keys.toml").write_text('access_key_id = "me"\nsecret_access_key = "hidden"\n')
        world.configure(
            f'[artifacts.bucket]\nname = "logs"\nendpoint = "{endpoint}"\nregion = "us-east-1"\ncredentials = "keys.toml"\n'
        )
        world.start()
        box = world.add_worker()
        worker = box.start()
        detail, output = box.finish(box.run("echo kept in a bucket"))
        worker.stop()
        world.stop()
        assert (detail.run.status, output) == ("succeeded", b"kept in a bucket\n")
        (stored,) = client.list_objects_v2(Bucket="logs")["Contents"]
        assert client.get_object(Bucket="logs", Key=stored["Key"])["Body"].read() == output
        assert not list((tmp_path / "control/artifacts").rglob("*-*"))
    finally:
        server.stop()
