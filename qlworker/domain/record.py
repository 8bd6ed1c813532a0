"""The inbox record: one offer's delivery state on this worker, its state machine and the rules of every update.

Source: ADR-0111 §1, wire-protocol.md §10.4, R58 to R67. The table below is the machine; `advance` is the only way through it.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .document import Document
from .errors import Conflict
from .offer import Offer
from .text import INT31, check_digest, check_integer, check_log_artifact_id, check_text

RECORD_BYTES: Final = 192 * 1024


class State(StrEnum):
    """Where a record stands. The values are what is stored."""

    ACCEPTED = "accepted"
    STARTING_ACKNOWLEDGED = "starting_acknowledged"
    LAUNCHING = "launching"
    STARTED = "started"
    RUNNING_ACKNOWLEDGED = "running_acknowledged"
    START_FAILED = "start_failed"
    START_FAILURE_ACKNOWLEDGED = "start_failure_acknowledged"
    COMPLETION_ACKNOWLEDGED = "completion_acknowledged"
    RECOVERY_REQUIRED = "recovery_required"


class Event(StrEnum):
    """What happened to a record."""

    STARTING_ACKED = "starting_acked"
    BARRIER_RAISED = "barrier_raised"
    HANDLE_RECORDED = "handle_recorded"
    RUNNING_ACKED = "running_acked"
    NOT_STARTED = "not_started"
    FAILURE_ACKED = "failure_acked"
    COMPLETION_ACKED = "completion_acked"
    RECOVERY_NEEDED = "recovery_needed"


class RecoveryReason(StrEnum):
    """Why a record needs recovery: a closed, low-sensitivity list (R19)."""

    LAUNCH_OUTCOME_UNKNOWN = "launch_outcome_unknown"
    CONTROL_PLANE_ALREADY_RUNNING = "control_plane_already_running"
    CONTROL_PLANE_TERMINAL = "control_plane_terminal"
    LEASE_LOST_STOPPED = "lease_lost_local_execution_stopped"
    LEASE_LOST_UNVERIFIED = "lease_lost_local_execution_unverified"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.ACCEPTED, Event.STARTING_ACKED): State.STARTING_ACKNOWLEDGED,
    (State.ACCEPTED, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.STARTING_ACKNOWLEDGED, Event.BARRIER_RAISED): State.LAUNCHING,
    (State.STARTING_ACKNOWLEDGED, Event.NOT_STARTED): State.START_FAILED,
    (State.STARTING_ACKNOWLEDGED, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.LAUNCHING, Event.HANDLE_RECORDED): State.STARTED,
    (State.LAUNCHING, Event.NOT_STARTED): State.START_FAILED,
    (State.LAUNCHING, Event.COMPLETION_ACKED): State.COMPLETION_ACKNOWLEDGED,
    (State.LAUNCHING, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.STARTED, Event.RUNNING_ACKED): State.RUNNING_ACKNOWLEDGED,
    # Only for an authenticated receipt saying that the gate was never opened (design.md §2): the running ack is sent after
    # the gate, so the control plane still says "starting" and a start failure may be reported.
    (State.STARTED, Event.NOT_STARTED): State.START_FAILED,
    (State.STARTED, Event.COMPLETION_ACKED): State.COMPLETION_ACKNOWLEDGED,
    (State.STARTED, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.RUNNING_ACKNOWLEDGED, Event.COMPLETION_ACKED): State.COMPLETION_ACKNOWLEDGED,
    (State.RUNNING_ACKNOWLEDGED, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.START_FAILED, Event.FAILURE_ACKED): State.START_FAILURE_ACKNOWLEDGED,
    (State.START_FAILED, Event.RECOVERY_NEEDED): State.RECOVERY_REQUIRED,
    (State.RECOVERY_REQUIRED, Event.COMPLETION_ACKED): State.COMPLETION_ACKNOWLEDGED,
}

# Members that leave a record on the way into a state: the only exceptions to "a set member never vanishes".
_DROPPED: Final[dict[State, tuple[str, ...]]] = {
    State.START_FAILED: ("executor_handle",),
    State.COMPLETION_ACKNOWLEDGED: ("recovery_reason",),
}

SETTLED: Final = frozenset({State.START_FAILURE_ACKNOWLEDGED, State.COMPLETION_ACKNOWLEDGED})

# Which optional members a state may carry: y(es, always), n(ever), o(ptional). Order: executorHandle, executorStartedAtMs,
# logArtifactId, the receipt pair, completionAcknowledgedAtMs, recoveryReason (wire-protocol §10.4).
_PRESENCE: Final[dict[State, str]] = {
    State.ACCEPTED: "nnnnnn",
    State.STARTING_ACKNOWLEDGED: "nnnnnn",
    State.LAUNCHING: "nyyynn",
    State.STARTED: "yyyynn",
    State.RUNNING_ACKNOWLEDGED: "yyyynn",
    State.START_FAILED: "nooonn",
    State.START_FAILURE_ACKNOWLEDGED: "nooonn",
    State.COMPLETION_ACKNOWLEDGED: "oyyyyn",
    State.RECOVERY_REQUIRED: "oooony",
}


class InboxRecord(Document, frozen=True, kw_only=True):
    """One offer's durable state. Field order is the stored member order."""

    schema_version: Literal[1]
    revision: int
    state: State
    offer: Offer
    accepted_at_ms: int
    updated_at_ms: int
    executor_handle: str | UnsetType = UNSET
    executor_started_at_ms: int | UnsetType = UNSET
    log_artifact_id: str | UnsetType = UNSET
    completion_receipt_callback_sequence: int | UnsetType = UNSET
    completion_receipt_token_digest: str | UnsetType = UNSET
    completion_acknowledged_at_ms: int | UnsetType = UNSET
    recovery_reason: RecoveryReason | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_integer(self.revision, "revision")
        check_integer(self.accepted_at_ms, "acceptedAtMs")
        check_integer(self.updated_at_ms, "updatedAtMs", self.accepted_at_ms)
        if self.executor_handle is not UNSET:
            check_text(self.executor_handle, "executorHandle", minimum=1, maximum=512)
        if self.executor_started_at_ms is not UNSET:
            check_integer(self.executor_started_at_ms, "executorStartedAtMs")
        if self.log_artifact_id is not UNSET:
            check_log_artifact_id(self.log_artifact_id)
        if self.completion_receipt_callback_sequence is not UNSET:
            check_integer(self.completion_receipt_callback_sequence, "completionReceiptCallbackSequence", 1, INT31)
        if self.completion_receipt_token_digest is not UNSET:
            check_digest(self.completion_receipt_token_digest, "completionReceiptTokenDigest")
        self._check_presence()

    def _check_presence(self) -> None:
        sequence, digest = self.completion_receipt_callback_sequence, self.completion_receipt_token_digest
        if (sequence is UNSET) is not (digest is UNSET):
            raise ValueError("receipt sequence and digest appear only as a pair")
        if self.executor_handle is not UNSET and self.executor_started_at_ms is UNSET:
            raise ValueError("executorHandle needs executorStartedAtMs")
        present = (
            self.executor_handle,
            self.executor_started_at_ms,
            self.log_artifact_id,
            sequence,
            self.completion_acknowledged_at_ms,
            self.recovery_reason,
        )
        for value, rule in zip(present, _PRESENCE[self.state], strict=True):
            if (value is UNSET and rule == "y") or (value is not UNSET and rule == "n"):
                raise ValueError(f"a record in state {self.state} has members that do not belong to it")

    @property
    def offer_id(self) -> str:
        """The record's name."""
        return self.offer.offer_id

    @property
    def is_settled(self) -> bool:
        """Whether the record is final: nothing runs and nothing is owed."""
        return self.state in SETTLED


