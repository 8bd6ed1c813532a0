"""What a worker may still do under a Run Lease: when to renew it and when it is over.

Deadlines are on CLOCK_BOOTTIME in milliseconds and counted from before the request that brought the lease, so a step of the
wall clock, a suspend or a slow answer never lengthens one (design.md §3). Source: R273 to R297, wire-protocol.md §7.
"""

from enum import StrEnum
from typing import Final

import msgspec

from .offer import Offer

RENEW_FRACTION: Final = 3
RETRY_MS: Final = 1000


class LeaseAuthority(msgspec.Struct, frozen=True):
    """The seven facts that make a lease this one and no other (R276)."""

    run_id: str
    attempt_id: str
    worker_id: str
    session_id: str
    generation: int
    lease_generation: int
    lease_token: str

    @classmethod
    def of(cls, offer: Offer) -> "LeaseAuthority":
        """The authority of `offer`."""
        return cls(
            run_id=offer.run_id,
            attempt_id=offer.attempt_id,
            worker_id=offer.worker.worker_id,
            session_id=offer.worker.session_id,
            generation=offer.worker.generation,
            lease_generation=offer.lease.lease_generation,
            lease_token=offer.lease_token,
        )

    def __repr__(self) -> str:
        return f"<LeaseAuthority attempt={self.attempt_id} generation={self.lease_generation}>"


class TrackedLease(msgspec.Struct, frozen=True):
    """One lease as the timer sees it. All times are boot clock milliseconds."""

    offer_id: str
    authority: LeaseAuthority
    version: int
    renew_at: int
    expires_at: int

    @classmethod
    def granted(cls, offer: Offer, since_ms: int, expires_at: int) -> "TrackedLease":
        """The lease of `offer`, known from a request sent at `since_ms`, which ends at `expires_at`.

        It is renewed after each third of what is left, so two renewals may fail before it is over.
        """
        return cls(
            offer_id=offer.offer_id,
            authority=LeaseAuthority.of(offer),
            version=offer.lease.version,
            renew_at=since_ms + max(expires_at - since_ms, 0) // RENEW_FRACTION,
            expires_at=expires_at,
        )

    def is_over(self, now_ms: int) -> bool:
        """Whether this worker's authority has ended, whatever the control plane says later."""
        return now_ms >= self.expires_at

    def retried(self, now_ms: int) -> "TrackedLease":
        """The lease after a renewal that got no answer: try again in a second, never past its end."""
        return msgspec.structs.replace(self, renew_at=min(now_ms + RETRY_MS, self.expires_at))

    def due_at(self) -> int:
        """When the timer must look at it next."""
        return min(self.renew_at, self.expires_at)


class StopReason(StrEnum):
    """Why the control plane wants a run stopped (wire-protocol §7.2)."""

    USER = "user"
    POLICY = "policy"
    SHUTDOWN = "shutdown"
    RECONCILE = "reconcile"
    TIMEOUT = "timeout"
