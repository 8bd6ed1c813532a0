"""`qlcontrol apply`, `qlcontrol trigger list` and `qlcontrol import qinglong`: tasks as files, and when they run."""

import argparse
from pathlib import Path

from ...domain.errors import Misconfigured, Refused
from ..operator_api import Applied, TaskChange, TriggerView
from ..operator_operations import ApplyTasks
from ..task_file import TASK_FILE_BYTES, TaskDefinition, parse_task, task_text
from ..terminal import complain, moment, show, show_columns, show_json
from .options import Subparsers, add_config, add_json, operator

FAILED = 1


def register(subparsers: Subparsers) -> None:
    """Adds the commands."""
    apply = subparsers.add_parser(
        "apply",
        help="publish a directory of task files with their triggers, all or none",
        description="Publishes every *.toml below DIR in one step and tells what changed. Triggers that came from this source "
        "before and whose task is gone from DIR are removed. The same again changes nothing.",
    )
    apply.add_argument("directory", type=Path, metavar="DIR")
    apply.add_argument("--plan", action="store_true", help="only show what would change")
    apply.add_argument("--source", metavar="NAME", help="what DIR is called from one time to the next (default: its path)")
    add_config(apply)
    add_json(apply)
    apply.set_defaults(run=_apply)

    trigger = subparsers.add_parser("trigger", help="when tasks run by themselves").add_subparsers(
        metavar="COMMAND", required=True
    )
    listing = trigger.add_parser("list", help="show all triggers, their next time and what they did last")
    add_config(listing)
    add_json(listing)
    listing.set_defaults(run=_list)

    source = subparsers.add_parser("import", help="make task files of another scheduler's").add_subparsers(
        metavar="FORMAT", required=True
    )
    qinglong = source.add_parser(
        "qinglong",
        help="of a QingLong 2.x panel: its crontab.list, or the JSON of its tasks",
        description="Writes one task file per line into the new directory DIR and tells line by line what was carried over. "
        "Look through the files, then `qlcontrol apply DIR`.",
    )
    qinglong.add_argument("file", type=Path, metavar="FILE")
    qinglong.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new directory")
    qinglong.add_argument("--project", default="qinglong", help="the tasks' project (default %(default)s)")
    qinglong.add_argument("--timezone", default="Asia/Shanghai", metavar="ZONE", help="of the cron lines (default %(default)s)")
    qinglong.add_argument("--worker", metavar="ID", help="the only worker that may run them")
    add_json(qinglong)
    qinglong.set_defaults(run=_import_qinglong)


def _apply(arguments: argparse.Namespace) -> int:
    directory = arguments.directory.absolute()
    definitions = _read_all(directory)
    request = ApplyTasks(source=arguments.source or str(directory), tasks=definitions, is_plan=True)
    with operator(arguments) as server:
        applied = server.call(Applied, "POST", "/apply", request)
        if not arguments.plan:
            request = ApplyTasks(source=request.source, tasks=definitions)
            applied = server.call(Applied, "POST", "/apply", request)
    if arguments.json:
        show_json(applied)
        return 0
    lines = [line for each in applied.tasks for line in _changes(each)]
    for line in lines or ["nothing changes"]:
        show(line)
    return 0


def _read_all(directory: Path) -> list[TaskDefinition]:
    """Every task file below `directory`. Raises Misconfigured with every mistake in every file, not only the first."""
    if not directory.is_dir():
        raise Misconfigured(f"cannot apply {directory}: it is not a directory")
    definitions, mistakes = [], []
    for path in sorted(directory.rglob("*.toml")):
        try:
            with path.open("rb") as file:
                definitions.append(parse_task(file.read(TASK_FILE_BYTES + 1), str(path)))
        except OSError as error:
            mistakes.append(f"cannot read {path}: {error.strerror}")
        except Misconfigured as error:
            mistakes.append(str(error))
    if mistakes:
        raise Misconfigured("nothing was applied:\n  " + "\n  ".join(mistakes))
    if not definitions:
        raise Misconfigured(f"nothing was applied: there is no task file (*.toml) below {directory}")
    return definitions


def _changes(task: TaskChange) -> list[str]:
    name = f"{task.project}/{task.id}"
    lines = [] if task.change == "unchanged" else [f"{task.change:9}  {name}  revision {task.revision}"]
    return lines + [f"{each.change:9}  {name}  trigger {each.name}" for each in task.triggers if each.change != "unchanged"]


def _list(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        found = server.call(list[TriggerView], "GET", "/triggers")
    if arguments.json:
        show_json(found)
        return 0
    show_columns(
        ("task", "trigger", "cron", "zone", "next", "last", "outcome", "if running"),
        [
            (
                f"{each.project}/{each.task}",
                each.name,
                each.cron,
                each.timezone,
                moment(each.next_fire_at_ms) if each.enabled else "off",
                moment(each.last_fire_at_ms),
                (each.last_outcome or "").replace("_", " "),
                each.if_running,
            )
            for each in found
        ],
    )
    return 0


def _import_qinglong(arguments: argparse.Namespace) -> int:
    from ..schedule.qinglong import EXPORT_BYTES, Target, carry_over

    try:
        with arguments.file.open("rb") as file:
            data = file.read(EXPORT_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"cannot read {arguments.file}: {error.strerror}") from error
    target = Target(project=arguments.project, timezone=arguments.timezone, worker=arguments.worker)
    carried = carry_over(data, target)
    try:
        arguments.out.mkdir(mode=0o700)
    except OSError as error:
        raise Refused(f"cannot make {arguments.out}: {error.strerror}; name a new directory") from error
    for each in carried:
        if each.definition is not None:
            (arguments.out / f"{each.definition.id}.toml").write_text(task_text(each.definition, each.notes), "utf-8")
    if arguments.json:
        show_json(carried)
    else:
        rows = [(str(each.place), each.verdict, each.name, "; ".join(each.notes)) for each in carried]
        show_columns(("line", "what became of it", "task", "because"), rows)
        count = sum(each.definition is not None for each in carried)
        complain(f"{count} of {len(carried)} carried over; look them through, then: qlcontrol apply {arguments.out}")
    return 0 if any(each.definition is not None for each in carried) else FAILED
