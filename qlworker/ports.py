"""What the flow needs from the outside, and nothing else. Adapters implement these; only app.py knows which.

Every coroutine may be cancelled unless it says otherwise. Times ending in `_ms` are milliseconds; "boot" is CLOCK_BOOTTIME.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from .domain.certificate import Validity
from .domain.claim import PendingClaim
from .domain.identity import DurableHandle, Presence
from .domain.receipt import Receipt
from .domain.record import InboxRecord
from .domain.session import StoredSession
from .domain.sweep import SweepPosition


class Clock(Protocol):
    """Two clocks: the boot clock decides, the wall clock is displayed."""

    @property
    def boot_id(self) -> str:
        """The kernel's id of this boot."""

    def boot_ms(self) -> int:
        """CLOCK_BOOTTIME; counts through suspend and never steps."""

    def wall_ms(self) -> int:
        """CLOCK_REALTIME; may be 1970 or step at any time."""

    async def sleep_until(self, boot_ms: int) -> None:
        """Returns once `boot_ms()` has reached the argument."""


class Page(msgspec.Struct, frozen=True):
    """Records in ascending order of offer id, and the cursor of the next page or None."""

    records: list[InboxRecord]
    next_after: str | None


class Inbox(Protocol):
    """The journal of offers (groups A and B). Raises OwnershipLost before everything else when it is not owned.

    create, replace and remove run one at a time in the order they were called (R46).
    """

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        """At most `limit` (1..64) records whose offer id is above `after`."""

    async def read(self, offer_id: str) -> InboxRecord | None:
        """The record, or None. Raises Corrupt for a damaged one."""

    async def create(self, record: InboxRecord) -> None:
        """Publishes a first record. Raises Conflict when the offer id exists, CapacityExceeded when the journal is full."""

    async def replace(self, record: InboxRecord) -> None:
        """Writes the successor of the stored record. Raises Conflict unless its revision is exactly one higher and the
        update is legal."""

    async def remove(self, offer_id: str, revision: int) -> bool:
        """Removes a settled record if it still has `revision`; says whether it did. Raises Conflict if it is unsettled."""


class ClaimStore(Protocol):
    """The one pending claim."""

    async def read_claim(self) -> PendingClaim | None:
        """The claim, or None."""

    async def write_claim(self, claim: PendingClaim) -> None:
        """Makes the claim durable."""

    async def remove_claim(self, claim: PendingClaim) -> None:
        """Removes it if offer id and revision are still those."""


class SessionStore(Protocol):
    """The one session to continue."""

    async def read_session(self) -> StoredSession | None:
        """The session, or None."""

    async def write_session(self, session: StoredSession) -> None:
        """Makes the session durable."""

    async def remove_session(self) -> None:
        """Forgets it."""


class SweepStore(Protocol):
    """Where the sweep of old records stands."""

    async def read_sweep(self) -> SweepPosition | None:
        """The position, or None. Raises Corrupt for a damaged one."""

    async def write_sweep(self, position: SweepPosition) -> None:
        """Makes the position durable."""


class LaunchPlan(msgspec.Struct, frozen=True):
    """Everything the launcher gets through its pipe. Holds secrets: it is never stored, logged or shown.

    `token` is the caller's buffer of 32 bytes, which the caller wipes afterwards: an executor copies what it needs (R399).
    """

    run_id: str
    attempt_id: str
    callback_sequence: int
    token: bytearray
    started_at_ms: int
    argv: list[str]
    environment: dict[str, str]
    working_directory: str
    output: Path
    receipt: Path

    def __repr__(self) -> str:
        return f"<LaunchPlan attempt={self.attempt_id}>"


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Proof that no user execution arose (R385). `reason` is a fixed word, low in sensitivity."""

    reason: str


class Gate(Protocol):
    """What holds a launched command back."""

    async def open(self) -> None:
        """Lets the command run, now and only now. Raises OSError when the launcher is gone."""

    async def abandon(self) -> None:
        """Closes the gate without opening it: the launcher publishes "not started". Idempotent."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A launcher stands at its gate with the command's process below it; nothing of the user's has run."""

    handle: DurableHandle
    gate: Gate


