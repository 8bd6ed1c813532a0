"""What a startup audit may read, how it follows a journal's pages, and how each state is classed: pure (R90 to R120).

The audit answers one question before anything is done: which records need what. It never says that something is over that the
record does not say itself.
"""

from enum import StrEnum
from typing import Final

import msgspec

from .errors import Corrupt, Misconfigured
from .record import State

PAGE_DEFAULT: Final = 16
PAGES_DEFAULT: Final = 4
PAGE_MAX: Final = 64
PAGES_MAX: Final = 16
RECORDS_MAX: Final = 1024


class RecordClass(StrEnum):
    """What a record means for a worker that has just begun (R108 to R112)."""

    NO_LOCAL_EXECUTION = "no_known_local_execution"
    SETTLED_START_FAILURE = "settled_start_failure"
    SETTLED_COMPLETION = "settled_completion"
    LAUNCH_UNKNOWN = "launch_unknown"
    POSSIBLE_LOCAL_OWNERSHIP = "possible_local_ownership"


_CLASSES: Final[dict[State, RecordClass]] = {
    State.ACCEPTED: RecordClass.NO_LOCAL_EXECUTION,
    State.STARTING_ACKNOWLEDGED: RecordClass.NO_LOCAL_EXECUTION,
    State.START_FAILED: RecordClass.NO_LOCAL_EXECUTION,
    State.START_FAILURE_ACKNOWLEDGED: RecordClass.SETTLED_START_FAILURE,
    State.COMPLETION_ACKNOWLEDGED: RecordClass.SETTLED_COMPLETION,
    State.LAUNCHING: RecordClass.LAUNCH_UNKNOWN,
    State.RECOVERY_REQUIRED: RecordClass.LAUNCH_UNKNOWN,
    State.STARTED: RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
    State.RUNNING_ACKNOWLEDGED: RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
}

SETTLED_CLASSES: Final = frozenset({RecordClass.SETTLED_COMPLETION, RecordClass.SETTLED_START_FAILURE})


def classify(state: State) -> RecordClass:
    """The class of a record in `state`. RUNNING_ACKNOWLEDGED is not an end: a command may be running (R113)."""
    return _CLASSES[state]


class Finding(msgspec.Struct, frozen=True):
    """One record as the audit shows it: these four facts and nothing of the offer (R106, R107)."""

    offer_id: str
    attempt_id: str
    state: State
    record_class: RecordClass

    @classmethod
    def of(cls, offer_id: str, attempt_id: str, state: State) -> "Finding":
        """The finding of a record in `state`."""
        return cls(offer_id, attempt_id, state, classify(state))


class Readiness(StrEnum):
    """What the whole journal means. Both let a worker go on; neither may be turned into the other by wishing (R254)."""

    READY = "ready"
    RECONCILIATION_REQUIRED = "reconciliation_required"


class Audit(msgspec.Struct, frozen=True):
    """A whole journal, in ascending order of offer id. There is no audit of half a journal: that one is refused."""

    findings: tuple[Finding, ...]

    @property
    def readiness(self) -> Readiness:
        """READY when every record is settled (R99, R115)."""
        return (
            Readiness.READY
            if all(each.record_class in SETTLED_CLASSES for each in self.findings)
            else Readiness.RECONCILIATION_REQUIRED
        )

    def of(self, *classes: RecordClass) -> list[Finding]:
        """The findings of these classes, in the audit's order."""
        return [each for each in self.findings if each.record_class in classes]

    @property
    def unfinished(self) -> list[Finding]:
        """What still asks for a step of this worker. RECOVERY_REQUIRED does not: it waits for an operator."""
        return [
            each
            for each in self.findings
            if each.record_class not in SETTLED_CLASSES and each.state is not State.RECOVERY_REQUIRED
        ]


class AuditBudget(msgspec.Struct, frozen=True):
    """How much one audit reads: `page_size` (1..64) records a page, `max_pages` (1..16) pages, at most 1024 records in all.

    Raises Misconfigured above (R90, R91).
    """

    page_size: int = PAGE_DEFAULT
    max_pages: int = PAGES_DEFAULT

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= PAGE_MAX:
            raise Misconfigured(f"an audit page must be of 1 to {PAGE_MAX} records, not {self.page_size}")
        if not 1 <= self.max_pages <= PAGES_MAX:
            raise Misconfigured(f"an audit must be of 1 to {PAGES_MAX} pages, not {self.max_pages}")

    @classmethod
    def for_capacity(cls, capacity: int) -> "AuditBudget":
        """The budget that reads a full journal of `capacity` records; the default one up to 64.

        Raises Misconfigured above 1024: such a journal could be filled, and then never be started with again.
        """
        if not 1 <= capacity <= RECORDS_MAX:
            raise Misconfigured(
                f"a journal of {capacity} records cannot be audited: state.journal_capacity is 1 to {RECORDS_MAX}"
            )
        page_size = max(PAGE_DEFAULT, -(-capacity // PAGES_MAX))
        return cls(page_size, max(PAGES_DEFAULT, -(-capacity // page_size)))

    @property
    def records(self) -> int:
        """How many records this budget covers."""
        return self.page_size * self.max_pages


def check_page(offer_ids: list[str], next_after: str | None, after: str | None, budget: AuditBudget) -> None:
    """Raises Corrupt unless the page read after the cursor `after` is one of an honest listing (R92 to R95).

    An honest page is ascending and wholly above its cursor, and a cursor to go on with is its last offer id. Nobody else
    changes an owned journal, so a page that does not fit means that records could be missed or seen twice.
    """
    if len(offer_ids) > budget.page_size:
        raise _refused(f"a page holds {len(offer_ids)} records, its limit is {budget.page_size}")
    below = after
    for offer_id in offer_ids:
        if below is not None and offer_id <= below:
            raise _refused("a page repeats a record or goes back behind its cursor")
        below = offer_id
    if next_after is None:
        return
    if next_after == after:
        raise _refused("a page repeats the cursor it was asked with")
    if after is not None and next_after < after:
        raise _refused("a cursor goes back")
    last = offer_ids[-1] if offer_ids else None
    if last is not None and next_after < last:
        raise _refused("a cursor goes back into its own page")
    if next_after != last:
        raise _refused("a cursor skips records that no page has shown")


def check_budget(pages: int, next_after: str | None, budget: AuditBudget) -> None:
    """Raises Corrupt when more is left after the last page that may be read (R96)."""
    if next_after is not None and pages >= budget.max_pages:
        raise Corrupt(
            f"the journal's audit budget is exhausted: more than {budget.records} records in {budget.max_pages} pages; raise "
            "state.journal_capacity to what the journal holds; nothing was changed"
        )


def _refused(reason: str) -> Corrupt:
    return Corrupt(f"cannot trust the journal's listing: {reason}; nothing was changed and nothing is started on it")
