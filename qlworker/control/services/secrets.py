"""Secret delivery: authority first, inside a transaction; plaintext afterwards, outside of it, and never stored.

Source: control-plane.md §13, wire-protocol.md §6. Repeating the request under the same fence is allowed and leaves no mark.
"""

import msgspec
from msgspec import UNSET

from ...domain.canonical import digests_equal
from ...domain.errors import Fenced, Transient
from ...domain.revision import SecretReference
from ...wire.secrets import (
    BUNDLE_BYTES,
    SECRETS_V1,
    SECRETS_V2,
    VALUE_BYTES,
    SecretRequestV1,
    SecretRequestV2,
    SecretResponseV1,
    SecretResponseV2,
    SecretValue,
)
from ..config import Settings
from ..database import Transaction
from ..secret_store import SecretStore
from .activation import STARTING
from .authority import identify, require_lease, require_revision
from .claiming import DISPATCHING
from .session import Caller, require_session

SecretRequest = SecretRequestV1 | SecretRequestV2
SecretResponse = SecretResponseV1 | SecretResponseV2


class Delivery(msgspec.Struct, frozen=True):
    """What the secret store may know of an authorised request: no lease token (§13)."""

    run_id: str
    attempt_id: str
    offer_id: str
    execution_digest: str
    secret_refs: list[str]
    bundle_refs: list[str] | None


def authorise(tx: Transaction, caller: Caller, request: SecretRequest, settings: Settings) -> Delivery:
    """Proves that the caller may have exactly the secrets it asks for: those of the pinned revision, all of them, in order.

    Raises Fenced.
    """
    claim = identify(tx, caller, request)
    require_session(tx, caller, request.worker_generation)
    require_lease(tx, claim, request.expected_lease_version)
    if (claim.run.status, claim.attempt.status) != (DISPATCHING, STARTING) or claim.run.cancel_requested_at_ms is not None:
        raise Fenced("secrets are delivered to a starting attempt only")
    revision = require_revision(tx, claim.run)
    if (request.task_id, request.task_revision) != (revision.task_id, revision.task_revision):
        raise Fenced("the request is for another revision")
    if not digests_equal(request.execution_digest, revision.content_digest):
        raise Fenced("the request is for another execution")
    bundle = revision.environment_bundle_ref
    bundles = [] if bundle is UNSET else [bundle]
    asked = request.environment_bundle_refs if isinstance(request, SecretRequestV2) else []
    if request.secret_refs != revision.secret_refs() or asked != bundles:
        raise Fenced("the request does not name exactly the revision's secrets")
    return Delivery(
        run_id=claim.run.id,
        attempt_id=claim.attempt.id,
        offer_id=claim.lease.offer_id,
        execution_digest=revision.content_digest,
        secret_refs=request.secret_refs,
        bundle_refs=asked if isinstance(request, SecretRequestV2) else None,
    )


def deliver(store: SecretStore, delivery: Delivery) -> SecretResponse:
    """Reads the values. Blocks. Raises Transient when one is missing or cannot be used."""
    values = [_value(store, reference, VALUE_BYTES) for reference in delivery.secret_refs]
    try:
        if delivery.bundle_refs is None:
            return SecretResponseV1(
                schema=SECRETS_V1,
                run_id=delivery.run_id,
                attempt_id=delivery.attempt_id,
                offer_id=delivery.offer_id,
                execution_digest=delivery.execution_digest,
                values=values,
            )
        return SecretResponseV2(
            schema=SECRETS_V2,
            run_id=delivery.run_id,
            attempt_id=delivery.attempt_id,
            offer_id=delivery.offer_id,
            execution_digest=delivery.execution_digest,
            values=values,
            environment_bundles=[_value(store, reference, BUNDLE_BYTES) for reference in delivery.bundle_refs],
        )
    except ValueError as error:
        raise Transient(f"cannot deliver the secrets: {error}") from None


def _value(store: SecretStore, reference: str, maximum: int) -> SecretValue:
    return SecretValue(secret_ref=reference, value=store.read(SecretReference.parse(reference), maximum))
