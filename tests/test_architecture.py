"""What the tree as a whole must and must not contain."""

import ast
import contextlib
import threading
import tomllib
from pathlib import Path

import pytest
import trio

from qlworker.app import assemble
from qlworker.config import load
from tests.pki import Events, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qlworker"
INBOX = {"page", "read", "create", "replace", "remove"}


def imported(path: Path) -> set[str]:
    """The modules a file imports, relative ones by their last part."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[-1 if node.level else 0])
            names |= {alias.name for alias in node.names if node.level}
    return names


def inboxes() -> dict[str, Path]:
    """Every class outside ports that has the five operations of an inbox."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and path.name != "ports.py":
                methods = {each.name for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
                if methods >= INBOX:
                    found[node.name] = path
    return found


@pytest.mark.req("R54", "R55")
def test_the_files_of_the_journal_are_the_only_inbox_there_is() -> None:
    assert set(inboxes()) == {"FileJournal"}


@pytest.mark.req("R12", "R22", "R54")
def test_the_journal_can_reach_neither_the_network_nor_the_control_plane() -> None:
    """So no journal operation changes a lease, an attempt or a run there, and no network answer stands for durability."""
    for path in inboxes().values():
        assert not imported(path) & {"httpx", "socket", "ssl", "transport", "control_plane", "wire", "sqlalchemy", "sqlite3"}


@pytest.mark.req("R57")
def test_there_is_one_distribution_with_one_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["qlworker"]
    assert [path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"] == ["qlworker"]


@pytest.mark.req("R533", "R534")
def test_putting_the_worker_together_takes_no_lock_opens_no_socket_and_starts_nothing(tmp_path: Path) -> None:
    """Nothing happens before somebody starts it: no task is taken, no timer runs, no thread is made."""
    kit = Files(tmp_path / "kit").write()
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    file = tmp_path / "qlworker.toml"
    file.write_text(
        f"""
[worker]
id = "edge-1"
[control_plane]
origin = "https://127.0.0.1:1"
[credentials]
certificate = "{kit.certificate}"
key = "{kit.key}"
trust_anchors = "{kit.anchors}"
token = "{kit.token}"
[state]
directory = "{state}"
"""
    )
    threads, sockets = set(threading.enumerate()), open_sockets()

    async def put_together() -> tuple[int, int]:
        before = trio.lowlevel.current_statistics().tasks_living
        assemble(load(file), Events())
        return before, trio.lowlevel.current_statistics().tasks_living

    before, after = trio.run(put_together)

    assert after == before
    assert set(threading.enumerate()) == threads
    assert open_sockets() == sockets
    assert {path.name for path in state.rglob("*")} <= {"installation-id", "receipts"}


def open_sockets() -> set[str]:
    """The sockets of this process, by their kernel's name."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:"):
                found.add(target)
    return found
