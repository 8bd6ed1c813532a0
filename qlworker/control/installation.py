"""What `qlcontrol init` makes: one private directory with authority, server certificate, pepper and qlcontrol.toml.

It is built beside its place and renamed into it, so a crash leaves either nothing or all of it. Nothing is ever overwritten.
"""

import secrets
import shutil
from pathlib import Path
from typing import Final

from ..domain.errors import Misconfigured, Refused
from .config import CONFIG_NAME, Listen, Settings
from .pki import issue_server, new_authority
from .private_files import create_private_file, make_private_directory, sync_directory

PEPPER_BYTES: Final = 32

_TEMPLATE: Final = """\
# The settings of one qlcontrol. Relative paths are relative to this file; what is left out has its default.

[listen]
name = "{name}"
host = "{host}"
port = {port}

[enrolment]
port = {enrolment_port}             # where boxes spend the invitations of qlcontrol worker add; without it, hand kits over
# certificate_days = 90   # 1 to 3650; workers renew theirs by themselves

# [runs]
# lease_s = 90            # 5 to 600; a worker that is back within the rest of it keeps its running commands

# on_lease_expiry = "lost"   # or "evidence": a started run whose worker is gone waits until somebody knows that it stopped

# [sessions]
# lease_min_s = 5         # the range a worker may choose its session lease from
# lease_max_s = 600

# [storage]
# database = ""           # empty: SQLite in qlcontrol.sqlite beside this file; or postgresql://USER@HOST/NAME for replicas

# [artifacts]
# retention_s = 2592000   # 60 to 31536000: how long logs are kept

# [artifacts.bucket]      # logs in an S3-compatible bucket instead of the directory
# name = "qlworker-logs"
# endpoint = "https://s3.example.org"
# credentials = "bucket.toml"   # private file with access_key_id and secret_access_key

# [dialect]
# capabilities = "later"  # or "baseline"
# secrets = "v2"          # or "v1"
"""


def initialise(directory: Path, names: list[str], host: str, port: int) -> Path:
    """Makes a new installation in `directory` and returns the path of its qlcontrol.toml.

    `names` are the DNS names or addresses workers will use; they stand in the server's certificate. Raises Refused when
    `directory` exists and is not empty, Misconfigured when a name or the address cannot be used.
    """
    directory = directory.absolute()
    try:
        listen = Listen(name=names[0] if names else "", host=host, port=port)
        Settings(listen=listen).rooted_at(directory)
    except ValueError as error:
        raise Misconfigured(f"cannot initialise {directory}: {error}") from error
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise Refused(f"cannot initialise {directory}: it exists and is not an empty directory; choose another one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}.init")
    try:
        _build(staging, names, listen)
        staging.rename(directory)
    except OSError as error:
        raise Refused(f"cannot initialise {directory}: {error.strerror}; is it a mount point or not writable?") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    sync_directory(directory.parent)
    return directory / CONFIG_NAME


def _build(staging: Path, names: list[str], listen: Listen) -> None:
    try:
        authority = new_authority("qlcontrol private authority")
        server = issue_server(authority, names)
    except ValueError as error:
        raise Misconfigured(f"cannot make the server's certificate: {error}") from error
    for name in (".", "ca", "tls", "run", "secrets", "artifacts", "live"):
        make_private_directory(staging / name)
    create_private_file(staging / "ca/certificate.pem", authority.certificate)
    create_private_file(staging / "ca/key.pem", authority.key)
    create_private_file(staging / "tls/certificate.pem", server.certificate)
    create_private_file(staging / "tls/key.pem", server.key)
    create_private_file(staging / "pepper", secrets.token_bytes(PEPPER_BYTES))
    settings = _TEMPLATE.format(
        name=listen.name,
        host=listen.host,
        port=listen.port,
        enrolment_port=listen.port and min(listen.port + 1, 65_535),  # 0 stays 0: the kernel chooses both
    )
    create_private_file(staging / CONFIG_NAME, settings.encode())
