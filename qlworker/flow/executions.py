"""Carries every unsettled offer from where its record stands to its end, each in a task of its own.

The record on disk decides the next step, so a first run and a restart go the same way, and one failing offer keeps no other
waiting (gaps 2 and 3 of wire-protocol.md §13.2). A record at or behind the barrier is never launched again (R163).
"""

import random
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Final

import msgspec
import trio

from ..domain.audit import Finding
from ..domain.backoff import full_jitter_ms
from ..domain.errors import Conflict, Corrupt, Fenced, OwnershipLost, Refused
from ..domain.lease import TrackedLease
from ..domain.record import Event, InboxRecord, State, advance
from ..domain.verdict import Step, next_step
from ..ports import Clock, Inbox, Log, Receipts
from .acknowledge import Acknowledger
from .active import ActiveOffer, ActiveOffers
from .launch import Launcher
from .lease_control import UNANSWERED, LeaseControl
from .lease_loss import LeaseLossCoordinator
from .lease_timer import LeaseTimer
from .race import first_of
from .server_clock import ServerClock
from .session import SessionKeeper
from .watch import Watcher

PREPARE_TRIES: Final = 8


class Progress(Enum):
    """What a round did: a step was made, nothing may be done before something changes, or the offer is over."""

    MADE = auto()
    WAITING = auto()
    OVER = auto()