class StopResult(StrEnum):
    """What a stop achieved (wire-protocol §11.6). Only `stopped` and `already_exited` prove that nothing is left."""

    STOPPED = "stopped"
    ALREADY_EXITED = "already_exited"
    TIMED_OUT = "timed_out"
    UNKNOWN = "unknown"


class Processes(Protocol):
    """Launchers and commands of this host."""

    def precheck(
        self, argv: list[str], working_directory: str, path: str, environment: Mapping[str, str] | None = None
    ) -> Rejected | None:
        """Why this command cannot be started, as far as it can be told without starting it, or None. `path` is where an
        interpreter named without a directory is looked for."""

    async def launch(self, plan: LaunchPlan) -> Rejected | Held:
        """Starts a launcher and returns once it holds the command at the gate. An exception means: unknown."""

    async def inspect(self, handle: DurableHandle) -> Presence:
        """Whether the launcher or its command still runs."""

    async def wait_gone(self, handle: DurableHandle) -> None:
        """Returns once launcher and command recorded in `handle` are gone (at once when they are not running)."""

    async def stop(self, handle: DurableHandle, grace_ms: int) -> StopResult:
        """TERM to the command's group, `grace_ms`, KILL to the group and to every process of its session; then looks that
        nothing is left. The launcher stays alive to publish the receipt."""


class Receipts(Protocol):
    """Published completion receipts, by attempt id."""

    def path(self, attempt_id: str) -> Path:
        """Where the launcher publishes the receipt. Its directory exists after the call."""

    async def read(self, attempt_id: str) -> Receipt | None:
        """The receipt, or None. Raises Corrupt for a file that is not one, or unsafe."""

    async def remove(self, attempt_id: str) -> None:
        """Removes the receipt. Idempotent."""


class SealedOutput(msgspec.Struct, frozen=True):
    """The part of an output file that is the artifact: fixed once, whatever is appended later."""

    path: Path
    byte_length: int
    sha256: str
    truncated: bool


class OutputStore(Protocol):
    """One append-only file per attempt."""

    async def prepare(self, log_artifact_id: str) -> Path:
        """Makes the empty file. Raises Refused when the disk has not enough free bytes or inodes."""

    async def trim(self, log_artifact_id: str) -> None:
        """Keeps the file below its maximum, with a visible marker where something was cut out."""

    async def read(self, log_artifact_id: str, offset: int, limit: int) -> tuple[int, bytes]:
        """At most `limit` bytes from stream position `offset`, and the position they really start at (higher after a cut)."""

    async def seal(self, log_artifact_id: str) -> SealedOutput:
        """Fixes what is there now as the artifact, durably. Idempotent: the same answer after a restart."""

    async def remove(self, log_artifact_id: str) -> None:
        """Removes the file and what belongs to it. Idempotent."""


class CertificateFile(Protocol):
    """The worker's own certificate and key."""

    @property
    def is_replaceable(self) -> bool:
        """Whether both can be replaced at once, by this process."""

    async def validity(self) -> Validity:
        """From when until when the installed certificate is good. Raises Misconfigured for a file that holds none."""

    async def new_request(self) -> tuple[bytes, str]:
        """A new key and the request to certify it, both PEM. Raises Transient or Misconfigured when none can be made."""

    async def install(self, certificate: str, key: bytes) -> None:
        """Puts both in the place of the present ones, durably. Raises Refused for a certificate that is not the next one."""


class Link(Protocol):
    """The authenticated connection to the control plane.

    Raises Transient, Malformed, Unsupported, Unauthorized, Fenced by status; Refused when a 200 answer breaks the contract.
    """

    async def call(self, session_id: str, operation: str, body: bytes, *, request_limit: int, response_limit: int) -> bytes:
        """Posts `body` to `operation` and returns the answer's body, which never exceeds `response_limit` bytes."""

    async def upload(self, session_id: str, preamble: bytes, output: SealedOutput, *, response_limit: int) -> bytes:
        """Streams an artifact on a connection of its own and returns the answer's body."""


class Log(Protocol):
    """Where events go: one name per fact, ids as fields, never a secret."""

    def info(self, event: str, **fields: object) -> None:
        """Something that happened."""

    def warning(self, event: str, **fields: object) -> None:
        """Something to look at, handled."""

    def error(self, event: str, **fields: object) -> None:
        """Something that needs an operator."""
