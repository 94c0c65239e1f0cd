"""The layer on the CPU, in plain torch: the definition of what is right, and the embedded default.

The gate alone is libengram_cpu's where it was built (`cpu.py`), torch's (`gate.py`) elsewhere. A
token's bits do not depend on the batch it comes in. torch does not promise that: `projection.py`
and `gate.py` say what had to be done, `self_check.py` measures that it worked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.arguments import require, require_slots, require_tensor
from engram_core.backends.base import NearBatches, NearRead, StageObserver, Unobserved
from engram_core.backends.cpu import make_gate, near_reads
from engram_core.backends.projection import PROJECT_TOKENS, Projection, product_dtype
from engram_core.backends.self_check import check_gate, check_projection, check_sigmoid
from engram_core.engine_types import BESIDE_TOKENS
from engram_core.errors import BadTensor, CheckpointError
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import hash_windows
from engram_core.host_memory import HostMemory, PlainMemory
from engram_core.quant import requantize
from engram_core.tables import Table
from engram_core.weights import EngramLayerWeights


class ReferenceBackend:
    """Implements `backends.base.Backend`.

    tables, weights: one a layer, in the order of geometry.layer_ids
    num_slots: kv slots; their memory is reserved here and becomes resident as it is written

    Without bfloat16 products `wkv` is kept as float32: twice the memory. Nothing is copied to a
    device, so `observer` hears of no h2d and no d2h.
    """

    name = "reference"

    def __init__(
        self,
        geometry: Geometry,
        hash_tables: EngramHashTables,
        tables: Sequence[Table],
        weights: Sequence[EngramLayerWeights],
        num_slots: int,
    ) -> None:
        _check_parts(geometry, hash_tables, tables, weights)
        self.geometry = geometry
        self.hash_tables = hash_tables
        self.num_slots = num_slots
        self.observer: StageObserver = Unobserved()
        self.serving = threading.Lock()
        self.encodings = tuple(table.encoding for table in tables)
        self.row_bytes = tuple(table.row_bytes for table in tables)
        self.host_memory: HostMemory = PlainMemory()
        self._tables = tuple(tables)
        self._requantize = tuple(layer.requantize_input for layer in weights)
        self._gates = tuple(make_gate(geometry, layer.qk) for layer in weights)
        dtype = product_dtype()
        self._projections = tuple(Projection(layer.wkv, dtype) for layer in weights)
        self._beside = tuple(each.beside(BESIDE_TOKENS) for each in self._projections)
        self._kv = torch.empty((num_slots, geometry.out_features), dtype=torch.bfloat16)
        self.near_batches: NearBatches | None = None
        self.near_reads: Sequence[NearRead] = near_reads(self._gates, hash_tables, self._kv)
        self.numerics: Mapping[str, str] = {
            "wkv": f"{str(dtype).removeprefix('torch.')} matrix product, one float32 accumulator "
            f"rounded once; {self._projections[0].cut.told}; bits do not depend on the batch",
            "gate": self._gates[0].numerics,
            "wkv_input": "e4m3 per 32 values" if any(self._requantize) else "bfloat16 rows",
        }

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows, dequantised or as stored (see `Backend.rows`)."""
        table = self._tables[layer_index]
        width, dtype = (
            (table.row_bytes, torch.uint8) if stored else (table.head_dim, torch.bfloat16)
        )
        require_tensor("out", out, (dtype,), (*hash_ids.shape, width))
        for piece in _pieces(len(hash_ids), PROJECT_TOKENS):
            ids = hash_ids[piece].reshape(-1)
            rows = torch.from_numpy(table.gather_stored(ids)) if stored else table.gather(ids)
            out[piece] = rows.view(-1, hash_ids.shape[1], width)

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute kv into slots (see `Backend.project`)."""
        self._project(self._projections, layer_index, slots, windows, hash_ids)

    def project_beside(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute kv into slots beside `project` (see `Backend.project_beside`)."""
        self._project(self._beside, layer_index, slots, windows, hash_ids)

    def _project(
        self,
        projections: Sequence[Projection],
        layer_index: int,
        slots: NDArray[np.int64],
        windows: NDArray[np.int32] | None,
        hash_ids: NDArray[np.int64] | None,
    ) -> None:
        if (windows is None) == (hash_ids is None):
            raise BadTensor("project: give exactly one of windows and hash_ids")
        require_slots(slots, self.num_slots)
        begun = time.perf_counter()
        wkv_s = 0.0
        if hash_ids is None:
            assert windows is not None
            hash_ids = hash_windows(windows, self.hash_tables, [layer_index])[:, 0]
        require("hash_ids", hash_ids, np.int64, (len(slots), self.geometry.n_hash_cols))
        for piece in _pieces(len(slots), PROJECT_TOKENS):
            rows = self._tables[layer_index].gather(hash_ids[piece].reshape(-1))
            rows = rows.view(-1, self.geometry.in_features)
            if self._requantize[layer_index]:
                rows = requantize(rows)
            gathered = time.perf_counter()
            kv = projections[layer_index](rows)
            self._kv.index_copy_(0, torch.from_numpy(slots[piece]), kv)
            wkv_s += time.perf_counter() - gathered
        self.observer.part("hash_gather", time.perf_counter() - begun - wkv_s)
        self.observer.part("wkv", wkv_s)

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        """Copy kv out of slots (see `Backend.read_kv`). Slots of dead positions are not read."""
        hc_mult, dim = self.geometry.hc_mult, self.geometry.dim
        require_tensor("out", out, (torch.bfloat16,), (len(slots), hc_mult + 1, dim))
        require("dead", dead, np.bool_, (len(slots),))
        live = np.flatnonzero(~dead)
        require_slots(slots[live], self.num_slots)
        for piece in _pieces(len(live), PROJECT_TOKENS):
            out.index_copy_(0, torch.from_numpy(live[piece]), self._read(slots[live[piece]]))
        places = torch.from_numpy(np.flatnonzero(dead))
        out[places, :hc_mult] = 0.0
        out[places, hc_mult] = -0.0

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value (see `Backend.gate`). Dead positions are copied, never computed."""
        shape = (len(slots), self.geometry.hc_mult, self.geometry.dim)
        require_tensor("residual", residual, (torch.bfloat16, torch.float32), shape)
        require_tensor("out", out, (residual.dtype,), shape)
        require("dead", dead, np.bool_, (len(slots),))
        require_slots(slots[~dead], self.num_slots)
        self._gates[layer_index].update(self._kv, slots, dead, residual, out)

    def self_check(self) -> None:
        """Look rows up, and compare bits over batch sizes. Raises: SelfCheckFailed."""
        for table in self._tables:
            table.gather(np.array([0, table.num_rows - 1]))
        generator = torch.Generator().manual_seed(0)
        check_sigmoid(generator)
        check_projection(self._projections[0], generator)
        check_gate(self._gates[0], self.geometry, generator)

    def close(self) -> None:
        """Free tables, weights and slots."""
        for table in self._tables:
            table.close()
        self._tables, self._projections, self._beside, self.near_reads = (), (), (), ()
        self._kv = torch.empty(0)

    def _read(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Gather slots: bfloat16 [n, hc_mult + 1, dim]."""
        kv = self._kv.index_select(0, torch.from_numpy(slots))
        return kv.view(-1, self.geometry.hc_mult + 1, self.geometry.dim)


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _check_parts(
    geometry: Geometry,
    hash_tables: EngramHashTables,
    tables: Sequence[Table],
    weights: Sequence[EngramLayerWeights],
) -> None:
    """Refuse parts that are not of one checkpoint, before any memory is taken."""
    hash_tables.require(table_rows=geometry.table_rows)
    rows = tuple(table.num_rows for table in tables)
    layer_ids = tuple(layer.layer_id for layer in weights)
    head_dims = {table.head_dim for table in tables}
    for name, expected, got in (
        ("table rows", geometry.table_rows, rows),
        ("layers with weights", geometry.layer_ids, layer_ids),
        ("layers with hash constants", geometry.layer_ids, hash_tables.layer_ids),
        ("hash columns", geometry.n_hash_cols, hash_tables.n_hash_cols),
        ("row values", {geometry.head_dim}, head_dims),
    ):
        if expected != got:
            message = f"{name}: expected {expected}, got {got}"
            raise CheckpointError(message, expected=expected, got=got)
    for layer in weights:
        layer.require(geometry)
