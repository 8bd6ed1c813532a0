"""The completion receipt: what the launcher publishes when the command is over, and how the worker proves it genuine.

Source: wire-protocol.md §8.4, R179 to R197, design.md §2. Schema 1 is the upstream's form; schema 2 adds how the end is known.
A JSON file in a private directory is not by itself a fact (R184): only the completion capability makes it one.
"""

from enum import StrEnum
from typing import Final, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from .canonical import callback_token_digest, digests_equal, from_b64u
from .document import Document
from .record import InboxRecord
from .text import INT31, check_integer, check_launch_id

RECEIPT_BYTES: Final = 4096
CLOCK_TOLERANCE_MS: Final = 5 * 60 * 1000


class Ending(StrEnum):
    """How the launcher knows that it is over."""

    EXITED = "exited"
    SIGNALED = "signaled"
    NOT_STARTED = "not_started"


class Receipt(Document, frozen=True, kw_only=True):
    """One attempt's end. `exit_code` is 0..255; for a signal it is 128 plus the signal, and `signal` tells the two apart.

    Times are milliseconds in the control plane's time, as the worker knew it at launch; the distance between them was
    counted on CLOCK_BOOTTIME.
    """

    schema_version: Literal[1, 2]
    run_id: str
    attempt_id: str
    callback_sequence: int
    token: str
    started_at_ms: int
    finished_at_ms: int
    exit_code: int
    ending: Ending | UnsetType = UNSET
    signal: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_launch_id(self.run_id, "runId")
        check_launch_id(self.attempt_id, "attemptId")
        check_integer(self.callback_sequence, "callbackSequence", 1, INT31)
        check_integer(self.started_at_ms, "startedAtMs")
        check_integer(self.finished_at_ms, "finishedAtMs", self.started_at_ms)
        check_integer(self.exit_code, "exitCode", 0, 255)
        if (self.ending is UNSET) is not (self.schema_version == 1):
            raise ValueError("ending belongs to schema 2")
        if (self.signal is UNSET) is (self.ending is Ending.SIGNALED):
            raise ValueError("signal belongs to the ending signaled")

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The receipt in `data`. Raises ValueError for any other content or above 4 KiB."""
        if len(data) > RECEIPT_BYTES:
            raise ValueError(f"a receipt must be at most {RECEIPT_BYTES} bytes")
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError("a receipt must be one JSON object of the documented members") from error

    @property
    def says_not_started(self) -> bool:
        """Whether the gate was never opened: the user's command did not run."""
        return self.ending is Ending.NOT_STARTED


def authenticate(receipt: Receipt, record: InboxRecord, now_ms: int | None) -> bool:
    """Whether `receipt` belongs to `record` and was written by the launcher that got its capability (R180 to R191).

    Run, attempt, sequence and start time must be equal, the token's digest equal in constant time, and the end not more
    than five minutes after `now_ms` (control-plane.md D17); None while the control plane's time is not known, because a box
    that boots in 1970 must not distrust the end of its own runs. A record without the receipt pair can authenticate nothing.
    """
    digest = record.completion_receipt_token_digest
    if digest is UNSET:
        return False
    try:
        token_digest = callback_token_digest(from_b64u(receipt.token))
    except ValueError:
        return False
    return (
        digests_equal(token_digest, digest)
        and receipt.run_id == record.offer.run_id
        and receipt.attempt_id == record.offer.attempt_id
        and receipt.callback_sequence == record.completion_receipt_callback_sequence
        and receipt.started_at_ms == record.executor_started_at_ms
        and (now_ms is None or receipt.finished_at_ms <= now_ms + CLOCK_TOLERANCE_MS)
    )
