"""The control plane's time on the boot clock."""

from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.server_time import Anchor, observe

OFFSET = 1_790_000_000_000


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(sent, server reads its clock, received) on one boot clock, in order."""
    at = draw(st.integers(0, 10**9))
    found = []
    for _ in range(draw(st.integers(1, 12))):
        sent = at + draw(st.integers(0, 10**6))
        read = sent + draw(st.integers(0, 20_000))
        received = read + draw(st.integers(0, 20_000))
        found.append((sent, read, received))
        at = received
    return found


@given(exchanges())
def test_the_estimate_is_never_behind_the_server_and_never_gets_worse(rounds: list[tuple[int, int, int]]) -> None:
    anchor: Anchor | None = None
    error: int | None = None
    for sent, read, received in rounds:
        anchor = observe(anchor, "boot", OFFSET + read, sent, received)
        now = anchor.server_time(received) - (OFFSET + received)
        assert 0 <= now <= received - sent
        assert error is None or now <= error
        error = now


@given(exchanges(), st.integers(0, 10**9))
def test_an_expiry_is_judged_early_and_never_late(rounds: list[tuple[int, int, int]], later: int) -> None:
    anchor: Anchor | None = None
    for sent, read, received in rounds:
        anchor = observe(anchor, "boot", OFFSET + read, sent, received)
    assert anchor is not None
    truly = rounds[-1][2] + later

    assert anchor.boot_time(OFFSET + truly) <= truly
    assert anchor.server_time(anchor.boot_time(OFFSET + truly)) == OFFSET + truly


@given(exchanges(), st.integers(50_000, 10**10), st.sampled_from([-1, 1]))
def test_a_server_clock_that_was_set_is_believed(rounds: list[tuple[int, int, int]], by: int, sign: int) -> None:
    anchor: Anchor | None = None
    for sent, read, received in rounds:
        anchor = observe(anchor, "boot", OFFSET + read, sent, received)
    sent = rounds[-1][2] + 1
    set_to = OFFSET + sign * by
    anchor = observe(anchor, "boot", set_to + sent + 5, sent, sent + 10)

    assert 0 <= anchor.server_time(sent + 10) - (set_to + sent + 10) <= 10


def test_an_anchor_of_another_boot_says_nothing() -> None:
    old = observe(None, "boot-1", OFFSET + 100, 90, 110)

    new = observe(old, "boot-2", OFFSET + 5_000_000, 3, 9)

    assert new == Anchor(boot_id="boot-2", server_ms=OFFSET + 5_000_000, boot_ms=3)


def test_a_slow_answer_does_not_replace_a_good_estimate() -> None:
    good = observe(None, "boot", OFFSET + 100, 99, 101)

    assert observe(good, "boot", OFFSET + 20_000, 5_000, 25_000) is good
