"""How files become durable and what is safe to read, on real file systems."""

import errno
import os
import stat
from pathlib import Path

import pytest

from qlworker.adapters import durable
from qlworker.adapters.durable import Abilities
from qlworker.domain.errors import Corrupt, Misconfigured
from tests.adapters.recorded_calls import record_calls
from tests.adapters.small_disk import small_disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    durable.private_directory(path)
    durable.private_directory(path / "offers")
    return path


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.req("R32", "R33")
def test_a_new_file_is_synced_then_linked_then_its_directory_is_synced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = root / "offers" / "a.json"
    calls = record_calls(monkeypatch)
    durable.publish_new(target, b"new", temporaries=root)
    assert calls == [
        ("write", "temporary"),
        ("fsync", "temporary"),
        ("link", f"temporary -> {target}"),
        ("fsync", str(target.parent)),
        ("unlink", "temporary"),
    ]
    assert listing(root) == {"offers", "offers/a.json"}


@pytest.mark.req("R32", "R34", "R68")
def test_a_replacement_is_synced_then_renamed_then_its_directory_is_synced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = root / "offers" / "a.json"
    durable.publish_new(target, b"old", temporaries=root)
    calls = record_calls(monkeypatch)
    durable.replace(target, b"new", temporaries=root)
    assert calls == [
        ("write", "temporary"),
        ("fsync", "temporary"),
        ("rename", f"temporary -> {target}"),
        ("fsync", str(target.parent)),
    ]
    assert durable.read_private(target, 10) == b"new"
    assert listing(root) == {"offers", "offers/a.json"}


def test_a_removal_is_followed_by_a_sync_of_the_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = root / "a.json"
    durable.publish_new(target, b"old", temporaries=root)
    calls = record_calls(monkeypatch)
    assert durable.remove(target)
    assert calls == [("unlink", str(target)), ("fsync", str(root))]
    assert not durable.remove(target)


@pytest.mark.req("R33")
def test_a_first_publication_never_overwrites(root: Path) -> None:
    target = root / "a.json"
    durable.publish_new(target, b"first", temporaries=root)
    with pytest.raises(FileExistsError):
        durable.publish_new(target, b"second", temporaries=root)
    assert durable.read_private(target, 10) == b"first"
    assert listing(root) == {"offers", "a.json"}


@pytest.mark.req("R31", "R68")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_files_are_0600_whatever_the_umask_says(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        durable.publish_new(root / "a.json", b"1", temporaries=root)
        durable.publish_new(root / "b.json", b"1", temporaries=root)
        durable.replace(root / "b.json", b"2", temporaries=root)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((root / name).stat().st_mode) for name in ("a.json", "b.json")} == {0o600}


