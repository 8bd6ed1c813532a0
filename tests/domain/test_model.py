"""Every path of one offer through worker, disk, launcher, gate and control plane, with crashes between any two steps.

The worker of this model decides with the real table, the real `next_step` and the real `judge`; the rest is the smallest thing
that can be got wrong: what is durable, who is alive, and what the control plane has been told. All reachable situations are
visited, so what holds in all of them holds on every path.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto

import msgspec
import pytest

from qlworker.domain.identity import Presence
from qlworker.domain.record import SETTLED, TRANSITIONS, Event, State
from qlworker.domain.verdict import ReceiptEvidence, Step, Verdict, judge, next_step


class At(Enum):
    """Where the living worker is between two effects; DEAD forgets it."""

    DEAD = auto()
    LOOKING = auto()
    STARTING_ANSWERED = auto()
    MAY_LAUNCH = auto()
    BARRIER_RAISED = auto()
    SPAWNED = auto()
    PLAN_SENT = auto()
    HELD = auto()
    HANDLE_RECORDED = auto()
    REJECTED = auto()
    RUNNING_ANSWERED = auto()
    FAILURE_ANSWERED = auto()
    COMPLETION_ANSWERED = auto()


class Launcher(Enum):
    """What stands above the command."""

    NONE = auto()
    WAITS_FOR_PLAN = auto()
    HOLDS = auto()
    RUNS = auto()
    GONE = auto()


class Gate(Enum):
    """The worker's end of the pipe."""

    UNDECIDED = auto()
    BYTE = auto()
    CLOSED = auto()


class Server(Enum):
    """What the control plane has been told of the attempt."""

    LEASED = auto()
    STARTING = auto()
    RUNNING = auto()
    FAILED_TO_START = auto()
    COMPLETED = auto()


class World(msgspec.Struct, frozen=True):
    """One situation. The budgets bound what may still go wrong."""

    record: State = State.ACCEPTED
    has_handle: bool = False
    worker: At = At.LOOKING
    launcher: Launcher = Launcher.NONE
    gate: Gate = Gate.UNDECIDED
    receipt: ReceiptEvidence = ReceiptEvidence.MISSING
    is_running: bool = False
    starts: int = 0
    server: Server = Server.LEASED
    crashes: int = 3
    launcher_kills: int = 1
    lost_answers: int = 2
    # For the judgement alone; nobody in the model looks at them.
    crashed_before_plan: bool = False
    launcher_was_killed: bool = False
    was_published: bool = False

    def but(self, **changes: object) -> "World":
        return msgspec.structs.replace(self, **changes)  # type: ignore[arg-type]

    def wrote(self, event: Event, **changes: object) -> "World":
        """After a write that the table allows; KeyError otherwise."""
        return self.but(record=TRANSITIONS[self.record, event], worker=At.LOOKING, **changes)


class Rules(msgspec.Struct, frozen=True):
    """What the worker decides with, so that a test can show what a wrong rule would do. `is_grace_enough`: a launcher that is
    about to publish is always waited for."""

    next_step: Callable[[State], Step] = next_step
    judge: Callable[[State, ReceiptEvidence, Presence | None], Verdict] = judge
    is_grace_enough: bool = True


ENDED_ELSEWHERE = (Server.FAILED_TO_START, Server.COMPLETED)


def successors(world: World, rules: Rules) -> Iterator[World]:
    yield from worker_steps(world, rules)
    yield from launcher_steps(world)
    if world.worker is At.DEAD:
        yield world.but(worker=At.LOOKING)
    elif world.crashes:
        before_plan = world.worker in (At.BARRIER_RAISED, At.SPAWNED)
        # The kernel closes the pipe of a dead worker.
        gate = Gate.CLOSED if world.gate is Gate.UNDECIDED else world.gate
        yield world.but(
            worker=At.DEAD, gate=gate, crashes=world.crashes - 1, crashed_before_plan=world.crashed_before_plan or before_plan
        )


