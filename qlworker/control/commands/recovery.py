"""`qlcontrol recovery list|stopped`."""

import argparse

from ..operator_api import RecoveryView, RunDetail
from ..terminal import moment, show, show_columns, show_json
from .options import Subparsers, add_config, add_json, operator


def register(subparsers: Subparsers) -> None:
    """Adds the group."""
    group = subparsers.add_parser("recovery", help="runs whose worker is gone and of which nobody knows").add_subparsers(
        metavar="COMMAND", required=True
    )
    listing = group.add_parser("list", help="show the runs that wait for evidence, or for you")
    listing.add_argument("--limit", type=int, default=100, metavar="N", help="1 to 1000 (default 100)")
    add_config(listing)
    add_json(listing)
    listing.set_defaults(run=_list)
    stopped = group.add_parser(
        "stopped",
        help="say that you looked: this run's process is gone",
        description="Makes the run lost, on your word that its process has stopped. What its task says about retries comes "
        "next, so look at the box first: a process that still runs would run beside its successor.",
    )
    stopped.add_argument("id", metavar="RUN")
    add_config(stopped)
    add_json(stopped)
    stopped.set_defaults(run=_stopped)


def _list(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        found = server.call(list[RecoveryView], "GET", "/recoveries", limit=arguments.limit)
    if arguments.json:
        show_json(found)
        return 0
    header = ("run", "worker", "waits for", "because", "looked at", "last look")
    rows = [
        (
            each.run_id,
            each.worker_id or "",
            "you" if each.status == "manual" else "evidence",
            each.reason.replace("_", " "),
            f"{each.looks} times",
            moment(each.updated_at_ms),
        )
        for each in found
    ]
    show_columns(header, rows)
    return 0


def _stopped(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        detail = server.call(RunDetail, "POST", f"/runs/{arguments.id}/stopped")
    if arguments.json:
        show_json(detail)
    else:
        show(f"{arguments.id}  now {detail.run.status}")
    return 0
