"""Which rows a sparse table of the true size holds: its edges, and the rows of a fixed text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engram_core.checkpoint.sources import NewTensor
from engram_core.geometry import EngramHashTables
from engram_core.hashing import EngramHasher

FLASH_TEXT = """\
The service holds two n-gram tables of 384 million rows; a model runner streams token ids to it.
这项服务保存两张各有三亿八千四百万行的表，并按词元的哈希值读取其中的行。
def gather(table: Table, ids: list[int]) -> list[Row]:
    return [table.row(i) for i in ids if 0 <= i < table.num_rows]
"""
"""The text whose rows a sparse checkpoint holds: from its first token on, no dead position."""

_EDGE_ROWS = 64
_WRAP_BYTES = 1 << 31


def sparse_rows(
    tables: EngramHashTables,
    layer_index: int,
    tokenizer: bytes,
    parts: Sequence[tuple[NewTensor, int]],
) -> NDArray[np.int64]:
    """List the rows to be written: int64 [n], ascending.

    tokenizer: content of the tokenizer.json that FLASH_TEXT is read with
    parts: tensors that make up a row (codes, scales), each with its offset in the file
    """
    num_rows = tables.table_rows[layer_index]
    chosen = [np.arange(_EDGE_ROWS), np.arange(num_rows - _EDGE_ROWS, num_rows)]
    for tensor, offset in parts:
        chosen += _rows_around_wraps(tensor, offset)
    chosen.append(_text_rows(tables, layer_index, tokenizer))
    ids = np.unique(np.concatenate(chosen))
    return ids[(ids >= 0) & (ids < num_rows)]


def _rows_around_wraps(tensor: NewTensor, offset: int) -> Iterator[NDArray[np.int64]]:
    """Give 64 rows around each multiple of 2^31 bytes, within the tensor and within the file."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    for base in (0, offset):
        first = -(-base // _WRAP_BYTES) * _WRAP_BYTES
        for wrap in range(first, base + tensor.num_bytes, _WRAP_BYTES):
            row = (wrap - base) // row_bytes
            yield np.arange(row - _EDGE_ROWS // 2, row + _EDGE_ROWS // 2)


def _text_rows(tables: EngramHashTables, layer_index: int, tokenizer: bytes) -> NDArray[np.int64]:
    """Hash FLASH_TEXT, and one dead position after it (the all-pad window)."""
    token_ids = np.array(Tokenizer.from_buffer(tokenizer).encode(FLASH_TEXT).ids, np.int64)
    hasher = EngramHasher(tables, len(token_ids) + 1)
    mask = np.arange(len(token_ids) + 1) < len(token_ids)
    return hasher.hash(np.append(token_ids, 0), 0, mask)[:, layer_index].reshape(-1)
