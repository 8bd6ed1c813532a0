"""Many runs that workers hold, and ways to lose them."""

from qlworker.control.services.session import Caller
from tests.control.fixtures import EDGE, SESSION, Held, Plane, token


def held_runs(plane: Plane, count: int, *, start: bool = False) -> list[Held]:
    """`count` runs claimed by one worker, in the order of their ids; `start` acknowledges starting.

    All leases begin at the same moment.
    """
    revision = plane.publish()
    for _ in range(count):
        plane.start_run(revision)
    plane.register(EDGE, slots=count)
    helds = [plane.hold(plane.pull(f"offer-{number}", token(number)), token(number)) for number in range(1, count + 1)]
    for held in helds:
        plane.starting(held)
    return sorted(helds, key=lambda held: held.attempt_id) if start else helds


def other_worker(name: str = "edge-2") -> Caller:
    """Another worker's session."""
    return Caller(name, SESSION[:-2] + "ff")
