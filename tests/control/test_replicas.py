"""Two control planes on one PostgreSQL: each dies under load, and so does the database, and no accepted result is lost."""

import shutil
import signal
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from qlworker.control.operator_api import AddWorker, IssuedToken, RunDetail, RunView, Started, StartRun
from qlworker.control.pki import Identity, issue_worker
from qlworker.control.task_file import parse_task
from tests.control.running import ControlPlane
from tests.postgres import DURABLE, Postgres, postgres
from tests.simulated_worker import SimulatedWorker

WORKERS = 6
RUNS = 90
TASK = b"""
project = "home"
id = "job"
[command]
shell = "true"
"""


class Pair:
    """Two replicas with one database, one pepper, one authority and one store of logs."""

    def __init__(self, directory: Path, database: Postgres) -> None:
        self.database = database
        first = ControlPlane(directory / "a")
        shutil.copytree(first.directory, directory / "b")
        self.replicas = [first, ControlPlane(directory / "b")]
        for replica in self.replicas:
            text = replica.config.read_text().replace('# database = ""', f'database = "{database.url("fleet")}"')
            replica.config.write_text(text.replace("# [storage]", f'[storage]\nartifacts = "{first.directory / "artifacts"}"'))
            replica.start()
        self._context = self._client(directory / "client.pem")

    def _client(self, path: Path) -> ssl.SSLContext:
        ca = self.replicas[0].directory / "ca"
        authority = Identity((ca / "certificate.pem").read_bytes(), (ca / "key.pem").read_bytes())
        identity = issue_worker(authority, "fleet")
        path.write_bytes(identity.certificate + identity.key)
        context = ssl.create_default_context(cafile=ca / "certificate.pem")
        context.load_cert_chain(path)
        return context

    def worker(self, number: int) -> SimulatedWorker:
        """A worker that begins with the one replica or the other, and goes to the other when it does not answer."""
        name = f"edge-{number}"
        with self.replicas[0].operator() as operator:
            request = AddWorker(worker_id=name, lifetime_s=3600, serial=f"{number + 1:x}", not_after_ms=2**42)
            token = operator.call(IssuedToken, "POST", "/workers", request).token
        assert token is not None
        ports = [replica.port for replica in self.replicas]
        addresses = [("127.0.0.1", port) for port in (ports if number % 2 else reversed(ports))]
        return SimulatedWorker(name, token, addresses, self._context)

    def restart(self, replica: ControlPlane) -> None:
        """Kills it as a power cut would, and starts it again on the port it had."""
        port = replica.port
        replica.stop(signal.SIGKILL)
        replica.config.write_text(replica.config.read_text().replace("port = 0", f"port = {port}", 1))
        replica.start()

    def stop(self) -> None:
        for replica in self.replicas:
            if replica.process is not None and replica.process.poll() is None:
                replica.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with postgres(DURABLE) as server:
        server.create("fleet")
        pair = Pair(tmp_path, server)
        yield pair
        pair.stop()


@pytest.mark.req("R520")
def test_replicas_and_their_database_die_under_load_and_no_accepted_completion_is_lost(pair: Pair) -> None:
    workers = [pair.worker(number) for number in range(WORKERS)]
    with pair.replicas[0].operator() as operator:
        operator.call(dict, "PUT", "/tasks", parse_task(TASK, "job.toml"))
        run_ids = [operator.call(Started, "POST", "/runs", StartRun(project="home", task="job")).run_id for _ in range(RUNS)]

    def completed() -> int:
        return sum(len(worker.completed) for worker in workers)

    async def reach(count: int) -> None:
        while completed() < count:
            await trio.sleep(0.02)

    async def toil(worker: SimulatedWorker, number: int) -> None:
        await worker.register()
        while completed() < RUNS:
            if await worker.work(exit_code=number) is None:
                await trio.sleep(0.02)
        await worker.close()

    async def disturb() -> None:
        await reach(RUNS // 5)
        await trio.to_thread.run_sync(pair.restart, pair.replicas[0])
        await reach(2 * RUNS // 5)
        await trio.to_thread.run_sync(pair.database.kill)
        await trio.to_thread.run_sync(pair.database.start)
        await reach(3 * RUNS // 5)
        await trio.to_thread.run_sync(pair.restart, pair.replicas[1])

    async def load() -> None:
        with trio.fail_after(240):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                for number, worker in enumerate(workers):
                    nursery.start_soon(toil, worker, number)

    trio.run(load)

    accepted = {run_id: code for worker in workers for run_id, _, code in worker.completed}
    started = Counter(attempt for worker in workers for attempt in worker.started)
    assert set(accepted) == set(run_ids)
    assert max(started.values()) == 1
    assert sum(worker.retries for worker in workers) > 0  # they did notice
    with pair.replicas[1].operator() as operator:
        for run_id, code in accepted.items():
            detail = operator.call(RunDetail, "GET", f"/runs/{run_id}")
            assert (detail.run.status, detail.run.exit_code) == ("failed" if code else "succeeded", code)
            assert len(detail.attempts) == 1
            assert detail.attempts[0].artifact is not None
        assert len(operator.call(list[RunView], "GET", "/runs", limit=500)) == RUNS


def test_a_worker_goes_on_at_one_replica_with_the_session_it_opened_at_the_other(pair: Pair) -> None:
    worker = pair.worker(1)

    async def go() -> None:
        await worker.register()
        await worker.heartbeat()
        await trio.to_thread.run_sync(pair.replicas[0].stop, signal.SIGKILL)
        await worker.heartbeat()
        await worker.heartbeat()
        await worker.close()

    trio.run(go)

    assert worker.retries > 0


def test_what_an_operator_revokes_at_one_replica_is_shut_out_at_the_other(pair: Pair) -> None:
    worker = pair.worker(0)

    async def go() -> int:
        await worker.register()
        await trio.to_thread.run_sync(lambda: pair.replicas[0].out("worker", "revoke", "edge-0"))
        try:
            await worker.heartbeat()
        except Exception as error:
            return int(getattr(error, "status", 0))
        finally:
            await worker.close()
        return 200

    assert trio.run(go) == 401
