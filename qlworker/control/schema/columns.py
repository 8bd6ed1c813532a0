"""The metadata that every table belongs to, and the few kinds of column they are made of.

Portable types only, so that they fit SQLite and PostgreSQL. Times are UTC milliseconds, statuses lower-case text.
"""

from typing import Any

from sqlalchemy import BigInteger, Column, MetaData, String

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_by_%(column_0_N_name)s",
        "uq": "%(table_name)s_have_one_%(column_0_N_name)s",
        "ck": "%(constraint_name)s",
        "fk": "%(table_name)s_belong_by_%(column_0_N_name)s",
        "pk": "%(table_name)s_key",
    }
)


def text(name: str, length: int, **options: Any) -> "Column[str]":
    """A text that is always there, at most `length` characters."""
    return Column(name, String(length), nullable=False, **options)


def optional(name: str, length: int) -> "Column[str]":
    """A text that may be missing."""
    return Column(name, String(length), nullable=True)


def number(name: str) -> "Column[int]":
    """A number of 64 bits that is always there."""
    return Column(name, BigInteger, nullable=False)


def optional_number(name: str) -> "Column[int]":
    """A number of 64 bits that may be missing."""
    return Column(name, BigInteger, nullable=True)
