"""How one ragged batch of one layer is run on a backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Backend, NearBatches
from engram_core.engine_types import Output
from engram_core.errors import Overloaded
from engram_core.hashing import hash_windows
from engram_core.jobs import Piece
from engram_core.kv_store import KvStore, Lease
from engram_core.pages import Ints
from engram_core.stages import BatchCounts, StageClock


class KvBatches:
    """Batches that need kv: residuals, kv reads and work ahead.

    merge_tokens: small answers are made in one call of the backend, up to so many tokens; larger
        ones each on their own, without a copy
    near: what the asking thread's batches run on; None: on the backend itself
    """

    def __init__(
        self,
        backend: Backend,
        store: KvStore,
        merge_tokens: int,
        clock: StageClock,
        near: NearBatches | None = None,
    ) -> None:
        self.counts = BatchCounts()
        self._clock = clock
        self._backend = backend
        self._near = near
        self._gates: Backend | NearBatches = near or backend
        self._store = store
        self._merge_tokens = merge_tokens

    def run(self, batch: list[Piece]) -> None:
        """Find or compute the kv of every token, then write the answers."""
        self.counts.begin(batch)
        windowed = [piece for piece in batch if piece.windows is not None]
        anonymous = [piece for piece in batch if piece.windows is None]
        if windowed:
            with self._lease(windowed) as lease:
                self._answer(windowed, lease.slots)
        if anonymous:
            with self._lend(anonymous) as slots:
                self._answer(anonymous, slots)
        for piece in batch:
            piece.job.finish_piece()

    def answer(self, batch: list[Piece], slots: Ints) -> None:
        """Write the answers of one layer whose kv is there. slots: int64 [T], of all pieces."""
        self.counts.begin(batch)
        self._answer(batch, slots)

    def run_now(self, batch: list[Piece]) -> bool:
        """As `run`, on what `near` is; False, and nothing done, if that would take long.

        batch: of windows, at most 64 tokens; its jobs are told nothing yet
        """
        near, layer = self._near, batch[0].layer
        assert near is not None
        begun_s = time.perf_counter()
        with self._clock.measure("store", batch):
            windows, tenants = windows_of(batch)

            def fill(slots: list[int], tokens: list[int]) -> bool:
                return near.project(layer, slots, windows[tokens])

            lease = self._store.lease_now(layer, tenants, windows, fill)
            if lease is not None and not near.is_ready(lease.slots):
                self._store.release(lease)
                lease = None
        if lease is None:
            return False
        try:
            self.counts.begin(batch, begun_s)
            self._answer(batch, lease.slots)
        finally:
            self._store.release(lease)
        return True

    @contextmanager
    def _lease(self, pieces: list[Piece]) -> Iterator[Lease]:
        """Pin the entries of windows, computing those that are missing."""
        layer = pieces[0].layer
        with self._clock.measure("store", pieces):
            windows, tenants = windows_of(pieces)
            lease = self._store.acquire(layer, tenants, windows)
            try:
                if len(lease.compute):
                    slots = lease.slots[lease.compute]
                    self._backend.project(layer, slots, windows=windows[lease.compute])
                    self._store.fill(lease)
            except BaseException:
                self._store.abandon(lease)
                raise
        try:
            yield lease
        finally:
            self._store.release(lease)

    @contextmanager
    def _lend(self, pieces: list[Piece]) -> Iterator[Ints]:
        """Compute the kv of given hash_ids into slots that no key finds."""
        with self._clock.measure("store", pieces):
            hash_ids = np.concatenate(
                [piece.hash_ids for piece in pieces if piece.hash_ids is not None]
            )
            slots = self._store.lend(len(hash_ids))
            self._backend.project(pieces[0].layer, slots, hash_ids=hash_ids)
        try:
            yield slots
        finally:
            self._store.give_back(slots)

    def _answer(self, pieces: list[Piece], slots: Ints) -> None:
        """Write what was asked for. slots: int64 [T] of the pieces, one after the other."""
        if len(pieces) == 1:
            if pieces[0].job.output is not Output.NONE:
                self._write(pieces[0].job.output, [(pieces[0], slots)])
            return
        ends = np.cumsum([piece.num_tokens for piece in pieces]).tolist()
        parts = [
            (piece, slots[start:stop])
            for piece, (start, stop) in zip(pieces, pairwise([0, *ends]), strict=True)
        ]
        for output in (Output.RESIDUAL, Output.KV):
            asked = [part for part in parts if part[0].job.output is output]
            for run in _runs(asked, self._merge_tokens):
                self._write(output, run)

    def _write(self, output: Output, run: list[tuple[Piece, Ints]]) -> None:
        pieces = [piece for piece, _ in run]
        layer = pieces[0].layer
        if len(run) == 1:
            slots, dead = run[0][1], pieces[0].dead
        else:
            slots = np.concatenate([slots for _, slots in run])
            dead = np.concatenate([piece.dead for piece in pieces])
        tensors = [piece.tensor for piece in pieces]
        if output is Output.RESIDUAL:
            with self._clock.measure("gate", pieces):
                merged = tensors[0] if len(run) == 1 else self._merged(tensors, len(slots))
                if len(run) > 1:
                    torch.cat(tensors, out=merged)
                self._gates.gate(layer, slots, dead, merged, merged)
                _scatter(merged, tensors)
        else:
            with self._clock.measure("read_kv", pieces):
                merged = tensors[0] if len(run) == 1 else self._merged(tensors, len(slots))
                self._gates.read_kv(layer, slots, dead, merged)
                _scatter(merged, tensors)

    def _merged(self, tensors: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Return memory for an answer of several: the backend's, or where it has none plain."""
        first = tensors[0]
        shape = num_tokens, *first.shape[1:]
        try:
            return self._backend.host_memory.tensor(shape, first.dtype)
        except Overloaded:
            return first.new_empty(shape)


