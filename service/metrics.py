"""Every metric: name, help, labels, buckets. One registry an app; no module-level state.

Labels are bounded: operations and codes are tables of ours, stages and counters the engine's.
Only counters carry operation and code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)

GAUGES = frozenset({"sessions", "held_tokens", "queued", "store_slots", "store_used"})
"""Engine counters that can fall: told as gauges."""


class Metrics:
    """The service's metrics; `watch` adds the engine's once there is one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "engram_requests",
            "Answered requests by operation and code (ok or a refusal's).",
            ("operation", "code"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "engram_request_seconds",
            "Time from a request's head to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "engram_stage_seconds",
            "Time by stage of tensor requests.",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.body_bytes = Histogram(
            "engram_body_bytes",
            "Bytes of request bodies.",
            buckets=_BYTES,
            registry=self.registry,
        )
        self.received_bytes = Counter(
            "engram_received_bytes", "Bytes of request bodies received.", registry=self.registry
        )
        self.sent_bytes = Counter(
            "engram_sent_bytes", "Bytes of answers sent.", registry=self.registry
        )
        self.active_requests = Gauge(
            "engram_active_requests", "Requests being answered.", registry=self.registry
        )
        self.in_flight_bytes = Gauge(
            "engram_in_flight_bytes", "Bytes of bodies and answers held.", registry=self.registry
        )
        self.ready = Gauge(
            "engram_ready", "1 when tables are resident and checked.", registry=self.registry
        )
        self.load_stage = Gauge(
            "engram_load_stage_ratio",
            "How much of the present stage of loading is done, 0 to 1.",
            registry=self.registry,
        )
        self.ledger_bytes = Gauge(
            "engram_ledger_bytes",
            "The memory ledger by purpose and pool.",
            ("purpose", "pool"),
            registry=self.registry,
        )
        self.build = Info("engram_build", "Versions and backend.", registry=self.registry)

    def watch(self, counters: Callable[[], Mapping[str, int | float]]) -> None:
        """Tell the engine's counters at every scrape."""
        self.registry.register(_EngineCollector(counters))

    def exposition(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers as engram_engine_NAME."""

    def __init__(self, counters: Callable[[], Mapping[str, int | float]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(self._counters().items()):
            text = f"The engine's {name.replace('_', ' ')}."
            if name in GAUGES:
                yield GaugeMetricFamily(f"engram_engine_{name}", text, value=value)
            else:
                yield CounterMetricFamily(f"engram_engine_{name}", text, value=value)

    def describe(self) -> Iterable[Metric]:
        return ()
