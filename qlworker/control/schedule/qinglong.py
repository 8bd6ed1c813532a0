"""Reads what a QingLong 2.x panel says of its crontab, and makes task definitions of it; tells of each line what became of it.

Two forms are known: the crontab.list that the panel keeps (`# ` in front of what is disabled, `ID=7` in front of the command),
and the JSON of its list of tasks, an array or the answer around it. Nothing is guessed: what cannot be carried over is said.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from ...domain.errors import Misconfigured
from ..task_file import Command, TaskDefinition, TriggerDefinition

EXPORT_BYTES: Final = 4 * 1024 * 1024

_LINE: Final = re.compile(r"(?P<off>#\s*)?(?P<schedule>.+?)\s+ID=(?P<id>\d+)\s+(?P<command>\S.*)\Z")
_PANEL_PROGRAMS: Final = frozenset({"task", "ql", "repo", "raw"})
_NOT_IN_ID: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the panel, as it was written there. `place` is a line, or a position in the array, from 1."""

    place: int
    number: str
    name: str
    schedules: list[str]
    command: str
    is_disabled: bool
    before: str = ""
    after: str = ""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job. `definition` is None for one that was left; `notes` say what to look at."""

    place: int
    name: str
    verdict: Literal["carried over", "look at it", "left"]
    notes: list[str]
    definition: TaskDefinition | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tasks are to belong: their project, the zone of their cron lines, and the only worker, if there is one."""

    project: str
    timezone: str
    worker: str | None = None


def carry_over(data: bytes, target: Target) -> list[Carried]:
    """What becomes of every job in an export, in its order. Raises Misconfigured for a file that is no export."""
    taken: set[str] = set()
    return [each if isinstance(each, Carried) else _carried(each, target, taken) for each in _jobs(data)]


def _jobs(data: bytes) -> "Iterator[Job | Carried]":
    if len(data) > EXPORT_BYTES:
        raise Misconfigured(f"the export must be at most {EXPORT_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise Misconfigured("the export must be UTF-8") from None
    if text.lstrip().startswith(("[", "{")):
        return _json_jobs(text)
    return _crontab_jobs(text)


def _json_jobs(text: str) -> "Iterator[Job | Carried]":
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Misconfigured(f"the export begins as JSON but is none: {error}") from None
    while isinstance(document, dict):
        document = document.get("data")
    if not isinstance(document, list):
        raise Misconfigured("the export must be an array of tasks, or an answer of the panel with it in `data`")
    for place, entry in enumerate(document, 1):
        command = entry.get("command") if isinstance(entry, dict) else None
        if not isinstance(command, str) or not command.strip():
            yield _left(place, "", "it is no task with a command")
            continue
        yield Job(
            place=place,
            number=str(entry.get("id") or place),
            name=str(entry.get("name") or ""),
            schedules=[str(entry.get("schedule") or ""), *_extra(entry.get("extra_schedules"))],
            command=command.strip(),
            is_disabled=entry.get("isDisabled") == 1,
            before=str(entry.get("task_before") or ""),
            after=str(entry.get("task_after") or ""),
        )


def _extra(schedules: Any) -> list[str]:
    entries = schedules if isinstance(schedules, list) else []
    return [str(each.get("schedule") or "") for each in entries if isinstance(each, dict)]


def _crontab_jobs(text: str) -> "Iterator[Job | Carried]":
    for place, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.match(line.strip())
        if match is None:
            reason = "a comment" if line.lstrip().startswith("#") else "no line of a panel: schedule, ID=number, command"
            yield _left(place, "", f"it is {reason}")
            continue
        # The panel also writes `# ` in front of lines of six fields, because cron does not know them.
        is_off = match["off"] is not None and len(match["schedule"].split()) == 5
        yield Job(
            place=place,
            number=match["id"],
            name="",
            schedules=[match["schedule"]],
            command=match["command"],
            is_disabled=is_off,
        )


def _carried(job: Job, target: Target, taken: set[str]) -> Carried:
    task_id = _task_id(job, taken)
    notes = []
    program = job.command.split()[0].rpartition("/")[2]
    if program in _PANEL_PROGRAMS:
        notes.append(f"`{program}` is a program of the panel: put what it runs on the worker and call that")
    if job.before or job.after:
        notes.append("its commands before and after were put around it")
    shell = "\n".join(part for part in (job.before, job.command, job.after) if part)
    triggers = []
    for number, schedule in enumerate(job.schedules, 1):
        try:
            triggers.append(
                TriggerDefinition(
                    name="panel" if number == 1 else f"panel-{number}",
                    cron=" ".join(schedule.split()),
                    timezone=target.timezone,
                    enabled=not job.is_disabled,
                )
            )
        except ValueError as error:
            notes.append(f"without a trigger: {error}")
    try:
        definition = TaskDefinition(
            project=target.project, id=task_id, command=Command(shell=shell), worker=target.worker, triggers=triggers
        )
    except ValueError as error:
        return _left(job.place, job.name or task_id, str(error))
    taken.add(task_id)
    return Carried(
        place=job.place,
        name=job.name or task_id,
        verdict="look at it" if notes else "carried over",
        notes=notes,
        definition=definition,
    )


def _task_id(job: Job, taken: set[str]) -> str:
    """The name where it can be an id, else the panel's number."""
    wanted = _NOT_IN_ID.sub("-", job.name).strip("-.")[:100]
    if not wanted or not wanted[0].isalnum():
        wanted = f"qinglong-{job.number}"
    return wanted if wanted not in taken else f"{wanted}-{job.number}-{job.place}"


def _left(place: int, name: str, reason: str) -> Carried:
    return Carried(place=place, name=name, verdict="left", notes=[reason])
