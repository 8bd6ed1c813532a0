"""Identifiers and random material."""

import pytest

from qlworker.domain.text import check_session_id, new_capability, new_session_id, new_token


@pytest.mark.req("R133", "R510")
def test_completion_capabilities_are_32_bytes_and_never_repeat() -> None:
    made = [bytes(new_capability()) for _ in range(100_000)]

    assert len(set(made)) == len(made)
    assert {len(each) for each in made} == {32}


def test_a_new_session_id_is_a_uuid_of_version_7_that_carries_the_time() -> None:
    made = new_session_id(1_790_000_000_123)

    assert check_session_id(made) == made
    assert int(made.replace("-", "")[:12], 16) == 1_790_000_000_123


@pytest.mark.parametrize("wall_ms", [0, -5_000, 2**60])
def test_a_session_id_is_valid_whatever_the_clock_says(wall_ms: int) -> None:
    check_session_id(new_session_id(wall_ms))


def test_lease_tokens_are_43_characters_and_never_repeat() -> None:
    made = {new_token() for _ in range(10_000)}

    assert len(made) == 10_000
    assert {len(each) for each in made} == {43}
