"""How long to wait before trying again."""

from typing import Final

CAP_MS: Final = 60_000


def full_jitter_ms(attempt: int, base_ms: int, fraction: float) -> int:
    """`fraction` (0..1) of min(60 s, base x 2^(attempt-1)), in milliseconds; `attempt` counts from 1 (wire-protocol §3.3)."""
    ceiling = min(CAP_MS, base_ms * 2 ** min(max(attempt - 1, 0), 30))
    return int(fraction * ceiling)
