"""The two clocks of a Linux box."""

import time

import trio


class SystemClock:
    """CLOCK_BOOTTIME for decisions, CLOCK_REALTIME for display. trio sleeps on CLOCK_MONOTONIC, which stands still during a
    suspend, so a sleeper looks again after waking."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id

    def boot_ms(self) -> int:
        """Milliseconds since boot, suspend included."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as far as this box knows."""
        return time.time_ns() // 1_000_000

    async def sleep_until(self, boot_ms: int) -> None:
        """Returns once `boot_ms()` has reached the argument."""
        while (remaining := boot_ms - self.boot_ms()) > 0:
            await trio.sleep(remaining / 1000)
        await trio.lowlevel.checkpoint()
