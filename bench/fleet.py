"""What a fleet costs its control plane: `python bench/fleet.py [WORKERS ...]`, or `make bench-fleet`.

Protocol-true simulated workers over mutual TLS, first against one replica on SQLite, then against two replicas on PostgreSQL
with durable commits: all hold a session with a heartbeat and a pull every 10 s, and some take and report runs as fast as they
are given. Everything shares this machine: read the figures against each other and beside the line about the limit.
"""

import os
import platform
import shutil
import ssl
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio
from sqlalchemy import event

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qlworker.control.operator_api import AddWorker, IssuedToken, StartRun  # noqa: E402
from qlworker.control.pki import Identity, issue_worker  # noqa: E402
from qlworker.control.task_file import parse_task  # noqa: E402
from tests.builders import make_revision  # noqa: E402
from tests.control.fixtures import Plane  # noqa: E402
from tests.control.running import ControlPlane  # noqa: E402
from tests.postgres import DURABLE, postgres  # noqa: E402
from tests.simulated_worker import SimulatedWorker  # noqa: E402

SIZES = (10, 100, 1000)
BEAT_S = 10.0
MEASURED_S = float(os.environ.get("SECONDS_EACH", "20"))
BUSY = 24
BACKLOG = 200
GOAL = {"SQLite": 25, "PostgreSQL": 50}
GOAL_P99_S = 0.25
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TASK = b'project = "fleet"\nid = "job"\n[command]\nshell = "true"\n'
LIMITS = "\n[limits]\nin_flight = 256\nauthentication_per_peer = 100000\nauthentication_global = 100000\n"


class Tally:
    """What the workers saw while it is measured."""

    def __init__(self) -> None:
        self.is_on = False
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def note(self, operation: str, seconds: float, sent: int, received: int) -> None:
        """One answered request."""
        if self.is_on:
            self.seconds[operation].append(seconds)
            self.sent[operation] += sent
            self.received[operation] += received


@contextmanager
def installation(directory: Path, kind: str) -> Iterator[list[ControlPlane]]:
    """One replica on SQLite, or two on a PostgreSQL of their own."""
    with ExitStack() as stack:
        first = ControlPlane(directory / "a")
        text = first.config.read_text() + LIMITS
        replicas = [first]
        if kind == "PostgreSQL":
            server = stack.enter_context(postgres(DURABLE))
            text = text.replace('# database = ""', f'database = "{server.create("fleet")}"')
            text = text.replace("# [storage]", f'[storage]\nconnections = 8\nartifacts = "{first.directory / "artifacts"}"')
            shutil.copytree(first.directory, directory / "b")
            replicas.append(ControlPlane(directory / "b"))
        for replica in replicas:
            replica.config.write_text(text)
            stack.enter_context(replica)
        yield replicas


def client(replica: ControlPlane, path: Path) -> ssl.SSLContext:
    """One certificate for the whole fleet: who a worker is, its token says."""
    ca = replica.directory / "ca"
    identity = issue_worker(Identity((ca / "certificate.pem").read_bytes(), (ca / "key.pem").read_bytes()), "fleet")
    path.write_bytes(identity.certificate + identity.key)
    context = ssl.create_default_context(cafile=ca / "certificate.pem")
    context.load_cert_chain(path)
    return context


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Fleet:
    """`size` workers of which the first few are busy, and the backlog that feeds those."""

    def __init__(self, replicas: list[ControlPlane], size: int, directory: Path) -> None:
        self.tally = Tally()
        self._replicas = replicas
        self._size = size
        self._workers = list(self._enrolled(client(replicas[0], directory / "client.pem")))

    def _enrolled(self, context: ssl.SSLContext) -> Iterator[SimulatedWorker]:
        addresses = [("127.0.0.1", replica.port) for replica in self._replicas]
        with self._replicas[0].operator() as operator:
            operator.call(dict, "PUT", "/tasks", parse_task(TASK, "job.toml"))
            for number in range(self._size):
                name, turn = f"edge-{number}", number % len(addresses)
                request = AddWorker(worker_id=name, lifetime_s=3600, serial=f"{number + 1:x}", not_after_ms=2**42)
                token = operator.call(IssuedToken, "POST", "/workers", request).token or ""
                yield SimulatedWorker(name, token, addresses[turn:] + addresses[:turn], context, self.tally.note)

    @property
    def completed(self) -> int:
        """Runs whose completion was accepted."""
        return sum(len(worker.completed) for worker in self._workers)

    async def live(self) -> dict[str, Any]:
        """Lets them live for a while and tells what came of it."""
        pids = [replica.process.pid for replica in self._replicas if replica.process is not None] + [os.getpid()]
        async with trio.open_nursery() as nursery:
            for number, worker in enumerate(self._workers):
                nursery.start_soon(self._idle if number >= BUSY else self._busy, worker, number / self._size * BEAT_S)
            nursery.start_soon(self._feed)
            await trio.sleep(BEAT_S + 5)  # until everybody has registered
            before, done, began = [cpu_seconds(pid) for pid in pids], self.completed, trio.current_time()
            self.tally.is_on = True
            await trio.sleep(MEASURED_S)
            self.tally.is_on = False
            facts = {
                "took": trio.current_time() - began,
                "completed": self.completed - done,
                "cpu": [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)],
            }
            nursery.cancel_scope.cancel()
        attempts = Counter(attempt for worker in self._workers for attempt in worker.started)
        return {
            **facts,
            "tally": self.tally,
            "duplicates": sum(count - 1 for count in attempts.values()),
            "retries": sum(worker.retries for worker in self._workers),
        }

    @staticmethod
    async def _idle(worker: SimulatedWorker, delay_s: float) -> None:
        await trio.sleep(delay_s)
        await worker.register()
        while True:
            await worker.heartbeat()
            await worker.work()
            await trio.sleep(BEAT_S)

    @staticmethod
    async def _busy(worker: SimulatedWorker, _delay_s: float) -> None:
        await worker.register()
        beaten = trio.current_time()
        while True:
            if trio.current_time() - beaten >= BEAT_S:
                await worker.heartbeat()
                beaten = trio.current_time()
            if await worker.work() is None:
                await trio.sleep(0.1)

    async def _feed(self) -> None:
        """Keeps a backlog, so that a busy worker never waits for work."""
        started = 0
        while True:
            if started - self.completed < BACKLOG:
                await trio.to_thread.run_sync(self._start, 20)
                started += 20
            else:
                await trio.sleep(0.05)

    def _start(self, count: int) -> None:
        with self._replicas[0].operator() as operator:
            for _ in range(count):
                operator.call(dict, "POST", "/runs", StartRun(project="fleet", task="job"))


