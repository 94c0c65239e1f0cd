"""Residual reads of one session at a known position, in plain integers and one call of the gate.

Only what is a plain success ends here; whatever is unusual (not pushed, another epoch, kv not in
the store, too many tokens) is left to the general way (`steps.py`), which gives the same answer and
says what is wrong. Arrays of one element cost ten times what the gate does
(docs/notes/fast_path.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from engram_core.backends.base import Backend
from engram_core.kv_store import KvStore
from engram_core.near import Near
from engram_core.sessions import SessionPool
from engram_core.stages import BatchCounts, StageClock


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


class OneAnswer(NamedTuple):
    """The session's state, which positions are dead (a byte each), the seconds of the gate."""

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
        clock: StageClock,
    ) -> None:
        self._pool, self._store, self._backend, self._near = pool, store, backend, near
        self._counts, self._clock = counts, clock
        self._untold: list[float] = []

    def read(self, tenant: str, number: int, read: OneRead) -> OneAnswer | None:
        """Answer a read in place; None: nothing is changed, it takes the general way.

        number: the tenant's in the kv store
        """
        near, gates = self._near, self._backend.near_reads
        count, call_soon = read.num_tokens, near.call_soon
        if not gates or call_soon is None or not 0 < count <= near.max_tokens:
            return None
        if not near.is_mine:
            return None
        layer = gates[read.layer_index]
        if count > layer.max_tokens:
            return None
        spot = self._pool.spot(tenant, read.session_id, read.position, count, read.epoch)
        if spot is None:
            return None
        keys = layer.keys(spot.ids, spot.starts, spot.num_pages, number, read.position, count)
        with self._store.lock:
            slots = self._store.use_filled(keys)
            if slots is None:
                return None
            begun_s = time.perf_counter()
            failure = None
            try:
                is_done = layer.gate(slots, read.residual, is_f32=read.is_f32)
            except Exception as error:
                failure = error
        if failure is not None:
            near.fail(failure)
            raise failure
        if not is_done:
            return None
        gate_s = time.perf_counter() - begun_s
        self._note(count, gate_s, call_soon)
        return OneAnswer(spot.length, spot.base, spot.epoch, layer.dead(count), gate_s)

    def _note(
        self, count: int, gate_s: float, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """Count a read; its stage is told once the answer is on its way."""
        counts = self._counts
        counts.num_batches += 1
        counts.num_tokens += count
        counts.largest_batch = max(counts.largest_batch, count)
        if not self._untold:
            call_soon(self._tell)
        self._untold.append(gate_s)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for gate_s in untold:
            self._clock.late("gate", gate_s)
