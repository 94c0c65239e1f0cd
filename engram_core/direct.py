"""Residual reads of one session at a known position, in plain integers and one call of the gate.

Only what is a plain success ends here; whatever is unusual (not pushed, another epoch, too many
tokens; kv not in the store, where this thread cannot make it) is left to the general way
(`steps.py`), which gives the same answer and says what is wrong. Arrays of one element cost ten
times what the gate does (docs/notes/fast_path.md).
"""

from __future__ import annotations

import time
from typing import NamedTuple

from engram_core.backends.base import Backend, NearRead
from engram_core.hashing import DEAD, compress_few
from engram_core.kv_store import KvStore
from engram_core.near import Near
from engram_core.sessions import SessionPool, Spot
from engram_core.stages import BatchCounts


class OneRead(NamedTuple):
    """A residual read. residual: address of bfloat16 or float32 [num_tokens, hc_mult, dim]

    epoch: EPOCH_OPENED = left out; layer_index: of the geometry
    """

    session_id: int
    position: int
    num_tokens: int
    epoch: int
    layer_index: int
    residual: int
    is_f32: bool


class Few(NamedTuple):
    """Segments of one step that reads residuals.

    segments: session id, position, number of tokens, epoch (EPOCH_OPENED = left out) of each
    residual: address of bfloat16 or float32 [T, hc_mult, dim]; layer_index: of the geometry
    """

    segments: list[tuple[int, int, int, int]]
    layer_index: int
    residual: int
    is_f32: bool


class FewAnswer(NamedTuple):
    """lengths, epochs: of the segments' sessions; the rest as in `OneAnswer`."""

    lengths: list[int]
    epochs: list[int]
    dead: bytes
    gate_s: float


class OneAnswer(NamedTuple):
    """The session's state, which positions are dead (a byte each), the seconds of the gate, with
    what it waited for.

    Whoever asked tells them: no stage clock does.
    """

    length: int
    base: int
    epoch: int
    dead: bytes
    gate_s: float


