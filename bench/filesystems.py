"""What the file systems below some directories can do: `python bench/filesystems.py DIRECTORY...`, one row each, as Markdown.

On a device, name the directory that is to hold the state; docs/filesystems.md collects such rows.
"""

import sys
from pathlib import Path

from qlworker.adapters.durable import Abilities, probe

COLUMNS = ("hard_links", "atomic_rename", "exclusive_directories", "file_locks", "syncs_directories")


def row(abilities: Abilities) -> str:
    """One line of the table."""
    cells = ["yes" if getattr(abilities, column) else "no" for column in COLUMNS]
    verdict = "no" if not abilities.is_supported else "yes" if abilities.syncs_directories else "restart only"
    return f"| {' | '.join([abilities.file_system or 'unknown', *cells, verdict])} |"


def main(directories: list[str]) -> int:
    """Prints the table."""
    if not directories:
        print("name at least one directory", file=sys.stderr)
        return 2
    print(f"| file system | {' | '.join(column.replace('_', ' ') for column in COLUMNS)} | journal may live there |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for directory in directories:
        print(row(probe(Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
