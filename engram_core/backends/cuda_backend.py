"""The CUDA backend: tables, wkv and kv slots resident on one device.

`gate` and `read_kv` may run beside a `project` into other slots, and beside each other.

Three queues: projections (work ahead) on a low-priority stream, gates and kv read-outs on an
urgent one, rows on a third. A projection is enqueued in chunks and not waited for; a gate waits on
the device for exactly those projections that its slots come from.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.arguments import (
    live_slots,
    require,
    require_rows,
    require_slots,
    require_tensor,
)
from engram_core.backends.base import NearBatches, NearRead, Project, StageObserver, Unobserved
from engram_core.backends.choices import choose_graphs, choose_kernels, open_gemm
from engram_core.backends.cpu import find_library
from engram_core.backends.cuda_check import check_gate, check_projection
from engram_core.backends.cuda_near import CudaNear, CudaNearRead, NearProjector
from engram_core.backends.device import PinnedBuffer, Stream
from engram_core.backends.engram_v41 import DeviceLayer, EngramV41
from engram_core.backends.graphs import Graphs, GraphUse
from engram_core.backends.host_gates import MAPPED_TOKENS, HostGates
from engram_core.backends.native import INLINE_TOKENS, Device, Native
from engram_core.backends.pinned import PinnedMemory
from engram_core.backends.project_queue import ProjectQueue
from engram_core.backends.projections import Projections
from engram_core.backends.read_outs import KvReadOut, RowReadOut
from engram_core.backends.staging import pieces
from engram_core.backends.timing import ProjectionTimer
from engram_core.errors import BadTensor, EngramError, Internal
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.host_memory import HostMemory, PlainMemory

_Owned = TypeVar(
    "_Owned", Stream, HostGates, KvReadOut, Projections, ProjectionTimer, ProjectQueue, RowReadOut
)
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True)
class Sizes:
    """Bounds of the backend's launches and buffers, in tokens.

    chunk_tokens: of one projection; cublasLt is 24 % slower in chunks of 256 than of 2048
    spare_sms: left free by projections, so that an urgent gate does not wait for their end
    lane_tokens: of one piece of kv or rows
    num_lanes: pieces of a gate in flight, and threads that copy pageable residuals
    """

    chunk_tokens: int = 2048
    spare_sms: int = 8
    lane_tokens: int = 128
    num_lanes: int = 16


NEAR_LANES = 4
"""Pieces in flight of a read that the asking thread makes."""


class CudaBackend:
    """Implements `backends.base.Backend` on one CUDA device.

    layers: in the order of geometry.layer_ids; the backend frees them
    device: its properties (integrated: CPU and GPU share memory, used in place at every size)

    Raises: Unsupported, BadTensor.
    """

    name = "cuda"
    observer: StageObserver = Unobserved()
    near_reads: Sequence[NearRead] = ()
    near_batches: NearBatches | None = None
    project_beside: Project | None = None

    def __init__(
        self,
        native: Native,
        geometry: Geometry,
        hash_tables: EngramHashTables,
        layers: Sequence[DeviceLayer],
        num_slots: int,
        *,
        device: Device | None = None,
        device_index: int = 0,
        sizes: Sizes | None = None,
    ) -> None:
        self.geometry = geometry
        self.hash_tables = hash_tables
        self.num_slots = num_slots
        self.encodings = tuple(layer.encoding for layer in layers)
        self.row_bytes = tuple(
            native.row_bytes(abi.FORMATS[layer.encoding], geometry.head_dim) for layer in layers
        )
        self._table_rows = tuple(layer.num_rows for layer in layers)
        self._is_on_disk = any(layer.on_disk is not None for layer in layers)
        self._sizes = sizes or Sizes()
        self.serving = threading.Lock()
        self._native = native
        self._device_index = device_index
        self._thread = threading.local()
        # Gates and read-outs may come from an event loop's thread beside a lane's.
        self._urgent_lock = threading.Lock()
        device = device or native.device(device_index)
        mapped_tokens = 1 << 30 if device.integrated else MAPPED_TOKENS
        self._gemm_sms = max(0, device.num_sms - self._sizes.spare_sms)
        self._pools: list[PinnedBuffer] = []
        self.host_memory: HostMemory = PlainMemory()
        self._pinned: PinnedMemory | None = None
        self._graphs: GraphUse | None = None
        with ExitStack() as made:
            self.engram = EngramV41(
                native,
                geometry,
                hash_tables,
                max_tokens=self._sizes.chunk_tokens,
                num_slots=num_slots,
            )
            made.callback(self.engram.close)
            for layer in layers:
                self.engram.add_layer(layer)
            self._make_queues(made, mapped_tokens)
            self._owned = made.pop_all()
        self._numerics = {
            "wkv": f"chain of mma.sync m16n8k16 up to {self._sizes.chunk_tokens} tokens, one "
            "float32 accumulator a value, k ascending; bits do not depend on the batch",
            "gate": "float32, no fused multiply-add in the result; bits do not depend on the batch",
            "wkv_input": "e4m3 per 32 values"
            if any(layer.requantize_input for layer in layers)
            else "bfloat16 rows",
        }
        self.numerics: Mapping[str, str] = self._numerics

    def open_gemm(self, candidates: Sequence[str]) -> bool:
        """Take the first cublasLt whose every batch class gives the chain's bits.

        Without one the chain serves every T; `numerics` says which it is, and why.
        """
        return open_gemm(
            self.engram, self._project_stream, self._numerics, candidates, self._gemm_sms
        )

    def choose_kernels(self) -> None:
        """Compare what multiplies wkv as stored with the chain by bits, then let the fastest
        kernel measured here serve each class of batches up to 64 tokens.

        `numerics` holds the times, and why a layer's stored weights are not used if they are not.
        """
        self._select()
        choose_kernels(self.engram, self._project_stream, self._numerics)

    def capture_graphs(self, mode: str = "auto") -> None:
        """Capture graphs of small batches; nothing is captured afterwards.

        mode: auto (each class of batches is served by what is faster here, measured now), on (by
        graphs throughout) or off. `numerics` says which, or why there are none.
        """
        if mode == "off" or not self.num_slots or self._is_on_disk:
            why = "rows are read from disk" if self.num_slots else "there are no kv slots"
            self._numerics["graphs"] = "off" if mode == "off" else f"none: {why}"
            return
        self._select()
        streams = self._project_stream, self._urgent
        try:
            graphs = Graphs(self.engram, self._projections, *streams)
        except EngramError as error:
            self._numerics["graphs"] = f"none, kernels are launched one by one: {error.message}"
            return
        self._owned.callback(graphs.close)
        self._graphs = GraphUse(graphs, self._gates, self.geometry.num_layers)
        self._numerics["graphs"] = choose_graphs(self, self._graphs, mode)

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows, dequantised or as stored (see `Backend.rows`)."""
        self._read_rows(self._rows, layer_index, hash_ids, out, stored=stored)

    def _read_rows(
        self,
        read_out: RowReadOut,
        layer_index: int,
        hash_ids: NDArray[np.int64],
        out: torch.Tensor,
        *,
        stored: bool,
    ) -> None:
        width = self.row_bytes[layer_index] if stored else self.geometry.head_dim
        dtype = torch.uint8 if stored else torch.bfloat16
        columns = self.geometry.n_hash_cols
        require("hash_ids", hash_ids, np.int64, (len(hash_ids), columns))
        require_tensor("out", out, (dtype,), (len(hash_ids), columns, width))
        require_rows(hash_ids, self._table_rows[layer_index])
        self._select()
        read_out.read(layer_index, hash_ids, out, stored=stored)

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Enqueue kv into slots (see `Backend.project`); a failure shows at the next read."""
        if (windows is None) == (hash_ids is None):
            raise BadTensor("project: give exactly one of windows and hash_ids")
        require("slots", slots, np.int64, (len(slots),))
        if windows is not None:
            require("windows", windows, np.int32, (len(slots), self.geometry.max_ngram_size))
        if hash_ids is not None:
            require("hash_ids", hash_ids, np.int64, (len(slots), self.geometry.n_hash_cols))
            require_rows(hash_ids, self._table_rows[layer_index])
        self._select()
        is_timed = self._timer.wants(self.observer)
        graphs = self._graphs
        if graphs and windows is not None and graphs.has_miss(len(slots)) and not is_timed:
            graphs.replay(layer_index, _flat(slots, np.int64), _flat(windows, np.int32))
            return
        require_slots(slots, self.num_slots)
        for piece in pieces(len(slots), self._sizes.chunk_tokens):
            self._queue.project(
                layer_index,
                _flat(slots[piece], np.int64),
                None if windows is None else _flat(windows[piece], np.int32),
                None if hash_ids is None else _flat(hash_ids[piece], np.int64),
                timer=self._timer if is_timed and piece.start == 0 else None,
            )

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
        slots, dead = live_slots(slots, dead, self.num_slots), np.ascontiguousarray(dead)
        self._select()
        with self._urgent_lock:
            self._kv.read(slots, dead, out)

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value (see `Backend.gate`). Dead positions keep their bits."""
        count = len(slots)
        shape = (count, self.geometry.hc_mult, self.geometry.dim)
        require_tensor("residual", residual, (torch.bfloat16, torch.float32), shape)
        if out is not residual:
            require_tensor("out", out, (residual.dtype,), shape)
        require("slots", slots, np.int64, (count,))
        require("dead", dead, np.bool_, (count,))
        if not count:
            return
        self._select()
        with self._urgent_lock:
            self._gates.run(
                layer_index,
                np.ascontiguousarray(slots),
                np.ascontiguousarray(dead),
                residual,
                out,
                is_pinned=self._is_pinned(residual) and (out is residual or self._is_pinned(out)),
                observer=self.observer,
            )

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Make pinned memory for bodies and answers: uint8 [num_bytes], until `close`.

        Residuals, kv and rows that lie in it are read and written without a copy.
        """
        self._select()
        buffer = PinnedBuffer(self._native, num_bytes)
        self._pools.append(buffer)
        return torch.from_numpy(buffer.bytes)

    def pin_in_flight(self, num_bytes: int) -> None:
        """Make `host_memory` of one pinned block: what lies there is worked on in place.

        Where the driver does not pin so much it stays plain, and `numerics` says so.
        """
        self._select()
        try:
            self._pinned = PinnedMemory(self._native, self._device_index, num_bytes)
        except Internal as error:
            self._numerics["in_flight"] = f"plain memory, copied once: {error.message}"
            return
        self.host_memory = self._pinned
        self._numerics["in_flight"] = f"{num_bytes} bytes of pinned memory, worked on in place"

    def offer_near_reads(self) -> None:
        """Let the thread that asks do small work itself, kv that is missing included, where it has
        what that needs: pinned memory for bodies, and libengram_cpu for keys. `numerics` says so.

        Last: whether graphs are used is known by then.
        """
        library, pinned = find_library(), self._pinned
        if library is None or pinned is None or not self.num_slots:
            self._numerics["near_reads"] = "none: no pinned memory for bodies, or no libengram_cpu"
            return
        self._select()
        near, geometry = self._make_near(), self.geometry
        self.near_batches = near
        self.near_reads = tuple(
            CudaNearRead(
                library, self.hash_tables, layer, near, pinned, geometry.hc_mult * geometry.dim
            )
            for layer in range(geometry.num_layers)
        )
        self._numerics["near_reads"] = (
            "by the thread that asks, in place, on a stream of its own; "
            + ("missing kv too" if near.projector.is_able else "missing kv on a lane")
        )

    def synchronize(self) -> None:
        """Wait for every enqueued projection. Raises: Internal."""
        self._select()
        self._projections.wait(self._projections.last)

    def self_check(self) -> None:
        """Compare what runs with what is promised. Raises: SelfCheckFailed."""
        self._select()
        check_projection(self.engram, self._project_stream)
        if self.num_slots:
            check_gate(self.engram, self._urgent)

    def close(self) -> None:
        """Free the device. The backend cannot be used afterwards."""
        # After a CUDA error every call fails, the freeing ones too: the process is about to end.
        with suppress(Internal):
            self._select()
            self.synchronize()
        with suppress(Internal):
            self._owned.close()
        for pool in self._pools:
            with suppress(Internal):
                pool.close()
        self._pools.clear()
        if self._pinned is not None:
            with suppress(Internal):
                self._pinned.close()

    # ---- queues

    def _make_queues(self, made: ExitStack, mapped_tokens: int) -> None:
        native, sizes = self._native, self._sizes

        def keep(part: _Owned) -> _Owned:
            made.callback(part.close)
            return part

        self._project_stream = keep(Stream(native))
        self._urgent = keep(Stream(native, is_urgent=True))
        self._rows = keep(
            RowReadOut(self.engram, self.row_bytes, sizes.lane_tokens, self._is_pinned)
        )
        self._timer = keep(ProjectionTimer(native))
        self._projections = keep(Projections(native, self.num_slots))
        self._kv = keep(
            KvReadOut(
                self.engram, self._urgent, self._projections, sizes.lane_tokens, self._is_pinned
            )
        )
        self._queue = keep(
            ProjectQueue(
                self.engram,
                self.hash_tables,
                self._project_stream,
                self._projections,
                max_tokens=sizes.chunk_tokens,
            )
        )
        self._gates = keep(
            HostGates(
                self.engram,
                self._urgent,
                self._projections,
                num_lanes=sizes.num_lanes,
                mapped_tokens=mapped_tokens,
                device_index=self._device_index,
            )
        )

    def _make_near(self) -> CudaNear:
        engram, projections = self.engram, self._projections
        stream = Stream(self._native, is_urgent=True)
        self._owned.callback(stream.close)
        gates = HostGates(
            engram,
            stream,
            projections,
            num_lanes=NEAR_LANES,
            mapped_tokens=self._gates.mapped_tokens,
            device_index=self._device_index,
            keeps_lock=True,
        )
        self._owned.callback(gates.close)
        with_graphs = self._graphs is not None
        projector = NearProjector(engram, stream, projections, with_graphs=with_graphs)
        self._owned.callback(projector.close)
        lane_tokens = self._sizes.lane_tokens
        read_out = KvReadOut(engram, stream, projections, lane_tokens, self._is_pinned)
        self._owned.callback(read_out.close)
        rows = None
        if not self._is_on_disk:
            read_rows = RowReadOut(engram, self.row_bytes, INLINE_TOKENS, self._is_pinned)
            self._owned.callback(read_rows.close)
            rows = partial(self._read_rows, read_rows)
        return CudaNear(
            projector,
            gates,
            read_out,
            rows,
            projections,
            is_pinned=self._is_pinned,
            select=self._select,
            observer=lambda: self.observer,
        )

    def _select(self) -> None:
        """Bind the calling thread to the device, once."""
        if not getattr(self._thread, "is_bound", False):
            self._native.device_select(self._device_index)
            self._thread.is_bound = True

    def _is_pinned(self, data: torch.Tensor) -> bool:
        address, num_bytes = data.data_ptr(), data.numel() * data.element_size()
        if address % 16:  # kernels read and write so many bytes at once
            return False
        if self._pinned is not None and self._pinned.holds(address, num_bytes):
            return True
        return any(pool.holds(address, num_bytes) for pool in self._pools)


def _flat(array: NDArray[_Scalar], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    return np.ascontiguousarray(array, dtype=dtype)
