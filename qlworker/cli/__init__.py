"""The command `qlworker`: reads arguments, calls one command, turns every error into one clear line and an exit code.

Commands import what they need when they run: `--help` and `version` load nothing heavy.
"""

import argparse
import sys
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType
from typing import Final

from .. import __version__
from ..domain.errors import Corrupt, Misconfigured, OwnershipHeld, OwnershipLost, QlworkerError, Transient
from . import check, config_table, drain, enroll, journal, run, version


class Exit(IntEnum):
    """Exit codes (design.md §5)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNSAFE = 3
    UNREACHABLE = 4


_COMMANDS: Final[tuple[ModuleType, ...]] = (enroll, run, check, drain, journal, version, config_table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. argparse itself exits 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.execute(options))
    except (QlworkerError, OSError) as error:
        return _report([error])
    except BaseExceptionGroup as group:
        # nurseries wrap what their tasks raise; an error that nobody foresaw keeps its traceback
        errors = _leaves(group)
        if not all(isinstance(error, QlworkerError | OSError) for error in errors):
            raise
        return _report(errors)
    except KeyboardInterrupt:
        return Exit.FAILED


def exit_code(error: BaseException) -> Exit:
    """The code of an error that ends the program."""
    if isinstance(error, Misconfigured):
        return Exit.USAGE
    if isinstance(error, OwnershipHeld | OwnershipLost | Corrupt):
        return Exit.UNSAFE
    return Exit.UNREACHABLE if isinstance(error, Transient) else Exit.FAILED


def _report(errors: list[BaseException]) -> int:
    for text in dict.fromkeys(" ".join(_text(error).split()) for error in errors):
        print(f"qlworker: {text}", file=sys.stderr)
    codes = {exit_code(error) for error in errors}
    # a danger outweighs everything, and a cause (configuration, reachability) its consequences
    return next(code for code in (Exit.UNSAFE, Exit.USAGE, Exit.UNREACHABLE, Exit.FAILED) if code in codes)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'a file'}: {(error.strerror or type(error).__name__).lower()}"
    return str(error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qlworker",
        description="Runs commands for a QingLong 3 control plane, each one at most once.",
        epilog="Exit codes: 0 done, 1 the thing asked for failed, 2 usage or configuration, 3 refused for safety, "
        "4 the control plane cannot be reached.",
    )
    parser.add_argument("--version", action="version", version=f"qlworker {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    return parser
