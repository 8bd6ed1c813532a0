"""Attestations: append-only, in order, and fenced by everything stored (control-plane.md §16)."""

from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from qlworker.control.schema import run_attempts, run_dispatch_leases, worker_execution_attestations, worker_sessions
from qlworker.control.services import attestations
from qlworker.control.services.attestations import Attestation
from qlworker.control.services.session import Caller
from qlworker.domain.canonical import lease_token_digest
from qlworker.domain.errors import Fenced
from tests.builders import make_revision
from tests.control.fixtures import EDGE, LEASE_MS, OTHER_SESSION, SESSION, START_MS, WORKER, Plane, attestation_id

TABLE = worker_execution_attestations.name


def refuse(plane: Plane, *args: Any, **changes: Any) -> None:
    """The attestation is fenced, and nothing is stored of it."""
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.attest(*args, **changes)
    assert plane.snapshot() == before


def test_an_attestation_is_stored_whole_at_the_control_planes_time(plane: Plane) -> None:
    held = plane.drive("running")
    plane.clock.advance(5)
    answer = plane.attest(held)
    assert answer.members() == {
        "attestationId": attestation_id(1),
        "sequence": 1,
        "state": "running",
        "receivedAtMs": START_MS + 5,
        "replay": False,
    }
    with plane.database.transaction() as tx:
        stored = attestations.latest_attestation(tx, held.attempt_id)
    assert stored == Attestation.of(EDGE, held.attestation(), START_MS + 5)
    assert stored is not None
    assert (stored.worker_id, stored.worker_session_id) == (WORKER, SESSION)


def test_an_attestation_changes_no_other_table(plane: Plane) -> None:
    held = plane.drive("running")
    before = plane.snapshot(without=(TABLE,))
    plane.attest(held)
    plane.attest(held, 2, state="stopped")
    assert plane.snapshot(without=(TABLE,)) == before


def test_attestations_are_appended_in_order(plane: Plane) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held)
    plane.attest(held, 2, journal_revision=11)
    plane.attest(held, 3, journal_revision=12, state="stopped")
    with plane.database.transaction() as tx:
        rows = tx.rows(select(worker_execution_attestations).order_by(worker_execution_attestations.c.sequence))
    assert [(row.sequence, row.state, row.journal_revision) for row in rows] == [
        (1, "running", 10),
        (2, "running", 11),
        (3, "stopped", 12),
    ]


@pytest.mark.parametrize("first", [2, 3])
def test_the_first_sequence_is_1(plane: Plane, first: int) -> None:  # V117
    refuse(plane, plane.drive("running"), first)


def test_a_gap_in_the_sequence_is_refused(plane: Plane) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held)
    refuse(plane, held, 3)
    assert plane.attest(held, 2).sequence == 2


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_sequence_is_used_once(plane: Plane, sequence: int) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held)
    plane.attest(held, 2)
    refuse(plane, held, sequence, attestation_id=attestation_id(9), journal_revision=90)


@pytest.mark.parametrize("revision", [9, 10])
def test_a_journal_revision_that_does_not_grow_is_refused(plane: Plane, revision: int) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held)
    refuse(plane, held, 2, journal_revision=revision)
    assert plane.attest(held, 2, journal_revision=11).replay is False


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_nothing_follows_stopped(plane: Plane, state: str) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held, state="stopped")
    refuse(plane, held, 2, state=state)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_an_exact_repeat_is_told_what_is_stored_and_writes_nothing(plane: Plane, state: str) -> None:  # V117
    held = plane.drive("running")
    first = plane.attest(held, state=state)
    plane.clock.advance(1000)
    before = plane.snapshot()
    with plane.failing_at(1) as writes:
        again = plane.attest(held, state=state)
    assert (again.replay, again.received_at_ms) == (True, START_MS)
    assert again.members() | {"replay": False} == first.members()
    assert writes == [0]
    assert plane.snapshot() == before


def test_an_older_attestation_is_repeated_too(plane: Plane) -> None:
    held = plane.drive("running")
    plane.attest(held)
    plane.attest(held, 2, state="stopped")
    assert plane.attest(held).replay is True


@pytest.mark.parametrize("between", ["renewal", "expiry", "completion"])
def test_a_repeat_survives_what_happened_to_the_lease_since(plane: Plane, between: str) -> None:
    held = plane.drive("running")
    plane.attest(held)
    if between == "renewal":
        plane.control(held)
    elif between == "expiry":
        plane.clock.advance(LEASE_MS)
    else:
        plane.store(held)
        plane.complete(held)
    assert plane.attest(held).replay is True
    refuse(plane, held, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 2},
        {"state": "stopped"},
        {"lease_version": 1},
        {"callback_sequence": 0},
        {"executor_handle": "ql3lp1.other"},
        {"journal_revision": 11},
        {"sequence": 2, "journal_revision": 20},
    ],
    ids=str,
)
def test_an_id_used_again_for_another_statement_is_refused(plane: Plane, changes: dict[str, Any]) -> None:  # V117
    held = plane.drive("running")
    plane.attest(held)
    refuse(plane, held, **{"attestation_id": attestation_id(1), **changes})


