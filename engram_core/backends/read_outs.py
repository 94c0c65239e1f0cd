"""What leaves the device in pieces: rows on a stream of their own, kv on that of the gates.

A piece is written straight to its place where the device can, else to a lane of pinned memory
that is copied from once the device is done. Two lanes take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.device import Stream
from engram_core.backends.disk_rows import disk_readers
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.projections import Projections
from engram_core.backends.staging import (
    ControlRing,
    Lane,
    address_of,
    control_bytes_of,
    fits_inline,
    pieces,
)

Reach = Callable[[torch.Tensor], bool]
"""Whether the device writes a tensor in place."""

_LANES, _CONTROLS = 2, 3


class RowReadOut:
    """One thread reads rows.

    row_bytes: as stored, of each layer; max_tokens: of a piece
    """

    def __init__(
        self, engram: EngramV41, row_bytes: Sequence[int], max_tokens: int, in_reach: Reach
    ) -> None:
        self._engram, self._max_tokens, self._in_reach = engram, max_tokens, in_reach
        native, geometry = engram.native, engram.geometry
        columns = geometry.n_hash_cols
        widest = max(*row_bytes, geometry.head_dim * 2)
        with ExitStack() as made:
            self._stream = Stream(native)
            made.callback(self._stream.close)
            self._control = _control_ring(engram, max_tokens, made)
            self._lanes = _lanes(engram, max_tokens * columns * widest, made)
            tables = [engram.layer(i).on_disk for i in range(geometry.num_layers)]
            self._disk = disk_readers(native, tables, columns, max_tokens, made)
            self._owned = made.pop_all()

    def read(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather checked ids, and wait (see `Backend.rows`)."""
        output = abi.OUT_STORED if stored else abi.OUT_BF16
        stream, control, disk = self._stream, self._control, self._disk[layer_index]
        for turn, piece in enumerate(pieces(len(hash_ids), self._max_tokens)):
            lane = self._lanes[turn % _LANES]
            some, part = np.ascontiguousarray(hash_ids[piece]), out[piece]
            to = lane.begin(part, in_place=self._in_reach(part))
            if disk is not None:
                table, ids = disk.read(some), disk.places
            else:
                (ids,), table = control.send(stream, some), None
            self._engram.gather(
                layer_index, len(some), to, stream, hash_ids=ids, output=output, table=table
            )
            (control if disk is None else disk).release(stream)
            lane.end(stream)
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        """Free what rows pass through."""
        self._owned.close()


class KvReadOut:
    """One call at a time (the caller's lock). stream: of gates; max_tokens: of a piece"""

    def __init__(
        self,
        engram: EngramV41,
        stream: Stream,
        projections: Projections,
        max_tokens: int,
        in_reach: Reach,
    ) -> None:
        self._engram, self._stream, self._projections = engram, stream, projections
        self._max_tokens, self._in_reach = max_tokens, in_reach
        with ExitStack() as made:
            self._control = _control_ring(engram, max_tokens, made)
            self._lanes = _lanes(engram, max_tokens * engram.geometry.kv_bytes, made)
            self._owned = made.pop_all()

    def read(self, slots: NDArray[np.int64], dead: NDArray[np.bool_], out: torch.Tensor) -> None:
        """Copy kv out of checked slots, and wait (see `Backend.read_kv`). Contiguous."""
        stream, control = self._stream, self._control
        after = self._projections.of(slots)
        if after is not None:
            stream.wait(after)
        for turn, piece in enumerate(pieces(len(slots), self._max_tokens)):
            lane, part = self._lanes[turn % _LANES], out[piece]
            count, to = len(part), lane.begin(part, in_place=self._in_reach(part))
            if fits_inline(count):
                places, flags = address_of(slots[piece]), address_of(dead[piece])
            else:
                places, flags = control.send(stream, slots[piece], dead[piece])
            self._engram.read_kv(count, to, stream, slots=places, is_dead=flags)
            if not fits_inline(count):
                control.release(stream)
            lane.end(stream)
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        """Free what kv passes through."""
        self._owned.close()


def _control_ring(engram: EngramV41, max_tokens: int, owner: ExitStack) -> ControlRing:
    ring = ControlRing(engram.native, control_bytes_of(engram.geometry, max_tokens), _CONTROLS)
    owner.callback(ring.close)
    return ring


def _lanes(engram: EngramV41, num_bytes: int, owner: ExitStack) -> list[Lane]:
    lanes = []
    for _ in range(_LANES):
        lanes.append(Lane(engram.native, num_bytes))
        owner.callback(lanes[-1].close)
    return lanes
