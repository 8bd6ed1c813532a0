"""Started runs that nobody holds any more, under the policy `evidence`: lost only when their process is known to be gone.

Never makes attempt N+1: that is for the lost retry. Source: control-plane.md §16, D1, D24.
"""

from typing import Any, Final, Literal

import msgspec
from sqlalchemy import insert, select, update

from ...domain.errors import Conflict
from ..aggregate import TERMINAL, load_attempt, load_run
from ..database import Transaction
from ..schema import recovery_controls
from .activation import RUNNING, STARTING
from .attestations import latest_attestation
from .authority import LEASED, Claim, load_lease
from .claiming import DISPATCHING
from .completion import LOST
from .evidence import Evidence, weigh
from .expiry import lose, release

GONE: Final = "REMOTE_PROCESS_GONE"
GONE_BY_OPERATOR: Final = "REMOTE_PROCESS_GONE_BY_OPERATOR"

RecoveryStatus = Literal["retry", "manual", "resolved"]


class RecoveryTerms(msgspec.Struct, frozen=True):
    """How long a statement that a process runs is believed, and how long it takes until an attempt is looked at again."""

    freshness_ms: int = 30_000
    retry_ms: int = 5_000


class Verdict(msgspec.Struct, frozen=True):
    """What becomes of one candidate and why. `is_lost`: attempt and run are lost now."""

    status: RecoveryStatus
    reason: str
    is_lost: bool = False


def recover(tx: Transaction, run_id: str, attempt_id: str, terms: RecoveryTerms) -> Verdict:
    """Looks at one candidate and writes what came of it. Raises Conflict when something changed."""
    tx.lock("run", run_id)
    run, attempt, lease = load_run(tx, run_id), load_attempt(tx, attempt_id), load_lease(tx, attempt_id)
    claim = None if run is None or attempt is None or lease is None else Claim(run, attempt, lease)
    if claim is None:
        verdict = Verdict("manual", "inconsistent")
    else:
        evidence = weigh(claim, latest_attestation(tx, attempt_id), tx.now_ms, terms.freshness_ms)
        verdict = judge(claim, evidence, tx.now_ms)
        if verdict.is_lost:
            _lose(tx, claim, GONE)
    _note(tx, run_id, attempt_id, verdict, terms.retry_ms)
    return verdict


def judge(claim: Claim, evidence: Evidence, now_ms: int) -> Verdict:
    """The table of §16. Pure. With an intent to stop, the cancellation looks at the same evidence and ends the run itself."""
    run, attempt, lease = claim.run, claim.attempt, claim.lease
    if lease.is_live(now_ms) or run.status in TERMINAL or attempt.status in TERMINAL | {LOST}:
        return Verdict("resolved", "settled")
    if (run.status, attempt.status) not in {(DISPATCHING, STARTING), (RUNNING, RUNNING)}:
        return Verdict("manual", "inconsistent")
    if run.cancel_requested_at_ms is not None:
        return Verdict("retry", "cancel_requested")
    if evidence is Evidence.STOPPED:
        return Verdict("resolved", "process_gone", is_lost=True)
    if evidence is Evidence.CONFLICTING:
        return Verdict("manual", "conflicting_evidence")
    return Verdict("retry", "process_running" if evidence is Evidence.RUNNING else "no_evidence")


def vouch_stopped(tx: Transaction, run_id: str) -> None:
    """An operator has looked: the process of the run's attempt is gone. Attempt and run become lost.

    Raises Conflict when the run is not waiting for that: unknown, over, never started, or held by a worker right now.
    """
    tx.lock("run", run_id)
    table = recovery_controls
    known = tx.row(select(table).where(table.c.run_id == run_id, table.c.status != "resolved"))
    run = load_run(tx, run_id)
    attempt = None if known is None else load_attempt(tx, known.attempt_id)
    lease = None if known is None else load_lease(tx, known.attempt_id)
    if known is None or run is None or attempt is None or lease is None:
        raise Conflict(f"run {run_id} does not wait for evidence; qlcontrol recovery list shows those that do")
    if lease.is_live(tx.now_ms) or attempt.status not in (STARTING, RUNNING):
        raise Conflict(f"run {run_id} is held by worker {lease.worker_id} or over; look at it with qlcontrol run show {run_id}")
    _lose(tx, Claim(run, attempt, lease), GONE_BY_OPERATOR)
    _note(tx, run_id, attempt.id, Verdict("resolved", "operator"), 0)


def _lose(tx: Transaction, claim: Claim, code: str) -> None:
    if claim.lease.status == LEASED:
        claim = release(tx, claim)
    lose(tx, claim, code, f"run-recovery:{claim.attempt.id}:{claim.lease.lease_generation}", {})


def _note(tx: Transaction, run_id: str, attempt_id: str, verdict: Verdict, retry_ms: int) -> None:
    table = recovery_controls
    found = tx.row(select(table).where(table.c.attempt_id == attempt_id))
    values: dict[str, Any] = {
        "status": verdict.status,
        "reason": verdict.reason,
        "next_look_at_ms": tx.now_ms + retry_ms if verdict.status == "retry" else None,
        "updated_at_ms": tx.now_ms,
    }
    if found is None:
        tx.write(insert(table).values(attempt_id=attempt_id, run_id=run_id, version=0, looks=1, **values))
    else:
        tx.write_one(
            update(table)
            .where(table.c.attempt_id == attempt_id, table.c.version == found.version)
            .values(version=found.version + 1, looks=found.looks + 1, **values)
        )
