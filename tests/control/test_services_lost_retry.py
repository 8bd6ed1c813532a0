"""What follows a lost attempt: control-plane.md §10, requirements of group M."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select, update

from qlworker.control import admission, runs
from qlworker.control.admission import Origin, admit
from qlworker.control.aggregate import Attempt, Run, insert_attempt, latest_attempt
from qlworker.control.config import MaintenanceTerms
from qlworker.control.database import Transaction
from qlworker.control.retry_policy import RetryTerms
from qlworker.control.schema import (
    run_attempts,
    run_dispatch_leases,
    run_events,
    run_retry_policies,
    task_execution_revisions,
)
from qlworker.control.schema import runs as runs_table
from qlworker.control.services import claiming, dispatch, expiry, lost_retry_scan
from qlworker.control.services.claiming import Outcome, claim
from qlworker.control.services.dispatch import BUDGET, ScanBudget
from qlworker.control.services.expiry import Expiry, expire_with_lease
from qlworker.control.services.lost_retry import LostStep, follow_lost, load_policy
from qlworker.control.services.lost_retry_scan import PAGE, lost_runs, scan_lost
from qlworker.control.task_file import parse_task
from qlworker.control.tasks import Pinned, pinned, publish
from qlworker.domain.errors import Conflict, Fenced
from qlworker.wire.offers import Idle, Offered, OfferRequest
from tests.control.fixtures import EDGE, LEASE_MS, START_MS, Held, Plane, token

RETRY = RetryTerms(max_attempts=3, safety="idempotent", backoff_s=10, backoff_max_s=60)
TASK = 'project = "project-1"\nid = "task-1"\n[command]\nshell = "true"\n'
TERMS = '[retry]\nmax_attempts = 3\nsafety = "idempotent"\nbackoff_s = 10\nbackoff_max_s = 60\n'


def started(plane: Plane, retry: RetryTerms | None = RETRY) -> Held:
    """A running attempt of a run with this policy."""
    revision = plane.publish()
    with plane.database.transaction() as tx:
        text = None if retry is None else msgspec.json.encode(retry).decode()
        tx.write(update(task_execution_revisions).values(retry=text))
    plane.start_run(revision)
    plane.register()
    held = plane.hold(plane.pull(), token())
    plane.starting(held)
    plane.running(held)
    return held


def lose(plane: Plane, held: Held) -> None:
    """Lets the lease run out and the control plane see it."""
    plane.clock.advance(LEASE_MS)
    now = plane.clock.now_ms()
    assert plane.database.transact(expire_with_lease, held.run_id, held.attempt_id, now, "lost") is Expiry.LOST


def lost(plane: Plane, retry: RetryTerms | None = RETRY) -> Held:
    held = started(plane, retry)
    lose(plane, held)
    return held


def waiting(plane: Plane, retry: RetryTerms = RETRY) -> Held:
    """A run in retry_wait whose wait is over now."""
    held = lost(plane, retry)
    assert follow(plane, held) is LostStep.SCHEDULED
    plane.clock.advance(10_000)
    return held


def follow(plane: Plane, held: Held) -> LostStep:
    return plane.database.transact(follow_lost, held.run_id)


def newest(plane: Plane, held: Held) -> Attempt:
    with plane.database.transaction() as tx:
        attempt = latest_attempt(tx, held.run_id)
    assert attempt is not None
    return attempt


def change(plane: Plane, statement: Any) -> None:
    with plane.database.transaction() as tx:
        tx.write(statement)


def policy_row(plane: Plane, held: Held) -> Any:
    with plane.database.transaction() as tx:
        return load_policy(tx, held.run_id)


@pytest.mark.req("R325")
def test_run_first_attempt_and_policy_are_made_together_or_not_at_all(plane: Plane) -> None:  # V96
    plane.publish()
    change(plane, update(task_execution_revisions).values(retry=msgspec.json.encode(RETRY).decode()))
    before = plane.snapshot()
    with plane.failing_at(1000) as writes:
        plane.database.transact(runs.start, "project-1", "task-1")
    created = plane.snapshot()
    assert [len(created[name]) for name in ("runs", "run_attempts", "run_retry_policies")] == [1, 1, 1]
    assert writes[0] == 7
    for write in range(1, 8):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            plane.database.transact(runs.start, "project-1", "task-1")
        assert plane.snapshot() == created
    assert before["runs"] == []


@pytest.mark.req("R329", "R332", "R333")
def test_a_policy_comes_from_the_pinned_revision_and_from_nowhere_else(plane: Plane) -> None:
    given: list[Pinned] = []

    def remember(tx: Transaction) -> Run:
        given.append(pinned(tx, "project-1", "task-1"))
        return admit(
            tx,
            given[0],
            Origin(trigger_type="manual", execution_origin="operator", actor_type="user", actor_id="operator"),
        )

    held = started(plane)
    plane.database.transact(remember)
    assert set(Pinned.__struct_fields__) == {"project_id", "task_id", "task_revision", "required_worker_id", "retry"}
    assert given[0].retry == RETRY
    assert "retry" not in {*Origin.__struct_fields__, "safety"} - {"retry_of_run_id"}
    before = policy_row(plane, held)
    # A whole life with everything a worker may send, and the loss of its lease, leave the policy alone.
    plane.control(held)
    plane.clock.advance(LEASE_MS)
    now = plane.clock.now_ms()
    plane.database.transact(expire_with_lease, held.run_id, held.attempt_id, now, "lost")
    assert policy_row(plane, held) == before
    assert not {"policy", "retry"} & names_used_by(expiry.__file__)


def names_used_by(file: str | None) -> set[str]:
    assert file is not None
    return {
        alias.name.rpartition(".")[2].partition("_")[0]
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "ExpiryPolicy"
    }


@pytest.mark.req("R334")
def test_another_revision_of_the_task_does_not_change_the_policy_of_a_run(plane: Plane) -> None:
    with plane.database.transaction() as tx:
        publish(tx, parse_task((TASK + TERMS).encode(), "task.toml"))
        run_id = runs.start(tx, "project-1", "task-1").run_id
        before = load_policy(tx, run_id)
    with plane.database.transaction() as tx:
        publish(tx, parse_task((TASK + TERMS.replace("3", "9")).encode(), "task.toml"))
        publish(tx, parse_task(TASK.encode(), "task.toml"))
        assert load_policy(tx, run_id) == before
    assert before is not None
    assert before.max_attempts == 3


@pytest.mark.req("R326", "R372")
def test_a_lost_run_without_a_policy_fails(plane: Plane) -> None:
    held = lost(plane, None)
    assert follow(plane, held) is LostStep.FAILED
    run, attempt = plane.facts(held)
    assert (run.status, run.error_code, attempt.status) == ("failed", "RUN_LOST_RETRY_DISABLED", "lost")
    assert plane.events(held.run_id)[-1] == "run.failed"
    assert follow(plane, held) is LostStep.LEFT_ALONE


@pytest.mark.req("R372", "R523", "R524")
@pytest.mark.parametrize(
    ("terms", "code"),
    [
        (RetryTerms(on_lost=False, max_attempts=5), "RUN_LOST_RETRY_DISABLED"),
        (RetryTerms(max_attempts=1, safety="idempotent"), "RUN_LOST_RETRY_DISABLED"),
        (None, "RUN_LOST_RETRY_DISABLED"),
    ],
)
def test_a_lost_run_that_may_not_be_retried_fails_with_the_reason(plane: Plane, terms: RetryTerms | None, code: str) -> None:
    held = lost(plane, terms)
    assert follow(plane, held) is LostStep.FAILED
    assert plane.facts(held)[0].error_code == code


@pytest.mark.req("R335")
def test_a_lost_run_waits_from_the_moment_it_was_lost(plane: Plane) -> None:
    held = lost(plane)
    lost_at = plane.clock.now_ms()
    plane.clock.advance(7_000)
    before = plane.snapshot()
    for write in range(1, 4):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            follow(plane, held)
        assert plane.snapshot() == before
    assert follow(plane, held) is LostStep.SCHEDULED
    policy = policy_row(plane, held)
    assert (policy.next_attempt_at_ms, policy.version) == (lost_at + 10_000, 1)
    assert plane.facts(held)[0].status == "retry_wait"
    assert plane.events(held.run_id)[-1] == "run.retry_wait"
    assert follow(plane, held) is LostStep.LEFT_ALONE


@pytest.mark.req("R340", "R341")
def test_the_next_attempt_comes_when_it_is_due_and_whole(plane: Plane) -> None:  # V21
    held = lost(plane)
    follow(plane, held)
    plane.clock.advance(9_999)
    assert follow(plane, held) is LostStep.LEFT_ALONE
    plane.clock.advance(1)
    before = plane.snapshot()
    for write in range(1, 7):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            follow(plane, held)
        assert plane.snapshot() == before
    assert follow(plane, held) is LostStep.RETRIED
    assert newest(plane, held).attempt == 2
    run, policy = plane.facts(held)[0], policy_row(plane, held)
    assert (run.status, run.error_code, run.queued_at_ms) == ("queued", None, plane.clock.now_ms())
    assert (policy.next_attempt_at_ms, policy.version) == (None, 2)
    assert plane.events(held.run_id)[-2:] == ["run.queued", "attempt.claimed"]


@pytest.mark.req("R342")
def test_a_step_that_is_repeated_makes_no_further_attempt(plane: Plane) -> None:
    held = waiting(plane)
    with ThreadPoolExecutor(4) as pool:
        steps = list(pool.map(lambda _: follow(plane, held), range(8)))
    assert sorted(steps) == sorted([LostStep.RETRIED] + [LostStep.LEFT_ALONE] * 7)
    assert newest(plane, held).attempt == 2


@pytest.mark.req("R343", "R344", "R345", "R346", "R347", "R348", "R349")
def test_the_next_attempt_inherits_nothing_and_the_lost_one_stays_lost(plane: Plane) -> None:  # V95
    held = waiting(plane)
    old = plane.facts(held)[1]
    follow(plane, held)
    following = newest(plane, held)
    assert following == Attempt(
        id=following.id,
        run_id=held.run_id,
        attempt=2,
        status="claimed",
        executor_type="remote_worker",
        callback_sequence=0,
        created_at_ms=plane.clock.now_ms(),
    )
    with plane.database.transaction() as tx:
        leases = tx.rows(select(run_dispatch_leases.c.attempt_id))
    assert [row.attempt_id for row in leases] == [held.attempt_id]
    run, attempt = plane.facts(held)
    assert attempt == old
    assert run.retry_of_run_id is None
    assert run.finished_at_ms is None
    with pytest.raises(Fenced):
        plane.control(held)


@pytest.mark.req("R339", "R372")
def test_attempts_end_with_the_budget(plane: Plane) -> None:
    held = waiting(plane)
    for number in (2, 3):
        assert follow(plane, held) is LostStep.RETRIED
        again = plane.hold(plane.pull(f"offer-{number}", token(number)), token(number))
        assert again.attempt_id == newest(plane, held).id
        plane.starting(again)
        lose(plane, again)
        step = follow(plane, held)
        plane.clock.advance(60_000)
    assert step is LostStep.FAILED
    run = plane.facts(held)[0]
    assert (run.status, run.error_code) == ("failed", "RUN_LOST_RETRY_EXHAUSTED")
    assert newest(plane, held).attempt == 3


@pytest.mark.req("R339")
def test_a_policy_that_changed_meanwhile_takes_the_step_back(plane: Plane) -> None:
    held = waiting(plane)

    def step(tx: Transaction) -> None:
        tx.lock("run", held.run_id)
        assert load_policy(tx, held.run_id) is not None
        stale = load_policy(tx, held.run_id)
        tx.write(update(run_retry_policies).values(version=9))
        from qlworker.control.services import lost_retry

        lost_retry._change_policy(tx, stale, None)  # type: ignore[arg-type]

    before = plane.snapshot()
    with pytest.raises(Conflict, match="changed"):
        plane.database.transact(step)
    assert plane.snapshot() == before


@pytest.mark.req("R336", "R337", "R338", "R373")
@pytest.mark.parametrize(
    "statement",
    [
        update(runs_table).values(execution_owner="legacy"),
        update(runs_table).values(cancel_requested_at_ms=START_MS, cancel_reason="user"),
        update(runs_table).values(status="running"),
    ],
    ids=["another owner", "a cancel intent", "not waiting"],
)
@pytest.mark.parametrize("state", ["lost", "retry_wait"])
def test_what_changed_meanwhile_gets_no_next_attempt(plane: Plane, state: str, statement: Any) -> None:
    held = lost(plane) if state == "lost" else waiting(plane)
    change(plane, statement)
    before = plane.snapshot()
    assert follow(plane, held) is LostStep.LEFT_ALONE
    assert plane.snapshot() == before


@pytest.mark.req("R338")
def test_a_run_whose_newest_attempt_is_not_lost_is_left_alone(plane: Plane) -> None:
    held = waiting(plane)
    with plane.database.transaction() as tx:
        insert_attempt(tx, Attempt(id="another", run_id=held.run_id, attempt=2, status="claimed", created_at_ms=tx.now_ms))
    assert follow(plane, held) is LostStep.LEFT_ALONE


@pytest.mark.req("R373")
async def test_a_cancel_and_a_retry_that_race_leave_one_of_two_whole_outcomes(plane: Plane) -> None:
    held = waiting(plane)
    with ThreadPoolExecutor(2) as pool:
        step = pool.submit(follow, plane, held)
        pool.submit(plane.cancel, held.run_id).result()
        retried = step.result() is LostStep.RETRIED
    run = plane.facts(held)[0]
    assert run.status == "cancelled"
    assert newest(plane, held).attempt == (2 if retried else 1)
    assert newest(plane, held).status == ("cancelled" if retried else "lost")


def lost_page(plane: Plane, count: int) -> list[Held]:
    """`count` lost runs without a policy, by id."""
    revision = plane.publish()
    for _ in range(count):
        plane.start_run(revision)
    plane.register(slots=count)
    helds = [plane.hold(plane.pull(f"offer-{n}", token(n)), token(n)) for n in range(1, count + 1)]
    for held in helds:
        plane.starting(held)
    plane.clock.advance(LEASE_MS)
    for held in helds:
        plane.database.transact(expire_with_lease, held.run_id, held.attempt_id, plane.clock.now_ms(), "lost")
    return sorted(helds, key=lambda held: held.run_id)


@pytest.mark.req("R361", "R362")
@pytest.mark.parametrize("limit", [0, 65])
async def test_a_page_of_lost_runs_is_1_to_64_and_16_if_nothing_else_is_said(plane: Plane, limit: int) -> None:  # V22
    with pytest.raises(ValueError, match="1 to 64"):
        await scan_lost(plane.database, limit)
    helds = lost_page(plane, 18)
    scan = await scan_lost(plane.database)
    assert list(scan.steps) == [held.run_id for held in helds[:16]]
    assert PAGE == 16


@pytest.mark.req("R362")
def test_the_scan_has_no_timer_and_no_second_page() -> None:
    source = Path(lost_retry_scan.__file__ or "").read_text()
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {"trio", "time", "sleep"} & imported
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]


@pytest.mark.req("R363", "R364")
async def test_a_run_that_does_not_move_is_reported_and_stops_nobody(plane: Plane, monkeypatch: Any) -> None:  # V97
    first, second, third = lost_page(plane, 3)

    def failing(tx: Transaction, run_id: str) -> LostStep:
        if run_id == second.run_id:
            raise Conflict("inconsistent")
        return follow_lost(tx, run_id)

    monkeypatch.setattr("qlworker.control.services.lost_retry_scan.follow_lost", failing)
    scan = await scan_lost(plane.database)
    assert scan.steps == {first.run_id: LostStep.FAILED, third.run_id: LostStep.FAILED}
    assert scan.failures == {second.run_id: "inconsistent"}
    assert plane.facts(second)[0].status == "lost"
    with plane.database.transaction() as tx:
        assert lost_runs(tx, 16) == [second.run_id]


@pytest.mark.req("R365")
def test_lost_runs_come_first_and_nothing_before_it_is_due(plane: Plane) -> None:
    held = waiting(plane)
    plane.clock.advance(-1)
    with plane.database.transaction() as tx:
        assert lost_runs(tx, 16) == []
    plane.clock.advance(1)
    with plane.database.transaction() as tx:
        assert lost_runs(tx, 16) == [held.run_id]


@pytest.mark.req("R369", "R370")
def test_the_rhythm_of_lost_runs_is_the_profiles() -> None:
    edge, standalone = MaintenanceTerms(profile="edge").lost_retry, MaintenanceTerms().lost_retry
    assert (edge.interval_s, edge.page) == (30, 8)
    assert (standalone.interval_s, standalone.page) == (5, 32)


def queued_again(plane: Plane) -> tuple[Held, Attempt]:
    """A run whose second attempt waits to be offered."""
    held = waiting(plane)
    follow(plane, held)
    return held, newest(plane, held)


@pytest.mark.req("R350", "R353", "R358")
@pytest.mark.parametrize(
    "statement",
    [
        update(run_attempts).where(run_attempts.c.attempt == 2).values(status="starting"),
        update(runs_table).values(cancel_requested_at_ms=START_MS, cancel_reason="user"),
        update(runs_table).values(status="retry_wait"),
        update(runs_table).values(execution_owner="legacy"),
        update(run_attempts).where(run_attempts.c.attempt == 2).values(executor_type="local"),
    ],
    ids=["not claimed", "cancelled", "not queued", "another owner", "another executor"],
)
def test_an_attempt_is_verified_again_before_it_is_given_away(plane: Plane, statement: Any) -> None:
    _, following = queued_again(plane)
    change(plane, statement)
    request = OfferRequest(worker_generation=1, offer_id="offer-2", lease_token=token(2))
    before = plane.snapshot()
    result = plane.database.transact(claim, EDGE, following.id, request, LEASE_MS)
    assert result.outcome is Outcome.NOT_ELIGIBLE
    assert isinstance(plane.pull("offer-2", token(2)), Idle)
    assert plane.snapshot() == before


@pytest.mark.req("R353")
def test_an_older_attempt_is_never_given_away(plane: Plane) -> None:
    held, _ = queued_again(plane)
    change(plane, update(run_attempts).where(run_attempts.c.attempt == 1).values(status="claimed"))
    request = OfferRequest(worker_generation=1, offer_id="offer-2", lease_token=token(2))
    before = plane.snapshot()
    assert plane.database.transact(claim, EDGE, held.attempt_id, request, LEASE_MS).outcome is Outcome.NOT_ELIGIBLE
    assert plane.snapshot() == before


@pytest.mark.req("R351", "R514")
def test_the_next_attempt_goes_the_same_way_as_the_first(plane: Plane) -> None:
    held, following = queued_again(plane)
    again = plane.hold(plane.pull("offer-2", token(2)), token(2))
    assert again.attempt_id == following.id
    plane.starting(again)
    plane.running(again)
    plane.store(again)
    now = plane.clock.now_ms()
    assert plane.complete(again, again.completion(started_at_ms=now, finished_at_ms=now)).status == "applied"
    events = plane.events(held.run_id)
    first = events[events.index("run.dispatching") : events.index("run.running") + 1]
    second = events[events.index("attempt.claimed") + 1 :]
    assert second[: len(first)] == first
    assert plane.facts(held)[0].status == "succeeded"


@pytest.mark.req("R352", "R354")
def test_twenty_pulls_at_once_give_an_attempt_to_one(plane: Plane) -> None:
    _, following = queued_again(plane)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: plane.pull(f"offer-{n}", token(n)), range(2, 22)))
    offers = [answer for answer in answers if isinstance(answer, Offered)]
    assert [offer.offer.candidate.attempt_id for offer in offers] == [following.id]
    with plane.database.transaction() as tx:
        row = tx.row(select(func.count()).where(run_events.c.type == "run.dispatching"))
    assert row is not None
    assert row[0] == 2  # one for each attempt


@pytest.mark.req("R355", "R356")
@pytest.mark.parametrize("budget", [{"page": 65}, {"pages": 17}, {"claims": 65}, {"page": 0}, {"pages": 0}, {"claims": 0}])
def test_a_scan_of_the_queue_is_bounded(budget: dict[str, int]) -> None:
    """The default is the hard limit on purpose: a smaller one hides the work behind a queue for a box that is off."""
    with pytest.raises(ValueError, match="must be"):
        ScanBudget(**budget)
    assert (BUDGET.page, BUDGET.pages) == (64, 16)
    assert ScanBudget(page=8, pages=1) == msgspec.structs.replace(BUDGET, page=8, pages=1)


@pytest.mark.req("R357")
def test_one_scan_has_one_time_and_passes_every_candidate_once(plane: Plane) -> None:
    revision = plane.publish()
    for _ in range(5):
        plane.start_run(revision)
    change(plane, update(task_execution_revisions).values(content="damaged"))
    plane.register()
    asked: list[int] = []
    now_ms = plane.clock.now_ms

    def counting() -> int:
        asked.append(1)
        return now_ms()

    plane.clock.now_ms = counting  # type: ignore[method-assign]
    answer = plane.pull(budget=ScanBudget(page=2, pages=3))
    assert isinstance(answer, Idle)
    assert (answer.stats.candidates, answer.stats.pages, answer.reason) == (5, 3, "plans_unavailable")
    assert len(asked) == 1


@pytest.mark.req("R359")
def test_what_is_offered_is_what_was_pinned_whatever_is_published_later(plane: Plane) -> None:
    revision = plane.publish()
    plane.start_run(revision)
    with plane.database.transaction() as tx:
        publish(tx, parse_task(TASK.replace("true", "false").replace("id", "revision = 7\nid").encode(), "task.toml"))
    plane.register()
    answer = plane.pull()
    assert isinstance(answer, Offered)
    assert answer.offer.execution_revision == revision


@pytest.mark.req("R360")
@pytest.mark.parametrize("module", [claiming, dispatch, admission])
def test_who_gives_attempts_away_knows_no_secrets_logs_or_receipts(module: Any) -> None:
    text = Path(module.__file__).read_text()
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert not [each for each in modules if any(word in each for word in ("secret", "artifact", "run_log", "live", "receipt"))]
