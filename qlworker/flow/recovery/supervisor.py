"""What is done once between the two startup audits: receipts of settled completions go, and what a receipt decides is written.

Serial, in the audit's order, within a budget that is checked as a whole before the first effect (R245 to R256). It talks to
nobody: a box that starts while its network is down must still take its running commands over. Whatever needs the control
plane, or more patience, is handed on to the executions, which go the same way for a first run and a restart.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from ...domain.audit import RECORDS_MAX, Audit, Finding, Readiness, RecordClass
from ...domain.errors import Conflict, Corrupt, Misconfigured, OwnershipLost
from ...domain.evidence import AuthorityFacts, Reconciled, decided
from ...domain.record import InboxRecord, State
from ...domain.session import Access
from ...ports import Log

ACTIONS_DEFAULT: Final = 64
ACTIONS_MAX: Final = RECORDS_MAX

NO_AUTHORITY: Final = AuthorityFacts(session=None, access=Access.OPEN, lease_expires_at=None, anchor=None)
"""Nothing has been heard of the control plane yet, so nothing may be submitted."""


class Records(Protocol):
    """All that the startup recovery needs of the journal: it can neither create nor remove a record."""

    async def read(self, offer_id: str) -> InboxRecord | None:
        """The record, or None."""

    async def replace(self, record: InboxRecord) -> None:
        """Writes the successor of the stored record. Raises Conflict for anything else."""


class ReceiptRemover(Protocol):
    """All that the cleanup needs of receipts."""

    async def remove(self, attempt_id: str) -> None:
        """Removes the receipt. Idempotent."""


class Glance(Protocol):
    """A look at one receipt."""

    async def glance(self, record: InboxRecord, facts: AuthorityFacts) -> Reconciled:
        """What the receipt of `record` says. Raises Corrupt or OSError when it cannot be read."""


class Outcome(StrEnum):
    """What became of one record."""

    CLEANED = "cleaned"
    DECIDED = "decided"
    HANDED_ON = "handed_on"
    KEPT = "kept"
    FAILED = "failed"


class Item(msgspec.Struct, frozen=True):
    """One record's result: ids and an outcome, never a text of an error (R252)."""

    offer_id: str
    attempt_id: str
    outcome: Outcome


class RecoveryResult(msgspec.Struct, frozen=True):
    """All results in the order they came about, and what they mean together."""

    items: tuple[Item, ...]
    readiness: Readiness


class StartupRecovery:
    """Recovers from one audit. `max_actions` is 1 to 1024, by default 64; raises Misconfigured outside (R248, R249).

    A start waits for nobody and asks no process: a receipt that is missing now is looked for again by the executions.
    """

    def __init__(
        self,
        records: Records,
        receipts: ReceiptRemover,
        evidence: Glance,
        log: Log,
        *,
        max_actions: int = ACTIONS_DEFAULT,
    ) -> None:
        if not 1 <= max_actions <= ACTIONS_MAX:
            raise Misconfigured(f"the startup recovery's budget must be 1 to {ACTIONS_MAX} actions, not {max_actions}")
        self._records = records
        self._receipts = receipts
        self._evidence = evidence
        self._log = log
        self._max_actions = max_actions
        self._is_used = False

    async def recover(self, audit: Audit) -> RecoveryResult:
        """Does every action of `audit`, once.

        Raises Corrupt before any effect when there are more actions than the budget allows, Conflict when it is called a second
        time, OwnershipLost when the journal is not owned any more. Whatever else fails is one item's outcome (R253).
        """
        if self._is_used:
            raise Conflict("internal error: a startup recovery uses one audit, once")
        self._is_used = True
        ways = (
            (RecordClass.SETTLED_COMPLETION, self._clean),
            (RecordClass.LAUNCH_UNKNOWN, self._decide),
            (RecordClass.POSSIBLE_LOCAL_OWNERSHIP, self._decide),
        )
        actions = [(finding, act) for each, act in ways for finding in audit.of(each)]
        if len(actions) > self._max_actions:
            raise Corrupt(
                f"the startup recovery's action budget is exhausted: {len(actions)} records need one, the budget is "
                f"{self._max_actions}; raise state.journal_capacity to what the journal holds; nothing was changed"
            )
        items = [await self._act(finding, act) for finding, act in actions]
        failed = any(item.outcome is Outcome.FAILED for item in items)
        return RecoveryResult(tuple(items), Readiness.RECONCILIATION_REQUIRED if failed else audit.readiness)

    async def _act(self, finding: Finding, act: Callable[[Finding], Awaitable[Outcome]]) -> Item:
        try:
            outcome = await act(finding)
        except OwnershipLost:
            raise
        except Exception as error:
            # One record's fault is not the others' business. It is unsettled still, so it is tried again later.
            self._log.error("startup_recovery_failed", offer=finding.offer_id, error=type(error).__name__)
            outcome = Outcome.FAILED
        return Item(finding.offer_id, finding.attempt_id, outcome)

    async def _clean(self, finding: Finding) -> Outcome:
        """The end is durable, so the evidence may go; a crash may have come between the two (R228, R229)."""
        await self._receipts.remove(finding.attempt_id)
        return Outcome.CLEANED

    async def _decide(self, finding: Finding) -> Outcome:
        """Writes what a receipt decides; nothing is spawned, stopped or sent (R116 to R118, R163)."""
        if finding.state is State.RECOVERY_REQUIRED:
            return Outcome.KEPT
        record = await self._records.read(finding.offer_id)
        if record is None or record.state is not finding.state:
            raise Conflict("the record moved on since it was audited")
        seen = await self._evidence.glance(record, NO_AUTHORITY)
        # The control plane's time is not known yet and the wall clock may be anything, so the record keeps its own date.
        successor = decided(record, seen, record.updated_at_ms) if seen.has_receipt else None
        if successor is None:
            return Outcome.HANDED_ON
        await self._records.replace(successor)
        self._log.warning("evidence_judged", offer=finding.offer_id, state=finding.state, verdict=seen.verdict)
        return Outcome.DECIDED
