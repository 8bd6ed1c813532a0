"""Recovery with evidence: control-plane.md §16."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, select, update

from qlworker.control.schema import (
    recovery_controls,
    run_attempts,
    run_dispatch_leases,
    runs,
    worker_execution_attestations,
)
from qlworker.control.services.attestations import latest_attestation
from qlworker.control.services.authority import Claim, load_lease
from qlworker.control.services.evidence import Evidence, weigh
from qlworker.control.services.recovery import RecoveryTerms, Verdict, judge, recover, vouch_stopped
from qlworker.control.services.recovery_scan import candidates, scan_recovery
from qlworker.domain.errors import Conflict
from tests.control.fixtures import LEASE_MS, Held, Plane
from tests.control.losing import held_runs

TERMS = RecoveryTerms(freshness_ms=30_000, retry_ms=5_000)


def look(plane: Plane, held: Held) -> Verdict:
    return plane.database.transact(recover, held.run_id, held.attempt_id, TERMS)


def claim_of(plane: Plane, held: Held) -> tuple[Claim, Any]:
    run, attempt = plane.facts(held)
    with plane.database.transaction() as tx:
        lease = load_lease(tx, held.attempt_id)
        assert lease is not None
        return Claim(run, attempt, lease), latest_attestation(tx, held.attempt_id)


@pytest.fixture
def held(plane: Plane) -> Held:
    """A running attempt."""
    return plane.drive("running")


def test_without_a_statement_nothing_is_known(plane: Plane, held: Held) -> None:
    plane.clock.advance(10 * LEASE_MS)
    assert look(plane, held) == Verdict("retry", "no_evidence")
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status) == ("running", "running")


def test_a_process_that_stopped_makes_the_run_lost(plane: Plane, held: Held) -> None:
    plane.attest(held, state="stopped")
    plane.clock.advance(LEASE_MS)
    before = plane.snapshot()
    for write in range(1, 9):
        with plane.failing_at(write), pytest.raises(OSError, match="disk"):
            look(plane, held)
        assert plane.snapshot() == before
    assert look(plane, held) == Verdict("resolved", "process_gone", is_lost=True)
    run, attempt = plane.facts(held)
    assert (run.status, attempt.status, attempt.error_code) == ("lost", "lost", "REMOTE_PROCESS_GONE")
    assert plane.events(held.run_id)[-2:] == ["attempt.lost", "run.lost"]
    with plane.database.transaction() as tx:
        assert len(tx.rows(select(run_attempts))) == 1  # never attempt N+1
        assert candidates(tx, 16) == []


def test_a_process_that_ran_a_moment_ago_is_left_alone_and_an_old_word_counts_for_nothing(plane: Plane, held: Held) -> None:
    plane.clock.advance(LEASE_MS - 1)
    plane.attest(held)
    plane.clock.advance(1)
    assert look(plane, held) == Verdict("retry", "process_running")
    plane.clock.advance(30_000)
    assert look(plane, held) == Verdict("retry", "no_evidence")


@pytest.mark.parametrize(
    "change",
    [
        {"lease_generation": 2},
        {"worker_id": "other"},
        {"worker_session_id": "other"},
        {"worker_generation": 9},
        {"offer_id": "other"},
        {"lease_token_digest": "0" * 64},
        {"executor_handle": "another process"},
        {"run_id": "other"},
    ],
)
def test_a_statement_about_something_else_is_for_an_operator(plane: Plane, held: Held, change: dict[str, Any]) -> None:
    plane.attest(held, state="stopped")
    claim, latest = claim_of(plane, held)
    assert weigh(claim, latest, 0, 0) is Evidence.STOPPED
    other = msgspec.structs.replace(latest, **change)
    assert weigh(claim, other, 0, 0) is Evidence.CONFLICTING
    assert judge(claim, Evidence.CONFLICTING, plane.clock.now_ms() + LEASE_MS) == Verdict("manual", "conflicting_evidence")


def test_the_table_of_verdicts(plane: Plane, held: Held) -> None:  # V116
    claim, _ = claim_of(plane, held)
    over = plane.clock.now_ms() + LEASE_MS
    cancelled = msgspec.structs.replace(claim.run, cancel_requested_at_ms=1, cancel_reason="user")
    strange = msgspec.structs.replace(claim.run, status="queued")
    ended = msgspec.structs.replace(claim.run, status="failed")
    for evidence in Evidence:
        assert judge(claim, evidence, over - 1) == Verdict("resolved", "settled")
        assert judge(msgspec.structs.replace(claim, run=ended), evidence, over) == Verdict("resolved", "settled")
        assert judge(msgspec.structs.replace(claim, run=strange), evidence, over) == Verdict("manual", "inconsistent")
        assert judge(msgspec.structs.replace(claim, run=cancelled), evidence, over) == Verdict("retry", "cancel_requested")
        assert judge(claim, evidence, over).is_lost is (evidence is Evidence.STOPPED)


async def test_a_page_holds_started_attempts_whose_lease_is_over_and_nothing_else(plane: Plane) -> None:
    helds = held_runs(plane, 5, start=True)
    with plane.database.transaction() as tx:
        tx.write(update(run_attempts).where(run_attempts.c.id == helds[0].attempt_id).values(status="claimed"))
        tx.write(update(runs).where(runs.c.id == helds[1].run_id).values(status="failed"))
        tx.write(
            update(run_dispatch_leases)
            .where(run_dispatch_leases.c.attempt_id == helds[2].attempt_id)
            .values(expires_at_ms=plane.clock.now_ms() + 10 * LEASE_MS)
        )
    plane.clock.advance(LEASE_MS)
    scan = await scan_recovery(plane.database, TERMS)
    assert set(scan.verdicts) == {helds[3].attempt_id, helds[4].attempt_id}
    assert (await scan_recovery(plane.database, TERMS)).verdicts == {}
    plane.clock.advance(5_000)
    assert len((await scan_recovery(plane.database, TERMS, 1)).verdicts) == 1


@pytest.mark.parametrize("limit", [0, 129])
def test_a_page_is_1_to_128(plane: Plane, limit: int) -> None:
    with pytest.raises(ValueError, match="1 to 128"), plane.database.transaction() as tx:
        candidates(tx, limit)


async def test_one_attempt_that_cannot_be_looked_at_keeps_nobody_waiting(plane: Plane, monkeypatch: Any) -> None:
    first, second = held_runs(plane, 2, start=True)
    plane.clock.advance(LEASE_MS)

    def failing(tx: Any, run_id: str, attempt_id: str, terms: RecoveryTerms) -> Verdict:
        if attempt_id == first.attempt_id:
            raise Conflict("inconsistent")
        return recover(tx, run_id, attempt_id, terms)

    monkeypatch.setattr("qlworker.control.services.recovery_scan.recover", failing)
    scan = await scan_recovery(plane.database, TERMS)
    assert scan.failures == {first.attempt_id: "inconsistent"}
    assert list(scan.verdicts) == [second.attempt_id]


def test_an_operator_may_vouch_for_what_nobody_can_prove(plane: Plane, held: Held) -> None:  # D24
    with pytest.raises(Conflict, match="does not wait for evidence; qlcontrol recovery list"):
        plane.database.transact(vouch_stopped, held.run_id)
    plane.clock.advance(LEASE_MS)
    look(plane, held)
    plane.database.transact(vouch_stopped, held.run_id)
    run, attempt = plane.facts(held)
    assert (run.status, attempt.error_code) == ("lost", "REMOTE_PROCESS_GONE_BY_OPERATOR")
    with pytest.raises(Conflict, match="does not wait"):
        plane.database.transact(vouch_stopped, held.run_id)


def test_nobody_vouches_for_what_a_worker_holds(plane: Plane, held: Held) -> None:
    with plane.database.transaction() as tx:
        tx.write(
            insert(recovery_controls).values(
                attempt_id=held.attempt_id,
                run_id=held.run_id,
                status="manual",
                reason="inconsistent",
                version=0,
                looks=1,
                updated_at_ms=0,
            )
        )
    before = plane.snapshot()
    with pytest.raises(Conflict, match="is held by worker edge-1 or over"):
        plane.database.transact(vouch_stopped, held.run_id)
    assert plane.snapshot() == before


def test_a_statement_of_a_replaced_session_counts_as_no_evidence_at_all(plane: Plane, held: Held) -> None:
    plane.attest(held, state="stopped")
    with plane.database.transaction() as tx:
        tx.write(update(worker_execution_attestations).values(worker_session_id="another"))
    plane.clock.advance(LEASE_MS)
    assert look(plane, held) == Verdict("manual", "conflicting_evidence")
    assert plane.facts(held)[0].status == "running"
