"""register, heartbeat and transition: one row per worker, fenced by session, generation and version.

Source: control-plane.md §3, wire-protocol.md §2.
"""

from typing import Any, Final

import msgspec

from ...domain.capabilities import Capabilities
from ...domain.errors import Fenced, Refused, Transient
from ...domain.session import SessionStatus
from ...wire.session import (
    HEARTBEAT_SCHEMA,
    REGISTER_SCHEMA,
    TRANSITION_SCHEMA,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    TransitionRequest,
    TransitionResponse,
)
from ..config import Settings
from ..database import Transaction
from ..deliveries import observe
from ..schema import scan_cursors, worker_sessions

ONLINE: Final = SessionStatus.ONLINE.value
DRAINING: Final = SessionStatus.DRAINING.value
OFFLINE: Final = SessionStatus.OFFLINE.value
RESTORED: Final = "restored"
"""In `scan_cursors`: when the database went back to a copy (control/backup.py)."""


class Caller(msgspec.Struct, frozen=True):
    """The worker and the session in a request's path. The worker is the one its credential belongs to."""

    worker_id: str
    session_id: str
    unobserved_credential: str | None = None
    """The caller's credential, if it came by a rotation and was not used yet."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `worker_sessions`; times in milliseconds."""

    worker_id: str
    session_id: str
    generation: int
    status: str
    version: int
    capabilities_json: str
    capabilities_hash: str
    max_concurrent_runs: int
    available_slots: int
    registered_at_ms: int
    last_heartbeat_at_ms: int
    lease_expires_at_ms: int
    updated_at_ms: int

    def is_live(self, now_ms: int) -> bool:
        """Whether this session is neither offline nor expired."""
        return self.status != OFFLINE and self.lease_expires_at_ms > now_ms


def load_session(tx: Transaction, worker_id: str) -> Session | None:
    """The worker's present session, whatever its state, or None."""
    row = tx.find(worker_sessions, worker_id=worker_id)
    return None if row is None else Session(**row._mapping)


def require_session(tx: Transaction, caller: Caller, generation: int) -> Session:
    """The caller's session when it is the current one, online or draining, and unexpired. Raises Fenced."""
    session = load_session(tx, caller.worker_id)
    if session is None:
        raise Fenced("the worker has no session")
    if session.session_id != caller.session_id:
        raise Fenced("the session was replaced")
    if session.generation != generation:
        raise Fenced("the session has another generation")
    if session.status == OFFLINE:
        raise Fenced("the session is offline")
    if session.lease_expires_at_ms <= tx.now_ms:
        raise Fenced("the session lease has expired")
    return session


def register(tx: Transaction, caller: Caller, request: RegisterRequest, settings: Settings) -> RegisterResponse:
    """Opens a session, replaces another one, or reads the same one back without changing it (control-plane.md §3.2).

    Raises Refused for capabilities of the other dialect or a lease outside the operator's range, Fenced when the same session
    comes with anything else than what is stored.
    """
    _check_lease(request.lease_duration_ms, settings)
    _check_capabilities(request.capabilities_json, settings)
    tx.lock("worker", caller.worker_id)
    stored = load_session(tx, caller.worker_id)
    if stored is not None and stored.session_id == caller.session_id:
        return _same_session(tx, stored, request)
    session = Session(
        worker_id=caller.worker_id,
        session_id=caller.session_id,
        generation=1 if stored is None else stored.generation + 1,
        status=ONLINE,
        version=0 if stored is None else stored.version + 1,
        capabilities_json=request.capabilities_json,
        capabilities_hash=request.capabilities_hash,
        max_concurrent_runs=request.max_concurrent_runs,
        available_slots=request.available_slots,
        registered_at_ms=tx.now_ms,
        last_heartbeat_at_ms=tx.now_ms,
        lease_expires_at_ms=tx.now_ms + request.lease_duration_ms,
        updated_at_ms=tx.now_ms,
    )
    if stored is None:
        tx.add(worker_sessions, msgspec.structs.asdict(session))
    else:
        _replace(tx, stored, session)
    return _registered(session, replaced=stored is not None)


def heartbeat(tx: Transaction, caller: Caller, request: HeartbeatRequest, settings: Settings) -> HeartbeatResponse:
    """Extends the session lease from now on. Raises Fenced, and Refused for slots or a lease out of range."""
    _check_lease(request.lease_duration_ms, settings)
    session = _at_version(tx, caller, request.generation, request.expected_version, settings)
    if request.available_slots > session.max_concurrent_runs:
        raise Refused("availableSlots must be at most maxConcurrentRuns")
    after = msgspec.structs.replace(
        session,
        version=session.version + 1,
        available_slots=request.available_slots if session.status == ONLINE else 0,
        last_heartbeat_at_ms=tx.now_ms,
        lease_expires_at_ms=tx.now_ms + request.lease_duration_ms,
        updated_at_ms=tx.now_ms,
    )
    _replace(tx, session, after)
    _observe(tx, caller)
    return HeartbeatResponse(
        schema=HEARTBEAT_SCHEMA,
        **_projection(after),
    )


