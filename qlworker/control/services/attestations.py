"""attestations: stores what a worker says about its process, append-only. It moves no run, attempt or lease.

It is the only evidence that lets the control plane believe a remote process to be gone, so a statement that does not fit
everything stored is refused: after a session is replaced nobody can attest for its processes any more (D24).
Source: control-plane.md §1.9, §16, wire-protocol.md §2.9.
"""

from typing import Final

import msgspec
from sqlalchemy import insert, select

from ...domain.errors import Fenced
from ...wire.attestation import AttestationRequest, AttestationResponse, AttestedState
from ..config import Settings
from ..database import Transaction
from ..schema import worker_execution_attestations
from .activation import RUNNING, STARTING
from .authority import Claim, identify, require_lease
from .session import Caller, require_session

STOPPED: Final = "stopped"


class Attestation(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `worker_execution_attestations`; times in milliseconds."""

    attestation_id: str
    run_id: str
    attempt_id: str
    sequence: int
    state: AttestedState
    worker_id: str
    worker_session_id: str
    worker_generation: int
    lease_token_digest: str
    lease_generation: int
    lease_version: int
    offer_id: str
    callback_sequence: int
    executor_handle: str
    journal_revision: int
    received_at_ms: int

    @classmethod
    def of(cls, caller: Caller, request: AttestationRequest, received_at_ms: int) -> "Attestation":
        """The row for `request` of `caller`."""
        return cls(
            worker_id=caller.worker_id,
            worker_session_id=caller.session_id,
            received_at_ms=received_at_ms,
            **msgspec.structs.asdict(request),
        )


def load_attestation(tx: Transaction, attestation_id: str) -> Attestation | None:
    """The attestation with this id, of whichever attempt, or None."""
    table = worker_execution_attestations
    row = tx.row(select(table).where(table.c.attestation_id == attestation_id))
    return None if row is None else Attestation(**row._mapping)


def latest_attestation(tx: Transaction, attempt_id: str) -> Attestation | None:
    """The attempt's attestation with the highest sequence, or None."""
    table = worker_execution_attestations
    row = tx.row(select(table).where(table.c.attempt_id == attempt_id).order_by(table.c.sequence.desc()).limit(1))
    return None if row is None else Attestation(**row._mapping)


def attest(tx: Transaction, caller: Caller, request: AttestationRequest, settings: Settings) -> AttestationResponse:
    """Stores one attestation, or tells an exact repeat what is stored, without a write. Raises Fenced for anything else.

    The repeat needs the current session and the same lease, but neither its version nor its life: a renewal or the end may
    come between a lost answer and the next try.
    """
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    stored = load_attestation(tx, request.attestation_id)
    if stored is not None:
        # Equality may stop early: identify has compared the digest in constant time.
        if stored != Attestation.of(caller, request, stored.received_at_ms):
            raise Fenced("the attestation id was used for another statement")
        return _answer(stored, replay=True)
    require_lease(tx, claim, request.lease_version)
    _require_process(claim, request)
    _require_order(latest_attestation(tx, claim.attempt.id), request)
    attestation = Attestation.of(caller, request, tx.now_ms)
    tx.write(insert(worker_execution_attestations).values(msgspec.structs.asdict(attestation)))
    return _answer(attestation, replay=False)


def _require_process(claim: Claim, request: AttestationRequest) -> None:
    attempt = claim.attempt
    if attempt.status not in (STARTING, RUNNING):
        raise Fenced("the attempt has no process")
    if attempt.callback_sequence != request.callback_sequence:
        raise Fenced("the callback sequence is another one")
    # Before `running` is acknowledged no handle is known here. Afterwards another handle is another process.
    if attempt.executor_handle not in (None, request.executor_handle):
        raise Fenced("the handle belongs to another process")


def _require_order(latest: Attestation | None, request: AttestationRequest) -> None:
    if request.sequence != (1 if latest is None else latest.sequence + 1):
        raise Fenced("the attestation sequence is not the next one")
    if latest is None:
        return
    if latest.state == STOPPED:
        raise Fenced("nothing may follow a stopped process")
    if request.journal_revision <= latest.journal_revision:
        raise Fenced("the journal revision did not grow")


def _answer(attestation: Attestation, *, replay: bool) -> AttestationResponse:
    return AttestationResponse(
        attestation_id=attestation.attestation_id,
        sequence=attestation.sequence,
        state=attestation.state,
        received_at_ms=attestation.received_at_ms,
        replay=replay,
    )
