"""Looks for what is known of an attempt: the receipt first, then the process, then the receipt again (R179, R198 to R219).

It can read a receipt and look at a process, and has no other port: nothing reached from here can start, stop, acknowledge,
complete or remove. What does not prove an end is never turned into one.
"""

from collections.abc import Callable
from typing import Final, Protocol

from ...domain.errors import Misconfigured
from ...domain.evidence import GRACE_MAX_MS, Authority, AuthorityFacts, ObservedEnd, Reconciled, authority_of
from ...domain.identity import DurableHandle, Presence
from ...domain.receipt import Receipt
from ...domain.record import InboxRecord
from ...domain.verdict import ReceiptEvidence

LOOK_AGAIN_MS: Final = 250


class ReceiptReader(Protocol):
    """All that evidence needs of receipts."""

    async def read(self, attempt_id: str) -> Receipt | None:
        """The receipt, or None. Raises Corrupt or OSError when it cannot be told."""


class ProcessInspector(Protocol):
    """All that evidence needs of processes."""

    async def inspect(self, handle: DurableHandle) -> Presence:
        """What is seen of the recorded process."""


class Sleeper(Protocol):
    """The boot clock."""

    def boot_ms(self) -> int:
        """CLOCK_BOOTTIME, in milliseconds."""

    async def sleep_until(self, boot_ms: int) -> None:
        """Returns once `boot_ms()` has reached the argument."""


class Authenticator(Protocol):
    """Says whether a receipt is this record's own, comparing capabilities in constant time (R183, R189).

    Raises when it cannot tell: then nothing else is asked either (R194).
    """

    def __call__(self, receipt: Receipt, record: InboxRecord, now_ms: int | None) -> bool:
        """`now_ms` is the control plane's time in milliseconds, or None while it is not known."""


class EvidenceReconciler:
    """Reconciles one record at a time and remembers nothing between two (R214).

    `grace_ms` (0..5000) is how long a receipt may still appear after its launcher was seen gone. Raises Misconfigured above.
    """

    def __init__(
        self,
        receipts: ReceiptReader,
        processes: ProcessInspector,
        clock: Sleeper,
        authenticator: Authenticator,
        *,
        grace_ms: int = GRACE_MAX_MS,
    ) -> None:
        if not 0 <= grace_ms <= GRACE_MAX_MS:
            raise Misconfigured(f"the grace of a receipt must be 0 to {GRACE_MAX_MS} milliseconds, not {grace_ms}")
        self._receipts = receipts
        self._processes = processes
        self._clock = clock
        self._authenticate = authenticator
        self._grace_ms = grace_ms

    async def reconcile(
        self, record: InboxRecord, facts: AuthorityFacts, note_absence: Callable[[Presence | None], None] | None = None
    ) -> Reconciled:
        """What is known of `record`, which is at or behind the barrier, and what its authority allows at one moment (R209).

        Raises Corrupt or OSError when the receipt cannot be read, and what the authenticator raises, before any process is
        asked (R193 to R195). `note_absence` hears what was seen of a process that does not run, before its receipt is waited
        for.
        """
        now_ms = self._clock.boot_ms()
        authority = authority_of(record, facts, now_ms)
        server_ms = None if facts.anchor is None else facts.anchor.server_time(now_ms)
        presence: Presence | None = None
        evidence, receipt = await self._read(record, server_ms)
        if evidence is ReceiptEvidence.MISSING:
            handle = recorded_handle(record)
            presence = None if handle is None else await self._processes.inspect(handle)
            if presence not in (Presence.RUNNING, Presence.PENDING):
                if note_absence is not None:
                    note_absence(presence)
                evidence, receipt = await self._late(record, now_ms, server_ms)
        return _seen(record, evidence, receipt, presence, authority)

    async def glance(self, record: InboxRecord, facts: AuthorityFacts) -> Reconciled:
        """The receipt alone, read once: no process is asked and nothing is waited for. Without `has_receipt` it says nothing.

        Raises as `reconcile` does.
        """
        now_ms = self._clock.boot_ms()
        evidence, receipt = await self._read(record, None if facts.anchor is None else facts.anchor.server_time(now_ms))
        return _seen(record, evidence, receipt, None, authority_of(record, facts, now_ms))

    async def _late(self, record: InboxRecord, now_ms: int, server_ms: int | None) -> tuple[ReceiptEvidence, Receipt | None]:
        """The launcher publishes before it goes, but a slow disk may show the file a little later: once more at once, then
        until the grace is over."""
        for waited_ms in range(0, self._grace_ms + LOOK_AGAIN_MS, LOOK_AGAIN_MS):
            if waited_ms:
                await self._clock.sleep_until(now_ms + min(waited_ms, self._grace_ms))
            evidence, receipt = await self._read(record, server_ms)
            if evidence is not ReceiptEvidence.MISSING:
                break
        return evidence, receipt

    async def _read(self, record: InboxRecord, server_ms: int | None) -> tuple[ReceiptEvidence, Receipt | None]:
        receipt = await self._receipts.read(record.offer.attempt_id)
        if receipt is None:
            return ReceiptEvidence.MISSING, None
        if not self._authenticate(receipt, record, server_ms):
            return ReceiptEvidence.UNTRUSTED, None
        return (ReceiptEvidence.NOT_STARTED if receipt.says_not_started else ReceiptEvidence.ENDED), receipt


def _seen(
    record: InboxRecord,
    evidence: ReceiptEvidence,
    receipt: Receipt | None,
    presence: Presence | None,
    authority: Authority,
) -> Reconciled:
    end = ObservedEnd.of(receipt) if receipt is not None and evidence is ReceiptEvidence.ENDED else None
    return Reconciled(record.state, evidence, presence, authority, end)


def recorded_handle(record: InboxRecord) -> DurableHandle | None:
    """The handle in `record`, or None when there is none or it is not one: then no process can be spoken of (R202)."""
    if not isinstance(record.executor_handle, str):
        return None
    try:
        return DurableHandle.parse(record.executor_handle)
    except ValueError:
        return None
