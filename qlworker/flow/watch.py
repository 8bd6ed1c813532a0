"""Follows an attempt behind the barrier to its end: adopts what runs, stops what must not, completes what is over.

It starts nothing: a record at or behind the barrier is never launched again (R163, R168). Source: ADR-0021 §3 and §5,
wire-protocol.md §7.4, design.md §2.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from ..domain.backoff import full_jitter_ms
from ..domain.errors import Fenced
from ..domain.evidence import AuthorityFacts, ObservedEnd, Reconciled, decided
from ..domain.identity import DurableHandle, Presence
from ..domain.lease import StopReason
from ..domain.record import Event, InboxRecord, RecoveryReason, State, advance
from ..domain.verdict import ReceiptEvidence, Verdict
from ..ports import Clock, Inbox, Log, Processes, StopResult
from .acknowledge import Acknowledger
from .active import ActiveOffer, LiveOutput
from .completion import Completion
from .lease_control import UNANSWERED, LeaseControl
from .race import first_of
from .recovery.evidence import EvidenceReconciler, recorded_handle
from .server_clock import ServerClock
from .session import SessionKeeper

ACKNOWLEDGE_AGAIN_MS: Final = 1000

DEADLINE_MARGIN_MS: Final = 100
"""A stop comes this much after the deadline, so that the end is past it on the control plane's clock too, whose time is known
here only as well as an answer's way allows."""


