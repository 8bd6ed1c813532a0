"""The operator's application: what it answers, what it refuses, what it never tells, and how a log is followed."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
from sqlalchemy import insert, update

from qlworker.control import runs
from qlworker.control.aggregate import Attempt, insert_attempt, latest_attempt
from qlworker.control.artifact_directory import ArtifactDirectory
from qlworker.control.artifact_store import ArtifactKey
from qlworker.control.clock import SettableClock
from qlworker.control.config import Authority
from qlworker.control.credentials import authenticate
from qlworker.control.database import Database
from qlworker.control.live_output import LiveOutput
from qlworker.control.logs import JsonLog
from qlworker.control.operator import create_operator
from qlworker.control.pki import new_authority
from qlworker.control.revocation import Revocations
from qlworker.control.run_log import RunLog
from qlworker.control.schema import artifacts as artifact_rows
from qlworker.control.schema import metadata, worker_sessions
from qlworker.control.secret_store import SecretStore
from qlworker.control.signing import Signing
from qlworker.control.task_file import parse_task
from qlworker.control.tasks import publish
from qlworker.domain.canonical import log_artifact_id
from qlworker.domain.revision import SecretReference

NOW = 1_790_000_000_000
PEPPER = b"p" * 32
ADD = {"worker_id": "edge-1", "lifetime_s": 60, "serial": "2a", "not_after_ms": NOW + 60_000}
TASK: dict[str, Any] = {"project": "home", "id": "job", "command": {"shell": "true"}}


class World:
    """The application over a database and stores of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = SettableClock(NOW)
        self.database = Database(f"sqlite:///{directory}/control.sqlite", self.clock)
        self.database.create_tables()
        self.store, self.live = ArtifactDirectory(directory / "artifacts"), LiveOutput(directory / "live")
        self.stopping = trio.Event()
        self.log = (directory / "operator.log").open("w")
        log = JsonLog(self.log)
        authority = Authority(certificate=directory / "ca.pem", key=directory / "ca.key")
        identity = new_authority("an authority")
        for path, content in ((authority.certificate, identity.certificate), (authority.key, identity.key)):
            path.write_bytes(content)
            path.chmod(0o600)
        self.reloads: list[None] = []
        app = create_operator(
            self.database,
            pepper=PEPPER,
            secrets=directory / "secrets",
            artifacts=self.store,
            live=self.live,
            origin="https://localhost:5801",
            enrolment_origin="https://localhost:5802",
            authority=authority.certificate,
            revocations=Revocations(
                self.database, Signing(authority, log), directory / "revoked.pem", lambda: self.reloads.append(None), log
            ),
            stopping=self.stopping,
            log=log,
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://qlcontrol")

    async def ask(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        response = await self.client.request(method, path, content=content)
        assert response.status_code == status, response.text
        return response.json()

    def start(self) -> tuple[str, str]:
        """A queued run and its attempt."""
        with self.database.transaction() as tx:
            publish(tx, parse_task(b'project = "home"\nid = "job"\n[command]\nshell = "true"\n', "job.toml"))
            run_id = runs.start(tx, "home", "job").run_id
            attempt = latest_attempt(tx, run_id)
        assert attempt is not None
        return run_id, attempt.id

    def store_log(self, run_id: str, attempt_id: str, content: bytes, *, truncated: bool = False) -> None:
        """What the ingress does with an uploaded log."""
        key = ArtifactKey("home", run_id, attempt_id, log_artifact_id("home", run_id, attempt_id, "offer"))
        upload = self.store.begin(key)
        upload.write(content)
        sha256 = upload.publish()
        with self.database.transaction() as tx:
            tx.write(
                insert(artifact_rows).values(
                    attempt_id=attempt_id,
                    log_artifact_id=key.log_artifact_id,
                    project_id="home",
                    run_id=run_id,
                    byte_length=len(content),
                    sha256=sha256,
                    truncated=truncated,
                    stored_at_ms=NOW,
                )
            )
        self.live.remove(attempt_id)

    def cancel(self, run_id: str) -> None:
        with self.database.transaction() as tx:
            runs.cancel(tx, run_id)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()
    world.log.close()


async def test_a_worker_can_be_added_rotated_listed_and_revoked(world: World) -> None:
    added = await world.ask("POST", "/workers", ADD)
    rotated = await world.ask("POST", "/workers/rotate", {"worker_id": "edge-1", "lifetime_s": 120, "overlap_s": 10})
    published = {"credential_id": rotated["credential_id"]}
    with world.database.transaction() as tx:
        assert authenticate(tx, PEPPER, f"Worker {rotated['token']}") is None
    assert await world.ask("POST", "/workers/published", published) == published
    listed = await world.ask("GET", "/workers")

    with world.database.transaction() as tx:
        for issued in (added, rotated):
            principal = authenticate(tx, PEPPER, f"Worker {issued['token']}")
            assert principal is not None
            assert principal.credential_id == issued["credential_id"]
    assert [(each["worker_id"], each["credentials"], each["session"]) for each in listed] == [("edge-1", 2, "none")]
    assert listed[0]["credential_expires_at_ms"] == NOW + 120_000
    assert await world.ask("POST", "/workers/revoke", {"worker_id": "edge-1"}) == {
        "revoked": 2,
        "certificates": 1,
        "invitations": 0,
    }
    assert (world.directory / "revoked.pem").read_bytes().startswith(b"-----BEGIN X509 CRL-----")
    assert len(world.reloads) == 1
    assert (await world.ask("GET", "/workers"))[0]["credentials"] == 0


async def test_only_the_answer_that_issues_a_token_holds_it(world: World) -> None:
    added = await world.ask("POST", "/workers", ADD)
    secret = added["token"].split("_", 2)[2]
    refused = await world.ask("POST", "/workers", ADD, 409)
    listed = await world.ask("GET", "/workers")

    assert secret not in str([refused, listed])
    world.log.flush()
    kept = [path for path in world.directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert kept == []


@pytest.mark.req("R330")
@pytest.mark.parametrize(
    ("status", "expires_at_ms", "shown"),
    [
        ("online", NOW + 1, "online"),
        ("draining", NOW + 1, "draining"),
        ("online", NOW, "silent"),
        ("offline", NOW, "offline"),
    ],
)
async def test_the_list_tells_how_a_worker_is(world: World, status: str, expires_at_ms: int, shown: str) -> None:
    await world.ask("POST", "/workers", ADD)
    with world.database.transaction() as tx:
        tx.write(
            insert(worker_sessions).values(
                worker_id="edge-1",
                session_id="018f0000-0000-7000-8000-000000000001",
                generation=1,
                status=status,
                version=0,
                capabilities_json="{}",
                capabilities_hash="a" * 64,
                max_concurrent_runs=2,
                available_slots=1,
                registered_at_ms=NOW - 5,
                last_heartbeat_at_ms=NOW - 5,
                lease_expires_at_ms=expires_at_ms,
                updated_at_ms=NOW - 5,
            )
        )

    (worker,) = await world.ask("GET", "/workers")

    assert worker["session"] == shown
    assert (worker["available_slots"], worker["max_concurrent_runs"]) == (1, 2)


async def test_a_task_is_published_shown_and_run(world: World) -> None:
    published = await world.ask("PUT", "/tasks", TASK)
    run = await world.ask("POST", "/runs", {"project": "home", "task": "job", "priority": 3})

    assert (published["revision"], published["created"]) == (1, True)
    assert [each["id"] for each in await world.ask("GET", "/tasks")] == ["job"]
    shown = await world.ask("GET", "/task?project=home&id=job&revision=1")
    assert shown["execution"]["command"] == {"kind": "shell", "command": "true"}
    assert [each["id"] for each in await world.ask("GET", "/runs?limit=1&project=home&task=job")] == [run["run_id"]]
    assert (await world.ask("GET", f"/runs/{run['run_id']}"))["run"]["priority"] == 3
    assert len(await world.ask("GET", f"/runs/{run['run_id']}/events?after=1")) == 1
    assert (await world.ask("POST", f"/runs/{run['run_id']}/cancel"))["status"] == "cancelled"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/absent", None, 404),
        ("DELETE", "/runs", None, 405),
        ("POST", "/runs", b"{", 400),
        ("POST", "/runs", {"project": "home"}, 400),
        ("POST", "/runs", {"project": "home", "task": "job", "color": 1}, 400),
        ("POST", "/runs", {"project": "home", "task": "job", "priority": "high"}, 400),
        ("POST", "/runs", {"project": "home", "task": "absent"}, 409),
        ("POST", "/runs", {"project": "home", "task": "job", "retry": {"max_attempts": 2, "safety": "idempotent"}}, 400),
        ("POST", "/workers", ADD | {"serial": "0"}, 400),
        ("POST", "/workers", ADD | {"serial": "not hexadecimal"}, 400),
        ("PUT", "/tasks", TASK | {"command": {}}, 400),
        ("PUT", "/tasks", TASK | {"retries": 3}, 400),
        ("GET", "/task?project=home", None, 400),
        ("GET", "/task?project=home&id=absent", None, 409),
        ("GET", "/task?project=home&id=job&revision=-1", None, 400),
        ("GET", "/runs?limit=0", None, 400),
        ("GET", "/runs?limit=many", None, 400),
        ("GET", "/runs/absent", None, 409),
        ("GET", "/runs/absent/log", None, 409),
        ("POST", "/runs/absent/cancel", None, 409),
        ("POST", "/workers", {"worker_id": "-", "lifetime_s": 60}, 400),
        ("POST", "/workers", {"worker_id": "edge-1", "lifetime_s": 0}, 400),
        ("POST", "/workers", {"worker_id": "edge-1", "lifetime_s": 10**12}, 400),
        ("POST", "/workers/revoke", {"worker_id": "absent"}, 409),
        ("PUT", "/secrets?project=home", b"value", 400),
        ("PUT", "/secrets?project=home&name=../x", b"value", 400),
        ("PUT", "/secrets?project=..&name=x", b"value", 400),
        ("PUT", "/secrets?project=home&name=x&version=0", b"value", 400),
        ("PUT", "/secrets?project=home&name=x", b"\xff", 400),
        ("PUT", "/secrets?project=home&name=x", b"a\x00b", 400),
        ("PUT", "/secrets?project=home&name=x", b"x" * (16 * 1024 + 1), 400),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason(
    world: World, method: str, path: str, body: object, status: int
) -> None:
    def counts() -> list[int]:
        with world.database.transaction() as tx:
            return [len(tx.rows(table.select())) for table in metadata.sorted_tables]

    content, before = body if isinstance(body, bytes) else msgspec.json.encode(body), counts()
    response = await world.client.request(method, path, content=content)

    assert response.status_code == status
    assert counts() == before
    if status in {400, 409}:
        assert response.json()["error"]
        assert "x" * 100 not in response.text


async def test_a_secret_is_kept_byte_by_byte_where_the_ingress_reads_it(world: World) -> None:
    for value in (b"first", b"zwei\n"):
        assert await world.ask("PUT", "/secrets?project=home&name=token", value) == {"changed": True}

    file = world.directory / "secrets/home/token"
    assert file.read_bytes() == b"zwei\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["token"]
    reference = SecretReference(project_id="home", name="token")
    assert SecretStore(world.directory / "secrets").read(reference, 100) == "zwei\n"


async def test_a_version_of_a_secret_is_written_once(world: World) -> None:
    path = "/secrets?project=home&name=common&version=2"

    assert await world.ask("PUT", path, b"{}") == {"changed": True}
    assert await world.ask("PUT", path, b"{}") == {"changed": False}
    await world.ask("PUT", path, b"[]", 409)
    assert (world.directory / "secrets/home/common@2").read_bytes() == b"{}"


async def test_a_directory_open_to_others_takes_no_secret(world: World) -> None:
    (world.directory / "secrets").mkdir(mode=0o755)
    (world.directory / "secrets").chmod(0o755)

    refused = await world.ask("PUT", "/secrets?project=home&name=token", b"value", 500)

    assert "chmod 0700" in refused["error"]
    assert list((world.directory / "secrets").iterdir()) == []


async def test_a_log_is_followed_live_and_goes_on_in_the_stored_one_without_a_seam(world: World) -> None:
    run_id, attempt_id = world.start()
    stream = RunLog(world.database, world.store, world.live).stream(run_id, world.stopping)
    world.live.write(attempt_id, 0, b"one\n")
    with trio.fail_after(60):
        assert await anext(stream) == b"one\n"
        world.live.write(attempt_id, 4, b"two\n")
        assert await anext(stream) == b"two\n"
        world.store_log(run_id, attempt_id, b"one\ntwo\nthree\n")
        assert await anext(stream) == b"three\n"
        world.cancel(run_id)

        assert [chunk async for chunk in stream] == []


async def test_a_follower_gets_everything_of_a_run_that_is_over_already(world: World) -> None:
    run_id, attempt_id = world.start()
    content = bytes(range(256)) * 1000  # bytes are bytes, and more than one chunk
    world.store_log(run_id, attempt_id, content)
    world.cancel(run_id)

    for query in ("", "?follow=1"):
        response = await world.client.get(f"/runs/{run_id}/log{query}")
        assert response.content == content


async def test_a_log_without_follow_ends_where_it_is_now(world: World) -> None:
    run_id, attempt_id = world.start()
    world.live.write(attempt_id, 0, b"so far")

    assert (await world.client.get(f"/runs/{run_id}/log")).content == b"so far"


async def test_a_log_that_was_cut_says_so_instead_of_joining_what_does_not_fit(world: World) -> None:
    run_id, attempt_id = world.start()
    stream = RunLog(world.database, world.store, world.live).stream(run_id, world.stopping)
    world.live.write(attempt_id, 0, b"one\n")
    with trio.fail_after(60):
        assert await anext(stream) == b"one\n"
        world.store_log(run_id, attempt_id, b"[cut]\nthree\n", truncated=True)
        world.cancel(run_id)
        rest = b"".join([chunk async for chunk in stream])

    assert b"was cut" in rest
    assert b"three" not in rest


async def test_a_stop_of_the_server_ends_a_follower(world: World) -> None:
    run_id, _ = world.start()
    stream = RunLog(world.database, world.store, world.live).stream(run_id, world.stopping)
    world.stopping.set()

    with trio.fail_after(60):
        assert [chunk async for chunk in stream] == []


async def test_a_new_attempt_is_followed_from_its_start(world: World) -> None:
    """The stream belongs to the newest attempt; the position in the old one's output means nothing in it."""
    run_id, attempt_id = world.start()
    stream = RunLog(world.database, world.store, world.live).stream(run_id, world.stopping)
    world.live.write(attempt_id, 0, b"first attempt\n")
    with trio.fail_after(60):
        assert await anext(stream) == b"first attempt\n"
        with world.database.transaction() as tx:
            tx.write(update(runs.run_attempts).where(runs.run_attempts.c.id == attempt_id).values(status="lost"))
            insert_attempt(tx, Attempt(id="attempt-2", run_id=run_id, attempt=2, status="claimed", created_at_ms=NOW))
        world.live.write("attempt-2", 0, b"2nd\n")

        assert await anext(stream) == b"2nd\n"
        await stream.aclose()
