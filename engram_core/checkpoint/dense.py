"""Dense tensors (wkv, q, k) and single rows, read and decoded from where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.files import RegularFile
from engram_core.checkpoint.sources import TensorSource
from engram_core.quant import QUANT_GROUP, dequantize_fp8_matrix, row_format
from engram_core.tables import TableSource

CHUNK_VALUES = 1 << 22
"""Values decoded at a time: 16 MiB of float32."""


def read_matrix(source: TensorSource) -> NDArray[np.float32]:
    """Read and decode a whole matrix: float32 [rows, columns]."""
    return np.concatenate([rows for _, rows in read_matrix_chunks(source)])


def read_qk(q: TensorSource, k: TensorSource) -> NDArray[np.float32]:
    """Read q and k and multiply them: float32 [hc_mult, dim], exact for bfloat16 values."""
    with np.errstate(all="ignore"):  # a file may hold any bits
        product: NDArray[np.float32] = read_matrix(q) * read_matrix(k)
    return product


def read_matrix_chunks(source: TensorSource) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Read and decode a matrix by chunks of rows: (first row, float32 [n, columns]).

    Raises: CheckpointError when the file ends before the data.
    """
    num_rows, num_columns = source.shape
    step = max(QUANT_GROUP, CHUNK_VALUES // num_columns // QUANT_GROUP * QUANT_GROUP)
    with RegularFile(source.path) as file:
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            yield first, read_matrix_rows(file, source, first, count)


def read_matrix_rows(
    file: RegularFile, source: TensorSource, first: int, count: int
) -> NDArray[np.float32]:
    """Read and decode `count` rows from `first` on (for FP8 a multiple of 32)."""
    codes = _read_bytes(file, source, first, count)
    if source.scale is None:
        return row_format(source.type).dequantize(codes)
    first_block = first // QUANT_GROUP
    last_block = (first + count - 1) // QUANT_GROUP
    with RegularFile(source.scale.path) as scale_file:
        num_blocks = last_block - first_block + 1
        scales = _read_bytes(scale_file, source.scale, first_block, num_blocks)
    is_float = source.scale.type == "F32"
    return dequantize_fp8_matrix(codes, scales.view("<f4") if is_float else scales)


def read_stored_rows(table: TableSource, row_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Read a few rows as stored: uint8 [n, row_bytes], the parts of a row side by side."""
    rows = np.empty((len(row_ids), table.row_bytes), np.uint8)
    column = 0
    for part in table.parts:
        with RegularFile(part.path) as file:
            for i, row_id in enumerate(row_ids):
                offset = part.offset + int(row_id) * part.row_bytes
                raw = file.read(offset, part.row_bytes, f"row {row_id}")
                rows[i, column : column + part.row_bytes] = np.frombuffer(raw, np.uint8)
        column += part.row_bytes
    return rows


def _read_bytes(
    file: RegularFile, source: TensorSource, first: int, count: int
) -> NDArray[np.uint8]:
    row_bytes = source.num_bytes // source.shape[0]
    raw = file.read(source.offset + first * row_bytes, count * row_bytes, source.name)
    return np.frombuffer(raw, np.uint8).reshape(count, row_bytes)
