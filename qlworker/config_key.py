"""One key of the configuration: its rule, its defaults and the words an error or the manual uses for it."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from .domain.capabilities import check_features, check_labels

REQUIRED: Final = object()
"""The default of a key that has none."""

SAME: Final = object()
"""The node default of a key whose default is the same on both profiles."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key's definition. `check` returns the value to keep or raises ValueError; its text is what must hold.

    `hidden` marks a key whose value may be a secret that was put there by mistake: no error shows it.
    """

    meaning: str
    allowed: str
    check: Callable[[Any], Any]
    unit: str = ""
    edge: Any = REQUIRED
    node: Any = SAME
    hidden: bool = False

    def default(self, profile: str) -> Any:
        """The default on `profile`, or REQUIRED."""
        return self.edge if profile == "edge" or self.node is SAME else self.node


def integer(
    minimum: int, maximum: int, unit: str, meaning: str, *, edge: Any, node: Any = SAME, upper: str | None = None
) -> Key:
    """A whole number of `minimum`..`maximum`. `upper` describes a maximum that depends on another key."""
    allowed = f"{minimum} to {upper or maximum}"

    def check(value: Any) -> int:
        # bool is an int in Python, and TOML's 15.0 is no whole number
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(f"must be {allowed} {unit}".rstrip())
        return value

    return Key(meaning=meaning, allowed=allowed, check=check, unit=unit, edge=edge, node=node)


def choice(*values: str, meaning: str, default: str | None = None) -> Key:
    """One of `values`, by default the first."""
    allowed = ", ".join(f'"{value}"' for value in values)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"must be one of {allowed}")
        return value

    return Key(meaning=meaning, allowed=allowed, check=check, edge=default or values[0])


def flag(meaning: str, *, default: bool) -> Key:
    """true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")  # noqa: TRY004 - one kind of error for a wrong value
        return value

    return Key(meaning=meaning, allowed="true, false", check=check, edge=default)


def path(meaning: str, *, default: Any = REQUIRED, root: bool = False, hidden: bool = False) -> Key:
    """An absolute, normalised path; `root` says whether it may be `/`."""
    allowed = "an absolute path without `.`, `..` or doubled slashes" + ("" if root else ", not `/`")

    def check(value: Any) -> Path:
        must = "must be " + allowed.replace("`", "")
        if not isinstance(value, str) or not value.startswith("/") or "\x00" in value:
            raise ValueError(must)
        parts = value.split("/")[1:]
        if value != "/" and any(part in {"", ".", ".."} for part in parts):
            raise ValueError(must)
        if value == "/" and not root:
            raise ValueError(must)
        return Path(value)

    return Key(meaning=meaning, allowed=allowed, check=check, edge=default, hidden=hidden)


def text(rule: Callable[[str], str], meaning: str, *, allowed: str, default: Any = REQUIRED, hidden: bool = False) -> Key:
    """Text that `rule` accepts or refuses with a ValueError."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be {allowed}")  # noqa: TRY004 - one kind of error for a wrong value
        try:
            return rule(value)
        except ValueError as error:
            raise ValueError(f"must be {allowed}") from error

    return Key(meaning=meaning, allowed=allowed, check=check, edge=default, hidden=hidden)


def labels(meaning: str) -> Key:
    """A table of labels (wire-protocol §2.2)."""

    def check(value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise ValueError('must be a table of texts, like { site = "home" }')
        try:
            check_labels(value)
        except ValueError as error:
            raise ValueError(f"not allowed: {error}") from error
        return dict(value)

    allowed = "at most 32; key 1 to 128 of `[A-Za-z0-9._/-]`, value 1 to 256 characters"
    return Key(meaning=meaning, allowed=allowed, check=check, edge={})


def features(meaning: str) -> Key:
    """A list of feature names (wire-protocol §2.2)."""

    def check(value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError('must be a list of names, like ["camera"]')
        try:
            check_features(value)
        except ValueError as error:
            raise ValueError(f"not allowed: {error}") from error
        return list(value)

    return Key(meaning=meaning, allowed="at most 32 names of 1 to 64 `[a-z0-9._+-]`", check=check, edge=[])


def check_origin(value: str) -> str:
    """`https://host[:port]` in lower case. No user info, path, query or fragment; at most 2048 bytes (wire-protocol §1.2)."""
    parts = urlsplit(value)
    host, port = parts.hostname, parts.port  # a bad port raises ValueError
    if (
        parts.scheme != "https"
        or not host
        or port == 0
        or len(value) > 2048
        or not value.isascii()
        or not value.isprintable()
        or " " in value
        or "@" in parts.netloc
        or "?" in value
        or "#" in value
        or parts.path not in {"", "/"}
    ):
        raise ValueError("not an origin")
    name = f"[{host}]" if ":" in host else host
    return f"https://{name}" if port is None else f"https://{name}:{port}"


def check_search_path(value: str) -> str:
    """Absolute directories with colons between them: a relative one would run what stands in the working directory."""
    entries = value.split(":")
    if "\x00" in value or not all(PurePosixPath(entry).is_absolute() for entry in entries) or len(value) > 4096:
        raise ValueError("not a search path")
    return value
