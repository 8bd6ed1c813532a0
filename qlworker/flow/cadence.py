"""The one rhythm of the worker: all that recurs hangs on it, so an idle box wakes up once per tick.

Order of a tick: session first, then at most one pull, then whatever only wants to be reminded (wire-protocol.md §7.4).
"""

import random
from collections.abc import Callable
from functools import partial

import msgspec
import trio

from ..domain.errors import CapacityExceeded, Conflict, Refused
from ..domain.lease import TrackedLease
from ..ports import Clock, Log
from .delivery import Delivered, OfferDelivery
from .executions import Executions
from .output import OutputKeeper
from .race import first_of
from .receiver import Receiver
from .recovery.sweeper import Sweeper
from .renewal import CertificateRenewal
from .session import SessionKeeper


class CadenceTerms(msgspec.Struct, frozen=True):
    """`cadence_ms` is the time between ticks, jittered by a tenth so that a fleet does not march in step. After
    `drain_timeout_ms` a drain that still waits for commands says so, and goes on: results are not dropped for a deadline."""

    cadence_ms: int
    drain_timeout_ms: int


class Cadence:
    """Ticks until it is cancelled, or until a drain is through."""

    def __init__(
        self,
        *,
        sessions: SessionKeeper,
        delivery: OfferDelivery,
        receiver: Receiver,
        executions: Executions,
        output: OutputKeeper,
        sweeper: Sweeper,
        renewal: CertificateRenewal,
        clock: Clock,
        log: Log,
        terms: CadenceTerms,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._sessions = sessions
        self._delivery = delivery
        self._receiver = receiver
        self._executions = executions
        self._output = output
        self._sweeper = sweeper
        self._renewal = renewal
        self._clock = clock
        self._log = log
        self._terms = terms
        self._fraction = fraction
        self._overdue_at: int | None = None
        self._is_disk_failing = False
        self._is_full = False
        self._wake = trio.Event()

    def drain(self) -> None:
        """Takes no new work from now on; `run` returns when nothing is left and the control plane knows."""
        self._sessions.is_draining = True
        self._overdue_at = self._clock.boot_ms() + self._terms.drain_timeout_ms
        self._wake.set()

    async def run(self) -> None:
        """Returns only after a drain."""
        while True:
            self._wake = trio.Event()
            try:
                if await self._tick():
                    return
            except OSError as error:
                self._note_disk(error)
            else:
                self._is_disk_failing = False
            self._output.tick()
            self._renewal.tick()
            wait_ms = int(self._terms.cadence_ms * (0.95 + self._fraction() / 10))
            await first_of(self._wake.wait, partial(self._clock.sleep_until, self._clock.boot_ms() + wait_ms))

    async def _tick(self) -> bool:
        """Whether a drain is through."""
        await self._sessions.tick()
        if self._sessions.is_draining:
            if await self._is_drained():
                return True
        elif self._has_room() and self._sessions.may_pull:
            await self._pull()
        elif len(self._executions.active) == 0:
            self._sessions.leave_draining()
        if await self._sweeper.tick():
            self._is_full = False
        return False

    def _note_disk(self, error: OSError) -> None:
        """A disk that is full or went read-only takes no new work, but ends nothing: what runs goes on (design.md §3)."""
        self._delivery.read_again()
        if not self._is_disk_failing:
            self._is_disk_failing = True
            self._log.error("state_unwritable", error=type(error).__name__, number=error.errno)

    def _has_room(self) -> bool:
        return not self._is_full and self._executions.active.occupied < self._sessions.max_concurrent_runs

    async def _pull(self) -> None:
        live = self._sessions.live
        if live is None:
            return
        delivered = await self._delivery.pull(live)
        if delivered is None:
            return
        try:
            record = await self._receiver.receive(delivered, self._sessions.live or live)
        except (Refused, Conflict) as error:
            self._log.error("offer_refused", offer=delivered.offer.offer_id, reason=str(error))
            await self._delivery.refused(error)
            return
        except CapacityExceeded as error:
            # Another pull would only hold another run's lease: nothing is asked for until a record has left.
            self._is_full = True
            self._log.error("journal_full", reason=str(error))
            await self._delivery.refused(error)
            return
        self._log.info("offer_accepted", offer=record.offer_id, run=record.offer.run_id, attempt=record.offer.attempt_id)
        try:
            await self._delivery.accepted(delivered.offer)
        except OSError as error:
            # The offer is in the inbox, and nobody else would take it up before a restart.
            self._note_disk(error)
        self._executions.carry(record, self._lease(delivered))

    def _lease(self, delivered: Delivered) -> TrackedLease:
        return TrackedLease.granted(delivered.offer, delivered.sent_ms, self._receiver.lease_ends_at(delivered))

    async def _is_drained(self) -> bool:
        """Draining is told at once, offline only when nothing is owed any more (wire-protocol §2.6)."""
        if self._overdue_at is not None and self._clock.boot_ms() >= self._overdue_at:
            self._overdue_at = None
            self._log.warning("drain_overdue", offers=len(self._executions.active))
        if not await self._sessions.told_draining():
            return False
        return len(self._executions.active) == 0 and await self._sessions.told_offline()
