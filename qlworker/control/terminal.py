"""What the commands show: aligned columns, times, durations. Nothing here decides anything."""

import contextlib
import datetime
import sys
from collections.abc import Iterable, Sequence

import msgspec


def show(line: str = "") -> None:
    """One line on standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """One line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def show_json(value: object) -> None:
    """`value` as one JSON document."""
    show(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show_line_json(value: object) -> None:
    """`value` as one line of JSON, for a program that reads lines. A reader that is gone is no error."""
    with contextlib.suppress(OSError):
        show(msgspec.json.encode(value).decode())


def show_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns two blanks apart on standard output. An empty cell shows as `-`; control characters show escaped."""
    table = [[_printable(cell) or "-" for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in [list(header), *table]) for index in range(len(header))]
    for row in [[name.upper() for name in header], *table]:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_pairs(items: Iterable[tuple[str, str]]) -> None:
    """`name  value` lines on standard output with the values below one another; an item without a value is left out."""
    kept = [(name, _printable(value)) for name, value in items if value]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        show(f"{name.ljust(width)}  {value}")


def moment(at_ms: int | None) -> str:
    """A UTC time to the millisecond, or nothing."""
    if at_ms is None:
        return ""
    at = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def duration(started_ms: int | None, finished_ms: int | None) -> str:
    """The time between two moments, or nothing when one is missing."""
    if started_ms is None or finished_ms is None:
        return ""
    seconds = (finished_ms - started_ms) / 1000
    if seconds < 60:
        return f"{seconds:.3f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest} s" if hours else f"{minutes} min {rest} s"


def _printable(text: str) -> str:
    # a task id comes from another operator's file and must not move this one's cursor
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
