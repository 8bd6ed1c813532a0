"""The canonical forms that digests are taken over: js-json, root collation, and the digests themselves.

Source: wire-protocol.md §0.2, §4.3, §4.7. Checked against the golden vectors.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

_ENCODER: Final = msgspec.json.Encoder()

_PRIMARY: Final = {char: weight for weight, char in enumerate("_-./+0123456789abcdefghijklmnopqrstuvwxyz")}


def js_json(value: Any) -> bytes:
    """`value` as ECMAScript JSON.stringify writes it: no spaces, members in the given order, UTF-8 (wire-protocol §0.2)."""
    return _ENCODER.encode(value)


def collation_key(name: str) -> tuple[list[int], list[bool]]:
    """Sort key of the root collation for the characters `[A-Za-z0-9_./+-]`: letters without case first, then lower before
    upper case. Independent of the host's locale (wire-protocol §13.2, gap 13)."""
    return [_PRIMARY.get(char.lower(), ord(char) + 1000) for char in name], [char.isupper() for char in name]


def utf16_key(name: str) -> bytes:
    """Sort key of UTF-16 code unit order."""
    return name.encode("utf-16-be", "surrogatepass")


def _is_array_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and int(key) < 2**32 - 1


def ordered_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """`labels` in the order an ECMAScript object has after its keys were sorted by root collation: array indexes first."""
    keys = sorted(labels, key=collation_key)
    indexes = sorted((key for key in keys if _is_array_index(key)), key=int)
    return {key: labels[key] for key in [*indexes, *(key for key in keys if not _is_array_index(key))]}


def code_unit_sorted(names: Iterable[str]) -> list[str]:
    """`names` in UTF-16 code unit order."""
    return sorted(names, key=utf16_key)


def b64u(data: bytes) -> str:
    """URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_b64u(text: str) -> bytes:
    """The bytes of canonical URL-safe base64 without padding. Raises ValueError for any other text."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if b64u(data) != text:
        raise ValueError("base64url text must be canonical")
    return data


def sha256_hex(data: bytes) -> str:
    """SHA-256 as 64 lower-case hexadecimal characters."""
    return hashlib.sha256(data).hexdigest()


def lease_token_digest(token: str) -> str:
    """Digest over the token's text, not over its decoded bytes (wire-protocol §4.7)."""
    return sha256_hex(token.encode())


def callback_token_digest(token: bytes | bytearray) -> str:
    """Digest over the 32 raw bytes of a completion capability (wire-protocol §4.7)."""
    if len(token) != 32:
        raise ValueError("a callback token must be exactly 32 bytes")
    return sha256_hex(bytes(token))


def digests_equal(left: str, right: str) -> bool:
    """Constant-time comparison of two hexadecimal digests (R189)."""
    return hmac.compare_digest(left.encode(), right.encode())


def log_artifact_id(project_id: str, run_id: str, attempt_id: str, offer_id: str) -> str:
    """`wlog-` and 30 hexadecimal characters, derived from the four identities (wire-protocol §4.7)."""
    seed = b"qinglong/worker-log-artifact@v1"
    for part in (project_id, run_id, attempt_id, offer_id):
        seed += b"\x00" + part.encode()
    return "wlog-" + sha256_hex(seed)[:30]


def credential_digest(pepper: bytes, credential_id: str, secret: bytes) -> str:
    """How the control plane stores a credential's secret (wire-protocol §1.3). `pepper` and `secret` are 32 bytes each."""
    message = b"qinglong-worker-credential-v1\x00" + credential_id.encode("ascii") + b"\x00" + secret
    return hmac.new(pepper, message, hashlib.sha256).hexdigest()


def pool_key(blobs: Iterable[bytes]) -> str:
    """Identity of TLS material: digest over certificate, key and anchors, each with its 4-byte length (wire-protocol §1.6)."""
    hasher = hashlib.sha256()
    for blob in blobs:
        hasher.update(len(blob).to_bytes(4, "big") + blob)
    return b64u(hasher.digest())
