"""Identifiers of runs, attempts and events: UUID version 7, so that they sort by creation (control-plane.md §1)."""

from ..domain.text import new_session_id


def new_id(now_ms: int) -> str:
    """A lower-case UUID version 7 of 36 characters whose time part is `now_ms`."""
    return new_session_id(now_ms)
