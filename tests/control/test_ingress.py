"""The worker listener's HTTP rules, through the ASGI application: wire-protocol.md §1, control-plane.md §15.3."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from sqlalchemy import insert, select, update
from sqlalchemy.exc import OperationalError

from qlworker.control import credentials
from qlworker.control.config import Limits, Settings
from qlworker.control.failure import Failure
from qlworker.control.ingress import Ingress
from qlworker.control.request_body import UPLOAD_TYPE
from qlworker.control.schema import security_audit, worker_credentials
from qlworker.control.shield import Shield
from qlworker.control.worker_routes import ROUTES
from qlworker.domain.canonical import credential_digest, from_b64u
from qlworker.domain.document import Document
from qlworker.domain.revision import Binding, SecretReference
from qlworker.wire.certificate import CERTIFICATE_SCHEMA, CertificateRequest
from qlworker.wire.completion import COMPLETION_SCHEMA, CompletionResponse, OutputRequest, OutputResponse, UploadResponse
from qlworker.wire.offers import OfferRequest
from qlworker.wire.secrets import SecretRequestV2
from qlworker.wire.session import HeartbeatRequest, RegisterRequest, TransitionRequest
from tests.builders import make_revision
from tests.control.fixtures import (
    CAPABILITIES,
    EDGE,
    LOG,
    OTHER_SESSION,
    PEPPER,
    SESSION,
    SESSION_MS,
    START_MS,
    TOKEN,
    WORKER,
    Answer,
    Held,
    Plane,
    attestation_id,
    call,
)

JSON = "application/json"


class Line:
    """A worker's connection: its credential, its session, and one request after the other."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.app: Ingress = plane.app()
        self.token = plane.credential()

    async def post(
        self, operation: str, body: Document | bytes | list[bytes], session: str = SESSION, **options: Any
    ) -> Answer:
        content = body.to_json() if isinstance(body, Document) else body
        headers = {
            "authorization": f"Worker {self.token}",
            "content-type": UPLOAD_TYPE if operation == "artifacts" else JSON,
            **options.pop("headers", {}),
        }
        worker = options.pop("worker", WORKER)
        path = f"/api/v3/worker-ingress/workers/{worker}/sessions/{session}/{operation}"
        return await call(self.app, path, content, headers=headers, **options)


@pytest.fixture
def line(plane: Plane) -> Line:
    return Line(plane)


def register(**changes: Any) -> RegisterRequest:
    request = RegisterRequest(
        schema="qinglong/worker-session-register@v1",
        capabilities_json=CAPABILITIES.text(),
        capabilities_hash=CAPABILITIES.digest(),
        max_concurrent_runs=1,
        available_slots=1,
        lease_duration_ms=SESSION_MS,
    )
    return msgspec.structs.replace(request, **changes)


def heartbeat(version: int = 0) -> HeartbeatRequest:
    return HeartbeatRequest(
        schema="qinglong/worker-session-heartbeat@v1",
        generation=1,
        expected_version=version,
        available_slots=1,
        lease_duration_ms=SESSION_MS,
    )


def pull() -> OfferRequest:
    return OfferRequest(worker_generation=1, offer_id="offer-1", lease_token=TOKEN)


def upload(held: Held, content: bytes = LOG, **changes: Any) -> bytes:
    return held.upload(content, **changes).preamble() + content


def audit(plane: Plane) -> list[Any]:
    with plane.database.transaction() as tx:
        return tx.rows(select(security_audit).where(security_audit.c.operation_id.in_(ROUTES)))