def worker_steps(world: World, rules: Rules) -> Iterator[World]:
    match world.worker:
        case At.LOOKING:
            yield from look(world, rules)
        case At.STARTING_ANSWERED:
            yield world.wrote(Event.STARTING_ACKED)
        case At.MAY_LAUNCH:
            yield world.wrote(Event.BARRIER_RAISED).but(worker=At.BARRIER_RAISED)
        case At.BARRIER_RAISED:
            # A second launcher has a pipe of its own; the first one's is closed by then, or its worker is this one.
            yield world.but(worker=At.SPAWNED, launcher=Launcher.WAITS_FOR_PLAN, gate=Gate.UNDECIDED)
        case At.SPAWNED if world.launcher is Launcher.WAITS_FOR_PLAN:
            yield world.but(worker=At.PLAN_SENT, launcher=Launcher.HOLDS)
        case At.SPAWNED | At.PLAN_SENT if world.launcher is Launcher.GONE:
            yield world.but(worker=At.REJECTED)
        case At.PLAN_SENT:
            yield world.but(worker=At.HELD)
        case At.HELD:
            yield world.wrote(Event.HANDLE_RECORDED, has_handle=True).but(worker=At.HANDLE_RECORDED)
        case At.HANDLE_RECORDED:
            yield world.but(worker=At.LOOKING, gate=Gate.BYTE if world.launcher is Launcher.HOLDS else Gate.CLOSED)
        case At.REJECTED:
            yield world.wrote(Event.NOT_STARTED)
        case At.RUNNING_ANSWERED:
            yield world.wrote(Event.RUNNING_ACKED)
        case At.FAILURE_ANSWERED:
            yield world.wrote(Event.FAILURE_ACKED)
        case At.COMPLETION_ANSWERED:
            yield world.wrote(Event.COMPLETION_ACKED)


def look(world: World, rules: Rules) -> Iterator[World]:
    """A round that begins: the record on disk says what it asks for."""
    match rules.next_step(world.record):
        case Step.ACKNOWLEDGE_STARTING:
            yield from ask_starting(world, At.STARTING_ANSWERED)
        case Step.LAUNCH:
            yield from ask_starting(world, At.MAY_LAUNCH)
        case Step.REPORT_FAILURE:
            if world.server is Server.RUNNING:
                yield world.wrote(Event.RECOVERY_NEEDED)
            else:
                server = world.server if world.server in ENDED_ELSEWHERE else Server.FAILED_TO_START
                yield from answered(world, At.FAILURE_ANSWERED, server)
        case Step.FIND_EVIDENCE:
            yield from find_evidence(world, rules)
        case Step.REST:
            if world.record in SETTLED and world.receipt is not ReceiptEvidence.MISSING:
                yield world.but(receipt=ReceiptEvidence.MISSING)


def ask_starting(world: World, then: At) -> Iterator[World]:
    if world.server in (Server.LEASED, Server.STARTING):
        yield from answered(world, then, Server.STARTING)
    elif (world.record, Event.RECOVERY_NEEDED) in TRANSITIONS:
        # Something runs or has run there, and nothing is known of it here: never a reason to spawn.
        yield world.wrote(Event.RECOVERY_NEEDED)


def answered(world: World, then: At, server: Server) -> Iterator[World]:
    """The request was carried out; its answer comes, or is lost and the round begins again."""
    yield world.but(worker=then, server=server)
    if world.lost_answers:
        yield world.but(server=server, lost_answers=world.lost_answers - 1)


def find_evidence(world: World, rules: Rules) -> Iterator[World]:
    presence = None
    if world.receipt is ReceiptEvidence.MISSING and world.has_handle:
        is_watched = world.launcher in (Launcher.HOLDS, Launcher.RUNS)
        presence = Presence.RUNNING if world.is_running else Presence.PENDING if is_watched else Presence.EXITED
    verdict = rules.judge(world.record, world.receipt, presence)
    if verdict is Verdict.RUNNING:
        if world.record is State.STARTED and world.server not in ENDED_ELSEWHERE:
            yield from answered(world, At.RUNNING_ANSWERED, Server.RUNNING)
    elif verdict is Verdict.ENDED:
        if world.server is Server.FAILED_TO_START:
            yield world.wrote(Event.RECOVERY_NEEDED)
        else:
            yield from answered(world, At.COMPLETION_ANSWERED, Server.COMPLETED)
    elif verdict is Verdict.NOT_STARTED:
        yield world.wrote(Event.NOT_STARTED)
    elif not (rules.is_grace_enough and world.launcher in (Launcher.HOLDS, Launcher.RUNS)):
        yield world.wrote(Event.RECOVERY_NEEDED)


def launcher_steps(world: World) -> Iterator[World]:
    gone = world.but(launcher=Launcher.GONE)
    match world.launcher, world.gate:
        case Launcher.WAITS_FOR_PLAN, Gate.CLOSED:
            yield gone
        case Launcher.HOLDS, Gate.CLOSED:
            yield published(gone, ReceiptEvidence.NOT_STARTED)
        case Launcher.HOLDS, Gate.BYTE:
            yield world.but(launcher=Launcher.RUNS, is_running=True, starts=world.starts + 1)
        case Launcher.RUNS, _ if not world.is_running:
            yield published(gone, ReceiptEvidence.ENDED)
    if world.is_running:
        yield world.but(is_running=False)
    if world.launcher in (Launcher.WAITS_FOR_PLAN, Launcher.HOLDS, Launcher.RUNS) and world.launcher_kills:
        yield gone.but(launcher_kills=world.launcher_kills - 1, launcher_was_killed=True)


