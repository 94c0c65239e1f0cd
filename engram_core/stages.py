"""How long the stages of a batch take: what the backend tells of its calls, and the rest of them.

Stages do not overlap: what a backend tells is taken off the time of the call that it told it in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engram_core.jobs import Piece

Watcher = Callable[[str, float], None]
"""Called with a stage's name and its seconds, by the thread that ran the batch."""


class StageClock:
    """One for all lanes of an engine. Implements `backends.base.StageObserver`."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        """Tell every stage of every batch from now on, work ahead included."""
        self._watcher = watcher

    def part(self, stage: str, seconds: float) -> None:
        """Note a part of the call that this thread is in (see `StageObserver.part`)."""
        parts: dict[str, float] | None = getattr(self._thread, "parts", None)
        if parts is not None:
            parts[stage] = parts.get(stage, 0.0) + seconds

    def late(self, stage: str, seconds: float) -> None:
        """Note what a device did after its call (see `StageObserver.late`)."""
        if self._watcher is not None:
            self._watcher(stage, seconds)

    @contextmanager
    def measure(self, stage: str, pieces: Sequence[Piece]) -> Iterator[None]:
        """Time a call by its parts; `stage` is what of it is no part. Each job gets all of it."""
        parts: dict[str, float] = {}
        self._thread.parts = parts
        start = time.perf_counter()
        try:
            yield
        finally:
            self._thread.parts = None
        rest = time.perf_counter() - start - sum(parts.values())
        parts[stage] = parts.get(stage, 0.0) + max(0.0, rest)
        for job in {piece.job for piece in pieces}:
            for name, seconds in parts.items():
                job.stages[name] = job.stages.get(name, 0.0) + seconds
        if self._watcher is not None:
            for name, seconds in parts.items():
                self._watcher(name, seconds)


class BatchCounts:
    """Batches of one lane: how many, how large."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_tokens = 0
        self.largest_batch = 0

    def begin(self, batch: Sequence[Piece], now: float | None = None) -> None:
        """Count a batch; tell those of its jobs that had not begun yet how long they waited.

        now: when it began, seconds of `time.perf_counter`
        """
        tokens = sum(piece.num_tokens for piece in batch)
        self.num_batches += 1
        self.num_tokens += tokens
        self.largest_batch = max(self.largest_batch, tokens)
        now = time.perf_counter() if now is None else now
        for job in {piece.job for piece in batch}:
            job.stages.setdefault("queue", now - job.submitted_s)
