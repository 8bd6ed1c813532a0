"""How an attempt ends: which terminal status and code a durable cancel intent makes of it, and the two Events of the end.

A late success never overrides an accepted cancel (control-plane.md §7.4, §8.2).
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..aggregate import Run, advance_attempt, advance_run, append_event
from ..database import Transaction
from .authority import COMPLETED, Claim, change_lease

TIMED_OUT: Final = "EXECUTION_TIMED_OUT"
CANCELLED: Final = "EXECUTION_CANCELLED"
FAILED: Final = "EXECUTION_FAILED"
START_FAILED: Final = "EXECUTOR_START_FAILED"


class Ending(msgspec.Struct, frozen=True):
    """A terminal status with its error code; only success has none."""

    status: str
    error_code: str | None


def ending_of_start_failure(run: Run) -> Ending:
    """What a start failure makes of `run`."""
    return intended_ending(run) or Ending("failed", START_FAILED)


def ending_of_exit(run: Run, exit_code: int) -> Ending:
    """What a command's exit makes of `run`."""
    return intended_ending(run) or (Ending("succeeded", None) if exit_code == 0 else Ending("failed", FAILED))


def intended_ending(run: Run) -> Ending | None:
    """How a run with an intent to stop ends, whatever its command did; None without one."""
    if run.cancel_reason is None:
        return None
    return Ending("timed_out", TIMED_OUT) if run.cancel_reason == "timeout" else Ending("cancelled", CANCELLED)


def finish(
    tx: Transaction,
    claim: Claim,
    ending: Ending,
    *,
    finished_at_ms: int,
    attempt_changes: Mapping[str, Any],
    payload: Mapping[str, Any],
    dedupe_keys: tuple[str, str],
) -> Claim:
    """Ends lease, attempt and run together, with one Event for the attempt and one for the run, in this order."""
    before = claim.attempt
    claim = change_lease(tx, claim, status=COMPLETED, version=claim.lease.version + 1, completed_at_ms=tx.now_ms)
    attempt = advance_attempt(
        tx,
        claim.attempt,
        ending.status,
        {**attempt_changes, "finished_at_ms": finished_at_ms, "error_code": ending.error_code},
    )
    facts = {"fromStatus": before.status, "toStatus": ending.status, "errorCode": ending.error_code, **payload}
    actor = claim.lease.worker_id
    run = append_event(
        tx,
        claim.run,
        f"attempt.{ending.status}",
        actor_type="worker",
        actor_id=actor,
        attempt_id=attempt.id,
        payload=facts,
        dedupe_key=dedupe_keys[0],
    )
    run = advance_run(
        tx,
        run,
        ending.status,
        f"run.{ending.status}",
        actor_type="worker",
        actor_id=actor,
        attempt_id=attempt.id,
        payload={"toStatus": ending.status, "errorCode": ending.error_code},
        dedupe_key=dedupe_keys[1],
        changes={"finished_at_ms": finished_at_ms, "error_code": ending.error_code},
    )
    return Claim(run, attempt, claim.lease)
