"""How a worker gets its next certificate: an extension beside the contract's twelve operations.

The contract has no renewal (wire-protocol.md §9.1); the form of request and answer is its own.
"""

from typing import Final, Literal

from ..domain.document import Document
from ..domain.text import check_digest, check_integer, check_text

CERTIFICATE_SCHEMA: Final = "qlworker/worker-certificate@v1"
PEM_BYTES: Final = 16 * 1024


class CertificateRequest(Document, frozen=True, kw_only=True):
    """Asks for the next certificate, with the credential and the present certificate as authority."""

    schema: Literal["qlworker/worker-certificate@v1"]
    certificate_request: str

    def __post_init__(self) -> None:
        check_pem(self.certificate_request, "certificateRequest")


class CertificateResponse(Document, frozen=True, kw_only=True):
    """The next certificate. The present one stays good until it ends."""

    schema: Literal["qlworker/worker-certificate@v1"]
    serial: str
    certificate: str
    not_after_ms: int

    def __post_init__(self) -> None:
        check_digest(self.serial.rjust(64, "0"), "serial")
        check_pem(self.certificate, "certificate")
        check_integer(self.not_after_ms, "notAfterMs")


def check_pem(text: str, name: str) -> str:
    """PEM of at most PEM_BYTES without a private key. Raises ValueError that quotes nothing of it."""
    check_text(text, name, minimum=1, maximum=PEM_BYTES, controls=True)
    if not text.startswith("-----BEGIN ") or "PRIVATE KEY" in text:
        raise ValueError(f"{name} must be PEM and hold no private key")
    return text
