"""Record and facts to verdict: every cell, and that nothing leads to a launch from behind the barrier."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.identity import Presence
from qlworker.domain.record import SETTLED, TRANSITIONS, State
from qlworker.domain.verdict import ReceiptEvidence, Step, Verdict, judge, next_step

BEHIND = (State.LAUNCHING, State.STARTED, State.RUNNING_ACKNOWLEDGED)
PRESENCES = [None, *Presence]


def reachable_from(state: State) -> set[State]:
    found, todo = {state}, [state]
    while todo:
        here = todo.pop()
        for (source, _), target in TRANSITIONS.items():
            if source is here and target not in found:
                found.add(target)
                todo.append(target)
    return found


@pytest.mark.req("R163", "R168", "R175")
@pytest.mark.parametrize("state", State)
def test_only_an_acknowledged_start_is_launched_and_no_way_leads_back_to_it(state: State) -> None:
    launches = next_step(state) is Step.LAUNCH

    assert launches == (state is State.STARTING_ACKNOWLEDGED)
    for behind in BEHIND:
        assert State.STARTING_ACKNOWLEDGED not in reachable_from(behind)
        assert State.ACCEPTED not in reachable_from(behind)


@pytest.mark.parametrize("state", State)
def test_what_is_settled_or_needs_an_operator_rests(state: State) -> None:
    rests = next_step(state) is Step.REST

    assert rests == (state in SETTLED or state is State.RECOVERY_REQUIRED)


@pytest.mark.req("R165", "R201", "R202", "R203", "R204", "R206", "R218")
@pytest.mark.parametrize(
    "state, receipt, presence", list(itertools.product(BEHIND, [ReceiptEvidence.MISSING, ReceiptEvidence.UNTRUSTED], PRESENCES))
)
def test_without_a_trusted_receipt_nothing_has_ended(state: State, receipt: ReceiptEvidence, presence: Presence | None) -> None:
    verdict = judge(state, receipt, presence)

    if receipt is ReceiptEvidence.UNTRUSTED or state is State.LAUNCHING:
        assert verdict is Verdict.UNKNOWN
    elif presence is Presence.PENDING:
        assert verdict is (Verdict.PENDING if state is State.STARTED else Verdict.RUNNING)
    else:
        assert verdict is (Verdict.RUNNING if presence is Presence.RUNNING else Verdict.UNKNOWN)


@pytest.mark.req("R196")
@pytest.mark.parametrize("state, presence", list(itertools.product(BEHIND, PRESENCES)))
def test_a_trusted_receipt_decides_whatever_is_seen_of_the_process(state: State, presence: Presence | None) -> None:
    assert judge(state, ReceiptEvidence.ENDED, presence) is Verdict.ENDED
    not_started = judge(state, ReceiptEvidence.NOT_STARTED, presence)
    assert not_started is (Verdict.UNKNOWN if state is State.RUNNING_ACKNOWLEDGED else Verdict.NOT_STARTED)


@given(st.sampled_from(BEHIND), st.sampled_from(ReceiptEvidence), st.sampled_from(PRESENCES))
def test_an_end_or_a_failed_start_is_claimed_only_on_a_trusted_receipt(
    state: State, receipt: ReceiptEvidence, presence: Presence | None
) -> None:
    verdict = judge(state, receipt, presence)

    if verdict in (Verdict.ENDED, Verdict.NOT_STARTED):
        assert receipt in (ReceiptEvidence.ENDED, ReceiptEvidence.NOT_STARTED)
