"""`qlcontrol run start|list|show|cancel|retry|logs|events`."""

import argparse
import sys

from ...domain.errors import Transient
from ..operator_api import AttemptView, Cancelled, EventView, RunDetail, RunView, Started, StartRun
from ..operator_client import Operator
from ..terminal import complain, duration, moment, show, show_columns, show_json, show_pairs
from .options import Subparsers, add_config, add_json, operator, task_name

FAILED = 1


def register(subparsers: Subparsers) -> None:
    """Adds the group."""
    group = subparsers.add_parser("run", help="start, follow, cancel and show runs").add_subparsers(
        metavar="COMMAND", required=True
    )
    start = group.add_parser("start", help="queue a run of a task")
    start.add_argument("task", type=task_name, metavar="PROJECT/TASK")
    start.add_argument("--follow", action="store_true", help="show its output and exit with its exit code")
    start.add_argument("--priority", type=int, default=0, metavar="N", help="higher goes first (default 0)")
    start.add_argument("--key", metavar="KEY", help="idempotency key: the run it named before is returned")
    start.add_argument("--revision", type=int, metavar="N", help="an older revision (default: the newest)")
    add_config(start)
    add_json(start)
    start.set_defaults(run=_start)

    listing = group.add_parser("list", help="show runs, newest first")
    listing.add_argument("--project", metavar="PROJECT")
    listing.add_argument("--task", metavar="TASK")
    listing.add_argument("--limit", type=int, default=20, metavar="N", help="1 to 500 (default 20)")
    add_config(listing)
    add_json(listing)
    listing.set_defaults(run=_list)

    for name, run, text in (
        ("show", _show, "show one run with its attempts"),
        ("cancel", _cancel, "ask for the end of a run"),
        ("retry", _retry, "queue a run that is over once more, as a new run"),
        ("events", _events, "show a run's history"),
    ):
        parser = group.add_parser(name, help=text)
        parser.add_argument("id", metavar="RUN")
        add_config(parser)
        add_json(parser)
        parser.set_defaults(run=run)

    logs = group.add_parser("logs", help="show a run's output")
    logs.add_argument("id", metavar="RUN")
    logs.add_argument("--follow", action="store_true", help="go on until the run is over")
    add_config(logs)
    logs.set_defaults(run=_logs)


def _start(arguments: argparse.Namespace) -> int:
    project, task = arguments.task
    request = StartRun(
        project=project,
        task=task,
        revision=arguments.revision,
        priority=arguments.priority,
        idempotency_key=arguments.key,
    )
    with operator(arguments) as server:
        started = server.call(Started, "POST", "/runs", request)
        if arguments.follow:
            # Standard output belongs to the task's output.
            complain(f"run {started.run_id}")
            return _follow(server, started.run_id)
    if arguments.json:
        show_json(started)
    else:
        show(started.run_id)
    return 0


def _follow(server: Operator, run_id: str) -> int:
    """Copies the output until the run is over and returns the task's exit code, or 1 when it has none."""
    _copy(server, run_id, follow=True)
    detail = server.call(RunDetail, "GET", f"/runs/{run_id}")
    if not detail.run.is_over:
        raise Transient("the control plane stopped while the run went on; follow it again with qlcontrol run logs --follow")
    run = detail.run
    exit_code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    took = duration(run.started_at_ms, run.finished_at_ms)
    reason = f", {run.error_code}" if run.error_code else ""
    complain(f"run {run_id} {run.status}{exit_code}{', after ' + took if took else ''}{reason}")
    if run.status == "succeeded":
        return 0
    return run.exit_code or FAILED


def _copy(server: Operator, run_id: str, *, follow: bool) -> None:
    for chunk in server.stream(f"/runs/{run_id}/log", follow=1 if follow else None):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _logs(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        _copy(server, arguments.id, follow=arguments.follow)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        runs = server.call(list[RunView], "GET", "/runs", limit=arguments.limit, project=arguments.project, task=arguments.task)
    if arguments.json:
        show_json(runs)
        return 0
    header = ("run", "task", "rev", "status", "exit", "started", "took", "worker")
    rows = [
        (
            each.id,
            f"{each.project}/{each.task}",
            str(each.revision),
            each.status,
            "" if each.exit_code is None else str(each.exit_code),
            moment(each.started_at_ms),
            duration(each.started_at_ms, each.finished_at_ms),
            each.worker_id or "",
        )
        for each in runs
    ]
    show_columns(header, rows)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        detail = server.call(RunDetail, "GET", f"/runs/{arguments.id}")
    if arguments.json:
        show_json(detail)
        return 0
    run = detail.run
    items = [
        ("run", run.id),
        ("task", f"{run.project}/{run.task} revision {run.revision}"),
        ("status", run.status),
        ("priority", str(run.priority) if run.priority else ""),
        ("created", moment(run.created_at_ms)),
        ("started", moment(run.started_at_ms)),
        ("finished", moment(run.finished_at_ms)),
        ("took", duration(run.started_at_ms, run.finished_at_ms)),
        ("cancel", f"{run.cancel_reason}, {moment(run.cancel_requested_at_ms)}" if run.cancel_reason else ""),
        ("error", run.error_code or ""),
    ]
    show_pairs(items)
    for attempt in detail.attempts:
        show("")
        show_pairs(_attempt(attempt))
    return 0


def _attempt(attempt: AttemptView) -> list[tuple[str, str]]:
    log = attempt.artifact
    cut = {True: ", cut", False: "", None: ", not known whether cut"}
    return [
        ("attempt", f"{attempt.attempt}, {attempt.status}"),
        ("worker", attempt.worker_id or ""),
        ("deadline", moment(attempt.deadline_at_ms)),
        ("exit code", "" if attempt.exit_code is None else str(attempt.exit_code)),
        ("log", "" if log is None else f"{log.byte_length} bytes, sha256 {log.sha256}{cut[log.truncated]}"),
        ("error", attempt.error_code or ""),
    ]


def _cancel(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        cancelled = server.call(Cancelled, "POST", f"/runs/{arguments.id}/cancel")
    if arguments.json:
        show_json(cancelled)
    else:
        show(f"{arguments.id}  {cancelled.result.replace('_', ' ')}, now {cancelled.status}")
    return FAILED if cancelled.result == "already_terminal" and cancelled.status != "cancelled" else 0


def _retry(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        started = server.call(Started, "POST", f"/runs/{arguments.id}/retry")
    if arguments.json:
        show_json(started)
    else:
        show(started.run_id)
    return 0


def _events(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        events = server.call(list[EventView], "GET", f"/runs/{arguments.id}/events")
    if arguments.json:
        show_json(events)
        return 0
    header = ("no", "at", "event", "by", "payload")
    rows = [
        (
            str(each.sequence),
            moment(each.created_at_ms),
            each.type,
            each.actor_type + (f" {each.actor_id}" if each.actor_id else ""),
            bytes(each.payload).decode().removeprefix("{").removesuffix("}"),
        )
        for each in events
    ]
    show_columns(header, rows)
    return 0
