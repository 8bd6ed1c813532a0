"""The list of revoked certificates that this replica checks clients against, kept in step with the database.

Every replica writes its own: the one an operator talked to at once, the others within a few seconds. The list is signed anew
long before it would run out. Source: control-plane.md §15.3, V113.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from ..domain.errors import QlworkerError
from . import certificates
from .database import Database
from .logs import Log
from .pki import REVOCATION_DAYS
from .private_files import replace_private_file
from .signing import Signing

INTERVAL_S: Final = 10
RENEW_AFTER_S: Final = REVOCATION_DAYS * 86_400 / 3


class Revocations:
    """Writes `path` and calls `reload`, which reads it again. `refresh` may be called at any time."""

    def __init__(self, database: Database, signing: Signing, path: Path, reload: Callable[[], None], log: Log) -> None:
        self._database = database
        self._signing = signing
        self._path = path
        self._reload = reload
        self._log = log
        self._written: list[str] | None = None
        self._written_at = 0.0
        self._turn = trio.CapacityLimiter(1)

    async def refresh(self) -> None:
        """Writes the list if it has to change. Raises Transient where nothing can be signed, but only if something should."""
        async with self._turn:
            serials = await self._database.run(certificates.revoked_serials)
            is_old = trio.current_time() - self._written_at > RENEW_AFTER_S
            if (serials == self._written and not is_old) or not (serials or self._path.exists()):
                return
            content = await self._signing.revocations(serials, REVOCATION_DAYS)
            await trio.to_thread.run_sync(replace_private_file, self._path, content)
            self._reload()
            self._written, self._written_at = serials, trio.current_time()
            self._log.info("revocation_list_written", certificates=len(serials))

    async def tick(self) -> None:
        """The same, for a rhythm: says why it did not work."""
        try:
            await self.refresh()
        except (QlworkerError, OSError) as error:
            self._log.error("revocation_list_not_written", reason=str(error))
