"""The steps from one shape of the tables to the next, for SQLite and PostgreSQL alike.

A step is written by `python -m qlworker.control.migrations.write NUMBER NAME` out of the difference between the last step and
`schema`, then read and corrected by hand; a test compares both ends on both databases.
"""

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from ...domain.errors import Refused
from ..locks import advisory_key

HEAD: Final = "0001"
"""The step this program needs."""


def upgrade(engine: Engine) -> None:
    """Carries out the missing steps in one transaction; replicas that start together wait for one another.

    Raises Refused for tables of a newer program, or for tables that no step made.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": advisory_key("scan", "migrations")})
        config = configuration(connection)
        present = MigrationContext.configure(connection).get_current_revision()
        if present == HEAD:
            return
        if present is None and set(inspect(connection).get_table_names()) - {"alembic_version"}:
            raise Refused("cannot use this database: it holds tables that no version of qlcontrol made; name an empty one")
        if present is not None and present not in {
            step.revision for step in ScriptDirectory.from_config(config).walk_revisions()
        }:
            raise Refused(f"cannot use this database: its tables are of a newer qlcontrol (step {present}); install that one")
        command.upgrade(config, HEAD)


def configuration(connection: Connection) -> Config:
    """Alembic's settings for one open connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config
