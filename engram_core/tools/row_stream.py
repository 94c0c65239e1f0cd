"""Rows on their way from one file into another: as they are stored, or encoded anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.files import RegularFile
from engram_core.quant import row_format
from engram_core.tables import Part
from engram_core.tools.encode import Encode

_PIECE_BYTES = 1 << 20
"""Stored bytes of rows taken at a time: codes and scales meet in a core's second-level cache."""

_PIECE_VALUES = 1 << 18
"""Values encoded at a time: 1 MiB of float32 stays in a core's cache (4 MiB: Q8_0 at half)."""


@dataclass
class RowErrors:
    """Sums over finite values: of squared errors, of squares, and how many there are."""

    error: float = 0.0
    power: float = 0.0
    count: int = 0

    def add(self, other: RowErrors) -> None:
        """Add another's sums."""
        self.error += other.error
        self.power += other.power
        self.count += other.count


class RowStream(Protocol):
    """What is written as the rows of one tensor. piece_rows: how many to ask for at a time."""

    @property
    def row_bytes(self) -> int:
        """Of one row as it is written."""

    @property
    def piece_rows(self) -> int:
        """How many rows to ask for at a time."""

    def read_into(self, out: NDArray[np.uint8], first: int) -> RowErrors:
        """Fill rows first, first + 1, ... into uint8 [n, row_bytes], contiguous."""


class StoredRows:
    """Rows as they are stored, their parts side by side.

    parts: where each part of a row lies, and its open file
    """

    def __init__(self, parts: Sequence[tuple[Part, RegularFile]]) -> None:
        self.row_bytes = sum(part.row_bytes for part, _ in parts)
        self.piece_rows = max(1, _PIECE_BYTES // self.row_bytes)
        self._parts = tuple(parts)

    def read_into(self, out: NDArray[np.uint8], first: int) -> RowErrors:
        """Copy rows."""
        column = 0
        for part, file in self._parts:
            whole = part.row_bytes == self.row_bytes
            rows = out if whole else np.empty((len(out), part.row_bytes), np.uint8)
            file.read_into(part.offset + first * part.row_bytes, rows.reshape(-1).data, "rows")
            if not whole:
                out[:, column : column + part.row_bytes] = rows
            column += part.row_bytes
        return RowErrors()


class EncodedRows:
    """Rows decoded and encoded anew. encoding: of the source; target: what `encode` makes."""

    def __init__(
        self, source: StoredRows, encoding: str, target: str, head_dim: int, encode: Encode
    ) -> None:
        self.row_bytes = row_format(target).row_bytes(head_dim)
        self.piece_rows = max(1, _PIECE_VALUES // head_dim)
        self._source, self._encode = source, encode
        self._from, self._to = row_format(encoding), row_format(target)

    def read_into(self, out: NDArray[np.uint8], first: int) -> RowErrors:
        """Encode rows, and measure what that changed."""
        stored = np.empty((len(out), self._source.row_bytes), np.uint8)
        self._source.read_into(stored, first)
        values = self._from.dequantize(stored)
        out[:] = self._encode(values)
        return _errors(values, self._to.dequantize(out))


def fill(stream: RowStream, out: NDArray[np.uint8], begin: int) -> RowErrors:
    """Fill `out` with the bytes of a tensor from `begin` on, which may cut rows at both ends.

    Errors of a cut row are counted where it begins.
    """
    total, width = RowErrors(), stream.row_bytes
    row, inside = divmod(begin, width)
    at = min(-begin % width, len(out))
    if at:
        cut = _one_row(stream, row)[0]
        out[:at] = cut[inside : inside + at]
        row += 1
    while at + width <= len(out):
        count = min(stream.piece_rows, (len(out) - at) // width)
        total.add(stream.read_into(out[at : at + count * width].reshape(count, width), row))
        row, at = row + count, at + count * width
    if at < len(out):
        cut, errors = _one_row(stream, row)
        total.add(errors)
        out[at:] = cut[: len(out) - at]
    return total


def _one_row(stream: RowStream, row: int) -> tuple[NDArray[np.uint8], RowErrors]:
    out = np.empty((1, stream.row_bytes), np.uint8)
    return out[0], stream.read_into(out, row)


def _errors(values: NDArray[np.float32], encoded: NDArray[np.float32]) -> RowErrors:
    """Sum squares by row in float32, then in float64. No BLAS: its threads would fight ours."""
    with np.errstate(all="ignore"):
        difference = encoded - values
        sums = [np.einsum("ij,ij->i", v, v).sum(dtype=np.float64) for v in (difference, values)]
    if np.isfinite(sums).all():
        return RowErrors(float(sums[0]), float(sums[1]), values.size)
    finite = np.isfinite(difference)
    error, power = (np.square(v[finite], dtype=np.float64).sum() for v in (difference, values))
    return RowErrors(float(error), float(power), int(finite.sum()))
