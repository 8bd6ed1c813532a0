"""`qlworker enroll`: spends an invitation of `qlcontrol worker add` and makes this box a worker. Its key never leaves it."""

import argparse
import json
import sys
import time
from pathlib import Path

from ..domain.errors import Misconfigured
from .options import Commands, add_json

INVITATION_BYTES = 256


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("enroll", help="become a worker, with an invitation", description=__doc__)
    parser.add_argument("--id", required=True, metavar="ID", help="the worker id that was invited")
    parser.add_argument("--control-plane", required=True, metavar="ORIGIN", help="https://host:port of the enrolment listener")
    parser.add_argument(
        "--token-file",
        default="-",
        metavar="FILE",
        help="a file of mode 0600 with the invitation, or - for standard input (default). Never an argument: others see those",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("/etc/qlworker"),
        metavar="DIR",
        help="where certificate, token and configuration go (default: %(default)s)",
    )
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="what survives a reboot goes there (default: state in --directory)"
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Enrols and says what to do next. Running it again after an interruption goes on with it."""
    import resource

    from ..adapters.enrolment import Enrolment, enrol

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    directory = options.directory.absolute()
    wanted = Enrolment(
        worker_id=options.id,
        origin=options.control_plane,
        directory=directory,
        state=(options.state or directory / "state").absolute(),
    )
    enrolled = enrol(wanted, _invitation(options.token_file))
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(enrolled.expires_at_ms / 1000))
    if options.json:
        print(
            json.dumps(
                {
                    "worker": enrolled.worker_id,
                    "configuration": str(enrolled.settings),
                    "configurationWritten": enrolled.wrote_settings,
                    "validUntil": until,
                }
            )
        )
        return 0
    print(f"enrolled {enrolled.worker_id}, valid until {until}")
    if not enrolled.wrote_settings:
        print(f"{enrolled.settings} was there and stays as it is: see that it names the files in {directory}")
    print(f"next: qlworker check --config {enrolled.settings}, then qlworker run --config {enrolled.settings}")
    return 0


def _invitation(source: str) -> str:
    if source != "-":
        from ..adapters import durable

        try:
            content = durable.read_private(Path(source), INVITATION_BYTES)
        except FileNotFoundError:
            raise Misconfigured(f"{source} does not exist: write the invitation to it, mode 0600") from None
    elif sys.stdin.isatty():
        import getpass

        content = getpass.getpass("invitation: ").encode()
    else:
        content = sys.stdin.buffer.read(INVITATION_BYTES + 1)
    return content.decode("ascii", "replace").strip()
