"""`qlworker run`: the worker itself."""

import argparse

from .options import Commands, add_config, load_settings


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("run", help="run the worker until SIGTERM", description=__doc__)
    add_config(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Runs until the worker ends and returns its exit code."""
    settings = load_settings(options)
    from ..app import run

    return run(settings)
