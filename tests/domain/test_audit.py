"""Classes of states, the audit's budget and what makes a listing one that can be trusted."""

import pytest

from qlworker.domain.audit import Audit, AuditBudget, Finding, Readiness, RecordClass, check_budget, check_page, classify
from qlworker.domain.errors import Corrupt, Misconfigured
from qlworker.domain.record import SETTLED, State

SMALL = AuditBudget(page_size=3, max_pages=2)

TABLE = [
    pytest.param(State.ACCEPTED, RecordClass.NO_LOCAL_EXECUTION, marks=pytest.mark.req("R108")),
    pytest.param(State.STARTING_ACKNOWLEDGED, RecordClass.NO_LOCAL_EXECUTION, marks=pytest.mark.req("R108")),
    pytest.param(State.START_FAILED, RecordClass.NO_LOCAL_EXECUTION, marks=pytest.mark.req("R108")),
    pytest.param(State.START_FAILURE_ACKNOWLEDGED, RecordClass.SETTLED_START_FAILURE, marks=pytest.mark.req("R109")),
    pytest.param(State.COMPLETION_ACKNOWLEDGED, RecordClass.SETTLED_COMPLETION, marks=pytest.mark.req("R110")),
    pytest.param(State.LAUNCHING, RecordClass.LAUNCH_UNKNOWN, marks=pytest.mark.req("R111")),
    pytest.param(State.RECOVERY_REQUIRED, RecordClass.LAUNCH_UNKNOWN, marks=pytest.mark.req("R111")),
    pytest.param(State.STARTED, RecordClass.POSSIBLE_LOCAL_OWNERSHIP, marks=pytest.mark.req("R112")),
    pytest.param(State.RUNNING_ACKNOWLEDGED, RecordClass.POSSIBLE_LOCAL_OWNERSHIP, marks=pytest.mark.req("R112", "R113")),
]


@pytest.mark.req("R120")
@pytest.mark.parametrize("state, record_class", TABLE)
def test_every_state_has_one_class(state: State, record_class: RecordClass) -> None:
    assert classify(state) is record_class


@pytest.mark.req("R113")
@pytest.mark.parametrize("state", State)
def test_a_journal_is_ready_exactly_when_its_records_are_settled(state: State) -> None:
    audit = Audit((Finding.of("offer-1", "attempt-1", state),))

    assert (audit.readiness is Readiness.READY) == (state in SETTLED)
    assert bool(audit.unfinished) == (state not in SETTLED and state is not State.RECOVERY_REQUIRED)


@pytest.mark.req("R120")
def test_the_table_above_names_every_state() -> None:
    assert {case.values[0] for case in TABLE} == set(State)


@pytest.mark.req("R106")
def test_a_finding_has_four_members() -> None:
    assert Finding.__struct_fields__ == ("offer_id", "attempt_id", "state", "record_class")


@pytest.mark.req("R90")
def test_the_default_budget_is_four_pages_of_sixteen() -> None:
    assert (AuditBudget().page_size, AuditBudget().max_pages, AuditBudget().records) == (16, 4, 64)


@pytest.mark.req("R91")
@pytest.mark.parametrize("page_size, max_pages", [(65, 4), (16, 17), (0, 4), (16, 0)])
def test_a_budget_beyond_the_hard_limits_is_refused(page_size: int, max_pages: int) -> None:
    with pytest.raises(Misconfigured, match="must be of 1 to"):
        AuditBudget(page_size, max_pages)


@pytest.mark.req("R91")
def test_the_largest_budget_is_1024_records_and_no_journal_may_be_larger() -> None:
    assert AuditBudget(64, 16).records == 1024
    for capacity in (0, 1025):
        with pytest.raises(Misconfigured, match="1024"):
            AuditBudget.for_capacity(capacity)


def test_a_full_journal_of_any_capacity_fits_its_budget() -> None:
    for capacity in range(1, 1025):
        budget = AuditBudget.for_capacity(capacity)
        assert budget.records >= capacity
        assert budget == AuditBudget() or capacity > 64


BAD_PAGES = [
    pytest.param(["a", "b", "c", "d"], None, None, "its limit is 3", marks=pytest.mark.req("R95")),
    pytest.param(["c", "d"], "b", "b", "repeats the cursor", marks=pytest.mark.req("R92")),
    pytest.param([], "b", "b", "repeats the cursor", marks=pytest.mark.req("R92")),
    pytest.param(["b", "c"], None, "b", "repeats a record or goes back", marks=pytest.mark.req("R92")),
    pytest.param(["a", "c"], None, "b", "repeats a record or goes back", marks=pytest.mark.req("R93")),
    pytest.param(["a", "c", "b"], None, None, "repeats a record or goes back", marks=pytest.mark.req("R93")),
    pytest.param([], "a", "b", "a cursor goes back", marks=pytest.mark.req("R93")),
    pytest.param(["c", "e"], "d", "b", "goes back into its own page", marks=pytest.mark.req("R93")),
    pytest.param(["c", "d"], "e", "b", "skips records", marks=pytest.mark.req("R94")),
    pytest.param([], "c", "b", "skips records", marks=pytest.mark.req("R94")),
    pytest.param([], "a", None, "skips records", marks=pytest.mark.req("R94")),
]


@pytest.mark.req("R120")
@pytest.mark.parametrize("offer_ids, next_after, after, words", BAD_PAGES)
def test_a_listing_that_cannot_be_trusted_is_refused_and_says_why(
    offer_ids: list[str], next_after: str | None, after: str | None, words: str
) -> None:
    with pytest.raises(Corrupt, match=words):
        check_page(offer_ids, next_after, after, SMALL)


@pytest.mark.parametrize(
    "offer_ids, next_after, after",
    [([], None, None), (["a"], None, None), (["a", "b", "c"], "c", None), (["d", "e", "f"], "f", "c"), ([], None, "z")],
)
def test_an_honest_page_is_taken(offer_ids: list[str], next_after: str | None, after: str | None) -> None:
    check_page(offer_ids, next_after, after, SMALL)


@pytest.mark.req("R96")
def test_more_than_the_budget_is_refused_and_what_just_fits_is_not() -> None:
    check_budget(2, None, SMALL)
    check_budget(1, "c", SMALL)
    with pytest.raises(Corrupt, match="audit budget is exhausted: more than 6 records"):
        check_budget(2, "f", SMALL)
