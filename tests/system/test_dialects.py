"""A control plane that speaks the older dialect of each area, which the worker finds out by itself (wire-protocol.md §0.1)."""

import json

import pytest

from .world import World

BASELINE = '[dialect]\ncapabilities = "baseline"\nsecrets = "v1"\n'


def test_a_worker_tries_the_later_dialect_and_remembers_what_the_server_understood(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    world = World(tmp_path_factory.mktemp("baseline"))
    world.configure(BASELINE)
    world.placement = {}
    world.start()
    world.put_secret("word", "hidden")
    box = world.add_worker()
    worker = box.start()

    detail, output = box.finish(box.run('test "$W" = hidden && echo known', environment={"secret": {"W": "word"}}))
    worker.stop()
    stored = json.loads((box.state / "journal/session.json").read_text())

    assert (detail.run.status, output) == ("succeeded", b"known\n")
    assert "protocolVersion" not in json.loads(stored["capabilitiesJson"])
    world.stop()


def test_a_worker_set_to_one_dialect_says_why_the_other_server_refuses_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = World(tmp_path_factory.mktemp("later"))
    world.start()
    box = world.add_worker('[control_plane]\ncapabilities_dialect = "baseline"\n')
    worker = box.start()

    reason = worker.wait_event("control_plane_unreachable")["reason"]
    worker.stop()

    assert "invalid_worker_request" in reason
    world.stop()
