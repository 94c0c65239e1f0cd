"""From a checkpoint to a backend that serves it: placement, weights, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Backend
from engram_core.backends.projection import projection_bytes
from engram_core.backends.reference import ReferenceBackend
from engram_core.checkpoint.dense import read_matrix_chunks, read_qk
from engram_core.checkpoint.files import RegularFile
from engram_core.checkpoint.sources import Checkpoint, LayerSource
from engram_core.errors import EngramError, SchemaError
from engram_core.geometry import Geometry
from engram_core.meminfo import host_available_bytes, host_swap_used_bytes
from engram_core.memory import (
    HELD_ID_BYTES,
    Budget,
    Ledger,
    Measured,
    Memory,
    Needs,
    Placement,
    plan,
)
from engram_core.progress import Progress
from engram_core.quant import to_bf16
from engram_core.tables import DiskTable, HostTable, Part, Table, TableSource
from engram_core.weights import EngramLayerWeights

_CHUNK_BYTES = 64 << 20
_CUDA_MODULE = "engram_core.backends.cuda"


def load(
    checkpoint: Checkpoint,
    *,
    device: str = "cpu",
    placement: str = "auto",
    num_slots: int,
    budget: Budget | None = None,
    progress: Progress | None = None,
    graphs: str = "auto",
) -> Backend:
    """Load a checkpoint onto a device.

    device: "cpu" or "cuda:N"; placement: auto, device, host or disk; num_slots: of the kv store
    graphs: CUDA graphs of small batches, "auto" or "off"; a CPU has none

    Raises: MemoryShort before anything is loaded; CheckpointError; EngramError without the device.
    """
    budget, progress = budget or Budget(), progress or (lambda *_: None)
    if device.startswith("cuda"):
        backend: Backend = _cuda_loader()(
            checkpoint,
            device=device,
            placement=placement,
            num_slots=num_slots,
            budget=budget,
            progress=progress,
            graphs=graphs,
        )
        return backend
    if device != "cpu":
        expected = "cpu or cuda:N"
        raise SchemaError(f"device: expected {expected}, got {device!r}", expected=expected)
    ledger = ledger_on_cpu(checkpoint, num_slots=num_slots, placement=placement, budget=budget)
    geometry = checkpoint.geometry
    with ExitStack() as opened:
        tables = []
        for layer in checkpoint.layers:
            table = table_from_source(layer, geometry, ledger.placement, progress)
            opened.callback(table.close)
            tables.append(table)
        weights = [weights_from_source(layer, geometry, progress) for layer in checkpoint.layers]
        loaded = ReferenceBackend(geometry, checkpoint.hash_tables, tables, weights, num_slots)
        opened.pop_all()  # the backend closes them
    return loaded


def ledger_on_cpu(
    checkpoint: Checkpoint,
    *,
    num_slots: int,
    placement: str = "auto",
    budget: Budget | None = None,
    memory: Memory | None = None,
    measured: Measured | None = None,
) -> Ledger:
    """Decide where the tables lie on a CPU, and what that takes. Raises: MemoryShort.

    memory: readings; left out, those of this machine; measured: see `plan`
    """
    budget = budget or Budget()
    needs = needs_of(checkpoint, num_slots=num_slots, budget=budget)
    memory = memory or Memory(host_available_bytes(), swap_used_bytes=host_swap_used_bytes())
    return plan(needs, memory, placement, measured=measured)


def needs_of(checkpoint: Checkpoint, *, num_slots: int, budget: Budget) -> Needs:
    """Add up what the reference backend holds."""
    wkv, workspaces = projection_bytes(checkpoint.geometry)
    return Needs(
        tables=sum(layer.table.num_rows * layer.table.row_bytes for layer in checkpoint.layers),
        wkv=wkv,
        kv_store=num_slots * checkpoint.geometry.kv_bytes,
        workspaces=workspaces,
        in_flight=budget.in_flight_bytes,
        held_ids=budget.held_tokens * HELD_ID_BYTES,
        reserve=budget.reserve_bytes,
        shared=budget.shared_bytes,
    )


def weights_from_source(
    layer: LayerSource, geometry: Geometry, progress: Progress | None = None
) -> EngramLayerWeights:
    """Read wkv, q and k: every type is decoded to float32 and rounded once to bfloat16.

    Holds a chunk of 16 MiB beside the result. Raises: CheckpointError.
    """
    wkv = torch.empty((geometry.out_features, geometry.in_features), dtype=torch.bfloat16)
    what, total = f"layer {layer.layer_id} wkv", wkv.numel() * 2
    for first, rows in read_matrix_chunks(layer.wkv):
        wkv[first : first + len(rows)] = to_bf16(rows)
        if progress is not None:
            progress(what, (first + len(rows)) * geometry.in_features * 2, total)
    qk = torch.from_numpy(read_qk(layer.q, layer.k))
    return EngramLayerWeights(layer.layer_id, wkv, qk, layer.requantize_input)


def table_from_source(
    layer: LayerSource, geometry: Geometry, placement: Placement, progress: Progress
) -> Table:
    """Open a table on disk, or read it into memory."""
    if placement is Placement.DISK:
        return DiskTable(layer.table, geometry.head_dim)
    total = layer.table.num_rows * layer.table.row_bytes
    done = 0
    parts = []
    for part in layer.table.parts:
        rows = np.empty((layer.table.num_rows, part.row_bytes), np.uint8)
        for count in _read_part(part, layer.table, rows):
            done += count
            progress(f"layer {layer.layer_id} table", done, total)
        parts.append(rows)
    return HostTable(layer.table.encoding, geometry.head_dim, parts)


def _read_part(part: Part, table: TableSource, rows: NDArray[np.uint8]) -> Iterator[int]:
    """Fill `rows` in pieces; yields the bytes of each."""
    buffer = rows.reshape(-1).data
    with RegularFile(part.path) as file:
        for start in range(0, len(buffer), _CHUNK_BYTES):
            piece = buffer[start : start + _CHUNK_BYTES]
            file.read_into(part.offset + start, piece, f"{table.encoding} table")
            yield len(piece)


def _cuda_loader() -> Callable[..., Backend]:
    """Find the CUDA backend, which this build may not have."""
    if find_spec(_CUDA_MODULE) is None:
        raise EngramError(
            "device: this build has no CUDA backend; use device cpu, or install a build with one",
            expected="cpu",
            got="cuda",
        )
    load_cuda: Callable[..., Backend] = import_module(_CUDA_MODULE).load
    return load_cuda
