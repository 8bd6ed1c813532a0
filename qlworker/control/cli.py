"""`qlcontrol`: the command line of the control plane. It parses, calls one command and turns errors into exit codes.

0 done, 1 the thing asked for failed, 2 usage or configuration, 3 refused for safety, 4 the control plane cannot be reached
(design.md §5). `run start --follow` exits with the task's exit code instead.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from .. import __version__
from ..domain.errors import Corrupt, Misconfigured, OwnershipHeld, QlworkerError, Refused, Transient
from .commands import recovery, runs, schedule, setup, tasks, upkeep, workers

FAILED: Final = 1
USAGE: Final = 2
UNSAFE: Final = 3
UNREACHABLE: Final = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage exits 2 from within argparse."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (QlworkerError, ValueError) as error:
        print(f"qlcontrol: {error}", file=sys.stderr)
        return exit_code(error)
    except BaseExceptionGroup as group:
        # a nursery wraps what its tasks raise; an error that nobody foresaw keeps its traceback
        expected, rest = group.split(QlworkerError)
        if expected is None or rest is not None:
            raise
        reason = _first(expected)
        print(f"qlcontrol: {reason}", file=sys.stderr)
        return exit_code(reason)
    except BrokenPipeError:
        # The reader of standard output went away; the interpreter's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return FAILED
    return code


def exit_code(error: BaseException) -> int:
    """The exit code that stands for `error`."""
    if isinstance(error, Misconfigured | ValueError):
        return USAGE
    if isinstance(error, Refused | Corrupt | OwnershipHeld):
        return UNSAFE
    return UNREACHABLE if isinstance(error, Transient) else FAILED


def _first(group: BaseExceptionGroup[QlworkerError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qlcontrol", description="The reference control plane of qlworker.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in (setup, workers, tasks, schedule, runs, recovery, upkeep):
        group.register(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
