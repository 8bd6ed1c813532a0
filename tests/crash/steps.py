"""Every step: one run for each point at which a worker or a launcher can die; killed there, started again, judged."""

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.system.world import WorkerProcess

from .faults import Case, Faults, Scenario
from .harness import KINDS, Site, make_world
from .outcome import Fault, Seen, Tally, outcome

SIDE_BY_SIDE = 3
KIND = {Scenario.ENDS: KINDS["secret"], Scenario.CANNOT_START: KINDS["missing"], Scenario.TIMES_OUT: KINDS["endless"]}


def run_case(site: Site, case: Case, tally: Tally) -> Seen:
    """Runs one case in a state of its own and counts it."""
    shutil.rmtree(site.box.state, ignore_errors=True)
    kind = KIND[case.scenario]
    (run_id,) = site.run(kind)
    worker = site.start(case.faults)
    if case.faults.die or case.faults.with_worker:
        died = has_died(worker)
    else:
        # The launcher alone dies: the worker that saw it is killed only when it has judged it.
        died = site.settle([run_id])
        worker.kill()
    site.start(Faults()).wait_event("journal_read")
    settled = site.settle([run_id])
    (seen,) = site.look([run_id])
    assert site.worker is not None
    code = site.worker.stop() if site.worker.is_running() else site.worker.wait()
    if code != 0:
        tally.notes.append(f"{case.name}: the worker ended with {code}:\n{site.worker.text()}")
    tally.rounds += 1
    tally.kills += 1 + (case.faults.launcher != "")
    tally.count(seen, kind.expected, case.outcomes, case.name)
    if not died:
        tally.notes.append(f"{case.name}: the point was never reached:\n{worker.text()}")
    if not settled and outcome(seen) is not None:
        tally.lost_completions += 1
        tally.notes.append(f"{case.name}: {Fault.LOST_COMPLETION}: the worker never came to rest:\n{site.worker.text()}")
    return seen


def has_died(worker: WorkerProcess) -> bool:
    """Whether it killed itself; one that did not in time is ended."""
    try:
        return worker.wait() == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        worker.kill()
        return False


def run_steps(root: Path, cases: Sequence[Case], *, say: Callable[[str], None] = lambda line: None) -> Tally:
    """All of `cases`, a few at a time. `say` gets a line for each."""
    world = make_world(root)
    tally, lock = Tally(), threading.Lock()
    idle = [Site(world) for _ in range(min(SIDE_BY_SIDE, len(cases)))]

    def one(case: Case) -> None:
        with lock:
            site = idle.pop()
        own = Tally()
        try:
            seen = run_case(site, case, own)
        finally:
            with lock:
                idle.append(site)
        with lock:
            tally.add(own)
            say(f"{case.name}: {outcome(seen)}, {seen.started} executions")

    try:
        with ThreadPoolExecutor(len(idle)) as pool:
            list(pool.map(one, cases))
    finally:
        for site in idle:
            if site.worker is not None and site.worker.is_running():
                site.worker.kill()
        world.stop()
    return tally
