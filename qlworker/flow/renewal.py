"""Gets the worker's next certificate before the present one ends, without a restart.

Best effort beside the worker's work: what goes wrong is tried again, the present certificate stays, and nothing else waits.
Dates are judged by the control plane's clock alone: a box may boot in 1970. Source: control-plane.md §15.3.
"""

import random
from collections.abc import Callable
from typing import Final

import trio

from ..domain.certificate import DAY_MS, HOUR_MS, Validity
from ..domain.errors import Fenced, Misconfigured, Transient, Unsupported
from ..ports import CertificateFile, Clock, Log
from .control_plane import ControlPlane
from .lease_control import UNANSWERED
from .server_clock import ServerClock
from .session import SessionKeeper

LOOK_MS: Final = 6 * HOUR_MS
"""How often the date is looked at, at least: the file may have been replaced, the clock corrected."""
RETRY_MS: Final = (30_000, LOOK_MS)
"""The first and the longest wait after a failure; each is twice the one before."""
BY_HAND_MS: Final = DAY_MS


class CertificateRenewal:
    """One look at a time. `tick` belongs to the rhythm, `run` to a task of its own."""

    def __init__(
        self,
        control_plane: ControlPlane,
        file: CertificateFile,
        sessions: SessionKeeper,
        clock: Clock,
        server_clock: ServerClock,
        log: Log,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._control_plane = control_plane
        self._file = file
        self._sessions = sessions
        self._clock = clock
        self._server_clock = server_clock
        self._log = log
        self._fraction = fraction
        self._early = fraction()
        self._failures = 0
        self._next_ms = clock.boot_ms()
        self._wake = trio.Event()

    def tick(self) -> None:
        """Lets the next look begin when it is time and the control plane can be asked."""
        if self._clock.boot_ms() >= self._next_ms and self._sessions.live is not None and self._server_clock.is_proven:
            self._wake.set()

    async def run(self) -> None:
        """Looks, for ever."""
        while True:
            await self._wake.wait()
            wait_ms = await self._look()
            self._next_ms = self._clock.boot_ms() + wait_ms
            self._wake = trio.Event()

    async def _look(self) -> int:
        """Does what is due; how long to wait then, in milliseconds."""
        try:
            validity = await self._file.validity()
        except Misconfigured as error:
            return self._failed(error, None)
        left_ms = validity.renewal_due_ms(self._early) - self._server_clock.now_ms()
        if left_ms > 0:
            return min(left_ms, LOOK_MS)
        if not self._file.is_replaceable:
            return self._leave("certificate and key are two files, or their directory is not to be written", validity)
        try:
            await self._renew()
        except Unsupported:
            return self._leave("the control plane renews no certificates", validity)
        except (*UNANSWERED, Fenced, Misconfigured, OSError) as error:
            return self._failed(error, validity)
        self._failures = 0
        return HOUR_MS

    async def _renew(self) -> None:
        key, request = await self._file.new_request()
        live = self._sessions.live
        if live is None:
            raise Transient("the session ended meanwhile")
        answer = await self._control_plane.certificate(live.session_id, request)
        await self._file.install(answer.certificate, key)
        self._log.info("certificate_renewed", serial=answer.serial, ends_at_ms=answer.not_after_ms)

    def _leave(self, reason: str, validity: Validity) -> int:
        self._log.warning("certificate_renewal_by_hand", reason=reason, ends_at_ms=validity.not_after_ms)
        return BY_HAND_MS

    def _failed(self, error: Exception, validity: Validity | None) -> int:
        """Foreign texts may quote what they should not; ours do not."""
        reason = type(error).__name__ if isinstance(error, OSError) else str(error)
        ends_at_ms = None if validity is None else validity.not_after_ms
        self._log.warning("certificate_not_renewed", reason=reason, ends_at_ms=ends_at_ms)
        longest = min(RETRY_MS[0] << min(self._failures, 20), RETRY_MS[1])
        self._failures += 1
        wait_ms = int(longest * (1 + self._fraction()) / 2)
        if isinstance(error, Transient) and error.retry_after_s is not None:
            wait_ms = max(wait_ms, int(error.retry_after_s * 1000))
        return wait_ms
