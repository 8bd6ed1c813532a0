"""expireWithLease and its scanner: control-plane.md §9."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from sqlalchemy import event, insert, text, update

from qlworker.control.database import Transaction
from qlworker.control.schema import run_attempts, run_dispatch_leases, runs
from qlworker.control.services.authority import load_lease
from qlworker.control.services.expiry import Expiry, expire_with_lease
from qlworker.control.services.expiry_scan import DueLease, DuePage, ExpiryCursor, due_leases, scan_expired
from qlworker.control.worker_routes import ROUTES
from qlworker.domain.errors import Corrupt, Fenced
from qlworker.wire.offers import Offered
from tests.control.fixtures import LEASE_MS, OTHER_SESSION, START_MS, Held, Plane, token
from tests.control.losing import held_runs

STATES = ["claimed", "starting", "running"]


def expire(plane: Plane, held: Held, policy: Any = "lost", observed_at_ms: int | None = None) -> Expiry:
    observed = plane.clock.now_ms() if observed_at_ms is None else observed_at_ms
    return plane.database.transact(expire_with_lease, held.run_id, held.attempt_id, observed, policy)


def lease(plane: Plane, held: Held) -> Any:
    with plane.database.transaction() as tx:
        return load_lease(tx, held.attempt_id)


@pytest.mark.req("R300")
@pytest.mark.parametrize("state", STATES)
def test_a_live_lease_is_left_alone(plane: Plane, state: str) -> None:
    held = plane.drive(state)
    plane.clock.advance(LEASE_MS - 1)
    before = plane.snapshot()
    assert expire(plane, held) is Expiry.NOT_DUE
    assert plane.snapshot() == before


@pytest.mark.req("R303", "R304")
def test_a_claimed_attempt_is_only_released_and_can_be_claimed_again(plane: Plane) -> None:
    held = plane.claim()
    plane.clock.advance(LEASE_MS)
    assert expire(plane, held) is Expiry.UNSTARTED_RELEASED
    released = lease(plane, held)
    assert (released.status, released.release_reason, released.version) == ("released", "lease_expired", 1)
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status) == ("dispatching", "claimed")
    assert expire(plane, held) is Expiry.ALREADY_EXPIRED

    again = plane.hold(plane.pull("offer-2", token(2)), token(2))
    assert (again.attempt_id, again.lease_generation) == (held.attempt_id, held.lease_generation + 1)
    with pytest.raises(Fenced):
        plane.starting(held)


@pytest.mark.req("R303", "R305", "R306", "R348")
@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_started_attempt_and_its_run_are_lost_together_with_two_events(plane: Plane, state: str) -> None:
    held = plane.drive(state)
    plane.store(held)
    plane.clock.advance(LEASE_MS)
    assert expire(plane, held) is Expiry.LOST
    run, attempt = plane.facts(held)
    assert (run.status, run.error_code, run.finished_at_ms) == ("lost", "REMOTE_RUN_LEASE_EXPIRED", None)
    assert (attempt.status, attempt.error_code) == ("lost", "REMOTE_RUN_LEASE_EXPIRED")
    assert attempt.finished_at_ms == plane.clock.now_ms()
    assert plane.events(held.run_id)[-2:] == ["attempt.lost", "run.lost"]
    assert plane.actors(held.run_id)[-2:] == ["reconciler", "reconciler"]
    assert expire(plane, held) is Expiry.ALREADY_EXPIRED
    before = plane.snapshot()
    late = plane.complete(held)  # a late callback changes nothing
    assert late.status == "already_terminal"
    assert plane.snapshot() == before


@pytest.mark.req("R301")
def test_a_completed_lease_is_not_rewritten(plane: Plane) -> None:
    held = plane.drive("succeeded")
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    assert expire(plane, held) is Expiry.NOT_ELIGIBLE
    assert plane.snapshot() == before


@pytest.mark.req("R302")
def test_a_lease_released_for_another_reason_is_not_rewritten(plane: Plane) -> None:
    held = plane.claim()
    with plane.database.transaction() as tx:
        tx.write(update(run_dispatch_leases).values(status="released", released_at_ms=tx.now_ms, release_reason="declined"))
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    assert expire(plane, held) is Expiry.NOT_ELIGIBLE
    assert plane.snapshot() == before


@pytest.mark.req("R307")
@pytest.mark.parametrize("reason", ["user", "timeout"])
@pytest.mark.parametrize("state", STATES)
def test_with_an_intent_to_stop_only_the_authority_ends(plane: Plane, state: str, reason: str) -> None:  # V88
    held = plane.drive(state)
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(cancel_requested_at_ms=tx.now_ms, cancel_reason=reason))
    plane.clock.advance(LEASE_MS)
    before = plane.events(held.run_id)
    assert expire(plane, held) is Expiry.CANCELLATION_PENDING
    assert plane.events(held.run_id) == before
    assert lease(plane, held).status == "released"
    run, attempt = plane.facts(held)
    assert attempt.status == state
    assert run.status in ("dispatching", "running")


def test_an_attempt_that_is_over_only_has_its_lease_ended(plane: Plane) -> None:
    held = plane.drive("running")
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(status="failed"))
        tx.write(update(run_attempts).values(status="failed"))
    plane.clock.advance(LEASE_MS)
    before = plane.events(held.run_id)
    assert expire(plane, held) is Expiry.TERMINAL_RELEASED
    assert plane.events(held.run_id) == before


@pytest.mark.parametrize("policy", ["lost", "evidence"])
def test_an_attempt_without_a_lease_is_not_found(plane: Plane, policy: str) -> None:
    run_id = plane.start_run(plane.publish())
    assert plane.database.transact(expire_with_lease, run_id, "nothing", START_MS, policy) is Expiry.NOT_FOUND


@pytest.mark.parametrize(
    "change",
    [
        update(runs).values(execution_owner="legacy"),
        update(run_attempts).values(executor_type="local"),
        update(runs).values(status="queued"),
        update(run_attempts).values(status="claimed"),
    ],
)
def test_what_does_not_belong_together_is_an_error_and_nothing_is_written(plane: Plane, change: Any) -> None:
    held = plane.drive("running")
    with plane.database.transaction() as tx:
        tx.write(change)
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    with pytest.raises(Corrupt):
        expire(plane, held)
    with pytest.raises(Corrupt, match="does not belong to run other"):
        expire(plane, msgspec.structs.replace(held, run_id="other"))
    assert plane.snapshot() == before


@pytest.mark.parametrize("state", ["starting", "running"])
def test_under_the_policy_evidence_a_started_attempt_stays_as_it_is(plane: Plane, state: str) -> None:  # D1
    held = plane.drive(state)
    plane.clock.advance(10 * LEASE_MS)
    before = plane.snapshot()
    assert expire(plane, held, "evidence") is Expiry.AWAITS_EVIDENCE
    assert plane.snapshot() == before


def test_under_the_policy_evidence_a_claimed_attempt_is_released_all_the_same(plane: Plane) -> None:  # D31
    held = plane.claim()
    plane.clock.advance(LEASE_MS)
    assert expire(plane, held, "evidence") is Expiry.UNSTARTED_RELEASED


@pytest.mark.req("R309")
def test_an_expiry_is_whole_or_not_at_all(plane: Plane) -> None:  # V89
    held = plane.drive("running")
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    with plane.failing_at(1000) as writes, plane.database.transaction() as tx:
        expire_with_lease(tx, held.run_id, held.attempt_id, tx.now_ms, "lost")
        count = writes[0]
        tx.rows(text("SELECT 1"))
        tx._connection.rollback()
    assert count >= 6
    for write in range(1, count + 1):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            expire(plane, held)
        assert plane.snapshot() == before
    assert expire(plane, held) is Expiry.LOST


@pytest.mark.req("R298")
def test_no_route_of_a_worker_reaches_expiry() -> None:  # V92
    assert not [name for name in ROUTES if "expir" in name or "lost" in name]


async def race(plane: Plane, calls: dict[str, Callable[[], Any]]) -> set[str]:
    """Runs all at once, each in its own thread; the names of those that changed something."""
    won: set[str] = set()

    async def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            answer = await trio.to_thread.run_sync(call)
        except Fenced:
            return
        if answer in (Expiry.LOST, "renewed") or getattr(answer, "status", None) in ("renewed", "applied"):
            won.add(name)

    names = list(calls)
    random.shuffle(names)
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(attempt, name, calls[name])
    return won


@pytest.mark.req("R299", "R308")
async def test_of_renewal_completion_and_expiry_exactly_one_wins(plane: Plane) -> None:  # V86
    helds = held_runs(plane, 25)
    for round_, held in enumerate(helds):
        plane.running(held)
        plane.store(held)
        expires_at = lease(plane, held).expires_at_ms
        # At the very end of the lease: judged at one of two moments, so that each of the three can be first.
        late = round_ % 2 == 0
        observed = expires_at if late else expires_at - 1
        plane.clock.advance(observed - plane.clock.now_ms())
        won = await race(
            plane,
            {
                "expire": partial(expire, plane, held, observed_at_ms=observed),
                "complete": partial(plane.complete, held),
                "renew": partial(plane.control, held),
            },
        )
        if late:
            assert won == {"expire"}
        else:
            assert "expire" not in won
            assert won in ({"complete"}, {"renew"})
        run, attempt = plane.facts(held)
        assert (run.status, attempt.status) in {("lost", "lost"), ("succeeded", "succeeded"), ("running", "running")}
        plane.clock.advance(START_MS - plane.clock.now_ms())


def at_ends(plane: Plane, helds: list[Held], offsets: list[int]) -> None:
    """Lets the leases run out at `START_MS` plus these milliseconds."""
    for held, offset in zip(helds, offsets, strict=True):
        with plane.database.transaction() as tx:
            tx.write(
                update(run_dispatch_leases)
                .where(run_dispatch_leases.c.attempt_id == held.attempt_id)
                .values(expires_at_ms=START_MS + offset, renewed_at_ms=START_MS - 1)
            )


@pytest.mark.req("R314", "R315", "R323")
async def test_a_scan_ends_a_page_in_order_and_tells_where_to_go_on(plane: Plane) -> None:
    helds = held_runs(plane, 5, start=True)
    at_ends(plane, helds, [3, 1, 2, 2, 9])
    plane.clock.advance(5)
    ends = sorted((offset, held.attempt_id) for held, offset in zip(helds, [3, 1, 2, 2], strict=False))

    first = await scan_expired(plane.database, None, "lost", 2)
    assert first.results == [Expiry.LOST, Expiry.LOST]
    assert first.truncated
    assert first.cursor == ExpiryCursor(START_MS + ends[1][0], ends[1][1])
    second = await scan_expired(plane.database, first.cursor, "lost", 3)
    assert (second.results, second.cursor, second.truncated) == ([Expiry.LOST, Expiry.LOST], None, False)
    assert plane.facts(helds[4])[0].status == "dispatching"


@pytest.mark.req("R316", "R317", "R318", "R319", "R320")
async def test_a_failing_lease_stops_the_page_and_is_met_again(plane: Plane) -> None:  # V90
    helds = held_runs(plane, 5, start=True)
    at_ends(plane, helds, [1, 2, 3, 4, 5])
    plane.clock.advance(100)
    with plane.database.transaction() as tx:
        tx.write(update(runs).where(runs.c.id == helds[2].run_id).values(status="running"))

    cursor = None
    for _ in range(2):
        scan = await scan_expired(plane.database, cursor, "lost")
        cursor = scan.cursor
        assert scan.failed == helds[2].run_id
        assert scan.truncated
        assert scan.cursor == ExpiryCursor(START_MS + 2, helds[1].attempt_id)
    assert [plane.facts(held)[0].status for held in helds] == ["lost", "lost", "running", "dispatching", "dispatching"]

    with plane.database.transaction() as tx:
        tx.write(update(runs).where(runs.c.id == helds[2].run_id).values(status="dispatching"))
    scan = await scan_expired(plane.database, scan.cursor, "lost")
    assert scan.results == [Expiry.LOST] * 3
    assert scan.cursor is None


@pytest.mark.req("R318")
async def test_a_scan_that_fails_at_once_keeps_the_cursor_it_was_given(plane: Plane) -> None:
    (held,) = held_runs(plane, 1, start=True)
    plane.clock.advance(LEASE_MS)
    with plane.database.transaction() as tx:
        tx.write(update(runs).values(status="running"))
    given = ExpiryCursor(5, "before")
    scan = await scan_expired(plane.database, given, "lost")
    assert (scan.results, scan.cursor, scan.failed) == ([], given, held.run_id)


@pytest.mark.req("R313", "R321", "R322")
@pytest.mark.parametrize("limit", [0, 65])
async def test_a_page_is_1_to_64_and_a_scan_is_one_page(plane: Plane, limit: int) -> None:  # V91
    with pytest.raises(ValueError, match="1 to 64"):
        await scan_expired(plane.database, None, "lost", limit)
    helds = held_runs(plane, 20, start=True)
    plane.clock.advance(LEASE_MS)
    asked: list[int] = []

    def source(tx: Transaction, after: Any, size: int, policy: Any) -> DuePage:
        asked.append(size)
        return due_leases(tx, after, size, policy)

    scan = await scan_expired(plane.database, None, "lost", source=source)
    assert asked == [16]
    assert len(scan.results) == 16
    assert sum(plane.facts(held)[0].status == "lost" for held in helds) == 16


@pytest.mark.req("R312")
async def test_one_scan_judges_all_by_one_time(plane: Plane) -> None:
    helds = held_runs(plane, 2, start=True)
    at_ends(plane, helds, [1, 2])
    plane.clock.advance(10)
    observed: list[int] = []

    def source(tx: Transaction, after: Any, size: int, policy: Any) -> DuePage:
        page = due_leases(tx, after, size, policy)
        observed.append(page.observed_at_ms)
        # Both are renewed before they are looked at, the second one beyond the time the page was read at.
        at_later = update(run_dispatch_leases).where(run_dispatch_leases.c.attempt_id == helds[1].attempt_id)
        tx.write(at_later.values(expires_at_ms=page.observed_at_ms + 1))
        plane.clock.advance(1_000)
        return page

    scan = await scan_expired(plane.database, None, "lost", source=source)
    assert scan.results == [Expiry.LOST, Expiry.NOT_DUE]
    assert len(observed) == 1


@pytest.mark.parametrize(
    "leases",
    [
        [(5, "b"), (5, "a")],
        [(5, "a"), (5, "a")],
        [(9, "a")],
        [(1, "a"), (2, "b"), (3, "c")],
    ],
    ids=["backwards", "twice", "not due", "too many"],
)
async def test_a_source_out_of_order_is_refused_before_anything_is_done(plane: Plane, leases: list[tuple[int, str]]) -> None:
    page = DuePage(8, [DueLease(ExpiryCursor(*each), "run") for each in leases])
    before = plane.snapshot()
    with pytest.raises(Corrupt, match=r"expired"):
        await scan_expired(plane.database, None, "lost", 2, source=lambda *_: page)
    assert plane.snapshot() == before


@pytest.mark.req("R311")
def test_the_source_returns_only_active_runs_and_attempts_of_this_owner(plane: Plane) -> None:
    helds = held_runs(plane, 5, start=True)
    with plane.database.transaction() as tx:
        for held, table, values in (
            (helds[0], runs, {"execution_owner": "legacy"}),
            (helds[1], runs, {"status": "failed"}),
            (helds[2], run_attempts, {"status": "failed"}),
            (helds[3], run_attempts, {"executor_type": "local"}),
        ):
            key = runs.c.id == held.run_id if table is runs else run_attempts.c.id == held.attempt_id
            tx.write(update(table).where(key).values(**values))
    plane.clock.advance(LEASE_MS)
    with plane.database.transaction() as tx:
        assert [each.run_id for each in due_leases(tx, None, 64, "lost").leases] == [helds[4].run_id]
        assert due_leases(tx, None, 64, "evidence").leases == []


@pytest.mark.req("R310")
def test_the_source_reads_the_index_of_expiries(plane: Plane) -> None:
    statements: list[tuple[str, Any]] = []

    def remember(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    helds = held_runs(plane, 3)
    fill(plane, helds[0], 3_000)
    event.listen(plane.database.engine, "before_cursor_execute", remember)
    with plane.database.transaction() as tx:
        due_leases(tx, None, 16, "lost")
    event.remove(plane.database.engine, "before_cursor_execute", remember)
    statement, parameters = next(each for each in statements if "expires_at_ms <=" in each[0])
    explain = "EXPLAIN " if plane.database.is_shared else "EXPLAIN QUERY PLAN "
    with plane.database.engine.connect() as connection:
        if plane.database.is_shared:
            connection.exec_driver_sql("ANALYZE")
        plan = "\n".join(str(row) for row in connection.exec_driver_sql(explain + statement, parameters))
    assert "run_dispatch_leases_by_expiry" in plan


def fill(plane: Plane, held: Held, count: int) -> None:
    """Finished work of the past: leases that no scan may have to read."""
    past = [f"past-{number}" for number in range(count)]
    with plane.database.engine.begin() as connection:
        for table, key, done in (
            # No Event and no version, as the count that is checked after each test wants it.
            (runs, runs.c.id == held.run_id, {"status": "failed", "version": 0, "event_sequence": 0}),
            (run_attempts, run_attempts.c.id == held.attempt_id, {"status": "failed"}),
            (
                run_dispatch_leases,
                run_dispatch_leases.c.attempt_id == held.attempt_id,
                {"status": "completed", "completed_at_ms": START_MS},
            ),
        ):
            row = dict(connection.execute(table.select().where(key)).one()._mapping) | done
            names = {"id", "run_id", "attempt_id", "offer_id"} & set(row)
            connection.execute(insert(table), [row | dict.fromkeys(names, each) for each in past])


def test_a_worker_that_comes_back_after_the_expiry_is_fenced_for_every_call(plane: Plane) -> None:
    held = plane.drive("running")
    plane.clock.advance(LEASE_MS)
    expire(plane, held)
    before = plane.snapshot()
    for call in (plane.control, plane.starting, plane.running, plane.start_failure, plane.attest, plane.store):
        with pytest.raises(Fenced):
            call(held)
    assert plane.snapshot() == before


def test_a_lost_run_is_offered_to_nobody(plane: Plane) -> None:
    held = plane.drive("running")
    plane.clock.advance(LEASE_MS)
    expire(plane, held)
    plane.register(msgspec.structs.replace(held.caller, session_id=OTHER_SESSION))
    assert not isinstance(
        plane.pull("offer-2", token(2), msgspec.structs.replace(held.caller, session_id=OTHER_SESSION), 2), Offered
    )
