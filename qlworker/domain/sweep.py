"""Where the sweep of old records stands: kept by its caller, so that a restart goes on instead of beginning again (R260)."""

from typing import Final, Literal

import msgspec

from .document import Document
from .errors import Misconfigured
from .text import check_integer, check_offer_id

PAGE_DEFAULT: Final = 16
PAGE_MAX: Final = 64
DELETIONS_DEFAULT: Final = 8
DELETIONS_MAX: Final = 64
AGE_MIN_MS: Final = 60_000
AGE_MAX_MS: Final = 30 * 24 * 3600 * 1000


class SweepPosition(Document, frozen=True, kw_only=True):
    """`after` is the cursor, null for the beginning. `due_at_ms` is when the next round may begin, in the control plane's
    time and in milliseconds; 0 for at once."""

    schema_version: Literal[1] = 1
    after: str | None = None
    due_at_ms: int = 0

    def __post_init__(self) -> None:
        check_integer(self.due_at_ms, "dueAtMs")
        if self.after is not None:
            check_offer_id(self.after, "after")


class SweepTerms(msgspec.Struct, frozen=True):
    """What one call may do: read a page of 1 to 64 records, remove 1 to 64, none younger than `age_ms` (1 minute to 30 days).

    Raises Misconfigured outside (R258, R259, R267, R268).
    """

    age_ms: int
    page_size: int = PAGE_DEFAULT
    max_deletions: int = DELETIONS_DEFAULT

    def __post_init__(self) -> None:
        if not AGE_MIN_MS <= self.age_ms <= AGE_MAX_MS:
            raise Misconfigured(f"a record may be removed after {AGE_MIN_MS} to {AGE_MAX_MS} milliseconds, not {self.age_ms}")
        if not 1 <= self.page_size <= PAGE_MAX:
            raise Misconfigured(f"a sweep's page must be of 1 to {PAGE_MAX} records, not {self.page_size}")
        if not 1 <= self.max_deletions <= DELETIONS_MAX:
            raise Misconfigured(f"a sweep may remove 1 to {DELETIONS_MAX} records, not {self.max_deletions}")
