"""Secrets as files: `<directory>/<project>/<name>`, for a version `<name>@<version>`; directories 0700, files 0600.

The value is the file's content exactly as it is: a line feed at the end belongs to it. Environment bundles are files too,
always with a version. Nothing read here may reach the database, the audit or a log (control-plane.md §13).
"""

import re
from pathlib import Path
from typing import Final

from msgspec import UNSET

from ..domain.errors import Refused, Transient
from ..domain.revision import SecretReference
from .private_files import read_private_file, require_private

# A name is a file name: no separators, no leading dot, and no "@", which stands before a version.
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:+-]{0,127}\Z")


class SecretStore:
    """Reads secrets below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, reference: SecretReference, maximum: int) -> str:
        """The secret's text, at most `maximum` bytes. Blocks.

        Raises Transient when it is missing, too long, not text, or its file is open to others: an operator can mend that, and
        the worker's request may be sent again.
        """
        path = self._path(reference)
        try:
            require_private(path.parent, directory=True)
            text = read_private_file(path, maximum).decode()
        except UnicodeDecodeError:
            raise Transient("a secret's file must be UTF-8") from None
        except Refused as error:
            raise Transient(str(error)) from None
        if "\x00" in text:
            raise Transient("a secret's file must not contain NUL")
        return text

    def holds(self, reference: SecretReference) -> bool:
        """Whether there is such a secret, whatever its content. Blocks. Raises Transient for a name that cannot be one."""
        return self._path(reference).is_file()

    def _path(self, reference: SecretReference) -> Path:
        if not _FILE_NAME.match(reference.project_id) or not _FILE_NAME.match(reference.name):
            raise Transient("a secret's project and name must be 1 to 128 of [A-Za-z0-9._:+-], not starting with a dot")
        name = reference.name if reference.version is UNSET else f"{reference.name}@{reference.version}"
        return self._directory / reference.project_id / name