class Executions:
    """Owns the offers in flight and the one lease timer. `retry_base_ms` is the first wait after a step that failed."""

    def __init__(
        self,
        *,
        sessions: SessionKeeper,
        inbox: Inbox,
        receipts: Receipts,
        acknowledger: Acknowledger,
        launcher: Launcher,
        watcher: Watcher,
        lease_control: LeaseControl,
        lease_loss: LeaseLossCoordinator,
        clock: Clock,
        server_clock: ServerClock,
        log: Log,
        retry_base_ms: int,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._sessions = sessions
        self._inbox = inbox
        self._receipts = receipts
        self._acknowledger = acknowledger
        self._launcher = launcher
        self._watcher = watcher
        self._lease_control = lease_control
        self._lease_loss = lease_loss
        self._clock = clock
        self._server_clock = server_clock
        self._log = log
        self._retry_base_ms = retry_base_ms
        self._fraction = fraction
        self._timer = LeaseTimer(clock, self._renew, self._note_loss)
        self._nursery: trio.Nursery | None = None
        self.active = ActiveOffers()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until it is cancelled. Commands live on: only their watching ends."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._timer.run, name="lease timer")
            task_status.started()

    def carry(self, record: InboxRecord, lease: TrackedLease | None = None) -> bool:
        """Takes up the offer of `record`; False when it already is in flight (R144). `lease` is what its delivery brought."""
        if lease is None:
            return self.resume(Finding.of(record.offer_id, record.offer.attempt_id, record.state))
        return self._begin(record.offer_id, lease)

    def resume(self, finding: Finding) -> bool:
        """Takes up what an earlier process left, as the startup audit found it; False as above."""
        begun = self._begin(finding.offer_id, None)
        if begun:
            self._log.info("offer_resumed", offer=finding.offer_id, attempt=finding.attempt_id, state=finding.state)
        return begun

    def _begin(self, offer_id: str, lease: TrackedLease | None) -> bool:
        if self._nursery is None:
            raise Conflict("internal error: executions are not running")
        active = self.active.begin(offer_id)
        if active is None:
            return False
        active.lease = lease
        self._nursery.start_soon(self._carry, active, name=f"offer {offer_id}")
        return True

    def hasten(self, active: ActiveOffer) -> None:
        """Asks the control plane now what it wants of this run, instead of at the next renewal."""
        lease = self._timer.find(active.offer_id)
        if lease is not None:
            self._timer.track(msgspec.structs.replace(lease, renew_at=self._clock.boot_ms()))

    async def _carry(self, active: ActiveOffer) -> None:
        failures = 0
        try:
            while True:
                try:
                    progress = await self._round(active, failures)
                except OwnershipLost:
                    # The app ends for the same reason; a later process takes over from the records.
                    return
                except Exception as error:
                    # One offer's fault is not the others' business: they go on, and this one is tried again.
                    progress = Progress.WAITING
                    self._note(active, error, failures)
                if progress is Progress.OVER:
                    return
                failures = 0 if progress is Progress.MADE else failures + 1
                if failures:
                    await self._pause(active, failures)
        finally:
            self._timer.untrack(active.offer_id)
            self.active.end(active)

    async def _round(self, active: ActiveOffer, failures: int) -> Progress:
        record = await self._inbox.read(active.offer_id)
        if record is None or next_step(record.state) is Step.REST:
            return Progress.OVER
        if not self._track(active, record):
            await self._lose(active)
            return Progress.MADE
        return Progress.MADE if await self._take_step(active, record, failures) else Progress.WAITING

    def _note(self, active: ActiveOffer, error: Exception, failures: int) -> None:
        if isinstance(error, (*UNANSWERED, Fenced)):
            if failures == 0:
                self._log.warning("step_deferred", offer=active.offer_id, reason=str(error))
        elif isinstance(error, Corrupt | OSError):
            # Local state that cannot be read proves nothing: no probe, no stop, no report (R193 to R195).
            self._log.error("local_evidence_unreadable", offer=active.offer_id, error=type(error).__name__)
        else:
            self._log.error("step_failed", offer=active.offer_id, error=type(error).__name__)

    def _track(self, active: ActiveOffer, record: InboxRecord) -> bool:
        """Sees to it that the timer knows the lease once `starting` was acknowledged (R294). False when it is over.

        A lease of an earlier process is judged by the control plane's time, so only after that is known in this boot.
        """
        if active.lost.is_set():
            return False
        if self._timer.find(active.offer_id) is not None:
            return True
        lease = active.lease
        if lease is None:
            if not self._server_clock.is_proven:
                return True
            lease = active.lease = self._lease_control.tracked(record, self._clock.boot_ms())
        if record.state is not State.ACCEPTED:
            self._timer.track(lease)
        return not lease.is_over(self._clock.boot_ms())

    async def _take_step(self, active: ActiveOffer, record: InboxRecord, failures: int) -> bool:
        """Does what the record asks for; False when there is nothing to do before something changes."""
        worker = record.offer.worker
        step = next_step(record.state)
        if step is Step.FIND_EVIDENCE:
            return await self._watcher.follow(active, record)
        if not self._sessions.may_process(worker.session_id, worker.generation):
            return False
        if step is Step.ACKNOWLEDGE_STARTING:
            async with active.lock:
                active.snapshot = await self._acknowledger.starting(record)
        elif step is Step.LAUNCH:
            return await self._launch(active, record, failures)
        else:
            async with active.lock:
                await self._acknowledger.start_failure(record)
            await self._receipts.remove(record.offer.attempt_id)
            self._log.info("start_failure_reported", offer=active.offer_id)
        return True

    async def _launch(self, active: ActiveOffer, record: InboxRecord, failures: int) -> bool:
        async with active.lock:
            snapshot = active.snapshot or await self._acknowledger.starting_again(record)
        if snapshot is None:
            return True
        active.snapshot = snapshot
        if isinstance(snapshot.deadline_at_ms, int):
            active.deadline_at = self._server_clock.boot_time(snapshot.deadline_at_ms)
        if active.stop_wanted.is_set():
            await self._not_started(active, "stop_requested")
            return True
        try:
            prepared = await self._launcher.prepare(record.offer, snapshot.callback_sequence + 1)
        except UNANSWERED as error:
            if not isinstance(error, Refused) and failures + 1 < PREPARE_TRIES:
                raise
            await self._not_started(active, str(error))
            return True
        async with active.lock:
            current = await self._inbox.read(active.offer_id)
            ready = current is not None and current.state is State.STARTING_ACKNOWLEDGED
            if current is None or not ready or active.stop_wanted.is_set():
                return True
            if not self._timer.is_alive(active.offer_id):
                # Over, or of an earlier process and not yet judged: the control plane's time is not known in this boot.
                return False
            try:
                active.is_gate_opened = await self._launcher.launch(current, prepared)
            except Refused as error:
                await self._inbox.replace(advance(current, Event.NOT_STARTED, self._server_clock.now_ms()))
                self._log.warning("start_refused", offer=active.offer_id, reason=str(error))
        return True

    async def _not_started(self, active: ActiveOffer, reason: str) -> None:
        async with active.lock:
            record = await self._inbox.read(active.offer_id)
            if record is not None and record.state is State.STARTING_ACKNOWLEDGED:
                await self._inbox.replace(advance(record, Event.NOT_STARTED, self._server_clock.now_ms()))
                self._log.warning("start_refused", offer=active.offer_id, reason=reason)

    async def _renew(self, offer_id: str) -> TrackedLease | None:
        active = self.active.find(offer_id)
        if active is None:
            return None
        lease = await self._lease_control.renew(active)
        if lease is not None:
            active.lease = lease
        return lease

    def _note_loss(self, lease: TrackedLease) -> None:
        """Only says it: the offer's own task carries it out, or the one started here when that one waits for the end."""
        active = self.active.find(lease.offer_id)
        if active is None or active.lost.is_set() or self._nursery is None:
            return
        active.lost.set()
        self._nursery.start_soon(self._carry_loss, active, lease, name=f"loss {lease.offer_id}")

    async def _carry_loss(self, active: ActiveOffer, lease: TrackedLease) -> None:
        attempt = 0
        while True:
            try:
                await self._lease_loss.lose(active, lease.authority)
                break
            except OwnershipLost:
                break
            except Exception as error:
                # Whatever kept it from being stopped or written: it is tried again, and nothing is claimed meanwhile (R284).
                attempt += 1
                self._log.error("lease_loss_deferred", offer=active.offer_id, error=type(error).__name__)
                await self._sleep(full_jitter_ms(attempt, self._retry_base_ms, self._fraction()))
        active.loss_settled.set()

    async def _lose(self, active: ActiveOffer) -> None:
        """The lease is over: wait for the coordinator, or call it when the timer never had the lease."""
        if not active.lost.is_set() and active.lease is not None:
            self._note_loss(active.lease)
        await active.loss_settled.wait()

    async def _pause(self, active: ActiveOffer, failures: int) -> None:
        """Waits half to all of a growing time, at most until the lease is over."""
        wait_ms = full_jitter_ms(failures, self._retry_base_ms, 0.5 + self._fraction() / 2)
        await first_of(active.lost.wait, partial(self._sleep, wait_ms))

    async def _sleep(self, wait_ms: int) -> None:
        await self._clock.sleep_until(self._clock.boot_ms() + wait_ms)
