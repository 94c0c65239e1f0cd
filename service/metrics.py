"""Every metric: name, help, labels, buckets. One registry an app.

Labels are bounded: operations and codes are tables of ours, stages and counters the engine's.
Only counters carry operation and code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engram_core.backends.base import STAGES
from service.histogram import PlainHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)


@dataclass(frozen=True)
class EngineMetric:
    """How one of the engine's numbers is told. labels: (name, value), if several share a name."""

    name: str
    text: str
    is_gauge: bool = False
    labels: tuple[tuple[str, str], ...] = ()


def _of(name: str, text: str, *, is_gauge: bool = False, **labels: str) -> EngineMetric:
    return EngineMetric(f"engram_{name}", text, is_gauge, tuple(labels.items()))


def _batches(lane: str) -> dict[str, EngineMetric]:
    return {
        f"{lane}_batches": _of("batches", "Batches run.", lane=lane),
        f"{lane}_batch_tokens": _of("batch_tokens", "Token-layers in batches.", lane=lane),
        f"{lane}_largest_batch": _of(
            "largest_batch_tokens",
            "Token-layers of the largest batch.",
            is_gauge=True,
            lane=lane,
        ),
    }


REQUEST_STAGES = ("receive", "check", "queue", "send")
"""Stages of a request; what it waits for in between."""

BATCH_STAGES = ("store", *STAGES, "read_kv", "hash_ids", "rows")
"""Stages of a batch, which are seen once however many requests wait for it."""

ENGINE: Mapping[str, EngineMetric] = {
    "sessions_opened": _of("sessions_opened", "Sessions opened."),
    "sessions_closed": _of("sessions_closed", "Sessions closed."),
    "sessions_expired": _of("sessions_expired", "Sessions that were idle for too long."),
    "sessions_open": _of("sessions", "Open sessions.", is_gauge=True),
    "tokens_pushed": _of("tokens_pushed", "Positions appended to sessions."),
    "truncating_pushes": _of("truncating_pushes", "Pushes with on_conflict=truncate."),
    "rewinds": _of("rewinds", "Rewinds."),
    "positions_cut": _of("positions_cut", "Positions cut by rewinds and truncating pushes."),
    "held_tokens": _of("held_tokens", "Token ids held.", is_gauge=True),
    "waits": _of("waits", "Reads that waited for ids or an epoch."),
    "waiting": _of("waiting", "Reads that wait now.", is_gauge=True),
    "kv_hits": _of("store_hits", "kv found in the store."),
    "kv_misses": _of("store_misses", "kv computed."),
    "kv_duplicates": _of("store_duplicates", "Equal windows of one batch, computed once."),
    "kv_evicted": _of("store_evictions", "kv entries replaced."),
    "kv_entries": _of("store_entries", "kv entries held.", is_gauge=True),
    "ahead_tokens": _of("ahead_tokens", "Token-layers worked ahead."),
    "ahead_dropped": _of("ahead_dropped", "Token-layers not worked ahead for want of room."),
    "rows_gathered": _of("rows_gathered", "Table rows read to be sent as rows; kv reads its own."),
    **_batches("kv"),
    **_batches("beside"),
    **_batches("near"),
    **_batches("rows"),
}
"""The engine's counters by their names there; a test says when one is missing here."""


class Metrics:
    """The service's metrics; `watch` adds the engine's once there is one."""

    def __init__(self) -> None:
        # A `_created` series for each counter would say nothing here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._count: Callable[[], None] = lambda: None
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "engram_requests",
            "Answered requests by operation and code (ok or a refusal's).",
            ("operation", "code"),
            registry=self.registry,
        )
        self.request_seconds = PlainHistogram(
            "engram_request_seconds",
            "Time from a request's head to the end of its answer.",
            _SECONDS,
            self.registry,
        ).series("")
        self.stage_seconds = PlainHistogram(
            "engram_stage_seconds",
            f"Seconds of a stage: {', '.join(REQUEST_STAGES)} of each tensor request; "
            f"{', '.join(BATCH_STAGES)} of each batch, work ahead included. "
            "h2d and d2h exist on CUDA alone.",
            _SECONDS,
            self.registry,
            label="stage",
        )
        self.body_bytes = PlainHistogram(
            "engram_body_bytes", "Bytes of request bodies.", _BYTES, self.registry
        ).series("")
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
            "How much of the present stage of loading is done, 0 to 1; 0 when ready.",
            registry=self.registry,
        )
        self.ledger_bytes = Gauge(
            "engram_ledger_bytes",
            "The memory ledger by purpose and pool.",
            ("purpose", "pool"),
            registry=self.registry,
        )
        self.build = Info("engram_build", "Versions and backend.", registry=self.registry)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Count one stage; any thread."""
        self.stage_seconds.series(stage).observe(seconds)

    def watch(self, counters: Callable[[], Mapping[str, int | float]]) -> None:
        """Tell the engine's counters at every scrape."""
        self.registry.register(_EngineCollector(counters))

    def count_before_telling(self, count: Callable[[], None]) -> None:
        """Call `count`, which counts what is not counted yet, whenever metrics are asked for."""
        self._count = count

    def exposition(self) -> bytes:
        """Return all metrics as Prometheus text."""
        self._count()
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read when asked for."""

    def __init__(self, counters: Callable[[], Mapping[str, int | float]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, value in self._counters().items():
            told = ENGINE.get(name)
            if told is None:
                continue
            labels = [label for label, _ in told.labels]
            kind = GaugeMetricFamily if told.is_gauge else CounterMetricFamily
            family = families.setdefault(told.name, kind(told.name, told.text, labels=labels))
            family.add_metric([text for _, text in told.labels], value)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return ()
