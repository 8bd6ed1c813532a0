"""The security audit as an operator reads it, and how it does not grow for ever."""

from typing import Any

import pytest
import trio
from sqlalchemy import func, select

from qlworker.control import audit, maintenance
from qlworker.control.maintenance import Maintenance
from qlworker.control.schema import security_audit
from tests.control.fixtures import Plane
from tests.pki import Events

DAY = 86_400_000


def note(plane: Plane, subject: str, outcome: Any = "allowed") -> None:
    with plane.database.transaction() as tx:
        audit.note(tx, "heartbeat", outcome, subject=subject, reasons="credential")
    plane.clock.advance(1)


def subjects(plane: Plane, limit: int = 100, **options: Any) -> list[str | None]:
    return [row.subject for row in plane.database.transact(audit.listed, limit, **options)]


def test_rows_come_newest_first_and_page_without_gap_or_repeat(plane: Plane) -> None:
    for number in range(7):
        note(plane, f"edge-{number}")

    seen: list[str | None] = []
    before = None
    while rows := plane.database.transact(audit.listed, 3, before=before):
        seen += [row.subject for row in rows]
        before = rows[-1].event_id

    assert seen == [f"edge-{number}" for number in reversed(range(7))]


def test_rows_of_one_moment_page_without_gap_or_repeat(plane: Plane) -> None:
    with plane.database.transaction() as tx:
        for number in range(5):
            audit.note(tx, "heartbeat", "allowed", subject=f"edge-{number}")
    first = plane.database.transact(audit.listed, 2)
    rest = plane.database.transact(audit.listed, 10, before=first[-1].event_id)

    assert sorted(str(row.subject) for row in [*first, *rest]) == [f"edge-{number}" for number in range(5)]


def test_rows_are_found_by_worker_and_by_outcome(plane: Plane) -> None:
    note(plane, "edge-1")
    note(plane, "edge-2")
    note(plane, "edge-1", "authentication_rejected")

    assert subjects(plane, subject="edge-1") == ["edge-1", "edge-1"]
    assert subjects(plane, outcome="authentication_rejected") == ["edge-1"]
    assert subjects(plane, subject="edge-2", outcome="authentication_rejected") == []


@pytest.mark.parametrize(
    ("limit", "before", "problem"), [(0, None, "limit"), (1001, None, "limit"), (1, "nonsense", "before must be the event id")]
)
def test_a_question_that_cannot_be_answered_is_refused(plane: Plane, limit: int, before: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plane.database.transact(audit.listed, limit, before=before)


def test_rows_leave_when_their_time_is_over_page_by_page(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "AUDIT_PAGE", 2)
    for number in range(5):
        note(plane, f"old-{number}")
    plane.clock.advance(90 * DAY)
    note(plane, "new")
    events = Events()

    trio.run(Maintenance(plane.database, plane.artifacts, plane.settings, events).sweep_audit)

    assert subjects(plane) == ["new"]
    assert events.events == [("audit_removed", {"count": 5})]


def test_a_row_one_moment_before_its_time_stays(plane: Plane) -> None:
    note(plane, "edge-1")
    plane.clock.advance(90 * DAY - 1)

    trio.run(Maintenance(plane.database, plane.artifacts, plane.settings, Events()).sweep_audit)

    with plane.database.transaction() as tx:
        row = tx.row(select(func.count()).select_from(security_audit))
    assert row is not None
    assert row[0] == 1
