"""From a checkpoint to the CUDA backend: ledger, tables, weights, self-check."""

from __future__ import annotations

import re
from contextlib import ExitStack
from ctypes import byref, c_int32

import numpy as np
import torch

from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import NEAR_LANES, CudaBackend, Sizes
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import (
    DeviceLayer,
    EngramV41,
    require_encoding,
    require_image,
    workspace_bytes,
)
from engram_core.backends.native import Native, cublaslt_candidates
from engram_core.backends.stored_wkv import Stored, StoredWkv, arrange, arranged_bytes
from engram_core.checkpoint.dense import read_matrix, read_matrix_chunks
from engram_core.checkpoint.sources import Checkpoint, LayerSource, TensorSource
from engram_core.errors import SchemaError
from engram_core.geometry import Geometry
from engram_core.meminfo import host_available_bytes, host_swap_used_bytes, host_total_bytes
from engram_core.memory import (
    HELD_ID_BYTES,
    Budget,
    Ledger,
    Measured,
    Memory,
    Needs,
    Placement,
    check,
    plan,
)
from engram_core.progress import Progress
from engram_core.quant import to_bf16
from engram_core.tables import DiskTable

__all__ = ["CudaBackend", "EngramV41", "load", "plan_on_device"]

STAGE_BYTES = 64 << 20
"""Of each of the two pinned stages a file passes through."""

CONTEXT_BYTES = 700 << 20
"""The driver's context and cublasLt's images, measured on an H200."""

GRAPH_BYTES = 40 << 20
"""What the driver takes for a layer's captured graphs: on an H200 25 to 28 MiB, and 6 for those of
the asking thread's projections of more than 16 windows."""

_READERS = 16
"""Threads reading one stage: 37 GB/s from memory-backed storage on an H200 host, 24 with 8."""


def load(
    checkpoint: Checkpoint,
    *,
    device: str,
    placement: str,
    num_slots: int,
    budget: Budget,
    progress: Progress,
    graphs: str = "auto",
) -> CudaBackend:
    """Load a checkpoint onto a CUDA device (see `loader.load`).

    cublasLt is compared with the chain here; `self_check` is the caller's, as for every backend.

    device: "cuda" or "cuda:N"; placement: auto, device, host (rows gathered from pinned memory), or
        disk (rows read into pinned memory for each launch)
    graphs: see `CudaBackend.capture_graphs`

    Raises: MemoryShort before the first byte; CheckpointError; Unsupported.
    """
    native = Native()
    index = _device_index(native, device)
    properties = native.device(index)
    require_image(native, properties)
    for layer in checkpoint.layers:
        require_encoding(layer.table.encoding)
    needs = needs_of(checkpoint, num_slots=num_slots, budget=budget)
    ledger = plan(needs, _memory(properties), placement)
    with ExitStack() as failed:
        loader = _Loader(native, progress, keeps_copy=budget.wkv_copy)
        try:
            layers = [
                loader.layer(source, checkpoint.geometry, ledger, failed)
                for source in checkpoint.layers
            ]
        finally:
            loader.close()
        failed.pop_all()  # the backend frees the layers
        backend = CudaBackend(
            native,
            checkpoint.geometry,
            checkpoint.hash_tables,
            layers,
            num_slots,
            device=properties,
            device_index=index,
        )
    with ExitStack() as failed:
        failed.callback(backend.close)
        backend.open_gemm(cublaslt_candidates())
        backend.choose_kernels()
        backend.capture_graphs(graphs)
        if budget.in_flight_bytes:
            backend.pin_in_flight(budget.in_flight_bytes)
            backend.offer_near_reads()
        check(needs, ledger, _memory(native.device(index)))
        failed.pop_all()
    return backend


def plan_on_device(
    checkpoint: Checkpoint,
    *,
    device: str,
    placement: str,
    num_slots: int,
    budget: Budget,
    measured: Measured | None,
) -> Ledger:
    """Say what loading would take where. measured: see `plan`. Raises: MemoryShort, Unsupported."""
    native = Native()
    properties = native.device(_device_index(native, device))
    needs = needs_of(checkpoint, num_slots=num_slots, budget=budget)
    return plan(needs, _memory(properties), placement, measured=measured)


