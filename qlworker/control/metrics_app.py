"""The metrics listener's application: what Prometheus and a load balancer ask, on an address of this host, without TLS.

Nothing here names a worker, a task or a run, and nothing can be changed. Source: R527.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import trio
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from .config import ExpiryPolicy
from .database import Database, Transaction
from .gauges import measure
from .logs import Log
from .metrics import Metrics

T = TypeVar("T")

PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_S: Final = 5
"""How long the database may take: a page that comes late is none, and a replica that is stuck is not ready."""


class _MetricsApplication:
    def __init__(self, database: Database, metrics: Metrics, policy: ExpiryPolicy, stopping: trio.Event, log: Log) -> None:
        self._database = database
        self._metrics = metrics
        self._policy = policy
        self._stopping = stopping
        self._log = log

    async def metrics(self, _request: Request) -> Response:
        gauges = await self._asked(measure, self._policy)
        if gauges is None:
            return PlainTextResponse("the database does not answer\n", 503)
        return Response(self._metrics.page(gauges), media_type=PAGE_TYPE)

    async def live(self, _request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(self, _request: Request) -> Response:
        if self._stopping.is_set():
            return PlainTextResponse("stopping\n", 503)
        if await self._asked(_answers) is None:
            return PlainTextResponse("the database does not answer\n", 503)
        return PlainTextResponse("ready\n")

    async def _asked(self, question: Callable[..., T], *given: object) -> T | None:
        try:
            with trio.fail_after(ANSWER_S):
                return await self._database.run(question, *given)
        except (SQLAlchemyError, trio.TooSlowError) as error:
            self._log.error("database_does_not_answer", error=type(error).__name__)
            return None


def _answers(tx: Transaction) -> bool:
    return tx.row(select(1)) is not None


def create_metrics(database: Database, metrics: Metrics, *, policy: ExpiryPolicy, stopping: trio.Event, log: Log) -> Starlette:
    """The ASGI application."""
    application = _MetricsApplication(database, metrics, policy, stopping, log)
    return Starlette(
        routes=[
            Route("/metrics", application.metrics),
            Route("/livez", application.live),
            Route("/readyz", application.ready),
        ]
    )
