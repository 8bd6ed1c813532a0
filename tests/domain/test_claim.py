"""The pending claim and the wait between its tries."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.backoff import CAP_MS, full_jitter_ms
from qlworker.domain.claim import MAX_ATTEMPTS, PendingClaim
from qlworker.domain.errors import Conflict
from tests.builders import SESSION_ID, TOKEN


def claim(**changes: object) -> PendingClaim:
    fresh = PendingClaim(
        schema_version=1,
        revision=0,
        worker_id="edge-1",
        worker_session_id=SESSION_ID,
        worker_generation=2,
        offer_id="offer-1",
        lease_token=TOKEN,
        attempt_count=0,
        created_at_ms=1000,
        updated_at_ms=1000,
        last_attempt_at_ms=None,
        next_attempt_at_ms=1000,
    )
    return msgspec.structs.replace(fresh, **changes)


def test_sixteen_attempts_keep_the_pair_and_a_seventeenth_is_refused() -> None:
    current = claim()
    for number in range(1, MAX_ATTEMPTS + 1):
        assert not current.is_exhausted
        current = current.attempted(2000)
        assert (current.attempt_count, current.revision) == (number, number)
        assert (current.offer_id, current.lease_token) == ("offer-1", TOKEN)

    assert current.is_exhausted
    with pytest.raises(Conflict):
        current.attempted(3000)


@given(st.lists(st.integers(-(10**12), 2**50), max_size=16))
def test_no_wall_clock_makes_an_attempt_invalid_or_goes_back(clock: list[int]) -> None:
    current = claim()
    for wall_ms in clock:
        later = current.attempted(wall_ms)
        assert later.updated_at_ms >= current.updated_at_ms
        current = later


@pytest.mark.parametrize("change", [{"worker_session_id": SESSION_ID[:-1] + "2"}, {"worker_generation": 3}])
def test_a_claim_belongs_to_one_session_of_one_generation(change: dict[str, object]) -> None:
    assert claim().belongs_to(SESSION_ID, 2)
    assert not claim(**change).belongs_to(SESSION_ID, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"revision": -1},
        {"attempt_count": 17},
        {"attempt_count": -1},
        {"lease_token": "short"},
        {"offer_id": "../x"},
        {"updated_at_ms": 999},
        {"next_attempt_at_ms": 999},
        {"last_attempt_at_ms": 999},
        {"last_attempt_at_ms": 1001},
        {"worker_session_id": "none"},
    ],
)
def test_a_claim_out_of_bounds_is_none(change: dict[str, object]) -> None:
    with pytest.raises(ValueError) as caught:
        claim(**change)
    assert TOKEN not in str(caught.value)


@given(st.integers(-5, 10_000), st.integers(100, 60_000), st.floats(0, 1))
def test_a_wait_is_a_fraction_of_a_doubling_time_up_to_a_minute(attempt: int, base_ms: int, fraction: float) -> None:
    wait = full_jitter_ms(attempt, base_ms, fraction)

    assert 0 <= wait <= CAP_MS
    if attempt >= 1:
        assert wait <= base_ms * 2 ** (attempt - 1)
    assert full_jitter_ms(attempt, base_ms, 1) <= full_jitter_ms(attempt + 1, base_ms, 1)
