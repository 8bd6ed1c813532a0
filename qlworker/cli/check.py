"""`qlworker check`: is everything there that `run` needs? Changes nothing and starts nothing."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..domain.errors import QlworkerError
from .options import Commands, add_config, add_json, load_settings

if TYPE_CHECKING:
    from ..config import Settings

Finding = tuple[str, bool, str]
"""What was looked at, whether it is in order, and the detail or the remedy."""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("check", help="check configuration, credentials and directories", description=__doc__)
    add_config(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints a line for each thing looked at. Returns 0 when all is well and 2 otherwise."""
    findings = check(options)
    if options.json:
        rows = [{"check": name, "ok": is_ok, "detail": detail} for name, is_ok, detail in findings]
        print(json.dumps({"ok": all(row["ok"] for row in rows), "checks": rows}, ensure_ascii=False))
    else:
        for name, is_ok, detail in findings:
            print(f"{'ok     ' if is_ok else 'failure'} {name}: {detail}")
    return 0 if all(is_ok for _, is_ok, _ in findings) else 2


def check(options: argparse.Namespace) -> list[Finding]:
    """Everything found. Without a configuration there is nothing else to look at."""
    try:
        settings = load_settings(options)
    except QlworkerError as error:
        return [("configuration", False, str(error))]
    state = settings.state
    directories = [(state.directory, "state directory"), (state.journal, "journal"), (state.receipts, "receipts")]
    return [
        ("configuration", True, str(settings.file)),
        _found("credentials", lambda: _credentials(settings)),
        *(_found(name, partial(_directory, path)) for path, name in [*directories, (state.output, "output")]),
        _found("capabilities", lambda: _capabilities(settings)),
    ]


def _found(name: str, look: Callable[[], str]) -> Finding:
    try:
        return name, True, look()
    except QlworkerError as error:
        return name, False, str(error)
    except OSError as error:
        return name, False, f"cannot look at {error.filename}: {error.strerror}"


def _credentials(settings: "Settings") -> str:
    from ..adapters.credentials import CredentialFiles

    files = settings.credentials
    material = CredentialFiles(
        files.certificate,
        files.key,
        files.trust_anchors,
        files.token,
        expected_credential_id=files.expected_credential_id,
    ).load()
    return f"certificate, key and trust anchors fit, token of credential {material.credential_id}"


def _directory(path: Path) -> str:
    """Raises for a directory that is not private, or cannot be made, or lies where a journal may not."""
    import os

    from ..adapters import durable
    from ..domain.errors import Misconfigured

    if not path.exists() and not path.is_symlink():
        parent = next(each for each in path.parents if each.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise Misconfigured(f"{path} is missing and cannot be made in {parent}: make it, mode 0700")
        return f"{path} is missing and will be made"
    durable.private_directory(path)  # verifies only: it exists
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise Misconfigured(f"{path} cannot be written: is its file system mounted read-only?")
    return str(path)


def _capabilities(settings: "Settings") -> str:
    from ..adapters.machine import LocalMachine
    from ..domain.capabilities import Dialect, describe, has_dialect

    facts = LocalMachine(settings.state.directory, settings.execution.search_path).facts()
    wanted = settings.control_plane.capabilities_dialect
    if wanted == "auto":
        wanted = "later" if has_dialect(facts, Dialect.LATER) else "baseline"
    document = describe(facts, Dialect(wanted), settings.worker.labels, settings.worker.features)
    only = "" if has_dialect(facts, Dialect.LATER) else " (the later dialect has no name for this architecture)"
    return f"{document.architecture}, {len(facts.runtimes)} runtimes, {len(document.text())} characters{only}"
