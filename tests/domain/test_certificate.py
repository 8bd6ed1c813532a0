"""A certificate's validity, read without a library, and when the next one is due."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.certificate import DAY_MS, HOUR_MS, Validity, validity
from tests.pki import authority, dated_identity, worker_identity

MOMENTS = st.datetimes(datetime(1950, 1, 1), datetime(2149, 1, 1)).map(lambda each: each.replace(microsecond=0, tzinfo=UTC))


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def milliseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


@given(begin=MOMENTS, seconds=st.integers(1, 10**9), name=st.from_regex(r"[a-z]{1,64}", fullmatch=True))
def test_the_dates_are_those_that_the_library_wrote(begin: datetime, seconds: int, name: str) -> None:
    end = begin + timedelta(seconds=seconds)
    identity = dated_identity(authority(), name, begin, end)

    assert validity(der(identity.certificate)) == Validity(milliseconds(begin), milliseconds(end))


@given(st.binary(max_size=400))
def test_no_bytes_but_a_certificate_have_a_validity(data: bytes) -> None:
    with pytest.raises(ValueError):
        validity(data)


def test_a_certificate_that_is_cut_off_anywhere_has_no_validity() -> None:
    whole = der(worker_identity().certificate)

    for length in range(len(whole)):
        with pytest.raises(ValueError):
            validity(whole[:length])


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_certificate_is_refused_or_has_dates_in_order(position: int, value: int) -> None:
    damaged = bytearray(der(worker_identity().certificate))
    damaged[position % len(damaged)] = value
    try:
        found = validity(bytes(damaged))
    except ValueError:
        return
    assert found.not_before_ms < found.not_after_ms


@pytest.mark.parametrize(
    ("lifetime_ms", "margin_ms"),
    [
        (365 * DAY_MS, 30 * DAY_MS),
        (30 * DAY_MS, 10 * DAY_MS),
        (DAY_MS, 8 * HOUR_MS),
        (2 * HOUR_MS, HOUR_MS),
        (HOUR_MS, HOUR_MS // 2),
    ],
)
def test_the_next_certificate_is_due_a_third_of_the_lifetime_before_the_end_within_bounds(
    lifetime_ms: int, margin_ms: int
) -> None:
    term = Validity(0, lifetime_ms)

    assert term.renewal_due_ms(0.0) == lifetime_ms - margin_ms
    assert term.renewal_due_ms(1.0) == lifetime_ms - margin_ms - margin_ms // 4


@given(st.integers(1, 10**13), st.floats(0, 1))
def test_the_next_certificate_is_never_due_before_its_time_or_after_its_end(lifetime_ms: int, fraction: float) -> None:
    assert 0 < Validity(0, lifetime_ms).renewal_due_ms(fraction) <= lifetime_ms
