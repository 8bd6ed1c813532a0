"""Forms of identifiers and text, and the checks for them.

Every check returns its argument or raises ValueError with a text that names the member, never the value: values may be
tokens. msgspec turns a ValueError raised while decoding into its own ValidationError.
"""

import re
import secrets
from typing import Final

SAFE_INTEGER: Final = 2**53 - 1
INT31: Final = 2**31 - 1

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_CREDENTIAL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z")
_LAUNCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,35}\Z")
_OFFER_FILE = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_SESSION_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")
_LEASE_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LOG_ARTIFACT = re.compile(r"wlog-[0-9a-f]{30}\Z")


def utf16_length(value: str) -> int:
    """Length in UTF-16 code units, which is what the contract calls "chars" (wire-protocol §0.2)."""
    return len(value) + sum(char > "\uffff" for char in value)


def _matches(pattern: re.Pattern[str], value: str, name: str, rule: str) -> str:
    if not pattern.match(value):
        raise ValueError(f"{name} must be {rule}")
    return value


def check_worker_id(value: str, name: str = "workerId") -> str:
    """1..128 characters, first alphanumeric, then also `. _ : -`."""
    return _matches(_WORKER_ID, value, name, "1 to 128 of [A-Za-z0-9._:-], starting with a letter or digit")


def check_credential_id(value: str, name: str = "credentialId") -> str:
    """1..64 characters of the same alphabet as a worker id; an underscore ends it inside a token, so none may occur."""
    if "_" in value:
        raise ValueError(f"{name} must not contain an underscore")
    return _matches(_CREDENTIAL_ID, value, name, "1 to 64 of [A-Za-z0-9.:-], starting with a letter or digit")


def check_session_id(value: str, name: str = "sessionId") -> str:
    """A lower-case hyphenated UUID version 7."""
    return _matches(_SESSION_ID, value, name, "a lower-case UUID version 7")


def check_dispatch_id(value: str, name: str, maximum: int = 128) -> str:
    """1..`maximum` UTF-16 units without control characters."""
    if not 1 <= utf16_length(value) <= maximum or _CONTROL.search(value):
        raise ValueError(f"{name} must be 1 to {maximum} characters without control characters")
    return value


def check_launch_id(value: str, name: str) -> str:
    """A run or attempt id that can be launched and name a receipt: 1..36 of `[A-Za-z0-9._:-]`, first alphanumeric."""
    return _matches(_LAUNCH_ID, value, name, "1 to 36 of [A-Za-z0-9._:-], starting with a letter or digit")


def check_offer_id(value: str, name: str = "offerId") -> str:
    """1..128 of `[A-Za-z0-9._:-]`; it names a file, so `.` and `..` are refused too."""
    if value in {".", ".."}:
        raise ValueError(f"{name} must not be a directory name")
    return _matches(_OFFER_FILE, value, name, "1 to 128 of [A-Za-z0-9._:-]")


def check_lease_token(value: str, name: str = "leaseToken") -> str:
    """32..128 characters of the URL-safe base64 alphabet."""
    return _matches(_LEASE_TOKEN, value, name, "32 to 128 of [A-Za-z0-9_-]")


def check_digest(value: str, name: str) -> str:
    """64 lower-case hexadecimal characters."""
    return _matches(_DIGEST, value, name, "64 lower-case hexadecimal characters")


def check_log_artifact_id(value: str, name: str = "logArtifactId") -> str:
    """`wlog-` and 30 lower-case hexadecimal characters."""
    return _matches(_LOG_ARTIFACT, value, name, "wlog- and 30 lower-case hexadecimal characters")


def check_text(value: str, name: str, *, minimum: int = 0, maximum: int, controls: bool = False) -> str:
    """`minimum`..`maximum` UTF-8 bytes, never NUL, and control characters only where `controls` is true."""
    if not minimum <= len(value.encode()) <= maximum:
        raise ValueError(f"{name} must be {minimum} to {maximum} bytes")
    if "\x00" in value or (not controls and _CONTROL.search(value)):
        raise ValueError(f"{name} must not contain {'NUL' if controls else 'control characters'}")
    return value


def check_integer(value: int, name: str, minimum: int = 0, maximum: int = SAFE_INTEGER) -> int:
    """`minimum`..`maximum`, by default a safe integer that is not negative."""
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be {minimum} to {maximum}")
    return value


def new_token() -> str:
    """32 random bytes as URL-safe base64 without padding: 43 characters."""
    return secrets.token_urlsafe(32)


def new_capability() -> bytearray:
    """32 random bytes that prove a receipt genuine, in a buffer that its owner wipes (R133, R396, R397)."""
    return bytearray(secrets.token_bytes(32))


def new_session_id(wall_ms: int) -> str:
    """A UUID version 7 whose time part is `wall_ms`. Uniqueness rests on its 74 random bits, not on the clock."""
    random = secrets.randbits(74)
    value = (wall_ms & (2**48 - 1)) << 80 | 7 << 76 | (random >> 62) << 64 | 2 << 62 | (random & (2**62 - 1))
    digits = f"{value:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
