"""The identity of a table: what tells two checkpoints apart that answer differently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.checkpoint.dense import read_matrix_rows, read_qk, read_stored_rows
from engram_core.checkpoint.files import RegularFile
from engram_core.checkpoint.sources import LayerSource
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.quant import QUANT_GROUP, to_bf16
from engram_core.tables import TableSource

NUM_SAMPLED_ROWS = 64

ReadRows = Callable[[TableSource, Sequence[int]], NDArray[np.uint8]]


def sampled_row_ids(num_rows: int) -> list[int]:
    """List the rows that are sampled: first and last among them, evenly spread."""
    most = min(NUM_SAMPLED_ROWS, num_rows)
    return sorted({i * (num_rows - 1) // max(most - 1, 1) for i in range(most)})


def identity_of(
    geometry: Geometry,
    tables: EngramHashTables,
    layers: Sequence[LayerSource],
    read_rows: ReadRows = read_stored_rows,
) -> str:
    """Hash constants, shapes, types and sampled values: 64 hex digits.

    The same values in the same encoding have the same identity, whatever file holds them: rows
    count as stored, wkv as the bfloat16 it becomes, q and k as their product. eps counts as
    float32, as the gate uses it (a GGUF file holds no more).

    read_rows: gives the sampled rows, for a table that is still to be written
    """
    digest = hashlib.sha256(b"engram identity 1\n")
    digest.update(json.dumps(_constants(geometry, tables)).encode())
    for array in (tables.token_map, tables.multipliers, tables.primes):
        digest.update(array.astype("<i8").tobytes())
    for layer in layers:
        _add_layer(digest, layer, read_rows)
    return digest.hexdigest()


def _constants(geometry: Geometry, tables: EngramHashTables) -> list[object]:
    g = geometry
    sizes = [g.max_ngram_size, g.num_heads, g.head_dim, g.dim, g.hc_mult]
    eps = np.float32(g.eps).tobytes().hex()
    return [list(g.layer_ids), sizes, list(g.table_rows), eps, tables.pad_id, tables.vocab_size]


def _add_layer(digest: hashlib._Hash, layer: LayerSource, read_rows: ReadRows) -> None:
    table, wkv = layer.table, layer.wkv
    described = [layer.layer_id, table.encoding, table.num_rows, table.row_bytes]
    digest.update(json.dumps([*described, layer.requantize_input]).encode())
    digest.update(read_rows(table, sampled_row_ids(table.num_rows)).tobytes())
    num_blocks = -(-wkv.shape[0] // QUANT_GROUP)
    with RegularFile(wkv.path) as file:
        for block in sorted({0, num_blocks // 2, num_blocks - 1}):
            first = block * QUANT_GROUP
            count = min(QUANT_GROUP, wkv.shape[0] - first)
            rows = to_bf16(read_matrix_rows(file, wkv, first, count))
            digest.update(rows.view(torch.uint8).numpy().tobytes())
    digest.update(read_qk(layer.q, layer.k).astype("<f4").tobytes())
