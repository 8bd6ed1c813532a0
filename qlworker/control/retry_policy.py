"""The retry policy of a run: when a lost attempt may be followed by another one, and after which wait. Pure.

It comes from the pinned revision alone: never from a worker, a run command or anything that can change while a run is under
way. Source: control-plane.md §10, R324 to R334.
"""

from typing import Final, Literal

import msgspec

Safety = Literal["unknown", "idempotent", "deduplicated"]

MAX_ATTEMPTS: Final = 16
DAY_MS: Final = 86_400_000
BACKOFF_DOUBLINGS: Final = 15

DISABLED: Final = "RUN_LOST_RETRY_DISABLED"
UNSAFE: Final = "RUN_LOST_RETRY_UNSAFE"
EXHAUSTED: Final = "RUN_LOST_RETRY_EXHAUSTED"
SCHEDULED: Final = "RUN_LOST_RETRY_SCHEDULED"


class RetryTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[retry]` table of a task file. `max_attempts` counts the first one; the waits are seconds, 0 to a day.

    `safety` is what the task's author vouches for: `idempotent`, running the command twice does no harm; `deduplicated`, what
    it talks to drops the second time. A command that was lost may still be running: without one of both nothing is retried.
    """

    max_attempts: int = 2
    on_lost: bool = True
    safety: Safety = "unknown"
    backoff_s: float = 10
    backoff_max_s: float = 600

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ValueError(f"retry.max_attempts is {self.max_attempts}, it must be 1 to {MAX_ATTEMPTS}")
        if not 0 <= self.backoff_s <= self.backoff_max_s <= DAY_MS / 1000:
            raise ValueError(
                f"retry.backoff_s is {self.backoff_s:g} and retry.backoff_max_s {self.backoff_max_s:g}: "
                "both must be 0 to 86400 seconds, the first not above the second"
            )
        if self.on_lost and self.max_attempts > 1 and self.safety == "unknown":
            raise ValueError(
                "retry.safety is unknown: a lost command may still be running, so say that it is "
                '"idempotent" or "deduplicated", or leave [retry] out'
            )


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_retry_policies`; times in milliseconds."""

    run_id: str
    max_attempts: int
    retry_on_lost: bool
    safety: Safety
    backoff_base_ms: int
    backoff_max_ms: int
    next_attempt_at_ms: int | None = None
    version: int = 0
    created_at_ms: int
    updated_at_ms: int

    @classmethod
    def of(cls, run_id: str, terms: RetryTerms, now_ms: int) -> "RetryPolicy":
        """The policy of a new run under `terms`."""
        return cls(
            run_id=run_id,
            max_attempts=terms.max_attempts,
            retry_on_lost=terms.on_lost,
            safety=terms.safety,
            backoff_base_ms=round(terms.backoff_s * 1000),
            backoff_max_ms=round(terms.backoff_max_s * 1000),
            created_at_ms=now_ms,
            updated_at_ms=now_ms,
        )

    def backoff_ms(self, lost_attempt: int) -> int:
        """How long after attempt number `lost_attempt` (from 1) was lost the next one may be made (§10.4)."""
        doublings = min(max(lost_attempt - 1, 0), BACKOFF_DOUBLINGS)
        return min(self.backoff_max_ms, self.backoff_base_ms << doublings)


def refusal(policy: RetryPolicy | None, lost_attempt: int) -> str | None:
    """Why attempt number `lost_attempt` gets no successor, or None when it may have one; in the order of §10.3."""
    if policy is None or not policy.retry_on_lost or policy.max_attempts <= 1:
        return DISABLED
    if policy.safety == "unknown":
        return UNSAFE
    return EXHAUSTED if lost_attempt >= policy.max_attempts else None
