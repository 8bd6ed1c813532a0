"""register, heartbeat, transition: control-plane.md §3.2."""

import threading
from typing import Any

import msgspec
import pytest

from qlworker.control.services import activation, artifacts, completion, lease_control, secrets
from qlworker.control.services.session import Caller
from qlworker.domain.errors import Fenced, Refused
from qlworker.domain.revision import Binding, SecretReference
from qlworker.domain.session import SessionStatus
from qlworker.wire.secrets import SecretRequestV2
from tests.builders import make_revision
from tests.control.fixtures import CAPABILITIES, OTHER_SESSION, SESSION, SESSION_MS, START_MS, WORKER, Plane, token

OTHER = Caller(WORKER, OTHER_SESSION)


def test_a_first_registration_opens_generation_one(plane: Plane) -> None:  # V57
    answer = plane.register()
    assert (answer.generation, answer.version, answer.status) == (1, 0, SessionStatus.ONLINE)
    assert answer.lease_expires_at_ms == START_MS + SESSION_MS
    assert not answer.replaced_session


def test_the_same_registration_reads_the_session_back_unchanged(plane: Plane) -> None:  # V57
    first = plane.register()
    plane.clock.advance(1000)
    before = plane.snapshot()
    assert plane.register() == first
    assert plane.snapshot() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"available_slots": 0},
        {"max_concurrent_runs": 2},
        {"capabilities": msgspec.structs.replace(CAPABILITIES, operating_system="linux")},
    ],
)
def test_the_same_session_with_other_facts_is_a_conflict(plane: Plane, changes: dict[str, Any]) -> None:  # V57
    plane.register()
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.register(**changes)
    assert plane.snapshot() == before


def test_another_session_replaces_the_old_one_and_counts_on(plane: Plane) -> None:  # V57
    plane.register()
    plane.heartbeat(0)
    answer = plane.register(OTHER)
    assert (answer.generation, answer.version, answer.replaced_session) == (2, 2, True)


def test_an_expired_session_cannot_be_registered_again_under_its_own_id(plane: Plane) -> None:  # V57, V62
    plane.register()
    plane.clock.advance(SESSION_MS)
    with pytest.raises(Fenced):
        plane.register()
    assert plane.register(OTHER).generation == 2


def test_capabilities_must_be_canonical_and_of_the_spoken_dialect(plane: Plane) -> None:
    with pytest.raises(Refused, match="later dialect"):
        plane.register(
            capabilities=msgspec.structs.replace(CAPABILITIES, protocol_version=msgspec.UNSET, support_tier=msgspec.UNSET)
        )


def test_a_session_lease_outside_the_operators_range_is_refused(tmp_path: Any) -> None:
    from qlworker.control.config import Sessions, Settings

    plane = Plane(tmp_path, Settings(sessions=Sessions(lease_min_s=10, lease_max_s=60)))
    try:
        with pytest.raises(Refused, match="leaseDurationMs"):
            plane.register()
        assert plane.register(lease_duration_ms=60_000).version == 0
        with pytest.raises(Refused, match="leaseDurationMs"):
            plane.heartbeat(0, lease_duration_ms=9_999)
    finally:
        plane.close()


def test_a_heartbeat_extends_the_lease_and_takes_the_next_version(plane: Plane) -> None:  # V59
    plane.register()
    plane.clock.advance(5000)
    answer = plane.heartbeat(0, available_slots=0)
    assert (answer.version, answer.lease_expires_at_ms) == (1, START_MS + 5000 + SESSION_MS)
    before = plane.snapshot()
    with pytest.raises(Fenced, match="version"):
        plane.heartbeat(0)
    assert plane.snapshot() == before


def test_more_slots_than_the_maximum_are_refused(plane: Plane) -> None:
    plane.register()
    with pytest.raises(Refused):
        plane.heartbeat(0, available_slots=2)


