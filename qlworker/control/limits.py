"""What the operator may tune about the worker listener and the services behind it (control-plane.md §19)."""

from typing import Literal

import msgspec

KIB = 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in milliseconds, sizes in bytes. Bounds are enforced where the configuration is read.

    `candidate_page` times `candidate_pages` is how many queued attempts one pull looks at. The default is the contract's hard
    limit: with fewer, a queue of tasks for a box that is switched off would hide the work of all others.
    """

    session_lease_min_ms: int = 5_000
    session_lease_max_ms: int = 600_000
    run_lease_ms: int = 90_000
    capabilities_dialect: Literal["later", "baseline"] = "later"
    secrets_dialect: Literal["v2", "v1"] = "v2"
    candidate_page: int = 64
    candidate_pages: int = 16
    claim_attempts: int = 8
    body_bytes: int = 64 * KIB
    response_bytes: int = 256 * KIB
    url_bytes: int = 8 * KIB
    in_flight: int = 64
    request_timeout_ms: int = 15_000
    upload_bytes_per_second: int = 32 * KIB
    shield_window_ms: int = 60_000
    shield_per_peer: int = 120
    shield_global: int = 1_200
    shield_peers: int = 4_096
