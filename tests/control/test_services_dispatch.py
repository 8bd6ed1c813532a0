"""The pull and the claim: control-plane.md §5 and §6."""

import threading
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, update

from qlworker.control.database import Database
from qlworker.control.schema import run_attempts, runs, task_execution_revisions, worker_sessions
from qlworker.control.services.claiming import Outcome, claim
from qlworker.control.services.dispatch import ScanBudget
from qlworker.control.services.session import Caller
from qlworker.domain.canonical import lease_token_digest
from qlworker.domain.errors import Fenced
from qlworker.domain.revision import ExecutionRevision, Placement, Preference, Required
from qlworker.wire.offers import Idle, Offered, OfferRequest
from tests.builders import make_revision
from tests.control.fixtures import CAPABILITIES, EDGE, LEASE_MS, OTHER_SESSION, START_MS, WORKER, Held, Plane, token

OTHER_WORKER = Caller("edge-2", OTHER_SESSION)


def reason(answer: Idle | Offered) -> str:
    assert isinstance(answer, Idle), answer
    return answer.reason


def revision_for(labels: dict[str, str], task_id: str = "task-1") -> ExecutionRevision:
    return make_revision(task_id=task_id, placement=Placement(required=Required(labels=labels)))


def try_claim(plane: Plane, held_or_run: str, caller: Caller = EDGE, number: int = 1) -> Outcome:
    request = OfferRequest(worker_generation=1, offer_id=f"offer-{number}", lease_token=token(number))
    with plane.database.transaction() as tx:
        return claim(tx, caller, held_or_run, request, LEASE_MS).outcome


def queued_attempt(plane: Plane, task_id: str = "task-1") -> str:
    run_id = plane.start_run(plane.publish(make_revision(task_id=task_id)))
    with plane.database.transaction() as tx:
        row = tx.row(run_attempts.select().where(run_attempts.c.run_id == run_id))
    assert row is not None
    return str(row.id)


def test_a_claim_starts_at_version_zero_of_generation_one(plane: Plane) -> None:  # V64 claimed
    revision = plane.publish()
    run_id = plane.start_run(revision)
    plane.register()
    answer = plane.pull()
    assert isinstance(answer, Offered)
    offer = answer.offer
    assert (offer.delivery_kind, offer.lease.version, offer.lease.lease_generation) == ("new_claim", 0, 1)
    assert offer.lease.expires_at_ms == START_MS + LEASE_MS
    assert offer.execution_revision == revision
    assert plane.events(run_id) == ["run.created", "run.queued", "run.dispatching"]
    run, attempt = plane.facts(plane.hold(answer, token()))
    assert (run.status, attempt.status, attempt.lease_version) == ("dispatching", "claimed", 0)


def test_nothing_queued_is_no_candidates(plane: Plane) -> None:
    plane.register()
    assert reason(plane.pull()) == "no_candidates"


def test_claim_outcomes_name_what_stood_in_the_way(plane: Plane) -> None:  # V64
    first, second = queued_attempt(plane), queued_attempt(plane, "task-2")
    assert try_claim(plane, first) is Outcome.WORKER_UNAVAILABLE
    plane.register()
    assert try_claim(plane, first) is Outcome.CLAIMED
    assert try_claim(plane, first) is Outcome.IDEMPOTENT
    assert try_claim(plane, first, number=2) is Outcome.LEASED
    assert try_claim(plane, second, number=2) is Outcome.CAPACITY_EXHAUSTED
    assert try_claim(plane, "no-such-attempt") is Outcome.NOT_ELIGIBLE


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        (runs, {"execution_owner": "legacy"}),
        (runs, {"cancel_requested_at_ms": 1, "cancel_reason": "user"}),
        (runs, {"status": "running"}),
        (run_attempts, {"status": "starting"}),
        (run_attempts, {"executor_type": "local"}),
    ],
)
def test_an_ineligible_attempt_is_neither_a_candidate_nor_claimable(plane: Plane, table: Any, changes: Any) -> None:  # V64
    attempt = queued_attempt(plane)
    plane.register()
    with plane.database.transaction() as tx:
        tx.write(update(table).values(**changes))
    assert try_claim(plane, attempt) is Outcome.NOT_ELIGIBLE
    assert reason(plane.pull()) == "no_candidates"


def test_a_completed_lease_is_never_claimed_again(plane: Plane) -> None:  # V64
    held = plane.drive("start_failed")
    assert try_claim(plane, held.attempt_id, number=2) is Outcome.NOT_ELIGIBLE


@pytest.mark.parametrize("state", ["replaced", "draining", "no_slots", "wrong_generation"])
def test_a_worker_that_may_take_nothing_is_told_so(plane: Plane, state: str) -> None:
    queued_attempt(plane)
    plane.register()
    if state == "replaced":
        plane.register(Caller(WORKER, OTHER_SESSION))
    elif state == "draining":
        plane.transition(0, "draining")
    elif state == "no_slots":
        plane.heartbeat(0, available_slots=0)
    generation = 2 if state == "wrong_generation" else 1
    before = plane.snapshot()
    assert reason(plane.pull(generation=generation)) == "worker_unavailable"
    assert plane.snapshot() == before