def test_a_draining_session_reports_no_slots_takes_no_work_and_still_renews(plane: Plane) -> None:  # V60
    held = plane.drive("running")
    plane.start_run(plane.publish(make_revision(task_id="task-2")))
    drained = plane.transition(0, "draining")
    assert (drained.status, drained.lease_expires_at_ms) == (SessionStatus.DRAINING, START_MS + SESSION_MS)
    beat = plane.heartbeat(1, available_slots=1)
    assert beat.status is SessionStatus.DRAINING
    assert plane.pull("offer-2", token(2)).reason == "worker_unavailable"  # type: ignore[union-attr]
    assert plane.control(held).status == "renewed"


def test_an_offline_session_is_over_at_once(plane: Plane) -> None:  # V61
    held = plane.drive("running")
    answer = plane.transition(0, "offline")
    assert (answer.status, answer.lease_expires_at_ms) == (SessionStatus.OFFLINE, START_MS)
    before = plane.snapshot()
    for late in (lambda: plane.heartbeat(1), lambda: plane.control(held), lambda: plane.running(held), plane.register):
        with pytest.raises(Fenced):
            late()
    assert plane.snapshot() == before


def test_an_expired_session_is_fenced_and_gets_no_work(plane: Plane) -> None:  # V62
    plane.start_run(plane.publish())
    plane.register()
    plane.clock.advance(SESSION_MS)
    with pytest.raises(Fenced, match="expired"):
        plane.heartbeat(0)
    assert plane.pull().reason == "worker_unavailable"  # type: ignore[union-attr]


@pytest.mark.parametrize("operation", ["heartbeat", "transition", "offers", "starting", "running", "start_failure"])
def test_a_replaced_session_is_fenced_in_every_operation(plane: Plane, operation: str) -> None:  # V58
    held = plane.drive("starting")
    plane.register(OTHER)
    before = plane.snapshot()
    calls = {
        "heartbeat": lambda: plane.heartbeat(1),
        "transition": lambda: plane.transition(1, "draining"),
        "offers": plane.pull,
        "starting": lambda: plane.starting(held),
        "running": lambda: plane.running(held),
        "start_failure": lambda: plane.start_failure(held),
    }
    with pytest.raises(Fenced):
        calls[operation]()
    assert plane.snapshot() == before


def test_a_replaced_session_gets_no_secrets_stores_no_log_and_completes_nothing(plane: Plane) -> None:  # V58
    reference = SecretReference(project_id="project-1", name="token").text()
    held = plane.claim(make_revision(environment=[Binding(name="TOKEN", kind="secret", secret_ref=reference)]))
    plane.starting(held)
    plane.store(held)
    plane.register(OTHER)
    before = plane.snapshot()
    wanted = SecretRequestV2(
        schema=SecretRequestV2.SCHEMA,
        **held.fence(),
        task_id="task-1",
        task_revision=plane.facts(held)[0].task_revision,
        execution_digest="0" * 64,
        secret_refs=[reference],
        environment_bundle_refs=[],
    )
    with plane.database.transaction() as tx:
        with pytest.raises(Fenced, match="replaced"):
            secrets.authorise(tx, held.caller, wanted, plane.settings)
        with pytest.raises(Fenced, match="replaced"):
            artifacts.authorise(tx, held.caller, held.upload(), plane.settings)
        with pytest.raises(Fenced, match="replaced"):
            completion.complete(tx, held.caller, held.completion(), plane.settings, True)
        with pytest.raises(Fenced, match="replaced"):
            lease_control.control(tx, held.caller, held.lease_control(), plane.settings)
        with pytest.raises(Fenced, match="replaced"):
            activation.starting(tx, held.caller, held.activation(), plane.settings)
    assert plane.snapshot() == before


def test_concurrent_registrations_get_strictly_ordered_generations(plane: Plane) -> None:  # V63
    seen: list[int] = []

    def register(number: int) -> None:
        caller = Caller(WORKER, f"{SESSION[:-2]}{number:02x}")
        seen.append(plane.register(caller).generation)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 21))
