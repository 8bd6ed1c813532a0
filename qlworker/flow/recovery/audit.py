"""The startup auditor: reads every record once, classes it, and can do nothing else by its types (R89 to R96, R116 to R119)."""

from typing import Protocol

from ...domain.audit import Audit, AuditBudget, Finding, check_budget, check_page
from ...ports import Page


class RecordSource(Protocol):
    """All that an audit needs of a journal."""

    async def page(self, after: str | None = None, limit: int = 16) -> Page:
        """At most `limit` records whose offer id is above `after`, ascending."""


class StartupAuditor:
    """Audits `source` within `budget`. Holds no state between audits."""

    def __init__(self, source: RecordSource, budget: AuditBudget) -> None:
        self._source = source
        self._budget = budget

    async def audit(self) -> Audit:
        """Every record, classed. Raises Corrupt for a damaged record, a listing that cannot be trusted, or one that is longer
        than the budget: half an audit is none."""
        findings: list[Finding] = []
        after: str | None = None
        pages = 0
        while True:
            page = await self._source.page(after, self._budget.page_size)
            pages += 1
            check_page([record.offer_id for record in page.records], page.next_after, after, self._budget)
            findings += [Finding.of(record.offer_id, record.offer.attempt_id, record.state) for record in page.records]
            check_budget(pages, page.next_after, self._budget)
            if page.next_after is None:
                return Audit(tuple(findings))
            after = page.next_after
