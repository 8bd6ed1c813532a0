"""The budget of failed authentications, per peer address and in total, over a fixed window (wire-protocol.md §1.5).

A request reserves before anything is looked up and gives its reservation back once it has proven itself, so that a worker's
own heartbeats never use up the budget (control-plane.md §15.3, V114).
"""

import msgspec
import trio

from .config import Limits
from .failure import Failure


class Reservation(msgspec.Struct, frozen=True):
    """One reserved place; it belongs to the window that began at `began`."""

    peer: str
    began: float


class Shield:
    """Counts, in memory: a restart forgives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._began = 0.0
        self._total = 0
        self._by_peer: dict[str, int] = {}

    def reserve(self, peer: str) -> Reservation:
        """A place for one request of `peer`. Raises Failure 429, or 503 when more peers come than are counted."""
        now = trio.current_time()
        if not self._total or now >= self._began + self._limits.authentication_window_s:
            self._began, self._total = now, 0
            self._by_peer.clear()
        used = self._by_peer.get(peer, 0)
        if used >= self._limits.authentication_per_peer or self._total >= self._limits.authentication_global:
            left = self._began + self._limits.authentication_window_s - now
            raise Failure(429, "authentication_rate_limited", retry_after_s=max(1, round(left + 0.5)))
        if not used and len(self._by_peer) >= self._limits.authentication_peers:
            raise Failure(503, "authentication_shield_unavailable")
        self._by_peer[peer] = used + 1
        self._total += 1
        return Reservation(peer, self._began)

    def give_back(self, reservation: Reservation) -> None:
        """Returns a place, unless its window is over."""
        if reservation.began != self._began:
            return
        self._total -= 1
        left = self._by_peer[reservation.peer] - 1
        if left:
            self._by_peer[reservation.peer] = left
        else:
            del self._by_peer[reservation.peer]