@pytest.mark.req("R30")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_directories_are_0700_whatever_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        durable.private_directory(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    durable.private_directory(tmp_path / "new")


@pytest.mark.req("R30")
@pytest.mark.parametrize("mode", [0o701, 0o710, 0o740, 0o755, 0o777])
def test_a_wider_directory_is_refused_not_repaired(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "wide"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(Corrupt, match=r"refused, not repaired.*chmod 0700"):
        durable.private_directory(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_directory_that_is_a_link_or_a_file_is_refused(tmp_path: Path, root: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(Corrupt, match="not a directory"):
            durable.private_directory(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_what_belongs_to_somebody_else_is_refused(root: Path) -> None:
    durable.publish_new(root / "a.json", b"1", temporaries=root)
    for path in (root / "a.json", root / "offers"):
        os.chown(path, 12345, 12345)
    with pytest.raises(Corrupt, match="belongs to user 12345"):
        durable.read_private(root / "a.json", 10)
    with pytest.raises(Corrupt, match="belongs to user 12345"):
        durable.private_directory(root / "offers")


@pytest.mark.req("R28")
def test_a_relative_an_endless_and_a_parentless_directory_are_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="absolute"):
        durable.private_directory(Path("journal"))
    with pytest.raises(Misconfigured, match="4096"):
        durable.private_directory(Path("/" + "x" * 4096))
    with pytest.raises(Misconfigured, match="make it first"):
        durable.private_directory(tmp_path / "none" / "journal")


@pytest.mark.req("R31")
@pytest.mark.parametrize("mode", [0o601, 0o604, 0o610, 0o640, 0o660, 0o666])
def test_a_file_open_to_others_is_refused_not_repaired(root: Path, mode: int) -> None:
    durable.publish_new(root / "a.json", b"secret", temporaries=root)
    (root / "a.json").chmod(mode)
    with pytest.raises(Corrupt, match="chmod 0600") as caught:
        durable.read_private(root / "a.json", 100)
    assert "secret" not in str(caught.value)
    assert stat.S_IMODE((root / "a.json").stat().st_mode) == mode


def test_only_a_regular_file_is_read(root: Path) -> None:
    durable.publish_new(root / "real", b"1", temporaries=root)
    (root / "link").symlink_to(root / "real")
    os.mkfifo(root / "fifo", 0o600)
    for name in ("link", "fifo", "offers"):
        with pytest.raises(Corrupt, match="not a regular file"):
            durable.read_private(root / name, 100)
    with pytest.raises(FileNotFoundError):
        durable.read_private(root / "none", 100)


def test_a_file_is_read_up_to_its_limit_and_no_further(root: Path) -> None:
    durable.publish_new(root / "a", b"x" * 100, temporaries=root)
    assert durable.read_private(root / "a", 100) == b"x" * 100
    with pytest.raises(Corrupt, match="larger than 99 bytes"):
        durable.read_private(root / "a", 99)


@pytest.mark.parametrize("call", ["fsync", "link", "rename"])
def test_a_failing_medium_leaves_the_old_content_and_no_temporary(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = root / "offers" / "a.json"
    if call == "rename":
        durable.publish_new(target, b"old", temporaries=root)
    before = listing(root)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="input/output") as caught:
        (durable.replace if call == "rename" else durable.publish_new)(target, b"new", temporaries=root)
    assert caught.value.errno == errno.EIO
    assert listing(root) == before
    if call == "rename":
        assert target.read_bytes() == b"old"


def test_a_full_disk_leaves_the_old_content_and_no_temporary(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with small_disk(tmp_path, size="64k"):
        durable.publish_new(tmp_path / "a", b"old" * 10_000, temporaries=tmp_path)
        for action in (durable.replace, durable.publish_new):
            with pytest.raises(OSError, match="No space") as caught:
                action(tmp_path / ("a" if action is durable.replace else "b"), b"n" * 60_000, temporaries=tmp_path)
            assert caught.value.errno == errno.ENOSPC
        assert durable.read_private(tmp_path / "a", 100_000) == b"old" * 10_000
        assert listing(tmp_path) == {"a"}
        durable.replace(tmp_path / "a", b"small", temporaries=tmp_path)


@pytest.mark.req("R537")
def test_a_disk_without_inodes_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="256k", inodes=4):
        for name in ("a", "b"):
            durable.publish_new(tmp_path / name, b"1", temporaries=tmp_path)
        (tmp_path / "last").touch()
        with pytest.raises(OSError, match="No space"):
            durable.replace(tmp_path / "a", b"2", temporaries=tmp_path)
        assert listing(tmp_path) == {"a", "b", "last"}
        assert (tmp_path / "a").read_bytes() == b"1"


def test_a_read_only_disk_can_still_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="64k") as disk:
        durable.publish_new(tmp_path / "a", b"1", temporaries=tmp_path)
        disk.make_read_only()
        with pytest.raises(OSError, match="Read-only") as caught:
            durable.replace(tmp_path / "a", b"2", temporaries=tmp_path)
        assert caught.value.errno == errno.EROFS
        assert durable.read_private(tmp_path / "a", 10) == b"1"


def test_only_left_over_temporaries_are_removed(root: Path) -> None:
    kept = ["a.tmp", ".a.json.tmp", ".a.json." + "G" * 32 + ".tmp", "a.json." + "0" * 32 + ".tmp", ".owner.guard"]
    for name in [*kept, ".a.json." + "0" * 32 + ".tmp", ".pending-claim.json." + "f" * 32 + ".tmp"]:
        (root / name).touch()
    (root / (".d." + "0" * 32 + ".tmp")).mkdir()
    assert durable.remove_temporaries(root) == 2
    assert listing(root) == {*kept, "offers", ".d." + "0" * 32 + ".tmp"}


@pytest.mark.req("R50")
def test_a_probe_tells_what_this_disk_can_do_and_leaves_nothing(root: Path) -> None:
    abilities = durable.probe(root)
    assert abilities.is_supported
    assert abilities.syncs_directories
    assert abilities.file_system
    assert listing(root) == {"offers"}


@pytest.mark.req("R50")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_without_directory_sync_files_are_published_and_the_probe_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    abilities = durable.probe(root)
    assert abilities.is_supported
    assert not abilities.syncs_directories
    durable.publish_new(root / "a", b"1", temporaries=root)
    durable.replace(root / "a", b"2", temporaries=root)
    assert (root / "a").read_bytes() == b"2"


@pytest.mark.req("R52")
@pytest.mark.parametrize(
    ("call", "ability"),
    [("link", "hard_links"), ("replace", "atomic_rename"), ("mkdir", "exclusive_directories")],
)
def test_the_probe_refuses_a_disk_that_lacks_an_ability(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, ability: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, call, fail)
    abilities = durable.probe(root)
    assert not abilities.is_supported
    assert not getattr(abilities, ability)


@pytest.mark.req("R52")
@pytest.mark.parametrize("name", ["nfs", "nfs4", "cifs", "fuse.sshfs", "fuse.s3fs"])
def test_a_network_file_system_is_unsupported(name: str) -> None:
    assert not Abilities(True, True, True, True, True, name).is_supported
    assert Abilities(True, True, True, True, True, "ubifs").is_supported


def test_the_probe_names_the_file_system_of_the_innermost_mount(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="64k"):
        (tmp_path / "below").mkdir()
        assert durable.probe(tmp_path / "below").file_system == "tmpfs"
