"""Our histogram tells what prometheus_client's would."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from service.histogram import PlainHistogram

BOUNDS = (50e-6, 1e-3, 0.5, 5.0)
VALUES = (0.0, 50e-6, 51e-6, 1e-3, 0.2, 0.5, 4.0, 5.0, 7.0)


def test_it_tells_what_the_usual_one_tells() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = PlainHistogram("engram_x", "Text.", BOUNDS, ours).series("")
    other = Histogram("engram_x", "Text.", buckets=BOUNDS, registry=theirs)
    for value in VALUES:
        one.observe(value)
        other.observe(value)
    assert told(ours) == told(theirs)


def test_each_label_has_a_series_of_its_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = PlainHistogram("engram_x", "Text.", BOUNDS, ours, label="stage")
    other = Histogram("engram_x", "Text.", ("stage",), buckets=BOUNDS, registry=theirs)
    for stage, value in (("b", 0.1), ("a", 0.2), ("b", 9.0)):
        one.series(stage).observe(value)
        other.labels(stage).observe(value)
    assert told(ours) == told(theirs)


def test_threads_lose_no_value() -> None:
    registry = CollectorRegistry()
    histogram = PlainHistogram("engram_x", "Text.", BOUNDS, registry, label="stage")

    def observe() -> None:
        for _ in range(5000):
            histogram.series("a").observe(0.1)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b'engram_x_count{stage="a"} 20000.0' in generate_latest(registry)


def told(registry: CollectorRegistry) -> list[bytes]:
    """Its text without the times of making, which ours does not tell."""
    lines = generate_latest(registry).splitlines()
    return [line for line in lines if b"_created" not in line]
