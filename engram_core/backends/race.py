"""Which kernel is fastest on the device at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from engram_core.backends.device import Event, Stream
from engram_core.backends.native import Native

_ROUNDS = 7


class Race:
    """Times candidates in turns on a stream: medians of GPU time.

    before: launched twice ahead of each: it keeps the device busy while the host enqueues what is
        timed, and by reading more than an L2 holds it lets every candidate start cold
    """

    def __init__(self, native: Native, stream: Stream, before: Callable[[], None]) -> None:
        self._stream, self._before = stream, before
        self._begin, self._end = (Event(native, is_timed=True) for _ in range(2))

    def run(self, candidates: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        """Median microseconds by name; the first round does not count."""
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(_ROUNDS):
            for name, launch in candidates.items():
                self._before()
                self._before()
                self._begin.record(self._stream)
                launch()
                self._end.record(self._stream)
                self._end.wait()
                times[name].append(self._begin.us_until(self._end))
        return {name: statistics.median(some[1:]) for name, some in times.items()}

    def close(self) -> None:
        """Destroy its events."""
        self._begin.close()
        self._end.close()
