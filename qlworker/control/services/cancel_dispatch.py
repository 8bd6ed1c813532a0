"""How far the word to stop has come: waiting to be told, told to the worker, or blocked because nobody is there to be told.

One record per run, written in the transaction that does what it says: a worker hears of a stop only in an answer whose record
is already settled (D20). A worker that pulls reports neither a missing controller nor a strange process, so of the results of
control-plane.md §11.4 only these three are left.
"""

from typing import Any, Final

from sqlalchemy import insert, select, update

from ..aggregate import Attempt, Run, append_event
from ..database import Transaction
from ..schema import cancellation_dispatches
from .authority import Claim

PENDING: Final = "pending"
DISPATCHED: Final = "dispatched"
BLOCKED: Final = "blocked"


def await_dispatch(tx: Transaction, run: Run, attempt: Attempt) -> None:
    """Notes that a stop waits for the worker of `attempt`. Once; a later attempt takes the record over."""
    found = _record(tx, run.id)
    if found is None:
        tx.write(
            insert(cancellation_dispatches).values(
                run_id=run.id,
                attempt_id=attempt.id,
                status=PENDING,
                version=0,
                dispatch_count=0,
                created_at_ms=tx.now_ms,
                updated_at_ms=tx.now_ms,
            )
        )
    elif found.attempt_id != attempt.id:
        _change(tx, found, attempt_id=attempt.id, status=PENDING)


def settle_dispatch(tx: Transaction, claim: Claim) -> Claim:
    """The stop is being told to the worker that holds the lease. Told again under the same lease, nothing is written."""
    run, attempt = claim.run, claim.attempt
    await_dispatch(tx, run, attempt)
    found = _record(tx, run.id)
    if found.status == DISPATCHED:
        return claim
    _change(tx, found, status=DISPATCHED, dispatch_count=found.dispatch_count + 1, last_dispatched_at_ms=tx.now_ms)
    run = append_event(
        tx,
        run,
        "run.cancel_dispatched",
        actor_type="system",
        attempt_id=attempt.id,
        payload={"reason": run.cancel_reason, "leaseGeneration": claim.lease.lease_generation},
        dedupe_key=f"cancel-dispatch:{attempt.id}:{found.dispatch_count + 1}:dispatched",
    )
    return Claim(run, attempt, claim.lease)


def block_dispatch(tx: Transaction, run: Run, attempt: Attempt) -> Run:
    """Nobody holds the lease any more, and nothing tells whether the command runs: an operator has to look. Once."""
    await_dispatch(tx, run, attempt)
    found = _record(tx, run.id)
    if found.status == BLOCKED:
        return run
    _change(tx, found, status=BLOCKED)
    return append_event(
        tx,
        run,
        "run.cancel_dispatch_blocked",
        actor_type="system",
        attempt_id=attempt.id,
        payload={"reason": run.cancel_reason},
        dedupe_key=f"cancel-dispatch:{attempt.id}:{found.version}:blocked",
    )


def _record(tx: Transaction, run_id: str) -> Any:
    return tx.row(select(cancellation_dispatches).where(cancellation_dispatches.c.run_id == run_id))


def _change(tx: Transaction, found: Any, **changes: Any) -> None:
    table = cancellation_dispatches
    tx.write_one(
        update(table)
        .where(table.c.run_id == found.run_id, table.c.version == found.version)
        .values(version=found.version + 1, updated_at_ms=tx.now_ms, **changes)
    )
