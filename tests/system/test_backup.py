"""The control plane goes back to a copy of its database; the worker has gone on meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qlworker.control.operator_api import AuditView

from .world import World

QUICK = "session.lease_s = 15\nsession.heartbeat_s = 5\n"


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.start()
    yield world
    world.stop()


@pytest.mark.req("R519")
def test_a_run_that_was_carried_out_after_the_copy_is_not_carried_out_again(own_world: World, tmp_path: Path) -> None:
    world, box = own_world, own_world.add_worker(QUICK)
    marks, config = tmp_path / "marks", str(own_world.settings)
    run_id = box.run(f"echo done >> {marks}; exit 3")
    world.control("backup", "--out", str(tmp_path / "copy"), "--config", config)  # while it serves
    worker = box.start()
    assert box.finish(run_id)[0].run.exit_code == 3
    world.stop()

    world.control("restore", str(tmp_path / "copy"), "--config", config)
    world.start()

    detail = box.show(run_id)
    assert (detail.run.status, detail.run.exit_code) == ("cancelled", None)
    assert box.finish(box.run("echo later"))[1] == b"later\n"  # the same worker goes on
    assert marks.read_text() == "done\n"
    assert worker.stop() == 0


def test_an_operator_sees_whom_the_control_plane_let_in(own_world: World) -> None:
    box = own_world.add_worker()
    worker = box.start()
    box.finish(box.run("true"))
    worker.stop()

    with own_world.operator() as operator:
        rows = operator.call(list[AuditView], "GET", "/audit", subject=box.name, limit=1000)

    assert {"register", "offers", "completion"} <= {row.operation for row in rows}
    assert {row.outcome for row in rows} == {"allowed"}
