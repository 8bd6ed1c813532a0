"""The receiver: re-verifies an offer that an authenticated exchange brought and makes it durable before anything else.

Steps 1 to 3 of ADR-0021 §1 (R121 to R128, R374 to R380). Whatever is refused here leaves no file behind.
"""

from ..domain.errors import Refused
from ..domain.offer import Offer
from ..domain.record import InboxRecord, accept, renew
from ..domain.session import LiveSession, SessionStatus
from ..domain.text import check_launch_id
from ..ports import Clock, Inbox
from .delivery import Delivered
from .server_clock import ServerClock


class Receiver:
    """Turns a delivered offer into an accepted record, or into nothing."""

    def __init__(self, inbox: Inbox, clock: Clock, server_clock: ServerClock) -> None:
        self._inbox = inbox
        self._clock = clock
        self._server_clock = server_clock

    async def receive(self, delivered: Delivered, session: LiveSession) -> InboxRecord:
        """The durable record of the offer; the same authority delivered again only moves its lease forward (R24, R25).

        Raises Refused before any write when a fact does not hold, Conflict for the same id under another authority, and
        CapacityExceeded when the journal is full.
        """
        offer = delivered.offer
        self._check_facts(offer)
        self._check_session(offer, session)
        if self.lease_ends_at(delivered) <= self._clock.boot_ms():
            raise Refused("cannot accept the offer: its run lease is over")
        existing = await self._inbox.read(offer.offer_id)
        if existing is None:
            record = accept(offer, self._server_clock.now_ms())
            await self._inbox.create(record)
            return record
        record = renew(existing, offer, self._server_clock.now_ms())
        if record is not existing:
            await self._inbox.replace(record)
        return record

    def lease_ends_at(self, delivered: Delivered) -> int:
        """When the lease ends on the boot clock, in milliseconds. A new claim's lease began after the request was sent; a
        recovered one began earlier, so its end is taken from the control plane's time."""
        offer = delivered.offer
        full = delivered.sent_ms + offer.lease.duration_ms
        if offer.delivery_kind == "new_claim":
            return full
        return min(full, self._server_clock.boot_time(offer.lease.expires_at_ms))

    def _check_facts(self, offer: Offer) -> None:
        """Form and digest once more, on the object that will be written (R122 to R126)."""
        try:
            check_launch_id(offer.run_id, "runId")
            check_launch_id(offer.attempt_id, "attemptId")
            offer.execution_revision.verify()
        except ValueError as error:
            raise Refused(f"cannot accept the offer: {error}") from None
        if offer.delivery_kind not in ("new_claim", "lease_recovery"):
            raise Refused("cannot accept the offer: deliveryKind must be new_claim or lease_recovery")

    def _check_session(self, offer: Offer, session: LiveSession) -> None:
        """The present session, alive; draining takes back only what it already owned (R127, R374 to R380)."""
        worker = offer.worker
        if (worker.worker_id, worker.session_id, worker.generation) != (
            session.worker_id,
            session.session_id,
            session.generation,
        ):
            raise Refused("cannot accept the offer: it belongs to another session")
        if session.is_over(self._clock.boot_ms()):
            raise Refused("cannot accept the offer: the session is offline or its lease is over")
        if session.status is SessionStatus.DRAINING and offer.delivery_kind == "new_claim":
            raise Refused("cannot accept the offer: the worker is draining")
