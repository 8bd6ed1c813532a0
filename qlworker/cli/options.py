"""Options that several commands have."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import Settings

Commands = Any
"""What argparse's add_subparsers returns; its type is private."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """`--config FILE`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=Path("/etc/qlworker/qlworker.toml"),
        help="configuration file (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def load_settings(options: argparse.Namespace) -> "Settings":
    """The settings of `--config`. Raises Misconfigured."""
    from ..config import load

    return load(options.config)
