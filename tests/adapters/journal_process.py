"""A second process for tests of the journal: `python -m tests.adapters.journal_process MODE ROOT`.

It says in one line per fact what happened, and ends at the end of its input.
"""

import sys
from pathlib import Path

import msgspec
import trio

from qlworker.adapters.clock import SystemClock
from qlworker.adapters.journal import FileJournal
from qlworker.adapters.ownership import JournalOwnership
from qlworker.adapters.process_table import is_alive, myself, read_place
from qlworker.domain.errors import OwnershipHeld
from qlworker.domain.record import Event, advance
from tests.builders import make_record


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def ownership_of(root: Path) -> JournalOwnership:
    place = read_place("test-host")
    return JournalOwnership(root, clock=SystemClock(place.boot_id), place=place, me=myself(), is_alive=is_alive)


async def race(root: Path) -> None:
    """Waits for a line, tries to own the root, says how it went and keeps it until the end of input."""
    say("ready")
    sys.stdin.readline()
    try:
        await ownership_of(root).acquire()
    except OwnershipHeld:
        say("held")
    else:
        say("owned")
    sys.stdin.read()


async def idle(root: Path) -> None:
    """Owns the root, refreshes in the background and has nothing else to do."""
    ownership = ownership_of(root)
    await ownership.acquire()
    trio.lowlevel.spawn_system_task(ownership.refresh_forever)
    say("owned")


async def write(root: Path) -> None:
    """Creates a record and replaces it for ever, saying each revision that is durable."""
    ownership = ownership_of(root)
    await ownership.acquire()
    journal = FileJournal(root, ownership=ownership, file_limiter=trio.CapacityLimiter(1))
    await journal.open()
    record = await journal.read("offer-1")
    if record is None:
        record = make_record()
        await journal.create(record)
    while True:
        say(str(record.revision))
        record = msgspec.structs.replace(record, revision=record.revision + 1)
        await journal.replace(record)


async def operate(root: Path) -> None:
    """Each kind of operation once, between two lines of output that a trace can find."""
    ownership = ownership_of(root)
    await ownership.acquire()
    journal = FileJournal(root, ownership=ownership, file_limiter=trio.CapacityLimiter(1))
    await journal.open()
    say("begin")
    record = make_record()
    await journal.create(record)
    record = advance(record, Event.STARTING_ACKED, 2000)
    await journal.replace(record)
    record = advance(record, Event.NOT_STARTED, 2000)
    await journal.replace(record)
    record = advance(record, Event.FAILURE_ACKED, 2000)
    await journal.replace(record)
    await journal.page()
    await journal.remove("offer-1", record.revision)
    say("end")
    await ownership.release()


if __name__ == "__main__":
    modes = {"race": race, "idle": idle, "write": write, "operate": operate}
    trio.run(modes[sys.argv[1]], Path(sys.argv[2]))
