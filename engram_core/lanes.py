"""A lane: one thread that runs what waits, a batch at a time, the most urgent queue first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engram_core.errors import EngramError
from engram_core.jobs import Job, Piece
from engram_core.queues import Queue

NICENESS = 2
"""Of a lane that shares its cores with a thread that answers: two thirds of its weight; more would
starve it where that thread refuses a flood (docs/notes/fast_path.md)."""


@dataclass(frozen=True)
class Class:
    """A queue and the most tokens one batch of it may have."""

    queue: Queue
    batch_tokens: int


class Lane:
    """Runs batches on a thread of its own until it is closed or a batch raises.

    classes: the most urgent first; a batch comes from the first that has one
    run: runs one batch; its exception ends the lane
    on_failure: told that exception and the batch, on the lane's thread
    num_threads: that torch may use for it; None: as many as it is set to when the lane computes
        for the first time
    """

    def __init__(
        self,
        name: str,
        classes: Sequence[Class],
        run: Callable[[list[Piece]], None],
        on_failure: Callable[[BaseException, list[Piece]], None],
        *,
        num_threads: int | None = None,
    ) -> None:
        self._classes = classes
        self._run = run
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._running_since: float | None = None
        self._is_closed = False
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, pieces: Sequence[Piece], class_index: int = 0) -> bool:
        """Queue a job's pieces. False if the lane is closed: nothing is queued then."""
        with self._changed:
            if self._is_closed:
                return False
            job.pieces_left = len(pieces)
            for piece in pieces:
                self._classes[class_index].queue.push(piece)
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or runs. False: not within the timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def stop(self, error: EngramError) -> None:
        """Take no more work; jobs whose pieces wait fail with `error`. Does not wait."""
        with self._changed:
            self._is_closed = True
            jobs = {job for each in self._classes for job in each.queue.clear()}
            self._changed.notify_all()
        for job in jobs:
            job.fail(error)

    def give_way(self) -> None:
        """Let threads of the usual priority go before this lane, and before what it starts."""
        # By thread on Linux; elsewhere, or where it is not allowed, it stays as it is.
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, NICENESS)

    def join(self) -> None:
        """Wait for the batch in progress, and for the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def running_s(self) -> float:
        """How long the batch in progress has run, 0.0 without one."""
        since = self._running_since
        return 0.0 if since is None else time.monotonic() - since

    def _is_idle(self) -> bool:
        return self._running_since is None and not any(
            each.queue.num_tokens for each in self._classes
        )

    def _next_batch(self) -> list[Piece]:
        """Wait for a batch; [] once the lane is closed."""
        with self._changed:
            self._running_since = None
            while not self._is_closed:
                for each in self._classes:
                    batch = each.queue.take(each.batch_tokens)
                    if batch:
                        self._running_since = time.monotonic()
                        return batch
                self._changed.notify_all()
                self._changed.wait()
            self._changed.notify_all()
            return []

    def _loop(self) -> None:
        if self._num_threads is not None:
            # Asked first: torch sets what it says here when a thread uses it for the first time.
            torch.get_num_threads()
            torch.set_num_threads(self._num_threads)
        while batch := self._next_batch():
            try:
                self._run(batch)
            except BaseException as error:  # whatever it was: nobody may be left waiting
                self._on_failure(error, batch)
            # Not kept while idle: it holds the tensors of an answered request.
            del batch
