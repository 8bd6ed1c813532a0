"""When a lease is renewed and when it is over: plain arithmetic on the boot clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.lease import RETRY_MS, LeaseAuthority, StopReason, TrackedLease
from tests.builders import make_offer

TIMES = st.integers(0, 2**50)
LENGTHS = st.integers(-1000, 10_000_000)


@given(TIMES, LENGTHS)
def test_a_renewal_is_due_within_the_lease_and_leaves_time_for_two_more(since: int, length: int) -> None:
    lease = TrackedLease.granted(make_offer(), since, since + length)

    assert since <= lease.renew_at <= max(since, lease.expires_at)
    if length >= 3:
        assert lease.expires_at - lease.renew_at >= 2 * (lease.renew_at - since)


@given(TIMES, LENGTHS, TIMES)
def test_a_lease_is_over_exactly_from_its_end_on(since: int, length: int, now: int) -> None:
    lease = TrackedLease.granted(make_offer(), since, since + length)

    assert lease.is_over(now) == (now >= since + length)
    assert not lease.is_over(since + length - 1)
    assert lease.is_over(since + length)


@given(TIMES, LENGTHS, TIMES)
def test_a_retry_never_lengthens_a_lease_and_never_waits_beyond_it(since: int, length: int, now: int) -> None:
    lease = TrackedLease.granted(make_offer(), since, since + length)
    retried = lease.retried(now)

    assert retried.expires_at == lease.expires_at
    assert retried.renew_at <= max(lease.expires_at, 0)
    assert retried.renew_at == min(now + RETRY_MS, lease.expires_at)
    assert retried.due_at() <= lease.expires_at


@pytest.mark.req("R276")
def test_seven_facts_make_the_authority() -> None:
    authority = LeaseAuthority.of(make_offer())

    assert LeaseAuthority.__struct_fields__ == (
        "run_id",
        "attempt_id",
        "worker_id",
        "session_id",
        "generation",
        "lease_generation",
        "lease_token",
    )
    assert authority == LeaseAuthority.of(make_offer(lease_version=9))


@pytest.mark.req("R381")
def test_what_is_printed_of_a_lease_has_no_token() -> None:
    offer = make_offer()
    lease = TrackedLease.granted(offer, 0, 1)

    assert offer.lease_token not in repr(lease) + str(lease) + repr(lease.authority)


def test_the_reasons_of_a_stop_are_the_contracts() -> None:
    assert [reason.value for reason in StopReason] == ["user", "policy", "shutdown", "reconcile", "timeout"]