class DirectReads:
    """Reads by the thread that `near` belongs to. The engine's lock guards it."""

    def __init__(
        self,
        pool: SessionPool,
        store: KvStore,
        backend: Backend,
        near: Near,
        counts: BatchCounts,
    ) -> None:
        self._pool, self._store, self._backend, self._near = pool, store, backend, near
        self._counts = counts

    def read(self, tenant: str, number: int, read: OneRead) -> OneAnswer | None:
        """Answer a read in place; None: nothing is changed, it takes the general way.

        number: the tenant's in the kv store
        """
        count = read.num_tokens
        layer = self._layer_of(read, count)
        if layer is None:
            return None
        spot = self._pool.spot(tenant, read.session_id, read.position, count, read.epoch)
        return None if spot is None else self._answer(layer, spot, number, read)

    def push(
        self, tenant: str, number: int, read: OneRead, token_ids: list[int]
    ) -> OneAnswer | None:
        """Append ids to a session and answer the read of them in place; None: nothing is changed,
        both take the general way."""
        layer = self._layer_of(read, read.num_tokens)
        if layer is None or len(token_ids) != read.num_tokens:
            return None
        ids = compress_few(token_ids, self._backend.hash_tables)
        if ids is None:
            return None
        pool = self._pool
        spot = pool.spot_behind(tenant, read.session_id, read.position, ids, read.epoch)
        answer = None if spot is None else self._answer(layer, spot, number, read)
        if spot is not None and answer is not None:
            pool.append(spot, len(ids))
        return answer

    def few(
        self, tenant: str, number: int, read: Few, token_ids: list[int] | None
    ) -> FewAnswer | None:
        """Read several segments in place, one batch, after their ids were appended if there are
        some; None: nothing is changed, all of it takes the general way."""
        num_tokens = sum(segment[2] for segment in read.segments)
        layer = self._layer_of(read, num_tokens)
        if layer is None:
            return None
        pool, spots, keys = self._pool, list[Spot](), list[bytes]()
        ids = None
        if token_ids is not None:
            ids = compress_few(token_ids, self._backend.hash_tables)
            distinct = {segment[0] for segment in read.segments}
            is_plain = len(distinct) == len(read.segments) and pool.has_room(num_tokens)
            if ids is None or len(ids) != num_tokens or not is_plain:
                return None
        for session_id, position, count, epoch in read.segments:
            first = len(keys)
            if ids is None:
                spot = pool.spot(tenant, session_id, position, count, epoch, renews=False)
            else:
                own = ids[first : first + count]
                spot = pool.spot_behind(tenant, session_id, position, own, epoch)
            if spot is None or not count:
                return None
            where = spot.ids, spot.starts, spot.num_pages
            keys += layer.keys(*where, number, position, count, first)
            spots.append(spot)
        gate_s = self._gate(layer, keys, read.residual, is_f32=read.is_f32)
        if gate_s is None:
            return None
        if ids is None:
            pool.renew_spots(spots)
        else:
            for spot, segment in zip(spots, read.segments, strict=True):
                pool.append(spot, segment[2])
        lengths, epochs = [spot.length for spot in spots], [spot.epoch for spot in spots]
        return FewAnswer(lengths, epochs, layer.dead(num_tokens), gate_s)

    def append(
        self, tenant: str, segments: list[tuple[int, int, int, int]], token_ids: list[int]
    ) -> tuple[FewAnswer, list[Spot]] | None:
        """Append ids to a few sessions; None: that is not all, nothing is changed."""
        ids, pool = compress_few(token_ids, self._backend.hash_tables), self._pool
        if ids is None or len({segment[0] for segment in segments}) != len(segments):
            return None
        if not pool.has_room(len(ids)) or sum(segment[2] for segment in segments) != len(ids):
            return None
        spots, first = list[Spot](), 0
        for session_id, position, count, epoch in segments:
            own = ids[first : first + count]
            spot = pool.spot_behind(tenant, session_id, position, own, epoch)
            if spot is None or not count:
                return None
            spots.append(spot)
            first += count
        for spot, segment in zip(spots, segments, strict=True):
            pool.append(spot, segment[2])
        lengths, epochs = [spot.length for spot in spots], [spot.epoch for spot in spots]
        return FewAnswer(lengths, epochs, bytes(token == DEAD for token in ids), 0.0), spots

    def _layer_of(self, read: OneRead | Few, count: int) -> NearRead | None:
        """Return what reads a layer here, None if nothing does."""
        near, gates = self._near, self._backend.near_reads
        if not gates or not 0 < count <= near.max_tokens or not near.is_mine:
            return None
        layer = gates[read.layer_index]
        is_able = count <= layer.max_tokens and layer.reaches(
            read.residual, count, is_f32=read.is_f32
        )
        return layer if is_able else None

    def _answer(self, layer: NearRead, spot: Spot, number: int, read: OneRead) -> OneAnswer | None:
        """Gate the positions of one session; None: nothing was done."""
        count = read.num_tokens
        keys = layer.keys(spot.ids, spot.starts, spot.num_pages, number, read.position, count)
        gate_s = self._gate(layer, keys, read.residual, is_f32=read.is_f32)
        if gate_s is None:
            return None
        return OneAnswer(spot.length, spot.base, spot.epoch, layer.dead(count), gate_s)

    def _gate(
        self, layer: NearRead, keys: list[bytes], residual: int, *, is_f32: bool
    ) -> float | None:
        """Find or make the kv of keys, and gate. Returns seconds; None: nothing was done."""
        count, store = len(keys), self._store
        failure = None
        is_done = False
        # Held until the slots are read: nobody gives them to another key, nor finds what is being
        # made here.
        with store.urgently():
            begun_s = time.perf_counter()
            try:
                slots = store.use_filled(keys)
                is_begun = slots is None and layer.can_project
                if is_begun:
                    slots = store.use_or_fill(keys, layer.project)
                if slots is None:
                    return None
                is_done = layer.gate(slots, residual, is_f32=is_f32)
                if is_begun and not is_done:
                    layer.wait()
            except Exception as error:
                failure = error
        if failure is not None:
            self._near.fail(failure)
            raise failure
        if not is_done:
            return None
        gate_s = time.perf_counter() - begun_s
        counts = self._counts
        counts.num_batches += 1
        counts.num_tokens += count
        counts.largest_batch = max(counts.largest_batch, count)
        return gate_s
