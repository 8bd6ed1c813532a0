"""Options that several commands share, and what they mean."""

import argparse
from pathlib import Path
from typing import TypeAlias

from ..config import Settings
from ..config_file import default_config, load
from ..operator_client import Operator

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_config(parser: argparse.ArgumentParser) -> None:
    """`--config FILE`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the settings (default: $QLCONTROL_CONFIG or /etc/qlcontrol)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def settings(arguments: argparse.Namespace) -> Settings:
    """The settings the command line names."""
    return load(arguments.config or default_config())


def operator(arguments: argparse.Namespace) -> Operator:
    """A client of the server the command line names."""
    return Operator(settings(arguments).operator.socket)


def task_name(text: str) -> tuple[str, str]:
    """`PROJECT/TASK` as its two parts; the task's id may hold further slashes."""
    project, slash, task = text.partition("/")
    if not (project and slash and task):
        raise argparse.ArgumentTypeError("must be PROJECT/TASK")
    return project, task
