"""attestations: what a worker says about the process of a started attempt (wire-protocol.md §2.9). It has no schema member.

The control plane takes them; this package's worker sends none.
"""

from typing import Final, Literal

from ..domain.document import Document
from ..domain.text import INT31, check_digest, check_dispatch_id, check_integer, check_offer_id, check_session_id, check_text

AttestedState = Literal["running", "stopped"]

HANDLE_BYTES: Final = 512


class AttestationRequest(Document, frozen=True, kw_only=True):
    """One statement under one lease. Of the lease token only the digest crosses the wire.

    `sequence` counts an attempt's attestations from 1, `journal_revision` is the revision of the worker's record behind it.
    """

    attestation_id: str
    run_id: str
    attempt_id: str
    sequence: int
    state: AttestedState
    worker_generation: int
    lease_token_digest: str
    lease_generation: int
    lease_version: int
    offer_id: str
    callback_sequence: int
    executor_handle: str
    journal_revision: int

    def __post_init__(self) -> None:
        check_session_id(self.attestation_id, "attestationId")
        check_dispatch_id(self.run_id, "runId", 36)
        check_dispatch_id(self.attempt_id, "attemptId", 36)
        check_integer(self.sequence, "sequence", 1, INT31)
        check_integer(self.worker_generation, "workerGeneration", 1, INT31)
        check_digest(self.lease_token_digest, "leaseTokenDigest")
        check_integer(self.lease_generation, "leaseGeneration", 1, INT31)
        check_integer(self.lease_version, "leaseVersion", 0, INT31)
        check_offer_id(self.offer_id)
        check_integer(self.callback_sequence, "callbackSequence", 0, INT31)
        check_text(self.executor_handle, "executorHandle", minimum=1, maximum=HANDLE_BYTES)
        check_integer(self.journal_revision, "journalRevision", 1)


class AttestationResponse(Document, frozen=True, kw_only=True):
    """What is stored. `replay` tells that it was before this call; `received_at_ms` is then the first time's."""

    attestation_id: str
    sequence: int
    state: AttestedState
    received_at_ms: int
    replay: bool

    def __post_init__(self) -> None:
        check_session_id(self.attestation_id, "attestationId")
        check_integer(self.sequence, "sequence", 1, INT31)
        check_integer(self.received_at_ms, "receivedAtMs")
