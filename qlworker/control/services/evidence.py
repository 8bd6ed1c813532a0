"""What is known about the process of an attempt whose lease is gone: only what its worker once stated about exactly it. Pure.

A worker that is offline, a session or a lease that ran out, a broken line: none of them says that a process has stopped.
Source: control-plane.md §16, V116.
"""

from enum import StrEnum

from ...domain.canonical import digests_equal
from .attestations import STOPPED, Attestation
from .authority import Claim


class Evidence(StrEnum):
    """The process has stopped, it ran a moment ago, nobody knows, or the statement is about something else."""

    STOPPED = "stopped"
    RUNNING = "running"
    UNKNOWN = "unknown"
    CONFLICTING = "conflicting"


def weigh(claim: Claim, latest: Attestation | None, now_ms: int, freshness_ms: int) -> Evidence:
    """What the newest statement about the claim's attempt is worth now. `running` counts for `freshness_ms` milliseconds."""
    if latest is None:
        return Evidence.UNKNOWN
    attempt, lease = claim.attempt, claim.lease
    stated = (
        latest.run_id,
        latest.worker_id,
        latest.worker_session_id,
        latest.worker_generation,
        latest.lease_generation,
        latest.offer_id,
    )
    held = (
        claim.run.id,
        lease.worker_id,
        lease.worker_session_id,
        lease.worker_generation,
        lease.lease_generation,
        lease.offer_id,
    )
    if stated != held or not digests_equal(latest.lease_token_digest, lease.lease_token_digest):
        return Evidence.CONFLICTING
    if attempt.executor_handle not in (None, latest.executor_handle):
        return Evidence.CONFLICTING
    if latest.state == STOPPED:
        return Evidence.STOPPED
    return Evidence.RUNNING if latest.received_at_ms + freshness_ms > now_ms else Evidence.UNKNOWN
