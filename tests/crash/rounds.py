"""Random rounds: a plan made from a seed, carried out against a real worker and a real control plane, and judged.

A seed gives the same plan: the runs, the faults, their order and their times. What the machine makes of it in between is its
own; a failing round is found again by running the seed a few times.
"""

import contextlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.adapters.small_disk import small_disk
from tests.system.world import World

from .faults import Faults
from .harness import KINDS, Site, make_world
from .outcome import Fault, Tally, outcome

SIDE_BY_SIDE = 4
ROUNDS_PER_WORLD = 20
RANDOM_KINDS = ("quick", "quick", "secret", "three", "looks-killed", "killed", "stubborn", "loud", "slow", "endless", "missing")
DISK = "64m"
STARTS = 3


class Life(msgspec.Struct, frozen=True):
    """One episode, in milliseconds. `runs` start with it; then `act` happens after `after_ms`, and is over `lasts_ms` later.

    Acts: `kill` the worker, which then runs with `faults` (a `die_after` among them kills it again); `kill control plane`;
    `kill both`; `freeze` the worker; `freeze and kill` it; `fill disk`.
    """

    runs: tuple[str, ...]
    act: str
    after_ms: int
    lasts_ms: int
    faults: Faults


class Plan(msgspec.Struct, frozen=True):
    """One round."""

    number: int
    lives: tuple[Life, ...]


def plan(seed: int, number: int, *, with_disk: bool) -> Plan:
    """The plan of round `number`. Without a small disk its other acts are the same."""
    chance = random.Random(f"{seed}/{number}")
    acts = ["kill", "kill", "kill", "kill", "kill control plane", "kill both", "freeze", "freeze and kill", "fill disk"]
    lives = []
    for _ in range(chance.randint(2, 3)):
        act = chance.choice(acts)
        faults = Faults(
            die_after=chance.choice([0, 0, int(chance.expovariate(1 / 50)) + 1, int(chance.expovariate(1 / 300)) + 1]),
            drop=chance.choice([0, 0.1]),
            twice=chance.choice([0, 0.1]),
            seed=chance.randrange(1 << 30),
        )
        lives.append(
            Life(
                runs=tuple(chance.choice(RANDOM_KINDS) for _ in range(chance.randint(1, 5))),
                act="kill" if act == "fill disk" and not with_disk else act,
                after_ms=chance.choice([chance.randint(0, 300), chance.randint(300, 1500)]),
                lasts_ms=chance.randint(0, 700),
                faults=faults,
            )
        )
    return Plan(number, tuple(lives))


