"""What Alembic runs to carry out steps: on the connection it is given, inside the transaction that is open there."""

from alembic import context

from qlworker.control.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    compare_type=True,
    # SQLite cannot change a column in place: its table is made anew.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
