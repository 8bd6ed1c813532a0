"""The steps between versions of the tables, on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from qlworker.control.database import Database
from qlworker.control.migrations import HEAD, configuration
from qlworker.control.schema import metadata
from qlworker.domain.errors import Refused


@pytest.fixture(params=["sqlite", "postgresql"])
def database(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty one."""
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path / 'control.sqlite'}")
    else:
        database = Database(request.getfixturevalue("postgres_server").new_database())
    yield database
    database.close()


def test_the_steps_lead_to_the_tables_of_this_program(database: Database) -> None:
    database.upgrade()
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        constraints = {
            constraint["name"] for table in metadata.tables for constraint in inspect(connection).get_check_constraints(table)
        }
        wanted = {
            str(each.name)
            for table in metadata.tables.values()
            for each in table.constraints
            if each.__visit_name__ in ("check_constraint", "table_or_column_check_constraint")
        }
        assert wanted
        assert wanted <= constraints
        assert ScriptDirectory.from_config(configuration(connection)).get_heads() == [HEAD]


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(database: Database) -> None:
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO projects VALUES ('kept')"))
    database.upgrade()
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM projects")).scalar_one() == "kept"


def test_tables_of_somebody_else_are_refused_and_left_alone(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE theirs (id INTEGER)"))
    with pytest.raises(Refused, match="name an empty one"):
        database.upgrade()
    with database.engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["theirs"]


def test_tables_of_a_newer_program_are_refused(database: Database) -> None:
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Refused, match="of a newer qlcontrol"):
        database.upgrade()