async def test_the_whole_way_of_one_execution(plane: Plane, line: Line) -> None:
    secret = SecretReference(project_id="project-1", name="token").text()
    project = plane.directory / "secrets/project-1"
    project.mkdir(mode=0o700, parents=True)
    (project / "token").touch(0o600)
    (project / "token").write_text("s3cret")
    revision = plane.publish(make_revision(environment=[Binding(name="T", kind="secret", secret_ref=secret)]))
    run_id = plane.start_run(revision)

    assert (await line.post("register", register())).json["generation"] == 1
    assert (await line.post("heartbeat", heartbeat())).json["version"] == 1
    offered = await line.post("offers", pull())
    assert offered.json["status"] == "offered"
    offer = offered.json["offer"]
    held = Held(
        caller=EDGE,
        project_id=offer["candidate"]["projectId"],
        run_id=run_id,
        attempt_id=offer["candidate"]["attemptId"],
        offer_id="offer-1",
        generation=1,
        lease_generation=1,
        lease_version=0,
        token=TOKEN,
    )
    assert (await line.post("starting", held.activation())).json["status"] == "applied"
    wanted = SecretRequestV2(
        schema=SecretRequestV2.SCHEMA,
        **held.fence(),
        task_id="task-1",
        task_revision=revision.task_revision,
        execution_digest=revision.content_digest,
        secret_refs=[secret],
        environment_bundle_refs=[],
    )
    assert (await line.post("secrets", wanted)).json["values"][0]["value"] == "s3cret"
    assert (await line.post("running", held.running())).json["status"] == "applied"
    assert (await line.post("lease-control", held.lease_control())).json["leaseVersion"] == 1
    held = msgspec.structs.replace(held, lease_version=1)
    shown = OutputRequest(schema=OutputRequest.SCHEMA, **held.fence(), log_artifact_id=held.log_id, offset=0, data=LOG)
    assert msgspec.json.decode((await line.post("output", shown)).body, type=OutputResponse).next_offset == len(LOG)
    stored = msgspec.json.decode((await line.post("artifacts", upload(held))).body, type=UploadResponse)
    assert (stored.status, stored.byte_length) == ("stored", len(LOG))
    assert not plane.live.path(held.attempt_id).exists()
    completed = await line.post("completion", held.completion())
    assert msgspec.json.decode(completed.body, type=CompletionResponse).status == "applied"
    assert (await line.post("completion", held.completion())).json["status"] == "already_completed"
    away = TransitionRequest(schema="qinglong/worker-session-transition@v1", generation=1, expected_version=1, status="offline")
    assert (await line.post("transition", away)).json["status"] == "offline"
    assert plane.facts(held)[0].status == "succeeded"
    for file in plane.directory.glob("control.sqlite*"):  # V72, V109
        assert b"s3cret" not in file.read_bytes()
        assert TOKEN.encode() not in file.read_bytes()


