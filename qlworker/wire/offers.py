"""The pull (wire-protocol.md §3 and §4)."""

from typing import Final, Literal

from ..domain.canonical import lease_token_digest
from ..domain.document import Document
from ..domain.errors import Refused
from ..domain.offer import Candidate, Lease, LeaseTerms, Offer, WorkerFence
from ..domain.revision import ExecutionRevision
from ..domain.text import INT31, check_integer, check_lease_token, check_offer_id
from .codec import decode

OFFER_SCHEMA: Final = "qinglong/remote-execution-offer@v1"

IdleReason = Literal[
    "worker_unavailable",
    "no_candidates",
    "no_match",
    "plans_unavailable",
    "claim_raced",
    "claim_budget_exhausted",
    "scan_budget_exhausted",
]


class OfferRequest(Document, frozen=True, kw_only=True):
    """Asks for work, or for the same offer again, under a pair that the worker made and stored (§3.1)."""

    worker_generation: int
    offer_id: str
    lease_token: str

    def __post_init__(self) -> None:
        check_integer(self.worker_generation, "workerGeneration", 1, INT31)
        check_offer_id(self.offer_id)
        check_lease_token(self.lease_token)


class ScanStats(Document, frozen=True, kw_only=True):
    """What the dispatcher looked at, inside its budget (§3.1)."""

    pages: int
    candidates: int
    plans_unavailable: int
    placement_mismatches: int
    claim_attempts: int
    claim_races: int

    def __post_init__(self) -> None:
        check_integer(self.pages, "stats.pages", 0, 16)
        check_integer(self.candidates, "stats.candidates", 0, 1024)
        check_integer(self.plans_unavailable, "stats.plansUnavailable", 0, self.candidates)
        check_integer(self.placement_mismatches, "stats.placementMismatches", 0, self.candidates)
        check_integer(self.claim_attempts, "stats.claimAttempts", 0, 64)
        check_integer(self.claim_races, "stats.claimRaces", 0, self.claim_attempts)


class WireOffer(Document, frozen=True, kw_only=True):
    """An offer as it crosses the wire: neither token nor digest of it comes back (§4.1)."""

    offer_id: str
    delivery_kind: str
    execution_digest: str
    candidate: Candidate
    worker: WorkerFence
    lease: LeaseTerms
    execution_revision: ExecutionRevision
    placement_score: int


class Idle(Document, frozen=True, kw_only=True, tag_field="status", tag="idle"):
    """Nothing was given, and why."""

    schema: Literal["qinglong/remote-execution-offer@v1"]
    reason: IdleReason
    stats: ScanStats
    truncated: bool


class Offered(Document, frozen=True, kw_only=True, tag_field="status", tag="offered"):
    """One offer."""

    schema: Literal["qinglong/remote-execution-offer@v1"]
    offer: WireOffer
    stats: ScanStats
    truncated: bool


def read_answer(body: bytes, worker: WorkerFence, request: OfferRequest) -> Offer | Idle:
    """The verified offer in `body`, or why there is none.

    Raises Refused when anything differs from the request or from itself: ids, session, generation, digests, lease (R122 to
    R127). The lease the worker stores is rebuilt from its own token (§4.2).
    """
    answer: Idle | Offered = decode(body, Idle | Offered)
    if isinstance(answer, Idle):
        return answer
    wire = answer.offer
    if wire.offer_id != request.offer_id or wire.worker != worker or worker.generation != request.worker_generation:
        raise Refused("the answer is for another offer or another session")
    terms, candidate = wire.lease, wire.candidate
    try:
        lease = Lease(
            attempt_id=candidate.attempt_id,
            run_id=candidate.run_id,
            status="leased",
            version=terms.version,
            lease_generation=terms.lease_generation,
            worker_id=worker.worker_id,
            worker_session_id=worker.session_id,
            worker_generation=worker.generation,
            lease_token_digest=lease_token_digest(request.lease_token),
            acquired_at_ms=terms.acquired_at_ms,
            renewed_at_ms=terms.renewed_at_ms,
            expires_at_ms=terms.expires_at_ms,
            updated_at_ms=terms.updated_at_ms,
        )
        offer = Offer(
            offer_id=wire.offer_id,
            delivery_kind=wire.delivery_kind,
            execution_digest=wire.execution_digest,
            candidate=candidate,
            worker=worker,
            lease=lease,
            lease_token=request.lease_token,
            execution_revision=wire.execution_revision,
            placement_score=wire.placement_score,
        )
        offer.execution_revision.verify()
    except ValueError as error:
        raise Refused(f"cannot accept the offer: {error}") from None
    return offer
