"""`qlworker journal quarantine`: owns the journal for a moment, says what is given up, asks, owns it again, moves one record.

The lock is not held while a person thinks: a worker that starts meanwhile wins, and a record that changed meanwhile stays.
"""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from ..adapters import process_table
from ..adapters.clock import SystemClock
from ..adapters.journal_snapshot import Entry, JournalSnapshot, Kind, Quarantine, check_may_leave
from ..adapters.ownership import JournalOwnership
from ..config import Settings
from ..domain.advice import COST_OF_CLAIM, COST_OF_SESSION, COST_OF_STRANGER, cost_of_quarantine
from ..domain.identity import Presence
from .journal_views import Sighting, plain, reason_of, sight

_FAILED, _UNSAFE = 1, 3

_Result = TypeVar("_Result")


class Found(msgspec.Struct, frozen=True):
    """What is to be moved. `seen` is None where there is no record to read."""

    entry: Entry
    seen: Sighting | None


def quarantine(settings: Settings, name: str, *, is_confirmed: bool, is_forced: bool) -> int:
    """Moves the file that `name` means; returns the exit code.

    Raises OwnershipHeld while a worker owns the journal, Conflict for a settled record and for one that changed while it was
    asked about, QlworkerError when there is none.
    """
    JournalSnapshot(settings.state.journal)  # to own a journal that does not exist would make it
    found = trio.run(_owning, settings, partial(_find, settings, name))
    check_may_leave(found.entry)
    if found.seen is not None and found.seen.process in (Presence.RUNNING, Presence.PENDING) and not is_forced:
        print(
            f"qlworker: the command of offer {found.entry.offer_id} runs (launcher {found.seen.launcher_pid}): start the "
            "worker, which takes it up again, or end the command, or give --force",
            file=sys.stderr,
        )
        return _UNSAFE
    print(f"{plain(found.entry.path.name)}: setting it aside means")
    for line in _cost(found):
        print(f"  - {line}")
    print("  - nothing is deleted: the file is kept in quarantine/, its receipt and output stay where they are")
    if not is_confirmed and not _confirmed():
        print("qlworker: not confirmed: nothing was moved", file=sys.stderr)
        return _FAILED
    for path in trio.run(_owning, settings, partial(_move, settings, found.entry)):
        print(f"moved to {path.parent}/{plain(path.name)}")
    return 0


def _cost(found: Found) -> list[str]:
    entry, record, seen = found.entry, found.entry.record, found.seen
    if entry.kind is not Kind.RECORD:
        return {Kind.CLAIM: [COST_OF_CLAIM], Kind.SESSION: [COST_OF_SESSION]}.get(entry.kind, [COST_OF_STRANGER])
    return cost_of_quarantine(
        None if record is None else record.state,
        None if record is None else reason_of(record),
        None if seen is None else seen.process,
        has_genuine_receipt=seen is not None and seen.receipt == "genuine",
    )


def _confirmed() -> bool:
    """Whether a person says yes. The end of input is a no: a script gives --yes."""
    try:
        return input("go on? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        print()
        return False


async def _owning(settings: Settings, action: Callable[[JournalOwnership], Awaitable[_Result]]) -> _Result:
    """Runs `action` while this process owns the journal, which is far shorter than the stale window: nothing refreshes."""
    place = process_table.read_place(process_table.read_host_id(settings.state.directory / "installation-id"))
    ownership = JournalOwnership(
        settings.state.journal,
        clock=SystemClock(place.boot_id),
        place=place,
        me=process_table.myself(),
        is_alive=process_table.is_alive,
        window_ms=settings.state.ownership_window_s * 1000,
    )
    await ownership.acquire()
    try:
        return await action(ownership)
    finally:
        await ownership.release()


async def _find(settings: Settings, name: str, _ownership: JournalOwnership) -> Found:
    entry = JournalSnapshot(settings.state.journal).find(name)
    return Found(entry, None if entry.record is None else await sight(settings, entry.record))


async def _move(settings: Settings, entry: Entry, ownership: JournalOwnership) -> list[Path]:
    return Quarantine(settings.state.journal, ownership).set_aside(entry)
