"""Ends a run that was asked to stop, if nothing of it can be executing.

An attempt behind the start barrier, or one with a live lease, blocks: nobody but its worker knows how it ends. Source:
control-plane.md §11.5, D8.
"""

from ..aggregate import TERMINAL, Attempt, Run, advance_attempt, advance_run, append_event, latest_attempt
from ..config import ExpiryPolicy
from ..database import Transaction
from .activation import RUNNING, STARTING
from .attestations import latest_attestation
from .authority import LEASED, Claim, load_lease
from .cancel_dispatch import block_dispatch
from .claiming import CLAIMED
from .completion import LOST
from .evidence import Evidence, weigh
from .expiry import EXPIRED_CODE, lose, release
from .outcome import Ending, intended_ending


def end_unstarted(tx: Transaction, run: Run) -> Run:
    """The run after its end if it has an intent to stop and nothing of it ever started, or unchanged. The caller has the run's
    lock."""
    ending = intended_ending(run)
    attempt = latest_attempt(tx, run.id)
    if ending is None or run.status in TERMINAL:
        return run
    if attempt is not None and attempt.status not in TERMINAL | {LOST}:
        lease = load_lease(tx, attempt.id)
        if attempt.status != CLAIMED or (lease is not None and lease.is_live(tx.now_ms)):
            return run
        if lease is not None and lease.status == LEASED:
            attempt = release(tx, Claim(run, attempt, lease)).attempt
        run = _end_attempt(tx, run, attempt, ending)
    return _end(tx, run, ending)


def converge(tx: Transaction, run: Run, policy: ExpiryPolicy) -> Run:
    """The run after its end, or unchanged when it has to wait. The caller has the run's lock.

    Under the policy `lost` a started attempt whose lease was taken away is lost: its worker can report nothing any more, and a
    cancelled run that never ends helps nobody. Under `evidence` that needs a statement that the process has stopped.
    """
    attempt = latest_attempt(tx, run.id)
    lease = None if attempt is None else load_lease(tx, attempt.id)
    ending = intended_ending(run)
    if attempt is None or lease is None or ending is None or attempt.status not in (STARTING, RUNNING):
        return end_unstarted(tx, run)
    claim = Claim(run, attempt, lease)
    if lease.is_live(tx.now_ms) or (lease.status == LEASED and policy == "lost"):
        return run  # its worker may still report, or the expiry of the lease comes first
    if policy == "evidence" and not _is_gone(tx, claim):
        return block_dispatch(tx, run, attempt)
    if lease.status == LEASED:
        claim = release(tx, claim)
    return _end(tx, lose(tx, claim, EXPIRED_CODE, f"{_key(run)}:lost", {}).run, ending)


def _is_gone(tx: Transaction, claim: Claim) -> bool:
    return weigh(claim, latest_attestation(tx, claim.attempt.id), tx.now_ms, 0) is Evidence.STOPPED


def _key(run: Run) -> str:
    return f"cancel-convergence:{run.id}:{run.cancel_requested_at_ms}"


def _end_attempt(tx: Transaction, run: Run, attempt: Attempt, ending: Ending) -> Run:
    ended = {"finished_at_ms": max(tx.now_ms, attempt.created_at_ms), "error_code": ending.error_code}
    advance_attempt(tx, attempt, ending.status, ended)
    return append_event(
        tx,
        run,
        f"attempt.{ending.status}",
        actor_type="reconciler",
        attempt_id=attempt.id,
        dedupe_key=f"{_key(run)}:attempt",
    )


def _end(tx: Transaction, run: Run, ending: Ending) -> Run:
    return advance_run(
        tx,
        run,
        ending.status,
        f"run.{ending.status}",
        actor_type="reconciler",
        payload={"reason": run.cancel_reason},
        dedupe_key=f"{_key(run)}:run",
        changes={"finished_at_ms": max(tx.now_ms, run.created_at_ms), "error_code": ending.error_code},
    )
