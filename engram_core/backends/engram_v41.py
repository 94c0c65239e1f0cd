"""One device's Engram layers: tables, weights and kv slots, and the kernels over them.

Addresses in, launches out: nothing here waits, copies to the host or allocates after `add_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import byref, pointer
from dataclasses import dataclass

from engram_core.backends import native as abi
from engram_core.backends.device import DeviceBuffer, PinnedBuffer, Stream
from engram_core.backends.native import Native, Unsupported
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    CUBLASLT,
    STORED_FORMS,
    StoredWkv,
)
from engram_core.errors import BadTensor, CheckpointError, TooManyTokens
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.tables import Table

ENGRAM_ROW_BYTES = 84
"""A Q2_K row of 256 values, the seed's row."""

CHAIN_TOKENS = 16
"""Up to here the chain kernel is faster than cublasLt (docs/notes/cuda.md)."""

GEMM_CLASSES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Largest T of each batch class; one cublasLt algorithm each, fixed at start."""

GEMM_WORKSPACE_BYTES = 32 << 20


@dataclass
class DeviceLayer:
    """What a layer keeps on the device.

    table_parts: codes (and scales); wkv: bfloat16 [out_features, in_features], or None: `stored`
    serves every batch; qk: float32 [hc_mult, dim]; encoding: a name of `quant`
    stored: the same weights as stored, for up to 64 tokens, or the reason why there are none
    on_disk: the table where it has no parts here; its rows are given to each launch
    """

    encoding: str
    num_rows: int
    table_parts: Sequence[DeviceBuffer | PinnedBuffer]
    wkv: DeviceBuffer | None
    qk: DeviceBuffer
    requantize_input: bool
    stored: StoredWkv | str = "wkv was not kept as stored"
    on_disk: Table | None = None


class EngramV41:
    """The kernels of one device over its layers.

    max_tokens: of one launch (the workspaces' size); num_slots: of the kv store

    Raises: BadTensor for sizes the kernels do not take (hc_mult outside 1..4 among them).
    Source: `EngramV41` of the reference module.
    """

    def __init__(
        self,
        native: Native,
        geometry: Geometry,
        hash_tables: EngramHashTables,
        *,
        max_tokens: int,
        num_slots: int,
    ) -> None:
        _require_sizes(geometry)
        self.native = native
        self.geometry = geometry
        self.max_tokens = max_tokens
        self.num_slots = num_slots
        self._hash_tables = hash_tables
        self._layers: list[tuple[DeviceLayer, abi.Table, abi.Hash]] = []
        self._gemm = 0
        self._largest_gemm = 0
        self._fastest: dict[tuple[int, int], str] = {}  # layer, batch class -> kernel
        with ExitStack() as made:
            sizes = workspace_bytes(geometry, max_tokens)
            self.rows_workspace = self._buffer(made, sizes["rows"])
            self._kv_workspace = self._buffer(made, sizes["kv"])
            self._gemm_workspace = self._buffer(made, sizes["gemm"])
            self.kv = self._buffer(made, num_slots * geometry.kv_bytes)
            self._owned = made.pop_all()

    def add_layer(self, layer: DeviceLayer) -> None:
        """Take over a layer's buffers; layers come in the order of geometry.layer_ids."""
        geometry = self.geometry
        index = len(self._layers)
        parts = layer.table_parts
        table = abi.Table(
            format=abi.FORMATS[layer.encoding],
            head_dim=geometry.head_dim,
            num_rows=layer.num_rows,
            codes=parts[0].address if parts else 0,
            scales=parts[1].address if len(parts) > 1 else 0,
        )
        constants = hash_constants(self._hash_tables, index)
        self.native.hash_prepare(byref(constants), layer.num_rows)
        for buffer in (*parts, layer.qk, *([layer.wkv] if layer.wkv else [])):
            self._owned.callback(buffer.close)
        if layer.on_disk is not None:
            self._owned.callback(layer.on_disk.close)
        if isinstance(layer.stored, StoredWkv):
            self._owned.callback(layer.stored.arranged.close)
        self._layers.append((layer, table, constants))

    def open_gemm(self, library: str, *, num_sms: int = 0) -> int:
        """Open cublasLt and fix an algorithm for each batch class. Returns its version.

        num_sms: to plan for, 0 = all (fewer leave room for gates)

        Raises: Unsupported.
        """
        geometry = self.geometry
        self.close_gemm()
        self._gemm = self.native.make(
            "gemm_create",
            library.encode(),
            geometry.in_features,
            geometry.out_features,
            num_sms,
            self._gemm_workspace.address,
            self._gemm_workspace.num_bytes,
        )
        for max_tokens in GEMM_CLASSES:
            self.native.gemm_add_class(self._gemm, max_tokens, 0)
            self._largest_gemm = max_tokens
            if max_tokens >= self.max_tokens:
                break
        return self.native.gemm_version(self._gemm)

    def close_gemm(self) -> None:
        """Let the chain serve every T."""
        if self._gemm:
            self.native.gemm_destroy(self._gemm)
        self._gemm = 0

    def gather(
        self,
        layer_index: int,
        num_tokens: int,
        out: int,
        stream: Stream,
        *,
        windows: int = 0,
        hash_ids: int = 0,
        descriptor: int = 0,
        slots_out: int = 0,
        output: int = abi.OUT_BF16,
        table: abi.Table | None = None,
        is_released_early: bool = False,
    ) -> None:
        """Rows of windows or ids into `out` (an address), dequantised or as stored.

        windows: host address up to INLINE_TOKENS tokens (and max_ngram_size <= 4), else device;
        hash_ids: device address; descriptor: of windows read when the launch runs, whose slots go
        to slots_out (device); table: to gather ids from instead of the layer's;
        is_released_early: the kernel behind may start at once (its first loads are few)
        """
        _, own, constants = self._layers[layer_index]
        params = abi.Gather(
            table=pointer(table or own),
            hash=pointer(constants),
            windows=windows,
            hash_ids=hash_ids,
            descriptor=descriptor,
            slots_out=slots_out,
            num_tokens=num_tokens,
            num_cols=self.geometry.n_hash_cols,
            output=output,
            out=out,
            is_released_early=is_released_early,
            stream=stream.handle,
        )
        self.native.gather(byref(params))

    def rows_from_windows(
        self,
        layer_index: int,
        num_tokens: int,
        stream: Stream,
        *,
        windows: int = 0,
        hash_ids: int = 0,
        descriptor: int = 0,
        slots_out: int = 0,
        table: abi.Table | None = None,
    ) -> None:
        """Fill the rows workspace, re-quantised where the layer's wkv asks for it."""
        self.require_tokens(num_tokens)
        layer, _, _ = self._layers[layer_index]
        output = abi.OUT_REQUANTIZED if layer.requantize_input else abi.OUT_BF16
        self.gather(
            layer_index,
            num_tokens,
            self.rows_workspace.address,
            stream,
            windows=windows,
            hash_ids=hash_ids,
            descriptor=descriptor,
            slots_out=slots_out,
            output=output,
            table=table,
            is_released_early=self.kernel_of(layer_index, num_tokens) in STORED_FORMS,
        )

    def rows_from_q2k(self, raw: int, num_rows: int, stream: Stream) -> None:
        """Fill the rows workspace from Q2_K rows of 84 bytes at an address (device or pinned).

        Raises: TooManyTokens, BadTensor, before any launch. Source: `rows_from_q2k` of the seed.
        """
        if self.geometry.head_dim != 256:
            got = self.geometry.head_dim
            message = f"Q2_K rows of {ENGRAM_ROW_BYTES} bytes hold 256 values, head_dim is {got}"
            raise BadTensor(message, expected=256, got=got)
        self._require_row_count(num_rows)
        params = abi.Dequantize(
            format=abi.FORMATS["Q2_K"],
            rows_per_scale=1,
            num_rows=num_rows,
            row_values=256,
            codes=raw,
            out=self.rows_workspace.address,
            stream=stream.handle,
        )
        self.native.dequantize(byref(params))

    def rows_from_bf16(self, rows: int, num_rows: int, stream: Stream) -> None:
        """Fill the rows workspace from bfloat16 rows at an address (device or pinned).

        Raises: TooManyTokens before any copy. Source: `rows_from_bf16` of the seed.
        """
        self._require_row_count(num_rows)
        num_bytes = num_rows * self.geometry.head_dim * 2
        self.native.copy(self.rows_workspace.address, rows, num_bytes, stream.handle)

    def apply(self, layer_index: int, streams: int, num_tokens: int, stream: Stream) -> None:
        """The rows workspace through wkv and the gate, in place on float32 streams.

        streams: device address of float32 [T, hc_mult, dim]

        Raises: TooManyTokens before any launch. Source: `apply` of the seed.
        """
        self.require_tokens(num_tokens)
        to = self._kv_workspace.address
        kernel = self.kernel_of(layer_index, num_tokens)
        self.project_with(kernel, layer_index, self.project_params(num_tokens, stream, to=to))
        gate = self.gate_params(layer_index)
        gate.kv, gate.residual, gate.out = to, streams, streams
        gate.num_tokens, gate.is_f32, gate.stream = num_tokens, 1, stream.handle
        self.native.gate(byref(gate))

    def project_chain(self, layer_index: int, params: abi.Project) -> None:
        """The yardstick: rows (params.rows) @ wkv into params.kv."""
        params.wkv = self._copy_of(layer_index).address
        self.native.project_chain(byref(params))

    def project_gemm(self, layer_index: int, params: abi.Project) -> None:
        """The same through cublasLt; params.slots must be 0."""
        params.wkv = self._copy_of(layer_index).address
        self.native.gemm_run(self._gemm, byref(params))

    def project_stored(self, kernel: str, layer_index: int, params: abi.Project) -> None:
        """The same over wkv as stored by one of STORED_FORMS, INLINE_TOKENS tokens a launch."""
        stored = self._layers[layer_index][0].stored
        if isinstance(stored, str):
            raise BadTensor(f"layer {layer_index}: {stored}")
        params.wkv = stored.arranged.address
        whole = abi.ProjectStored(params, abi.FORMATS[stored.encoding], STORED_FORMS[kernel])
        if params.num_tokens <= abi.INLINE_TOKENS:
            self.native.project_stored(byref(whole))
            return
        piece = whole.project
        piece.slots_on_device = 1  # as they are at this T
        for first in range(0, params.num_tokens, abi.INLINE_TOKENS):
            piece.num_tokens = min(abi.INLINE_TOKENS, params.num_tokens - first)
            piece.rows = params.rows + first * params.in_features * 2
            if params.slots:
                piece.slots = params.slots + first * 8
            else:
                piece.kv = params.kv + first * params.out_features * 2
            self.native.project_stored(byref(whole))

    def _copy_of(self, layer_index: int) -> DeviceBuffer:
        wkv = self._layers[layer_index][0].wkv
        if wkv is None:
            raise BadTensor(f"layer {layer_index}: the bf16 copy of wkv was not kept")
        return wkv

    def project_with(self, kernel: str, layer_index: int, params: abi.Project) -> None:
        """One of CHAIN, STORED_FORMS and CUBLASLT; the last takes no slots."""
        if kernel in STORED_FORMS:
            self.project_stored(kernel, layer_index, params)
        elif kernel == CUBLASLT:
            self.project_gemm(layer_index, params)
        else:
            self.project_chain(layer_index, params)

    def kernels_of(self, layer_index: int, num_tokens: int) -> list[str]:
        """Every kernel that can multiply a batch in one launch, the chain first."""
        layer = self.layer(layer_index)
        kernels = [] if layer.wkv is None else [CHAIN]
        if num_tokens <= abi.INLINE_TOKENS and not isinstance(layer.stored, str):
            kernels += layer.stored.kernels
        if self._gemm and layer.wkv is not None and num_tokens <= self._largest_gemm:
            kernels.append(CUBLASLT)
        return kernels

    def drop_stored(self, layer_index: int, why: str) -> None:
        """Never use a layer's stored weights again; they are freed with the layer."""
        self._layers[layer_index][0].stored = why

    def prefer(self, layer_index: int, batch_class: int, kernel: str) -> None:
        """Let a kernel serve a class of BATCH_CLASSES."""
        self._fastest[layer_index, batch_class] = kernel

    def kernel_of(self, layer_index: int, num_tokens: int) -> str:
        """Who multiplies a batch: the preferred kernel, or the chain up to CHAIN_TOKENS. Without
        the bf16 copy larger batches than BATCH_CLASSES go as those of the largest do."""
        has_copy = self.layer(layer_index).wkv is not None
        able = self.kernels_of(
            layer_index, num_tokens if has_copy else min(num_tokens, abi.INLINE_TOKENS)
        )
        chosen = next((size for size in BATCH_CLASSES if num_tokens <= size), BATCH_CLASSES[-1])
        preferred = self._fastest.get((layer_index, chosen))
        if preferred in able and (num_tokens <= chosen or not has_copy):
            return preferred
        if not has_copy:
            return able[0]
        return CUBLASLT if CUBLASLT in able and num_tokens > CHAIN_TOKENS else CHAIN

    def project(
        self,
        layer_index: int,
        num_tokens: int,
        stream: Stream,
        *,
        slots: int,
        first_slot: int | None = None,
        slots_on_device: bool = False,
    ) -> None:
        """The rows workspace @ wkv into kv slots.

        slots: address of int64 [T] (host up to INLINE_TOKENS, else device)
        first_slot: given when slots are first_slot, first_slot + 1, ...
        slots_on_device: at every T, read when the launch runs
        """
        self.require_tokens(num_tokens)
        kernel = self.kernel_of(layer_index, num_tokens)
        if kernel != CUBLASLT:
            params = self.project_params(num_tokens, stream, slots=slots)
            params.slots_on_device = slots_on_device
            self.project_with(kernel, layer_index, params)
            return
        to = self._kv_workspace.address
        if first_slot is not None:
            to = self.kv.address + first_slot * self.geometry.kv_bytes
        self.project_gemm(layer_index, self.project_params(num_tokens, stream, to=to))
        if first_slot is None:
            scatter = abi.Scatter(
                from_=to,
                kv=self.kv.address,
                slots=slots,
                slots_on_device=slots_on_device,
                num_tokens=num_tokens,
                out_features=self.geometry.out_features,
                stream=stream.handle,
            )
            self.native.scatter_kv(byref(scatter))

    def project_params(
        self, num_tokens: int, stream: Stream, *, slots: int = 0, to: int = 0, rows: int = 0
    ) -> abi.Project:
        """Parameters of a projection of the rows workspace (or `rows`) into slots (or `to`)."""
        return abi.Project(
            rows=rows or self.rows_workspace.address,
            kv=to or self.kv.address,
            slots=slots,
            num_tokens=num_tokens,
            in_features=self.geometry.in_features,
            out_features=self.geometry.out_features,
            stream=stream.handle,
        )

    def gate(
        self,
        layer_index: int,
        num_tokens: int,
        residual: int,
        out: int,
        stream: Stream,
        *,
        slots: int,
        is_dead: int,
        is_f32: bool,
    ) -> None:
        """residual + gate * value into out (addresses; out may be residual).

        slots, is_dead: addresses of int64 and bool [T] (host up to INLINE_TOKENS, else device)
        """
        params = self.gate_params(layer_index)
        params.slots, params.is_dead = slots, is_dead
        params.residual, params.out = residual, out
        params.num_tokens, params.is_f32, params.stream = num_tokens, is_f32, stream.handle
        self.native.gate(byref(params))

    def gate_params(self, layer_index: int) -> abi.Gate:
        """The gate of a layer with what does not change filled in: a copy."""
        params = abi.Gate()
        params.kv, params.qk = self.kv.address, self._layers[layer_index][0].qk.address
        params.dim, params.hc_mult = self.geometry.dim, self.geometry.hc_mult
        params.eps = self.geometry.eps
        return params

    def read_kv(
        self, num_tokens: int, out: int, stream: Stream, *, slots: int, is_dead: int
    ) -> None:
        """Keys and value of slots into out (an address); dead: keys +0, value -0."""
        params = abi.ReadKv(
            kv=self.kv.address,
            slots=slots,
            is_dead=is_dead,
            out=out,
            num_tokens=num_tokens,
            dim=self.geometry.dim,
            hc_mult=self.geometry.hc_mult,
            stream=stream.handle,
        )
        self.native.read_kv(byref(params))

    def _require_row_count(self, num_rows: int) -> None:
        most = self.max_tokens * self.geometry.n_hash_cols
        if num_rows > most:
            message = f"the rows workspace holds {most} rows, got {num_rows}"
            raise TooManyTokens(message, expected=most, got=num_rows)

    def layer(self, layer_index: int) -> DeviceLayer:
        """Return what a layer keeps on the device."""
        return self._layers[layer_index][0]

    def require_tokens(self, num_tokens: int) -> None:
        """Refuse a launch larger than the workspaces. Raises: TooManyTokens."""
        if num_tokens > self.max_tokens:
            raise TooManyTokens(
                f"one launch takes {self.max_tokens} tokens, got {num_tokens}",
                expected=self.max_tokens,
                got=num_tokens,
            )

    def close(self) -> None:
        """Free layers, slots and workspaces."""
        self.close_gemm()
        self._layers.clear()
        self._owned.close()

    def _buffer(self, owner: ExitStack, num_bytes: int) -> DeviceBuffer:
        buffer = DeviceBuffer(self.native, num_bytes)
        owner.callback(buffer.close)
        return buffer


def workspace_bytes(geometry: Geometry, max_tokens: int) -> dict[str, int]:
    """Device bytes beside tables, weights and slots, by name."""
    return {
        "rows": max_tokens * geometry.in_features * 2,
        "kv": max_tokens * geometry.kv_bytes,
        "gemm": GEMM_WORKSPACE_BYTES,
    }


def hash_constants(tables: EngramHashTables, layer_index: int) -> abi.Hash:
    """The constants of one layer as the kernels take them."""
    constants = abi.Hash(max_ngram_size=tables.max_ngram_size, num_heads=tables.num_heads)
    columns = tables.n_hash_cols
    constants.multipliers[: tables.max_ngram_size] = tables.multipliers[layer_index].tolist()
    constants.primes[:columns] = tables.primes[layer_index].reshape(-1).tolist()
    constants.offsets[:columns] = tables.offsets[layer_index].tolist()
    return constants


def require_encoding(encoding: str) -> None:
    """Refuse a row format the kernels do not read. Raises: CheckpointError."""
    if encoding not in abi.FORMATS:
        known = ", ".join(abi.FORMATS)
        raise CheckpointError(
            f"the CUDA backend does not read {encoding} rows; use device cpu, or one of {known}",
            expected=known,
            got=encoding,
        )


def require_image(native: Native, device: abi.Device) -> None:
    """Refuse a device this library holds no code for, before anything is loaded.

    Raises: Unsupported.
    """
    if not device.has_image:
        got = f"{device.name.decode()} (compute capability {device.major}.{device.minor})"
        raise Unsupported(
            f"the CUDA library holds code for {native.architectures}, none of which runs on {got}; "
            "build csrc with that architecture",
            expected=native.architectures,
            got=got,
        )


def _require_sizes(geometry: Geometry) -> None:
    limits = (
        ("max_ngram_size", geometry.max_ngram_size, abi.MAX_NGRAM),
        ("hash columns", geometry.n_hash_cols, abi.MAX_HASH_COLS),
        ("dim", geometry.dim, 8192),
        ("hc_mult", geometry.hc_mult, 4),
    )
    for name, got, largest in limits:
        if not 1 <= got <= largest:
            message = f"the CUDA kernels take {name} 1..{largest}, got {got}"
            raise BadTensor(message, expected=f"1..{largest}", got=got)
    for name, got in (("dim", geometry.dim), ("head_dim", geometry.head_dim)):
        if got % 8:
            message = f"the CUDA kernels take {name} in multiples of 8, got {got}"
            raise BadTensor(message, expected="a multiple of 8", got=got)
