"""Renewal of one lease, and finding its version again when an answer was lost (wire-protocol.md §7, D19).

The new version is durable before anything follows from the answer (§7.4). Everything runs under the offer's lock.
"""

from typing import Final

from ..domain.errors import Conflict, Corrupt, Fenced, Malformed, Refused, Transient, Unauthorized, Unsupported
from ..domain.lease import TrackedLease
from ..domain.offer import Offer
from ..domain.record import InboxRecord, renew
from ..ports import Clock, Inbox, Log
from ..wire.offers import Idle, OfferRequest
from .active import ActiveOffer
from .control_plane import ControlPlane
from .server_clock import ServerClock

UNANSWERED: Final = (Transient, Refused, Malformed, Unauthorized, Unsupported)
"""Errors that leave everything as it was: the same request may be sent again later."""


class LeaseControl:
    """Speaks lease-control for one offer at a time."""

    def __init__(self, control_plane: ControlPlane, inbox: Inbox, clock: Clock, server_clock: ServerClock, log: Log) -> None:
        self._control_plane = control_plane
        self._inbox = inbox
        self._clock = clock
        self._server_clock = server_clock
        self._log = log

    async def renew(self, active: ActiveOffer) -> TrackedLease | None:
        """Renews the lease and passes on a wanted stop. None means: no answer, the known lease stays as it is."""
        async with active.lock:
            try:
                record = await self._inbox.read(active.offer_id)
                if record is None or record.is_settled:
                    return None
                try:
                    return await self._renew_record(record, active)
                except Fenced:
                    return await self._found_again(record)
            except UNANSWERED as error:
                self._log.info("lease_renewal_unanswered", offer=active.offer_id, reason=str(error))
            except (OSError, Corrupt, Conflict) as error:
                # Not durable, so it does not count (§7.4). The version is found again once the disk takes it.
                self._log.error("lease_renewal_not_stored", offer=active.offer_id, error=type(error).__name__)
            return None

    async def resynchronise(self, record: InboxRecord) -> InboxRecord:
        """The record under the lease as the control plane has it now, asked for with the offer's own pair (§7.3).

        The caller holds the offer's lock. Raises Fenced when the control plane knows no newer lease of this authority.
        """
        sent_ms = self._clock.boot_ms()
        offer = record.offer
        request = OfferRequest(
            worker_generation=offer.worker.generation, offer_id=offer.offer_id, lease_token=offer.lease_token
        )
        answer = await self._control_plane.pull(offer.worker, request)
        if isinstance(answer, Idle):
            raise Fenced("the control plane has no lease for this offer")
        return await self._store(record, answer, sent_ms)

    def tracked(self, record: InboxRecord, since_ms: int) -> TrackedLease:
        """The lease of `record` for the timer, judged by the control plane's time; `since_ms` is when it was asked for."""
        offer = record.offer
        end = min(since_ms + offer.lease.duration_ms, self._server_clock.boot_time(offer.lease.expires_at_ms))
        return TrackedLease.granted(offer, since_ms, end)

    async def _renew_record(self, record: InboxRecord, active: ActiveOffer) -> TrackedLease | None:
        sent_ms = self._clock.boot_ms()
        answer = await self._control_plane.lease_control(record.offer)
        if answer.lease_version is None or answer.renewed_at_ms is None or answer.expires_at_ms is None:
            active.end_elsewhere()
            return None
        try:
            offer = record.offer.with_terms(answer.lease_version, answer.renewed_at_ms, answer.expires_at_ms)
        except ValueError as error:
            raise Refused(f"cannot use the answer: {error}") from None
        renewed = renew(record, offer, self._server_clock.now_ms())
        await self._inbox.replace(renewed)
        if answer.stop is not None:
            active.want_stop(answer.stop.reason)
        # A duration, counted from before the request: neither clock's date decides when the lease ends.
        return TrackedLease.granted(renewed.offer, sent_ms, sent_ms + offer.lease.duration_ms)

    async def _found_again(self, record: InboxRecord) -> TrackedLease | None:
        """A renewal whose answer was lost leaves the version behind (§7.3); asking for the offer again tells it."""
        sent_ms = self._clock.boot_ms()
        try:
            return self.tracked(await self.resynchronise(record), sent_ms)
        except (*UNANSWERED, Fenced) as error:
            self._log.warning("lease_renewal_fenced", offer=record.offer_id, reason=str(error))
            return None

    async def _store(self, record: InboxRecord, offer: Offer, sent_ms: int) -> InboxRecord:
        try:
            renewed = renew(record, offer, self._server_clock.now_ms())
        except Conflict as error:
            raise Fenced(str(error)) from None
        if renewed is record:
            raise Fenced("the control plane has the same lease version: something else was refused")
        await self._inbox.replace(renewed)
        self._log.info("lease_resynchronised", offer=offer.offer_id, version=offer.lease.version)
        return renewed