class Watcher:
    """Watches one attempt a round at a time. `stop_grace_ms` is the time between TERM and KILL."""

    def __init__(
        self,
        *,
        sessions: SessionKeeper,
        inbox: Inbox,
        processes: Processes,
        evidence: EvidenceReconciler,
        acknowledger: Acknowledger,
        completion: Completion,
        lease_control: LeaseControl,
        clock: Clock,
        server_clock: ServerClock,
        log: Log,
        stop_grace_ms: int,
    ) -> None:
        self._sessions = sessions
        self._inbox = inbox
        self._processes = processes
        self._evidence = evidence
        self._acknowledger = acknowledger
        self._completion = completion
        self._lease_control = lease_control
        self._clock = clock
        self._server_clock = server_clock
        self._log = log
        self._stop_grace_ms = stop_grace_ms

    async def follow(self, active: ActiveOffer, record: InboxRecord) -> bool:
        """One round: receipt first, then the process, then the receipt again (R179, R198 to R201); what they prove is done.

        False when there is nothing to do before something changes. Raises Corrupt or OSError when the receipt cannot be
        read, and what the control plane's calls raise.
        """
        if record.state is State.STARTED and active.is_gate_opened and not active.is_running_told:
            # Also for a command that is over already: the control plane sees every run begin before it sees it end. Tried
            # once; after a failure the evidence has the word, and a completion needs no running before it (D4).
            active.is_running_told = True
            return await self._tell_running(active, record)
        seen = await self._evidence.reconcile(record, self._facts(active), partial(_note_absence, active, record))
        if seen.receipt is ReceiptEvidence.UNTRUSTED:
            self._log.error("receipt_untrusted", offer=record.offer_id, attempt=record.offer.attempt_id)
        verdict, handle = seen.verdict, recorded_handle(record)
        if verdict is Verdict.PENDING:
            if not active.is_gate_opened:
                return False
            verdict = Verdict.RUNNING  # this process opened the gate a moment ago: the command is about to run
        if verdict is Verdict.RUNNING and handle is not None:
            return await self._follow_running(active, record, handle, seen)
        if verdict is Verdict.ENDED and seen.end is not None:
            return await self._complete(active, seen, seen.end)
        async with active.lock:
            current = await self._inbox.read(active.offer_id)
            if current is None or current.state is not record.state:
                return True
            successor = decided(current, seen, self._server_clock.now_ms())
            if successor is not None:
                await self._inbox.replace(successor)
                self._log.warning("evidence_judged", offer=active.offer_id, state=record.state, verdict=verdict)
        return True

    def _facts(self, active: ActiveOffer) -> AuthorityFacts:
        lease = active.lease
        return AuthorityFacts(
            session=self._sessions.live,
            access=self._sessions.access,
            lease_expires_at=None if lease is None else lease.expires_at,
            anchor=self._server_clock.anchor,
        )

    async def _follow_running(self, active: ActiveOffer, record: InboxRecord, handle: DurableHandle, seen: Reconciled) -> bool:
        if isinstance(record.log_artifact_id, str) and active.live is None:
            active.live = LiveOutput(record.offer, record.log_artifact_id)
        if active.deadline_at is None:
            active.deadline_at = self._deadline(record)
        patience_ms = None
        if record.state is State.STARTED and not active.stop_wanted.is_set():
            try:
                if seen.may_acknowledge_running and await self._tell_running(active, record):
                    return True
            except (*UNANSWERED, Fenced) as error:
                # Not the end of this round: a stop or the deadline must be carried out all the same.
                self._log.info("running_deferred", offer=active.offer_id, reason=str(error))
            active.running_failures += 1
            patience_ms = full_jitter_ms(active.running_failures, ACKNOWLEDGE_AGAIN_MS, 1)
        await self._await_end(active, handle, patience_ms)
        if active.loss_settled.is_set() or not active.stop_wanted.is_set():
            return True
        return await self._stop(active, record, handle)

    async def _tell_running(self, active: ActiveOffer, record: InboxRecord) -> bool:
        """Acknowledges running, if that may be done now; a command the control plane has ended is stopped."""
        worker = record.offer.worker
        if not self._sessions.may_process(worker.session_id, worker.generation):
            return False
        async with active.lock:
            active.snapshot = await self._acknowledger.running(record)
        if active.snapshot is None:
            active.end_elsewhere()
            return await self._stop(active, record, recorded_handle(record))
        return True

    async def _await_end(self, active: ActiveOffer, handle: DurableHandle, patience_ms: int | None) -> None:
        """Until the launcher is gone, a stop is wanted, the deadline passed, the loss is settled, or patience is over."""
        waits: list[Callable[[], Awaitable[object]]] = [
            partial(self._processes.wait_gone, handle),
            active.stop_wanted.wait,
            active.loss_settled.wait,
        ]
        if patience_ms is not None:
            waits.append(partial(self._clock.sleep_until, self._clock.boot_ms() + patience_ms))
        if active.deadline_at is not None:
            waits.append(partial(self._pass_deadline, active, active.deadline_at))
        await first_of(*waits)

    async def _pass_deadline(self, active: ActiveOffer, deadline_at: int) -> None:
        """The control plane notes the timeout when it is asked after the deadline; unreachable, the stop is carried out all
        the same (wire-protocol §7.5)."""
        await self._clock.sleep_until(deadline_at + DEADLINE_MARGIN_MS)
        await self._lease_control.renew(active)
        active.want_stop(StopReason.TIMEOUT)

    async def _stop(self, active: ActiveOffer, record: InboxRecord, handle: DurableHandle | None) -> bool:
        result = StopResult.UNKNOWN if handle is None else await self._processes.stop(handle, self._stop_grace_ms)
        self._log.info("command_stopped", offer=active.offer_id, reason=active.stop_reason, result=result)
        if active.is_ended_elsewhere:
            async with active.lock:
                current = await self._inbox.read(active.offer_id)
                if current is not None and current.state is record.state:
                    await self._inbox.replace(
                        advance(
                            current,
                            Event.RECOVERY_NEEDED,
                            self._server_clock.now_ms(),
                            recovery_reason=RecoveryReason.CONTROL_PLANE_TERMINAL,
                        )
                    )
            return True
        if handle is not None and result in (StopResult.STOPPED, StopResult.ALREADY_EXITED):
            await self._processes.wait_gone(handle)
            return True
        return False

    async def _complete(self, active: ActiveOffer, seen: Reconciled, end: ObservedEnd) -> bool:
        """Submits an observed end, if its authority is current (R221); otherwise the evidence waits where it is (R213)."""
        active.live = None
        if not seen.may_complete:
            if active.blocked_by is not seen.authority:
                self._log.info("completion_blocked", offer=active.offer_id, authority=seen.authority)
            active.blocked_by = seen.authority
            return False
        if active.stop_reason is StopReason.TIMEOUT:
            # Without this the control plane, if it was out of reach at the deadline, would see a failure, not a timeout.
            await self._lease_control.renew(active)
        await self._completion.complete(active, end)
        return True

    def _deadline(self, record: InboxRecord) -> int | None:
        """After a restart the deadline is counted from the launch: a little later than the control plane's own."""
        timeout_ms = record.offer.execution_revision.timeout_ms
        if not isinstance(timeout_ms, int) or not isinstance(record.executor_started_at_ms, int):
            return None
        return self._server_clock.boot_time(record.executor_started_at_ms + timeout_ms)


def _note_absence(active: ActiveOffer, record: InboxRecord, presence: Presence | None) -> None:
    """Frees the place of a command that is proven gone while its receipt is waited for, so that a restart with many records
    asks for work at once. A record in LAUNCHING never got so far that its gate was opened."""
    if presence in (Presence.EXITED, Presence.OTHER_BOOT) or record.state is State.LAUNCHING:
        active.is_absent = True
