"""Test certificates, made by the product's own authority, once per test process."""

import base64
import ssl
import tempfile
from datetime import datetime
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qlworker.adapters.credentials import CredentialFiles
from qlworker.control.pki import Identity, issue_server, issue_worker, new_authority
from qlworker.ports import Log

CREDENTIAL_ID = "cred-1"


def authority(name: str = "test CA") -> Identity:
    """The CA of that name; another name is another CA."""
    return _authority(name)


def server_identity(ca: str = "test CA", names: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")) -> Identity:
    """A server certificate of that CA."""
    return _server(ca, names)


def worker_identity(worker_id: str = "edge-1", ca: str = "test CA") -> Identity:
    """A worker's certificate of that CA."""
    return _worker(worker_id, ca)


@cache
def _authority(name: str) -> Identity:
    return new_authority(name)


@cache
def _server(ca: str, names: tuple[str, ...]) -> Identity:
    return issue_server(_authority(ca), list(names))


@cache
def _worker(worker_id: str, ca: str) -> Identity:
    return issue_worker(_authority(ca), worker_id)


def dated_identity(issuer: Identity, worker_id: str, begin: datetime, end: datetime) -> Identity:
    """A worker's certificate of `issuer` that is good from `begin` to `end`."""
    authority_certificate = x509.load_pem_x509_certificate(issuer.certificate)
    authority_key = serialization.load_pem_private_key(issuer.key, None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, worker_id)]))
        .issuer_name(authority_certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    return Identity(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def make_token(credential_id: str = CREDENTIAL_ID, fill: int = 7) -> str:
    """A well-formed token; every `fill` of 0..255 is another secret."""
    return f"ql3w_{credential_id}_{base64.urlsafe_b64encode(bytes([fill]) * 32).decode().rstrip('=')}"


def server_context(ca: str = "test CA", identity: Identity | None = None, *, client_ca: str = "test CA") -> ssl.SSLContext:
    """TLS 1.3 only, a client certificate of `client_ca` required."""
    identity = identity or server_identity(ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority(client_ca).certificate.decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.certificate + identity.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


class Files:
    """A worker's four credential files in a directory, with the modes they need."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.certificate = directory / "worker.crt"
        self.key = directory / "worker.key"
        self.anchors = directory / "ca.crt"
        self.token = directory / "token"

    def write(self, identity: Identity | None = None, *, anchors: bytes | None = None, token: str | None = None) -> "Files":
        """Installs what is given, by atomic renames, and on the first call everything."""
        is_new = not self.token.exists()
        if identity is not None or is_new:
            identity = identity or worker_identity()
            self.put(self.certificate, identity.certificate, 0o644)
            self.put(self.key, identity.key, 0o600)
        if anchors is not None or is_new:
            self.put(self.anchors, anchors or authority().certificate, 0o644)
        if token is not None or is_new:
            self.put(self.token, (token or make_token()).encode() + b"\n", 0o600)
        return self

    @staticmethod
    def put(path: Path, data: bytes, mode: int) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        temporary.chmod(mode)
        temporary.rename(path)

    def credentials(self, *, expected: str | None = None, log: Log | None = None) -> CredentialFiles:
        return CredentialFiles(self.certificate, self.key, self.anchors, self.token, expected_credential_id=expected, log=log)


class Events:
    """A Log that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    warning = error = info

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]
