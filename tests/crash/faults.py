"""What can be made to go wrong in one life of a worker, and the named points where it, or a launcher of it, dies.

A point is `before:STEP` or `after:STEP`. The steps are every durable write, every request, the spawn, the hand-over of the
plan, the gate and everything done to a receipt; the launcher has steps of its own. A point that a life passes several times
kills at the first.
"""

import os
import signal
from enum import StrEnum

import msgspec


class Faults(msgspec.Struct, frozen=True, omit_defaults=True):
    """One life's faults, handed to tests/crash/dying_worker.py as JSON.

    `die` is a point of the worker, `launcher` one of its launchers, where `with_worker` makes the launcher take the worker
    along and `launcher_stops` makes it stop with SIGSTOP instead. `die_after` counts points, also the unnamed ones at every
    sync, link and rename; 0 is never. `drop` and `twice` are the shares, 0 to 1, of requests whose answer is lost after they
    were carried out, and that are carried out twice. `trace` is a file that gets a line with the attempt's id once a
    launcher's pipe holds its whole plan.
    """

    die: str = ""
    die_after: int = 0
    launcher: str = ""
    with_worker: bool = False
    launcher_stops: bool = False
    drop: float = 0
    twice: float = 0
    seed: int = 0
    trace: str = ""


class Outcome(StrEnum):
    """What a run that met a fault must come to."""

    RAN = "ran"
    NOT_STARTED = "not_started"
    UNKNOWN = "unknown"


class Scenario(StrEnum):
    """What the run is, so that it passes the point."""

    ENDS = "ends"
    CANNOT_START = "cannot_start"
    TIMES_OUT = "times_out"


class Case(msgspec.Struct, frozen=True):
    """One point, one run, and what may come of it (design.md §2, the table of the gate)."""

    faults: Faults
    outcomes: frozenset[Outcome]
    scenario: Scenario = Scenario.ENDS

    @property
    def name(self) -> str:
        """The point, as it is printed."""
        if self.faults.die:
            return f"worker {self.faults.die}"
        return f"{'launcher and worker' if self.faults.with_worker else 'launcher'} {self.faults.launcher}"


def _around(*steps: str) -> list[str]:
    return [f"{when}:{step}" for step in steps for when in ("before", "after")]


# In the order in which a run passes them, by what must come of a worker that is killed there.
_UP_TO_THE_BARRIER = [
    *_around("ask register", "write session", "ask heartbeat", "write claim", "ask offers", "write accepted", "remove claim"),
    *_around("ask starting", "write starting_acknowledged", "ask secrets", "prepare output", "name receipt"),
    "before:write launching",
]
# Nobody can tell these from a launch that happened: the launcher was not spawned, or has not got its capability.
_UNPROVABLE = ["after:write launching", "before:launch", *_around("spawn"), "before:send plan"]
_BEFORE_THE_GATE = ["after:send plan", "after:launch", *_around("write started"), "before:open gate"]
_BEHIND_THE_GATE = [
    "after:open gate",
    *_around("ask running", "write running_acknowledged", "read receipt", "seal output", "ask artifacts", "ask completion"),
    *_around("write completion_acknowledged", "remove receipt"),
]
_OF_A_FAILED_START = _around("write start_failed", "ask start-failure", "write start_failure_acknowledged", "remove receipt")
_OF_A_TIMEOUT = _around("ask output", "ask lease-control", "stop command")

_LAUNCHER_UP_TO_ITS_ANSWER = [*_around("read plan", "fork"), "after:hold", "before:say"]
_LAUNCHER_BEFORE_THE_COMMAND = ["after:say", "before:pass gate"]
_LAUNCHER_BEFORE_ITS_RECEIPT = ["after:pass gate", "before:receipt", *_around("temporary"), "before:link"]
_LAUNCHER_BEHIND_ITS_RECEIPT = ["after:link", "after:receipt"]


def cases() -> list[Case]:
    """Every point once, and every point of the launcher also with the worker killed at the same moment."""
    ran, not_started, unknown = (frozenset({outcome}) for outcome in Outcome)
    found = [Case(Faults(die=point), ran) for point in _UP_TO_THE_BARRIER + _BEHIND_THE_GATE]
    found += [Case(Faults(die=point), unknown) for point in _UNPROVABLE]
    found += [Case(Faults(die=point), not_started) for point in _BEFORE_THE_GATE]
    found += [Case(Faults(die=point), not_started, Scenario.CANNOT_START) for point in _OF_A_FAILED_START]
    found += [Case(Faults(die=point), ran, Scenario.TIMES_OUT) for point in _OF_A_TIMEOUT]
    for both in (False, True):
        # A worker that lives sees its launcher die before it answered, and may catch it dying just after: proof that the
        # command never ran. Without that witness nobody knows.
        seen = unknown if both else not_started
        maybe = unknown if both else not_started | unknown
        found += [Case(Faults(launcher=point, with_worker=both), seen) for point in _LAUNCHER_UP_TO_ITS_ANSWER]
        found += [Case(Faults(launcher=point, with_worker=both), maybe) for point in _LAUNCHER_BEFORE_THE_COMMAND[:1]]
        found += [Case(Faults(launcher=point, with_worker=both), unknown) for point in _LAUNCHER_BEFORE_THE_COMMAND[1:]]
        found += [Case(Faults(launcher=point, with_worker=both), unknown) for point in _LAUNCHER_BEFORE_ITS_RECEIPT]
        found += [Case(Faults(launcher=point, with_worker=both), ran) for point in _LAUNCHER_BEHIND_ITS_RECEIPT]
    return found


class Points:
    """Counts the points of this process and kills it at the one that was asked for. Safe to pass from any thread."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._passed = 0

    def reach(self, point: str) -> None:
        """Returns unless this is where the process is to die."""
        self._passed += 1
        if point == self._faults.die or self._passed == self._faults.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
