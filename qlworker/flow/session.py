"""The worker's session: opened, continued after a restart, kept alive, drained and signed off (wire-protocol.md §2, §13.3).

A new registration fences every lease of the old session, so the old one is continued whenever the control plane still has it.
A worker that was replaced by another never takes the session back by itself: two boxes with one id must not fight.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET

from ..domain.errors import Fenced, Malformed, Refused, Transient, Unauthorized, Unsupported
from ..domain.session import Access, LiveSession, SessionStatus, StoredSession, may_process, may_pull
from ..domain.text import new_session_id
from ..ports import Clock, Log, SessionStore
from ..wire.session import (
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
from .control_plane import ControlPlane
from .server_clock import ServerClock

_Answer = TypeVar("_Answer")


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
        self._ahead = 0
        self._has_work = False
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
        self._has_work = has_work
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
        except (Transient, Refused, Malformed, Unsupported) as error:
            self._note_unreachable(error)

    def leave_draining(self) -> None:
        """Gives up a session that a drain of an earlier process left draining: the next tick opens a new one, which takes work.
        Only when no work depends on it any more; nothing otherwise."""
        if not self.is_draining and self.live is not None and self.live.status is SessionStatus.DRAINING:
            self.live = None
            self._stored = None
            self._due_at = 0

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
        except Fenced:
            # Under no version it can have: the session has ended already, maybe by a sign-off whose answer was lost. Whether
            # somebody else has it now is for the heartbeat to find out.
            return status is SessionStatus.OFFLINE
        except (Transient, Refused, Malformed, Unauthorized, Unsupported) as error:
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

        The registration is only idempotent with the slot count that the last heartbeat left: all or none (§2.4). It replaces
        the session of any other worker with this id, so it is only for a worker that begins or that let its session run out.
        """
        for slots in (stored.max_concurrent_runs, 0):
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
            if answer.status is SessionStatus.DRAINING and not self.is_draining and not self._has_work:
                return False
            # Never longer than a lease can be from now on: without an anchor the date may be off by decades.
            longest = sent_ms + max(stored.lease_duration_ms, self._terms.lease_duration_ms)
            expires_at = min(max(self._server_clock.boot_time(answer.lease_expires_at_ms), sent_ms), longest)
            self._adopt(answer, expires_at=expires_at)
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
        stored = StoredSession(
            schema_version=1,
            worker_id=answer.worker_id,
            session_id=answer.session_id,
            generation=answer.generation,
            capabilities_json=capabilities.json,
            capabilities_hash=capabilities.hash,
            max_concurrent_runs=self._terms.max_concurrent_runs,
            lease_duration_ms=self._terms.lease_duration_ms,
        )
        # Before it is used: a session that only memory knows would fence its own work after a crash.
        await self._store.write_session(stored)
        self._stored = stored
        self._fresh_id = None

    def _adopt(self, answer: RegisterResponse, *, expires_at: int) -> None:
        self._ahead = 0
        self.live = LiveSession(
            worker_id=answer.worker_id,
            session_id=answer.session_id,
            generation=answer.generation,
            version=answer.version,
            status=answer.status,
            expires_at=expires_at,
        )

    async def _beat(self, live: LiveSession) -> None:
        slots = self._slots()
        duration_ms = self._terms.lease_duration_ms
        sent_ms = self._clock.boot_ms()

        async def send(version: int) -> HeartbeatResponse:
            nonlocal sent_ms
            sent_ms = self._clock.boot_ms()
            request = HeartbeatRequest(
                schema=HEARTBEAT_SCHEMA,
                generation=live.generation,
                expected_version=version,
                available_slots=slots,
                lease_duration_ms=duration_ms,
            )
            return await self._control_plane.heartbeat(live.session_id, request)

        try:
            answer = await self._at_version(live, send)
        except Fenced:
            self._lose(live)
            return
        self.live = msgspec.structs.replace(
            live, version=answer.version, status=answer.status, expires_at=sent_ms + duration_ms
        )
        self._server_clock.observe(answer.lease_expires_at_ms - duration_ms, sent_ms)
        self._due_at = sent_ms + self._terms.heartbeat_ms
        await self._accepted()

    async def _at_version(self, live: LiveSession, send: Callable[[int], Awaitable[_Answer]]) -> _Answer:
        """Sends under the session's version, or, after answers that never came, under the next ones it can have by now (§2.4,
        gap 4 of §13.2). Unlike a registration, a wrong guess changes nothing, whoever has the session.

        Raises Fenced when the session is not this worker's under any of them.
        """
        for version in range(live.version, live.version + self._ahead + 1):
            try:
                answer = await send(version)
            except Fenced:
                continue
            except (Transient, Refused):
                # It may have been carried out, and then it moved the version by one.
                self._ahead = max(self._ahead, version + 1 - live.version)
                raise
            self._ahead = 0
            return answer
        raise Fenced("the session has another version, has ended or was replaced")

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
            stored = msgspec.structs.replace(stored, anchor=anchor)
            await self._store.write_session(stored)
            self._stored = stored

    async def _transition(self, live: LiveSession, status: Literal[SessionStatus.DRAINING, SessionStatus.OFFLINE]) -> None:
        async def send(version: int) -> TransitionResponse:
            request = TransitionRequest(
                schema=TRANSITION_SCHEMA,
                generation=live.generation,
                expected_version=version,
                status="draining" if status is SessionStatus.DRAINING else "offline",
            )
            return await self._control_plane.transition(live.session_id, request)

        answer = await self._at_version(live, send)
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
