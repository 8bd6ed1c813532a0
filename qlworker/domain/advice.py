"""What an operator is told about a record: its class, its next step, and what setting it aside gives up. Pure words.

Nothing here decides what the worker does; verdict.py does. Source: R19, R108 to R113, R289, design.md §5.
"""

from typing import Final

import msgspec

from .audit import RecordClass
from .identity import Presence
from .record import SETTLED, RecoveryReason, State


class Advice(msgspec.Struct, frozen=True):
    """What a record is, and what happens or is to be done next, in one plain sentence."""

    record_class: RecordClass
    next_step: str


_BY_STATE: Final[dict[State, Advice]] = {
    State.ACCEPTED: Advice(
        RecordClass.NO_LOCAL_EXECUTION,
        "nothing has run; a running worker goes on with it, else the attempt ends with its lease",
    ),
    State.STARTING_ACKNOWLEDGED: Advice(
        RecordClass.NO_LOCAL_EXECUTION,
        "nothing has run; a running worker launches it while its lease lasts, else the run is lost",
    ),
    State.LAUNCHING: Advice(
        RecordClass.LAUNCH_UNKNOWN,
        "it may have run; a running worker looks for proof and never launches it again",
    ),
    State.STARTED: Advice(
        RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
        "its command may run; a running worker watches it and reports how it ends",
    ),
    State.RUNNING_ACKNOWLEDGED: Advice(
        RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
        "its command may run; a running worker watches it and reports how it ends",
    ),
    State.START_FAILED: Advice(
        RecordClass.NO_LOCAL_EXECUTION,
        "its command never ran; a running worker reports that as soon as the control plane answers",
    ),
    State.START_FAILURE_ACKNOWLEDGED: Advice(
        RecordClass.SETTLED_START_FAILURE, "nothing to do: it is reported, and retention removes it"
    ),
    State.COMPLETION_ACKNOWLEDGED: Advice(
        RecordClass.SETTLED_COMPLETION, "nothing to do: it is reported, and retention removes it"
    ),
}

_BY_REASON: Final[dict[RecoveryReason, str]] = {
    RecoveryReason.LAUNCH_OUTCOME_UNKNOWN: "nobody saw whether it ran or how it ended; "
    "look at what its command was to do, start a new run if that is needed, then quarantine this record",
    RecoveryReason.CONTROL_PLANE_ALREADY_RUNNING: "the control plane counts it as running, this record never came so far, "
    "as after restoring an old copy; look for its command on this box, then quarantine this record",
    RecoveryReason.CONTROL_PLANE_TERMINAL: "the control plane ended the run before this worker could report; "
    "nothing is owed: quarantine this record to free its place",
    RecoveryReason.LEASE_LOST_STOPPED: "its lease was lost and its command is proven stopped; "
    "the control plane calls the run lost: quarantine this record to free its place",
    RecoveryReason.LEASE_LOST_UNVERIFIED: "its lease was lost and its command could not be proven stopped; "
    "let show tell whether it runs, end it, then quarantine this record",
}

COST_OF_CLAIM: Final = "the pull it stood for is given up; an attempt that it may have claimed ends with its lease"
COST_OF_SESSION: Final = (
    "the worker registers anew, which ends the leases of what it runs: those commands are stopped and their runs become lost"
)
COST_OF_STRANGER: Final = "nothing of an execution: no worker reads this file as a record"

_BEFORE_THE_BARRIER: Final = frozenset({State.ACCEPTED, State.STARTING_ACKNOWLEDGED})
_OVER: Final = frozenset({Presence.EXITED, Presence.OTHER_BOOT})


def advise(state: State, reason: RecoveryReason | None) -> Advice:
    """The advice for a record in `state`; `reason` is its recovery reason, which belongs to RECOVERY_REQUIRED alone."""
    if state is not State.RECOVERY_REQUIRED:
        return _BY_STATE[state]
    if reason is None:
        raise ValueError("a record that needs recovery has a reason")
    return Advice(RecordClass.LAUNCH_UNKNOWN, _BY_REASON[reason])


def cost_of_quarantine(
    state: State | None, reason: RecoveryReason | None, presence: Presence | None, *, has_genuine_receipt: bool
) -> list[str]:
    """What is given up when a record is set aside: one sentence each, the most important first.

    `state` is None for a record that cannot be read, `presence` where there is no process to look at. Raises ValueError for
    a settled record: there is nothing to give up, and retention removes it.
    """
    if state in SETTLED:
        raise ValueError("a settled record is never set aside")
    lines = [_unreported(state, reason)]
    if reason is not RecoveryReason.CONTROL_PLANE_TERMINAL:
        lines.append("the run becomes lost when its lease ends; the control plane may then start another attempt")
    if presence in (Presence.RUNNING, Presence.PENDING):
        lines.append("its command runs and goes on unwatched: no timeout, cancellation or stop reaches it any more")
    elif state is None or (state not in _BEFORE_THE_BARRIER | {State.START_FAILED} and presence not in _OVER):
        lines.append("whether its command runs cannot be told; if it does, it goes on unwatched")
    if has_genuine_receipt:
        lines.append("a genuine receipt lies here: a running worker could still report the true result, so let it, if you can")
    return lines


def _unreported(state: State | None, reason: RecoveryReason | None) -> str:
    if state is None:
        return "what the damaged record knew of its execution will not be used, and its outcome will not be reported"
    if state in _BEFORE_THE_BARRIER:
        return "nothing of it has run, and this worker will not run it"
    if state is State.START_FAILED:
        return "that its command never ran will not be reported"
    if reason is RecoveryReason.CONTROL_PLANE_TERMINAL:
        return "the outcome seen here will not be reported; the control plane has ended the run already"
    return "the outcome of this execution will not be reported"
