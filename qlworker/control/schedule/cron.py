"""Cron lines and time zones: what a line means, whether it ever fires, and when next. Pure.

Five fields, or six with seconds in front. Around a change of the clocks a line of five fields with fixed hours fires once, as
Debian's cron does; one with seconds fires at the times that exist.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from ...domain.text import check_text

CRON_CHARS: Final = 128
ZONE_CHARS: Final = 64

_HOUR: Final = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0"}
_NAMED: Final = {**_HOUR, "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *"}
_REFERENCE: Final = datetime(2024, 1, 1, tzinfo=UTC)
"""Any moment: whether a line ever fires does not depend on when it is asked."""


def check_cron(line: str) -> str:
    """A cron line that fires some day. Raises ValueError that says what is wrong with it."""
    check_text(line, "cron", minimum=1, maximum=CRON_CHARS)
    if line.startswith("@") and line not in _NAMED:
        raise ValueError(f"cron {line!r} must be five fields, six with seconds in front, or one of {', '.join(_NAMED)}")
    try:
        next(CronSim(_fields(line), _REFERENCE))
    except CronSimError as error:
        reason = str(error).lower().removeprefix("bad ")
        if reason == "wrong number of fields":
            raise ValueError(f"cron {line!r} must have five fields, or six with seconds in front") from None
        raise ValueError(f"cron {line!r} has a {reason} that is none, or that never comes") from None
    except StopIteration:
        raise ValueError(f"cron {line!r} never fires") from None
    return line


def check_zone(name: str) -> str:
    """A time zone that this host knows. Raises ValueError."""
    check_text(name, "timezone", minimum=1, maximum=ZONE_CHARS)
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"timezone {name!r} is not known here: name one such as Europe/Berlin, or UTC") from None
    return name


def next_fire_ms(line: str, zone: str, after_ms: int) -> int:
    """The first time behind `after_ms` at which the line fires, both in UTC milliseconds. For a line that was checked."""
    after = datetime.fromtimestamp(after_ms / 1000, UTC).astimezone(_zone(zone))
    return round(next(CronSim(_fields(line), after)).timestamp() * 1000)


def _fields(line: str) -> str:
    return _NAMED.get(line, line)


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
