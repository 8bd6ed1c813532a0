"""The only process that reads the authority's key while a control plane serves: it signs one thing and ends.

It reads one JSON document on standard input and writes one on standard output; a reason it refuses goes to standard error. So
neither the key nor the library that uses it is ever in the memory of the process that talks to the network. Source:
control-plane.md §15.3.
"""

import sys
from pathlib import Path
from typing import Literal

import msgspec

from ..domain.errors import QlworkerError
from .pki import read_identity, revocation_list, sign_request


class SigningOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be signed: a worker's request, or the list of what was revoked."""

    kind: Literal["worker", "revocations"]
    certificate: str
    key: str
    worker_id: str = ""
    request: str = ""
    days: int = 1
    serials: list[str] = []


class SignedAnswer(msgspec.Struct, frozen=True):
    """The signed PEM; of a certificate also its serial number and end."""

    pem: str
    serial: str = ""
    not_after_ms: int = 0


def sign(order: SigningOrder) -> SignedAnswer:
    """Carries out one order. Raises ValueError for a request that is not to be signed, Refused for files that are not there."""
    authority = read_identity(Path(order.certificate), Path(order.key))
    if order.kind == "revocations":
        return SignedAnswer(revocation_list(authority, order.serials, order.days).decode())
    signed = sign_request(authority, order.request.encode(), order.worker_id, order.days)
    return SignedAnswer(signed.certificate.decode(), signed.serial, signed.not_after_ms)


def main() -> int:
    """Returns 0, or 1 with the reason on standard error."""
    try:
        answer = sign(msgspec.json.decode(sys.stdin.buffer.read(), type=SigningOrder))
    except (ValueError, msgspec.MsgspecError, QlworkerError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
