"""Whether a command can be started at all, decided before the barrier, where a refusal is still a proof (R385).

Reads only. What it lets through may still fail at execve; the launcher then says why in the command's log and receipt.
"""

import os
import resource
import stat
from collections.abc import Mapping
from typing import Final

from ..ports import Rejected

_ONE_STRING: Final = 128 * 1024  # MAX_ARG_STRLEN, with its NUL
_LEAST_TOTAL: Final = 128 * 1024  # what the kernel always grants
_MOST_TOTAL: Final = 6 * 1024 * 1024  # and what it never exceeds, whatever the stack limit is
_POINTER: Final = 8
_FIRST_LINE: Final = 256  # BINPRM_BUF_SIZE: the kernel reads no more of a script
_OTHER_FORMATS: Final = "/proc/sys/fs/binfmt_misc"


def check_command(argv: list[str], working_directory: str, path: str, environment: Mapping[str, str]) -> Rejected | None:
    """Why this command cannot be started, or None.

    `argv[0]` is an absolute path; `path` is the command's PATH, where `#!/usr/bin/env` will look. Reasons:
    working_directory_missing, working_directory_denied, command_not_found, not_executable, interpreter_not_found,
    crlf_script, not_a_program, too_large.
    """
    reason = (
        _check_directory(working_directory)
        or _check_size(argv, environment)
        or _check_file(argv[0])
        or _check_format(argv[0], working_directory, path)
    )
    return Rejected(reason) if reason else None


def _check_directory(directory: str) -> str | None:
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):  # noqa: PTH116 - pathlib hides which of the two failed
            return "working_directory_missing"
    except PermissionError:
        return "working_directory_denied"
    except (OSError, ValueError):
        return "working_directory_missing"
    return None if os.access(directory, os.X_OK) else "working_directory_denied"


def _check_size(argv: list[str], environment: Mapping[str, str]) -> str | None:
    """The kernel's two limits: every string, and all of them with their pointers below a quarter of the stack limit."""
    strings = [*argv, *(f"{name}={value}" for name, value in environment.items())]
    sizes = [len(os.fsencode(text)) + 1 for text in strings]
    quarter = resource.getrlimit(resource.RLIMIT_STACK)[0]
    quarter = _MOST_TOTAL if quarter == resource.RLIM_INFINITY else quarter // 4
    limit = max(min(quarter, _MOST_TOTAL), _LEAST_TOTAL)
    total = sum(sizes) + len(os.fsencode(argv[0])) + 1 + _POINTER * len(strings)
    return "too_large" if max(sizes) > _ONE_STRING or total > limit else None


def _check_file(file: str) -> str | None:
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116
    except PermissionError:
        return "not_executable"
    except (OSError, ValueError):
        return "command_not_found"
    if not stat.S_ISREG(mode):
        return "command_not_found"
    return None if os.access(file, os.X_OK) else "not_executable"  # also for a file system mounted noexec


def _check_format(file: str, working_directory: str, path: str) -> str | None:
    try:
        with open(file, "rb") as stream:  # noqa: PTH123
            head = stream.read(_FIRST_LINE)
    except OSError:
        return None  # a program may be executable without being readable
    if head.startswith(b"#!"):
        return _check_script(head, working_directory, path)
    return None if head.startswith(b"\x7fELF") or _has_other_formats() else "not_a_program"


def _check_script(head: bytes, working_directory: str, path: str) -> str | None:
    line, newline, _ = head[2:].partition(b"\n")
    if newline and line.endswith(b"\r"):
        return "crlf_script"
    words = line.split()
    if not words:
        return "not_a_program"
    interpreter = os.path.join(os.fsencode(working_directory), words[0])  # noqa: PTH118
    if not os.path.isfile(interpreter):  # noqa: PTH113
        return "interpreter_not_found"
    if not os.access(interpreter, os.X_OK):
        return "not_executable"
    named = words[1] if len(words) > 1 else b""
    if interpreter.endswith(b"/env") and path and named and not named.startswith(b"-") and b"=" not in named:
        folders = (os.path.join(os.fsencode(working_directory), folder) for folder in os.fsencode(path).split(b":"))  # noqa: PTH118
        if not any(os.access(os.path.join(folder, named), os.X_OK) for folder in folders):  # noqa: PTH118
            return "interpreter_not_found"
    return None


def _has_other_formats() -> bool:
    """Whether this kernel was taught further formats; then a file that is neither ELF nor script may still run."""
    try:
        return bool(set(os.listdir(_OTHER_FORMATS)) - {"register", "status"})  # noqa: PTH208
    except OSError:
        return False
