"""The one timer for all run leases (R130, R273, R297, D30). It renews what is due and says at once what is over.

It is a background task of the app's nursery: it ends with the app and never keeps it alive. Renewals of different leases may
overlap, those of one lease never do. A loss is only said, synchronously; what follows is the loss coordinator's.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ..domain.lease import TrackedLease
from ..ports import Clock
from .race import first_of


class LeaseTimer:
    """Tracks leases from the starting acknowledgement (R294) until they are untracked or over.

    `renew` gets an offer id and returns the lease after the renewal, or None when it got no answer. `on_lost` gets the lease.
    """

    def __init__(
        self,
        clock: Clock,
        renew: Callable[[str], Awaitable[TrackedLease | None]],
        on_lost: Callable[[TrackedLease], None],
    ) -> None:
        self._clock = clock
        self._renew = renew
        self._on_lost = on_lost
        self._leases: dict[str, TrackedLease] = {}
        self._renewing: set[str] = set()
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._leases)

    def track(self, lease: TrackedLease) -> None:
        """Begins or goes on tracking; an older version of a tracked lease changes nothing."""
        known = self._leases.get(lease.offer_id)
        if known is None or lease.version >= known.version:
            self._leases[lease.offer_id] = lease
            self._changed.set()

    def untrack(self, offer_id: str) -> None:
        """Ends tracking. Idempotent."""
        if self._leases.pop(offer_id, None) is not None:
            self._changed.set()

    def find(self, offer_id: str) -> TrackedLease | None:
        """The lease as known now."""
        return self._leases.get(offer_id)

    def is_alive(self, offer_id: str) -> bool:
        """Whether the lease is tracked and not over."""
        lease = self._leases.get(offer_id)
        return lease is not None and not lease.is_over(self._clock.boot_ms())

    async def run(self) -> None:
        """Sleeps until the next lease is due, for ever."""
        async with trio.open_nursery() as renewals:
            while True:
                self._changed = trio.Event()
                self._look(renewals)
                await self._wait()

    def _look(self, renewals: trio.Nursery) -> None:
        now_ms = self._clock.boot_ms()
        for lease in list(self._leases.values()):
            if lease.is_over(now_ms):
                del self._leases[lease.offer_id]
                self._on_lost(lease)
            elif lease.renew_at <= now_ms and lease.offer_id not in self._renewing:
                self._renewing.add(lease.offer_id)
                renewals.start_soon(self._renew_one, lease, name=f"renew {lease.offer_id}")

    async def _renew_one(self, due: TrackedLease) -> None:
        offer_id = due.offer_id
        lease: TrackedLease | None = None

        async def renew() -> None:
            nonlocal lease
            lease = await self._renew(offer_id)

        try:
            # Not beyond the lease: a renewal that hangs must not keep the loss from being carried out.
            await first_of(renew, partial(self._clock.sleep_until, due.expires_at))
        finally:
            self._renewing.discard(offer_id)
            self._changed.set()
        known = self._leases.get(offer_id)
        if lease is not None:
            if known is not None:
                self.track(lease)
        elif known is not None:
            self._leases[offer_id] = known.retried(self._clock.boot_ms())

    async def _wait(self) -> None:
        due = [lease.expires_at if lease.offer_id in self._renewing else lease.due_at() for lease in self._leases.values()]
        if not due:
            await self._changed.wait()
            return
        await first_of(self._changed.wait, partial(self._clock.sleep_until, min(due)))
