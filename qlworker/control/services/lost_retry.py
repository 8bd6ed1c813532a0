"""What follows a lost attempt: the next one after a wait, or the end of the run, as its policy says. One step per transaction.

A lost run gets the time of its next attempt, and when that has come, the attempt; whoever repeats a step finds it done. Source:
control-plane.md §10.3 to §10.5, R335 to R349.
"""

from enum import StrEnum
from typing import Final

import msgspec
from sqlalchemy import select, update

from ..aggregate import RUNTIME, Attempt, Run, advance_run, append_event, insert_attempt, latest_attempt, load_run
from ..database import Transaction
from ..ids import new_id
from ..retry_policy import SCHEDULED, RetryPolicy, refusal
from ..schema import run_retry_policies
from .claiming import CLAIMED, QUEUED
from .completion import LOST

RETRY_WAIT: Final = "retry_wait"


class LostStep(StrEnum):
    """What one step did. `left_alone`: nothing is due, or somebody else owns what happens next."""

    LEFT_ALONE = "left_alone"
    SCHEDULED = "scheduled"
    RETRIED = "retried"
    FAILED = "failed"


def load_policy(tx: Transaction, run_id: str) -> RetryPolicy | None:
    """The run's retry policy, or None: then nothing is retried (R326)."""
    row = tx.row(select(run_retry_policies).where(run_retry_policies.c.run_id == run_id))
    return None if row is None else RetryPolicy(**row._mapping)


def follow_lost(tx: Transaction, run_id: str) -> LostStep:
    """Takes the next step of a lost run. A run that is to be cancelled is left to the cancellation, which so always wins.

    Raises Conflict when the stored run or policy is not what was read.
    """
    tx.lock("run", run_id)
    run, attempt, policy = load_run(tx, run_id), latest_attempt(tx, run_id), load_policy(tx, run_id)
    if run is None or attempt is None:
        return LostStep.LEFT_ALONE
    step = next_step(run, attempt, policy, tx.now_ms)
    if step is LostStep.FAILED:
        _fail(tx, run, attempt, refusal(policy, attempt.attempt))
    elif policy is not None and step is LostStep.SCHEDULED:
        _schedule(tx, run, attempt, policy)
    elif policy is not None and step is LostStep.RETRIED:
        _retry(tx, run, attempt, policy)
    return step


def next_step(run: Run, newest: Attempt, policy: RetryPolicy | None, now_ms: int) -> LostStep:
    """What a run whose newest attempt is `newest` gets now, in the order of §10.3. Pure."""
    if newest.status != LOST or run.execution_owner != RUNTIME or run.cancel_requested_at_ms is not None:
        return LostStep.LEFT_ALONE
    is_refused = refusal(policy, newest.attempt) is not None
    if run.status == LOST:
        return LostStep.FAILED if is_refused else LostStep.SCHEDULED
    due_at_ms = None if policy is None else policy.next_attempt_at_ms
    is_due = run.status == RETRY_WAIT and due_at_ms is not None and due_at_ms <= now_ms
    return LostStep.RETRIED if is_due and not is_refused else LostStep.LEFT_ALONE


def _fail(tx: Transaction, run: Run, attempt: Attempt, code: str | None) -> None:
    advance_run(
        tx,
        run,
        "failed",
        "run.failed",
        actor_type="reconciler",
        attempt_id=attempt.id,
        payload={"toStatus": "failed", "errorCode": code, "attempt": attempt.attempt},
        dedupe_key=f"lost-retry:{attempt.id}:failed",
        changes={"finished_at_ms": max(tx.now_ms, run.created_at_ms, attempt.finished_at_ms or 0), "error_code": code},
    )


def _schedule(tx: Transaction, run: Run, attempt: Attempt, policy: RetryPolicy) -> None:
    """From the moment the attempt was lost, not from now: a scan that comes late must not make the wait longer."""
    due_at_ms = (attempt.finished_at_ms or tx.now_ms) + policy.backoff_ms(attempt.attempt)
    _change_policy(tx, policy, due_at_ms)
    advance_run(
        tx,
        run,
        RETRY_WAIT,
        "run.retry_wait",
        actor_type="reconciler",
        attempt_id=attempt.id,
        payload={"code": SCHEDULED, "attempt": attempt.attempt, "nextAttemptAtMs": due_at_ms},
        dedupe_key=f"lost-retry:{attempt.id}:retry_wait",
    )


def _retry(tx: Transaction, run: Run, lost: Attempt, policy: RetryPolicy) -> None:
    """Attempt N+1, which has nothing of attempt N but the run and the kind of executor (§10.5)."""
    following = Attempt(
        id=new_id(tx.now_ms),
        run_id=run.id,
        attempt=lost.attempt + 1,
        status=CLAIMED,
        executor_type=lost.executor_type,
        created_at_ms=tx.now_ms,
    )
    _change_policy(tx, policy, None)
    run = advance_run(
        tx,
        run,
        QUEUED,
        "run.queued",
        actor_type="reconciler",
        attempt_id=following.id,
        payload={"attempt": following.attempt},
        dedupe_key=f"lost-retry:{lost.id}:queued",
        changes={"queued_at_ms": tx.now_ms, "error_code": None, "error_summary": None},
    )
    insert_attempt(tx, following)
    append_event(
        tx,
        run,
        "attempt.claimed",
        actor_type="reconciler",
        attempt_id=following.id,
        payload={"attempt": following.attempt, "lostAttemptId": lost.id},
        dedupe_key=f"lost-retry:{lost.id}:claimed",
    )


def _change_policy(tx: Transaction, policy: RetryPolicy, next_attempt_at_ms: int | None) -> None:
    after = msgspec.structs.replace(
        policy, next_attempt_at_ms=next_attempt_at_ms, version=policy.version + 1, updated_at_ms=tx.now_ms
    )
    table = run_retry_policies
    tx.write_one(
        update(table)
        .where(table.c.run_id == policy.run_id, table.c.version == policy.version)
        .values(msgspec.structs.asdict(after))
    )
