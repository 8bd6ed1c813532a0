"""The three acknowledgements: starting, running and start-failure, each durable here only after the control plane's answer.

Source: ADR-0111 §2, wire-protocol.md §5, R129, R142 to R143, R151 to R152, R169 to R174. The caller holds the offer's lock.
"""

from collections.abc import Awaitable, Callable

from ..domain.errors import Conflict, Fenced, Refused
from ..domain.offer import Offer
from ..domain.record import Event, InboxRecord, RecoveryReason, advance
from ..ports import Inbox, Log
from ..wire.activation import ActivationResponse, RunningRequest, Snapshot
from .control_plane import ControlPlane
from .lease_control import LeaseControl
from .server_clock import ServerClock


class Acknowledger:
    """Sends an acknowledgement under the newest lease version known and writes what the answer proves.

    Every method raises Transient and the like, Refused, or Fenced; then nothing was written and it may be called again.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        inbox: Inbox,
        lease_control: LeaseControl,
        server_clock: ServerClock,
        log: Log,
    ) -> None:
        self._control_plane = control_plane
        self._inbox = inbox
        self._lease_control = lease_control
        self._server_clock = server_clock
        self._log = log

    async def starting(self, record: InboxRecord) -> Snapshot | None:
        """Acknowledges `accepted`; the snapshot when the launch may go on, or None when the record needs recovery.

        A control plane that already says running or terminal, while nothing runs here, never leads to a spawn (R157, R174).
        """
        answer = await self._with_version(record, self._control_plane.starting)
        record = await self._newest(record)
        if answer.snapshot.shape != "starting":
            await self._recover(record, answer)
            return None
        await self._inbox.replace(advance(record, Event.STARTING_ACKED, self._server_clock.now_ms()))
        return answer.snapshot

    async def starting_again(self, record: InboxRecord) -> Snapshot | None:
        """The facts of an attempt that was acknowledged before this process began; None as above."""
        answer = await self._with_version(record, self._control_plane.starting)
        if answer.snapshot.shape != "starting":
            await self._recover(await self._newest(record), answer)
            return None
        return answer.snapshot

    async def running(self, record: InboxRecord) -> Snapshot | None:
        """Acknowledges `started`; None, with nothing written, when the control plane has ended the attempt: the command is
        to be stopped first."""

        async def send(current: InboxRecord) -> ActivationResponse:
            request = RunningRequest.of(
                current.offer,
                executor_handle=current.executor_handle,
                log_artifact_id=current.log_artifact_id,
                callback_sequence=current.completion_receipt_callback_sequence,
                callback_token_digest=current.completion_receipt_token_digest,
            )
            return await self._control_plane.running(current.offer, request)

        answer = await self._retrying(record, send)
        if answer.snapshot.shape == "terminal":
            return None
        if answer.snapshot.shape != "running":
            raise Refused("cannot use the answer: a running acknowledgement must end in running")
        record = await self._newest(record)
        await self._inbox.replace(advance(record, Event.RUNNING_ACKED, self._server_clock.now_ms()))
        return answer.snapshot

    async def start_failure(self, record: InboxRecord) -> None:
        """Reports `start_failed` (R142, R158)."""
        answer = await self._with_version(record, self._control_plane.start_failure)
        record = await self._newest(record)
        if answer.snapshot.shape == "running":
            await self._recover(record, answer)
            return
        if answer.snapshot.shape != "terminal":
            raise Refused("cannot use the answer: a start failure must end in a terminal attempt")
        await self._inbox.replace(advance(record, Event.FAILURE_ACKED, self._server_clock.now_ms()))

    async def _with_version(
        self, record: InboxRecord, call: Callable[[Offer], Awaitable[ActivationResponse]]
    ) -> ActivationResponse:
        async def send(current: InboxRecord) -> ActivationResponse:
            return await call(current.offer)

        return await self._retrying(record, send)

    async def _retrying(
        self, record: InboxRecord, send: Callable[[InboxRecord], Awaitable[ActivationResponse]]
    ) -> ActivationResponse:
        """Once more under the newest version when the fence may only be behind; no more than that here (R296).

        The record is read again first: while the caller waited for the lock, a renewal may have moved its lease (R139, R295).
        """
        newest = await self._inbox.read(record.offer_id)
        if newest is None or newest.state is not record.state:
            raise Fenced("the offer moved on while its acknowledgement waited")
        record = newest
        try:
            return await send(record)
        except Fenced:
            return await send(await self._lease_control.resynchronise(record))

    async def _newest(self, record: InboxRecord) -> InboxRecord:
        newest = await self._inbox.read(record.offer_id)
        if newest is None or newest.state != record.state:
            raise Conflict(f"internal error: the record of offer {record.offer_id} moved under its lock")
        return newest

    async def _recover(self, record: InboxRecord, answer: ActivationResponse) -> None:
        reason = (
            RecoveryReason.CONTROL_PLANE_ALREADY_RUNNING
            if answer.snapshot.shape == "running"
            else RecoveryReason.CONTROL_PLANE_TERMINAL
        )
        self._log.warning("recovery_required", offer=record.offer_id, reason=reason)
        await self._inbox.replace(advance(record, Event.RECOVERY_NEEDED, self._server_clock.now_ms(), recovery_reason=reason))
