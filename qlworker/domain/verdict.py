"""Record and facts to what is known and what comes next: pure, so that every cell of the table is a test.

Source: ADR-0021 §1 and §3, design.md §2 "The gate", R163 to R178. Evidence is asked for in this order: receipt, process.
"""

from enum import StrEnum

from .identity import Presence
from .record import State


class Step(StrEnum):
    """What an offer's record asks for next."""

    ACKNOWLEDGE_STARTING = "acknowledge_starting"
    LAUNCH = "launch"
    FIND_EVIDENCE = "find_evidence"
    REPORT_FAILURE = "report_failure"
    REST = "rest"


_NEXT = {
    State.ACCEPTED: Step.ACKNOWLEDGE_STARTING,
    State.STARTING_ACKNOWLEDGED: Step.LAUNCH,
    State.LAUNCHING: Step.FIND_EVIDENCE,
    State.STARTED: Step.FIND_EVIDENCE,
    State.RUNNING_ACKNOWLEDGED: Step.FIND_EVIDENCE,
    State.START_FAILED: Step.REPORT_FAILURE,
    State.START_FAILURE_ACKNOWLEDGED: Step.REST,
    State.COMPLETION_ACKNOWLEDGED: Step.REST,
    State.RECOVERY_REQUIRED: Step.REST,
}


def next_step(state: State) -> Step:
    """What to do with a record in `state`. Only STARTING_ACKNOWLEDGED leads to a launch: a record at or behind the barrier
    never does (R163)."""
    return _NEXT[state]


class ReceiptEvidence(StrEnum):
    """What the receipt says, after it was authenticated."""

    MISSING = "missing"
    ENDED = "ended"
    NOT_STARTED = "not_started"
    UNTRUSTED = "untrusted"


class Verdict(StrEnum):
    """What is known of an attempt behind the barrier."""

    ENDED = "ended"
    NOT_STARTED = "not_started"
    RUNNING = "running"
    PENDING = "pending"
    UNKNOWN = "unknown"


def judge(state: State, receipt: ReceiptEvidence, presence: Presence | None) -> Verdict:
    """What is known of a record in LAUNCHING, STARTED or RUNNING_ACKNOWLEDGED.

    `presence` is None when the process was not asked, which a trusted receipt makes unnecessary and an untrusted one forbids
    (R193, R196). A record without a handle can never be RUNNING. "Not started" contradicts an acknowledged running: unknown.
    A pending command has decided nothing: its launcher is about to say whether the gate was ever opened, and to call it running
    before that could be contradicted. Uncertainty is never turned into an end (R206).
    """
    if receipt is ReceiptEvidence.ENDED:
        return Verdict.ENDED
    if receipt is ReceiptEvidence.NOT_STARTED:
        return Verdict.UNKNOWN if state is State.RUNNING_ACKNOWLEDGED else Verdict.NOT_STARTED
    if receipt is not ReceiptEvidence.MISSING or state is State.LAUNCHING:
        return Verdict.UNKNOWN
    if presence is Presence.PENDING:
        return Verdict.PENDING if state is State.STARTED else Verdict.RUNNING
    return Verdict.RUNNING if presence is Presence.RUNNING else Verdict.UNKNOWN
