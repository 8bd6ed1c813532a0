"""A clock that moves by hand."""

import trio


class HandClock:
    """Boot and wall clock, apart from each other; sleepers wake when the boot clock has come far enough."""

    boot_id = "boot"

    def __init__(self, boot_ms: int = 1_000_000, wall_ms: int = 1_700_000_000_000) -> None:
        self._boot_ms = boot_ms
        self._wall_ms = wall_ms
        self._moved = trio.Event()

    def boot_ms(self) -> int:
        return self._boot_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    async def sleep_until(self, boot_ms: int) -> None:
        await trio.lowlevel.checkpoint()
        while self._boot_ms < boot_ms:
            await self._moved.wait()

    def step_wall(self, by_ms: int) -> None:
        self._wall_ms += by_ms

    def advance(self, by_ms: int) -> None:
        self._boot_ms += by_ms
        self._wall_ms += by_ms
        moved, self._moved = self._moved, trio.Event()
        moved.set()