def transition(tx: Transaction, caller: Caller, request: TransitionRequest, settings: Settings) -> TransitionResponse:
    """Drains the session, or ends it at once. Nothing leads back to online inside one session. Raises Fenced."""
    session = _at_version(tx, caller, request.generation, request.expected_version, settings)
    after = msgspec.structs.replace(
        session,
        version=session.version + 1,
        status=request.status,
        available_slots=0,
        lease_expires_at_ms=tx.now_ms if request.status == OFFLINE else session.lease_expires_at_ms,
        updated_at_ms=tx.now_ms,
    )
    _replace(tx, session, after)
    _observe(tx, caller)
    return TransitionResponse(
        schema=TRANSITION_SCHEMA,
        **_projection(after),
    )


def _observe(tx: Transaction, caller: Caller) -> None:
    if caller.unobserved_credential is not None:
        observe(tx, caller.unobserved_credential, caller.session_id)


def _same_session(tx: Transaction, stored: Session, request: RegisterRequest) -> RegisterResponse:
    # No lease extension: this branch is how a worker that lost a heartbeat's answer reads its version (wire-protocol §2.4).
    same = (
        request.capabilities_json == stored.capabilities_json
        and request.capabilities_hash == stored.capabilities_hash
        and request.max_concurrent_runs == stored.max_concurrent_runs
        and request.available_slots == stored.available_slots
    )
    if not same or not stored.is_live(tx.now_ms):
        raise Fenced("the same session was registered with other facts, or is over")
    return _registered(stored, replaced=False)


def _registered(session: Session, *, replaced: bool) -> RegisterResponse:
    return RegisterResponse(
        schema=REGISTER_SCHEMA,
        **_projection(session),
        replaced_session=replaced,
    )


def _projection(session: Session) -> dict[str, Any]:
    """What every answer tells of the session (wire-protocol §2.3 to §2.5)."""
    return {
        "worker_id": session.worker_id,
        "session_id": session.session_id,
        "generation": session.generation,
        "version": session.version,
        "status": SessionStatus(session.status),
        "lease_expires_at_ms": session.lease_expires_at_ms,
    }


def _at_version(tx: Transaction, caller: Caller, generation: int, version: int, settings: Settings) -> Session:
    """The current session at `version`. The order of the reasons is control-plane.md §3.2's.

    Raises Fenced, and Transient where that would be wrong: behind a restore no session is known, though nobody replaced it, and
    a fenced worker waits for its operator. So every session of before is left to run out; then its worker registers anew.
    """
    tx.lock("worker", caller.worker_id)
    try:
        return _known_session(tx, caller, generation, version)
    except Fenced:
        if _was_restored_lately(tx, settings):
            raise Transient("the database went back to a copy: the sessions of before have to run out") from None
        raise


def _known_session(tx: Transaction, caller: Caller, generation: int, version: int) -> Session:
    stored = load_session(tx, caller.worker_id)
    known = stored is not None and (stored.session_id, stored.generation) == (caller.session_id, generation)
    if known and stored is not None and stored.version != version:
        raise Fenced("the session is at another version")
    return require_session(tx, caller, generation)


def _was_restored_lately(tx: Transaction, settings: Settings) -> bool:
    """Whether a session of before the restore may still live in its worker."""
    row = tx.find(scan_cursors, scan=RESTORED)
    return row is not None and int(row.updated_at_ms) + settings.session_lease_max_ms > tx.now_ms


def _replace(tx: Transaction, before: Session, after: Session) -> None:
    present = {"worker_id": before.worker_id, "version": before.version}
    tx.change(worker_sessions, present, msgspec.structs.asdict(after))


def _check_lease(duration_ms: int, settings: Settings) -> None:
    if not settings.session_lease_min_ms <= duration_ms <= settings.session_lease_max_ms:
        raise Refused("leaseDurationMs is outside the range of this control plane")


def _check_capabilities(text: str, settings: Settings) -> None:
    try:
        capabilities = Capabilities.parse(text)
    except ValueError as error:
        raise Refused(f"cannot use the capabilities: {error}") from None
    if capabilities.dialect != settings.dialect.capabilities:
        raise Refused(f"capabilities must be in the {settings.dialect.capabilities} dialect")
