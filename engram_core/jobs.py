"""What the scheduler runs: a read after its checks, or work ahead, cut into pieces."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.engine_types import Output, StepAnswer
from engram_core.errors import EngramError


@dataclass(frozen=True)
class Read:
    """What a read depends on once it is checked; nothing that happens to a session changes it.

    dead: bool [T]  True = no n-gram, the residual stays
    windows: int32 [T, max_ngram_size]  newest first, after blocking; or
    hash_ids: int64 [T, layers of the job, n_hash_cols]  given by the client, in their buckets
    """

    dead: NDArray[np.bool_]
    windows: NDArray[np.int32] | None = None
    hash_ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.dead)


@dataclass(eq=False)
class Job:
    """A read of some layers, or (output none) work ahead for them.

    tenant: its number in the kv store; client: whose turn it is
    layers: layer indices; tensors: what is written, one a layer (a residual: in place)
    answer: resolved with `result` when every piece has run; None = nobody waits
    """

    tenant: int
    client: Hashable
    output: Output
    layers: tuple[int, ...]
    read: Read
    tensors: tuple[torch.Tensor, ...] = ()
    stored: bool = False
    result: StepAnswer | None = None
    answer: Future[StepAnswer] | None = None
    stages: dict[str, float] = field(default_factory=dict)
    submitted_s: float = field(default_factory=time.perf_counter)
    pieces_left: int = 0

    @property
    def is_wanted(self) -> bool:
        """False once its answer was cancelled or has failed: the pieces left are dropped."""
        return self.answer is None or not self.answer.done()

    def pieces(self, size: int) -> Iterator[Piece]:
        """Cut into pieces of at most `size` tokens, by (chunk, layer).

        So the layers of one chunk follow each other, and a long prompt cannot evict its own kv.
        """
        for start in range(0, len(self.read), size):
            stop = min(start + size, len(self.read))
            for place, layer in enumerate(self.layers):
                yield Piece(self, layer, place, start, stop)

    def finish_piece(self) -> None:
        """Count a piece as done; resolves the answer with the last one."""
        self.pieces_left -= 1
        if self.pieces_left == 0 and self.answer is not None and self.result is not None:
            self.result.stages.update(self.stages)
            settle(self.answer, self.result)

    def fail(self, error: EngramError) -> None:
        """Answer with an error."""
        if self.answer is not None:
            settle(self.answer, error)


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens [start, stop) of a job for one layer. place: where the layer stands in the job."""

    job: Job
    layer: int
    place: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """How many positions it is about."""
        return self.stop - self.start

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Its dead flags: bool [T]."""
        return self.job.read.dead[self.start : self.stop]

    @property
    def windows(self) -> NDArray[np.int32] | None:
        """Its windows: int32 [T, max_ngram_size]; None where hash ids were given."""
        windows = self.job.read.windows
        return None if windows is None else windows[self.start : self.stop]

    @property
    def hash_ids(self) -> NDArray[np.int64] | None:
        """int64 [n, n_hash_cols] of the piece's layer."""
        hash_ids = self.job.read.hash_ids
        if hash_ids is None:
            return None
        return np.ascontiguousarray(hash_ids[self.start : self.stop, self.place])

    @property
    def tensor(self) -> torch.Tensor:
        """Its slice of what the job writes."""
        return self.job.tensors[self.place][self.start : self.stop]


def settle(answer: Future[StepAnswer], outcome: StepAnswer | EngramError) -> None:
    """Resolve an answer unless it was cancelled or is resolved already.

    An answer stays pending until then, so that it can be cancelled at any time. Two threads may
    settle one answer, a failing lane and an engine that is closed: the first to take it does.
    """
    try:
        if answer.done() or not answer.set_running_or_notify_cancel():
            return
    except RuntimeError:
        return  # the other thread has taken it since
    if isinstance(outcome, EngramError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
