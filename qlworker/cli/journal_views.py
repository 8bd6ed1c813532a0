"""What `qlworker journal list` and `show` print: facts of low sensitivity, for a person or as JSON.

A record's token, command, environment and digests never get into the structures below, so no output can tell them (R402).
"""

import time
from datetime import UTC, datetime
from typing import Final

import msgspec
import trio

from ..adapters import process_table
from ..adapters.journal_snapshot import Entry, JournalSnapshot
from ..adapters.processes import LinuxProcesses
from ..adapters.receipts import ReceiptFiles
from ..config import Settings
from ..domain.advice import advise
from ..domain.audit import RecordClass
from ..domain.errors import Corrupt, QlworkerError
from ..domain.identity import DurableHandle, Presence
from ..domain.receipt import Ending, authenticate
from ..domain.record import InboxRecord, RecoveryReason, State

_AGES: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """One file of the list. A damaged one has `damage` and no facts of a record."""

    file: str
    next_step: str
    offer_id: str | None = None
    run_id: str | None = None
    attempt_id: str | None = None
    state: State | None = None
    record_class: RecordClass | None = msgspec.field(default=None, name="class")
    reason: RecoveryReason | None = None
    age_ms: int | None = None
    damage: str | None = None


class Sighting(msgspec.Struct, frozen=True, rename="camel"):
    """What is seen of a record beside it. `process` is None without a handle that can be read; `receipt` is absent, genuine,
    not_genuine or unusable, and `ending` is that of a genuine one."""

    has_handle: bool
    process: Presence | None = None
    launcher_pid: int | None = None
    command_pid: int | None = None
    receipt: str = "absent"
    ending: Ending | None = None


class Facts(msgspec.Struct, frozen=True, rename="camel"):
    """One record. Times are milliseconds of the control plane's clock as the worker knew it, sizes bytes; `output_bytes` is
    None when there is no file."""

    offer_id: str
    run_id: str
    attempt_id: str
    attempt_number: int
    task_id: str
    state: State
    record_class: RecordClass = msgspec.field(name="class")
    reason: RecoveryReason | None
    revision: int
    accepted_at_ms: int
    updated_at_ms: int
    lease_version: int
    lease_expires_at_ms: int
    seen: Sighting
    output_bytes: int | None
    next_step: str


def print_list(settings: Settings, *, as_json: bool) -> None:
    """Prints every file of the journal. Raises what JournalSnapshot raises."""
    now_ms = time.time_ns() // 1_000_000
    rows = [_row(entry, now_ms) for entry in JournalSnapshot(settings.state.journal).entries()]
    if as_json:
        _print_json({"journal": str(settings.state.journal), "records": rows})
    elif rows:
        _print_rows(rows)
    else:
        print(f"journal {settings.state.journal} holds no records")


def print_facts(settings: Settings, name: str, *, as_json: bool) -> None:
    """Prints one record. Raises Corrupt for a damaged one, QlworkerError when there is none."""
    entry = JournalSnapshot(settings.state.journal).find(name)
    if entry.fault is not None:
        raise Corrupt(f"{plain(entry.path.name)} {entry.fault.what}: {entry.fault.remedy}")
    if entry.record is None:
        raise QlworkerError(f"{entry.path.name} is the {entry.kind}, not a record: it is in order")
    facts = _facts(settings, entry.record, trio.run(sight, settings, entry.record))
    if as_json:
        _print_json(facts)
    else:
        _print_facts(facts)


def plain(text: str) -> str:
    """`text` without anything that could steer a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def reason_of(record: InboxRecord) -> RecoveryReason | None:
    """The recovery reason, or None."""
    return record.recovery_reason if isinstance(record.recovery_reason, RecoveryReason) else None


async def sight(settings: Settings, record: InboxRecord) -> Sighting:
    """What is seen of the record's process and receipt now. Changes nothing."""
    receipt, ending = await _receipt(settings, record)
    if not isinstance(record.executor_handle, str):
        return Sighting(has_handle=False, receipt=receipt, ending=ending)
    try:
        handle = DurableHandle.parse(record.executor_handle)
    except ValueError:
        return Sighting(has_handle=True, receipt=receipt, ending=ending)
    return Sighting(
        has_handle=True,
        process=await _presence(settings, handle),
        launcher_pid=handle.launcher.pid,
        command_pid=None if handle.command is None else handle.command.pid,
        receipt=receipt,
        ending=ending,
    )


async def _presence(settings: Settings, handle: DurableHandle) -> Presence:
    try:
        place = process_table.read_place(process_table.read_host_id(settings.state.directory / "installation-id"))
    except (Corrupt, OSError):
        return Presence.PROBE_FAILED
    return await LinuxProcesses(place).inspect(handle)


