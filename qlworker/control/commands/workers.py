"""`qlcontrol worker add|list|rotate|revoke`."""

import argparse
from pathlib import Path

from ...domain.text import check_worker_id
from ..operator_api import DAY_S, AddWorker, IssuedToken, Revoked, RevokeWorker, RotateWorker, Status, WorkerView
from ..terminal import columns, moment, pairs, show, show_json
from .options import Subparsers, add_config, add_json, operator, settings


def register(subparsers: Subparsers) -> None:
    """Adds the group."""
    group = subparsers.add_parser("worker", help="add, list, rotate and revoke workers").add_subparsers(
        metavar="COMMAND", required=True
    )
    add = group.add_parser("add", help="write a kit for a new worker: certificate, key, token, settings")
    add.add_argument("id", metavar="ID")
    add.add_argument("--out", type=Path, required=True, metavar="DIR", help="the kit's new directory")
    add.add_argument("--installed", type=Path, metavar="DIR", help="where the kit will lie on the worker (default: --out)")
    add.add_argument("--state", type=Path, metavar="DIR", help="the worker's state directory (default: state in the kit)")
    add.add_argument("--days", type=_days, default=365, help="validity of certificate and token, 1 to 3650 (default 365)")
    add_config(add)
    add.set_defaults(run=_add)

    listing = group.add_parser("list", help="show all workers")
    add_config(listing)
    add_json(listing)
    listing.set_defaults(run=_list)

    rotate = group.add_parser("rotate", help="give a worker a new token; the old one goes on for a while")
    rotate.add_argument("id", metavar="ID")
    rotate.add_argument("--out", type=Path, required=True, metavar="DIR", help="the kit whose token file is replaced")
    rotate.add_argument("--days", type=_days, default=365, help="validity of the new token, 1 to 3650 (default 365)")
    rotate.add_argument("--overlap", type=_seconds, default=DAY_S, metavar="SECONDS", help="default 86400")
    add_config(rotate)
    rotate.set_defaults(run=_rotate)

    revoke = group.add_parser("revoke", help="end every token of a worker at once")
    revoke.add_argument("id", metavar="ID")
    add_config(revoke)
    revoke.set_defaults(run=_revoke)


def _add(arguments: argparse.Namespace) -> int:
    from ..kit import KitPlace, require_no_kit, sign_worker, write_kit

    check_worker_id(arguments.id)
    out = arguments.out.absolute()
    installed = (arguments.installed or out).absolute()
    place = KitPlace(out=out, installed=installed, state=(arguments.state or installed / "state").absolute())
    require_no_kit(place)
    with operator(arguments) as server:
        origin = server.call(Status, "GET", "/status").origin
        identity, ca = sign_worker(settings(arguments).authority, arguments.id, arguments.days)
        request = AddWorker(worker_id=arguments.id, lifetime_s=arguments.days * DAY_S)
        issued = server.call(IssuedToken, "POST", "/workers", request)
    write_kit(place, arguments.id, origin, identity, ca, issued.token)
    _tell(issued, str(out), f"qlworker run --config {installed / 'qlworker.toml'}")
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    from ..kit import replace_token
    from ..private_files import require_private

    check_worker_id(arguments.id)
    out = arguments.out.absolute()
    require_private(out, directory=True)
    with operator(arguments) as server:
        request = RotateWorker(worker_id=arguments.id, lifetime_s=arguments.days * DAY_S, overlap_s=arguments.overlap)
        issued = server.call(IssuedToken, "POST", "/workers/rotate", request)
    replace_token(out, issued.token)
    _tell(issued, str(out), f"the old token ends in {arguments.overlap} s")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        revoked = server.call(Revoked, "POST", "/workers/revoke", RevokeWorker(worker_id=arguments.id)).revoked
    show(f"{arguments.id}: {revoked} {'token' if revoked == 1 else 'tokens'} revoked")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        workers = server.call(list[WorkerView], "GET", "/workers")
    if arguments.json:
        show_json(workers)
        return 0
    header = ("worker", "session", "free", "last heard", "tokens", "token ends")
    rows = [
        (
            each.worker_id,
            each.session,
            "" if each.available_slots is None else f"{each.available_slots} of {each.max_concurrent_runs}",
            moment(each.last_heartbeat_at_ms),
            str(each.credentials),
            moment(each.credential_expires_at_ms),
        )
        for each in workers
    ]
    for line in columns(header, rows):
        show(line)
    return 0


def _tell(issued: IssuedToken, kit: str, following: str) -> None:
    items = [
        ("worker", issued.worker_id),
        ("kit", kit),
        ("credential", issued.credential_id),
        ("valid until", moment(issued.expires_at_ms)),
        ("next", following),
    ]
    for line in pairs(items):
        show(line)


def _days(text: str) -> int:
    return _bounded(text, 1, 3650)


def _seconds(text: str) -> int:
    return _bounded(text, 0, 3650 * DAY_S)


def _bounded(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be {low} to {high}")
    return int(text)
