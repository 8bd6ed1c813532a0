"""The pull: the same offer again, or the first queued attempt that fits and can be claimed, or why there is none.

Source: control-plane.md §5.2, §5.4, §6; wire-protocol.md §3.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, bindparam, or_, select

from ...domain.canonical import digests_equal, lease_token_digest
from ...domain.capabilities import Capabilities
from ...domain.errors import Corrupt, Fenced
from ...domain.offer import Candidate, LeaseTerms, WorkerFence
from ...domain.revision import ExecutionRevision
from ...domain.text import check_integer
from ...wire.offers import OFFER_SCHEMA, Idle, IdleReason, Offered, OfferRequest, ScanStats, WireOffer
from ..aggregate import REMOTE_WORKER, RUNTIME, load_attempt, load_run
from ..config import Settings
from ..database import Transaction
from ..schema import run_attempts, run_dispatch_leases, runs
from .authority import LEASED, RELEASED, Claim, DispatchLease, load_revision, require_revision
from .claiming import CLAIMED, DISPATCHING, QUEUED, Outcome, claim, usable_session
from .placement import evaluate
from .session import Caller, require_session


class ScanBudget(msgspec.Struct, frozen=True):
    """How much one pull may look at. The default is the contract's hard limit (§5.4): with a smaller one a queue of tasks for a
    box that is switched off would hide the work of all others. Raises ValueError above it."""

    page: int = 64
    pages: int = 16
    claims: int = 64

    def __post_init__(self) -> None:
        check_integer(self.page, "the page", 1, 64)
        check_integer(self.pages, "the pages", 1, 16)
        check_integer(self.claims, "the claims", 1, 64)


BUDGET: Final = ScanBudget()
_NOTHING: Final = ScanStats(pages=0, candidates=0, plans_unavailable=0, placement_mismatches=0, claim_attempts=0, claim_races=0)


def pull(
    tx: Transaction, caller: Caller, request: OfferRequest, settings: Settings, budget: ScanBudget = BUDGET
) -> Idle | Offered:
    """Answers one pull. Raises Fenced when the offer id belongs to a lease that the caller does not hold any more."""
    # The worker's lock keeps two pulls of one worker from both counting its last free slot (V66).
    tx.lock("worker", caller.worker_id)
    lease = _offered_before(tx, request.offer_id)
    if lease is not None:
        return _recover(tx, caller, request, lease)
    session = usable_session(tx, caller, request.worker_generation)
    if session is None or session.available_slots == 0:
        return _idle("worker_unavailable", _NOTHING)
    return _Scan(tx, caller, request, settings, budget).run(Capabilities.parse(session.capabilities_json))


def _offered_before(tx: Transaction, offer_id: str) -> DispatchLease | None:
    """The lease with this offer id as it is under its run's lock, or None."""
    found = tx.find(run_dispatch_leases, offer_id=offer_id)
    if found is None:
        return None
    tx.lock("run", found.run_id)
    row = tx.find(run_dispatch_leases, offer_id=offer_id)
    return None if row is None else DispatchLease(**row._mapping)


def _recover(tx: Transaction, caller: Caller, request: OfferRequest, lease: DispatchLease) -> Offered:
    """The same offer with the lease's present version. A read: no lease, no Event, and never a new start (D13)."""
    require_session(tx, caller, request.worker_generation)
    if not lease.is_live(tx.now_ms):
        raise Fenced("the lease of this offer is over")
    held_by = (lease.worker_id, lease.worker_session_id, lease.worker_generation)
    if held_by != (caller.worker_id, caller.session_id, request.worker_generation):
        raise Fenced("the offer belongs to another session")
    if not digests_equal(lease.lease_token_digest, lease_token_digest(request.lease_token)):
        raise Fenced("the lease token is another one")
    run, attempt = load_run(tx, lease.run_id), load_attempt(tx, lease.attempt_id)
    if run is None or attempt is None:
        raise Fenced("the offer's attempt is missing")
    return _offered(Claim(run, attempt, lease), require_revision(tx, run), "lease_recovery", 0, _NOTHING, truncated=False)


class _Scan:
    """One walk over the queue, with its counters."""

    def __init__(self, tx: Transaction, caller: Caller, request: OfferRequest, settings: Settings, budget: ScanBudget) -> None:
        self._tx = tx
        self._caller = caller
        self._request = request
        self._lease_ms = settings.run_lease_ms
        self._budget = budget
        self._pages = 0
        self._candidates = 0
        self._plans_unavailable = 0
        self._mismatches = 0
        self._claims = 0
        self._races = 0
        self._truncated = False

    def run(self, capabilities: Capabilities) -> Idle | Offered:
        for row in self._queue():
            self._candidates += 1
            try:
                revision = load_revision(self._tx, row.project_id, row.task_id, row.task_revision)
            except Corrupt:
                self._plans_unavailable += 1
                continue
            fit = evaluate(capabilities, revision.placement)
            if fit.mismatch is not None:
                self._mismatches += 1
                continue
            if self._claims == self._budget.claims:
                self._truncated = True
                return _idle("claim_budget_exhausted", self._stats(), truncated=True)
            self._claims += 1
            if not self._tx.try_lock("run", row.run_id):
                self._races += 1  # somebody is claiming it, or ending it: not worth a wait
                continue
            result = claim(self._tx, self._caller, row.attempt_id, self._request, self._lease_ms)
            if result.claim is not None:
                return _offered(result.claim, revision, "new_claim", fit.score, self._stats(), truncated=self._truncated)
            if result.outcome in (Outcome.CAPACITY_EXHAUSTED, Outcome.WORKER_UNAVAILABLE):
                return _idle("worker_unavailable", self._stats())
            self._races += 1
        return _idle(self._reason(), self._stats(), truncated=self._truncated)

    def _queue(self) -> Iterator[Row[Any]]:
        """Candidates in order, page by page. Sets `_truncated` when the budget ends before the queue does."""
        after: Row[Any] | None = None
        for _ in range(self._budget.pages):
            page = _page(self._tx, self._caller.worker_id, after, self._budget.page + 1)
            self._pages += 1
            self._truncated = len(page) > self._budget.page
            yield from page[: self._budget.page]
            if not self._truncated:
                return
            after = page[self._budget.page - 1]

    def _reason(self) -> IdleReason:
        if self._truncated:
            return "scan_budget_exhausted"
        if self._candidates == 0:
            return "no_candidates"
        if self._races:
            return "claim_raced"
        return "no_match" if self._mismatches else "plans_unavailable"

    def _stats(self) -> ScanStats:
        return ScanStats(
            pages=self._pages,
            candidates=self._candidates,
            plans_unavailable=self._plans_unavailable,
            placement_mismatches=self._mismatches,
            claim_attempts=self._claims,
            claim_races=self._races,
        )


