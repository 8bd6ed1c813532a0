"""The life of an owned journal: acquire, audit, bounded recovery, audit again, hold, release (R97 to R105, R256).

Whatever refuses on the way, the ownership is given back first and only then is it said: an operator who reads the message can
start again at once. There is no timer here and nothing is pulled: the caller opens delivery inside the block, never before.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from ...domain.audit import Audit
from .audit import StartupAuditor


class Ownership(Protocol):
    """The lock of the journal."""

    async def acquire(self) -> None:
        """Owns the journal. Raises OwnershipHeld."""

    async def release(self) -> None:
        """Gives it back. Idempotent."""


class Recovery(Protocol):
    """What may be done between the two audits. Raises Corrupt before its first effect when it would be too much (R101)."""

    async def recover(self, audit: Audit) -> object:
        """Does it."""


class JournalLifecycle:
    """`prepare` makes the owned directories usable before the first record is read; None stands for nothing to do.

    Without a `recovery` the order is acquire, audit, hold (R98).
    """

    def __init__(
        self,
        ownership: Ownership,
        auditor: StartupAuditor,
        recovery: Recovery | None = None,
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._ownership = ownership
        self._auditor = auditor
        self._recovery = recovery
        self._prepare = prepare

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Audit]:
        """Holds the journal as long as the block runs; the last audit says what was found.

        Raises OwnershipHeld when somebody else has it, and whatever the preparation, an audit or the recovery raises, after
        the journal was released.
        """
        await self._ownership.acquire()
        try:
            if self._prepare is not None:
                await self._prepare()
            audit = await self._auditor.audit()
            if self._recovery is not None:
                await self._recovery.recover(audit)
                audit = await self._auditor.audit()
            yield audit
        finally:
            with trio.CancelScope(shield=True):
                await self._ownership.release()
