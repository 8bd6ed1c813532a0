"""The retry policy by itself: control-plane.md §10."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from qlworker.control.retry_policy import DISABLED, EXHAUSTED, UNSAFE, RetryPolicy, RetryTerms, refusal
from qlworker.control.schema import run_retry_policies
from tests.builders import make_revision
from tests.control.fixtures import START_MS, Plane

FIELDS = {"max_attempts", "retry_on_lost", "safety", "backoff_base_ms", "backoff_max_ms", "next_attempt_at_ms", "version"}


def policy(**changes: object) -> RetryPolicy:
    terms = {"max_attempts": 3, "safety": "idempotent", "backoff_s": 10, "backoff_max_s": 60} | changes
    return RetryPolicy.of("run-1", RetryTerms(**terms), START_MS)  # type: ignore[arg-type]


@pytest.mark.req("R327")
def test_a_policy_fixes_attempts_safety_waits_next_time_and_version() -> None:
    assert set(RetryPolicy.__struct_fields__) >= FIELDS
    assert {column.name for column in run_retry_policies.columns} == set(RetryPolicy.__struct_fields__)


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 10), (2, 20), (3, 40), (4, 60), (5, 60), (16, 60), (20, 60)])
def test_the_wait_doubles_up_to_its_maximum(attempt: int, seconds: int) -> None:  # V93
    assert policy().backoff_ms(attempt) == seconds * 1000


def test_no_wait_stays_no_wait() -> None:
    assert [policy(backoff_s=0, backoff_max_s=0).backoff_ms(attempt) for attempt in range(1, 20)] == [0] * 19


@given(attempt=st.integers(1, 1000), base=st.floats(0, 86_400), extra=st.floats(0, 86_400))
def test_a_wait_never_shrinks_and_never_passes_a_day(attempt: int, base: float, extra: float) -> None:
    within = policy(backoff_s=base, backoff_max_s=min(base + extra, 86_400))
    assert within.backoff_ms(attempt) <= within.backoff_ms(attempt + 1) <= 86_400_000


@pytest.mark.req("R372")
def test_every_refusal_has_its_own_code() -> None:
    unsafe = RetryPolicy(
        run_id="run-1",
        max_attempts=3,
        retry_on_lost=True,
        safety="unknown",
        backoff_base_ms=0,
        backoff_max_ms=0,
        created_at_ms=0,
        updated_at_ms=0,
    )
    assert refusal(None, 1) == refusal(policy(max_attempts=1), 1) == refusal(policy(on_lost=False), 1) == DISABLED
    assert refusal(unsafe, 1) == UNSAFE
    assert refusal(policy(), 3) == EXHAUSTED
    assert refusal(policy(), 2) is None
    assert len({DISABLED, UNSAFE, EXHAUSTED}) == 3


@pytest.mark.req("R324", "R328", "R371")
@pytest.mark.parametrize(
    "changes",
    [
        {"safety": "surely"},
        {"safety": "unknown"},
        {"max_attempts": 17},
        {"max_attempts": 0},
        {"backoff_base_ms": -1},
        {"backoff_base_ms": 5, "backoff_max_ms": 4},
        {"backoff_max_ms": 86_400_001},
    ],
)
def test_the_database_holds_one_sound_policy_a_run(plane: Plane, changes: dict[str, object]) -> None:
    run_id = plane.start_run(plane.publish(make_revision()))
    sound = {
        "run_id": run_id,
        "max_attempts": 3,
        "retry_on_lost": True,
        "safety": "idempotent",
        "backoff_base_ms": 1,
        "backoff_max_ms": 1,
        "version": 0,
        "created_at_ms": 1,
        "updated_at_ms": 1,
    }
    with pytest.raises(IntegrityError), plane.database.transaction() as tx:
        tx.write(insert(run_retry_policies).values(sound | changes))
    with plane.database.transaction() as tx:
        tx.write(insert(run_retry_policies).values(sound))
    with pytest.raises(IntegrityError), plane.database.transaction() as tx:
        tx.write(insert(run_retry_policies).values(sound))
