"""The base of every structure that is stored or sent: frozen, exact members, camel-case names."""

from typing import Any

import msgspec

from .canonical import js_json


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Exact members: a missing or an extra one is refused (wire-protocol §0.2). UNSET members are absent, never null.

    The order of a class's fields is the canonical order of its members.
    """

    def to_json(self) -> bytes:
        """This document as js-json."""
        return js_json(self)

    def members(self) -> dict[str, Any]:
        """This document as a dictionary in canonical order, absent members left out."""
        members: dict[str, Any] = msgspec.to_builtins(self)
        return members
