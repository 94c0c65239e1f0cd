"""A histogram for a hot path: prometheus_client's costs ten times as much an observation."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Buckets:
    """Counts of one series. Any thread."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._total += value

    def told(self) -> tuple[list[int], float]:
        """Return how many values are at most each bound, the last of them infinity, and the sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._total


class PlainHistogram(Collector):
    """One metric. bounds: ascending; label: of its series, none for a single one, ""."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str | None = None,
    ) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._labels = [label] if label else []
        self._ends = [*map(floatToGoString, bounds), "+Inf"]
        self._series: dict[str, Buckets] = {} if label else {"": Buckets(bounds)}
        registry.register(self)

    def series(self, value: str) -> Buckets:
        """Return the series of a label's value."""
        found = self._series.get(value)
        # Of two threads that make one, both go on with the first.
        return found or self._series.setdefault(value, Buckets(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for value, buckets in list(self._series.items()):
            counts, total = buckets.told()
            labels = [value] if self._labels else []
            family.add_metric(labels, list(zip(self._ends, counts, strict=True)), total)
        yield family
