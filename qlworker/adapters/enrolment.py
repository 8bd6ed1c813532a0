"""How this box becomes a worker: its key is made here, an invitation is spent for certificate and token, all files are written.

Whatever is interrupted goes on where it was when it is called again: the key and its request stay in `enrolling.pem` until
everything else is durable, and the control plane answers the same request again. The invitation holds the digest of the
authority's certificate, so nothing is told to a server that does not belong to it. Everything here blocks. Source:
control-plane.md §15.1, §15.3.
"""

import hashlib
import hmac
import ssl
from pathlib import Path
from typing import Final

import httpx
import msgspec

from ..domain.errors import Misconfigured, QlworkerError, Refused, Transient, Unauthorized
from ..domain.first_settings import ANCHORS, IDENTITY, SETTINGS, TOKEN, first_settings
from ..domain.text import check_worker_id
from ..wire.codec import decode
from ..wire.enrolment import (
    AUTHORITY_PATH,
    ENROLMENT_BYTES,
    ENROLMENT_PATH,
    ENROLMENT_SCHEMA,
    AuthorityResponse,
    EnrolmentRequest,
    EnrolmentResponse,
    Invitation,
)
from ..wire.ingress import checked_origin
from . import durable
from .identity_file import make_request, publish, split_request, stage

UNFINISHED: Final = "enrolling.pem"
EXCHANGE_S: Final = 90
"""For one request: a signature may wait for others'."""

_ANSWER_BYTES: Final = 64 * 1024


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted: to be `worker_id` of the control plane whose enrolment listener is `origin`.

    The credentials go to `directory`, which only its owner may write, and `state` into the configuration; both absolute.
    """

    worker_id: str
    origin: str
    directory: Path
    state: Path


class Enrolled(msgspec.Struct, frozen=True):
    """What came of it. `expires_at_ms`: when token or certificate end. `wrote_settings`: whether there were none before."""

    worker_id: str
    settings: Path
    wrote_settings: bool
    expires_at_ms: int


def enrol(wanted: Enrolment, invitation_text: str) -> Enrolled:
    """Spends the invitation and writes identity, authority, token and, if there is none, the configuration.

    Raises Misconfigured for wrong input or a box that is a worker already, Unauthorized for an invitation that is refused,
    Refused for an answer or a server that cannot be trusted, Transient when asking again may help.
    """
    try:
        check_worker_id(wanted.worker_id)
        invitation = Invitation.parse(invitation_text)
    except ValueError as error:
        raise Misconfigured(str(error)) from None
    origin = checked_origin(wanted.origin)
    for path in (wanted.directory, wanted.state):
        if not path.is_absolute():
            raise Misconfigured(f"{path} must be an absolute path")
    _prepare(wanted.directory)
    key, request = _key_and_request(wanted)
    authority = _authority(origin, invitation)
    order = EnrolmentRequest(schema=ENROLMENT_SCHEMA, invitation=invitation_text, certificate_request=request.decode())
    answer = _spend(origin, authority, order)
    if answer.worker_id != wanted.worker_id:
        raise Misconfigured(f"the invitation is for the worker {answer.worker_id}: give that id, or take another invitation")
    return _install(wanted, key, authority, answer)


def _prepare(directory: Path) -> None:
    if not directory.exists():
        durable.private_directory(directory)
    if directory.is_symlink() or not directory.is_dir() or directory.stat().st_mode & 0o022:
        raise Misconfigured(f"{directory} must be a directory that nobody but its owner may write: chmod go-w {directory}")
    identity = directory / IDENTITY
    if identity.exists() and not (directory / UNFINISHED).exists():
        raise Misconfigured(f"{identity} is there: this box is a worker already; to begin anew move it away first")


def _key_and_request(wanted: Enrolment) -> tuple[bytes, bytes]:
    """Of the attempt before, or new ones; durable before anything is asked."""
    path, title = wanted.directory / UNFINISHED, f"enrolling {wanted.worker_id}\n".encode()
    try:
        content = durable.read_private(path, ENROLMENT_BYTES)
    except FileNotFoundError:
        content = title + b"".join(make_request(wanted.worker_id))
        durable.publish_new(path, content, temporaries=wanted.directory)
    try:
        if content.startswith(title):
            return split_request(content.removeprefix(title))
    except Misconfigured:
        pass
    raise Misconfigured(f"{path} is not of an enrolment of {wanted.worker_id}: remove it and try again")


def _authority(origin: str, invitation: Invitation) -> bytes:
    """The authority's certificate, DER, proven by the invitation. The server is not yet trusted and gets no secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    told: AuthorityResponse = decode(_exchange(context, "GET", origin + AUTHORITY_PATH), AuthorityResponse)
    try:
        certificate = ssl.PEM_cert_to_DER_cert(told.certificate)
    except ValueError:
        certificate = b""
    if not hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), invitation.authority_sha256):
        raise Refused(
            f"{origin} is not the control plane that made the invitation, or somebody is in between: nothing was told"
        )
    return certificate


def _spend(origin: str, authority: bytes, order: EnrolmentRequest) -> EnrolmentResponse:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=authority)
    answer: EnrolmentResponse = decode(_exchange(context, "POST", origin + ENROLMENT_PATH, order.to_json()), EnrolmentResponse)
    return answer


def _exchange(context: ssl.SSLContext, method: str, url: str, body: bytes = b"") -> bytes:
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        with (
            httpx.Client(verify=context, trust_env=False, timeout=EXCHANGE_S, follow_redirects=False) as client,
            client.stream(method, url, content=body or None, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response)
            answer = bytearray()
            for piece in response.iter_bytes():
                answer += piece
                if len(answer) > _ANSWER_BYTES:
                    raise Refused(f"the answer of {url} is longer than {_ANSWER_BYTES} bytes")
            return bytes(answer)
    except httpx.HTTPError as error:
        # Not chained: the request it knows holds the invitation.
        reason = str(error) or type(error).__name__
        raise Transient(f"cannot talk to {url}: {reason}; check address, port and this box's date") from None


def _refusal(response: httpx.Response) -> QlworkerError:
    status = response.status_code
    if status == 401:
        return Unauthorized(
            "the invitation was refused: it ran out, was revoked or was spent by another box;"
            " make a new one with qlcontrol worker add"
        )
    if status == 400:
        return Refused("the request was refused: the invitation is for another worker id, or the versions do not fit")
    if status in {404, 405}:
        return Misconfigured(f"nobody enrols at {response.url.copy_with(path='')}: give the address of the enrolment listener")
    return Transient(f"the control plane cannot enrol now (status {status}): try again later")


def _install(wanted: Enrolment, key: bytes, authority: bytes, answer: EnrolmentResponse) -> Enrolled:
    directory, settings = wanted.directory, wanted.directory / SETTINGS
    new = stage(directory / IDENTITY, answer.certificate.encode(), key)
    durable.replace(directory / ANCHORS, ssl.DER_cert_to_PEM_cert(authority).encode(), temporaries=directory)
    durable.replace(directory / TOKEN, answer.token.encode() + b"\n", temporaries=directory)
    text = first_settings(wanted.worker_id, answer.origin, str(directory), str(wanted.state))
    try:
        durable.publish_new(settings, text.encode(), temporaries=directory)
        wrote_settings = True
    except FileExistsError:
        wrote_settings = False
    publish(new, directory / IDENTITY)
    durable.remove(directory / UNFINISHED)
    return Enrolled(wanted.worker_id, settings, wrote_settings, answer.expires_at_ms)
