"""The credential files: what is accepted, what is refused and how, and how they rotate."""

import os
import ssl
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from qlworker.adapters.credentials import CredentialFiles
from qlworker.domain.canonical import pool_key
from qlworker.domain.errors import Misconfigured

from .. import pki


@pytest.fixture
def files(tmp_path: Path) -> pki.Files:
    return pki.Files(tmp_path / "credentials").write()


def test_valid_files_give_one_consistent_material(files: pki.Files) -> None:
    material = files.credentials(expected="cred-1").load()
    worker = pki.worker_identity()
    anchors = pki.authority().certificate
    assert (material.certificate, material.key, material.anchors) == (worker.certificate, worker.key, anchors)
    assert material.token.reveal() == pki.make_token()
    assert material.credential_id == "cred-1"
    assert material.pool_key == pool_key([worker.certificate, worker.key, anchors])


def test_the_context_trusts_the_private_anchors_alone_and_speaks_tls_1_3(
    files: pki.Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    context = files.credentials().load().context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert context.keylog_filename is None and not (tmp_path / "keys").exists()
    assert context.cert_store_stats() == {"x509": 1, "crl": 0, "x509_ca": 1}


def test_an_unchanged_set_is_not_read_again(files: pki.Files, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = files.credentials()
    first = credentials.load()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was opened again"))
    assert credentials.load() is first


def test_a_token_without_a_final_line_feed_is_accepted(files: pki.Files) -> None:
    files.put(files.token, pki.make_token().encode(), 0o600)
    assert files.credentials().load().token.reveal() == pki.make_token()


def test_the_secret_may_contain_underscores(files: pki.Files) -> None:
    secret = "_" * 42 + "8"
    files.write(token=f"ql3w_a.b:c-d_{secret}")
    assert files.credentials().load().credential_id == "a.b:c-d"


SECRET = pki.make_token(fill=9)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        SECRET.encode() + b"\r\n",
        SECRET.encode() + b"\n\n",
        b" " + SECRET.encode(),
        SECRET.encode()[:-1],
        SECRET.encode()[:-1] + b"B",  # not canonical: the last two bits must be zero
        SECRET.encode() + b"A",
        SECRET.replace("ql3w_", "ql2w_").encode(),
        SECRET.replace("cred-1", "").encode(),
        SECRET.replace("cred-1", "-cred").encode(),
        SECRET.replace("cred-1", "c" * 65).encode(),
        SECRET.encode() + b"\n" + SECRET.encode(),
        "ql3w_créd_".encode() + SECRET.encode()[-43:],
        b"\xff" * 40,
        SECRET.encode() + b" " * 200,
    ],
)
def test_a_malformed_token_is_refused_without_being_shown(files: pki.Files, content: bytes) -> None:
    files.put(files.token, content, 0o600)
    with pytest.raises(Misconfigured, match="token file") as caught:
        files.credentials().load()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET[-43:-2] not in shown


def test_a_token_of_another_credential_than_the_pinned_one_is_refused(files: pki.Files) -> None:
    with pytest.raises(Misconfigured, match="credential cred-1, not of the expected cred-2"):
        files.credentials(expected="cred-2").load()


@pytest.mark.parametrize(
    ("which", "mode", "text"),
    [
        ("token", 0o640, "token file .* chmod go-rwx"),
        ("token", 0o604, "token file .* chmod go-rwx"),
        ("key", 0o640, "private key file .* chmod go-rwx"),
        ("key", 0o601, "private key file .* chmod go-rwx"),
        ("certificate", 0o664, "certificate file .* chmod go-w"),
        ("anchors", 0o646, "trust anchor file .* chmod go-w"),
    ],
)
def test_loose_permissions_are_refused_with_the_remedy(files: pki.Files, which: str, mode: int, text: str) -> None:
    getattr(files, which).chmod(mode)
    with pytest.raises(Misconfigured, match=text):
        files.credentials().load()


@pytest.mark.parametrize("which", ["certificate", "key", "anchors", "token"])
def test_each_file_must_be_a_small_regular_file_and_no_link(files: pki.Files, which: str) -> None:
    path: Path = getattr(files, which)
    content = path.read_bytes()

    def replaced(by: Callable[[], object]) -> str:
        path.unlink()
        by()
        with pytest.raises(Misconfigured) as caught:
            files.credentials().load()
        path.unlink(missing_ok=True)
        files.put(path, content, 0o600)
        assert str(path) in str(caught.value)
        return str(caught.value)

    target = path.with_suffix(".real")
    target.write_bytes(content)
    target.chmod(0o600)
    assert "must not be a link" in replaced(lambda: path.symlink_to(target))
    assert "must be a regular file" in replaced(lambda: os.mkfifo(path, 0o600))
    assert "no such file" in replaced(lambda: None)
    assert "bytes" in replaced(lambda: files.put(path, b"", 0o600))
    assert "1048576 bytes" in replaced(lambda: files.put(path, b"x" * (2**20 + 1), 0o600)) or which == "token"
    files.credentials().load()


