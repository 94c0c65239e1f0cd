"""Rows of a table on disk, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.device import Event, PinnedBuffer, Stream
from engram_core.backends.native import Native
from engram_core.tables import Table

_STAGES = 2


class DiskRows:
    """Reads rows into pinned memory in the order asked for; kernels gather them there in place.

    Two stages take turns: one is read into while the device still gathers from the other. One
    thread uses it.

    max_tokens: of one read; num_cols: rows a token
    """

    def __init__(self, native: Native, table: Table, num_cols: int, max_tokens: int) -> None:
        self._table = table
        most = max_tokens * num_cols
        with ExitStack() as made:
            self._stages = [
                PinnedBuffer(native, most * table.row_bytes + 16) for _ in range(_STAGES)
            ]
            self._read = [Event(native) for _ in range(_STAGES)]
            self._places = PinnedBuffer(native, most * 8)
            for part in (*self._stages, self._places):
                made.callback(part.close)
            for mark in self._read:
                made.callback(mark.close)
            self._owned = made.pop_all()
        self._places.bytes.view(np.int64)[:] = np.arange(most)
        self._turn = 0

    @property
    def places(self) -> int:
        """Address of the row ids to gather with `read`'s table: 0, 1, ..."""
        return self._places.address

    def read(self, hash_ids: NDArray[np.int64]) -> abi.Table:
        """Read the rows of ids, int64 [T, num_cols], into a table of just these; waits.

        Raises: RowOutOfRange, CheckpointError.
        """
        self._turn = (self._turn + 1) % _STAGES
        self._read[self._turn].wait()
        stage, count = self._stages[self._turn], hash_ids.size
        rows = stage.bytes[: count * self._table.row_bytes].reshape(count, self._table.row_bytes)
        rows[:] = self._table.gather_stored(hash_ids.reshape(-1))
        return abi.Table(
            format=abi.FORMATS[self._table.encoding],
            head_dim=self._table.head_dim,
            num_rows=count,
            codes=stage.address,
            scales=0,
        )

    def release(self, stream: Stream) -> None:
        """Say that the launches that gather from the last `read` are enqueued."""
        self._read[self._turn].record(stream)

    def close(self) -> None:
        """Free the stages. The table is its owner's to close."""
        self._owned.close()


def disk_readers(
    native: Native,
    tables: Sequence[Table | None],
    num_cols: int,
    max_tokens: int,
    owner: ExitStack,
) -> list[DiskRows | None]:
    """One a layer, None where its table lies in memory. `owner` closes them."""
    readers: list[DiskRows | None] = []
    for table in tables:
        reader = None
        if table is not None:
            reader = DiskRows(native, table, num_cols, max_tokens)
            owner.callback(reader.close)
        readers.append(reader)
    return readers
