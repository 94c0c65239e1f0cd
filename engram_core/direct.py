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
from engram_core.kv_store import KvStore
from engram_core.near import Near
from engram_core.sessions import Segment, SessionPool, Spot
from engram_core.stages import BatchCounts

BATCH_TOKENS = 64
"""Asks of one layer are one batch up to so many tokens; a larger ask is one alone."""

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
            return self._batch(asks[0].layer_index, asks, number) or [None]
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

    def _batch(
        self, layer_index: int, asks: Sequence[Ask], number: Callable[[str], int]
    ) -> list[Answer | None] | None:
        """Answer asks of one layer together; None: nothing was done, as it would take long."""
        reads, is_gated = self._backend.near_reads, layer_index != _NO_LAYER
        if not reads or (is_gated and not self._near.is_mine):
            return [None] * len(asks)
        layer = reads[layer_index if is_gated else 0]
        counts, runs, num_plain, gate_s = list[int](), list[Run](), 0, 0.0
        for ask in asks:
            count = self._judge(ask, number(ask.tenant), layer, runs, begins=not num_plain)
            counts.append(count)
            num_plain += count > 0
        if not num_plain:
            return [None] * len(asks)
        if is_gated:
            took_s = self._gate(layer, layer.keys(), runs)
            if took_s is None:
                return None
            gate_s = took_s / num_plain
        spots, dead = layer.settle(self._pool.address, self._pool.clock())
        if len(asks) == 1:
            return [Answer(spots, dead, gate_s)]
        answers, spot, token = list[Answer | None](), 0, 0
        for ask, count in zip(asks, counts, strict=True):
            if not count:
                answers.append(None)
                continue
            size = len(ask.segments)
            answers.append(Answer(spots[spot : spot + size], dead[token : token + count], gate_s))
            spot, token = spot + size, token + count
        return answers

    def _judge(
        self, ask: Ask, number: int, layer: NearRead, runs: list[Run], *, begins: bool
    ) -> int:
        """Judge an ask, and take it into a batch; returns its tokens, 0: it is not plain.

        number: the tenant's; runs: where the residuals of the batch lie; begins: it has no ask yet
        """
        words, count = list[int](), 0
        row_of = self._pool.rows_of(ask.tenant).get
        for session_id, position, num_tokens, epoch in ask.segments:
            words += row_of(session_id, -1), position, num_tokens, epoch
            count += num_tokens
        is_gated = ask.layer_index != _NO_LAYER
        if is_gated and not (
            count <= self._near.max_tokens and layer.reaches(ask.residual, count, is_f32=ask.is_f32)
        ):
            return 0
        count = layer.judge(self._pool.address, number, words, ask.token_ids, begins=begins)
        if count and is_gated:
            self._add_run(runs, count, ask)
        return count

    def _add_run(self, runs: list[Run], count: int, ask: Ask) -> None:
        """Add a residual; one right behind the last one is one with it."""
        first = 0
        if runs:
            start, before, residual, is_f32 = runs[-1]
            first = start + before
            end = residual + before * self._token_values * (4 if is_f32 else 2)
            if is_f32 == ask.is_f32 and end == ask.residual:
                runs[-1] = start, before + count, residual, is_f32
                return
        runs.append((first, count, ask.residual, ask.is_f32))

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