class RowBatches:
    """Batches that need no kv: rows and hash_ids.

    near: what the asking thread's batches run on; None: on the backend itself
    """

    def __init__(
        self, backend: Backend, clock: StageClock, near: NearBatches | None = None
    ) -> None:
        self._gather: Backend | NearBatches = near or backend
        self.counts = BatchCounts()
        self._clock = clock
        self.rows_gathered = 0
        self._backend = backend

    def run(self, batch: list[Piece]) -> None:
        """Hash, and gather, piece by piece."""
        self.counts.begin(batch)
        for piece in batch:
            with self._clock.measure("hash_ids", [piece]):
                hash_ids = piece.hash_ids
                if piece.windows is not None:
                    tables = self._backend.hash_tables
                    hash_ids = hash_windows(piece.windows, tables, [piece.layer])[:, 0]
            assert hash_ids is not None
            if piece.job.output is Output.HASH_IDS:
                piece.tensor.numpy()[:] = hash_ids
            else:
                stored = piece.job.stored
                with self._clock.measure("rows", [piece]):
                    self._gather.rows(piece.layer, hash_ids, piece.tensor, stored=stored)
                self.rows_gathered += hash_ids.size
            piece.job.finish_piece()


def windows_of(pieces: list[Piece]) -> tuple[NDArray[np.int32], Ints]:
    """Return windows int32 [T, max_ngram_size] and tenants int64 [T] of pieces that have some."""
    windows = [piece.windows for piece in pieces if piece.windows is not None]
    if len(windows) == 1:
        return windows[0], np.full(len(windows[0]), pieces[0].job.tenant, dtype=np.int64)
    tenants = np.array([piece.job.tenant for piece in pieces], dtype=np.int64)
    return np.concatenate(windows), np.repeat(tenants, [piece.num_tokens for piece in pieces])


def _runs(parts: list[tuple[Piece, Ints]], merge_tokens: int) -> Iterator[list[tuple[Piece, Ints]]]:
    """Group neighbours of one dtype, up to `merge_tokens` tokens a group."""
    run: list[tuple[Piece, Ints]] = []
    tokens = 0
    for part in parts:
        piece = part[0]
        alike = run and run[0][0].tensor.dtype == piece.tensor.dtype
        if run and not (alike and tokens + piece.num_tokens <= merge_tokens):
            yield run
            run, tokens = [], 0
        run.append(part)
        tokens += piece.num_tokens
    if run:
        yield run


def _scatter(merged: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy a merged answer to where its parts belong (a single one is there already)."""
    if len(tensors) > 1:
        for tensor, part in zip(
            tensors, torch.split(merged, [len(t) for t in tensors]), strict=True
        ):
            tensor.copy_(part)