def queries() -> dict[str, int]:
    """Statements of one operation each, counted on SQLite: on PostgreSQL the locks come on top."""
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        plane = Plane(Path(directory))
        seen = 0

        def count(*_: Any) -> None:
            nonlocal seen
            seen += 1

        event.listen(plane.database.engine, "before_cursor_execute", count)

        def counted(name: str, step: Callable[[], Any]) -> Any:
            nonlocal seen
            seen = 0
            result = step()
            counts[name] = seen
            return result

        counted("register", plane.register)
        counted("heartbeat", lambda: plane.heartbeat(0))
        plane.start_run(plane.publish(make_revision()))
        held = plane.hold(counted("offers", plane.pull), "lease_capability_" + f"{1:026d}")
        counted("starting", lambda: plane.starting(held))
        counted("running", lambda: plane.running(held))
        counted("artifacts", lambda: plane.store(held))
        counted("completion", lambda: plane.complete(held))
        plane.close()
    return counts


def limit(facts: dict[str, Any], replicas: int) -> str:
    """What was used up, as far as the processes' own times tell."""
    took = facts["took"]
    shares = [seconds / took for seconds in facts["cpu"]]
    servers, fleet = shares[:replicas], shares[replicas]
    cores = os.cpu_count() or 1
    told = " + ".join(f"{share:.0%}" for share in servers)
    if max(servers) > 0.9:
        return f"a replica's one core (replicas {told}, simulated fleet {fleet:.0%} of a core)"
    if sum(shares) > 0.8 * cores:
        return f"this machine's {cores} cores, which the fleet shares (replicas {told}, simulated fleet {fleet:.0%})"
    return f"waiting: commits and round trips (replicas {told}, simulated fleet {fleet:.0%} of a core)"


def report(kind: str, replicas: int, size: int, facts: dict[str, Any], asked: dict[str, int]) -> float:
    """Prints one table and returns the completed runs per second."""
    tally, took = facts["tally"], facts["took"]
    rate = facts["completed"] / took
    total = sum(map(len, tally.seconds.values())) / took
    print(f"\n{kind}, {replicas} replica{'s' if replicas > 1 else ''}, {size} workers, {took:.0f} s")
    print(f"  completed runs {rate:.1f}/s, requests {total:.0f}/s")
    print(f"  duplicate claims {facts['duplicates']}, requests sent again {facts['retries']}")
    print(f"  {'operation':12} {'per s':>7} {'p50 ms':>8} {'p99 ms':>8} {'sent B':>8} {'got B':>8} {'queries':>8}")
    for operation, statements in asked.items():
        seconds = sorted(tally.seconds[operation])
        if len(seconds) < 2:
            continue
        cuts = statistics.quantiles(seconds, n=100)
        print(
            f"  {operation:12} {len(seconds) / took:7.1f} {cuts[49] * 1000:8.1f} {cuts[98] * 1000:8.1f}"
            f" {tally.sent[operation] / len(seconds):8.0f} {tally.received[operation] / len(seconds):8.0f} {statements:8}"
        )
    print(f"  the limit was {limit(facts, replicas)}")
    return rate


def main() -> int:
    """Prints a table per database and size, and how the two compare."""
    sizes = [int(text) for text in sys.argv[1:]] or list(SIZES)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, Linux {os.uname().release}")
    asked = queries()
    rates: dict[tuple[str, int], float] = {}
    worst: dict[tuple[str, int], float] = {}
    duplicates = 0
    for kind in GOAL:
        for size in sizes:
            with tempfile.TemporaryDirectory() as directory, installation(Path(directory), kind) as replicas:
                facts = trio.run(Fleet(replicas, size, Path(directory)).live)
                rates[kind, size] = report(kind, len(replicas), size, facts, asked)
                duplicates += facts["duplicates"]
                every = sorted(each for values in facts["tally"].seconds.values() for each in values)
                worst[kind, size] = statistics.quantiles(every, n=100)[98]
    largest = sizes[-1]
    print(f"\nat {largest} workers")
    for kind, goal in GOAL.items():
        rate, p99 = rates[kind, largest], worst[kind, largest]
        verdict = "reached" if rate >= goal and p99 <= GOAL_P99_S else "not reached here"
        print(
            f"  {kind:11} {rate:5.1f} runs/s, p99 of all requests {p99 * 1000:.0f} ms;"
            f" goal {goal} runs/s under {GOAL_P99_S * 1000:.0f} ms: {verdict}"
        )
        print(f"              {rate / rates[kind, sizes[0]]:.2f} times the rate of {sizes[0]} workers")
    return 1 if duplicates else 0


if __name__ == "__main__":
    sys.exit(main())
