"""Makes a worker's key and the request to certify it, in a process of its own: `python -m qlworker.certificate_request ID`.

So the library for it is never in the memory of a steady worker. It uses `cryptography` where that is installed and the program
`openssl` elsewhere, which gets the key through pipes only. Standard output: the key (PKCS#8), then the request (PKCS#10), both
PEM. Source: control-plane.md §15.1.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence

OPENSSL_S = 60
"""How long `openssl` may take: a slow router needs seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes both for the worker id that is the only argument. Returns 1 with the reason on standard error."""
    (worker_id,) = sys.argv[1:] if arguments is None else arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        key, request = make(worker_id)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{_reason(error)}\n")
        return 1
    sys.stdout.buffer.write(key + request)
    return 0


def make(worker_id: str) -> tuple[bytes, bytes]:
    """A new ECDSA P-256 key and a request with the subject `CN=<worker_id>`.

    Raises OSError when there is neither the library nor the program, SubprocessError when the program fails.
    """
    try:
        import cryptography.x509  # noqa: F401 - only whether it is there
    except ImportError:
        return make_with_openssl(worker_id)
    return make_with_library(worker_id)


def make_with_library(worker_id: str) -> tuple[bytes, bytes]:
    """`make` with `cryptography`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, worker_id)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        request.public_bytes(Encoding.PEM),
    )


def make_with_openssl(worker_id: str) -> tuple[bytes, bytes]:
    """`make` with the program `openssl`."""
    key = _openssl(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"], b"")
    # A small router has the program without its configuration file, and `req` does not go without one.
    reading, writing = os.pipe()
    try:
        os.write(writing, b"[req]\ndistinguished_name=name\n[name]\n")
        os.close(writing)
        options = ["req", "-new", "-sha256", "-config", f"/dev/fd/{reading}", "-key", "/dev/stdin", "-subj", f"/CN={worker_id}"]
        request = _openssl(options, key, reading)
    finally:
        os.close(reading)
    return key, request


def _openssl(arguments: list[str], stdin: bytes, *descriptors: int) -> bytes:
    done = subprocess.run(
        ["openssl", *arguments], input=stdin, capture_output=True, check=True, timeout=OPENSSL_S, pass_fds=descriptors
    )
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "neither the Python package cryptography nor the program openssl is installed: install one of them"
    if isinstance(error, subprocess.CalledProcessError):
        return f"openssl {error.cmd[1]} ended with {error.returncode}"
    return f"cannot make a key: {type(error).__name__}"


if __name__ == "__main__":
    sys.exit(main())
