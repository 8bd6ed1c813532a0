"""Semantic versions and npm-style ranges, for placement. A range that cannot be read matches nothing.

Source: control-plane.md §5.3.
"""

import re
from typing import Final

import msgspec

from ...domain.capabilities import check_version

_PARTIAL: Final = (
    r"(?P<major>[xX*]|\d+)(?:\.(?P<minor>[xX*]|\d+))?(?:\.(?P<patch>[xX*]|\d+))?(?P<pre>-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?"
)
_COMPARATOR: Final = re.compile(rf"(?P<operator>[<>]=?|=|\^|~)?v?{_PARTIAL}\Z")
_HYPHEN: Final = re.compile(r"(\S+)\s+-\s+(\S+)\Z")
_GAP: Final = re.compile(r"([<>]=?|=|\^|~)\s+")

_Key = tuple[tuple[int, int, int], tuple[int, tuple[tuple[int, int, str], ...]]]


class _Comparator(msgspec.Struct, frozen=True):
    operator: str
    bound: _Key

    def matches(self, version: _Key) -> bool:
        if self.operator == ">=":
            return version >= self.bound
        if self.operator == ">":
            return version > self.bound
        if self.operator == "<":
            return version < self.bound
        return version <= self.bound


def satisfies(version: str, wanted: str, *, include_prereleases: bool = False) -> bool:
    """Whether `version` lies in the range `wanted`.

    A pre-release only matches a range that names a pre-release of the same numbers, unless `include_prereleases` is true.
    Raises ValueError when either cannot be read: the caller treats that as a mismatch.
    """
    check_version(version, "a version")
    numbers, _, rest = version.partition("+")[0].partition("-")
    key = _key(numbers.split("."), rest)
    return any(_matches_all(key, _comparators(part.strip()), include_prereleases) for part in wanted.split("||"))


def _matches_all(version: _Key, comparators: list[_Comparator], include_prereleases: bool) -> bool:
    if not all(comparator.matches(version) for comparator in comparators):
        return False
    is_release = version[1][0] == 1
    named = any(each.bound[0] == version[0] and each.bound[1][0] == 0 and each.bound[1][1] for each in comparators)
    return is_release or include_prereleases or named


def _comparators(text: str) -> list[_Comparator]:
    if hyphen := _HYPHEN.match(text):
        return _comparators(f">={hyphen[1]} <={hyphen[2]}")
    found: list[_Comparator] = []
    for token in _GAP.sub(r"\1", text).split() or ["*"]:
        match = _COMPARATOR.match(token)
        if match is None:
            raise ValueError("a version range must be of comparators such as >=1.2.0, ^1.2 or 1.x")
        found += _expand(match)
    return found


def _expand(match: re.Match[str]) -> list[_Comparator]:  # noqa: PLR0911 - one line for each form of the grammar
    operator = match["operator"] or "="
    given = [part for part in (match["major"], match["minor"], match["patch"]) if part not in (None, "x", "X", "*")]
    pre = (match["pre"] or "")[1:] if len(given) == 3 else ""
    low = _key(given, pre)
    if operator in (">=", "<") and given:
        return [_Comparator(operator, low if operator == ">=" or pre else _floor(low))]
    if operator in (">", "<=") and len(given) == 3:
        return [_Comparator(operator, low)]
    if not given:
        return [_Comparator("<" if operator in "<>" and operator else ">=", _floor(_key([], "")))]
    if operator == ">":
        return [_Comparator(">=", _next(given, len(given)))]
    if operator == "<=":
        return [_Comparator("<", _next(given, len(given)))]
    if operator == "^":
        places = next((index for index, part in enumerate(given) if int(part)), len(given) - 1) + 1
        return [_Comparator(">=", low), _Comparator("<", _next(given, places))]
    if operator == "~":
        return [_Comparator(">=", low), _Comparator("<", _next(given, min(len(given), 2)))]
    if len(given) == 3:
        return [_Comparator(">=", low), _Comparator("<=", low)]
    return [_Comparator(">=", low), _Comparator("<", _next(given, len(given)))]


def _next(given: list[str], places: int) -> _Key:
    """Just below the first version whose first `places` numbers are one higher: its pre-releases are above the bound."""
    numbers = [int(part) for part in given[:places]]
    numbers[-1] += 1
    return _floor(_key([str(number) for number in numbers], ""))


def _floor(key: _Key) -> _Key:
    """Below every pre-release of the same numbers."""
    return key[0], (0, ())


def _key(numbers: list[str], pre: str) -> _Key:
    padded = [*(int(number) for number in numbers), 0, 0, 0][:3]
    triple = (padded[0], padded[1], padded[2])
    if not pre:
        return triple, (1, ())
    identifiers = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in pre.split("."))
    return triple, (0, identifiers)
