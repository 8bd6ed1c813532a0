"""What follows when a lease is over: stop exactly that command and say honestly what is known (R273 to R293).

It can stop and it can write one of two reasons. It has no port to complete, to acknowledge or to start anything, and nothing
here can tell the control plane "lost".
"""

from ..domain.identity import DurableHandle
from ..domain.lease import LeaseAuthority, StopReason
from ..domain.record import Event, InboxRecord, RecoveryReason, State, advance
from ..ports import Inbox, Log, Processes, StopResult
from .active import ActiveOffer
from .server_clock import ServerClock

_MAY_OWN_EXECUTION = frozenset({State.LAUNCHING, State.STARTED, State.RUNNING_ACKNOWLEDGED})


class LeaseLossCoordinator:
    """Carries out a loss. `stop_grace_ms` is the time between TERM and KILL."""

    def __init__(self, inbox: Inbox, processes: Processes, server_clock: ServerClock, log: Log, *, stop_grace_ms: int) -> None:
        self._inbox = inbox
        self._processes = processes
        self._server_clock = server_clock
        self._log = log
        self._stop_grace_ms = stop_grace_ms

    async def lose(self, active: ActiveOffer, authority: LeaseAuthority) -> None:
        """Stops the command of exactly this authority and moves the record to recovery_required.

        The record is read again under the offer's lock, so a completion that came first wins (R287). When the stop itself
        fails, nothing is written and the error goes to the caller: a later try stays possible (R284).
        """
        async with active.lock:
            record = await self._inbox.read(active.offer_id)
            if record is None or not self._concerns(record, authority):
                return
            reason = await self._stop(record)
            await self._inbox.replace(
                advance(record, Event.RECOVERY_NEEDED, self._server_clock.now_ms(), recovery_reason=reason)
            )
            self._log.warning("lease_lost", offer=active.offer_id, attempt=record.offer.attempt_id, outcome=reason)

    def _concerns(self, record: InboxRecord, authority: LeaseAuthority) -> bool:
        return (
            not record.is_settled
            and record.state is not State.RECOVERY_REQUIRED
            and LeaseAuthority.of(record.offer) == authority
        )

    async def _stop(self, record: InboxRecord) -> RecoveryReason:
        if record.state not in _MAY_OWN_EXECUTION:
            # Before the barrier nothing was ever spawned, so there is nothing that could still run.
            return RecoveryReason.LEASE_LOST_STOPPED
        if not isinstance(record.executor_handle, str):
            return RecoveryReason.LEASE_LOST_UNVERIFIED
        try:
            handle = DurableHandle.parse(record.executor_handle)
        except ValueError:
            return RecoveryReason.LEASE_LOST_UNVERIFIED
        result = await self._processes.stop(handle, self._stop_grace_ms)
        self._log.info("command_stopped", offer=record.offer_id, reason=StopReason.RECONCILE, result=result)
        if result in (StopResult.STOPPED, StopResult.ALREADY_EXITED):
            return RecoveryReason.LEASE_LOST_STOPPED
        return RecoveryReason.LEASE_LOST_UNVERIFIED