def accept(offer: Offer, now_ms: int) -> InboxRecord:
    """The first record of `offer`. `now_ms` is wall time in milliseconds, only displayed."""
    return InboxRecord(
        schema_version=1,
        revision=0,
        state=State.ACCEPTED,
        offer=offer,
        accepted_at_ms=max(now_ms, 0),
        updated_at_ms=max(now_ms, 0),
    )


def advance(record: InboxRecord, event: Event, now_ms: int, **members: object) -> InboxRecord:
    """The record after `event`, one revision on, with the optional `members` set.

    Raises Conflict when the table has no such transition. `updated_at_ms` never goes back (R65), whatever the clock did.
    """
    state = TRANSITIONS.get((record.state, event))
    if state is None:
        raise Conflict(f"cannot apply {event} to a record in state {record.state}")
    members |= dict.fromkeys(_DROPPED.get(state, ()), UNSET)
    return _rewrite(record, now_ms, state=state, **members)


def renew(record: InboxRecord, offer: Offer, now_ms: int) -> InboxRecord:
    """The record under a newer lease of the same authority; its state does not change (R25, R62, R63).

    Returns `record` itself for an equal or older version. Raises Conflict for another authority, or for other terms
    under the same version.
    """
    if not record.offer.has_same_authority(offer):
        raise Conflict(f"offer {offer.offer_id} was delivered again with another authority")
    if offer.lease.version == record.offer.lease.version and offer.lease.terms != record.offer.lease.terms:
        raise Conflict(f"offer {offer.offer_id} has other lease terms under the same version")
    if offer.lease.version <= record.offer.lease.version:
        return record
    return _rewrite(record, now_ms, offer=record.offer.with_lease(offer.lease))


def _rewrite(record: InboxRecord, now_ms: int, **members: object) -> InboxRecord:
    return msgspec.structs.replace(
        record, revision=record.revision + 1, updated_at_ms=max(now_ms, record.updated_at_ms), **members
    )


def check_update(old: InboxRecord, new: InboxRecord) -> None:
    """Raises Conflict unless `new` is a legal successor of `old` (R60 to R67). The journal asks this before every write."""
    allowed = new.state == old.state or any(
        source == old.state and target == new.state for (source, _), target in TRANSITIONS.items()
    )
    if not allowed:
        raise Conflict(f"cannot move a record from {old.state} to {new.state}")
    if new.revision != old.revision + 1:
        raise Conflict(f"expected revision {old.revision + 1}, got {new.revision}")
    if new.accepted_at_ms != old.accepted_at_ms or new.updated_at_ms < old.updated_at_ms:
        raise Conflict("acceptedAtMs never changes and updatedAtMs never goes back")
    if not old.offer.has_same_authority(new.offer) or old.offer.delivery_kind != new.offer.delivery_kind:
        raise Conflict("the offer's authority never changes")
    _check_lease(old.offer, new.offer)
    for name in InboxRecord.__struct_fields__[6:]:
        before, after = getattr(old, name), getattr(new, name)
        may_drop = new.state != old.state and name in _DROPPED.get(new.state, ())
        if before is not UNSET and after != before and not may_drop:
            raise Conflict(f"{name} never changes once it is set")


def _check_lease(old: Offer, new: Offer) -> None:
    if new.lease.version < old.lease.version:
        raise Conflict("the lease version never goes back")
    if new.lease.version == old.lease.version and new.lease != old.lease:
        raise Conflict("one lease version has one content")
