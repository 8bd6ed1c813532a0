"""The end of an attempt: receipt, log upload, completion, journal, receipt removed; in this order and in no other.

Source: ADR-0021 §5, wire-protocol.md §8, R220 to R233. Each step can be repeated after a crash: the upload is write-once with
the same bytes, the completion has an exact replay, the receipt goes only after the end is durable here.
"""

from typing import Final

from ..domain.errors import Conflict, Fenced
from ..domain.evidence import ObservedEnd
from ..domain.record import Event, InboxRecord, RecoveryReason, State, advance
from ..ports import Inbox, Log, OutputStore, Receipts
from ..wire.completion import Artifact, CompletionRequest, CompletionResult
from .active import ActiveOffer
from .control_plane import ControlPlane
from .lease_control import LeaseControl
from .server_clock import ServerClock

VERSION_TRIES: Final = 3
"""A renewal may overtake a request; the newest version is looked up this often before the outer retry takes over (R296)."""


class Completion:
    """Completes one offer at a time, under that offer's lock where the lease version matters."""

    def __init__(
        self,
        control_plane: ControlPlane,
        inbox: Inbox,
        receipts: Receipts,
        outputs: OutputStore,
        lease_control: LeaseControl,
        server_clock: ServerClock,
        log: Log,
    ) -> None:
        self._control_plane = control_plane
        self._inbox = inbox
        self._receipts = receipts
        self._outputs = outputs
        self._lease_control = lease_control
        self._server_clock = server_clock
        self._log = log

    async def complete(self, active: ActiveOffer, end: ObservedEnd) -> None:
        """Reports the end. Raises Transient and the like, and Fenced: the same call may be made again later.

        The record is read here, not handed in (R220); between two who complete the same record the journal's revision decides,
        and the one that comes second gets Conflict (R231).
        """
        artifact = await self._upload(active)
        async with active.lock:
            record = await self._open_record(active)
            if record is None:
                return
            status = await self._submit(record, end, artifact)
            # Read again: finding the version may have moved the record on.
            record = await self._open_record(active) or record
            now_ms = self._server_clock.now_ms()
            if status == "already_terminal":
                # Somebody else ended it, so this end is not what was recorded (D3). The evidence stays.
                ended = advance(record, Event.RECOVERY_NEEDED, now_ms, recovery_reason=RecoveryReason.CONTROL_PLANE_TERMINAL)
            else:
                ended = advance(record, Event.COMPLETION_ACKED, now_ms, completion_acknowledged_at_ms=now_ms)
            await self._inbox.replace(ended)
        self._log.info("run_completed", offer=active.offer_id, run=record.offer.run_id, exit_code=end.exit_code, status=status)
        if status != "already_terminal":
            await self._receipts.remove(record.offer.attempt_id)

    async def _upload(self, active: ActiveOffer) -> Artifact:
        """Without the lock: a slow line must not keep the lease from being renewed (gap 14 of §13.2).

        An upload that is fenced under every version is not the end: after a lost answer the attempt is already completed, and
        only the completion's exact replay can tell.
        """
        for _ in range(VERSION_TRIES):
            record = await self._inbox.read(active.offer_id)
            if record is None or not isinstance(record.log_artifact_id, str):
                raise Conflict(f"internal error: offer {active.offer_id} has no output to upload")
            sealed = await self._outputs.seal(record.log_artifact_id)
            artifact = Artifact(
                log_artifact_id=record.log_artifact_id,
                byte_length=sealed.byte_length,
                sha256=sealed.sha256,
                truncated=sealed.truncated,
            )
            if active.is_uploaded:
                break
            try:
                await self._control_plane.upload(record.offer, record.log_artifact_id, sealed)
            except Fenced:
                if not await self._found_version(active, record):
                    break
            else:
                active.is_uploaded = True
                break
        return artifact

    async def _found_version(self, active: ActiveOffer, used: InboxRecord) -> bool:
        """Whether a newer lease version than the one of `used` is known now."""
        async with active.lock:
            record = await self._inbox.read(active.offer_id)
            if record is None or record.offer.lease.version != used.offer.lease.version:
                return record is not None
            try:
                await self._lease_control.resynchronise(record)
            except Fenced:
                return False
            return True

    async def _submit(self, record: InboxRecord, end: ObservedEnd, artifact: Artifact) -> str:
        for attempt in range(1, VERSION_TRIES + 1):
            try:
                answer = await self._control_plane.complete(record.offer, _request(record, end, artifact))
            except Fenced:
                if attempt == VERSION_TRIES:
                    raise
                record = await self._lease_control.resynchronise(record)
                continue
            return answer.status
        raise Fenced("the completion was refused under every known lease version")

    async def _open_record(self, active: ActiveOffer) -> InboxRecord | None:
        record = await self._inbox.read(active.offer_id)
        is_open = record is not None and not record.is_settled and record.state is not State.RECOVERY_REQUIRED
        return record if is_open else None


def _request(record: InboxRecord, end: ObservedEnd, artifact: Artifact) -> CompletionRequest:
    """The same bytes for the same record and end, whenever it is built (R223, R227)."""
    if not isinstance(record.executor_started_at_ms, int):
        raise Conflict("internal error: a record with an observed end has no start time")
    return CompletionRequest.of(
        record.offer,
        callback_sequence=end.callback_sequence,
        callback_token_digest=record.completion_receipt_token_digest,
        result=CompletionResult(
            outcome=end.outcome,
            started_at_ms=record.executor_started_at_ms,
            finished_at_ms=end.finished_at_ms,
            exit_code=end.exit_code,
        ),
        artifact=artifact,
    )
