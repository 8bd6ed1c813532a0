"""What a session allows."""

import itertools

import msgspec
import pytest

from qlworker.domain.session import Access, LiveSession, SessionStatus, StoredSession, may_process, may_pull
from tests.builders import DIGEST, SESSION_ID

LIVE = LiveSession(
    worker_id="edge-1", session_id=SESSION_ID, generation=2, version=3, status=SessionStatus.ONLINE, expires_at=1000
)


@pytest.mark.req("R375", "R376", "R379", "R380")
@pytest.mark.parametrize("status, access, now", list(itertools.product(SessionStatus, Access, (999, 1000))))
def test_only_an_open_online_session_pulls_and_a_draining_one_still_finishes(
    status: SessionStatus, access: Access, now: int
) -> None:
    session = msgspec.structs.replace(LIVE, status=status)
    alive = now < 1000 and status is not SessionStatus.OFFLINE

    assert may_pull(session, access, now) == (alive and status is SessionStatus.ONLINE and access is Access.OPEN)
    assert may_process(session, access, now) == (alive and access is not Access.FENCED)


def test_no_session_allows_nothing() -> None:
    assert not may_pull(None, Access.OPEN, 0)
    assert not may_process(None, Access.OPEN, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": ""},
        {"session_id": "x"},
        {"generation": 0},
        {"capabilities_hash": "x"},
        {"max_concurrent_runs": 0},
        {"max_concurrent_runs": 1025},
        {"lease_duration_ms": 4999},
        {"lease_duration_ms": 600_001},
    ],
)
def test_a_stored_session_out_of_bounds_is_none(change: dict[str, object]) -> None:
    good = StoredSession(
        schema_version=1,
        worker_id="edge-1",
        session_id=SESSION_ID,
        generation=1,
        capabilities_json="{}",
        capabilities_hash=DIGEST,
        max_concurrent_runs=1,
        lease_duration_ms=45_000,
    )
    assert msgspec.json.decode(good.to_json(), type=StoredSession) == good

    with pytest.raises(ValueError):
        msgspec.structs.replace(good, **change)
