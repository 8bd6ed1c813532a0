"""Secret delivery: control-plane.md §13."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker.control.services import secrets
from qlworker.domain.errors import Fenced, Transient
from qlworker.domain.revision import Binding, ExecutionRevision, SecretReference
from qlworker.wire.secrets import SecretRequestV1, SecretRequestV2, SecretResponseV1, SecretResponseV2
from tests.builders import make_revision
from tests.control.fixtures import Held, Plane

SECRET = "hunter2-\u2603-very-secret"
FIRST = SecretReference(project_id="project-1", name="first").text()
SECOND = SecretReference(project_id="project-1", name="second").text()
BUNDLE = SecretReference(project_id="project-1", name="bundle", version=3).text()


@pytest.fixture
def project(plane: Plane) -> Path:
    """The directory of the project's secrets, with two of them and a bundle."""
    directory = plane.directory / "secrets" / "project-1"
    directory.mkdir(mode=0o700, parents=True)
    for name, value in (("first", SECRET), ("second", ""), ("bundle@3", '{"schema":"x"}')):
        file = directory / name
        file.write_text(value, "utf-8")
        file.chmod(0o600)
    return directory


def revision(**changes: Any) -> ExecutionRevision:
    environment = [
        Binding(name="B", kind="secret", secret_ref=SECOND),
        Binding(name="A", kind="secret", secret_ref=FIRST),
        Binding(name="C", kind="secret", secret_ref=FIRST),
    ]
    return make_revision(environment=environment, environment_bundle_ref=BUNDLE, **changes)


def request(plane: Plane, held: Held, **changes: Any) -> SecretRequestV2:
    run = plane.facts(held)[0]
    wanted = SecretRequestV2(
        schema=SecretRequestV2.SCHEMA,
        **held.fence(),
        task_id="task-1",
        task_revision=run.task_revision,
        execution_digest=revision().content_digest,
        secret_refs=[FIRST, SECOND],
        environment_bundle_refs=[BUNDLE],
    )
    return msgspec.structs.replace(wanted, **changes)


def deliver(plane: Plane, held: Held, wanted: SecretRequestV2 | SecretRequestV1) -> SecretResponseV1 | SecretResponseV2:
    with plane.database.transaction() as tx:
        delivery = secrets.authorise(tx, held.caller, wanted, plane.settings)
    return secrets.deliver(plane.secrets, delivery)


def test_a_starting_attempt_gets_all_its_secrets_in_order(plane: Plane, project: Path) -> None:  # V107
    held = plane.drive("starting", revision())
    answer = deliver(plane, held, request(plane, held))
    assert isinstance(answer, SecretResponseV2)
    assert [(each.secret_ref, each.value) for each in answer.values] == [(FIRST, SECRET), (SECOND, "")]
    assert [each.value for each in answer.environment_bundles] == ['{"schema":"x"}']
    assert SECRET not in repr(answer)


def test_the_older_dialect_gets_its_own_answer(plane: Plane, project: Path) -> None:
    plain = make_revision(environment=[Binding(name="A", kind="secret", secret_ref=FIRST)])
    held = plane.drive("starting", plain)
    wanted = SecretRequestV1(
        schema=SecretRequestV1.SCHEMA,
        **held.fence(),
        task_id="task-1",
        task_revision=plane.facts(held)[0].task_revision,
        execution_digest=plain.content_digest,
        secret_refs=[FIRST],
    )
    assert isinstance(deliver(plane, held, wanted), SecretResponseV1)


@pytest.mark.parametrize("state", ["claimed", "running", "start_failed", "succeeded"])
def test_only_a_starting_attempt_gets_secrets(plane: Plane, project: Path, state: str) -> None:  # V107
    held = plane.drive(state, revision())
    with pytest.raises(Fenced):
        deliver(plane, held, request(plane, held))


def test_a_cancelled_run_gets_no_secrets(plane: Plane, project: Path) -> None:  # V107
    held = plane.drive("starting", revision())
    plane.cancel(held.run_id)
    with pytest.raises(Fenced):
        deliver(plane, held, request(plane, held))


@pytest.mark.parametrize(
    "changes",
    [
        {"secret_refs": [FIRST]},
        {"secret_refs": [SECOND, FIRST]},
        {"secret_refs": [FIRST, SECOND, SecretReference(project_id="project-1", name="third").text()]},
        {"secret_refs": [FIRST, SecretReference(project_id="project-2", name="second").text()]},
        {"environment_bundle_refs": []},
        {"environment_bundle_refs": [SecretReference(project_id="project-1", name="bundle", version=4).text()]},
        {"execution_digest": "0" * 64},
        {"task_id": "task-2"},
        {"task_revision": "qltd:v1:2:" + "a" * 64},
        {"project_id": "project-2"},
    ],
)
def test_anything_but_the_revisions_own_references_is_refused(plane: Plane, project: Path, changes: Any) -> None:  # V107
    held = plane.drive("starting", revision())
    with pytest.raises(Fenced):
        deliver(plane, held, request(plane, held, **changes))


def test_the_request_may_be_repeated_until_the_lease_moves(plane: Plane, project: Path) -> None:  # V108
    held = plane.drive("starting", revision())
    before = plane.snapshot()
    assert deliver(plane, held, request(plane, held)) == deliver(plane, held, request(plane, held))
    assert plane.snapshot() == before
    plane.control(held)
    with pytest.raises(Fenced):
        deliver(plane, held, request(plane, held))
    assert deliver(plane, held, request(plane, held, expected_lease_version=1)).values[0].value == SECRET


def test_no_secret_is_ever_in_the_database(plane: Plane, project: Path) -> None:  # V109
    held = plane.drive("starting", revision())
    deliver(plane, held, request(plane, held))
    for file in plane.directory.glob("control.sqlite*"):
        assert SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize("fault", ["missing", "open to others", "directory open", "not text", "too long", "nul", "link"])
def test_a_secret_that_cannot_be_used_is_unavailable(plane: Plane, project: Path, fault: str) -> None:
    held = plane.drive("starting", revision())
    file = project / "first"
    if fault == "missing":
        file.unlink()
    elif fault == "open to others":
        file.chmod(0o640)
    elif fault == "directory open":
        project.chmod(0o750)
    elif fault == "not text":
        file.write_bytes(b"\xff")
    elif fault == "too long":
        file.write_bytes(b"x" * (16 * 1024 + 1))
    elif fault == "nul":
        file.write_bytes(b"a\x00b")
    else:
        file.rename(project / "elsewhere")
        file.symlink_to(project / "elsewhere")
    with pytest.raises(Transient) as raised:
        deliver(plane, held, request(plane, held))
    assert SECRET not in str(raised.value)


def test_a_line_feed_at_the_end_belongs_to_the_value(plane: Plane, project: Path) -> None:
    (project / "first").write_text("value\n")
    held = plane.drive("starting", revision())
    assert deliver(plane, held, request(plane, held)).values[0].value == "value\n"


@pytest.mark.parametrize("name", ["../first", ".hidden", "a/b", "first@1"])
def test_a_reference_never_leaves_its_directory(plane: Plane, project: Path, name: str) -> None:
    with pytest.raises(Transient, match="project and name"):
        plane.secrets.read(SecretReference(project_id="project-1", name=name), 100)
