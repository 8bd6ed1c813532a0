"""The one file with a worker's certificate and key: what it says, a new key for it, and its exchange in one step.

Key and certificate are replaced together, so that no crash leaves one without the other. Where an operator keeps them in two
files that is not possible, and the operator renews them. Source: control-plane.md §15.1, §15.3.
"""

import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Final

import trio

from ..domain.certificate import Validity, validity
from ..domain.errors import Misconfigured, Refused, Transient
from . import durable

HELPER_S: Final = 120

_KEY_END: Final = b"-----END PRIVATE KEY-----\n"
_CERTIFICATE: Final = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----")


class IdentityFile:
    """The port CertificateFile over `certificate`, which `key` must be as well to be replaced."""

    def __init__(self, worker_id: str, certificate: Path, key: Path, files: trio.CapacityLimiter) -> None:
        self._worker_id = worker_id
        self._path = certificate
        self._is_one_file = certificate == key
        self._files = files

    @property
    def is_replaceable(self) -> bool:
        """Whether certificate and key are one file in a directory that this process may write."""
        return self._is_one_file and os.access(self._path.parent, os.W_OK)

    async def validity(self) -> Validity:
        """From when until when the installed certificate is good. Raises Misconfigured for a file that holds none."""
        return await trio.to_thread.run_sync(read_validity, self._path, limiter=self._files)

    async def new_request(self) -> tuple[bytes, str]:
        """A new key and the request to certify it, both PEM. Raises Transient or Misconfigured."""
        # May take a slow router a minute; nobody has to wait for it when the worker stops, and no other file access.
        key, request = await trio.to_thread.run_sync(
            make_request, self._worker_id, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        return key, request.decode()

    async def install(self, certificate: str, key: bytes) -> None:
        """Puts both in the place of the present ones, durably. Raises Refused for a certificate that is not the next one."""
        await trio.to_thread.run_sync(self._install, certificate.encode(), key, limiter=self._files)

    def _install(self, certificate: bytes, key: bytes) -> None:
        try:
            following = _first_validity(certificate)
        except ValueError:
            raise Refused("the answer holds no certificate: nothing was installed") from None
        if following.not_after_ms <= read_validity(self._path).not_after_ms:
            raise Refused("the certificate in the answer does not last longer than the present one: it was not installed")
        publish(stage(self._path, certificate, key), self._path)


def make_request(worker_id: str) -> tuple[bytes, bytes]:
    """A new key and the request to certify it for `worker_id`, both PEM, made by a short-lived helper. Blocks.

    Raises Transient when it takes too long, Misconfigured when there is neither the library nor the program for it.
    """
    command = [sys.executable, "-m", "qlworker.certificate_request", worker_id]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=HELPER_S)
    except subprocess.TimeoutExpired:
        raise Transient(f"no key was made within {HELPER_S} s: try again") from None
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
        raise Misconfigured(reason or f"making a key ended with {done.returncode}")
    return split_request(done.stdout)


def split_request(content: bytes) -> tuple[bytes, bytes]:
    """Key and request of what the helper wrote. Raises Misconfigured for something else."""
    key, end, request = content.partition(_KEY_END)
    if not end or not request.startswith(b"-----BEGIN "):
        raise Misconfigured("what was to be a key and its request is something else")
    return key + end, request


def stage(path: Path, certificate: bytes, key: bytes) -> Path:
    """Writes both into a new private file beside `path`. Raises Refused, leaving nothing, when they do not belong together."""
    new = path.with_name(f"{path.name}.new")
    durable.replace(new, certificate + key, temporaries=path.parent)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(new)
    except ssl.SSLError:
        durable.remove(new)
        raise Refused("the certificate in the answer is not for the key of this box: it was not installed") from None
    return new


def publish(new: Path, path: Path) -> None:
    """Puts a staged file in its place, durably."""
    new.rename(path)
    durable.sync_directory(path.parent)


def read_validity(path: Path) -> Validity:
    """The validity of the first certificate in a file. Raises Misconfigured."""
    try:
        return _first_validity(path.read_bytes())
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {os.strerror(error.errno or 0).lower()}") from None
    except ValueError:
        raise Misconfigured(f"cannot use {path}: it must begin with a PEM certificate") from None


def _first_validity(content: bytes) -> Validity:
    text = content.decode("ascii")
    begin = text.index(_CERTIFICATE[0])
    end = text.index(_CERTIFICATE[1], begin) + len(_CERTIFICATE[1])
    return validity(ssl.PEM_cert_to_DER_cert(text[begin:end]))
