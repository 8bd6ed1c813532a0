"""`qlworker version`: this program's version and what it runs on."""

import argparse
import json
import os
import sys

from .. import __version__
from .options import Commands, add_json


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("version", help="print the version", description=__doc__)
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints it. Loads no dependency."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    system = os.uname()
    if options.json:
        print(json.dumps({"version": __version__, "python": python, "machine": system.machine, "kernel": system.release}))
    else:
        print(f"qlworker {__version__} (python {python}, linux {system.release}, {system.machine})")
    return 0
