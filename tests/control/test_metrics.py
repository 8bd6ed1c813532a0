"""What is counted, what is measured, and that the alerts fire when something is stuck (R527)."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert, update

from qlworker.control import certificates
from qlworker.control.gauges import measure
from qlworker.control.ingress import create_ingress
from qlworker.control.metrics import Metrics
from qlworker.control.metrics_app import create_metrics
from qlworker.control.schema import cancellation_dispatches, recovery_controls
from tests.builders import make_revision
from tests.control.fixtures import PEPPER, SESSION, WORKER, Plane, call
from tests.control.running import ControlPlane
from tests.pki import Events

RULES = yaml.safe_load((Path(__file__).parents[2] / "docs/alerts.yml").read_text())["groups"][0]["rules"]
SIMPLE = re.compile(r'(?P<name>\w+)(?:\{(?P<label>\w+)="(?P<value>[^"]*)"\})? > (?P<limit>\d+)\Z')
RATE = re.compile(r'increase\((?P<name>\w+)(?:\{(?P<label>\w+)="(?P<value>[^"]*)"\})?\[\w+\]\) > (?P<limit>\d+)\Z')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def page(plane: Plane, metrics: Metrics | None = None) -> Samples:
    gauges = plane.database.transact(measure, plane.settings.runs.on_lease_expiry)
    return samples((metrics or Metrics()).page(gauges).decode())


def firing(found: Samples) -> set[str]:
    """The alerts on a state, not on a rate, whose condition holds."""
    fired = set()
    for rule in RULES:
        condition = SIMPLE.match(rule["expr"])
        if condition is not None:
            labels = frozenset({(condition["label"], condition["value"])} if condition["label"] else set())
            if found[condition["name"], labels] > float(condition["limit"]):
                fired.add(rule["alert"])
    return fired


@pytest.mark.req("R527")
def test_a_lease_that_nobody_ends_fires(plane: Plane) -> None:
    plane.drive("running")
    plane.clock.advance(plane.settings.run_lease_ms + 60_000)
    assert "LeaseExpiryStuck" not in firing(page(plane))

    plane.clock.advance(1)

    assert "LeaseExpiryStuck" in firing(page(plane))


def test_a_run_that_waits_for_evidence_is_no_stuck_lease(plane: Plane) -> None:
    plane.drive("running")
    plane.clock.advance(plane.settings.run_lease_ms + 3_600_000)

    gauges = {each.name: each.values for each in plane.database.transact(measure, "evidence")}

    assert gauges["qlcontrol_expired_lease_age_seconds"] == {"": 0.0}


@pytest.mark.req("R527")
def test_a_run_that_only_an_operator_can_judge_fires(plane: Plane) -> None:
    held = plane.drive("running")
    assert firing(page(plane)) == set()
    with plane.database.transaction() as tx:
        tx.write(
            insert(recovery_controls).values(
                attempt_id=held.attempt_id,
                run_id=held.run_id,
                status="manual",
                reason="stale",
                version=0,
                looks=3,
                updated_at_ms=tx.now_ms,
            )
        )

    assert firing(page(plane)) == {"RecoveryNeedsOperator"}


@pytest.mark.req("R527")
def test_a_stop_that_reaches_nobody_fires(plane: Plane) -> None:
    held = plane.drive("running")
    plane.cancel(held.run_id)
    assert firing(page(plane)) == set()
    with plane.database.transaction() as tx:
        tx.write(update(cancellation_dispatches).values(status="blocked"))

    assert firing(page(plane)) == {"CancellationBlocked"}


def test_runs_without_a_worker_and_workers_without_a_word_fire(plane: Plane) -> None:
    plane.register()
    plane.start_run(plane.publish(make_revision()))
    assert firing(page(plane)) == set()

    plane.clock.advance(901_000)

    assert firing(page(plane)) == {"RunsWaitForWorker", "WorkerSilent"}


@pytest.mark.parametrize(("days", "fires"), [(8, False), (6, True), (-1, False)])
def test_a_certificate_that_ends_soon_fires_until_the_next_is_signed(plane: Plane, days: int, fires: bool) -> None:
    with plane.database.transaction() as tx:
        certificates.remember(tx, WORKER, "2a", tx.now_ms + days * 86_400_000)
    assert ("CertificateNotRenewed" in firing(page(plane))) is fires

    with plane.database.transaction() as tx:
        certificates.remember(tx, WORKER, "2b", tx.now_ms + 90 * 86_400_000)

    assert firing(page(plane)) == set()


def test_every_alert_asks_for_something_that_is_exposed(plane: Plane) -> None:
    metrics = Metrics()
    metrics.tick("lease_expiry", succeeded=False)
    metrics.request("heartbeat", 401, 0.01)
    names = {name for name, _ in page(plane, metrics)}

    for rule in RULES:
        condition = SIMPLE.match(rule["expr"]) or RATE.match(rule["expr"])
        assert condition is not None, rule["expr"]
        assert condition["name"] in names, rule["alert"]


def test_requests_are_counted_by_operation_and_status_and_a_strangers_paths_together(plane: Plane) -> None:
    metrics = Metrics()
    app = create_ingress(
        plane.database,
        authenticate=lambda _tx, _pepper, _header: None,
        pepper=PEPPER,
        secrets=plane.secrets,
        artifacts=plane.artifacts,
        live=plane.live,
        settings=plane.settings,
        counting=metrics,
    )

    async def ask() -> None:
        for name in ("heartbeat", "heartbeat", "offers", "no-such-thing", "another"):
            await call(app, f"/api/v3/worker-ingress/workers/{WORKER}/sessions/{SESSION}/{name}", b"{}")

    trio.run(ask)

    found = page(plane, metrics)
    counted = {
        (dict(labels)["operation"], dict(labels)["status"]): value
        for (name, labels), value in found.items()
        if name == "qlcontrol_requests_total"
    }
    assert counted == {("heartbeat", "401"): 2, ("offers", "401"): 1, ("other", "404"): 2}


def test_a_database_that_does_not_answer_is_not_ready_and_has_no_page(sqlite_plane: Plane) -> None:
    plane = sqlite_plane
    stopping, events = trio.Event(), Events()
    app = create_metrics(plane.database, Metrics(), policy="lost", stopping=stopping, log=events)

    async def ask(path: str) -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
            answer = await client.get(path)
            return answer.status_code, answer.text

    assert trio.run(ask, "/readyz") == (200, "ready\n")
    with plane.database.engine.begin() as connection:
        for name in ("runs", "run_events"):
            connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO gone_{name}")
    assert trio.run(ask, "/metrics") == (503, "the database does not answer\n")
    assert trio.run(ask, "/livez") == (200, "live\n")
    with plane.database.engine.begin() as connection:
        for name in ("runs", "run_events"):
            connection.exec_driver_sql(f"ALTER TABLE gone_{name} RENAME TO {name}")
    stopping.set()
    assert trio.run(ask, "/readyz") == (503, "stopping\n")
    assert events.names == ["database_does_not_answer"]


def test_a_control_plane_shows_its_page_on_this_host_and_nothing_else(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "control") as server:
        assert server.ready["metrics"] is None  # nobody asked for it
        server.stop()
        with server.config.open("a") as file:
            file.write("\n[metrics]\nport = 0\n")
        server.start()
        address = f"http://127.0.0.1:{server.ready['metrics']}"

        def get(path: str) -> Any:
            return httpx.get(address + path, trust_env=False, timeout=30)

        text = get("/metrics").text
        while 'qlcontrol_cadence_ticks_total{cadence="lease_expiry",outcome="ok"}' not in text:
            text = get("/metrics").text
        assert samples(text)["qlcontrol_workers", frozenset({("session", "online")})] == 0
        assert (get("/readyz").text, get("/livez").text) == ("ready\n", "live\n")
        assert [get(path).status_code for path in ("/", "/status", "/workers", "/api/v3/enrolment/authority")] == [404] * 4
