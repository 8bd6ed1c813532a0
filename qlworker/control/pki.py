"""The small private certificate authority of a control plane: one CA, server certificates, worker certificates.

Every key is ECDSA P-256 as PKCS#8 PEM without a passphrase; whoever stores one keeps the file private. `cryptography` is
imported inside the functions: it costs a process 8 to 17 MiB that a steady one does not need (design.md §3).
Source: wire-protocol.md §1.1, §9.1, §9.2.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..domain.text import check_text, check_worker_id
from .private_files import read_pem

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS: Final = 3650
SERVER_DAYS: Final = 825
WORKER_DAYS: Final = 90
REVOCATION_DAYS: Final = 30

# A router without a battery-backed clock may lag behind the box that signed its certificate.
_CLOCK_LAG: Final = datetime.timedelta(hours=1)


class Identity(msgspec.Struct, frozen=True):
    """A certificate and its private key, both PEM. The key never shows in a repr."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"<Identity certificate of {len(self.certificate)} bytes>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("certificate_bytes", len(self.certificate))]


def read_identity(certificate: Path, key: Path) -> Identity:
    """The authority that two private files hold. Blocks. Raises Refused when one is missing or open to others."""
    return Identity(certificate=read_pem(certificate), key=read_pem(key))


class Certified(msgspec.Struct, frozen=True):
    """A certificate (PEM), its serial number in lower-case hexadecimal, and its end in UTC milliseconds."""

    certificate: bytes
    serial: str
    not_after_ms: int


def new_authority(common_name: str, days: int = AUTHORITY_DAYS) -> Identity:
    """A self-signed CA. Raises ValueError for a name that is not 1 to 64 bytes, or for `days` below 1."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    check_text(common_name, "the authority's name", minimum=1, maximum=64)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(common_name)
    builder = (
        _builder(key.public_key(), name, days)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return _sign(builder, key, key)


def issue_server(authority: Identity, names: list[str], days: int = SERVER_DAYS) -> Identity:
    """A server certificate for `names`, each a DNS name or an IP literal; the first one is its subject as well.

    Raises ValueError when `names` is empty or one of them cannot stand in a certificate.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if not names:
        raise ValueError("a server certificate needs at least one DNS name or IP address")
    # A common name holds 64 characters at most, a DNS name up to 253; clients look at the alternative names only.
    subject = names[0] if len(names[0]) <= 64 else "control-plane"
    return _issue(
        authority,
        subject,
        days,
        ExtendedKeyUsageOID.SERVER_AUTH,
        x509.SubjectAlternativeName([_alternative_name(name) for name in names]),
    )


def issue_worker(authority: Identity, worker_id: str, days: int = WORKER_DAYS) -> Identity:
    """A client certificate whose subject is `CN=<worker id>` (wire-protocol §9.1).

    Raises ValueError for a worker id that is not one, or above 64 characters: a common name holds no more.
    """
    from cryptography.x509.oid import ExtendedKeyUsageOID

    check_worker_subject(worker_id)
    return _issue(authority, worker_id, days, ExtendedKeyUsageOID.CLIENT_AUTH, None)


def sign_request(authority: Identity, request: bytes, worker_id: str, days: int = WORKER_DAYS) -> Certified:
    """A client certificate for the key of a PKCS#10 request (PEM) whose subject is `CN=<worker id>` and nothing else.

    The key must be ECDSA P-256 and have signed the request; extensions of the request are not copied. Raises ValueError.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    check_worker_subject(worker_id)
    try:
        wanted = x509.load_pem_x509_csr(request)
        key = wanted.public_key()
        is_signed = wanted.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        raise ValueError("the certificate request must be PKCS#10 in PEM") from None
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the certificate request must be signed by its own ECDSA P-256 key")
    if wanted.subject != _name(worker_id):
        raise ValueError(f"the certificate request must have the subject CN={worker_id} and nothing else")
    issuer, issuer_key = _issuer(authority)
    certificate = _leaf(issuer, key, worker_id, days, ExtendedKeyUsageOID.CLIENT_AUTH, None).sign(issuer_key, _hash())
    return certified(certificate.public_bytes(Encoding.PEM))


def revocation_list(authority: Identity, serials: list[str], days: int = REVOCATION_DAYS) -> bytes:
    """A signed list (PEM) of the certificates with these serial numbers, hexadecimal; good for `days`. Raises ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    issuer, issuer_key = _issuer(authority)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(now - _CLOCK_LAG)
        .next_update(now + datetime.timedelta(days=days))
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(now - _CLOCK_LAG).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(issuer_key, _hash()).public_bytes(Encoding.PEM)


def certified(certificate: bytes) -> Certified:
    """What stands in the first certificate of a PEM text. Raises ValueError."""
    from cryptography import x509

    loaded = x509.load_pem_x509_certificate(certificate)
    return Certified(certificate, f"{loaded.serial_number:x}", int(loaded.not_valid_after_utc.timestamp() * 1000))


def check_worker_subject(worker_id: str) -> str:
    """A worker id that fits into a certificate. Raises ValueError for one that is none, or above 64 characters."""
    check_worker_id(worker_id)
    if len(worker_id) > 64:
        raise ValueError("workerId must be at most 64 characters to be the subject of a certificate")
    return worker_id


def _issuer(authority: Identity) -> "tuple[x509.Certificate, ec.EllipticCurvePrivateKey]":
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey) or issuer_key.public_key() != issuer.public_key():
        raise ValueError("the authority's key does not belong to its certificate")
    return issuer, issuer_key


def _leaf(
    issuer: "x509.Certificate",
    key: "ec.EllipticCurvePublicKey",
    subject: str,
    days: int,
    usage: "x509.ObjectIdentifier",
    alternative_names: "x509.SubjectAlternativeName | None",
) -> "x509.CertificateBuilder":
    from cryptography import x509

    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(key, _name(subject), days, issuer.not_valid_after_utc)
        .issuer_name(issuer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return builder if alternative_names is None else builder.add_extension(alternative_names, critical=False)


def _hash() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _issue(
    authority: Identity,
    subject: str,
    days: int,
    usage: "x509.ObjectIdentifier",
    alternative_names: "x509.SubjectAlternativeName | None",
) -> Identity:
    from cryptography.hazmat.primitives.asymmetric import ec

    issuer, issuer_key = _issuer(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    return _sign(_leaf(issuer, key.public_key(), subject, days, usage, alternative_names), key, issuer_key)


def _builder(
    key: "ec.EllipticCurvePublicKey", subject: "x509.Name", days: int, latest: datetime.datetime | None = None
) -> "x509.CertificateBuilder":
    """Everything but the issuer and the extensions; never valid beyond `latest`, where a chain would break anyway."""
    from cryptography import x509

    if days < 1:
        raise ValueError("a certificate must be valid for at least one day")
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_LAG)
        .not_valid_after(end if latest is None else min(end, latest))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _sign(
    builder: "x509.CertificateBuilder", key: "ec.EllipticCurvePrivateKey", issuer_key: "ec.EllipticCurvePrivateKey"
) -> Identity:
    from cryptography.hazmat.primitives import serialization

    return Identity(
        certificate=builder.sign(issuer_key, _hash()).public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _name(common_name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        check_text(name, "a server name", minimum=1, maximum=253)
        return x509.DNSName(name)
