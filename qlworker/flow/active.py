"""The offers this process carries at present: one lock and one set of signals each.

The lock orders what may not overlap for one offer: renewal, acknowledgement, completion and loss all use and move the lease
version. Nothing durable lives here.
"""

from collections.abc import Iterator

import trio

from ..domain.evidence import Authority
from ..domain.lease import StopReason, TrackedLease
from ..domain.offer import Offer
from ..wire.activation import Snapshot


class ActiveOffer:
    """One offer on its way. `deadline_at` is boot clock milliseconds, or None."""

    def __init__(self, offer_id: str) -> None:
        self.offer_id = offer_id
        self.lock = trio.Lock()
        self.lease: TrackedLease | None = None
        self.snapshot: Snapshot | None = None
        self.deadline_at: int | None = None
        self.stop_wanted = trio.Event()
        self.stop_reason: StopReason | None = None
        self.is_ended_elsewhere = False
        self.is_uploaded = False
        self.is_gate_opened = False
        self.is_running_told = False
        self.is_absent = False
        self.running_failures = 0
        self.blocked_by: Authority | None = None
        self.lost = trio.Event()
        self.loss_settled = trio.Event()
        self.live: LiveOutput | None = None

    def __repr__(self) -> str:
        return f"<ActiveOffer {self.offer_id} stop={self.stop_reason} lost={self.lost.is_set()}>"

    def want_stop(self, reason: StopReason) -> None:
        """Asks for the command to be stopped. The first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.stop_wanted.set()

    def end_elsewhere(self) -> None:
        """The control plane says that the attempt is over: nothing of it may go on here."""
        self.is_ended_elsewhere = True
        self.stop_wanted.set()


class LiveOutput:
    """How far the live view of one running command was sent, as a stream position in bytes."""

    def __init__(self, offer: Offer, log_artifact_id: str) -> None:
        self.offer = offer
        self.log_artifact_id = log_artifact_id
        self.offset = 0


class ActiveOffers:
    """The offers in flight, by id."""

    def __init__(self) -> None:
        self._offers: dict[str, ActiveOffer] = {}
        self._emptied = trio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[ActiveOffer]:
        return iter(list(self._offers.values()))

    def find(self, offer_id: str) -> ActiveOffer | None:
        """The offer if it is in flight."""
        return self._offers.get(offer_id)

    def begin(self, offer_id: str) -> ActiveOffer | None:
        """Takes the offer up, or None when it already is: deliveries of one offer are one operation (R144)."""
        if offer_id in self._offers:
            return None
        if not self._offers:
            self._emptied = trio.Event()
        offer = self._offers[offer_id] = ActiveOffer(offer_id)
        return offer

    def end(self, offer: ActiveOffer) -> None:
        """Puts the offer down."""
        self._offers.pop(offer.offer_id, None)
        if not self._offers:
            self._emptied.set()

    @property
    def occupied(self) -> int:
        """How many offers may have a command that runs or will: those that count against the limit of concurrent runs."""
        return sum(not offer.is_absent for offer in self._offers.values())

    async def wait_empty(self) -> None:
        """Returns once no offer is in flight."""
        await self._emptied.wait()