def _page(tx: Transaction, worker_id: str, after: Row[Any] | None, limit: int) -> list[Row[Any]]:
    """Up to `limit` candidates behind `after`: priority first, then who waited longest (control-plane.md §5.2). What is for
    another worker by name is not among them."""
    statement = _QUEUE if after is None else _QUEUE.where(_behind(after))
    return tx.rows(statement, {"worker_id": worker_id, "now_ms": tx.now_ms, "page": limit})


def _queue_statement() -> Select[Any]:
    newer = run_attempts.alias()
    lease = run_dispatch_leases
    return (
        select(
            runs.c.id.label("run_id"),
            run_attempts.c.id.label("attempt_id"),
            runs.c.project_id,
            runs.c.task_id,
            runs.c.task_revision,
            runs.c.priority,
            runs.c.queued_at_ms,
            run_attempts.c.created_at_ms,
        )
        .join(run_attempts, run_attempts.c.run_id == runs.c.id)
        .outerjoin(lease, lease.c.attempt_id == run_attempts.c.id)
        .where(
            runs.c.execution_owner == RUNTIME,
            runs.c.status.in_((QUEUED, DISPATCHING)),
            runs.c.cancel_requested_at_ms.is_(None),
            runs.c.queued_at_ms.is_not(None),
            run_attempts.c.status == CLAIMED,
            run_attempts.c.executor_type == REMOTE_WORKER,
            or_(runs.c.required_worker_id.is_(None), runs.c.required_worker_id == bindparam("worker_id")),
            ~select(newer.c.id).where(newer.c.run_id == runs.c.id, newer.c.attempt > run_attempts.c.attempt).exists(),
            or_(
                lease.c.attempt_id.is_(None),
                lease.c.status == RELEASED,
                and_(lease.c.status == LEASED, lease.c.expires_at_ms <= bindparam("now_ms")),
            ),
        )
        .order_by(runs.c.priority.desc(), runs.c.queued_at_ms, run_attempts.c.created_at_ms, run_attempts.c.id)
        .limit(bindparam("page"))
    )


_QUEUE: Final = _queue_statement()


def _behind(row: Row[Any]) -> ColumnElement[bool]:
    """Keyset condition: strictly behind `row` in the queue's order."""
    queued, created, attempt_id = runs.c.queued_at_ms, run_attempts.c.created_at_ms, run_attempts.c.id
    return or_(
        runs.c.priority < row.priority,
        and_(runs.c.priority == row.priority, queued > row.queued_at_ms),
        and_(runs.c.priority == row.priority, queued == row.queued_at_ms, created > row.created_at_ms),
        and_(
            runs.c.priority == row.priority,
            queued == row.queued_at_ms,
            created == row.created_at_ms,
            attempt_id > row.attempt_id,
        ),
    )


def _idle(reason: IdleReason, stats: ScanStats, *, truncated: bool = False) -> Idle:
    return Idle(schema=OFFER_SCHEMA, reason=reason, stats=stats, truncated=truncated)


def _offered(
    claimed: Claim,
    revision: ExecutionRevision,
    kind: Literal["new_claim", "lease_recovery"],
    score: int,
    stats: ScanStats,
    *,
    truncated: bool,
) -> Offered:
    """The offer on the wire: neither the token nor its digest is in it (V72)."""
    run, attempt, lease = claimed.run, claimed.attempt, claimed.lease
    offer = WireOffer(
        offer_id=lease.offer_id,
        delivery_kind=kind,
        execution_digest=revision.content_digest,
        candidate=Candidate(
            run_id=run.id,
            attempt_id=attempt.id,
            project_id=run.project_id,
            task_id=run.task_id,
            task_revision=run.task_revision,
            priority=run.priority,
            queued_at_ms=run.queued_at_ms or 0,
            attempt_created_at_ms=attempt.created_at_ms,
            attempt_number=attempt.attempt,
            executor_type="remote_worker",
        ),
        worker=WorkerFence(worker_id=lease.worker_id, session_id=lease.worker_session_id, generation=lease.worker_generation),
        lease=LeaseTerms(
            version=lease.version,
            lease_generation=lease.lease_generation,
            acquired_at_ms=lease.acquired_at_ms,
            renewed_at_ms=lease.renewed_at_ms,
            expires_at_ms=lease.expires_at_ms,
            updated_at_ms=lease.updated_at_ms,
        ),
        execution_revision=revision,
        placement_score=score,
    )
    return Offered(schema=OFFER_SCHEMA, offer=offer, stats=stats, truncated=truncated)