class Round:
    """Carries out one plan at a site whose worker may still run from the round before."""

    def __init__(self, site: Site, plan: Plan, tally: Tally) -> None:
        self._site = site
        self._plan = plan
        self._tally = tally
        self._runs: dict[str, str] = {}
        self._logs: list[str] = []
        self._had_no_room = any(life.act == "fill disk" for life in plan.lives)

    def play(self) -> None:
        """All lives, then a worker without faults until everything has come to rest, then the judgement."""
        for life in self._plan.lives:
            self._keep_alive(life.faults)
            run_ids = self._site.run(*(KINDS[name] for name in life.runs))
            self._runs |= dict(zip(run_ids, life.runs, strict=True))
            time.sleep(life.after_ms / 1000)
            self._act(life)
        self._judge(self._converge())

    def _act(self, life: Life) -> None:
        if life.act == "freeze":
            self._signal(signal.SIGSTOP)
            time.sleep(life.lasts_ms / 1000)
            self._signal(signal.SIGCONT)
        elif life.act == "fill disk":
            ballast = self._site.box.state / "ballast"
            fill(ballast)
            time.sleep(life.lasts_ms / 1000)
            ballast.unlink(missing_ok=True)
        else:
            if life.act == "freeze and kill":
                self._signal(signal.SIGSTOP)
                time.sleep(life.lasts_ms / 1000)
            if life.act in ("kill", "freeze and kill", "kill both"):
                self._kill()
            if life.act in ("kill control plane", "kill both"):
                self._site.world.stop(signal.SIGKILL)
                self._tally.kills += 1
                time.sleep(life.lasts_ms / 1000)
                self._site.world.start()

    def _keep_alive(self, faults: Faults) -> None:
        """What an init system does; and every restart brings the faults of its life."""
        worker = self._site.worker
        if worker is not None and worker.is_running():
            return
        self._bury()
        self._site.start(faults)

    def _kill(self) -> None:
        if self._site.worker is not None and self._site.worker.is_running():
            self._site.worker.kill()
            self._tally.kills += 1
            self._bury()

    def _bury(self) -> None:
        """Keeps the log of a worker that is over; one that ended by itself without being killed is a failure, but for one that
        was started on a full disk."""
        worker, self._site.worker = self._site.worker, None
        if worker is None:
            return
        code = worker.wait()
        self._logs.append(worker.text())
        if code != -signal.SIGKILL and not self._had_no_room:
            self._tally.notes.append(f"round {self._plan.number}: the worker ended by itself with {code}:\n{worker.text()}")

    def _signal(self, number: signal.Signals) -> None:
        if self._site.worker is not None and self._site.worker.is_running():
            self._site.worker.signal(number)

    def _converge(self) -> bool:
        worker = self._site.worker
        if worker is not None and not worker.is_running():
            self._tally.kills += 1  # by a point that it passed
            self._bury()
        elif self._site.faults.die_after:
            self._kill()  # it may die at any time, and it is to converge now
        # As an init system would: a worker that met the full disk while it started ends, and its next start finds room.
        for _ in range(STARTS if self._had_no_room else 1):
            self._keep_alive(Faults())
            if self._site.settle(self._runs):
                return True
            if self._site.worker is not None and self._site.worker.is_running():
                return False
        return False

    def _judge(self, settled: bool) -> None:
        where = f"round {self._plan.number}"
        self._tally.rounds += 1
        before = len(self._tally.notes)
        came_to_nothing = False
        for seen in self._site.look(self._runs):
            came_to_nothing |= outcome(seen) is None
            kind = KINDS[self._runs[seen.run_id]]
            self._tally.count(seen, msgspec.structs.replace(kind.expected, may_be_refused=self._had_no_room), None, where)
        if not settled and not came_to_nothing:
            self._tally.lost_completions += 1
            self._tally.notes.append(f"{where}: {Fault.LOST_COMPLETION}: the worker never came to rest")
        if len(self._tally.notes) > before:
            worker = self._site.worker
            logs = [*self._logs, worker.text() if worker is not None else ""]
            self._tally.notes.append(f"{where}: {self._plan}\n" + "\n--- next life\n".join(logs))


def fill(ballast: Path) -> None:
    """Writes until the disk takes no more."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(b"x"):
            pass


@contextlib.contextmanager
def site_in(world: World, *, with_disk: bool) -> Iterator[Site]:
    """A site, its state on a small disk if that is wanted; nothing of it runs afterwards."""
    site = Site(world)
    with contextlib.ExitStack() as stack:
        if with_disk:
            site.box.state.mkdir(mode=0o700)
            stack.enter_context(small_disk(site.box.state, size=DISK))
        try:
            yield site
        finally:
            if site.worker is not None:
                site.worker.kill()


def can_fill_disks(root: Path) -> bool:
    """Whether a small file system can be mounted here."""
    place = root / "disk"
    place.mkdir(parents=True)
    try:
        with small_disk(place, size="1m"):
            return True
    except pytest.skip.Exception:
        return False


def silent(line: str) -> None:
    """Says nothing."""


def run_rounds(
    root: Path, seed: int, rounds: int, *, say: Callable[[str], None] = silent, warn: Callable[[str], None] = silent
) -> Tally:
    """`rounds` rounds of `seed`, several worlds side by side. `say` gets a line for each, `warn` what is left out."""
    with_disk = can_fill_disks(root)
    if not with_disk:
        warn("no small disk can be mounted here (that needs root): rounds without a full disk")
    tally, lock = Tally(), threading.Lock()

    def stretch(numbers: Sequence[int]) -> None:
        place = root / f"rounds-{numbers[0]}"
        world = make_world(place)
        clean = True
        try:
            with site_in(world, with_disk=with_disk) as site:
                for number in numbers:
                    own = Tally()
                    Round(site, plan(seed, number, with_disk=with_disk), own).play()
                    with lock:
                        tally.add(own)
                        say(f"round {number}: {'clean' if own.is_clean else 'NOT CLEAN'}")
                    clean = clean and own.is_clean
        finally:
            world.stop()
            if clean:
                shutil.rmtree(place, ignore_errors=True)

    share = max(1, min(ROUNDS_PER_WORLD, -(-rounds // SIDE_BY_SIDE)))
    stretches = [range(first, min(first + share, rounds + 1)) for first in range(1, rounds + 1, share)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(stretch, stretches))
    return tally
