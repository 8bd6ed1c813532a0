"""lease-control, cancellation and timeout: control-plane.md §11."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from qlworker.control.schema import run_dispatch_leases, runs
from qlworker.domain.errors import Fenced
from qlworker.domain.lease import StopReason
from tests.builders import make_revision
from tests.control.fixtures import LEASE_MS, START_MS, Held, Plane


@pytest.mark.parametrize("state", ["claimed", "starting", "running"])
def test_a_renewal_takes_the_next_version_and_counts_from_now(plane: Plane, state: str) -> None:
    held = plane.drive(state)
    plane.clock.advance(30_000)
    answer = plane.control(held)
    assert (answer.status, answer.lease_version) == ("renewed", 1)
    assert (answer.renewed_at_ms, answer.expires_at_ms) == (START_MS + 30_000, START_MS + 30_000 + LEASE_MS)
    attempt = plane.facts(held)[1]
    assert (attempt.lease_version, attempt.lease_expires_at_ms) == (1, answer.expires_at_ms)


def test_a_renewal_appends_no_event(plane: Plane) -> None:
    held = plane.drive("running")
    before = plane.events(held.run_id)
    plane.control(held)
    assert plane.events(held.run_id) == before


def test_a_lost_renewal_answer_is_told_again_without_a_write(plane: Plane) -> None:  # V124, D19
    held = plane.drive("running")
    first = plane.control(held)
    plane.clock.advance(1000)
    before = plane.snapshot()
    assert plane.control(held) == first
    assert plane.snapshot() == before
    assert plane.control(held, expected_lease_version=1).lease_version == 2


def test_only_the_last_renewal_is_told_again(plane: Plane) -> None:  # V124
    held = plane.drive("running")
    plane.control(held)
    plane.control(held, expected_lease_version=1)
    before = plane.snapshot()
    for version in (0, 3):
        with pytest.raises(Fenced):
            plane.control(held, expected_lease_version=version)
    assert plane.snapshot() == before


def test_an_expired_lease_is_neither_renewed_nor_told_again(plane: Plane) -> None:
    held = plane.drive("running")
    plane.control(held)
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    for version in (0, 1):
        with pytest.raises(Fenced):
            plane.control(held, expected_lease_version=version)
    assert plane.snapshot() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"project_id": "another"},
        {"run_id": "another"},
        {"attempt_id": "another"},
        {"offer_id": "offer-2"},
        {"worker_generation": 2},
        {"lease_generation": 2},
        {"lease_token": "another_lease_capability_0000000000"},
    ],
)
def test_every_member_of_the_fence_counts(plane: Plane, changes: dict[str, Any]) -> None:
    held = plane.drive("running")
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.control(held, **changes)
    assert plane.snapshot() == before


def test_a_cancel_is_written_once(plane: Plane) -> None:  # V98
    held = plane.drive("running")
    plane.cancel(held.run_id)
    before = plane.snapshot()
    plane.clock.advance(1000)
    plane.cancel(held.run_id)
    assert plane.snapshot() == before
    assert plane.events(held.run_id).count("run.cancel_requested") == 1


def test_a_cancel_after_the_end_changes_nothing(plane: Plane) -> None:  # V98
    held = plane.drive("succeeded")
    before = plane.snapshot()
    plane.cancel(held.run_id)
    assert plane.snapshot() == before
    assert plane.control(held).status == "terminal"


def test_a_stop_answer_renews_so_that_the_worker_can_complete(plane: Plane) -> None:  # V100
    held = plane.drive("running")
    plane.store(held)
    plane.clock.advance(80_000)
    plane.cancel(held.run_id)
    answer = plane.control(held)
    assert answer.status == "stop_requested"
    assert answer.stop is not None
    assert (answer.stop.reason, answer.stop.requested_at_ms) == (StopReason.USER, START_MS + 80_000)
    assert (answer.lease_version, answer.expires_at_ms) == (1, START_MS + 80_000 + LEASE_MS)
    plane.clock.advance(80_000)
    assert plane.complete(held, held.completion(143, expected_lease_version=1)).status == "applied"
    assert plane.facts(held)[0].status == "cancelled"


def test_a_lost_stop_answer_is_told_again(plane: Plane) -> None:  # V124
    held = plane.drive("running")
    plane.cancel(held.run_id)
    assert plane.control(held) == plane.control(held)


def test_a_passed_deadline_becomes_one_intent(plane: Plane) -> None:  # V99
    held = plane.claim(make_revision(timeout_ms=10_000))
    plane.starting(held)
    plane.running(held)
    plane.clock.advance(9_999)
    assert plane.control(held).status == "renewed"
    plane.clock.advance(1)
    first = plane.control(held, expected_lease_version=1)
    assert first.stop is not None
    assert (first.stop.reason, first.stop.requested_at_ms) == (StopReason.TIMEOUT, START_MS + 10_000)
    plane.clock.advance(1000)
    second = plane.control(held, expected_lease_version=2)
    assert second.stop == first.stop
    assert plane.events(held.run_id).count("run.cancel_requested") == 1


def test_a_users_cancel_before_the_deadline_keeps_its_reason(plane: Plane) -> None:  # V99
    held = plane.claim(make_revision(timeout_ms=10_000))
    plane.starting(held)
    plane.cancel(held.run_id)
    plane.clock.advance(20_000)
    answer = plane.control(held)
    assert answer.stop is not None
    assert answer.stop.reason is StopReason.USER


@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_intent_and_renewal_are_one_unit(plane: Plane, write: int) -> None:
    held = plane.claim(make_revision(timeout_ms=10_000))
    plane.starting(held)
    plane.clock.advance(10_000)
    before = plane.snapshot()
    with plane.failing_at(write), pytest.raises(OSError, match="disk"):
        plane.control(held)
    assert plane.snapshot() == before


@pytest.mark.parametrize(("state", "status"), [("succeeded", "succeeded"), ("failed", "failed"), ("start_failed", "failed")])
def test_the_end_is_told_as_terminal(plane: Plane, state: str, status: str) -> None:  # V101
    held = plane.drive(state)
    answer = plane.control(held)
    assert (answer.status, answer.terminal_status, answer.lease_version) == ("terminal", status, None)


@pytest.mark.parametrize("shape", ["run differs", "lease open"])
def test_only_a_whole_end_is_terminal(plane: Plane, shape: str) -> None:  # V101
    held: Held = plane.drive("succeeded")
    with plane.database.transaction() as tx:
        if shape == "run differs":
            tx.write(update(runs).values(status="failed"))
        else:
            tx.write(update(run_dispatch_leases).values(status="leased", completed_at_ms=None))
    with pytest.raises(Fenced):
        plane.control(held)


def test_a_terminal_answer_needs_the_token_too(plane: Plane) -> None:  # V101
    held = plane.drive("succeeded")
    with pytest.raises(Fenced):
        plane.control(msgspec.structs.replace(held, token="another_lease_capability_0000000000"))