async def test_answers_carry_the_contracts_headers(line: Line) -> None:
    answer = await line.post("register", register(), headers={"x-request-id": "abc-1"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-request-id"] == "abc-1"


async def test_a_bad_request_id_is_replaced(line: Line) -> None:
    answer = await line.post("register", register(), headers={"x-request-id": "no spaces allowed"})
    assert len(answer.headers["x-request-id"]) == 36


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_need_no_credential(line: Line, method: str) -> None:
    live = await call(line.app, "/livez", method=method)
    ready = await call(line.app, "/readyz", method=method)
    assert (live.status, ready.status) == (200, 200)
    line.app.draining = True
    assert (await call(line.app, "/readyz", method=method)).status == 503
    assert (await call(line.app, "/livez", method=method)).status == 200
    assert live.body == (b'{"status":"live"}' if method == "GET" else b"")


async def test_a_draining_listener_admits_nobody(line: Line) -> None:
    line.app.draining = True
    answer = await line.post("register", register())
    assert (answer.status, answer.code) == (503, "admission_draining")


@pytest.mark.parametrize(
    ("path", "method", "query", "status", "code"),
    [
        ("/elsewhere", "POST", b"", 404, "not_found"),
        ("/api/v3/else", "POST", b"", 404, "worker_route_not_found"),
        (f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/unknown", "POST", b"", 404, "worker_route_not_found"),
        (f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/offers", "GET", b"", 404, "worker_route_not_found"),
        (f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/offers", "TRACE", b"", 405, "method_not_allowed"),
        (f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/offers", "POST", b"a=1", 404, "worker_route_not_found"),
        (f"/api/v3/worker-ingress/workers/{WORKER}/sessions/not-a-uuid/offers", "POST", b"", 404, "worker_route_not_found"),
        (f"/api/v3/worker-ingress/workers/-bad/sessions/{SESSION}/offers", "POST", b"", 404, "worker_route_not_found"),
        ("/" + "x" * 9000, "POST", b"", 400, "invalid_url"),
    ],
)
async def test_paths_methods_and_queries(line: Line, path: str, method: str, query: bytes, status: int, code: str) -> None:
    answer = await call(line.app, path, method=method, query=query)
    assert (answer.status, answer.code) == (status, code)


def test_no_worker_route_reaches_expiry() -> None:  # V92
    assert set(ROUTES) == {
        "register",
        "heartbeat",
        "transition",
        "offers",
        "starting",
        "running",
        "start-failure",
        "secrets",
        "lease-control",
        "attestations",
        "artifacts",
        "completion",
        "output",
        "certificate",
    }


@pytest.mark.parametrize("case", ["none", "scheme", "garbage", "non-canonical", "unknown", "wrong secret", "another worker"])
async def test_a_credential_that_is_not_right_is_401(plane: Plane, line: Line, case: str) -> None:  # V111
    worker = WORKER
    secret = line.token.rpartition("_")[2] if line.token.count("_") == 2 else line.token.split("_", 2)[2]
    identity = line.token.split("_")[1]
    header = {
        "none": "",
        "scheme": f"Bearer {line.token}",
        "garbage": "Worker ql3w_x",
        "non-canonical": f"Worker ql3w_{identity}_{secret[:-1]}=",
        "unknown": f"Worker ql3w_unknown_{secret}",
        "wrong secret": f"Worker ql3w_{identity}_{'A' * 43}",
        "another worker": f"Worker {line.token}",
    }[case]
    if case == "another worker":
        worker = "edge-2"
    before = plane.snapshot(without=("security_audit",))
    answer = await line.post("register", register(), worker=worker, headers={"authorization": header})
    assert (answer.status, answer.code) == (401, "worker_authentication_required")
    assert plane.snapshot(without=("security_audit",)) == before
    assert [row.outcome for row in audit(plane)] == ["authentication_rejected"]


@pytest.mark.parametrize("case", ["revoked", "expired", "not yet valid"])
async def test_a_credential_that_does_not_hold_now_is_401(plane: Plane, line: Line, case: str) -> None:  # V111
    with plane.database.transaction() as tx:
        if case == "revoked":
            credentials.revoke(tx, WORKER)
        elif case == "expired":
            tx.write(update(worker_credentials).values(expires_at_ms=tx.now_ms))
        else:
            tx.write(update(worker_credentials).values(not_before_at_ms=tx.now_ms + 1))
    assert (await line.post("register", register())).status == 401


async def test_every_request_is_audited_before_its_body_is_read(plane: Plane, line: Line) -> None:  # V106
    found: list[Any] = []

    def look() -> None:
        found.extend((row.request_id, row.operation_id, row.subject, row.outcome) for row in audit(plane))

    line.app = delayed(line.app, look, at=1)  # type: ignore[assignment]
    answer = await line.post("register", b"not json", headers={"x-request-id": "request-7"})
    assert answer.status == 400
    assert found == [("request-7", "register", WORKER, "allowed")]


async def test_without_an_audit_row_nothing_happens(plane: Plane, line: Line) -> None:  # V106
    before = plane.snapshot()
    with plane.failing_at(1):
        answer = await line.post("register", register())
    assert (answer.status, answer.code) == (503, "worker_audit_unavailable")
    assert plane.snapshot() == before


async def test_a_database_that_cannot_authenticate_is_503(plane: Plane, line: Line) -> None:
    def broken(tx: Any, pepper: bytes, header: str | None) -> None:
        raise OperationalError("select", None, Exception("gone"))

    line.app._authenticate = broken
    answer = await line.post("register", register())
    assert (answer.status, answer.code) == (503, "worker_authentication_unavailable")


async def test_failed_authentications_are_budgeted_per_peer(line: Line, mock_clock: trio.testing.MockClock) -> None:  # V114
    for _ in range(120):
        assert (await line.post("register", register(), headers={"authorization": ""})).status == 401
    answer = await line.post("register", register())
    assert (answer.status, answer.code) == (429, "authentication_rate_limited")
    assert 1 <= int(answer.headers["retry-after"]) <= 61
    assert (await line.post("register", register(), peer="192.0.2.2")).status == 200
    mock_clock.jump(61)
    assert (await line.post("register", register())).status == 200


async def test_successful_requests_never_use_up_the_budget(plane: Plane, line: Line) -> None:  # V114
    await line.post("register", register())
    for version in range(150):
        assert (await line.post("heartbeat", heartbeat(version))).status == 200
    assert (await line.post("heartbeat", b"{}", headers={"authorization": ""})).status == 401
    assert (await line.post("heartbeat", heartbeat(150))).status == 200


async def test_fenced_requests_do_not_count_as_failed_authentications(line: Line) -> None:  # V114
    for _ in range(130):
        assert (await line.post("heartbeat", heartbeat())).status == 409


async def test_the_global_budget_counts_all_peers(tmp_path: Any) -> None:
    plane = Plane(tmp_path, Settings(limits=Limits(authentication_global=3)))
    try:
        line = Line(plane)
        for peer in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            assert (await line.post("register", register(), peer=peer, headers={"authorization": ""})).status == 401
        assert (await line.post("register", register(), peer="192.0.2.4")).status == 429
    finally:
        plane.close()


async def test_a_place_of_an_old_window_is_not_given_back_twice(mock_clock: trio.testing.MockClock) -> None:
    shield = Shield(Limits(authentication_per_peer=1))
    old = shield.reserve("192.0.2.1")
    mock_clock.jump(61)
    shield.reserve("192.0.2.1")
    shield.give_back(old)
    with pytest.raises(Failure) as raised:
        shield.reserve("192.0.2.1")
    assert raised.value.retry_after_s == 60


async def test_more_peers_than_are_counted_are_turned_away(tmp_path: Any) -> None:
    plane = Plane(tmp_path, Settings(limits=Limits(authentication_peers=1)))
    try:
        line = Line(plane)
        await line.post("register", register(), headers={"authorization": ""})
        answer = await line.post("register", register(), peer="192.0.2.4")
        assert (answer.status, answer.code) == (503, "authentication_shield_unavailable")
    finally:
        plane.close()


REQUESTS: dict[str, Any] = {
    "register": register(),
    "heartbeat": heartbeat(),
    "transition": TransitionRequest(
        schema="qinglong/worker-session-transition@v1", generation=1, expected_version=0, status="draining"
    ),
    "offers": pull(),
}


def request_for(operation: str, held: Held) -> dict[str, Any]:
    if operation in REQUESTS:
        return dict(REQUESTS[operation].members())
    fence = held.fence()
    secrets = SecretRequestV2(
        schema=SecretRequestV2.SCHEMA,
        **fence,
        task_id="task-1",
        task_revision="r",
        execution_digest="0" * 64,
        secret_refs=[SecretReference(project_id="project-1", name="n").text()],
        environment_bundle_refs=[],
    )
    shown = OutputRequest(schema=OutputRequest.SCHEMA, **fence, log_artifact_id=held.log_id, offset=0, data=b"x")
    documents: dict[str, Document] = {
        "starting": held.activation(),
        "running": held.running(),
        "start-failure": held.activation(),
        "secrets": secrets,
        "lease-control": held.lease_control(),
        "attestations": held.attestation(callback_sequence=0),
        "completion": held.completion(),
        "output": shown,
        "certificate": CertificateRequest(schema=CERTIFICATE_SCHEMA, certificate_request="-----BEGIN CERTIFICATE REQUEST-----"),
    }
    return json.loads(documents[operation].to_json())


JSON_OPERATIONS = sorted(set(ROUTES) - {"artifacts"})


@pytest.mark.parametrize("operation", JSON_OPERATIONS)
async def test_an_unknown_or_missing_member_is_400_and_changes_nothing(
    plane: Plane, line: Line, operation: str
) -> None:  # V115
    held = plane.drive("starting")
    members = request_for(operation, held)
    before = plane.snapshot(without=("security_audit",))
    extra = await line.post(operation, json.dumps({**members, "surprise": 1}).encode())
    assert (extra.status, extra.code) == (400, "invalid_worker_request")
    for name in members:
        left = {key: value for key, value in members.items() if key != name}
        missing = await line.post(operation, json.dumps(left).encode())
        assert (missing.status, missing.code) == (400, "invalid_worker_request"), name
    assert plane.snapshot(without=("security_audit",)) == before


@pytest.mark.parametrize("schema", ["qinglong/remote-worker-completion@v2", COMPLETION_SCHEMA])
async def test_another_schema_is_400(plane: Plane, line: Line, schema: str) -> None:
    held = plane.drive("starting")
    members = {**request_for("lease-control", held), "schema": schema}
    assert (await line.post("lease-control", json.dumps(members).encode())).code == "invalid_worker_request"


async def test_a_succeeded_completion_with_an_exit_code_is_400(plane: Plane, line: Line) -> None:  # V82
    held = plane.drive("running")
    members = request_for("completion", held)
    members["result"]["exitCode"] = 1
    answer = await line.post("completion", json.dumps(members).encode())
    assert (answer.status, answer.code) == (400, "invalid_worker_request")


FENCED = {
    "heartbeat": "worker_session_fenced",
    "transition": "worker_session_fenced",
    "offers": "worker_offer_fenced",
    "starting": "worker_activation_fenced",
    "running": "worker_activation_fenced",
    "start-failure": "worker_activation_fenced",
    "secrets": "worker_secret_delivery_fenced",
    "lease-control": "worker_lease_control_fenced",
    "attestations": "worker_attestation_fenced",
    "completion": "worker_completion_fenced",
    "output": "worker_completion_fenced",
}


@pytest.mark.parametrize("operation", FENCED)
async def test_a_replaced_session_is_told_409_with_the_operations_code(plane: Plane, line: Line, operation: str) -> None:  # V58
    held = plane.drive("starting")
    await line.post("register", register(), session=OTHER_SESSION)
    before = plane.snapshot(without=("security_audit",))
    answer = await line.post(operation, json.dumps(request_for(operation, held)).encode())
    assert (answer.status, answer.code) == (409, FENCED[operation])
    assert plane.snapshot(without=("security_audit",)) == before


UNAVAILABLE = {
    "register": "worker_ingress_unavailable",
    "offers": "worker_offer_unavailable",
    "starting": "worker_activation_unavailable",
    "lease-control": "worker_lease_control_unavailable",
    "attestations": "worker_ingress_unavailable",
}


@pytest.mark.parametrize("operation", UNAVAILABLE)
async def test_a_failing_write_is_503_with_the_operations_code(plane: Plane, line: Line, operation: str) -> None:
    held = plane.drive("starting" if operation == "attestations" else "claimed")
    if operation in ("register", "offers"):
        plane.register()
        plane.start_run(plane.publish(make_revision(task_id="task-2")))
        await line.post("register", register(available_slots=1, max_concurrent_runs=2), session=OTHER_SESSION)
    body = json.dumps(request_for(operation, held)).encode()
    session = SESSION
    if operation == "offers":
        body, session = OfferRequest(worker_generation=2, offer_id="o-9", lease_token=TOKEN).to_json(), OTHER_SESSION
    before = plane.snapshot(without=("security_audit",))
    with plane.failing_at(2):  # the first write is the audit row
        answer = await line.post(operation, body, session=session)
    assert (answer.status, answer.code) == (503, UNAVAILABLE[operation])
    assert plane.snapshot(without=("security_audit",)) == before


async def test_an_attestation_is_201_then_200_then_409(plane: Plane, line: Line) -> None:  # V117
    held = plane.drive("running")
    created = await line.post("attestations", held.attestation())
    replayed = await line.post("attestations", held.attestation())
    reused = await line.post("attestations", held.attestation(journal_revision=11))
    members = {"attestationId": attestation_id(1), "sequence": 1, "state": "running", "receivedAtMs": START_MS}
    assert (created.status, created.json) == (201, {**members, "replay": False})
    assert (replayed.status, replayed.json) == (200, {**members, "replay": True})
    assert (reused.status, reused.json) == (409, {"code": "worker_attestation_fenced"})


@pytest.mark.parametrize(
    "change",
    [
        {"attestationId": "018f5c64-9b9d-4f1a-8c2d-000000000001"},
        {"attestationId": "018F5C64-9B9D-7F1A-8C2D-000000000001"},
        {"runId": "r" * 37},
        {"attemptId": ""},
        {"sequence": 0},
        {"sequence": 1.5},
        {"state": "lost"},
        {"workerGeneration": 0},
        {"leaseTokenDigest": "A" * 64},
        {"leaseGeneration": 0},
        {"leaseVersion": -1},
        {"offerId": "../x"},
        {"callbackSequence": -1},
        {"executorHandle": ""},
        {"executorHandle": "h" * 513},
        {"executorHandle": "a\nb"},
        {"journalRevision": 0},
        {"journalRevision": 2**53},
        {"schema": "qinglong/worker-execution-attestation@v1"},
        {"leaseToken": TOKEN},
    ],
    ids=str,
)
async def test_an_attestation_out_of_bounds_is_400(plane: Plane, line: Line, change: dict[str, Any]) -> None:  # V115
    held = plane.drive("running")
    before = plane.snapshot(without=("security_audit",))
    answer = await line.post("attestations", json.dumps(request_for("attestations", held) | change).encode())
    assert (answer.status, answer.code) == (400, "invalid_worker_request")
    assert plane.snapshot(without=("security_audit",)) == before


async def test_an_attestation_beyond_the_body_limit_is_413(plane: Plane, line: Line) -> None:
    held = plane.drive("running")
    answer = await line.post("attestations", held.attestation().to_json() + b" " * 65_536)
    assert (answer.status, answer.code) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({"content-type": "text/plain"}, b"{}", 415, "unsupported_content_type"),
        ({"content-type": "Application/JSON"}, b"{}", 415, "unsupported_content_type"),
        ({"content-encoding": "gzip"}, b"{}", 415, "unsupported_content_encoding"),
        ({"content-length": ""}, b"{}", 400, "invalid_content_length"),
        ({"content-length": "+2"}, b"{}", 400, "invalid_content_length"),
        ({"content-length": "3"}, b"{}", 400, "content_length_mismatch"),
        ({"content-length": "1"}, b"{}", 400, "content_length_mismatch"),
        ({"transfer-encoding": "chunked"}, b"{}", 400, "invalid_content_length"),
        ({"content-length": "65537"}, b"{}", 413, "request_too_large"),
        ({}, b"{", 400, "invalid_json"),
        ({}, b"\xff", 400, "invalid_json"),
        ({}, b"", 400, "invalid_json"),
        ({}, b"[]", 400, "invalid_worker_request"),
        ({"content-type": "application/json; charset=utf-8"}, b"{}", 400, "invalid_worker_request"),
    ],
)
async def test_headers_and_bodies_out_of_order(line: Line, headers: Any, body: bytes, status: int, code: str) -> None:
    answer = await line.post("register", body, headers=headers)
    assert (answer.status, answer.code) == (status, code)


async def test_a_body_that_grows_past_its_length_is_cut_off(line: Line) -> None:
    answer = await line.post("register", [b"{", b"x" * 70_000], headers={"content-length": "10"})
    assert (answer.status, answer.code) == (400, "content_length_mismatch")


def delayed(app: Ingress, step: Callable[[], object], at: int = 2) -> Callable[..., Any]:
    """`app`, with `step` taken while piece number `at` of a body is waited for."""
    asked = 0

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def receive_later() -> Any:
            nonlocal asked
            asked += 1
            if asked == at:
                step()
                await trio.lowlevel.checkpoint()
            return await receive()

        await app(scope, receive_later, send)

    return wrapped


@pytest.mark.parametrize(("seconds", "status"), [(14, 200), (16, 504)])
async def test_a_body_that_does_not_come_in_time_is_504(
    line: Line, mock_clock: trio.testing.MockClock, seconds: float, status: int
) -> None:
    inner = line.app
    body = register().to_json()
    line.app = delayed(inner, lambda: mock_clock.jump(seconds))  # type: ignore[assignment]
    answer = await line.post("register", [body[:5], body[5:]])
    assert answer.status == status
    assert status == 200 or answer.code == "request_timeout"
    assert inner._in_flight == 0


async def test_requests_beyond_the_limit_are_turned_away(tmp_path: Any) -> None:
    plane = Plane(tmp_path, Settings(limits=Limits(in_flight=1)))
    try:
        line = Line(plane)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: line.post("register", b"{", headers={"content-length": "500"}, hang=trio.Event()))
            while not line.app._in_flight:
                await trio.lowlevel.checkpoint()
            answer = await line.post("register", register())
            nursery.cancel_scope.cancel()
        assert (answer.status, answer.code) == (503, "admission_capacity_exhausted")
        assert (await line.post("register", register())).status == 200
    finally:
        plane.close()


async def test_an_upload_is_stored_and_told_again(plane: Plane, line: Line) -> None:  # V110
    held = plane.drive("running")
    content = bytes(range(256)) * 2000
    body = upload(held, content, truncated=None)
    first = await line.post("artifacts", [body[:3], body[3:100], body[100:300_000], body[300_000:]])
    assert (first.status, first.json["status"], first.json["truncated"]) == (200, "stored", None)
    assert (await line.post("artifacts", body)).json["status"] == "already_stored"
    key = next(iter(plane.directory.glob("artifacts/*/*")))
    assert key.read_bytes() == content


async def test_another_content_under_the_same_identity_is_refused_and_removed(plane: Plane, line: Line) -> None:  # V110
    held = plane.drive("running")
    await line.post("artifacts", upload(held))
    answer = await line.post("artifacts", upload(held, LOG[::-1]))
    assert (answer.status, answer.code) == (503, "worker_artifact_unavailable")
    assert [file.read_bytes() for file in plane.directory.rglob("artifacts/*/*")] == [LOG]


@pytest.mark.parametrize(
    "case", ["short", "long", "empty", "header too long", "header cut", "wrong type", "too large", "chunked"]
)
async def test_a_badly_framed_upload_is_refused_and_leaves_nothing(plane: Plane, line: Line, case: str) -> None:  # V110
    held = plane.drive("running")
    body = upload(held)
    bodies = {"empty": b"", "header too long": (5000).to_bytes(4, "big") + b"x" * 6000, "header cut": body[:10]}
    bodies |= {"short": body[:-1], "long": body + b"x"}
    headers = {
        "wrong type": {"content-type": JSON},
        "too large": {"content-length": str(64 * 1024 * 1024 + 4 * 1024 + 5)},
        "chunked": {"transfer-encoding": "chunked"},
        "short": {"content-length": str(len(body))},
    }
    answer = await line.post("artifacts", bodies.get(case, body), headers=headers.get(case, {}))
    assert answer.status in (400, 413, 415)
    assert [file for file in plane.directory.rglob("artifacts/**/*") if file.is_file()] == []
    assert plane.facts(held)[1].status == "running"


async def test_an_upload_without_authority_is_refused_before_its_content_is_kept(plane: Plane, line: Line) -> None:  # V110
    held = plane.drive("running")
    body = upload(held, b"x" * 100_000, expected_lease_version=7)
    answer = await line.post("artifacts", [body[:1000], body[1000:]])
    assert (answer.status, answer.code) == (409, "worker_completion_fenced")
    assert not (plane.directory / "artifacts").exists()


async def test_a_refused_upload_is_read_to_its_end_so_that_the_worker_learns_why(plane: Plane, line: Line) -> None:
    held = plane.drive("running")
    body = upload(held, b"x" * 100_000, expected_lease_version=7)
    steps: list[int] = []
    line.app = delayed(line.app, lambda: steps.append(1))  # type: ignore[assignment]
    assert (await line.post("artifacts", [body[:1000], body[1000:]])).status == 409
    assert steps == [1]


async def test_a_renewal_during_an_upload_does_not_spoil_it(plane: Plane, line: Line) -> None:
    held = plane.drive("running")
    body = upload(held)
    line.app = delayed(line.app, lambda: plane.control(held))  # type: ignore[assignment]
    answer = await line.post("artifacts", [body[:-5], body[-5:]])
    assert (answer.status, plane.facts(held)[1].lease_version) == (200, 1)


@pytest.mark.parametrize(("seconds", "status"), [(44, 200), (47, 504)])
async def test_a_slow_upload_gets_the_time_its_size_needs(
    plane: Plane, line: Line, mock_clock: trio.testing.MockClock, seconds: float, status: int
) -> None:
    held = plane.drive("running")
    body = upload(held, b"x" * 1_000_000)
    line.app = delayed(line.app, lambda: mock_clock.jump(seconds))  # type: ignore[assignment]
    answer = await line.post("artifacts", [body[:-5], body[-5:]])
    assert answer.status == status
    files = [file for file in plane.directory.rglob("artifacts/**/*") if file.is_file()]
    assert len(files) == (status == 200)


async def test_a_worker_that_goes_away_is_no_error(plane: Plane, line: Line) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"authorization": f"Worker {line.token}", "content-type": JSON, "content-length": "10"}
    path = f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/register"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        "client": ("192.0.2.1", 1),
    }
    await line.app(scope, receive, send)
    assert sent == []
    assert line.app._in_flight == 0


async def test_no_answer_and_no_log_line_says_which_fence_failed_or_shows_a_token(plane: Plane, line: Line) -> None:
    told: list[tuple[str, dict[str, object]]] = []

    class Recorder:
        def info(self, event: str, **fields: object) -> None:
            told.append((event, fields))

        warning = error = info

    line.app._log = Recorder()
    held = plane.drive("running")
    answer = await line.post("starting", held.activation(lease_token="another_lease_capability_0000000000"))
    assert answer.body == b'{"code":"worker_activation_fenced"}'
    await line.post("completion", json.dumps(request_for("completion", held) | {"leaseToken": "short"}).encode())
    assert [event for event, _ in told] == ["worker_request_failed"] * 2
    assert "lease_capability" not in repr(told)
    assert "short" not in repr(told)


async def test_a_credential_made_elsewhere_with_the_same_pepper_is_accepted(plane: Plane, line: Line) -> None:
    secret = "A" * 42 + "A"
    with plane.database.transaction() as tx:
        tx.write(
            insert(worker_credentials).values(
                credential_id="made-elsewhere",
                version=1,
                state="active",
                worker_id="edge-9",
                secret_digest=credential_digest(PEPPER, "made-elsewhere", from_b64u(secret)),
                created_at_ms=tx.now_ms,
                not_before_at_ms=tx.now_ms,
                expires_at_ms=tx.now_ms + 1000,
            )
        )
    headers = {"authorization": f"Worker ql3w_made-elsewhere_{secret}"}
    assert (await line.post("register", register(), worker="edge-9", headers=headers)).status == 200
