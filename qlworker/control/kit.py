"""The kit of one worker: certificate and key, authority, token and a ready qlworker.toml in one private directory.

For boxes that cannot reach the enrolment listener. The key is made here and travels with the kit; an invitation is better where
it can be spent, because there the key never leaves the box. Certificate and key share a file, so that a worker can replace both
at once when it renews them.
"""

from pathlib import Path

import msgspec

from ..domain.errors import Refused
from ..domain.first_settings import ANCHORS, IDENTITY, SETTINGS, TOKEN, first_settings
from .config import Authority
from .pki import Identity, issue_worker, read_identity
from .private_files import create_private_file, make_private_directory, replace_private_file


class KitPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a kit is written, and where it and the worker's state will lie on the worker's host (absolute paths)."""

    out: Path
    installed: Path
    state: Path


def sign_worker(authority: Authority, worker_id: str, days: int) -> tuple[Identity, bytes]:
    """A new certificate and key for `worker_id`, and the authority's certificate.

    Raises Refused when the authority's files are missing or open to others, ValueError for an id that cannot be signed.
    """
    ca = read_identity(authority.certificate, authority.key)
    return issue_worker(ca, worker_id, days), ca.certificate


def require_no_kit(place: KitPlace) -> None:
    """Raises Refused when there is something where the kit would be written."""
    if place.out.is_symlink() or place.out.exists():
        raise Refused(f"cannot write a kit to {place.out}: it exists already; choose another directory")


def write_kit(place: KitPlace, worker_id: str, origin: str, identity: Identity, ca: bytes, token: str) -> None:
    """Writes the files, all mode 0600, into a new directory of mode 0700."""
    require_no_kit(place)
    make_private_directory(place.out)
    create_private_file(place.out / IDENTITY, identity.certificate + identity.key)
    create_private_file(place.out / ANCHORS, ca)
    create_private_file(place.out / TOKEN, token.encode() + b"\n")
    settings = first_settings(worker_id, origin, str(place.installed), str(place.state))
    create_private_file(place.out / SETTINGS, settings.encode())


def replace_token(out: Path, token: str) -> None:
    """Puts a rotated token into an existing kit by a rename, as a worker that reads it meanwhile needs."""
    replace_private_file(out / TOKEN, token.encode() + b"\n")
