"""Decoding of bodies with one kind of refusal, and the limits of every operation."""

from typing import Any, Final, TypeVar

import msgspec

from ..domain.errors import Refused

KIB: Final = 1024

T = TypeVar("T")


class Operation(msgspec.Struct, frozen=True):
    """One operation of the worker ingress. `name` is its last path segment; the caps are bytes (wire-protocol §0.4)."""

    name: str
    request_limit: int
    response_limit: int


REGISTER: Final = Operation("register", 20 * KIB, 4 * KIB)
HEARTBEAT: Final = Operation("heartbeat", 4 * KIB, 4 * KIB)
TRANSITION: Final = Operation("transition", 4 * KIB, 4 * KIB)
OFFERS: Final = Operation("offers", 4 * KIB, 128 * KIB)
STARTING: Final = Operation("starting", 4 * KIB, 16 * KIB)
RUNNING: Final = Operation("running", 4 * KIB, 16 * KIB)
START_FAILURE: Final = Operation("start-failure", 4 * KIB, 16 * KIB)
SECRETS_V1: Final = Operation("secrets", 64 * KIB, 128 * KIB)
SECRETS_V2: Final = Operation("secrets", 64 * KIB, 256 * KIB)
LEASE_CONTROL: Final = Operation("lease-control", 8 * KIB, 4 * KIB)
ARTIFACTS: Final = Operation("artifacts", 64 * KIB * KIB + 4 * KIB + 4, 4 * KIB)
COMPLETION: Final = Operation("completion", 16 * KIB, 4 * KIB)
OUTPUT: Final = Operation("output", 64 * KIB, 4 * KIB)
"""An extension beside the twelve: a live view of output, best effort, never part of an outcome."""
CERTIFICATE: Final = Operation("certificate", 32 * KIB, 64 * KIB)
"""The other extension: the worker's next certificate."""


def decode(body: bytes | bytearray, kind: type[T] | Any) -> T:
    """The document of `kind` in `body`.

    Raises Refused when it is not one: wrong form, missing or extra members, a bound broken. The text names the member and
    the rule, never the value.
    """
    try:
        document: T = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Refused(f"cannot read the document: {_without_value(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Refused("cannot read the document: it is not JSON in UTF-8") from None
    return document


def _without_value(text: str) -> str:
    """msgspec quotes an unexpected enumeration value; it may be anything, so it is left out."""
    if text.startswith("Invalid value") and " - at " in text:
        return "Invalid value - at " + text.rsplit(" - at ", 1)[1]
    return text