def test_two_workers_that_pull_at_once_do_not_get_the_same_attempt(plane: Plane) -> None:  # V65
    queued_attempt(plane)
    plane.register()
    plane.register(OTHER_WORKER)
    answers: list[Idle | Offered] = []

    def pull(caller: Caller, number: int) -> None:
        answers.append(plane.pull(f"offer-{number}", token(number), caller))

    threads = [threading.Thread(target=pull, args=args) for args in ((EDGE, 1), (OTHER_WORKER, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(answer).__name__ for answer in answers) == ["Idle", "Offered"]


def test_parallel_pulls_never_hold_more_leases_than_there_are_slots(plane: Plane) -> None:  # V66
    for number in range(10):
        queued_attempt(plane, f"task-{number}")
    plane.register(slots=2)
    answers: list[Idle | Offered] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(plane.pull(f"offer-{number}", token(number))))
        for number in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(answer, Offered) for answer in answers) == 2


def test_an_expired_unstarted_claim_is_given_away_again_under_the_next_generation(plane: Plane) -> None:  # V67
    held = plane.claim()
    plane.clock.advance(LEASE_MS)
    with pytest.raises(Fenced):
        plane.starting(held)
    again = plane.hold(plane.pull("offer-2", token(2)), token(2))
    assert (again.attempt_id, again.lease_generation, again.lease_version) == (held.attempt_id, 2, 1)
    assert plane.events(held.run_id)[-1] == "run.dispatch_reclaimed"
    with pytest.raises(Fenced):
        plane.starting(held)
    assert plane.starting(again).status == "applied"


def test_a_started_attempt_with_an_expired_lease_is_not_given_away(plane: Plane) -> None:
    plane.drive("starting")
    plane.clock.advance(LEASE_MS)
    assert reason(plane.pull("offer-2", token(2))) == "no_candidates"


def test_candidates_come_by_priority_then_by_waiting_time_across_pages(plane: Plane) -> None:  # V68
    order = []
    for number in range(70):
        run_id = plane.start_run(plane.publish(make_revision(task_id=f"task-{number}")), priority=number % 3)
        order.append((-(number % 3), number, run_id))
        plane.clock.advance(1)
    plane.register(slots=70, lease_duration_ms=600_000)
    wanted = [run_id for _, _, run_id in sorted(order)]
    for number, run_id in enumerate(wanted):
        answer = plane.pull(f"offer-{number}", token(number), budget=ScanBudget(page=8, pages=2))
        assert isinstance(answer, Offered)
        assert answer.offer.candidate.run_id == run_id


def test_equal_candidates_are_all_seen_page_by_page(plane: Plane) -> None:  # V68
    for number in range(20):
        plane.start_run(plane.publish(revision_for({"room": "x"}, f"task-{number}")))
    plane.register()
    answer = plane.pull(budget=ScanBudget(page=3, pages=7))
    assert isinstance(answer, Idle)
    assert (answer.reason, answer.stats.candidates, answer.truncated) == ("no_match", 20, False)


def test_an_exhausted_scan_budget_is_told_and_never_looks_like_no_work(plane: Plane) -> None:  # V70
    for number in range(17):
        plane.start_run(plane.publish(revision_for({"room": "x"}, f"task-{number}")))
    plane.register()
    answer = plane.pull(budget=ScanBudget(page=8, pages=2))
    assert isinstance(answer, Idle)
    assert (answer.reason, answer.truncated) == ("scan_budget_exhausted", True)
    assert (answer.stats.pages, answer.stats.candidates, answer.stats.placement_mismatches) == (2, 16, 16)


def test_work_for_an_absent_box_does_not_hide_the_work_of_others(plane: Plane) -> None:
    for number in range(100):
        plane.start_run(plane.publish(revision_for({"room": "x"}, f"task-{number}")))
    plane.start_run(plane.publish(make_revision(task_id="mine")))
    plane.register()
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.candidate.task_id == "mine"


def test_preferred_labels_raise_the_score(plane: Plane) -> None:
    preferred = [Preference(labels={"room": "attic"}, weight=7), Preference(labels={"room": "cellar"}, weight=5)]
    plane.start_run(plane.publish(make_revision(placement=Placement(preferred=preferred))))
    plane.register(capabilities=msgspec.structs.replace(CAPABILITIES, labels={"room": "attic"}))
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.placement_score == 7


def test_the_same_pull_again_gets_the_same_offer_and_writes_nothing(plane: Plane) -> None:  # V71
    plane.claim()
    before = plane.snapshot()
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert (answer.offer.delivery_kind, answer.offer.placement_score) == ("lease_recovery", 0)
    assert plane.snapshot() == before


