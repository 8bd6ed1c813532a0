"""The pull: one pending claim, durable before its first request, asked for again and again until it brings an offer.

Source: wire-protocol.md §3.3, control-plane.md §6.3. An idle answer made no lease, so the same pair asks the next time: an idle
worker writes nothing to flash. Only one pull runs at a time; the caller's cadence decides when.
"""

import random
import uuid
from collections.abc import Callable

import msgspec

from ..domain.backoff import full_jitter_ms
from ..domain.claim import PendingClaim
from ..domain.errors import Fenced, Malformed, Refused, Transient, Unauthorized, Unsupported
from ..domain.offer import Offer, WorkerFence
from ..domain.session import LiveSession
from ..domain.text import new_token
from ..ports import ClaimStore, Clock, Log
from ..wire.offers import Idle, OfferRequest
from .control_plane import ControlPlane


class Delivered(msgspec.Struct, frozen=True):
    """An offer, and when its request was sent on the boot clock (milliseconds): its lease is counted from there."""

    offer: Offer
    sent_ms: int


class OfferDelivery:
    """Owns the pending claim. `backoff_base_ms` is 100 to 60 000."""

    def __init__(
        self,
        control_plane: ControlPlane,
        store: ClaimStore,
        clock: Clock,
        log: Log,
        *,
        backoff_base_ms: int,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._control_plane = control_plane
        self._store = store
        self._clock = clock
        self._log = log
        self._backoff_base_ms = backoff_base_ms
        self._fraction = fraction
        self._claim: PendingClaim | None = None
        self._is_loaded = False
        self._failures = 0
        self._not_before = 0
        self._last_idle = ""

    async def pull(self, session: LiveSession) -> Delivered | None:
        """Asks once if it is time to; returns what came. The claim stays until `accepted` or another session.

        Failures are logged and waited for with full jitter; they are not raised.
        """
        if self._clock.boot_ms() < self._not_before:
            return None
        claim = await self._current_claim(session)
        worker = WorkerFence(worker_id=session.worker_id, session_id=session.session_id, generation=session.generation)
        request = OfferRequest(worker_generation=session.generation, offer_id=claim.offer_id, lease_token=claim.lease_token)
        sent_ms = self._clock.boot_ms()
        try:
            answer = await self._control_plane.pull(worker, request)
        except (Transient, Refused, Malformed, Unauthorized, Unsupported) as error:
            await self._failed(error)
            return None
        except Fenced as error:
            # The server knows this offer id under another authority or as over: the pair is of no use any more.
            await self._drop(claim)
            await self._failed(error)
            return None
        self._failures = 0
        if isinstance(answer, Idle):
            self._note_idle(answer)
            return None
        self._last_idle = ""
        return Delivered(answer, sent_ms)

    async def accepted(self, offer: Offer) -> None:
        """The offer is in the inbox: only now the claim goes (R2)."""
        claim = self._claim
        if claim is not None and claim.offer_id == offer.offer_id:
            await self._drop(claim)

    async def refused(self, error: Exception) -> None:
        """The offer could not be put into the inbox: the claim stays and the same offer is asked for again, later."""
        await self._failed(error)

    def read_again(self) -> None:
        """Forgets what is known of the claim on disk, because a write of it failed and may have got through all the same."""
        self._is_loaded = False

    async def _current_claim(self, session: LiveSession) -> PendingClaim:
        if not self._is_loaded:
            self._claim = await self._store.read_claim()
            self._is_loaded = True
        claim = self._claim
        if claim is not None and claim.belongs_to(session.session_id, session.generation) and not claim.is_exhausted:
            return claim
        if claim is not None:
            # Of another session, or tried sixteen times: its lease, if there ever was one, is of no use any more.
            await self._drop(claim)
        now_ms = max(self._clock.wall_ms(), 0)
        claim = PendingClaim(
            schema_version=1,
            revision=0,
            worker_id=session.worker_id,
            worker_session_id=session.session_id,
            worker_generation=session.generation,
            offer_id=str(uuid.uuid4()),
            lease_token=new_token(),
            attempt_count=0,
            created_at_ms=now_ms,
            updated_at_ms=now_ms,
            last_attempt_at_ms=None,
            next_attempt_at_ms=now_ms,
        )
        await self._store.write_claim(claim)
        self._claim = claim
        return claim

    async def _drop(self, claim: PendingClaim) -> None:
        await self._store.remove_claim(claim)
        self._claim = None

    async def _failed(self, error: Exception) -> None:
        """Counts the attempt durably: after sixteen the pair is given up, so that no claim is stuck for ever."""
        if self._claim is not None:
            claim = self._claim.attempted(self._clock.wall_ms())
            await self._store.write_claim(claim)
            self._claim = claim
        self._failures += 1
        wait_ms = full_jitter_ms(self._failures, self._backoff_base_ms, self._fraction())
        if isinstance(error, Transient) and error.retry_after_s is not None:
            wait_ms = max(wait_ms, int(error.retry_after_s * 1000))
        self._not_before = self._clock.boot_ms() + wait_ms
        if self._failures == 1:
            self._log.warning("pull_failed", reason=str(error), wait_ms=wait_ms)

    def _note_idle(self, answer: Idle) -> None:
        """Says once why there is no work; an exhausted budget never looks like "no work" (control-plane.md §5.4)."""
        if answer.reason != self._last_idle:
            self._last_idle = answer.reason
            self._log.info("pull_idle", reason=answer.reason, truncated=answer.truncated)
