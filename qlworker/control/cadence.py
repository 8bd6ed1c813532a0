"""One rhythm: a tick, a pause, the next tick; never two at once, and never a reason to stay when the server stops.

Source: control-plane.md §10.6, §22 item 4, R366 to R368. Each kind of background work is a function for one page; what makes it
happen again and again is here, once.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from .counting import Counting
from .logs import Log

STOP_WAIT_S: Final = 5
"""How long a tick under way may take after a stop before it is cancelled between two of its transactions."""


async def keep_time(
    name: str,
    interval_s: float,
    tick: Callable[[], Awaitable[object]],
    *,
    stopping: trio.Event,
    log: Log,
    counting: Counting,
) -> None:
    """Calls `tick` at once and then `interval_s` seconds after each one ended, until `stopping` is set.

    A tick that fails is told in the log and is no reason to skip the next one.
    """
    while not stopping.is_set():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_bounded, nursery.cancel_scope, stopping)
            try:
                await tick()
                counting.tick(name, succeeded=True)
            except Exception as error:
                counting.tick(name, succeeded=False)
                log.error("cadence_failed", cadence=name, error=type(error).__name__)
            nursery.cancel_scope.cancel()
        with trio.move_on_after(interval_s):
            await stopping.wait()


async def _bounded(scope: trio.CancelScope, stopping: trio.Event) -> None:
    await stopping.wait()
    await trio.sleep(STOP_WAIT_S)
    scope.cancel()
