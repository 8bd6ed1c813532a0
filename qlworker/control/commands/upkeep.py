"""`qlcontrol audit|backup|restore`: what an operator of months needs."""

import argparse
from pathlib import Path

from ..operator_api import AuditView
from ..terminal import moment, show_columns, show_json, show_pairs
from .options import Subparsers, add_config, add_json, operator, settings


def register(subparsers: Subparsers) -> None:
    """Adds the commands."""
    audit = subparsers.add_parser("audit", help="show who was allowed or refused what, newest first")
    audit.add_argument("--worker", metavar="ID", help="only what is about this worker")
    audit.add_argument("--refused", action="store_true", help="only what was not proven")
    audit.add_argument("--limit", type=int, default=50, metavar="N", help="1 to 1000 (default 50)")
    audit.add_argument("--before", metavar="EVENT", help="go on behind this row of an earlier answer")
    add_config(audit)
    add_json(audit)
    audit.set_defaults(run=_audit)

    backup = subparsers.add_parser(
        "backup",
        help="copy the SQLite database while the control plane serves",
        description="Writes a consistent copy of the database to a new private file. The pepper, the authority, secrets and "
        "logs are files beside it: copy those as well. For PostgreSQL use its own tools.",
    )
    backup.add_argument("--out", type=Path, required=True, metavar="FILE", help="the new file")
    add_config(backup)
    backup.set_defaults(run=_backup)

    restore = subparsers.add_parser(
        "restore",
        help="put a copy in the place of the SQLite database, while no control plane serves",
        description="Nobody knows what became of runs that were not over in the copy: they end as cancelled, so that none is "
        "carried out twice. The present database is kept beside it. Tokens that were revoked since the copy are valid again.",
    )
    restore.add_argument("file", type=Path, metavar="FILE", help="what `qlcontrol backup` wrote")
    add_config(restore)
    restore.set_defaults(run=_restore)


def _audit(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        rows = server.call(
            list[AuditView],
            "GET",
            "/audit",
            limit=arguments.limit,
            before=arguments.before,
            subject=arguments.worker,
            outcome="authentication_rejected" if arguments.refused else None,
        )
    if arguments.json:
        show_json(rows)
        return 0
    show_columns(
        ("when", "what", "worker", "outcome", "because", "event"),
        [
            (
                moment(each.occurred_at_ms),
                each.operation,
                each.subject or "",
                each.outcome.replace("_", " "),
                each.reasons,
                each.event_id,
            )
            for each in rows
        ],
    )
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    from ..backup import copy_database

    made = copy_database(settings(arguments).database_url, arguments.out.absolute())
    show_pairs([("backup", str(made.path)), ("bytes", str(made.size)), ("runs", str(made.runs))])
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    from ..backup import restore_database

    restored = restore_database(settings(arguments).database_url, arguments.file.absolute())
    show_pairs(
        [
            ("restored", str(restored.path)),
            ("state of", moment(restored.made_at_ms)),
            ("former database", str(restored.former or "")),
            ("runs ended", f"{restored.ended}, of which nobody knows what became since then"),
            ("next", "revoke again what was revoked since then; start qlcontrol serve"),
        ]
    )
    return 0
