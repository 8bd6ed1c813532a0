"""Log upload and the live view: control-plane.md §14."""

from pathlib import Path
from typing import Any

import pytest

from qlworker.control.artifact_directory import ArtifactDirectory
from qlworker.control.artifact_store import ArtifactKey
from qlworker.control.live_output import LIVE_BYTES, LiveOutput
from qlworker.control.services import artifacts, output
from qlworker.domain.canonical import sha256_hex
from qlworker.domain.errors import Fenced, Refused
from qlworker.wire.completion import OutputRequest
from tests.control.fixtures import LEASE_MS, LOG, Held, Plane

KEY = ArtifactKey("project-1", "run-1", "attempt-1", "wlog-" + "0" * 30)


def chunk(held: Held, data: bytes, offset: int = 0, **changes: Any) -> OutputRequest:
    members = {"log_artifact_id": held.log_id, **held.fence(), **changes}
    return OutputRequest(schema=OutputRequest.SCHEMA, offset=offset, data=data, **members)


def show(plane: Plane, held: Held, request: OutputRequest) -> Any:
    with plane.database.transaction() as tx:
        view = output.look(tx, held.caller, request, plane.settings)
    return output.show(plane.live, request, view)


@pytest.mark.parametrize("state", ["claimed", "start_failed", "succeeded"])
def test_only_a_started_attempt_has_a_log(plane: Plane, state: str) -> None:  # V110
    held = plane.drive(state)
    with plane.database.transaction() as tx, pytest.raises(Fenced):
        artifacts.authorise(tx, held.caller, held.upload(), plane.settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_artifact_id": "wlog-" + "0" * 30},
        {"expected_lease_version": 1},
        {"project_id": "another"},
        {"lease_token": "another_lease_capability_0000000000"},
    ],
)
def test_the_fence_and_the_logs_own_id_are_needed(plane: Plane, changes: dict[str, Any]) -> None:  # V110
    held = plane.drive("running")
    with plane.database.transaction() as tx, pytest.raises(Fenced):
        artifacts.authorise(tx, held.caller, held.upload(**changes), plane.settings)


def test_a_running_attempt_without_a_registered_log_has_none(plane: Plane) -> None:
    held = plane.drive("starting")
    plane.running(held, log_artifact_id=None)
    with plane.database.transaction() as tx, pytest.raises(Fenced):
        artifacts.authorise(tx, held.caller, held.upload(), plane.settings)


def test_the_same_log_again_is_told_and_another_one_refused(plane: Plane) -> None:  # V110
    held = plane.drive("running")
    plane.store(held)
    before = plane.snapshot()
    with plane.database.transaction() as tx:
        assert artifacts.record(tx, held.upload(), sha256_hex(LOG)).status == "already_stored"
    with plane.database.transaction() as tx, pytest.raises(artifacts.OtherContent):
        artifacts.record(tx, held.upload(), "0" * 64)
    assert plane.snapshot() == before


def test_the_store_keeps_what_it_measured_and_nothing_beside_it(tmp_path: Path) -> None:
    store = ArtifactDirectory(tmp_path / "artifacts")
    upload = store.begin(KEY)
    upload.write(b"one ")
    upload.write(b"two")
    sha256 = upload.publish()
    upload.discard()
    assert sha256 == sha256_hex(b"one two")
    assert store.path(KEY, sha256).read_bytes() == b"one two"
    assert store.holds(KEY, sha256, 7)
    assert not store.holds(KEY, sha256, 6)
    assert not store.holds(KEY, "0" * 64, 7)
    files = [file for file in (tmp_path / "artifacts").rglob("*") if file.is_file()]
    assert files == [store.path(KEY, sha256)]
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_a_discarded_upload_leaves_nothing(tmp_path: Path) -> None:
    store = ArtifactDirectory(tmp_path / "artifacts")
    upload = store.begin(KEY)
    upload.write(b"half")
    upload.discard()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_live_output_lies_at_its_offset_and_changes_no_row(plane: Plane) -> None:
    held = plane.drive("running")
    before = plane.snapshot()
    assert show(plane, held, chunk(held, b"hello ")).next_offset == 6
    assert show(plane, held, chunk(held, b"world", 6)).next_offset == 11
    assert show(plane, held, chunk(held, b"hello ")).next_offset == 11
    assert plane.live.path(held.attempt_id).read_bytes() == b"hello world"
    assert plane.snapshot() == before


def test_live_output_hints_at_a_waiting_stop(plane: Plane) -> None:
    held = plane.drive("running")
    assert not show(plane, held, chunk(held, b"a")).stop_requested
    plane.cancel(held.run_id)
    assert show(plane, held, chunk(held, b"b", 1)).stop_requested


def test_live_output_needs_the_fence(plane: Plane) -> None:
    held = plane.drive("running")
    for changes in ({"expected_lease_version": 1}, {"log_artifact_id": "wlog-" + "0" * 30}):
        with pytest.raises(Fenced):
            show(plane, held, chunk(held, b"x", **changes))
    plane.clock.advance(LEASE_MS)
    with pytest.raises(Fenced):
        show(plane, held, chunk(held, b"x"))


def test_late_live_output_is_swallowed_once_the_log_is_stored(plane: Plane) -> None:
    held = plane.drive("running")
    plane.store(held)
    assert show(plane, held, chunk(held, b"late", 100)).next_offset == 104
    assert not plane.live.path(held.attempt_id).exists()


def test_a_live_view_is_bounded(tmp_path: Path) -> None:
    live = LiveOutput(tmp_path / "live")
    assert live.write("attempt-1", LIVE_BYTES - 2, b"abcd") == LIVE_BYTES
    assert live.write("attempt-1", LIVE_BYTES + 10, b"x") == LIVE_BYTES


def test_an_attempt_id_cannot_name_another_file(plane: Plane) -> None:
    held = plane.drive("running")
    view = output.View(stop_requested=False, is_stored=False)
    with pytest.raises(Refused):
        output.show(plane.live, chunk(held, b"x", attempt_id="../escape"), view)
    plane.live.remove("../escape")