def test_an_id_of_another_attempt_is_refused(plane: Plane) -> None:
    first = plane.drive("running")
    plane.attest(first)
    with plane.database.transaction() as tx:
        tx.write(update(worker_sessions).values(max_concurrent_runs=2, available_slots=2))
    plane.start_run(plane.publish(make_revision(task_id="task-2")))
    second = plane.hold(plane.pull("offer-2"), first.token)
    plane.starting(second)
    plane.running(second)
    refuse(plane, second)
    assert plane.attest(second, attestation_id=attestation_id(9)).sequence == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "another"},
        {"attempt_id": "another"},
        {"worker_generation": 2},
        {"lease_token_digest": lease_token_digest("another_lease_capability_0000000000")},
        {"lease_generation": 2},
        {"lease_version": 1},
        {"offer_id": "offer-2"},
        {"callback_sequence": 0},
        {"callback_sequence": 2},
        {"executor_handle": "ql3lp1.other"},
    ],
    ids=str,
)
def test_every_member_of_the_fence_counts(plane: Plane, changes: dict[str, Any]) -> None:  # V117
    refuse(plane, plane.drive("running"), **changes)


def test_an_attestation_goes_with_the_newest_lease_version(plane: Plane) -> None:
    held = plane.drive("running")
    plane.control(held)
    refuse(plane, held, lease_version=0)
    assert plane.attest(held, lease_version=1).replay is False


@pytest.mark.parametrize("state", ["claimed", "start_failed", "succeeded", "failed"])
def test_only_a_started_attempt_has_a_process_to_attest(plane: Plane, state: str) -> None:  # V117
    held = plane.drive(state)
    for callback_sequence in (0, 1):
        for lease_version in (0, 1):
            refuse(plane, held, callback_sequence=callback_sequence, lease_version=lease_version)


def test_a_starting_attempt_is_attested_before_its_handle_is_known(plane: Plane) -> None:
    held = plane.drive("starting")
    assert plane.attest(held, callback_sequence=0, state="stopped").sequence == 1


def test_an_attempt_that_ended_under_a_lease_left_open_is_not_attested(plane: Plane) -> None:
    held = plane.drive("succeeded")
    with plane.database.transaction() as tx:
        tx.write(update(run_dispatch_leases).values(status="leased", completed_at_ms=None))
    refuse(plane, held, lease_version=1)


def test_an_expired_lease_attests_nothing(plane: Plane) -> None:  # V117
    held = plane.drive("running")
    plane.clock.advance(LEASE_MS - 1)
    plane.attest(held)
    plane.clock.advance(1)
    refuse(plane, held, 2)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_replaced_session_attests_nothing_not_even_that_it_stopped(plane: Plane, state: str) -> None:  # V117, D24
    held = plane.drive("running")
    plane.attest(held)
    plane.register(Caller(WORKER, OTHER_SESSION))
    refuse(plane, held, 2, state=state)
    refuse(plane, held)


def test_the_session_that_replaced_it_cannot_speak_for_the_process_either(plane: Plane) -> None:  # D24
    held = plane.drive("running")
    heir = Caller(WORKER, OTHER_SESSION)
    generation = plane.register(heir).generation
    before = plane.snapshot()
    for claimed in (held.generation, generation):
        request = held.attestation(worker_generation=claimed, state="stopped")
        with plane.database.transaction() as tx, pytest.raises(Fenced):
            attestations.attest(tx, heir, request, plane.settings)
    assert plane.snapshot() == before


@pytest.mark.parametrize("end", ["offline", "expired"])
def test_a_session_that_is_over_attests_nothing(plane: Plane, end: str) -> None:
    held = plane.drive("running")
    with plane.database.transaction() as tx:
        tx.write(
            update(worker_sessions).values(status="offline")
            if end == "offline"
            else update(worker_sessions).values(lease_expires_at_ms=tx.now_ms)
        )
    refuse(plane, held)


def test_a_draining_session_still_attests(plane: Plane) -> None:
    held = plane.drive("running")
    plane.transition(0, "draining")
    assert plane.attest(held, state="stopped").sequence == 1


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_failing_write_leaves_nothing_and_the_next_try_is_new(plane: Plane, state: str) -> None:
    held = plane.drive("running")
    before = plane.snapshot()
    with plane.failing_at(1), pytest.raises(OSError, match="disk"):
        plane.attest(held, state=state)
    assert plane.snapshot() == before
    assert plane.attest(held, state=state).replay is False


def test_the_table_itself_takes_a_sequence_once(plane: Plane) -> None:
    held = plane.drive("running")
    plane.attest(held)
    before = plane.snapshot()
    with pytest.raises(IntegrityError), plane.database.transaction() as tx:
        tx.write(worker_execution_attestations.insert().values(_second_row(tx, held.attempt_id)))
    assert plane.snapshot() == before


def _second_row(tx: Any, attempt_id: str) -> dict[str, Any]:
    row = tx.row(select(worker_execution_attestations).where(worker_execution_attestations.c.attempt_id == attempt_id))
    return dict(row._mapping) | {"attestation_id": attestation_id(2)}


def test_a_projection_that_left_the_lease_is_refused(plane: Plane) -> None:
    held = plane.drive("running")
    with plane.database.transaction() as tx:
        tx.write(update(run_attempts).values(lease_version=3))
    refuse(plane, held)
