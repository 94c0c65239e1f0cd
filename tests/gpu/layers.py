"""A whole layer on the device for tests, of any geometry and row format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.engram_v41 import DeviceLayer, EngramV41
from engram_core.geometry import EngramHashTables, Geometry
from tests.gpu.arrays import Arrays

VOCAB = 1000


def hash_tables(base_size: int, num_layers: int = 1, num_heads: int = 8) -> EngramHashTables:
    layer_ids = [1, 14, 30][:num_layers]
    return EngramHashTables.derive(layer_ids, 4, num_heads, base_size, np.arange(VOCAB), 2)


def geometry_of(
    tables: EngramHashTables, *, dim: int, hc_mult: int = 4, head_dim: int = 256
) -> Geometry:
    return Geometry(
        layer_ids=tables.layer_ids,
        max_ngram_size=tables.max_ngram_size,
        num_heads=tables.num_heads,
        head_dim=head_dim,
        dim=dim,
        hc_mult=hc_mult,
        eps=1e-20,
        table_rows=tables.table_rows,
    )


@dataclass
class HostLayer:
    """What the layer was made of. rows: uint8 [num_rows, row_bytes]; wkv bfloat16; qk float32"""

    encoding: str
    rows: NDArray[np.uint8]
    wkv: torch.Tensor
    qk: torch.Tensor
    requantize_input: bool = False


def random_layer(
    geometry: Geometry, seed: int, *, requantize_input: bool = False, layer_index: int = 0
) -> HostLayer:
    """BF16 rows of about unit size: every bit of the table counts in the result."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = geometry.table_rows[layer_index]
    rows = torch.randn((num_rows, geometry.head_dim), generator=generator).to(torch.bfloat16)
    wkv = torch.randn((geometry.out_features, geometry.in_features), generator=generator)
    wkv = (wkv * geometry.in_features**-0.5).to(torch.bfloat16)
    qk = 1 + 0.05 * torch.randn((geometry.hc_mult, geometry.dim), generator=generator)
    stored = rows.view(torch.uint8).numpy().reshape(num_rows, -1)
    return HostLayer("BF16", stored, wkv, qk, requantize_input)


def device_engram(
    arrays: Arrays,
    geometry: Geometry,
    tables: EngramHashTables,
    layers: list[HostLayer],
    *,
    max_tokens: int,
    num_slots: int,
) -> EngramV41:
    """An EngramV41 over copies of the layers; close it."""
    engram = EngramV41(arrays.native, geometry, tables, max_tokens=max_tokens, num_slots=num_slots)
    for layer in layers:
        engram.add_layer(device_layer(arrays, layer))
    return engram


def device_layer(arrays: Arrays, layer: HostLayer) -> DeviceLayer:
    return DeviceLayer(
        encoding=layer.encoding,
        num_rows=len(layer.rows),
        table_parts=[arrays.up(layer.rows)],
        wkv=arrays.up(layer.wkv),
        qk=arrays.up(layer.qk),
        requantize_input=layer.requantize_input,
    )


def random_windows(count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, 4), dtype=np.int32)