async def _receipt(settings: Settings, record: InboxRecord) -> tuple[str, Ending | None]:
    if not settings.state.receipts.is_dir():
        return "absent", None
    try:
        receipt = await ReceiptFiles(settings.state.receipts).read(record.offer.attempt_id)
    except (Corrupt, OSError, ValueError):
        return "unusable", None
    if receipt is None:
        return "absent", None
    # without a date: the control plane's time is not known here
    if not authenticate(receipt, record, None):
        return "not_genuine", None
    return "genuine", receipt.ending if isinstance(receipt.ending, Ending) else None


def _output_bytes(settings: Settings, record: InboxRecord) -> int | None:
    if not isinstance(record.log_artifact_id, str):
        return None
    for file in settings.state.output.glob(f"*/{record.log_artifact_id}.log"):
        return file.lstat().st_size
    return None


def _row(entry: Entry, now_ms: int) -> Row:
    name = plain(entry.path.name)
    record = entry.record
    if record is None:
        what, remedy = ("", "nothing to do") if entry.fault is None else (entry.fault.what, plain(entry.fault.remedy))
        return Row(file=name, next_step=remedy, offer_id=entry.offer_id, damage=what)
    advice = advise(record.state, reason_of(record))
    return Row(
        file=name,
        next_step=advice.next_step,
        offer_id=record.offer_id,
        run_id=plain(record.offer.run_id),
        attempt_id=plain(record.offer.attempt_id),
        state=record.state,
        record_class=advice.record_class,
        reason=reason_of(record),
        # a box whose own clock is behind cannot tell an age
        age_ms=now_ms - record.accepted_at_ms if now_ms >= record.accepted_at_ms else None,
    )


def _facts(settings: Settings, record: InboxRecord, seen: Sighting) -> Facts:
    offer = record.offer
    advice = advise(record.state, reason_of(record))
    return Facts(
        offer_id=record.offer_id,
        run_id=plain(offer.run_id),
        attempt_id=plain(offer.attempt_id),
        attempt_number=offer.candidate.attempt_number,
        task_id=plain(offer.candidate.task_id),
        state=record.state,
        record_class=advice.record_class,
        reason=reason_of(record),
        revision=record.revision,
        accepted_at_ms=record.accepted_at_ms,
        updated_at_ms=record.updated_at_ms,
        lease_version=offer.lease.version,
        lease_expires_at_ms=offer.lease.expires_at_ms,
        seen=seen,
        output_bytes=_output_bytes(settings, record),
        next_step=advice.next_step,
    )


def _print_rows(rows: list[Row]) -> None:
    table = [("OFFER", "AGE", "STATE", "CLASS", "REASON")]
    for row in rows:
        state = row.state or "damaged"
        table.append((row.offer_id or row.file, _age(row), state, row.record_class or "-", row.reason or "-"))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line, each in zip(table, [None, *rows], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if each is not None:
            print(f"    {each.file} {each.damage}" if each.damage else f"    run {each.run_id}, attempt {each.attempt_id}")
            print(f"    next: {each.next_step}")


def _age(row: Row) -> str:
    if row.age_ms is None:
        return "-" if row.damage else "unknown"
    return next((f"{row.age_ms // size} {unit}" for size, unit in _AGES if row.age_ms >= size), "0 s")


def _print_facts(facts: Facts) -> None:
    lines = {
        "offer": facts.offer_id,
        "run": facts.run_id,
        "attempt": f"{facts.attempt_id} (number {facts.attempt_number})",
        "task": facts.task_id,
        "state": facts.state,
        "class": facts.record_class,
        "reason": facts.reason or "-",
        "revision": facts.revision,
        "accepted": _time(facts.accepted_at_ms),
        "updated": _time(facts.updated_at_ms),
        "lease": f"version {facts.lease_version}, until {_time(facts.lease_expires_at_ms)} by the control plane's clock",
        "process": _process(facts.seen),
        "receipt": facts.seen.receipt.replace("_", " ") + (f", {facts.seen.ending}" if facts.seen.ending else ""),
        "output": "no file" if facts.output_bytes is None else f"{facts.output_bytes} bytes",
        "next": facts.next_step,
    }
    for name, value in lines.items():
        print(f"{name:8}  {value}")


def _process(seen: Sighting) -> str:
    if not seen.has_handle:
        return "no handle recorded"
    if seen.process is None:
        return "its handle cannot be read"
    command = "" if seen.command_pid is None else f", command {seen.command_pid}"
    return f"{seen.process.replace('_', ' ')} (launcher {seen.launcher_pid}{command})"


def _time(wall_ms: int) -> str:
    try:
        return datetime.fromtimestamp(wall_ms // 1000, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError):
        return f"{wall_ms} ms after 1970"


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode())
