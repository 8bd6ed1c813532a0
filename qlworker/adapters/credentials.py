"""The worker's credential files: certificate, key, trust anchors and token, checked and loaded as one unit.

They are looked at before every exchange, so that replacing the files rotates the credential without a restart. A set that
breaks a rule never replaces a working one: a worker that sees a rotation half done goes on with what it has (wire-protocol
§1.1, §1.3, §9.5). Validity dates are not judged here: a router without a battery-backed clock boots in the past.
"""

import errno
import os
import re
import ssl
import stat
from pathlib import Path
from typing import Any, Final

import msgspec

from ..domain.canonical import from_b64u, pool_key
from ..domain.errors import Misconfigured
from ..domain.text import check_credential_id
from ..ports import Log

MAXIMUM_BLOB_BYTES: Final = 2**20
MAXIMUM_TOKEN_BYTES: Final = 256
MAXIMUM_ANCHORS: Final = 16

_TOKEN: Final = re.compile(rb"ql3w_([^_]{1,64})_([A-Za-z0-9_-]{43})\n?\Z")
_PRIVATE: Final = 0o077
_UNALTERABLE: Final = 0o022

Signature = tuple[int, int, int, int, int]


class Secret:
    """A text that no repr, no log line and no traceback shows by accident."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one place that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "<secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class Material(msgspec.Struct, frozen=True):
    """One consistent load of all four files. `pool_key` changes with the TLS part only, never with the token."""

    certificate: bytes
    key: bytes
    anchors: bytes
    token: Secret
    credential_id: str
    pool_key: str
    context: ssl.SSLContext

    def __repr__(self) -> str:
        return f"<Material credential={self.credential_id}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("credential_id", self.credential_id)]


class CredentialFiles:
    """The four files, each an absolute, normalised path to a regular file, never a link.

    Token and key: no permission bits for group and others. Certificate and anchors: no write bits for them. Token: 1 to 256
    bytes, exactly one `ql3w_` token with an optional final line feed, in a directory that only its owner may write. The
    others: PEM, 1 byte to 1 MiB. `expected_credential_id` pins the token's credential. `log` hears of rotations.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        anchors: Path,
        token: Path,
        *,
        expected_credential_id: str | None = None,
        log: Log | None = None,
    ) -> None:
        self._certificate = _checked_path(certificate, "certificate")
        self._key = _checked_path(key, "private key")
        self._anchors = _checked_path(anchors, "trust anchor")
        self._token = _checked_path(token, "token")
        self._expected = expected_credential_id
        self._log = log
        self._material: Material | None = None
        self._seen: tuple[Signature | None, ...] = ()
        self._refusal: str | None = None

    def load(self) -> Material:
        """The material to use for the next exchange; costs four stat calls while nothing changes.

        Raises Misconfigured, naming file, rule and remedy, when there is no valid material yet. Later a set that breaks a
        rule is reported once as `credential_swap_refused` and the former one stays in use.
        """
        seen = tuple(_signature(path) for path in (self._certificate, self._key, self._anchors, self._token))
        if self._material is not None and seen == self._seen:
            return self._material
        former = self._material
        try:
            material = self._read(former)
        except Misconfigured as error:
            if former is None:
                raise
            # `_seen` stays: what hindered may be outside the files (a directory's mode, no descriptor left).
            if self._log is not None and self._refusal != str(error):
                self._log.warning("credential_swap_refused", reason=str(error))
            self._refusal = str(error)
            return former
        self._material, self._seen, self._refusal = material, seen, None
        if former is not None and self._log is not None and material != former:
            self._log.info(
                "credential_swapped",
                credential=material.credential_id,
                certificate=material.pool_key != former.pool_key,
                token=material.token != former.token,
            )
        return material

    def _read(self, former: Material | None) -> Material:
        _check_directory(self._token.parent)
        certificate = self._read_certificate()
        key = self._read_key()
        anchors = _read_file(self._anchors, "trust anchor", _UNALTERABLE, MAXIMUM_BLOB_BYTES)
        token = _read_file(self._token, "token", _PRIVATE, MAXIMUM_TOKEN_BYTES)
        credential_id = self._checked_token(token)
        identity = pool_key([certificate, key, anchors])
        # An unchanged TLS part keeps its context, and with it the open connection.
        same = former is not None and former.pool_key == identity
        return Material(
            certificate=certificate,
            key=key,
            anchors=anchors,
            token=Secret(token.decode("ascii").removesuffix("\n")),
            credential_id=credential_id,
            pool_key=identity,
            context=former.context if former is not None and same else self._context(certificate, key, anchors),
        )

    def _checked_token(self, token: bytes) -> str:
        credential_id = _credential_of(token)
        if credential_id is None:
            raise Misconfigured(
                f"token file {self._token} must hold exactly one ql3w_<credentialId>_<43 characters> token and at most one"
                " final line feed; write the token to it again"
            )
        if self._expected is not None and credential_id != self._expected:
            raise Misconfigured(
                f"token file {self._token} holds the token of credential {credential_id}, not of the expected"
                f" {self._expected}; install that token or change the expected credential id"
            )
        return credential_id

    def _context(self, certificate: bytes, key: bytes, anchors: bytes) -> ssl.SSLContext:
        """TLS 1.3 with these anchors alone. A context made this way loads no default CA and, unlike the one of
        `ssl.create_default_context`, never writes session keys where SSLKEYLOGFILE points."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.hostname_checks_common_name = False
        try:
            context.load_verify_locations(cadata=anchors.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise Misconfigured(
                f"trust anchor file {self._anchors} must hold PEM certificates; copy the control plane's CA certificate to it"
            ) from None
        if not 1 <= context.cert_store_stats()["x509_ca"] <= MAXIMUM_ANCHORS:
            raise Misconfigured(
                f"trust anchor file {self._anchors} must hold 1 to {MAXIMUM_ANCHORS} CA certificates; copy the control"
                " plane's CA certificate to it"
            )
        try:
            self._load_pair(context, certificate, key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = "do not belong together; install the key and the certificate that were issued for each other"
            else:
                problem = "must hold a PEM certificate chain and its PEM key; install them again"
            raise Misconfigured(f"certificate file {self._certificate} and private key file {self._key} {problem}") from None
        except OSError as error:
            raise Misconfigured(
                f"cannot load certificate file {self._certificate} and private key file {self._key}: {_reason(error)};"
                " mount /proc and keep both files readable"
            ) from None
        except ValueError:
            raise Misconfigured(f"private key file {self._key} must have no passphrase; install the key without one") from None
        return context

    def _load_pair(self, context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
        """OpenSSL takes file names only, and the real files may be rotated between our reading and its own. So it gets the
        bytes already checked as memory files, or, on a kernel without them, the real files and a second look."""
        descriptors = _memory_files(certificate, key)
        names = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors] or [str(self._certificate), str(self._key)]
        try:
            context.load_cert_chain(names[0], names[1], password=_no_passphrase)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not descriptors and (self._read_certificate(), self._read_key()) != (certificate, key):
            raise Misconfigured(
                f"certificate file {self._certificate} or private key file {self._key} changed while it was loaded; it is"
                " read again at the next exchange"
            )

    def _read_certificate(self) -> bytes:
        return _read_file(self._certificate, "certificate", _UNALTERABLE, MAXIMUM_BLOB_BYTES)

    def _read_key(self) -> bytes:
        return _read_file(self._key, "private key", _PRIVATE, MAXIMUM_BLOB_BYTES)


def _credential_of(token: bytes) -> str | None:
    """The credential id of a well-formed token. It has no underscore but the secret may: the first one parts them."""
    match = _TOKEN.match(token)
    if match is None:
        return None
    try:
        from_b64u(match[2].decode("ascii"))
        return check_credential_id(match[1].decode("ascii"))
    except ValueError:
        return None


def _no_passphrase() -> str:
    """Without this OpenSSL would ask on the terminal, and a daemon would hang there."""
    raise ValueError("a passphrase is not supported")


def _signature(path: Path) -> Signature | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    # The change time tells a chmod and a rewrite within one tick of a coarse modification time.
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _checked_path(path: Path, what: str) -> Path:
    if not path.is_absolute() or os.path.normpath(path) != str(path):
        raise Misconfigured(f"{what} file {path} must be an absolute path without `..`; write out the whole path")
    return path


def _check_directory(directory: Path) -> None:
    try:
        mode = directory.lstat().st_mode
    except OSError as error:
        raise Misconfigured(f"cannot look at token directory {directory}: {_reason(error)}; create it") from None
    if not stat.S_ISDIR(mode):
        raise Misconfigured(f"token directory {directory} must be a directory and not a link; give its real path")
    if mode & _UNALTERABLE:
        raise Misconfigured(f"token directory {directory} must not be writable by group or others; chmod go-w {directory}")


def _read_file(path: Path, what: str, forbidden: int, maximum: int) -> bytes:
    try:
        # O_NONBLOCK: a FIFO put in the file's place must not hang the worker.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Misconfigured(f"{what} file {path} must not be a link; put the file itself there") from None
        raise Misconfigured(f"cannot open {what} file {path}: {_reason(error)}; create it, readable by this user") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Misconfigured(f"{what} file {path} must be a regular file; put one there")
        if facts.st_mode & forbidden:
            rule, remedy = (
                ("must not be accessible by group or others", "go-rwx")
                if forbidden == _PRIVATE
                else ("must not be writable by group or others", "go-w")
            )
            raise Misconfigured(f"{what} file {path} {rule}; chmod {remedy} {path}")
        # One read: a file of at most 1 MiB comes whole, and what was cut off by a change is caught as damaged PEM.
        data = os.read(descriptor, maximum + 1)
    except OSError as error:
        raise Misconfigured(f"cannot read {what} file {path}: {_reason(error)}; check the disk") from None
    finally:
        os.close(descriptor)
    if not 1 <= len(data) <= maximum:
        raise Misconfigured(f"{what} file {path} must have 1 to {maximum} bytes; write it again")
    return data


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else "unknown error"


def _memory_files(*blobs: bytes) -> list[int]:
    """Open memory files with these bytes, never on a disk and gone with their descriptors; none where there are none."""
    descriptors: list[int] = []
    try:
        for blob in blobs:
            descriptors.append(os.memfd_create("qlworker-credential", os.MFD_CLOEXEC))
            view = memoryview(blob)
            while view:
                view = view[os.write(descriptors[-1], view) :]
    except (AttributeError, OSError):
        for descriptor in descriptors:
            os.close(descriptor)
        return []
    return descriptors
