"""The private certificate authority."""

import datetime
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qlworker.control.pki import Identity, issue_server, issue_worker, new_authority


@pytest.fixture(scope="module")
def authority() -> Identity:
    return new_authority("home CA")


def parsed(identity: Identity) -> x509.Certificate:
    return x509.load_pem_x509_certificate(identity.certificate)


def test_an_authority_is_a_p256_ca_that_signs_itself(authority: Identity) -> None:
    certificate = parsed(authority)
    certificate.verify_directly_issued_by(certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert constraints.critical and constraints.value.ca
    assert usage.critical and usage.value.key_cert_sign and usage.value.crl_sign and not usage.value.digital_signature
    assert certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    key = load_pem_private_key(authority.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1"
    assert authority.key.startswith(b"-----BEGIN PRIVATE KEY-----")


def test_a_worker_certificate_has_exactly_the_critical_extensions_of_the_contract(authority: Identity) -> None:
    worker = parsed(issue_worker(authority, "edge-1"))
    worker.verify_directly_issued_by(parsed(authority))
    assert worker.subject == x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edge-1")])
    critical = {type(extension.value): extension.value for extension in worker.extensions if extension.critical}
    assert set(critical) == {x509.BasicConstraints, x509.ExtendedKeyUsage, x509.KeyUsage}
    assert critical[x509.BasicConstraints] == x509.BasicConstraints(ca=False, path_length=None)
    assert critical[x509.ExtendedKeyUsage] == x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    usage = critical[x509.KeyUsage]
    assert isinstance(usage, x509.KeyUsage) and usage.digital_signature and not usage.key_cert_sign


def test_a_server_certificate_names_hosts_and_addresses(authority: Identity) -> None:
    server = parsed(issue_server(authority, ["control.lan", "127.0.0.1", "::1"]))
    server.verify_directly_issued_by(parsed(authority))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["control.lan"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_a_router_whose_clock_lags_half_an_hour_already_accepts_a_new_certificate(authority: Identity) -> None:
    lagging = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=30)
    for identity in (authority, issue_worker(authority, "edge-1"), issue_server(authority, ["localhost"])):
        assert parsed(identity).not_valid_before_utc < lagging


def test_no_certificate_outlives_its_authority() -> None:
    short = new_authority("short", days=2)
    assert parsed(issue_worker(short, "edge-1", days=90)).not_valid_after_utc == parsed(short).not_valid_after_utc


def test_openssl_accepts_certificate_and_key_as_a_pair(authority: Identity, tmp_path: Path) -> None:
    path = tmp_path / "pair.pem"
    worker = issue_worker(authority, "edge-1")
    path.write_bytes(worker.certificate + worker.key)
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path)


def test_bad_input_is_refused_with_the_rule(authority: Identity) -> None:
    with pytest.raises(ValueError, match="workerId must be"):
        issue_worker(authority, "../edge")
    with pytest.raises(ValueError, match="at most 64"):
        issue_worker(authority, "e" * 65)
    with pytest.raises(ValueError, match="at least one"):
        issue_server(authority, [])
    with pytest.raises(ValueError, match="at least one day"):
        issue_worker(authority, "edge-1", days=0)
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        new_authority("")
    with pytest.raises(ValueError, match="does not belong"):
        issue_worker(Identity(authority.certificate, new_authority("other").key), "edge-1")


def test_a_repr_shows_no_key(authority: Identity) -> None:
    assert b"PRIVATE" not in repr(authority).encode() and authority.key[40:60].decode() not in repr(authority)


def test_importing_the_module_does_not_load_cryptography() -> None:
    code = "import sys, qlworker.control.pki; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
