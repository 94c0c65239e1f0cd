"""Which projection each kv slot waits for: their numbers, and what has ended on the device."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.device import Event, Stream
from engram_core.backends.native import Native

_TRACKED = 64
"""Projections whose ends are remembered."""

QUEUED = 2
"""Projections the device may have at once: it never idles between them, and what becomes urgent
meanwhile waits for no more than these."""


class Projections:
    """One thread projects; others ask what their slots wait for.

    abi: the same for the library, which reads and writes these arrays itself
    """

    def __init__(self, native: Native, num_slots: int) -> None:
        self._made_by = np.zeros(num_slots, dtype=np.int64)  # slot -> its projection
        self._state = np.zeros(1, dtype=np.int64)  # all up to here are known to have ended
        self._ends = [Event(native) for _ in range(_TRACKED)]
        self._handles = (c_void_p * _TRACKED)(*(end.handle for end in self._ends))
        self._tokens = [0] * _TRACKED
        self.last = 0
        self.abi = abi.Projections(
            num_slots=num_slots,
            made_by=self._made_by.ctypes.data,
            finished=self._state.ctypes.data,
            ends=self._handles,
            num_ends=_TRACKED,
        )

    def begin(self, num_tokens: int) -> int:
        """Number the next projection, once the device has room for it. Raises: Internal."""
        self.wait(self.last - QUEUED + 1)
        self._tokens[(self.last + 1) % _TRACKED] = num_tokens
        self.last += 1
        return self.last

    def under_way(self) -> int:
        """Tokens that the device is projecting now, or is about to; for any thread.

        What is being enqueued at this moment may be missing.
        """
        tokens, last = 0, self.last
        for number in range(last, max(last - QUEUED, int(self._state[0])), -1):
            if self.end_of(number).is_done():
                self._finished(number)  # nor is it asked again
                break
            tokens += self._tokens[number % _TRACKED]
        return tokens

    def end(self, number: int, stream: Stream, slots: NDArray[np.int64]) -> None:
        """Say that the launches of a projection are enqueued."""
        self.end_of(number).record(stream)
        self._made_by[slots] = number

    def end_of(self, number: int) -> Event:
        """The mark behind a projection, one of the last 64."""
        return self._ends[number % _TRACKED]

    def of(self, slots: NDArray[np.int64]) -> Event | None:
        """The end of the last projection that any of the slots waits for, None if all ended."""
        return self._end_unless_done(int(self._made_by[slots].max()) if slots.size else 0)

    def are_ended(self, slots: Iterable[int]) -> bool:
        """Whether nothing that writes the slots is under way: as `of`, of a few integers."""
        return self._end_unless_done(int(max(map(self._made_by.__getitem__, slots)))) is None

    def _end_unless_done(self, number: int) -> Event | None:
        if number <= self._state[0]:
            return None
        end = self.end_of(number)
        if not end.is_done():
            return end
        self._finished(number)
        return None

    def _finished(self, number: int) -> None:
        self._state[0] = max(int(self._state[0]), number)

    def wait(self, number: int) -> None:
        """Wait for a projection and all before it. Raises: Internal."""
        if number > self._state[0]:
            self.end_of(number).wait()
            self._finished(number)

    def close(self) -> None:
        """Destroy the marks."""
        for end in self._ends:
            end.close()
