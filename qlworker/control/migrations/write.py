"""Writes the next step: `python -m qlworker.control.migrations.write 0002 "what it adds"`, from the root of the project."""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.script import ScriptDirectory

from ..engine import parse_url, sqlite_engine
from . import configuration


def main(number: str, name: str) -> None:
    """Compares the tables after the last step with `schema` and writes the difference."""
    with tempfile.TemporaryDirectory() as place:
        engine = sqlite_engine(parse_url(f"sqlite:///{Path(place) / 'empty.sqlite'}"))
        with engine.begin() as connection:
            config = configuration(connection)
            if ScriptDirectory.from_config(config).get_heads():
                command.upgrade(config, "head")
            command.revision(config, name, autogenerate=True, rev_id=number)
        engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
