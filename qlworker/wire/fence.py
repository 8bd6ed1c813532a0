"""The fence that every authenticated mutation of an attempt carries: who, under which lease, at which version."""

from typing import Any, ClassVar, Self

from ..domain.document import Document
from ..domain.offer import Offer
from ..domain.text import INT31, check_dispatch_id, check_integer, check_lease_token, check_offer_id


class LeaseFence(Document, frozen=True, kw_only=True):
    """The members that `lease-control`, `artifacts`, `completion`, `secrets` and `output` have in common, in wire order.

    A subclass names its schema string in SCHEMA; any other is refused.
    """

    SCHEMA: ClassVar[str]

    schema: str
    worker_generation: int
    project_id: str
    run_id: str
    attempt_id: str
    offer_id: str
    lease_generation: int
    lease_token: str
    expected_lease_version: int

    def __post_init__(self) -> None:
        if self.schema != self.SCHEMA:
            raise ValueError(f"schema must be {self.SCHEMA}")
        check_integer(self.worker_generation, "workerGeneration", 1, INT31)
        check_dispatch_id(self.project_id, "projectId")
        check_dispatch_id(self.run_id, "runId")
        check_dispatch_id(self.attempt_id, "attemptId")
        check_offer_id(self.offer_id)
        check_integer(self.lease_generation, "leaseGeneration", 1, INT31)
        check_lease_token(self.lease_token)
        check_integer(self.expected_lease_version, "expectedLeaseVersion", 0, INT31)

    @classmethod
    def of(cls, offer: Offer, **members: Any) -> Self:
        """The request for `offer` under its present lease, with the other `members` of its class."""
        return cls(
            schema=cls.SCHEMA,
            worker_generation=offer.worker.generation,
            project_id=offer.candidate.project_id,
            run_id=offer.run_id,
            attempt_id=offer.attempt_id,
            offer_id=offer.offer_id,
            lease_generation=offer.lease.lease_generation,
            lease_token=offer.lease_token,
            expected_lease_version=offer.lease.version,
            **members,
        )