def needs_of(checkpoint: Checkpoint, *, num_slots: int, budget: Budget) -> Needs:
    """Add up what the backend holds on the device and beside it."""
    geometry, sizes = checkpoint.geometry, Sizes()
    residual_bytes = geometry.hc_mult * geometry.dim * 4
    num_lanes = sizes.num_lanes + NEAR_LANES
    lanes = num_lanes * abi.INLINE_TOKENS * residual_bytes  # and as much pinned
    pinned = lanes + sizes.lane_tokens * 2 * geometry.kv_bytes
    row_bytes = sum(layer.table.row_bytes + 8 for layer in checkpoint.layers)  # if on disk
    pinned += (sizes.chunk_tokens + sizes.lane_tokens) * geometry.n_hash_cols * 2 * row_bytes
    pinned += sizes.lane_tokens * 4 * geometry.in_features + 2 * STAGE_BYTES
    return Needs(
        tables=sum(layer.table.num_rows * layer.table.row_bytes for layer in checkpoint.layers),
        wkv=sum(
            _wkv_bytes(layer.wkv, geometry, keeps_copy=budget.wkv_copy)
            for layer in checkpoint.layers
        ),
        kv_store=num_slots * geometry.kv_bytes,
        workspaces=sum(workspace_bytes(geometry, sizes.chunk_tokens).values())
        + lanes
        + GRAPH_BYTES * geometry.num_layers,
        in_flight=budget.in_flight_bytes + pinned,
        held_ids=budget.held_tokens * HELD_ID_BYTES,
        reserve=budget.reserve_bytes,
        context=CONTEXT_BYTES,
        shared=budget.shared_bytes,
    )


class _Loader:
    """File -> two pinned stages -> device."""

    def __init__(self, native: Native, progress: Progress, *, keeps_copy: bool) -> None:
        self._native = native
        self._progress = progress
        self._keeps_copy = keeps_copy
        with ExitStack() as made:
            self._stream = Stream(native)
            made.callback(self._stream.close)
            self._end = Event(native)
            made.callback(self._end.close)
            self._stages = PinnedBuffer(native, 2 * STAGE_BYTES)
            made.callback(self._stages.close)
            self._owned = made.pop_all()

    def close(self) -> None:
        self._owned.close()

    def layer(
        self, source: LayerSource, geometry: Geometry, ledger: Ledger, owner: ExitStack
    ) -> DeviceLayer:
        """Load one layer; `owner` frees it if a later one fails."""
        is_on_disk = ledger.placement is Placement.DISK
        on_disk = DiskTable(source.table, geometry.head_dim) if is_on_disk else None
        if on_disk is not None:
            owner.callback(on_disk.close)
        parts = [] if is_on_disk else self._table(source, ledger, owner)
        wkv, stored = self._wkv(source, geometry, owner)
        qk = (read_matrix(source.q) * read_matrix(source.k)).astype(np.float32)
        return DeviceLayer(
            encoding=source.table.encoding,
            num_rows=source.table.num_rows,
            table_parts=parts,
            wkv=wkv,
            qk=self._upload(qk.view(np.uint8).reshape(-1), owner),
            requantize_input=source.requantize_input,
            stored=stored,
            on_disk=on_disk,
        )

    def _table(
        self, source: LayerSource, ledger: Ledger, owner: ExitStack
    ) -> list[DeviceBuffer | PinnedBuffer]:
        table = source.table
        total, done = table.num_rows * table.row_bytes, 0
        parts: list[DeviceBuffer | PinnedBuffer] = []
        for part in table.parts:
            num_bytes = table.num_rows * part.row_bytes
            buffer: DeviceBuffer | PinnedBuffer
            if ledger.placement is Placement.HOST:
                buffer = PinnedBuffer(self._native, num_bytes + 16)
            else:
                buffer = DeviceBuffer(self._native, num_bytes)
            owner.callback(buffer.close)
            what = f"layer {source.layer_id} table"
            self._read(str(part.path), part.offset, num_bytes, buffer.address, (what, done, total))
            done += num_bytes
            parts.append(buffer)
        return parts

    def _wkv(
        self, source: LayerSource, geometry: Geometry, owner: ExitStack
    ) -> tuple[DeviceBuffer | None, StoredWkv | str]:
        """wkv as bfloat16, dequantised on the device where its kernels know the type, and as
        stored where a kernel reads that; the first is None where it is not kept."""
        tensor, num_rows, columns = source.wkv, geometry.out_features, geometry.in_features
        wkv = DeviceBuffer(self._native, num_rows * columns * 2)
        owner.callback(wkv.close)
        what = f"layer {source.layer_id} wkv"
        encoding = _wkv_encoding(tensor)
        format_id = abi.FORMATS.get(encoding)
        if format_id is None or self._native.row_bytes(format_id, columns) < 0:
            self._wkv_through_host(tensor, wkv, what)
            return wkv, f"{encoding} is dequantised on the host"
        with ExitStack() as loaded:
            codes = self._stored(tensor, loaded, what)
            scales = self._stored(tensor.scale, loaded, what) if tensor.scale else None
            params = abi.Dequantize(
                format=format_id,
                rows_per_scale=32 if scales else 1,
                num_rows=num_rows,
                row_values=columns,
                codes=codes.address,
                scales=scales.address if scales else 0,
                out=wkv.address,
                stream=self._stream.handle,
            )
            self._native.dequantize(byref(params))
            place = Stored(
                encoding, num_rows, columns, codes.address, scales.address if scales else 0
            )
            stored = arrange(self._native, place, self._stream, owner)
            self._wait()
        if self._keeps_copy or isinstance(stored, str):
            return wkv, stored
        wkv.close()
        return None, stored

    def _stored(self, tensor: TensorSource, owner: ExitStack, what: str) -> DeviceBuffer:
        buffer = DeviceBuffer(self._native, tensor.num_bytes)
        owner.callback(buffer.close)
        place = (what, 0, tensor.num_bytes)
        self._read(str(tensor.path), tensor.offset, tensor.num_bytes, buffer.address, place)
        return buffer

    def _wkv_through_host(self, tensor: TensorSource, wkv: DeviceBuffer, what: str) -> None:
        done = 0
        for _, rows in read_matrix_chunks(tensor):
            data = to_bf16(rows).view(torch.uint8).reshape(-1).numpy()
            self._send(data, wkv.address + done)
            done += data.size
            self._progress(what, done, wkv.num_bytes)

    def _upload(self, data: np.ndarray, owner: ExitStack) -> DeviceBuffer:
        buffer = DeviceBuffer(self._native, data.size)
        owner.callback(buffer.close)
        self._send(data, buffer.address)
        return buffer

    def _send(self, data: np.ndarray, to: int) -> None:
        for start in range(0, data.size, STAGE_BYTES):
            piece = data[start : start + STAGE_BYTES]
            self._stages.bytes[: piece.size] = piece
            self._native.copy(to + start, self._stages.address, piece.size, self._stream.handle)
            self._wait()

    def _read(
        self, path: str, offset: int, num_bytes: int, to: int, place: tuple[str, int, int]
    ) -> None:
        what, before, total = place

        def progress(_: object, done: int) -> int:
            self._progress(what, before + done, total)
            return 0

        params = abi.Load(
            path=path.encode(),
            offset=offset,
            num_bytes=num_bytes,
            to=to,
            stages=self._stages.address,
            stage_bytes=STAGE_BYTES,
            num_threads=_READERS,
            keep_pages=0,
            progress=abi.PROGRESS(progress),
            stream=self._stream.handle,
        )
        self._native.load(byref(params))

    def _wait(self) -> None:
        self._end.record(self._stream)
        self._end.wait()