def published(world: World, receipt: ReceiptEvidence) -> World:
    """The first receipt wins."""
    if world.receipt is not ReceiptEvidence.MISSING:
        return world
    return world.but(receipt=receipt, was_published=True)


class Explored(msgspec.Struct, frozen=True):
    """All situations, and which can follow which."""

    edges: dict[World, frozenset[World]]

    @property
    def ends(self) -> list[World]:
        """Where nothing happens any more but crashes and restarts of an idle worker."""
        return [
            world for world in self.edges if world.worker is At.LOOKING and all(is_idle(each) for each in self.edges[world])
        ]


def is_idle(world: World) -> bool:
    return world.worker is At.DEAD


def explore(rules: Rules, start: World = World()) -> Explored:  # noqa: B008 - frozen
    edges: dict[World, frozenset[World]] = {}
    waiting = [start]
    while waiting:
        world = waiting.pop()
        if world not in edges:
            edges[world] = frozenset(successors(world, rules))
            waiting += edges[world]
    return Explored(edges)


@pytest.fixture(scope="module")
def explored() -> Explored:
    return explore(Rules())


@pytest.mark.req("R1", "R162", "R163", "R168")
@pytest.mark.parametrize("is_grace_enough", [True, False])
def test_no_path_starts_the_command_twice(is_grace_enough: bool) -> None:
    worlds = explore(Rules(is_grace_enough=is_grace_enough)).edges

    assert len(worlds) > 1000
    assert max(world.starts for world in worlds) == 1


def test_every_path_can_come_to_an_end_and_ends_settled_or_explicitly_unknown(explored: Explored) -> None:
    assert {world.record for world in explored.ends} == {*SETTLED, State.RECOVERY_REQUIRED}
    before: dict[World, list[World]] = {}
    for world, following in explored.edges.items():
        for each in following:
            before.setdefault(each, []).append(world)
    reaching, waiting = set(), list(explored.ends)
    while waiting:
        world = waiting.pop()
        if world not in reaching:
            reaching.add(world)
            waiting += before.get(world, [])
    assert reaching == set(explored.edges)


def test_what_is_settled_is_true_and_what_both_sides_say_is_the_same(explored: Explored) -> None:
    for world in explored.edges:
        if world.record is State.COMPLETION_ACKNOWLEDGED:
            assert (world.starts, world.server, world.is_running) == (1, Server.COMPLETED, False)
        if world.record is State.START_FAILURE_ACKNOWLEDGED:
            assert (world.starts, world.server) == (0, Server.FAILED_TO_START)


@pytest.mark.req("R170", "R178")
def test_only_a_killed_launcher_or_a_crash_before_it_had_its_plan_leaves_the_outcome_unknown(explored: Explored) -> None:
    # Without those that were called running by mistake, which the next test is about.
    unknown = [world for world in explored.edges if world.record is State.RECOVERY_REQUIRED and not called_running(world)]

    assert unknown
    for world in unknown:
        assert world.launcher_was_killed or world.crashed_before_plan
        assert not world.was_published


def called_running(world: World) -> bool:
    """Whether the control plane was told that a command runs whose gate was never opened."""
    return world.server is Server.RUNNING and world.gate is not Gate.BYTE


def test_running_is_never_said_of_a_command_whose_gate_was_not_opened(explored: Explored) -> None:
    """The worker died after `started` and before the byte; the next one is quicker than the launcher's receipt."""
    assert not any(map(called_running, explored.edges))


def launches_behind_the_barrier(state: State) -> Step:
    return Step.LAUNCH if state is State.LAUNCHING else next_step(state)


def guesses_that_nothing_ran(state: State, receipt: ReceiptEvidence, presence: Presence | None) -> Verdict:
    verdict = judge(state, receipt, presence)
    return Verdict.NOT_STARTED if verdict is Verdict.UNKNOWN and state is State.STARTED else verdict


def test_a_rule_that_launches_again_behind_the_barrier_would_be_caught() -> None:
    """The gate's receipt is what such a rule would ignore; the table refuses its second barrier."""
    with pytest.raises(KeyError):
        explore(Rules(next_step=launches_behind_the_barrier))


def test_a_rule_that_guesses_would_be_caught() -> None:
    worlds = explore(Rules(judge=guesses_that_nothing_ran)).edges

    assert any(world.record is State.START_FAILURE_ACKNOWLEDGED and world.starts for world in worlds)
