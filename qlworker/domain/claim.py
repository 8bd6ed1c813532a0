"""The pending claim: the offer id and token a pull uses, durable before the first request (wire-protocol.md §3.3, §10.3)."""

from typing import Final, Literal

import msgspec

from .document import Document
from .errors import Conflict
from .text import INT31, check_integer, check_lease_token, check_offer_id, check_session_id, check_worker_id

MAX_ATTEMPTS: Final = 16


class PendingClaim(Document, frozen=True, kw_only=True):
    """One pull and its retries, at most 16, all with the same pair. Times are wall milliseconds and only recorded: what
    waits is counted on the boot clock."""

    schema_version: Literal[1]
    revision: int
    worker_id: str
    worker_session_id: str
    worker_generation: int
    offer_id: str
    lease_token: str
    attempt_count: int
    created_at_ms: int
    updated_at_ms: int
    last_attempt_at_ms: int | None
    next_attempt_at_ms: int

    def __post_init__(self) -> None:
        check_integer(self.revision, "revision")
        check_worker_id(self.worker_id)
        check_session_id(self.worker_session_id)
        check_integer(self.worker_generation, "workerGeneration", 1, INT31)
        check_offer_id(self.offer_id)
        check_lease_token(self.lease_token)
        check_integer(self.attempt_count, "attemptCount", 0, MAX_ATTEMPTS)
        check_integer(self.created_at_ms, "createdAtMs")
        check_integer(self.updated_at_ms, "updatedAtMs", self.created_at_ms)
        check_integer(self.next_attempt_at_ms, "nextAttemptAtMs", self.created_at_ms)
        if self.last_attempt_at_ms is not None:
            check_integer(self.last_attempt_at_ms, "lastAttemptAtMs", self.created_at_ms, self.updated_at_ms)

    def belongs_to(self, session_id: str, generation: int) -> bool:
        """Whether this claim was made in that session. One of an older session is dropped: its lease, if it ever got one,
        can no longer be used by this worker (wire-protocol §3.3)."""
        return self.worker_session_id == session_id and self.worker_generation == generation

    @property
    def is_exhausted(self) -> bool:
        """Whether all 16 attempts were made."""
        return self.attempt_count >= MAX_ATTEMPTS

    def attempted(self, wall_ms: int) -> "PendingClaim":
        """The claim with one more attempt, to be durable before its request. Raises Conflict after the sixteenth."""
        if self.is_exhausted:
            raise Conflict(f"claim {self.offer_id} was tried {MAX_ATTEMPTS} times")
        now = max(wall_ms, self.updated_at_ms)
        return msgspec.structs.replace(
            self,
            revision=self.revision + 1,
            attempt_count=self.attempt_count + 1,
            updated_at_ms=now,
            last_attempt_at_ms=now,
            next_attempt_at_ms=now,
        )
