"""What one look at the evidence says: what is known of an attempt, and whether this worker may still report it.

Pure. Source: ADR-0021 §5, R206 to R219, R221, R239. Whether something is known and whether it may be said are two answers: a
receipt stays true when the authority to submit it is gone, and a good authority never makes an end out of a guess.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec

from .identity import Presence
from .receipt import Receipt
from .record import Event, InboxRecord, RecoveryReason, State, advance
from .server_time import Anchor
from .session import Access, LiveSession, SessionStatus
from .verdict import ReceiptEvidence, Verdict, judge

GRACE_MAX_MS: Final = 5_000
"""How long a receipt may still appear after the launcher was seen gone, at most (R200)."""


class Authority(StrEnum):
    """Whether the record's own lease and session may be used at one moment (R210). Nothing here borrows another's (R213)."""

    CURRENT = "current"
    SESSION_FENCED = "session_fenced"
    WORKER_OFFLINE = "worker_offline"
    WORKER_SESSION_EXPIRED = "worker_session_expired"
    RUN_LEASE_EXPIRED = "run_lease_expired"


class AuthorityFacts(msgspec.Struct, frozen=True):
    """What this process knows of its authority. `lease_expires_at` is boot clock milliseconds, or None while the lease was not
    tracked in this process: then the record's own date is judged, if the control plane's time is known."""

    session: LiveSession | None
    access: Access
    lease_expires_at: int | None
    anchor: Anchor | None


def authority_of(record: InboxRecord, facts: AuthorityFacts, now_ms: int) -> Authority:
    """The class of `record`'s authority at `now_ms` on the boot clock. A session that is not the record's own is fenced from
    it, however alive it is (R211)."""
    session, worker = facts.session, record.offer.worker
    if facts.access is Access.FENCED:
        return Authority.SESSION_FENCED
    if session is None or session.status is SessionStatus.OFFLINE:
        return Authority.WORKER_OFFLINE
    if (session.session_id, session.generation) != (worker.session_id, worker.generation):
        return Authority.SESSION_FENCED
    if session.is_over(now_ms):
        return Authority.WORKER_SESSION_EXPIRED
    expires_at = facts.lease_expires_at
    if expires_at is None and facts.anchor is not None:
        expires_at = facts.anchor.boot_time(record.offer.lease.expires_at_ms)
    if expires_at is not None and now_ms >= expires_at:
        return Authority.RUN_LEASE_EXPIRED
    return Authority.CURRENT


class ObservedEnd(msgspec.Struct, frozen=True):
    """An authenticated end, and nothing that could be used or shown by mistake: no token, no command (R207, R208).

    `finished_at_ms` is the control plane's time; the start is the record's own, which the receipt was checked against.
    """

    callback_sequence: int
    finished_at_ms: int
    exit_code: int
    outcome: Literal["succeeded", "failed"]

    @classmethod
    def of(cls, receipt: Receipt) -> "ObservedEnd":
        """The end that an authenticated `receipt` tells."""
        outcome: Literal["succeeded", "failed"] = "succeeded" if receipt.exit_code == 0 else "failed"
        return cls(receipt.callback_sequence, receipt.finished_at_ms, receipt.exit_code, outcome)


class Reconciled(msgspec.Struct, frozen=True):
    """One look at one record. `presence` is None when no process was asked, `end` is set exactly for the verdict ENDED."""

    state: State
    receipt: ReceiptEvidence
    presence: Presence | None
    authority: Authority
    end: ObservedEnd | None

    @property
    def verdict(self) -> Verdict:
        """What is known (see `judge`)."""
        return judge(self.state, self.receipt, self.presence)

    @property
    def may_complete(self) -> bool:
        """Whether a completion may be submitted: an observed end under the record's own living authority (R221)."""
        return self.end is not None and self.verdict is Verdict.ENDED and self.authority is Authority.CURRENT

    @property
    def may_acknowledge_running(self) -> bool:
        """Whether running may be acknowledged after a restart: the four conditions of R239."""
        return (
            self.state is State.STARTED
            and self.receipt is ReceiptEvidence.MISSING
            and self.verdict is Verdict.RUNNING
            and self.authority is Authority.CURRENT
        )

    @property
    def has_receipt(self) -> bool:
        """Whether a receipt decided, a trusted or a false one: waiting for one would bring nothing else."""
        return self.receipt is not ReceiptEvidence.MISSING


def decided(record: InboxRecord, seen: Reconciled, now_ms: int) -> InboxRecord | None:
    """The successor of `record` when the evidence settles locally what becomes of it: it never started, or nobody can tell.

    None when there is more to do first: a running command is adopted, an end is submitted. `now_ms` is only displayed.
    """
    if seen.verdict is Verdict.NOT_STARTED:
        return advance(record, Event.NOT_STARTED, now_ms)
    if seen.verdict is Verdict.UNKNOWN:
        return advance(record, Event.RECOVERY_NEEDED, now_ms, recovery_reason=RecoveryReason.LAUNCH_OUTCOME_UNKNOWN)
    return None
