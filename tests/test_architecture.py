"""What the tree as a whole must and must not contain."""

import ast
import tomllib
from pathlib import Path

import pytest

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