def test_the_tokens_directory_must_be_no_link_and_not_writable_by_others(files: pki.Files, tmp_path: Path) -> None:
    directory = files.token.parent
    directory.chmod(0o770)
    with pytest.raises(Misconfigured, match="chmod go-w"):
        files.credentials().load()
    directory.chmod(0o755)
    files.credentials().load()
    link = tmp_path / "link"
    link.symlink_to(directory)
    files.token = link / "token"
    with pytest.raises(Misconfigured, match="must be a directory and not a link"):
        files.credentials().load()


@pytest.mark.parametrize("path", ["token", "./token", "/etc/../etc/token"])
def test_paths_must_be_absolute_and_normalised(files: pki.Files, path: str) -> None:
    with pytest.raises(Misconfigured, match="absolute path"):
        CredentialFiles(files.certificate, files.key, files.anchors, Path(path))


def test_what_is_no_pem_pair_or_no_ca_is_refused_with_its_name(files: pki.Files) -> None:
    good = files.anchors.read_bytes()
    for wrong in (b"hello\n", b"\xff\xfe", pki.worker_identity().certificate, b"-----BEGIN CERTIFICATE-----\n"):
        files.write(anchors=wrong)
        with pytest.raises(Misconfigured, match="trust anchor file"):
            files.credentials().load()
    files.write(anchors=good)
    files.put(files.key, b"not a key", 0o600)
    with pytest.raises(Misconfigured, match="private key file"):
        files.credentials().load()


def test_a_key_with_a_passphrase_is_refused_instead_of_asking_the_terminal(files: pki.Files) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(pki.worker_identity().key, None)
    files.put(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")), 0o600)
    with pytest.raises(Misconfigured, match="must have no passphrase"):
        files.credentials().load()


def test_a_half_swapped_pair_keeps_the_old_one_and_is_reported_once(files: pki.Files) -> None:
    log = pki.Events()
    credentials = files.credentials(log=log)
    old = credentials.load()
    new = pki.issue_worker(pki.authority(), "edge-1")
    files.put(files.certificate, new.certificate, 0o644)
    assert credentials.load() is old
    assert credentials.load() is old
    assert log.names == ["credential_swap_refused"]
    assert "do not belong together" in str(log.events[0][1]["reason"])
    files.put(files.key, new.key, 0o600)
    swapped = credentials.load()
    assert swapped.certificate == new.certificate and swapped.key == new.key
    assert swapped.pool_key != old.pool_key and swapped.context is not old.context
    assert log.names == ["credential_swap_refused", "credential_swapped"]


def test_a_vanished_file_does_not_break_a_running_worker(files: pki.Files) -> None:
    log = pki.Events()
    credentials = files.credentials(log=log)
    old = credentials.load()
    files.token.unlink()
    assert credentials.load() is old
    assert log.names == ["credential_swap_refused"]
    files.put(files.token, pki.make_token().encode(), 0o600)
    assert credentials.load() == old


def test_a_refusal_ends_when_the_hindrance_outside_the_files_does(files: pki.Files) -> None:
    credentials = files.credentials()
    credentials.load()
    files.token.parent.chmod(0o777)
    files.write(token=pki.make_token(fill=8))
    assert credentials.load().token.reveal() == pki.make_token()
    files.token.parent.chmod(0o700)
    assert credentials.load().token.reveal() == pki.make_token(fill=8)


def test_a_new_token_keeps_the_connections_identity(files: pki.Files) -> None:
    credentials = files.credentials()
    old = credentials.load()
    files.write(token=pki.make_token("cred-2", 8))
    new = credentials.load()
    assert new.credential_id == "cred-2"
    assert new.pool_key == old.pool_key and new.context is old.context


def test_a_kernel_without_memory_files_loads_the_real_ones(files: pki.Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    files.credentials().load()


def test_no_descriptor_stays_open(files: pki.Files) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    files.credentials().load()
    files.key.chmod(0o644)
    with pytest.raises(Misconfigured):
        files.credentials().load()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_repr_shows_token_or_key(files: pki.Files) -> None:
    material = files.credentials().load()
    shown = f"{material!r} {material} {material.token!r} {material.token} {material.__rich_repr__()}"
    assert pki.make_token() not in shown and "PRIVATE KEY" not in shown


def test_loading_needs_no_cryptography(files: pki.Files) -> None:
    code = (
        "import sys; from pathlib import Path; from qlworker.adapters.credentials import CredentialFiles;"
        "CredentialFiles(*map(Path, sys.argv[1:])).load(); sys.exit('cryptography' in sys.modules)"
    )
    paths = [str(path) for path in (files.certificate, files.key, files.anchors, files.token)]
    assert subprocess.run([sys.executable, "-c", code, *paths], check=False).returncode == 0
