"""Small reads whose kv is there already, run by the thread that asks for them.

A lane costs two thread wake-ups and the interpreter's lock twice, 100 to 300 us on a machine that
has other work; such a read costs 70 to 400 wherever it runs (docs/notes/fast_path.md). Nor need it
wait for the projection a lane is busy with: its kv is filled, and pinned until it is answered.
Where the backend lets this thread project, too (a GPU), kv that is missing is made here as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engram_core.batches import KvBatches, RowBatches
from engram_core.engine_types import Output
from engram_core.errors import EngramError
from engram_core.jobs import Job, Piece
from engram_core.kv_store import KvStore, Lease

MAX_PINNED = 64
"""Tokens that may wait here: what bounds the owner's turn, and the slots kept from a lane."""

CallSoon = Callable[[Callable[[], None]], object]


_KV_READS, _ROW_READS = (Output.RESIDUAL, Output.KV), (Output.ROWS, Output.HASH_IDS)
_ALL_READS = _KV_READS + _ROW_READS


def _urgency(job: Job) -> int:
    """Reads go before work ahead."""
    return 0 if job.output in _KV_READS else 1 if job.output in _ROW_READS else 2


@dataclass(frozen=True, eq=False)
class _Found:
    """A piece and its pinned slots."""

    piece: Piece
    lease: Lease


class Near:
    """What came in one turn of its owner's event loop is one batch a layer.

    max_tokens: of a read that is taken; 0 = none is
    on_failure: told a backend's exception and the batch
    to_lane: given the pieces of a job that this thread can do only later; None: it has no way of
        making kv, and takes only what the store holds
    rows: for reads of rows and hash_ids; None: they are not for here
    """

    def __init__(
        self,
        store: KvStore,
        batches: KvBatches,
        max_tokens: int,
        on_failure: Callable[[BaseException, list[Piece]], None],
        *,
        to_lane: Callable[[Job, list[Piece]], None] | None = None,
        rows: RowBatches | None = None,
    ) -> None:
        self._to_lane, self._rows = to_lane, rows
        self._pieces: list[Piece] = []
        self._store = store
        self._batches = batches
        self.max_tokens = max_tokens
        self._on_failure = on_failure
        self.call_soon: CallSoon | None = None
        self._owner = 0
        self._found: list[_Found] = []
        self._num_pinned = 0
        self._stopped: EngramError | None = None

    def attach(self, call_soon: CallSoon) -> None:
        """Make the calling thread the owner; torch works on it alone from now on.

        call_soon: calls a function on this thread once it is done with what it does now
        """
        torch.set_num_threads(1)  # sharing 16 tokens among threads costs more than they do
        self._owner, self.call_soon = threading.get_ident(), call_soon

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the owner, and nothing has stopped it."""
        return self._stopped is None and threading.get_ident() == self._owner

    def take(self, job: Job) -> bool:
        """Take a job if it is one for here; False if it is for a lane."""
        tokens = len(job.read) * len(job.layers)
        if (
            self.call_soon is None
            or tokens > self.max_tokens
            or self._num_pinned + tokens > MAX_PINNED
            or job.output not in (_ALL_READS if self._rows else _KV_READS)
            or not self.is_mine
        ):
            return False
        if self._to_lane is not None:
            return self._take_turn(job, tokens, self.call_soon)
        found = self._find(job)
        if not found:
            return False
        job.pieces_left = len(found)
        self._num_pinned += tokens
        if not self._found:
            self.call_soon(self._run)
        self._found += found
        return True

    def fail(self, error: BaseException) -> None:
        """End everything: the backend has failed in a call of the owner's."""
        self._on_failure(error, [])

    def stop(self, error: EngramError) -> None:
        """Take no more work; what was taken and has not run fails with `error`."""
        self._stopped = error

    def take_ahead(self, job: Job) -> bool:
        """Take work ahead, where this thread makes kv; it is run behind the reads of this turn."""
        tokens = len(job.read) * len(job.layers)
        if self.call_soon is None or self._to_lane is None or not self.is_mine:
            return False
        if self._num_pinned + tokens > MAX_PINNED:
            return False
        return self._take_turn(job, tokens, self.call_soon)

    def _take_turn(self, job: Job, tokens: int, call_soon: CallSoon) -> bool:
        """Take a job for the end of this turn, whatever of its kv is missing."""
        if not tokens or (job.read.windows is None and job.output not in _ROW_READS):
            return False
        pieces = list(job.pieces(self.max_tokens))
        job.pieces_left = len(pieces)
        self._num_pinned += tokens
        if not self._pieces:
            call_soon(self._run_turn)
        self._pieces += pieces
        return True

    def _run_turn(self) -> None:
        """Run what came in this turn, one batch a layer; what cannot be run now is for the lane."""
        pieces, self._pieces, self._num_pinned = self._pieces, [], 0
        left: dict[Job, list[Piece]] = {}
        batches: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            batches.setdefault((_urgency(piece.job), piece.layer), []).append(piece)
        for urgency, layer in sorted(batches):
            batch = [piece for piece in batches[urgency, layer] if piece.job.is_wanted]
            if self._stopped is not None:
                for piece in batch:
                    piece.job.fail(self._stopped)
            elif batch and not self._run_now(batch):
                for piece in batch:
                    left.setdefault(piece.job, []).append(piece)
        assert self._to_lane is not None
        for job, some in left.items():
            self._to_lane(job, some)

    def _run_now(self, batch: list[Piece]) -> bool:
        try:
            if batch[0].job.output in _ROW_READS:
                assert self._rows is not None
                self._rows.run(batch)
                return True
            if not self._batches.run_now(batch):
                return False
        except BaseException as error:  # whatever it was: nobody may be left waiting
            self._on_failure(error, batch)
            return True
        for piece in batch:
            piece.job.finish_piece()
        return True

    def _find(self, job: Job) -> list[_Found]:
        """Pin the slots of every layer, or of none."""
        found: list[_Found] = []
        for piece in job.pieces(self.max_tokens):
            windows = piece.windows
            tenants = np.full(piece.num_tokens, job.tenant, dtype=np.int64)
            lease = None if windows is None else self._store.find(piece.layer, tenants, windows)
            if lease is None:
                self._release(found)
                return []
            found.append(_Found(piece, lease))
        return found

    def _run(self) -> None:
        found, self._found, self._num_pinned = self._found, [], 0
        for layer in {each.piece.layer for each in found}:
            self._run_layer([each for each in found if each.piece.layer == layer])

    def _run_layer(self, found: list[_Found]) -> None:
        if self._stopped is not None:
            for each in found:
                each.piece.job.fail(self._stopped)
            return
        wanted = [each for each in found if each.piece.job.is_wanted]
        batch = [each.piece for each in wanted]
        try:
            if len(wanted) == 1:
                self._batches.answer(batch, wanted[0].lease.slots)
            elif wanted:
                slots = np.concatenate([each.lease.slots for each in wanted])
                self._batches.answer(batch, slots)
        except BaseException as error:  # whatever it was: nobody may be left waiting
            self._on_failure(error, batch)
            return
        finally:
            self._release(found)
        for piece in batch:
            piece.job.finish_piece()

    def _release(self, found: list[_Found]) -> None:
        for each in found:
            self._store.release(each.lease)
