"""`qlworker config-table`: the table of all configuration keys, as it stands in the README."""

import argparse
from pathlib import Path
from typing import Any

from .options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("config-table", help="print every configuration key as a table", description=__doc__)
    parser.set_defaults(execute=execute)


def execute(_options: argparse.Namespace) -> int:
    """Prints the table."""
    print(table())
    return 0


def table() -> str:
    """Every key with unit, defaults, range and meaning, as Markdown. Made from the definitions, so it cannot drift."""
    from ..config import SECTIONS, keys

    rows = ["| Key | Default (edge / node) | Allowed | Meaning |", "| --- | --- | --- | --- |"]
    for section in SECTIONS:
        for name, key in keys(section).items():
            edge, node = _shown(key.default("edge")), _shown(key.default("node"))
            default = edge if edge == node else f"{edge} / {node}"
            allowed = f"{key.allowed} {key.unit}".rstrip()
            rows.append(f"| `{section}.{name}` | {default} | {allowed} | {key.meaning} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    from ..config_key import REQUIRED

    if value is REQUIRED:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if value == {}:
        return "none"
    return f"`{value}`" if value != [] else "none"
