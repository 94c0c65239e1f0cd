"""Small steps in plain integers: what came together is one projection, one gate and one wait.

Only what is a plain success ends here; whatever is unusual (not pushed, another epoch, too many
tokens; kv not in the store, where this thread cannot make it) is left to the general way
(`steps.py`), which gives the same answer and says what is wrong. Arrays of one element cost ten
times what the gate does (docs/notes/fast_path.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from engram_core.backends.base import Backend, NearRead, Run
from engram_core.hashing import DEAD, compress_few
from engram_core.kv_store import KvStore
from engram_core.near import Near
from engram_core.sessions import SessionPool, Spot
from engram_core.stages import BatchCounts

BATCH_TOKENS = 64
"""Asks of one layer are one batch up to so many tokens; a larger ask is one alone."""

Segment = tuple[int, int, int, int]
"""Session id, position, number of tokens, epoch (EPOCH_OPENED = left out)."""

_NO_LAYER = -1


class Ask(NamedTuple):
    """A step of a few segments that pushes, or updates a residual, or both.

    token_ids: to be appended first, of all segments, one after the other; None: nothing is
    layer_index: of the geometry; -1: no residual
    residual: address of bfloat16 or float32 [T, hc_mult, dim]
    ahead: layers whose kv is worked ahead of what is appended, for `client`
    """

    tenant: str
    segments: list[Segment]
    token_ids: list[int] | None = None
    layer_index: int = _NO_LAYER
    residual: int = 0
    is_f32: bool = False
    ahead: tuple[int, ...] = ()
    client: Hashable = ""


class Answer(NamedTuple):
    """sessions: of each segment, as it is afterwards; dead: which positions are, a byte each

    gate_s: the ask's share of the seconds that its batch took for kv and gates. Whoever asked tells
    them: no stage clock does.
    """

    sessions: list[Spot]
    dead: bytes
    gate_s: float


class DirectReads:
    """Asks of the thread that `near` belongs to. The engine's lock guards it."""

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
        geometry = backend.geometry
        self._token_values = geometry.hc_mult * geometry.dim

    def answer(self, asks: Sequence[Ask], number: Callable[[str], int]) -> list[Answer | None]:
        """Append and answer in place what is plain. None: nothing of that ask is done, it takes the
        general way; after a failure of the backend, too.

        number: a tenant's in the kv store
        """
        if len(asks) == 1:
            (ask,) = asks
            if len(ask.segments) == 1 and ask.token_ids is None:
                return [self._read(ask, number(ask.tenant))]
            return self._together(ask.layer_index, asks, number)
        found: list[Answer | None] = [None] * len(asks)
        for layer_index, places in _batches(asks):
            answers = self._together(layer_index, [asks[place] for place in places], number)
            for place, answer in zip(places, answers, strict=True):
                found[place] = answer
        return found

    def _together(
        self, layer_index: int, asks: Sequence[Ask], number: Callable[[str], int]
    ) -> list[Answer | None]:
        """Answer asks of one layer in one batch, or in smaller ones: a few may be made now where
        many would take long."""
        answers = self._batch(layer_index, asks, number)
        if answers is not None:
            return answers
        half = len(asks) // 2
        if not half:
            return [None]
        first = self._together(layer_index, asks[:half], number)
        return first + self._together(layer_index, asks[half:], number)

    def _read(self, ask: Ask, number: int) -> Answer | None:
        """As `_batch`, of one read of one session: what runners ask for most, in half the time."""
        reads = self._backend.near_reads
        if not reads or not self._near.is_mine:
            return None
        layer, ((session_id, position, count, epoch),) = reads[ask.layer_index], ask.segments
        if not self._is_for(layer, ask, count):
            return None
        spot = self._pool.spot(ask.tenant, session_id, position, count, epoch)
        if spot is None:
            return None
        keys = layer.keys(spot.ids, spot.starts, spot.num_pages, number, position, count)
        gate_s = self._gate(layer, keys, [(0, count, ask.residual, ask.is_f32)])
        if gate_s is None:
            return None
        self._pool.renew_spot(spot)
        return Answer([spot], layer.dead(count), gate_s)

    def _is_for(self, layer: NearRead, ask: Ask, num_tokens: int) -> bool:
        """Whether a layer reads so much, from there, here."""
        if not 0 < num_tokens <= self._near.max_tokens or num_tokens > layer.max_tokens:
            return False
        return layer.reaches(ask.residual, num_tokens, is_f32=ask.is_f32)

    def _batch(
        self, layer_index: int, asks: Sequence[Ask], number: Callable[[str], int]
    ) -> list[Answer | None] | None:
        """Answer asks of one layer together; None: nothing was done, as it would take long."""
        layer = None
        if layer_index != _NO_LAYER:
            if not self._backend.near_reads or not self._near.is_mine:
                return None
            layer = self._backend.near_reads[layer_index]
        batch = _Batch(layer)
        judged = [self._judge(ask, number(ask.tenant), batch) for ask in asks]
        if not batch.num_plain:
            return [None] * len(asks)
        if layer is None:
            gate_s, dead = 0.0, bytes(batch.dead)
        else:
            took_s = self._gate(layer, batch.keys, batch.runs)
            if took_s is None:
                return None
            gate_s, dead = took_s / batch.num_plain, layer.dead(len(batch.keys))
        pool, answers, at = self._pool, list[Answer | None](), 0
        for ask, spots in zip(asks, judged, strict=True):
            if spots is None:
                answers.append(None)
                continue
            begin = at
            for spot, (_, _, count, _) in zip(spots, ask.segments, strict=True):
                at += count
                if ask.token_ids is None:
                    pool.renew_spot(spot)
                else:
                    pool.append(spot, count)
            answers.append(Answer(spots, dead[begin:at], gate_s))
        return answers

    def _judge(self, ask: Ask, number: int, batch: _Batch) -> list[Spot] | None:
        """Judge an ask's segments, and add their keys to a batch; None: they are not all plain.

        No session is changed. number: the tenant's
        """
        pool, layer, ids, num_tokens = self._pool, batch.layer, None, 0
        tenant, segments = ask.tenant, ask.segments
        for _, _, count, _ in segments:
            num_tokens += count
        if layer is not None and not self._is_for(layer, ask, num_tokens):
            return None
        if ask.token_ids is not None:
            ids = compress_few(ask.token_ids, self._backend.hash_tables)
            if ids is None or len(ids) != num_tokens:
                return None
            if not pool.has_room(batch.num_appended + num_tokens):
                return None
        spots, keys, at = list[Spot](), list[bytes](), 0
        first = len(batch.keys)
        for session_id, position, count, epoch in segments:
            if not count:
                return None
            if ids is None:
                spot = pool.spot(tenant, session_id, position, count, epoch)
            else:
                name = tenant, session_id
                if name in batch.appended:
                    return None  # the ids of another ask lie where these would
                batch.appended.add(name)
                own = ids[at : at + count]
                spot = pool.spot_behind(tenant, session_id, position, own, epoch)
            if spot is None:
                return None
            if layer is not None:
                keys += layer.keys(
                    spot.ids, spot.starts, spot.num_pages, number, position, count, first + at
                )
            spots.append(spot)
            at += count
        batch.num_plain += 1
        if ids is not None:
            batch.num_appended += num_tokens
        if layer is not None:
            batch.keys += keys
            batch.add_run(first, num_tokens, ask, self._token_values)
        elif ids is not None:
            batch.dead += [token == DEAD for token in ids]
        return spots

    def _gate(self, layer: NearRead, keys: list[bytes], runs: list[Run]) -> float | None:
        """Find or make the kv of keys, and gate. Returns seconds; None: nothing was done, or the
        backend has failed."""
        store, failure = self._store, None
        is_done = False
        # Held until the slots are read: nobody gives them to another key, nor finds what is being
        # made here.
        store.lock_urgently()
        begun_s = time.perf_counter()
        try:
            slots = store.use_filled(keys)
            is_begun = slots is None and layer.can_project
            if is_begun:
                slots = store.use_or_fill(keys, layer.project)
            if slots is None:
                return None
            is_done = layer.gate(slots, runs)
            if is_begun and not is_done:
                layer.wait()
        except Exception as error:
            failure = error
        finally:
            store.lock.release()
        if failure is not None:
            self._near.fail(failure)
            return None
        if not is_done:
            return None
        gate_s = time.perf_counter() - begun_s
        counts = self._counts
        counts.num_batches += 1
        counts.num_tokens += len(keys)
        counts.largest_batch = max(counts.largest_batch, len(keys))
        return gate_s


