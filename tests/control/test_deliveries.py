"""How far a rotated credential has come: nothing counts before it was handed over, and nothing ends before it must."""

import pytest
import trio
from sqlalchemy import select

from qlworker.control import credentials, deliveries
from qlworker.control.credentials import authenticate
from qlworker.control.maintenance import Maintenance
from qlworker.control.schema import credential_deliveries
from qlworker.domain.errors import Conflict
from tests.control.fixtures import PEPPER, SESSION, WORKER, Plane, call
from tests.control.test_ingress import heartbeat, register
from tests.pki import Events

HOUR = 3_600_000
OVERLAP = 60_000


class Rotation:
    """A worker's first token and a second one that was made but not handed over."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        with plane.database.transaction() as tx:
            self.first = str(credentials.issue(tx, PEPPER, WORKER, HOUR).token)
            issued = credentials.rotate(tx, PEPPER, WORKER, HOUR)
            self.second, self.credential_id = str(issued.token), issued.credential.credential_id
            deliveries.commit(tx, WORKER, self.credential_id, OVERLAP)

    def proves(self, token: str) -> bool:
        with self.plane.database.transaction() as tx:
            return authenticate(tx, PEPPER, f"Worker {token}") is not None

    def valid(self) -> tuple[bool, bool]:
        return self.proves(self.first), self.proves(self.second)

    def publish(self) -> None:
        self.plane.database.transact(deliveries.publish, self.credential_id)

    def observe(self) -> None:
        self.plane.database.transact(deliveries.observe, self.credential_id, SESSION)

    def end_previous(self) -> None:
        """One tick of the maintenance."""
        plane = self.plane
        maintenance = Maintenance(plane.database, plane.artifacts, plane.settings, Events())
        trio.run(maintenance.end_replaced_credentials)

    def state(self) -> str:
        with self.plane.database.transaction() as tx:
            row = tx.row(
                select(credential_deliveries.c.state).where(credential_deliveries.c.credential_id == self.credential_id)
            )
        assert row is not None
        return str(row.state)


@pytest.fixture
def rotation(plane: Plane) -> Rotation:
    return Rotation(plane)


def test_a_token_that_was_not_handed_over_proves_nothing_and_ends_nothing(plane: Plane, rotation: Rotation) -> None:
    assert rotation.valid() == (True, False)

    plane.clock.advance(HOUR - 1)

    rotation.end_previous()
    assert rotation.valid() == (True, False)


def test_handed_over_it_counts_and_the_old_one_ends_after_the_overlap(plane: Plane, rotation: Rotation) -> None:
    rotation.publish()
    assert rotation.valid() == (True, True)
    plane.clock.advance(OVERLAP - 1)
    assert rotation.valid() == (True, True)

    plane.clock.advance(1)

    assert rotation.valid() == (False, True)
    assert rotation.state() == "published"


def test_used_it_ends_the_old_one_at_once(rotation: Rotation) -> None:
    rotation.publish()
    rotation.observe()
    assert rotation.state() == "observed"
    assert rotation.valid() == (True, True)

    rotation.end_previous()

    assert rotation.valid() == (False, True)
    assert rotation.state() == "previous_revoked"


def test_every_step_repeated_changes_nothing(plane: Plane, rotation: Rotation) -> None:
    rotation.publish()
    plane.clock.advance(OVERLAP // 2)
    rotation.publish()  # the overlap does not begin again
    plane.clock.advance(OVERLAP // 2)
    assert rotation.valid() == (False, True)

    for _ in range(2):
        rotation.observe()
    for _ in range(2):
        rotation.end_previous()
    rotation.publish()
    rotation.observe()

    assert rotation.state() == "previous_revoked"


def test_a_use_before_the_handing_over_is_none(rotation: Rotation) -> None:
    rotation.observe()

    assert rotation.state() == "credential_committed"


def test_a_credential_that_was_not_rotated_cannot_be_handed_over(plane: Plane) -> None:
    issued = plane.database.transact(credentials.issue, PEPPER, WORKER, HOUR)

    with pytest.raises(Conflict, match="was not made by a rotation"):
        plane.database.transact(deliveries.publish, issued.credential.credential_id)


def test_a_workers_first_heartbeat_with_it_is_its_use(plane: Plane, rotation: Rotation) -> None:
    rotation.publish()
    app = plane.app()

    async def beat() -> list[int]:
        statuses = []
        for operation, body in (("register", register()), ("heartbeat", heartbeat())):
            path = f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/{operation}"
            headers = {"authorization": f"Worker {rotation.second}", "content-type": "application/json"}
            statuses.append((await call(app, path, body.to_json(), headers=headers)).status)
        return statuses

    assert trio.run(beat) == [200, 200]
    assert rotation.state() == "observed"
