"""Imports point one way (design.md §4), the launcher stands alone, and a steady worker loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qlworker"

# who -> whom it may import, as rooms of the package
ALLOWED = {
    "domain": {"domain"},
    "wire": {"wire", "domain"},
    "ports": {"domain"},
    "config": {"config_key", "domain"},
    "config_key": {"domain"},
    "logs": {"ports", "domain"},
    "flow": {"flow", "ports", "wire", "domain"},
    "adapters": {"ports", "wire", "domain"},
    "app": {"adapters", "flow", "config", "logs", "ports", "wire", "domain"},
    "cli": {"cli", "app", "adapters", "config", "config_key", "logs", "domain"},
    "control": {"control", "wire", "domain"},
    "launcher": set(),
    "certificate_request": set(),
    "__main__": {"cli"},
    "__init__": set(),
}

# adapters that others may use: files made safe, the process table, and what one adapter was split into
SHARED_ADAPTERS = {"durable", "process_table"}
PARTS_OF = {
    "processes": {"launching", "stopping", "command_check", "pidfd"},
    "stopping": {"pidfd"},
    "launching": {"pidfd"},
    "enrolment": {"identity_file"},
}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, path: Path) -> set[str]:
    """Full names of what `path` imports anywhere, inside functions too; of this package with the module that is meant."""
    package = name.split(".")[:-1]
    known = set(modules())
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            named = {f"{source}.{alias.name}" for alias in node.names}
            # `from .adapters import durable` means a module, `from .config import load` a name in one
            found |= {each if each in known or f"{each}.__init__" in known else source for each in named}
    return found


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("name", modules())
def test_imports_point_one_way(name: str) -> None:
    inside = {each for each in imports(name, modules()[name]) if each.split(".")[0] == "qlworker"}
    allowed = ALLOWED[room(name)]

    forbidden = {each for each in inside if room(each) not in allowed and not shared(name, each)}
    assert forbidden - ({"qlworker"} if allowed else set()) == set()  # the package itself holds the version only


def shared(name: str, imported: str) -> bool:
    if room(name) != "adapters" or room(imported) != "adapters":
        return False
    adapter = imported.split(".")[2] if imported.count(".") >= 2 else ""
    return adapter in SHARED_ADAPTERS | PARTS_OF.get(name.split(".")[2], set())


@pytest.mark.parametrize(
    "name", [name for name in modules() if name.startswith("qlworker.domain.") or name == "qlworker.launcher"]
)
def test_domain_and_launcher_need_the_standard_library_and_the_domain_msgspec_too(name: str) -> None:
    roots = {each.split(".")[0] for each in imports(name, modules()[name])} - {"qlworker"}
    beyond = roots - set(sys.stdlib_module_names)

    assert beyond <= (set() if name == "qlworker.launcher" else {"msgspec"})


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("qlworker.domain.")])
def test_the_domain_is_pure(name: str) -> None:
    outside = {"os", "time", "socket", "subprocess", "trio", "logging", "pathlib", "threading", "datetime"}

    assert {each.split(".")[0] for each in imports(name, modules()[name])} & outside == set()


def test_this_test_sees_imports_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from ..flow import session\n    from . import durable\n    import trio.lowlevel as t\n")

    assert imports("qlworker.adapters.x", file) == {"qlworker.flow.session", "qlworker.adapters.durable", "trio.lowlevel"}
    assert not shared("qlworker.adapters.clock", "qlworker.adapters.journal")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())


def test_a_steady_worker_loads_nothing_heavy() -> None:
    loaded = loaded_by("import qlworker.app, qlworker.cli, qlworker.adapters.transport")
    heavy = {"cryptography", "psutil", "sqlalchemy", "hypercorn", "starlette", "certifi", "tomllib", "qlworker.control"}

    assert "qlworker.app" in loaded
    assert loaded & heavy == set()


def test_version_and_help_load_no_dependency() -> None:
    loaded = loaded_by("from qlworker.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    main(['version'])")

    assert loaded & {"msgspec", "trio", "httpx", "structlog", "asyncio", "ssl", "qlworker.app", "qlworker.config"} == set()
