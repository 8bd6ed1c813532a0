"""Looks after the output of running commands: keeps each file bounded and shows its growth to the control plane.

The view is an extension beside the twelve operations. It is best effort: a server that does not know it turns it off, an error
only waits for the next tick, and neither outcome nor heartbeat ever waits for it.
"""

from collections.abc import Callable
from typing import Final

import trio

from ..domain.errors import Corrupt, Fenced, Unsupported
from ..ports import Inbox, Log, OutputStore
from ..wire.completion import OUTPUT_CHUNK_BYTES, OutputRequest
from .active import ActiveOffer, ActiveOffers, LiveOutput
from .control_plane import ControlPlane
from .lease_control import UNANSWERED

CHUNKS_PER_TICK: Final = 8


class OutputKeeper:
    """One round per tick of the cadence, never two at a time. `hasten` asks lease-control early after a hint of a stop."""

    def __init__(
        self,
        control_plane: ControlPlane,
        inbox: Inbox,
        outputs: OutputStore,
        active: ActiveOffers,
        log: Log,
        *,
        hasten: Callable[[ActiveOffer], None],
        is_view_wanted: bool,
    ) -> None:
        self._control_plane = control_plane
        self._inbox = inbox
        self._outputs = outputs
        self._active = active
        self._log = log
        self._hasten = hasten
        self._is_view_on = is_view_wanted
        self._tick = trio.Event()

    def tick(self) -> None:
        """Lets the next round begin, if none is under way."""
        self._tick.set()

    async def run(self) -> None:
        """Rounds, for ever."""
        while True:
            await self._tick.wait()
            self._tick = trio.Event()
            for active in self._active:
                if active.live is not None:
                    await self._keep(active, active.live)

    async def _keep(self, active: ActiveOffer, live: LiveOutput) -> None:
        try:
            await self._outputs.trim(live.log_artifact_id)
            if self._is_view_on:
                await self._show(active, live)
        except Unsupported:
            self._is_view_on = False
            self._log.info("live_output_off", reason="the control plane has no such operation")
        except (*UNANSWERED, Fenced, OSError, Corrupt) as error:
            self._log.info("live_output_deferred", offer=active.offer_id, error=type(error).__name__)

    async def _show(self, active: ActiveOffer, live: LiveOutput) -> None:
        for _ in range(CHUNKS_PER_TICK):
            offset, data = await self._outputs.read(live.log_artifact_id, live.offset, OUTPUT_CHUNK_BYTES)
            record = await self._inbox.read(active.offer_id)
            if record is None:
                return
            request = OutputRequest.of(record.offer, log_artifact_id=live.log_artifact_id, offset=offset, data=data)
            answer = await self._control_plane.output(record.offer, request)
            live.offset = offset + len(data)
            if answer.stop_requested:
                self._hasten(active)
            if len(data) < OUTPUT_CHUNK_BYTES:
                return
