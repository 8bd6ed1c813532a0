"""The inbox record: its states, its transitions and what an update may change, against the golden vectors."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from qlworker.domain.errors import Conflict
from qlworker.domain.record import (
    SETTLED,
    TRANSITIONS,
    Event,
    InboxRecord,
    RecoveryReason,
    State,
    accept,
    advance,
    check_update,
    renew,
)
from qlworker.domain.revision import ArgvCommand
from tests.builders import DIGEST, make_offer, make_record, make_revision

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "vectors.json").read_text())["journal"]
PAIR = "completionReceiptCallbackSequence+completionReceiptTokenDigest"
OPTIONAL: dict[str, dict[str, object]] = {
    "executorHandle": {"executor_handle": "ql3lp1.handle"},
    "executorStartedAtMs": {"executor_started_at_ms": 5},
    "logArtifactId": {"log_artifact_id": "wlog-" + "a" * 30},
    PAIR: {"completion_receipt_callback_sequence": 1, "completion_receipt_token_digest": DIGEST},
    "completionAcknowledgedAtMs": {"completion_acknowledged_at_ms": 9},
    "recoveryReason": {"recovery_reason": RecoveryReason.LAUNCH_OUTCOME_UNKNOWN},
}
LAUNCH: dict[str, Any] = {**OPTIONAL["executorStartedAtMs"], **OPTIONAL["logArtifactId"], **OPTIONAL[PAIR]}
MEMBERS: dict[Event, dict[str, Any]] = {
    Event.BARRIER_RAISED: LAUNCH,
    Event.HANDLE_RECORDED: OPTIONAL["executorHandle"],
    Event.COMPLETION_ACKED: OPTIONAL["completionAcknowledgedAtMs"],
    Event.RECOVERY_NEEDED: OPTIONAL["recoveryReason"],
}
PATHS: dict[State, list[Event]] = {
    State.ACCEPTED: [],
    State.STARTING_ACKNOWLEDGED: [Event.STARTING_ACKED],
    State.LAUNCHING: [Event.STARTING_ACKED, Event.BARRIER_RAISED],
    State.STARTED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.HANDLE_RECORDED],
    State.RUNNING_ACKNOWLEDGED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.HANDLE_RECORDED, Event.RUNNING_ACKED],
    State.START_FAILED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.NOT_STARTED],
    State.START_FAILURE_ACKNOWLEDGED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.NOT_STARTED, Event.FAILURE_ACKED],
    State.COMPLETION_ACKNOWLEDGED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.COMPLETION_ACKED],
    State.RECOVERY_REQUIRED: [Event.STARTING_ACKED, Event.BARRIER_RAISED, Event.RECOVERY_NEEDED],
}


def record_in(state: State) -> InboxRecord:
    record = make_record()
    for event in PATHS[state]:
        record = advance(record, event, 2000, **MEMBERS.get(event, {}))
    assert record.state is state
    return record


def changed(record: InboxRecord, **members: Any) -> InboxRecord:
    return msgspec.structs.replace(record, **{"revision": record.revision + 1, **members})


@pytest.mark.req("R58", "R59")
def test_there_are_nine_states_and_the_chain_leads_through_five_of_them() -> None:
    assert {state.value for state in State} == set(VECTORS["transitions"])
    assert len(State) == 9
    chain = [State.ACCEPTED, State.STARTING_ACKNOWLEDGED, State.LAUNCHING, State.STARTED, State.RUNNING_ACKNOWLEDGED]
    steps = {(source, target) for (source, _), target in TRANSITIONS.items()}
    for earlier, later in itertools.permutations(chain, 2):
        assert ((earlier, later) in steps) is (chain.index(later) == chain.index(earlier) + 1)


@pytest.mark.req("R16", "R17", "R186", "R187")
@pytest.mark.parametrize("state", State)
def test_each_state_carries_exactly_the_optional_members_of_the_vectors(state: State) -> None:
    valid = {frozenset(names) for names in VECTORS["validOptionalMembersByState"][state.value]}
    for size in range(len(OPTIONAL) + 1):
        for names in itertools.combinations(OPTIONAL, size):
            members: dict[str, Any] = {"schema_version": 1, "revision": 1, "state": state, "offer": make_offer()}
            members |= {"accepted_at_ms": 1, "updated_at_ms": 1}
            for name in names:
                members |= OPTIONAL[name]
            if frozenset(names) in valid:
                stored = msgspec.json.decode(InboxRecord(**members).to_json(), type=InboxRecord)
                assert stored == InboxRecord(**members)
            else:
                with pytest.raises(ValueError, match=r"members|needs|pair"):
                    InboxRecord(**members)


@pytest.mark.req("R186")
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("lonely", ["completion_receipt_callback_sequence", "completion_receipt_token_digest"])
def test_half_a_receipt_pair_is_refused_in_every_state(state: State, lonely: str) -> None:
    both = {"completion_receipt_callback_sequence": 1, "completion_receipt_token_digest": DIGEST}
    other = (set(both) - {lonely}).pop()
    with pytest.raises(ValueError, match="only as a pair"):
        msgspec.structs.replace(record_in(state), **{lonely: both[lonely], other: UNSET})


@pytest.mark.req("R17")
@pytest.mark.parametrize("digest", ["A" * 64, "a" * 63, "a" * 65, "g" * 64, ""])
def test_a_token_digest_is_64_lower_case_hexadecimal_characters(digest: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case"):
        msgspec.structs.replace(record_in(State.LAUNCHING), completion_receipt_token_digest=digest)


@pytest.mark.req("R19")
def test_the_recovery_reason_comes_from_a_closed_list() -> None:
    stored = record_in(State.RECOVERY_REQUIRED).to_json().replace(b"launch_outcome_unknown", b"because_of_a_secret")
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(stored, type=InboxRecord)
    assert len(RecoveryReason) == 5


@pytest.mark.req("R66", "R67", "R71")
@pytest.mark.parametrize(("source", "target"), list(itertools.product(State, State)))
def test_only_the_transitions_of_the_vectors_are_legal(source: State, target: State) -> None:
    # The one addition: an authenticated receipt says that the gate was never opened (design.md, the gate).
    added = (source, target) == (State.STARTED, State.START_FAILED)
    legal = added or target.value in VECTORS["transitions"][source.value]
    old = record_in(source)
    if target is source:
        check_update(old, changed(old))
        return
    events = [event for (state, event), result in TRANSITIONS.items() if (state, result) == (source, target)]
    assert bool(events) is legal
    if legal:
        for event in events:
            needed = LAUNCH if target is State.COMPLETION_ACKNOWLEDGED else {}
            check_update(old, advance(old, event, 3000, **needed, **MEMBERS.get(event, {})))
        return
    with pytest.raises(Conflict, match="cannot move"):
        check_update(old, changed(record_in(target), revision=old.revision + 1, updated_at_ms=5000))


@pytest.mark.req("R67")
@pytest.mark.parametrize("state", sorted(SETTLED))
@pytest.mark.parametrize("event", Event)
def test_no_event_moves_a_settled_record(state: State, event: Event) -> None:
    with pytest.raises(Conflict, match="cannot apply"):
        advance(record_in(state), event, 9999)


@pytest.mark.req("R60")
@pytest.mark.parametrize("distance", [-1, 0, 2, 7])
def test_an_update_must_be_exactly_one_revision_on(distance: int) -> None:
    old = record_in(State.LAUNCHING)
    with pytest.raises(Conflict, match="expected revision"):
        check_update(old, msgspec.structs.replace(old, revision=old.revision + distance))


@pytest.mark.req("R64", "R65")
@pytest.mark.parametrize("times", [{"accepted_at_ms": 999}, {"accepted_at_ms": 1001}, {"updated_at_ms": 1999}])
@pytest.mark.parametrize("state", [state for state in State if state is not State.ACCEPTED])
def test_the_accepted_time_stays_and_the_updated_time_never_goes_back(state: State, times: dict[str, Any]) -> None:
    old = record_in(state)
    with pytest.raises(Conflict, match="never"):
        check_update(old, changed(old, **times))


OTHER_REVISION = make_revision(ArgvCommand(file="/bin/false", args=[]))
OTHER_TASK = make_revision(source_revision=2, task_revision=f"qltd:v1:2:{DIGEST}")
OTHERS: dict[str, dict[str, Any]] = {
    "digest": {"revision": OTHER_REVISION},
    "session": {"session_id": "018f0000-0000-7000-8000-000000000002"},
    "generation": {"generation": 3},
    "token": {"lease_token": "another_lease_capability_00000000000000000000000001"},
    "task revision": {"revision": OTHER_TASK},
    "run": {"run_id": "run-2"},
    "attempt": {"attempt_id": "attempt-2"},
}


@pytest.mark.req("R21", "R26", "R61")
@pytest.mark.parametrize("what", OTHERS)
def test_another_authority_is_refused_in_an_update_and_in_a_redelivery(what: str) -> None:
    record = make_record()
    other = make_offer(lease_version=9, renewed_at_ms=30, **OTHERS[what])
    with pytest.raises(Conflict, match="authority"):
        renew(record, other, 2000)
    with pytest.raises(Conflict, match="authority"):
        check_update(record, changed(record, offer=other))


@pytest.mark.req("R61")
def test_the_lease_generation_belongs_to_the_authority() -> None:
    record = make_record()
    lease = msgspec.structs.replace(record.offer.lease, lease_generation=2, version=5)
    with pytest.raises(Conflict, match="authority"):
        check_update(record, changed(record, offer=record.offer.with_lease(lease)))


@pytest.mark.req("R61")
def test_the_kind_of_the_first_delivery_is_kept() -> None:
    record = make_record()
    replayed = make_offer(delivery_kind="replay", lease_version=1, renewed_at_ms=30, expires_at_ms=40_000)
    renewed = renew(record, replayed, 2000)
    assert renewed.offer.delivery_kind == "new_claim"
    check_update(record, renewed)
    with pytest.raises(Conflict, match="authority"):
        check_update(record, changed(record, offer=replayed))


@pytest.mark.req("R20", "R24", "R25", "R62", "R63", "R72")
@given(stored=st.integers(0, 50), delivered=st.integers(0, 50), same_terms=st.booleans())
def test_a_lease_only_moves_to_a_higher_version(stored: int, delivered: int, same_terms: bool) -> None:
    record = make_record(lease_version=stored)
    expires = 30_020 if same_terms else 60_000
    offer = make_offer(lease_version=delivered, expires_at_ms=expires)
    update = changed(record, offer=offer)
    if delivered > stored:
        renewed = renew(record, offer, 2000)
        assert (renewed.offer.lease, renewed.state, renewed.revision) == (offer.lease, record.state, 1)
        check_update(record, renewed)
    elif delivered == stored and same_terms:
        assert renew(record, offer, 2000) is record
        check_update(record, update)
    else:
        if delivered == stored:
            with pytest.raises(Conflict, match="same version"):
                renew(record, offer, 2000)
        else:
            assert renew(record, offer, 2000) is record
        with pytest.raises(Conflict, match="lease version"):
            check_update(record, update)


@pytest.mark.req("R61")
@pytest.mark.parametrize("name", [name for name in OPTIONAL if name not in {"completionAcknowledgedAtMs", "recoveryReason"}])
def test_an_optional_member_neither_changes_nor_vanishes_once_it_is_set(name: str) -> None:
    others: dict[str, Any] = {
        "executor_handle": "ql3lp1.other",
        "executor_started_at_ms": 6,
        "log_artifact_id": "wlog-" + "b" * 30,
        "completion_receipt_callback_sequence": 2,
        "completion_receipt_token_digest": "b" * 64,
    }
    old = record_in(State.RUNNING_ACKNOWLEDGED)
    for member in OPTIONAL[name]:
        with pytest.raises(Conflict, match=member):
            check_update(old, changed(old, **{member: others[member]}))
    if name == "executorHandle":
        lost = advance(old, Event.RECOVERY_NEEDED, 3000, **MEMBERS[Event.RECOVERY_NEEDED])
        with pytest.raises(Conflict, match="executor_handle"):
            check_update(old, msgspec.structs.replace(lost, executor_handle=UNSET))


@pytest.mark.req("R14", "R15", "R60", "R65", "R66", "R67")
@given(steps=st.lists(st.tuples(st.sampled_from(Event), st.integers(0, 10_000)), max_size=12))
def test_every_walk_through_the_table_is_stored_whole_and_goes_on_by_one(steps: list[tuple[Event, int]]) -> None:
    record = accept(make_offer(), 1000)
    for event, now_ms in steps:
        members = dict(MEMBERS.get(event, {}))
        if event is Event.COMPLETION_ACKED and record.completion_receipt_token_digest is UNSET:
            members |= LAUNCH
        if (record.state, event) not in TRANSITIONS:
            with pytest.raises(Conflict):
                advance(record, event, now_ms, **members)
            continue
        following = advance(record, event, now_ms, **members)
        check_update(record, following)
        assert following.revision == record.revision + 1
        assert following.updated_at_ms == max(record.updated_at_ms, now_ms)
        assert not record.is_settled
        assert msgspec.json.decode(following.to_json(), type=InboxRecord) == following
        record = following