def _wkv_encoding(tensor: TensorSource) -> str:
    if tensor.scale is None:
        return tensor.type
    return "E4M3_E8M0_32" if tensor.scale.type == "F8_E8M0" else "E4M3_F32_32"


def _wkv_bytes(tensor: TensorSource, geometry: Geometry, *, keeps_copy: bool) -> int:
    """The stored form, and the bfloat16 copy if it is kept or there is no stored form."""
    outputs, inputs = geometry.out_features, geometry.in_features
    stored = arranged_bytes(_wkv_encoding(tensor), outputs, inputs)
    return stored + (outputs * inputs * 2 if keeps_copy or not stored else 0)


def _memory(device: abi.Device) -> Memory:
    return Memory(
        host_available_bytes(),
        device_free_bytes=None if device.integrated else int(device.free_bytes),
        integrated=bool(device.integrated),
        swap_used_bytes=host_swap_used_bytes(),
        total_bytes=host_total_bytes() if device.integrated else None,
    )


def _device_index(native: Native, device: str) -> int:
    """Raises: SchemaError for a name that is none, or a device that is not there."""
    found = c_int32()
    native.device_count(byref(found))
    match = re.fullmatch(r"cuda(?::(0|[1-9]\d{0,2}))?", device)
    index = int(match.group(1) or 0) if match else -1
    if not 0 <= index < found.value:
        expected = f"cuda:0 .. cuda:{found.value - 1}" if found.value else "cpu (no CUDA device)"
        raise SchemaError(
            f"device: expected {expected}, got {device!r}", expected=expected, got=device
        )
    return index
