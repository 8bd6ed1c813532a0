"""The control plane's time as this worker knows it. One holder of the anchor; everybody else only asks."""

from ..domain.server_time import Anchor, observe
from ..ports import Clock


class ServerClock:
    """Server time on the boot clock, or the wall clock until the first answer of this boot told better."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.anchor: Anchor | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the control plane told its time in this boot. Nothing is judged or deleted by date before that."""
        return self.anchor is not None

    def adopt(self, anchor: Anchor) -> None:
        """Takes the anchor an earlier process of this boot stored; one of another boot says nothing."""
        if anchor.boot_id == self._clock.boot_id:
            self.anchor = anchor

    def observe(self, server_ms: int, sent_ms: int) -> None:
        """Learns from an answer that arrived now to a request sent at `sent_ms` on the boot clock."""
        self.anchor = observe(self.anchor, self._clock.boot_id, server_ms, sent_ms, self._clock.boot_ms())

    def now_ms(self) -> int:
        """The control plane's time, in milliseconds since 1970."""
        return self._clock.wall_ms() if self.anchor is None else self.anchor.server_time(self._clock.boot_ms())

    def boot_time(self, server_ms: int) -> int:
        """When on the boot clock `server_ms` is reached, never later than it truly is. Without an anchor: by the wall clock."""
        if self.anchor is not None:
            return self.anchor.boot_time(server_ms)
        return self._clock.boot_ms() + server_ms - self._clock.wall_ms()
