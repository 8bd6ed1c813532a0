"""`qlcontrol init` and `qlcontrol serve`."""

import argparse
from pathlib import Path

from ..terminal import show_pairs
from .options import Subparsers, add_config, settings


def register(subparsers: Subparsers) -> None:
    """Adds both commands."""
    init = subparsers.add_parser("init", help="make a new installation: authority, server certificate, settings")
    init.add_argument("--data", type=Path, required=True, metavar="DIR", help="the new installation's directory")
    init.add_argument(
        "--name", action="append", required=True, metavar="HOST", help="name or address workers use; repeat for several"
    )
    init.add_argument("--listen", type=_address, default=("0.0.0.0", 5801), metavar="HOST:PORT", help="default 0.0.0.0:5801")  # noqa: S104
    init.set_defaults(run=_init)
    serve = subparsers.add_parser("serve", help="run the control plane until SIGTERM")
    add_config(serve)
    serve.set_defaults(run=_serve)


def _init(arguments: argparse.Namespace) -> int:
    from ..installation import initialise

    host, port = arguments.listen
    config = initialise(arguments.data, arguments.name, host, port)
    show_pairs([("settings", str(config)), ("next", f"qlcontrol serve --config {config}")])
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from ..serve import run

    run(settings(arguments))
    return 0


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise argparse.ArgumentTypeError("must be HOST:PORT with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)
