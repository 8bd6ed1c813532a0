"""The control plane's time, estimated on the boot clock, so that a wrong or stepping wall clock spoils nothing.

Each answer that tells the server's time bounds the offset: the server read its clock after the request was sent and before
the answer came. The estimate kept is the earliest upper bound, so expiry is judged early rather than late.
Source: wire-protocol.md §0.5, design.md §3 "time".
"""

from .document import Document


class Anchor(Document, frozen=True, kw_only=True):
    """One correspondence of server time and boot clock, both in milliseconds, valid for one boot."""

    boot_id: str
    server_ms: int
    boot_ms: int

    def server_time(self, boot_ms: int) -> int:
        """The control plane's time at `boot_ms`, in milliseconds; early by no more than the round trip of one exchange."""
        return self.server_ms + boot_ms - self.boot_ms

    def boot_time(self, server_ms: int) -> int:
        """When on the boot clock `server_ms` is reached; never later than it truly is."""
        return self.boot_ms + server_ms - self.server_ms


def observe(anchor: Anchor | None, boot_id: str, server_ms: int, sent_ms: int, received_ms: int) -> Anchor:
    """The anchor after an answer said `server_ms`; `sent_ms` and `received_ms` are boot clock readings around the exchange.

    The old anchor stays while it agrees with the new bounds and is the tighter one. It is replaced when the new upper
    bound is earlier, when the server's clock was set (the old estimate lies outside the bounds), and after a reboot.
    """
    fresh = Anchor(boot_id=boot_id, server_ms=server_ms, boot_ms=sent_ms)
    if anchor is None or anchor.boot_id != boot_id:
        return fresh
    estimate = anchor.server_time(received_ms)
    agrees = server_ms <= estimate <= fresh.server_time(received_ms)
    return anchor if agrees else fresh