class _Batch:
    """What is gathered of asks that are judged one after the other, of a layer or of none.

    keys, runs: of the positions that are gated, and where their residuals lie
    dead: flags of what is only appended
    appended: (tenant, session id) of what is; num_appended: ids; num_plain: asks
    """

    __slots__ = ("appended", "dead", "keys", "layer", "num_appended", "num_plain", "runs")

    def __init__(self, layer: NearRead | None) -> None:
        self.layer = layer
        self.keys: list[bytes] = []
        self.runs: list[Run] = []
        self.dead: list[bool] = []
        self.appended: set[tuple[str, int]] = set()
        self.num_appended = self.num_plain = 0

    def add_run(self, first: int, count: int, ask: Ask, token_values: int) -> None:
        """Add a residual; one right behind the last one is one with it."""
        if self.runs:
            start, before, residual, is_f32 = self.runs[-1]
            end = residual + before * token_values * (4 if is_f32 else 2)
            if is_f32 == ask.is_f32 and end == ask.residual:
                self.runs[-1] = start, before + count, residual, is_f32
                return
        self.runs.append((first, count, ask.residual, ask.is_f32))


def _batches(asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
    """Group asks: layer index, and which they are. What only pushes goes first."""
    by_layer: dict[int, list[int]] = {}
    for place, ask in enumerate(asks):
        by_layer.setdefault(ask.layer_index, []).append(place)
    for layer_index in sorted(by_layer):
        places, num_tokens = list[int](), 0
        for place in by_layer[layer_index]:
            count = sum([segment[2] for segment in asks[place].segments])
            if places and num_tokens + count > BATCH_TOKENS:
                yield layer_index, places
                places, num_tokens = [], 0
            places.append(place)
            num_tokens += count
        if places:
            yield layer_index, places
