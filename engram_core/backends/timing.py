"""What a CUDA backend tells of its stages: sampled with timed events, so that it costs nothing.

Projections end after their call: every 16th is timed and told once the device has passed it.
Copied gates overlap their three stages: the time of a call is shared out as the last timed piece
took them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_void_p, cast

from engram_core.backends import native as abi
from engram_core.backends.base import StageObserver, Unobserved
from engram_core.backends.device import Event, Stream
from engram_core.backends.native import Native

_EVERY = 16


class ProjectionTimer:
    """Times a projection now and then: rows, then wkv."""

    def __init__(self, native: Native) -> None:
        self._marks = [Event(native, is_timed=True) for _ in range(3)]
        self._turn = 0
        self._is_pending = False

    def wants(self, observer: StageObserver) -> bool:
        """Whether to time the next projection; tells what the one before took."""
        if isinstance(observer, Unobserved):
            return False
        if self._is_pending:
            if self._marks[2].is_done():
                begin, gathered, end = self._marks
                observer.late("hash_gather", begin.us_until(gathered) * 1e-6)
                observer.late("wkv", gathered.us_until(end) * 1e-6)
                self._is_pending = False
            return False
        self._turn += 1
        return self._turn % _EVERY == 1

    def mark(self, place: int, stream: Stream) -> None:
        """Mark the begin (0), the rows' end (1) or the end (2) of the projection."""
        self._marks[place].record(stream)
        self._is_pending = place == 2

    def close(self) -> None:
        """Free its events."""
        for mark in self._marks:
            mark.close()


class WayShares:
    """How a copied gate's time goes into the way up, the gate and the way down."""

    def __init__(self, native: Native) -> None:
        self._marks = [Event(native, is_timed=True) for _ in range(4)]
        self._handles = (c_void_p * 4)(*(mark.handle for mark in self._marks))
        self._shares: tuple[float, float] | None = None
        self._turn = 0

    @contextmanager
    def measure(self, params: abi.GateHost, observer: StageObserver) -> Iterator[None]:
        """Around a call of `gate_host`: tells what was h2d and d2h; the rest is the gate."""
        if isinstance(observer, Unobserved):
            yield
            return
        self._turn += 1
        is_timed = self._turn % _EVERY == 1
        if is_timed:
            params.marks = cast(self._handles, POINTER(c_void_p))
        start = time.perf_counter()
        try:
            yield
        finally:
            params.marks = None
        seconds = time.perf_counter() - start
        if is_timed:
            up, gate, down = (begin.us_until(end) for begin, end in itertools.pairwise(self._marks))
            total = max(up + gate + down, 1e-3)
            self._shares = up / total, down / total
        if self._shares is not None:
            observer.part("h2d", seconds * self._shares[0])
            observer.part("d2h", seconds * self._shares[1])

    def close(self) -> None:
        """Free its events."""
        for mark in self._marks:
            mark.close()
