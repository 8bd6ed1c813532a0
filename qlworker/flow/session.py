"""The worker's session: opened, continued after a restart, kept alive, drained and signed off (wire-protocol.md §2, §13.3).

A new registration fences every lease of the old session, so the old one is continued whenever the control plane still has it.
A worker that was replaced by another never takes the session back by itself: two boxes with one id must not fight.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET

from ..domain.errors import Fenced, Malformed, Refused, Transient, Unauthorized
from ..domain.session import Access, LiveSession, SessionStatus, StoredSession, may_process, may_pull
from ..domain.text import new_session_id
from ..ports import Clock, Log, SessionStore
from ..wire.session import (
    HEARTBEAT_SCHEMA,
    REGISTER_SCHEMA,
    TRANSITION_SCHEMA,
    HeartbeatRequest,
    RegisterRequest,
    RegisterResponse,
    TransitionRequest,
)
from .control_plane import ControlPlane
from .server_clock import ServerClock


class CapabilitiesText(msgspec.Struct, frozen=True):
    """A capabilities document in one dialect, as canonical text, and its digest."""

    json: str
    hash: str


class SessionTerms(msgspec.Struct, frozen=True):
    """What this worker asks for. Durations are milliseconds. `capabilities` come in the order they are tried (§0.1)."""

    worker_id: str
    capabilities: Sequence[CapabilitiesText]
    max_concurrent_runs: int
    lease_duration_ms: int
    heartbeat_ms: int


class SessionKeeper:
    """Owns the session. `tick` is called by the one cadence loop; nothing here sleeps or starts a task."""

    def __init__(
        self,
        control_plane: ControlPlane,
        store: SessionStore,
        clock: Clock,
        server_clock: ServerClock,
        log: Log,
        terms: SessionTerms,
    ) -> None:
        self._control_plane = control_plane
        self._store = store
        self._clock = clock
        self._server_clock = server_clock
        self._log = log
        self._terms = terms
        self._stored: StoredSession | None = None
        self._fresh_id: str | None = None
        self._due_at = 0
        self._last_slots = terms.max_concurrent_runs
        self._is_reachable = True
        self.is_draining = False
        self.live: LiveSession | None = None
        self.access = Access.OPEN

    def __repr__(self) -> str:
        return f"<SessionKeeper {self.access} {self.live}>"

    @property
    def max_concurrent_runs(self) -> int:
        """How many runs the present session was registered for."""
        return self._terms.max_concurrent_runs if self._stored is None else self._stored.max_concurrent_runs

    @property
    def may_pull(self) -> bool:
        """Whether a new offer may be asked for."""
        return not self.is_draining and may_pull(self.live, self.access, self._clock.boot_ms())

    def may_process(self, session_id: str, generation: int) -> bool:
        """Whether work of that session may be acknowledged and completed now (R374 to R378)."""
        live = self.live
        return (
            live is not None
            and (live.session_id, live.generation) == (session_id, generation)
            and may_process(live, self.access, self._clock.boot_ms())
        )

    async def load(self, *, has_work: bool) -> None:
        """Reads the session to continue. One with other terms is given up when no work depends on it."""
        stored = await self._store.read_session()
        if stored is None or stored.worker_id != self._terms.worker_id:
            return
        if stored.anchor is not UNSET:
            self._server_clock.adopt(stored.anchor)
        wanted = {each.json for each in self._terms.capabilities}
        same_terms = (stored.max_concurrent_runs, stored.lease_duration_ms) == (
            self._terms.max_concurrent_runs,
            self._terms.lease_duration_ms,
        )
        if has_work or (same_terms and stored.capabilities_json in wanted):
            self._stored = stored

    async def tick(self) -> None:
        """Does what is due: continue, register or heartbeat. Never raises for the network's sake; says it once in the log."""
        if self.access is Access.FENCED or self._clock.boot_ms() < self._due_at:
            return
        try:
            if self.live is None or self.live.is_over(self._clock.boot_ms()):
                await self._open()
            else:
                await self._beat(self.live)
        except Unauthorized as error:
            self._suspend(error)
        except (Transient, Refused, Malformed) as error:
            self._note_unreachable(error)

    async def told_draining(self) -> bool:
        """Whether the control plane knows that no new work is wanted; tells it if not."""
        return await self._told(SessionStatus.DRAINING)

    async def told_offline(self) -> bool:
        """Whether the session has ended; ends it if not. Only when nothing is owed any more."""
        if not await self._told(SessionStatus.OFFLINE):
            return False
        await self._store.remove_session()
        return True

    async def _told(self, status: Literal[SessionStatus.DRAINING, SessionStatus.OFFLINE]) -> bool:
        live = self.live
        if live is None or self.access is Access.FENCED:
            return True
        if live.status in (status, SessionStatus.OFFLINE):
            return True
        try:
            await self._transition(live, status)
        except (Transient, Refused, Malformed, Unauthorized, Fenced) as error:
            self._note_unreachable(error)
            return False
        return True

    async def _open(self) -> None:
        if self._stored is not None and await self._resume(self._stored):
            await self._beat_new()
            return
        await self._register_anew()
        await self._beat_new()

    async def _beat_new(self) -> None:
        if self.live is not None:
            await self._beat(self.live)

    async def _resume(self, stored: StoredSession) -> bool:
        """Finds the session's version by registering it again, unchanged; False when the control plane no longer has it.

        The registration is only idempotent with the slot count that the last heartbeat left, and that is one of two (§2.4).
        """
        for slots in dict.fromkeys((self._last_slots, stored.max_concurrent_runs, 0)):
            sent_ms = self._clock.boot_ms()
            request = RegisterRequest(
                schema=REGISTER_SCHEMA,
                capabilities_json=stored.capabilities_json,
                capabilities_hash=stored.capabilities_hash,
                max_concurrent_runs=stored.max_concurrent_runs,
                available_slots=slots,
                lease_duration_ms=stored.lease_duration_ms,
            )
            try:
                answer = await self._control_plane.register(stored.session_id, request)
            except Fenced:
                continue
            if answer.generation != stored.generation or answer.replaced_session:
                return False
            self._last_slots = slots
            self._adopt(answer, expires_at=max(self._server_clock.boot_time(answer.lease_expires_at_ms), sent_ms))
            self._log.info("session_continued", session=stored.session_id, generation=stored.generation)
            return True
        return False

    async def _register_anew(self) -> None:
        if self._fresh_id is None:
            self._fresh_id = new_session_id(self._server_clock.now_ms())
        session_id = self._fresh_id
        slots = self._slots()
        for position, capabilities in enumerate(self._terms.capabilities, start=1):
            sent_ms = self._clock.boot_ms()
            request = RegisterRequest(
                schema=REGISTER_SCHEMA,
                capabilities_json=capabilities.json,
                capabilities_hash=capabilities.hash,
                max_concurrent_runs=self._terms.max_concurrent_runs,
                available_slots=slots,
                lease_duration_ms=self._terms.lease_duration_ms,
            )
            try:
                answer = await self._control_plane.register(session_id, request)
            except Malformed:
                if position == len(self._terms.capabilities):
                    raise
                continue
            except Fenced:
                # The id was used up by an answer that never came and has expired since.
                self._fresh_id = None
                raise Transient("the registration was fenced: the next one takes a new session id") from None
            self._last_slots = slots
            await self._remember(answer, capabilities)
            self._adopt(answer, expires_at=sent_ms + self._terms.lease_duration_ms)
            self._log.info(
                "session_registered",
                session=session_id,
                generation=answer.generation,
                replaced_session=answer.replaced_session,
            )
            return

    async def _remember(self, answer: RegisterResponse, capabilities: CapabilitiesText) -> None:
        self._stored = StoredSession(
            schema_version=1,
            worker_id=answer.worker_id,
            session_id=answer.session_id,
            generation=answer.generation,
            capabilities_json=capabilities.json,
            capabilities_hash=capabilities.hash,
            max_concurrent_runs=self._terms.max_concurrent_runs,
            lease_duration_ms=self._terms.lease_duration_ms,
        )
        await self._store.write_session(self._stored)
        self._fresh_id = None

    def _adopt(self, answer: RegisterResponse, *, expires_at: int) -> None:
        self.live = LiveSession(
            worker_id=answer.worker_id,
            session_id=answer.session_id,
            generation=answer.generation,
            version=answer.version,
            status=answer.status,
            expires_at=expires_at,
        )

    async def _beat(self, live: LiveSession, *, is_retry: bool = False) -> None:
        slots = self._slots()
        sent_ms = self._clock.boot_ms()
        duration_ms = self._terms.lease_duration_ms
        request = HeartbeatRequest(
            schema=HEARTBEAT_SCHEMA,
            generation=live.generation,
            expected_version=live.version,
            available_slots=slots,
            lease_duration_ms=duration_ms,
        )
        try:
            answer = await self._control_plane.heartbeat(live.session_id, request)
        except Fenced:
            if is_retry or not await self._resynchronise(live):
                self._lose(live)
                return
            await self._beat_again()
            return
        self._last_slots = slots
        self.live = msgspec.structs.replace(
            live, version=answer.version, status=answer.status, expires_at=sent_ms + duration_ms
        )
        self._server_clock.observe(answer.lease_expires_at_ms - duration_ms, sent_ms)
        self._due_at = sent_ms + self._terms.heartbeat_ms
        await self._accepted()

    async def _beat_again(self) -> None:
        if self.live is not None:
            await self._beat(self.live, is_retry=True)

    async def _resynchronise(self, live: LiveSession) -> bool:
        """A heartbeat whose answer was lost leaves the version behind; the registration tells it (§2.4, gap 4 of §13.2)."""
        stored = self._stored
        if stored is None or stored.session_id != live.session_id:
            return False
        return await self._resume(stored)

    def _lose(self, live: LiveSession) -> None:
        """The session is gone. If its lease ran out here too, the way is free for a new one; if not, somebody replaced it."""
        if live.is_over(self._clock.boot_ms()):
            self.live = None
            self._stored = None
            self._log.warning("session_expired", session=live.session_id)
            return
        self.access = Access.FENCED
        self._log.error("session_fenced", session=live.session_id, generation=live.generation)

    async def _accepted(self) -> None:
        if self.access is Access.SUSPENDED:
            self.access = Access.OPEN
            self._log.info("session_access_restored")
        if not self._is_reachable:
            self._is_reachable = True
            self._log.info("control_plane_reachable")
        stored, anchor = self._stored, self._server_clock.anchor
        if stored is not None and anchor is not None and (stored.anchor is UNSET or stored.anchor.boot_id != anchor.boot_id):
            # Once per boot: what a restarted worker judges leases by while the control plane cannot be reached.
            self._stored = msgspec.structs.replace(stored, anchor=anchor)
            await self._store.write_session(self._stored)

    async def _transition(self, live: LiveSession, status: Literal[SessionStatus.DRAINING, SessionStatus.OFFLINE]) -> None:
        request = TransitionRequest(
            schema=TRANSITION_SCHEMA,
            generation=live.generation,
            expected_version=live.version,
            status="draining" if status is SessionStatus.DRAINING else "offline",
        )
        try:
            answer = await self._control_plane.transition(live.session_id, request)
        except Fenced:
            if not await self._resynchronise(live):
                raise
            raise Transient("the session's version was behind and is known again") from None
        self._last_slots = 0
        self.live = msgspec.structs.replace(live, version=answer.version, status=answer.status)
        self._log.info(f"session_{status}", session=live.session_id)

    def _slots(self) -> int:
        """All slots or none. The control plane counts live leases itself; reporting only free ones would count running work
        twice (§2.8, gap 6 of §13.2)."""
        return 0 if self.is_draining else self.max_concurrent_runs

    def _suspend(self, error: Unauthorized) -> None:
        self._due_at = self._clock.boot_ms() + self._terms.heartbeat_ms
        if self.access is Access.OPEN:
            self.access = Access.SUSPENDED
            self._log.error("session_access_suspended", reason=str(error))

    def _note_unreachable(self, error: Exception) -> None:
        wait_s = error.retry_after_s if isinstance(error, Transient) else None
        if wait_s is not None:
            self._due_at = self._clock.boot_ms() + int(wait_s * 1000)
        if self._is_reachable:
            self._is_reachable = False
            self._log.warning("control_plane_unreachable", reason=str(error))
