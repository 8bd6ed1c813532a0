"""The statements that every request uses, built once: building one costs several times what executing it does.

A table, the names of the columns it is looked up by, and the names of those that change make a statement; values come with each
execution. What is asked seldom, or in another form, is built where it is asked.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Insert, Select, Table, Update, and_, bindparam, insert, select, update

_WHERE = "where_"
_SET = "set_"


@cache
def select_by(table: Table, where: tuple[str, ...]) -> Select[Any]:
    """Whole rows of `table` whose columns `where` have the values that come with the execution."""
    return select(table).where(_condition(table, where))


@cache
def insert_into(table: Table) -> Insert:
    """A row of `table`; the values that come with the execution tell which columns it has."""
    return insert(table)


@cache
def update_by(table: Table, where: tuple[str, ...], changed: tuple[str, ...]) -> Update:
    """The columns `changed` of the rows of `table` whose columns `where` have the values that come with the execution."""
    return update(table).where(_condition(table, where)).values({name: bindparam(_SET + name) for name in changed})


def looked_up(where: Mapping[str, Any]) -> dict[str, Any]:
    """Values to look up by, as an execution of `select_by` or `update_by` takes them."""
    return {_WHERE + name: value for name, value in where.items()}


def changed_to(values: Mapping[str, Any]) -> dict[str, Any]:
    """New values, as an execution of `update_by` takes them."""
    return {_SET + name: value for name, value in values.items()}


def _condition(table: Table, where: tuple[str, ...]) -> ColumnElement[bool]:
    return and_(*(table.c[name] == bindparam(_WHERE + name) for name in where))
