"""How a box becomes a worker: an extension beside the contract's twelve operations.

The contract has no enrolment (wire-protocol.md §9.1); the form of requests and certificates is its own. An invitation is a line
that carries whom to trust: the digest of the authority's certificate, so that a box knows its control plane before it tells it
anything.
"""

import re
from typing import Final, Literal

import msgspec

from ..domain.canonical import b64u, from_b64u
from ..domain.document import Document
from ..domain.text import check_integer, check_text, check_worker_id
from .certificate import check_pem

ENROLMENT_SCHEMA: Final = "qlworker/enrolment@v1"
AUTHORITY_SCHEMA: Final = "qlworker/enrolment-authority@v1"
ENROLMENT_PATH: Final = "/api/v3/enrolment"
AUTHORITY_PATH: Final = "/api/v3/enrolment/authority"

ENROLMENT_BYTES: Final = 32 * 1024
SECRET_BYTES: Final = 32

_INVITATION: Final = re.compile(r"ql3e_(?P<id>[0-9a-f-]{36})_(?P<secret>[A-Za-z0-9_-]{43})_(?P<pin>[0-9a-f]{64})\Z")


class Invitation(msgspec.Struct, frozen=True):
    """`ql3e_<token id>_<43 characters>_<SHA-256 of the authority's certificate, DER>`. Its text is a secret."""

    token_id: str
    secret: bytes
    authority_sha256: str

    def __repr__(self) -> str:
        return f"<Invitation {self.token_id}>"

    def text(self) -> str:
        """The line an operator hands over."""
        return f"ql3e_{self.token_id}_{b64u(self.secret)}_{self.authority_sha256}"

    @classmethod
    def parse(cls, text: str) -> "Invitation":
        """The invitation in `text`. Raises ValueError that quotes nothing of it."""
        match = _INVITATION.match(text)
        if match is None:
            raise ValueError("an invitation must be the one line that qlcontrol worker add printed, ql3e_ to its end")
        return cls(match["id"], from_b64u(match["secret"]), match["pin"])


class AuthorityResponse(Document, frozen=True, kw_only=True):
    """The authority's certificate, to be compared with the digest in the invitation before anything else is believed."""

    schema: Literal["qlworker/enrolment-authority@v1"]
    certificate: str

    def __post_init__(self) -> None:
        check_pem(self.certificate, "certificate")


class EnrolmentRequest(Document, frozen=True, kw_only=True):
    """Spends an invitation. `certificate_request` is PKCS#10 in PEM with the worker's id as its subject."""

    schema: Literal["qlworker/enrolment@v1"]
    invitation: str
    certificate_request: str

    def __repr__(self) -> str:
        return "<EnrolmentRequest>"

    def __post_init__(self) -> None:
        check_text(self.invitation, "invitation", minimum=1, maximum=256)
        check_pem(self.certificate_request, "certificateRequest")


class EnrolmentResponse(Document, frozen=True, kw_only=True):
    """What the box needs to be this worker. The token is told this one time."""

    schema: Literal["qlworker/enrolment@v1"]
    worker_id: str
    origin: str
    certificate: str
    token: str
    expires_at_ms: int

    def __repr__(self) -> str:
        return f"<EnrolmentResponse {self.worker_id}>"

    def __post_init__(self) -> None:
        check_worker_id(self.worker_id)
        check_text(self.origin, "origin", minimum=1, maximum=2048)
        check_pem(self.certificate, "certificate")
        check_text(self.token, "token", minimum=1, maximum=256)
        check_integer(self.expires_at_ms, "expiresAtMs")
