"""Cron lines: what is refused, and when the others fire, around changes of the clocks too."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.control.schedule.cron import check_cron, check_zone, next_fire_ms


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def fires(line: str, zone: str, after: str, count: int) -> list[str]:
    """The next times in UTC."""
    found, moment = [], at(after)
    for _ in range(count):
        moment = next_fire_ms(line, zone, moment)
        found.append(datetime.fromtimestamp(moment / 1000, UTC).strftime("%m-%d %H:%M:%S"))
    return found


@pytest.mark.parametrize(
    ("line", "zone", "after", "expected"),
    [
        ("0 3 * * *", "UTC", "2026-01-01T03:00:00+00:00", ["01-02 03:00:00", "01-03 03:00:00"]),
        ("*/20 * * * * *", "UTC", "2026-01-01T00:00:05+00:00", ["01-01 00:00:20", "01-01 00:00:40", "01-01 00:01:00"]),
        ("@hourly", "UTC", "2026-01-01T00:59:59+00:00", ["01-01 01:00:00"]),
        ("0 0 29 2 *", "UTC", "2026-01-01T00:00:00+00:00", ["02-29 00:00:00"]),
        ("30 9 * * MON", "Asia/Shanghai", "2026-01-01T00:00:00+00:00", ["01-05 01:30:00"]),
        # The clocks of Berlin go forward on 29 March 2026 at 02:00: the hour from two to three does not exist.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00+00:00", ["03-29 01:00:00", "03-30 00:30:00"]),
        # They go back on 25 October 2026 at 03:00: half past two comes twice.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00+00:00", ["10-25 00:30:00", "10-26 01:30:00"]),
        ("0 0 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00+00:00", ["10-25 00:00:00", "10-25 01:00:00"]),
    ],
)
def test_a_line_fires_at_its_times(line: str, zone: str, after: str, expected: list[str]) -> None:
    assert fires(check_cron(line), check_zone(zone), after, len(expected)) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("* * * *", "must have five fields, or six"),
        ("* * * * * * *", "must have five fields, or six"),
        ("61 * * * *", "has a minute that is none"),
        ("61 * * * * *", "has a second that is none"),
        ("* * 31 2 *", "has a day-of-month that is none, or that never comes"),
        ("0 0 30 2 *", "never comes"),
        ("@reboot", "must be five fields"),
        ("nonsense", "must have five fields"),
        ("", "cron"),
        ("* * * * *" + " " * 200, "cron"),
    ],
)
def test_a_line_that_never_fires_is_refused_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_cron(line)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "Europe/Berlin\x00"])
def test_a_zone_that_is_not_known_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="timezone"):
        check_zone(zone)


FIELD = st.sampled_from(["*", "0", "5", "*/7", "1-3", "2,4"])


@given(st.lists(FIELD, min_size=5, max_size=6), st.integers(1_700_000_000_000, 2_000_000_000_000), st.booleans())
def test_the_next_time_is_always_later_and_on_a_whole_second(fields: list[str], after_ms: int, is_berlin: bool) -> None:
    line = " ".join(fields)
    try:
        check_cron(line)
    except ValueError:
        return
    following = next_fire_ms(line, "Europe/Berlin" if is_berlin else "UTC", after_ms)

    assert following > after_ms
    assert following % 1000 == 0


@given(st.text(max_size=40))
def test_any_text_is_a_line_or_is_refused(text: str) -> None:
    try:
        assert check_cron(text) == text
    except ValueError:
        return
