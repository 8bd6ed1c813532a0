"""The HTTP side of the worker ingress: its origin and paths, and what the status and the headers of an answer mean.

Source: wire-protocol.md §0.4, §1.2, §1.4, §1.8.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from ..domain.errors import Fenced, Malformed, Misconfigured, QlworkerError, Transient, Unauthorized, Unsupported
from ..domain.text import check_session_id, check_worker_id
from . import codec

OPERATIONS: Final = frozenset(
    operation.name
    for operation in (
        codec.REGISTER,
        codec.HEARTBEAT,
        codec.TRANSITION,
        codec.OFFERS,
        codec.STARTING,
        codec.RUNNING,
        codec.START_FAILURE,
        codec.SECRETS_V2,
        codec.LEASE_CONTROL,
        codec.COMPLETION,
        codec.OUTPUT,
        codec.CERTIFICATE,
    )
)
"""What a JSON call may name; `artifacts` is reached by the streaming call alone (wire-protocol §1.2)."""
UPLOAD: Final = codec.ARTIFACTS.name
PREFIX: Final = "/api/v3/worker-ingress/workers/"
MAXIMUM_ORIGIN_BYTES: Final = 2048
MAXIMUM_RETRY_AFTER_S: Final = 600

_ORIGIN: Final = re.compile(
    r"https://(?:\[(?P<v6>[0-9a-f:.]+)\]|[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?)(?::(?P<port>[0-9]{1,5}))?/?\Z",
    re.IGNORECASE | re.ASCII,
)
_ERROR_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_REFUSALS: Final[dict[int, type[QlworkerError]]] = {
    400: Malformed,
    401: Unauthorized,
    403: Unauthorized,
    404: Unsupported,
    409: Fenced,
    413: Malformed,
    415: Malformed,
}


class _ErrorBody(msgspec.Struct):
    code: str


def checked_origin(text: str) -> str:
    """`https://host[:port]`, without the final slash it may have; at most 2048 bytes. Raises Misconfigured otherwise."""
    match = _ORIGIN.match(text) if len(text) <= MAXIMUM_ORIGIN_BYTES else None
    if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535) or not _is_ipv6(match["v6"]):
        # Not quoted: somebody may have put a password into it.
        raise Misconfigured(
            "the control plane's origin must be https://host[:port] without user, path, query and fragment; correct it"
        )
    return text.rstrip("/")


def ingress_path(worker_id: str, session_id: str, operation: str) -> str:
    """The path of one operation. Raises ValueError for an id that is not one or an operation that does not exist."""
    if operation not in OPERATIONS and operation != UPLOAD:
        raise ValueError(f"internal error: {operation!r} is not an operation of the worker ingress")
    return f"{PREFIX}{check_worker_id(worker_id)}/sessions/{check_session_id(session_id)}/{operation}"


def form_problem(headers: Mapping[str, str], limit: int) -> str | None:
    """Which rule the headers of a 200 answer break, to follow "the answer", or None. Names in `headers` are found without
    regard to case; `limit` is the most bytes the body may have."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "must be application/json; is something else answering, such as a captive portal?"
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        return "must not be compressed"
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) <= 16 and int(length) <= limit):
        return f"must be at most {limit} bytes"
    return None


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> QlworkerError:
    """The error that a status other than 200 stands for. Of the body only a well-formed code gets into its text."""
    if 300 <= status < 400:
        return Transient(f"redirect refused (status {status}); the origin must be the control plane's own")
    text = f"the control plane answered {status}"
    try:
        code = msgspec.json.decode(body, type=_ErrorBody).code
    except (msgspec.DecodeError, UnicodeDecodeError):
        code = ""
    if _ERROR_CODE.match(code):
        text += f" {code}"
    if status in _REFUSALS:
        return _REFUSALS[status](text)
    wait = headers.get("retry-after", "").strip()
    is_seconds = wait.isascii() and wait.isdigit() and len(wait) <= 10
    return Transient(text, retry_after_s=float(min(int(wait), MAXIMUM_RETRY_AFTER_S)) if is_seconds else None)


def _is_ipv6(text: str | None) -> bool:
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
