"""qlcontrol.toml: where it is, how it is read, and what is said about a mistake in it."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from ..domain.errors import Misconfigured
from .config import CONFIG_NAME, Settings

CONFIG_VARIABLE: Final = "QLCONTROL_CONFIG"
SYSTEM_CONFIG: Final = Path("/etc/qlcontrol") / CONFIG_NAME
CONFIG_BYTES: Final = 64 * 1024

_CHOICES: Final = {
    "dialect.capabilities": 'it must be "later" or "baseline"',
    "dialect.secrets": 'it must be "v2" or "v1"',
    "maintenance.profile": 'it must be "standalone" or "edge"',
    "runs.on_lease_expiry": 'it must be "lost" or "evidence"',
}
_AT: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`\Z")


def default_config() -> Path:
    """Where commands look for the file when no `--config` names it: `QLCONTROL_CONFIG`, else /etc/qlcontrol."""
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(named) if named else SYSTEM_CONFIG


def load(path: Path) -> Settings:
    """The settings in the file `path`.

    Raises Misconfigured with the file, the key, its value and what is allowed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {error.strerror}; name the file with --config") from error
    if len(data) > CONFIG_BYTES:
        raise Misconfigured(f"cannot use {path}: it is longer than {CONFIG_BYTES} bytes")
    try:
        raw = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Misconfigured(f"cannot use {path}: it is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"cannot use {path}: it is not TOML: {error}") from error
    try:
        settings = msgspec.convert(raw, Settings, dec_hook=_decode_path)
        return settings.rooted_at(path.absolute().parent)
    except ValueError as error:
        raise Misconfigured(f"cannot use {path}: {_explain(str(error), raw)}") from error


def _decode_path(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(kind)
    if not isinstance(value, str) or not value or "\x00" in value:
        raise ValueError("a path must be a text that is not empty")
    return Path(value)


def _explain(text: str, raw: dict[str, Any]) -> str:
    """msgspec's text with the key in front and the value behind it, in the words of a TOML file."""
    found = _AT.search(text)
    if found is None:
        return (text[:1].lower() + text[1:]).replace("object ", "the file ", 1)
    reason, path = text[: found.start()], found["path"]
    value: Any = raw
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    reason = (reason[:1].lower() + reason[1:]).replace("`object`", "a table").replace("object ", "the table ")
    if reason.startswith("the table"):
        return f"in [{path}]: {reason}"
    if isinstance(value, dict):
        return reason  # a bound's own text names key, value and range
    if path == "storage.database":
        return f"{path}: {reason}"  # a URL may hold a password
    return f"{path} is {value!r}: {_CHOICES.get(path, reason)}"
