"""`qlcontrol worker add|list|rotate|revoke`."""

import argparse
from pathlib import Path

from ...domain.text import check_worker_id
from ..operator_api import (
    DAY_S,
    AddWorker,
    Invitation,
    InviteWorker,
    IssuedToken,
    PublishCredential,
    Revoked,
    RevokeWorker,
    RotateWorker,
    Status,
    WorkerView,
)
from ..terminal import moment, show, show_columns, show_json, show_pairs
from .options import Subparsers, add_config, add_json, operator, settings


def register(subparsers: Subparsers) -> None:
    """Adds the group."""
    group = subparsers.add_parser("worker", help="add, list, rotate and revoke workers").add_subparsers(
        metavar="COMMAND", required=True
    )
    add = group.add_parser(
        "add",
        help="invite a box to become a worker, or write a kit for it",
        description="Prints an invitation that a box spends with `qlworker enroll`: its key stays there. With --out, writes "
        "a kit to carry over instead: certificate, key, token and settings.",
    )
    add.add_argument("id", metavar="ID")
    add.add_argument("--valid", type=_hours, default=24, metavar="HOURS", help="how long the invitation is good (default 24)")
    add.add_argument("--out", type=Path, metavar="DIR", help="write a kit to this new directory instead")
    add.add_argument("--installed", type=Path, metavar="DIR", help="where the kit will lie on the worker (default: --out)")
    add.add_argument("--state", type=Path, metavar="DIR", help="the worker's state directory (default: state in the kit)")
    add.add_argument(
        "--days", type=_days, default=365, help="validity of the token and a kit's certificate, 1 to 3650 (default 365)"
    )
    add_config(add)
    add_json(add)
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

    revoke = group.add_parser("revoke", help="end every token, certificate and invitation of a worker at once")
    revoke.add_argument("id", metavar="ID")
    add_config(revoke)
    revoke.set_defaults(run=_revoke)


def _add(arguments: argparse.Namespace) -> int:
    check_worker_id(arguments.id)
    return _invite(arguments) if arguments.out is None else _write_kit(arguments)


def _invite(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        request = InviteWorker(
            worker_id=arguments.id, lifetime_s=arguments.valid * 3600, credential_lifetime_s=arguments.days * DAY_S
        )
        invited = server.call(Invitation, "POST", "/workers/invite", request)
    if arguments.json:
        show_json(invited)
        return 0
    items = [
        ("worker", invited.worker_id),
        ("invitation", invited.invitation),
        ("valid until", moment(invited.expires_at_ms)),
        ("next", f"on the box, within that time: qlworker enroll --id {invited.worker_id} --control-plane {invited.origin}"),
    ]
    show_pairs(items)
    return 0


def _write_kit(arguments: argparse.Namespace) -> int:
    from ..kit import KitPlace, require_no_kit, sign_worker, write_kit
    from ..pki import certified

    out = arguments.out.absolute()
    installed = (arguments.installed or out).absolute()
    place = KitPlace(out=out, installed=installed, state=(arguments.state or installed / "state").absolute())
    require_no_kit(place)
    with operator(arguments) as server:
        origin = server.call(Status, "GET", "/status").origin
        identity, ca = sign_worker(settings(arguments).authority, arguments.id, arguments.days)
        signed = certified(identity.certificate)
        request = AddWorker(
            worker_id=arguments.id,
            lifetime_s=arguments.days * DAY_S,
            serial=signed.serial,
            not_after_ms=signed.not_after_ms,
        )
        issued = server.call(IssuedToken, "POST", "/workers", request)
    write_kit(place, arguments.id, origin, identity, ca, _token(issued))
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
        replace_token(out, _token(issued))
        # Only now: a token that nobody can have yet must not begin to end the old one.
        server.call(PublishCredential, "POST", "/workers/published", PublishCredential(credential_id=issued.credential_id))
    _tell(issued, str(out), f"the old token ends when the worker uses the new one, or in {arguments.overlap} s")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        revoked = server.call(Revoked, "POST", "/workers/revoke", RevokeWorker(worker_id=arguments.id))
    counts = (
        (revoked.revoked, "token"),
        (revoked.certificates, "certificate"),
        (revoked.invitations, "invitation"),
    )
    show(f"{arguments.id}: revoked " + ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts))
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
    show_columns(header, rows)
    return 0


def _tell(issued: IssuedToken, kit: str, following: str) -> None:
    items = [
        ("worker", issued.worker_id),
        ("kit", kit),
        ("credential", issued.credential_id),
        ("valid until", moment(issued.expires_at_ms)),
        ("next", following),
    ]
    show_pairs(items)


def _token(issued: IssuedToken) -> str:
    assert issued.token is not None, "without a mutation id a token is always told"
    return issued.token


def _hours(text: str) -> int:
    return _bounded(text, 1, 24 * 30)


def _days(text: str) -> int:
    return _bounded(text, 1, 3650)


def _seconds(text: str) -> int:
    return _bounded(text, 0, 3650 * DAY_S)


def _bounded(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be {low} to {high}")
    return int(text)
