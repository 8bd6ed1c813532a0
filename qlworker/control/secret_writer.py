"""Storing secrets where the worker listener finds them (secret_store.py). Values are kept byte by byte as they are given."""

from pathlib import Path
from typing import Final

from ..domain.errors import Conflict
from ..domain.text import INT31, check_integer
from .private_files import create_private_file, make_private_directory, read_private_file, replace_private_file
from .task_file import check_secret_name

SECRET_BYTES: Final = 16 * 1024
BUNDLE_BYTES: Final = 96 * 1024


def put_secret(directory: Path, project: str, name: str, version: int | None, value: bytes) -> bool:
    """Stores `value` as a secret of `project` and says whether anything changed. Blocks.

    A secret without a version may be replaced, at most 16 KiB; one with a version (an environment bundle, at most 96 KiB) is
    written once. Raises ValueError for a bad name, size or text, Conflict for a version that has another value.
    """
    check_secret_name(project, "a project with secrets")
    check_secret_name(name)
    maximum = SECRET_BYTES if version is None else BUNDLE_BYTES
    if len(value) > maximum:
        raise ValueError(f"the secret must be at most {maximum} bytes")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise ValueError("the secret must be UTF-8 text") from None
    if "\x00" in text:
        raise ValueError("the secret must not contain NUL")
    make_private_directory(directory)
    make_private_directory(directory / project)
    if version is None:
        replace_private_file(directory / project / name, value)
        return True
    path = directory / project / f"{name}@{check_integer(version, 'version', 1, INT31)}"
    try:
        create_private_file(path, value)
    except FileExistsError:
        if read_private_file(path, BUNDLE_BYTES) != value:
            raise Conflict(f"version {version} of the secret {name} has another value; use a new version") from None
        return False
    return True
