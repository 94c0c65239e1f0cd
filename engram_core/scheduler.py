"""Who runs what when: lanes of batches over one backend, and the asking thread itself.

The kv lane runs what touches kv slots; its order is reads, then decode-sized work ahead, then
prefill ahead by (chunk, layer). The rows lane serves rows and hash_ids, which so never wait for
`wkv`. Whatever waits for one layer when a lane comes free is one ragged batch. Small reads of what
the store holds may be run by the thread that asks (`near.py`), and those that miss, where the
backend can, by a lane beside the kv lane (`beside.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engram_core.backends.base import Backend
from engram_core.backends.projection import threads_beside
from engram_core.batches import KvBatches, RowBatches
from engram_core.beside import BesideBatches, is_for_beside
from engram_core.engine_types import BESIDE_TOKENS, EngineLimits, Output
from engram_core.errors import Draining, EngramError, Internal
from engram_core.jobs import Job, Piece
from engram_core.kv_store import KvStore
from engram_core.lanes import Class, Lane
from engram_core.near import MAX_PINNED, CallSoon, Near
from engram_core.queues import ChunkQueue, FairQueue
from engram_core.stages import BatchCounts, StageClock

_READS, _DECODE_AHEAD, _PREFILL_AHEAD = range(3)

_AHEAD_BATCHES = 8
"""Batches' worth of tokens that may wait to be worked ahead: what comes on top is dropped, since
work that late finds its read done."""


class Scheduler:
    """Runs jobs on a backend. One thread at a time submits (the engine's lock).

    After a backend's exception nothing is run any more (fail stop): the jobs of that batch and all
    that wait fail with Internal, `failure` is that error, and every later call raises one like it.
    """

    def __init__(self, backend: Backend, limits: EngineLimits) -> None:
        self.failure: EngramError | None = None
        self.store = KvStore(backend.num_slots)
        self._ahead_tokens = 0
        self._ahead_dropped = 0
        # A piece fits the store, and so does a batch: else its slots could evict each other.
        num_slots = backend.num_slots - (MAX_PINNED if limits.near_tokens else 0)
        project = backend.project_beside if limits.near_tokens else None
        if num_slots < 2 * BESIDE_TOKENS:
            project = None
        if project:
            num_slots -= BESIDE_TOKENS
        self._piece_tokens = min(limits.chunk_tokens, limits.max_tokens, num_slots)
        batch_tokens = min(limits.max_tokens, num_slots)
        self._ahead_limit = min(backend.num_slots, _AHEAD_BATCHES * batch_tokens)
        self._ahead = FairQueue(self._piece_tokens), ChunkQueue()
        self._ahead_beside = FairQueue(BESIDE_TOKENS)
        self.clock = backend.observer = StageClock()
        self._kv = KvBatches(backend, self.store, self._piece_tokens, self.clock)
        near = backend.near_batches if limits.near_tokens else None
        self._near_kv = KvBatches(backend, self.store, self._piece_tokens, self.clock, near)
        self._rows = RowBatches(backend, self.clock)
        self._near_rows = RowBatches(backend, self.clock, near)
        self._near_rows.counts = self._near_kv.counts
        self.near = Near(
            self.store,
            self._near_kv,
            limits.near_tokens,
            self._fail,
            to_lane=None if near is None else self._to_lane,
            rows=None if near is None or not near.has_rows else self._near_rows,
        )
        self._kv_lane = Lane(
            "engram-kv",
            [
                Class(FairQueue(self._piece_tokens), batch_tokens),
                # Work ahead never delays a read by more than one piece.
                *(Class(queue, self._piece_tokens) for queue in self._ahead),
            ],
            self._kv.run,
            self._fail,
            num_threads=threads_beside() if project else None,
        )
        self._beside: BesideBatches | None = None
        self._beside_lane: Lane | None = None
        if project:
            self._beside = BesideBatches(backend, self.store, self.clock, project)
            queues = FairQueue(BESIDE_TOKENS), self._ahead_beside
            self._beside_lane = Lane(
                "engram-beside",
                [Class(queue, BESIDE_TOKENS) for queue in queues],
                self._beside.run,
                self._fail,
                num_threads=threads_beside(),
            )
        self._rows_lane = Lane(
            "engram-rows",
            [Class(FairQueue(self._piece_tokens), batch_tokens)],
            self._rows.run,
            self._fail,
        )

    @property
    def near_counts(self) -> BatchCounts:
        """Of the batches that the asking thread runs."""
        return self._near_kv.counts

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The kv lane, the rows lane, and where there is one that beside the kv lane."""
        lanes = self._kv_lane, self._rows_lane
        return lanes if self._beside_lane is None else (*lanes, self._beside_lane)

    def attach(self, call_soon: CallSoon) -> None:
        """Let the calling thread run small reads itself (see `Near`), before the lanes' work.

        Nothing happens where the limits allow no such reads.
        """
        if not self.near.max_tokens:
            return
        self.near.attach(call_soon)
        for lane in self.lanes:
            lane.give_way()

    def submit(self, job: Job) -> None:
        """Queue a read. Raises: Internal after a failure, Draining after `close`."""
        if self.near.take(job):
            return
        is_rows = job.output in (Output.ROWS, Output.HASH_IDS)
        if not self._queue(self._rows_lane if is_rows else self._kv_lane_of(job), job, _READS):
            raise self.refusal()

    def work_ahead(self, job: Job, *, is_decode: bool) -> None:
        """Queue work ahead, or drop it if too much waits: it only fills the store."""
        tokens = len(job.read) * len(job.layers)
        if self.near.take_ahead(job):
            self._ahead_tokens += tokens
            return
        waiting = sum(queue.num_tokens for queue in (*self._ahead, self._ahead_beside))
        if waiting + tokens > self._ahead_limit:
            self._ahead_dropped += tokens
            return
        class_index = _DECODE_AHEAD if is_decode else _PREFILL_AHEAD
        lane = self._kv_lane_of(job) if is_decode else self._kv_lane
        if self._queue(lane, job, class_index):
            self._ahead_tokens += tokens

    def refusal(self) -> EngramError:
        """Make the error of a call after a failure or after `close`."""
        # A new one each time: one instance would gather the traceback of every raise.
        if self.failure is not None:
            return Internal(self.failure.message)
        return Draining("the engine was closed")

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or runs. False: not within the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for lane in self.lanes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not lane.drain(left):
                return False
        return True

    def close(self) -> None:
        """End the batch in progress, fail what waits with Draining, end the threads."""
        self._stop(self.refusal())
        for lane in self.lanes:
            lane.join()

    @property
    def counters(self) -> dict[str, float]:
        """Plain numbers since the start."""
        store = self.store.counters
        return {
            "kv_hits": store.hits,
            "kv_misses": store.misses,
            "kv_duplicates": store.duplicates,
            "kv_evicted": store.evicted,
            "kv_entries": len(self.store),
            "ahead_tokens": self._ahead_tokens,
            "ahead_dropped": self._ahead_dropped,
            "rows_gathered": self._rows.rows_gathered + self._near_rows.rows_gathered,
            **_batch_counters("kv", self._kv.counts),
            **_batch_counters("beside", self._beside.counts if self._beside else BatchCounts()),
            **_batch_counters("near", self._near_kv.counts),
            **_batch_counters("rows", self._rows.counts),
        }

    def _kv_lane_of(self, job: Job) -> Lane:
        beside = self._beside_lane
        return beside if beside is not None and is_for_beside(job) else self._kv_lane

    def _queue(self, lane: Lane, job: Job, class_index: int) -> bool:
        pieces = list(job.pieces(self._piece_tokens))
        return lane.submit(job, pieces, class_index)

    def _to_lane(self, job: Job, pieces: list[Piece]) -> None:
        """Queue what is left of a job that the asking thread had taken."""
        class_index = _DECODE_AHEAD if job.output is Output.NONE else _READS
        if not self._kv_lane.submit(job, pieces, class_index):
            job.fail(self.refusal())

    def _fail(self, error: BaseException, batch: Sequence[Piece]) -> None:
        failure = Internal(f"the backend failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self.failure = self.failure or failure
        for piece in batch:
            piece.job.fail(failure)
        self._stop(failure)

    def _stop(self, error: EngramError) -> None:
        self.near.stop(error)
        for lane in self.lanes:
            lane.stop(error)


def _batch_counters(lane: str, counts: BatchCounts) -> dict[str, float]:
    return {
        f"{lane}_batches": counts.num_batches,
        f"{lane}_batch_tokens": counts.num_tokens,
        f"{lane}_largest_batch": counts.largest_batch,
    }
