"""Rows by id: tables on disk or in memory, and a table sharded over its rows."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engram_core.errors import BadTensor, CheckpointError, RowOutOfRange
from engram_core.quant import RowFormat, row_format, to_bf16

_DECODE_ROWS = 1024
"""Rows dequantised at a time: 256 values of 4 bytes each stay in a core's second-level cache."""

_READERS = 16
"""Reads in flight: a cold read takes about 100 us, whatever its size."""

_READER_ROWS = 64
"""Rows one reader takes at a time; fewer rows than that are read by the caller's own thread."""


@dataclass(frozen=True)
class Part:
    """A run of equally long rows in one file: row i lies at offset + i * row_bytes."""

    path: Path
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class TableSource:
    """One layer's table: `num_rows` rows of `row_bytes` bytes in `encoding` (a name of `quant`).

    parts: in the order in which they make up a stored row: one, or codes then scales
    """

    encoding: str
    num_rows: int
    row_bytes: int
    parts: tuple[Part, ...]


class Table(Protocol):
    """The rows of one layer. encoding: a name of `quant`; row_bytes: of an assembled row."""

    num_rows: int
    row_bytes: int
    encoding: str
    head_dim: int

    def gather_stored(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read rows as stored. Raises: RowOutOfRange before anything is read.

        ids: int64 [n]; Returns: uint8 [n, row_bytes]
        """

    def gather(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Read rows, dequantised. Raises: RowOutOfRange before anything is read.

        ids: int64 [n]; Returns: bfloat16 [n, head_dim]
        """

    def close(self) -> None:
        """Free what the table holds."""


class _Rows(ABC):
    """What tables share: the range check, rows asked for twice, dequantisation."""

    def __init__(self, encoding: str, num_rows: int, head_dim: int) -> None:
        self.form: RowFormat = row_format(encoding)
        self.encoding = encoding
        self.num_rows = num_rows
        self.head_dim = head_dim
        self.row_bytes = self.form.row_bytes(head_dim)

    def gather_stored(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        distinct, places = self._distinct(ids)
        return self._read(distinct)[places]

    def gather(self, ids: NDArray[np.int64]) -> torch.Tensor:
        distinct, places = self._distinct(ids)
        stored = self._read(distinct)
        rows = torch.empty((len(distinct), self.head_dim), dtype=torch.bfloat16)
        for start in range(0, len(distinct), _DECODE_ROWS):
            piece = slice(start, start + _DECODE_ROWS)
            rows[piece] = to_bf16(self.form.dequantize(stored[piece]))
        return rows.index_select(0, torch.from_numpy(places))

    @abstractmethod
    def close(self) -> None:
        """Free what the table holds."""

    @abstractmethod
    def _read(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read distinct rows, ascending, all inside the table."""

    def _distinct(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        check_rows(ids, self.num_rows)
        distinct, places = np.unique(ids, return_inverse=True)
        return distinct.astype(np.int64), places.astype(np.int64)


class HostTable(_Rows):
    """A table in memory.

    parts: uint8 [num_rows, part_bytes] each, in row order: one, or codes and scales
    """

    def __init__(self, encoding: str, head_dim: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        super().__init__(encoding, len(parts[0]), head_dim)
        shapes = [list(part.shape) for part in parts]
        fits = all(part.dtype == np.uint8 and part.ndim == 2 for part in parts)
        fits = fits and all(len(part) == self.num_rows for part in parts)
        if not fits or sum(part.shape[1] for part in parts) != self.row_bytes:
            expected = f"uint8 [{self.num_rows}, {self.row_bytes}] in all"
            raise BadTensor(
                f"{encoding} table: expected {expected}, got {shapes}",
                expected=expected,
                got=shapes,
            )
        self._parts = tuple(parts)

    def _read(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.concatenate([part[ids] for part in self._parts], axis=1)

    def close(self) -> None:
        """Give the memory back."""
        self._parts = ()


class DiskTable(_Rows):
    """A table read row by row from its files, for tables larger than memory.

    Reads by position, never through a mapping: a file that shrank is an error here and would be
    a SIGBUS there. Raises: CheckpointError naming file and offset.
    """

    def __init__(self, source: TableSource, head_dim: int) -> None:
        super().__init__(source.encoding, source.num_rows, head_dim)
        widths = [part.row_bytes for part in source.parts]
        if sum(widths) != self.row_bytes:
            raise CheckpointError(
                f"{source.encoding} rows of {head_dim} values: expected {self.row_bytes} bytes, "
                f"got parts of {widths}",
                expected=self.row_bytes,
                got=widths,
            )
        self._parts = source.parts
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="engram-rows")
        self._files: list[int] = []
        try:
            for part in self._parts:
                self._files.append(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC))
                _check_extent(part, self._files[-1], self.num_rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files and end the readers."""
        self._readers.shutdown()
        while self._files:
            os.close(self._files.pop())

    def _read(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        pieces = []
        for part, file in zip(self._parts, self._files, strict=True):
            rows = np.empty((len(ids), part.row_bytes), dtype=np.uint8)
            if len(ids) <= _READER_ROWS:
                _read_rows(part, file, ids, rows)
            else:
                starts = range(0, len(ids), _READER_ROWS)
                cuts = [slice(start, start + _READER_ROWS) for start in starts]
                jobs = [self._readers.submit(_read_rows, part, file, ids[c], rows[c]) for c in cuts]
                for job in jobs:
                    job.result()
            pieces.append(rows)
        return np.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]


def check_rows(ids: NDArray[np.int64], num_rows: int) -> None:
    """Refuse ids outside 0..num_rows-1. Raises: RowOutOfRange naming the first; BadTensor."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        got = f"{ids.dtype} {list(ids.shape)}"
        raise BadTensor(f"row ids: expected int64 [n], got {got}", expected="int64 [n]", got=got)
    # Seen as unsigned, a negative id is a huge one: it never indexes the table from its end.
    bad = ids.view(np.uint64) >= num_rows
    if bad.any():
        index = int(bad.argmax())
        raise RowOutOfRange(
            f"row id {ids[index]} (index {index}): expected 0..{num_rows - 1}",
            expected=f"0..{num_rows - 1}",
            got=int(ids[index]),
            index=index,
        )


def _check_extent(part: Part, file: int, num_rows: int) -> None:
    end, size = part.offset + num_rows * part.row_bytes, os.fstat(file).st_size
    if end > size:
        raise CheckpointError(
            f"{part.path}: {num_rows} rows end at byte {end}, the file has {size}",
            expected=end,
            got=size,
        )


def _read_rows(part: Part, file: int, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Read ascending rows into out [n, row_bytes], neighbours with one call."""
    if not len(ids):
        return
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(ids)]
    buffer, width = out.reshape(-1).data, part.row_bytes
    for first, last in pairwise(bounds):
        # Python integers: no product overflows, whatever the table's size.
        offset = part.offset + int(ids[first]) * width
        _read_fully(part.path, file, buffer[first * width : last * width], offset)


def _read_fully(path: Path, file: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.preadv(file, [buffer], offset)
        if count == 0:
            raise CheckpointError(
                f"{path}: expected {len(buffer)} more bytes at offset {offset}, "
                "the file ends there",
                expected=len(buffer),
                got=0,
            )
        buffer, offset = buffer[count:], offset + count


def shard_range(num_rows: int, rank: int, world_size: int) -> range:
    """Rows that a rank holds: ceil division, so that the last shard may be short.

    Raises: BadTensor for a rank outside the world, or a world in which a rank would hold none.
    """
    size = -(-num_rows // world_size) if world_size >= 1 else 0
    if world_size < 1 or not 0 <= rank < world_size or (world_size - 1) * size >= num_rows:
        raise BadTensor(
            f"{num_rows} rows cannot be sharded for rank {rank} of {world_size}: "
            "expected a rank in the world, and rows for every rank",
            expected="rows for every rank",
            got=[num_rows, rank, world_size],
        )
    return range(rank * size, min((rank + 1) * size, num_rows))


class ParallelEngramEmbedding(nn.Module):
    """A table sharded over its rows: every rank looks up what it holds, the sum is the answer.

    table: this rank's rows (`shard_range`); num_embeddings: rows of the whole table
    all_reduce: sums a uint8 tensor over the ranks, in place; None leaves the partial rows, in
        which other ranks' rows are zero

    Source: `ParallelEngramEmbedding` of the reference. Two deviations: an id outside the whole
    table is refused at every world size (there it reads row 0 or zeros), and bytes are summed
    instead of bfloat16 (exactly one rank's are not zero), since -0.0 + 0.0 is +0.0 and a shard
    alone answers -0.0.
    """

    def __init__(
        self,
        table: Table,
        num_embeddings: int,
        rank: int = 0,
        world_size: int = 1,
        all_reduce: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings = num_embeddings
        self.dim = table.head_dim
        self.world_size = world_size
        self.shard = shard_range(num_embeddings, rank, world_size)
        self.all_reduce = all_reduce
        if table.num_rows != len(self.shard):
            raise BadTensor(
                f"rank {rank} of {world_size}: expected {len(self.shard)} rows, "
                f"got {table.num_rows}",
                expected=len(self.shard),
                got=table.num_rows,
            )

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look rows up: int64 [...] -> bfloat16 [..., dim]. Raises: RowOutOfRange."""
        ids = indices.reshape(-1).numpy()
        check_rows(ids, self.num_embeddings)
        held = (ids >= self.shard.start) & (ids < self.shard.stop)
        values = torch.zeros((len(ids), self.dim), dtype=torch.bfloat16)
        values[torch.from_numpy(held)] = self.table.gather(ids[held] - self.shard.start)
        if self.world_size > 1 and self.all_reduce is not None:
            self.all_reduce(values.view(torch.uint8))
        return values.reshape(*indices.shape, self.dim)
