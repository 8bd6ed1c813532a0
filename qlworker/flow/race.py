"""Waiting for whichever of several things happens first."""

from collections.abc import Awaitable, Callable

import trio


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Returns when the first of `waits` returns; the others are cancelled."""
    async with trio.open_nursery() as nursery:

        async def run(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            nursery.cancel_scope.cancel()

        for wait in waits:
            nursery.start_soon(run, wait)