def test_the_same_offer_with_another_token_or_session_is_fenced(plane: Plane) -> None:  # V71
    plane.claim()
    plane.register(OTHER_WORKER)
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.pull(lease_token=token(9))
    with pytest.raises(Fenced):
        plane.pull(caller=OTHER_WORKER)
    assert plane.snapshot() == before


def test_the_same_pull_tells_the_present_version_of_a_started_attempt(plane: Plane) -> None:  # D13
    held = plane.drive("running")
    plane.control(held)
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.lease.version == 1


@pytest.mark.req("R374")
@pytest.mark.parametrize("changes", [{"caller": OTHER_WORKER}, {"caller": Caller(WORKER, OTHER_SESSION)}, {"generation": 2}])
def test_an_offer_is_told_again_to_its_worker_session_and_generation_only(plane: Plane, changes: dict[str, Any]) -> None:
    plane.claim()
    plane.register(OTHER_WORKER)
    before = plane.snapshot()
    with pytest.raises(Fenced):
        plane.pull(**changes)
    assert plane.snapshot() == before


@pytest.mark.req("R380")
def test_a_draining_worker_still_gets_its_own_offer_back(plane: Plane) -> None:  # D12
    plane.claim()
    plane.transition(0, "draining")
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.delivery_kind == "lease_recovery"


@pytest.mark.req("R159")
def test_an_offer_is_told_again_after_the_control_plane_was_restarted(plane: Plane) -> None:
    held = plane.claim()
    plane.database.close()
    plane.database = Database(plane.url, plane.clock)
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.candidate.attempt_id == held.attempt_id


def test_the_same_pull_after_the_lease_ended_is_fenced(plane: Plane) -> None:
    plane.drive("succeeded")
    with pytest.raises(Fenced):
        plane.pull()


def test_neither_answer_nor_database_ever_holds_the_lease_token(plane: Plane) -> None:  # V72
    held: Held = plane.claim()
    plane.starting(held)
    plane.control(held)
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert held.token.encode() not in answer.to_json()
    assert lease_token_digest(held.token).encode() not in answer.to_json()
    for file in plane.directory.glob("control.sqlite*"):
        assert held.token.encode() not in file.read_bytes()


def test_a_missing_or_drifted_revision_is_never_replaced_by_another_one(plane: Plane) -> None:  # V73
    revision = plane.publish()
    plane.start_run(revision)
    newer = msgspec.structs.replace(revision, source_revision=2, task_revision=f"qltd:v1:2:{'a' * 64}").canonical()
    plane.publish(newer)
    plane.register()
    with plane.database.transaction() as tx:
        drifted = revision.to_json().decode().replace("/bin/true", "/bin/false")
        pinned = task_execution_revisions.c.source_revision == 1
        tx.write(update(task_execution_revisions).where(pinned).values(content=drifted))
    assert reason(plane.pull()) == "plans_unavailable"
    with plane.database.transaction() as tx:
        tx.write(delete(task_execution_revisions).where(task_execution_revisions.c.source_revision == 1))
    assert reason(plane.pull()) == "plans_unavailable"


def test_a_claimed_offer_whose_revision_vanished_is_fenced(plane: Plane) -> None:  # V73
    held = plane.claim()
    with plane.database.transaction() as tx:
        tx.write(delete(task_execution_revisions))
    with pytest.raises(Fenced):
        plane.pull()
    with pytest.raises(Fenced):
        plane.starting(held)


@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_a_claim_is_whole_or_not_at_all(plane: Plane, write: int) -> None:
    queued_attempt(plane)
    plane.register()
    before = plane.snapshot()
    with plane.failing_at(write), pytest.raises(OSError, match="disk"):
        plane.pull()
    assert plane.snapshot() == before


def test_a_claim_is_four_writes(plane: Plane) -> None:
    queued_attempt(plane)
    plane.register()
    with plane.failing_at(5) as seen:
        plane.pull()
    assert seen == [4]


def test_heartbeats_do_not_hide_held_leases_from_the_capacity(plane: Plane) -> None:
    for number in range(3):
        queued_attempt(plane, f"task-{number}")
    plane.register(slots=2)
    plane.pull("offer-1", token(1))
    with plane.database.transaction() as tx:
        tx.write(update(worker_sessions).values(available_slots=1))
    assert reason(plane.pull("offer-2", token(2))) == "worker_unavailable"


def test_a_run_for_one_worker_by_name_is_offered_to_no_other(plane: Plane) -> None:
    revision = plane.publish()
    run_id = plane.start_run(revision)
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(required_worker_id="edge-2"))
    plane.register()
    answer = plane.pull()
    assert isinstance(answer, Idle)
    assert answer.reason == "no_candidates"
    other = Caller("edge-2", OTHER_SESSION)
    plane.register(other)
    answer = plane.pull("offer-2", caller=other)
    assert isinstance(answer, Offered)
    assert answer.offer.candidate.run_id == run_id
