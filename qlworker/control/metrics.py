"""What is counted while the control plane serves, and the page that Prometheus reads.

Labels are words of this program, never an id: a fleet must not make the page grow. Loaded only where `metrics.port` is set.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client import Gauge as Sample
from prometheus_client.core import GaugeMetricFamily

from .gauges import Gauge

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)


class Metrics:
    """The counters of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "qlcontrol_requests",
            "Requests of workers, by what they asked for.",
            ["operation", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "qlcontrol_request_seconds",
            "How long requests of workers took.",
            ["operation"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._ticks = Counter(
            "qlcontrol_cadence_ticks", "Ticks of background work.", ["cadence", "outcome"], registry=self._registry
        )
        self._last = Sample(
            "qlcontrol_cadence_last_success_timestamp_seconds",
            "When background work last went through.",
            ["cadence"],
            registry=self._registry,
        )

    def request(self, operation: str, status: int, seconds: float) -> None:
        """A worker's request was answered. `operation` is a route's name or `other`."""
        self._requests.labels(operation, str(status)).inc()
        self._seconds.labels(operation).observe(seconds)

    def tick(self, cadence: str, *, succeeded: bool) -> None:
        """A tick of background work ended."""
        self._ticks.labels(cadence, "ok" if succeeded else "failed").inc()
        if succeeded:
            self._last.labels(cadence).set_to_current_time()

    def page(self, gauges: Iterable[Gauge]) -> bytes:
        """All counters and `gauges` in the text format."""
        now = CollectorRegistry()
        now.register(_Measured(gauges))
        return generate_latest(self._registry) + generate_latest(now)


class _Measured:
    """Gauges as prometheus_client collects them."""

    def __init__(self, gauges: Iterable[Gauge]) -> None:
        self._gauges = list(gauges)

    def collect(self) -> Iterator[Any]:
        """One family per gauge."""
        for each in self._gauges:
            family = GaugeMetricFamily(each.name, each.meaning, labels=[each.label] if each.label else [])
            for value, amount in sorted(each.values.items()):
                family.add_metric([value] if each.label else [], amount)
            yield family
