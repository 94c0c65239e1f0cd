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
from ctypes import byref
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.base import StageObserver, Unobserved
from engram_core.backends.cuda_check import (
    check_gate,
    check_projection,
    gemm_matches_chain,
    stored_matches_chain,
    time_kernels,
)
from engram_core.backends.device import Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import CHAIN_TOKENS, DeviceLayer, EngramV41
from engram_core.backends.native import INLINE_TOKENS, Device, Native, Unsupported
from engram_core.backends.pinned import PinnedMemory
from engram_core.backends.staging import (
    ControlRing,
    GateLanes,
    Lane,
    address_of,
    copy_memory,
    fits_inline,
    pieces,
)
from engram_core.backends.stored_wkv import StoredWkv
from engram_core.errors import BadTensor, Internal, RowOutOfRange
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.host_memory import HostMemory, PlainMemory

MAPPED_TOKENS = 32
"""Up to here the gate reads and writes pinned host memory in place: it beats two copy launches."""

_Owned = TypeVar("_Owned", Stream, Event, ControlRing, Lane, GateLanes, PinnedBuffer)
_Scalar = TypeVar("_Scalar", bound=np.generic)

_TRACKED = 64
"""Projections whose ends are remembered."""

_QUEUED = 2
"""Projections the device may have at once: it never idles between them, and what becomes urgent
meanwhile waits for no more than these."""


@dataclass(frozen=True)
class Sizes:
    """Bounds of the backend's launches and buffers, in tokens.

    chunk_tokens: of one projection; cublasLt is 24 % slower in chunks of 256 than of 2048
    spare_sms: left free by projections, so that an urgent gate does not wait for their end
    lane_tokens: of one piece of kv or rows; num_lanes: pieces of a gate in flight
    """

    chunk_tokens: int = 2048
    spare_sms: int = 8
    lane_tokens: int = 128
    num_lanes: int = 8


class CudaBackend:
    """Implements `backends.base.Backend` on one CUDA device.

    layers: in the order of geometry.layer_ids; the backend frees them
    device: its properties (integrated: CPU and GPU share memory, used in place at every size)

    Raises: Unsupported, BadTensor.
    """

    name = "cuda"
    observer: StageObserver = Unobserved()

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
        self._sizes = sizes or Sizes()
        self._native = native
        self._device_index = device_index
        self._thread = threading.local()
        # Gates and read-outs may come from an event loop's thread beside a lane's.
        self._urgent_lock = threading.Lock()
        device = device or native.device(device_index)
        self._mapped_tokens = 1 << 30 if device.integrated else MAPPED_TOKENS
        self._gemm_sms = max(0, device.num_sms - self._sizes.spare_sms)
        self._pools: list[PinnedBuffer] = []
        self.host_memory: HostMemory = PlainMemory()
        self._pinned: PinnedMemory | None = None
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
            self._make_queues(made)
            self._owned = made.pop_all()
        self._numerics = {
            "wkv": f"chain of mma.sync m16n8k16 up to {self._sizes.chunk_tokens} tokens, one "
            "float32 accumulator a value, k ascending; bits do not depend on the batch",
            "gate": "float32, no fused multiply-add in the result; bits do not depend on the batch",
            "wkv_input": "e4m3 per 32 values"
            if any(layer.requantize_input for layer in layers)
            else "bfloat16 rows",
        }

    @property
    def numerics(self) -> Mapping[str, str]:
        return self._numerics

    def open_gemm(self, candidates: Sequence[str]) -> bool:
        """Take the first cublasLt whose every batch class gives the chain's bits.

        Without one the chain serves every T; `numerics` says which it is, and why.
        """
        reasons = []
        for library in candidates:
            try:
                version = self.engram.open_gemm(library, num_sms=self._gemm_sms)
            except Unsupported as error:
                reasons.append(error.message)
                continue
            different = gemm_matches_chain(self.engram, self._project_stream)
            if not different:
                self._numerics["wkv"] = (
                    f"chain of mma.sync m16n8k16 up to {CHAIN_TOKENS} tokens, cublasLt {version} "
                    f"above on {self._gemm_sms} SMs, each batch class compared with the chain by "
                    "bits at start"
                )
                return True
            self.engram.close_gemm()
            reasons.append(f"{library}: other bits than the chain at T = {different}")
        self._numerics["wkv_without_cublaslt"] = "; ".join(reasons) or "no library was tried"
        return False

    def choose_kernels(self) -> None:
        """Compare what multiplies wkv as stored with the chain by bits, then let the fastest
        kernel measured here serve each class of batches up to 64 tokens.

        `numerics` holds the times, and why a layer's stored weights are not used if they are not.
        """
        self._select()
        geometry = self.geometry
        for layer_index, layer_id in enumerate(geometry.layer_ids):
            layer = self.engram.layer(layer_index)
            if isinstance(layer.stored, StoredWkv):
                self._check_stored(layer_index, layer_id)
            times = time_kernels(self.engram, layer_index, self._project_stream)
            if not isinstance(layer.stored, StoredWkv):
                self._numerics[f"wkv_stored_{layer_id}"] = f"not used: {layer.stored}"
            lines = []
            for size, by_kernel in times.items():
                fastest = min(by_kernel, key=lambda name: by_kernel[name])
                self.engram.prefer(layer_index, size, fastest)
                measured = ", ".join(f"{name} {us:.1f}" for name, us in by_kernel.items())
                lines.append(f"T <= {size} {fastest} ({measured} us)")
            self._numerics[f"wkv_kernels_{layer_id}"] = "; ".join(lines)

    def _check_stored(self, layer_index: int, layer_id: int) -> None:
        layer = self.engram.layer(layer_index)
        assert isinstance(layer.stored, StoredWkv)
        encoding = layer.stored.encoding
        different = stored_matches_chain(self.engram, layer_index, self._project_stream)
        if different:
            self.engram.drop_stored(
                layer_index, f"other bits than the chain at T = {different} ({encoding})"
            )
            return
        self._numerics[f"wkv_stored_{layer_id}"] = (
            f"{encoding} as stored, up to {INLINE_TOKENS} tokens: bf16-rounded in registers, the "
            "chain's bits (compared at start); its bf16 copy serves larger batches"
        )

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows, dequantised or as stored (see `Backend.rows`)."""
        width = self.row_bytes[layer_index] if stored else self.geometry.head_dim
        dtype = torch.uint8 if stored else torch.bfloat16
        columns = self.geometry.n_hash_cols
        _require("hash_ids", hash_ids, np.int64, (len(hash_ids), columns))
        _require_tensor("out", out, (dtype,), (len(hash_ids), columns, width))
        self._require_rows(layer_index, hash_ids)
        self._select()
        output = abi.OUT_STORED if stored else abi.OUT_BF16
        for turn, piece in enumerate(pieces(len(hash_ids), self._sizes.lane_tokens)):
            lane = self._row_lanes[turn % len(self._row_lanes)]
            lane.finish()
            (ids,) = self._row_control.send(self._row_stream, _flat(hash_ids[piece], np.int64))
            to = self._place(lane, out[piece])
            count = piece.stop - piece.start
            self.engram.gather(
                layer_index, count, to, self._row_stream, hash_ids=ids, output=output
            )
            self._row_control.release(self._row_stream)
            lane.end(self._row_stream)
        for lane in self._row_lanes:
            lane.finish()

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
        self._require_slots(slots)
        if windows is not None:
            _require("windows", windows, np.int32, (len(slots), self.geometry.max_ngram_size))
        if hash_ids is not None:
            _require("hash_ids", hash_ids, np.int64, (len(slots), self.geometry.n_hash_cols))
            self._require_rows(layer_index, hash_ids)
        self._select()
        for piece in pieces(len(slots), self._sizes.chunk_tokens):
            self._project_piece(
                layer_index,
                _flat(slots[piece], np.int64),
                None if windows is None else _flat(windows[piece], np.int32),
                None if hash_ids is None else _flat(hash_ids[piece], np.int64),
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
        _require_tensor("out", out, (torch.bfloat16,), (len(slots), hc_mult + 1, dim))
        slots, dead = self._live_slots(slots, dead), np.ascontiguousarray(dead)
        with self._urgent_lock:
            self._read_kv(slots, dead, out)

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value (see `Backend.gate`). Dead positions keep their bits."""
        shape = (len(slots), self.geometry.hc_mult, self.geometry.dim)
        _require_tensor("residual", residual, (torch.bfloat16, torch.float32), shape)
        _require_tensor("out", out, (residual.dtype,), shape)
        slots, dead = self._live_slots(slots, dead), np.ascontiguousarray(dead)
        if not slots.size:
            return
        with self._urgent_lock:
            self._gate(layer_index, slots, dead, residual, out)

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

    def synchronize(self) -> None:
        """Wait for every enqueued projection. Raises: Internal."""
        self._select()
        self._await_sequence(self._sequence)

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

    def _make_queues(self, made: ExitStack) -> None:
        native, geometry, sizes = self._native, self.geometry, self._sizes
        token_bytes = geometry.n_hash_cols * 8 + geometry.max_ngram_size * 4 + 8 + 1
        control_bytes = sizes.chunk_tokens * token_bytes + 64
        row_width = max(*self.row_bytes, geometry.head_dim * 2)
        row_bytes = sizes.lane_tokens * geometry.n_hash_cols * row_width
        residual_bytes = geometry.hc_mult * geometry.dim * 4
        lane_bytes = sizes.lane_tokens * geometry.kv_bytes
        self._stage_tokens = max(INLINE_TOKENS, sizes.lane_tokens)

        def keep(part: _Owned) -> _Owned:
            made.callback(part.close)
            return part

        self._project_stream = keep(Stream(native))
        self._urgent = keep(Stream(native, is_urgent=True))
        self._row_stream = keep(Stream(native))
        self._project_control = keep(ControlRing(native, control_bytes, 8))
        self._control = keep(ControlRing(native, control_bytes, 3))
        self._row_control = keep(ControlRing(native, control_bytes, 3))
        self._lanes = [keep(Lane(native, lane_bytes)) for _ in range(2)]
        self._stage = keep(PinnedBuffer(native, self._stage_tokens * residual_bytes))
        gate_lanes = keep(GateLanes(native, INLINE_TOKENS * residual_bytes, sizes.num_lanes))
        self._gates = []  # the gate of each layer, filled in at each call
        for layer_index in range(geometry.num_layers):
            gate = self.engram.gate_params(layer_index)
            gate.stream = self._urgent.handle
            self._gates.append(gate_lanes.params(gate))
        self._row_lanes = [keep(Lane(native, row_bytes)) for _ in range(2)]
        self._ends = [keep(Event(native)) for _ in range(_TRACKED)]
        self._sequence = 0  # projections enqueued so far; number s ends at self._ends[s % _TRACKED]
        self._finished = 0  # all up to here are known to have ended
        self._made_by = np.zeros(self.num_slots, dtype=np.int64)  # slot -> its projection

    def _select(self) -> None:
        """Bind the calling thread to the device, once."""
        if not getattr(self._thread, "is_bound", False):
            self._native.device_select(self._device_index)
            self._thread.is_bound = True

    def _project_piece(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        windows: NDArray[np.int32] | None,
        hash_ids: NDArray[np.int64] | None,
    ) -> None:
        stream, count = self._project_stream, len(slots)
        self._await_sequence(self._sequence - _QUEUED + 1)
        is_inline = fits_inline(count)
        first = int(slots[0])
        is_run = count > 1 and int(slots[-1]) - first == count - 1
        is_run = is_run and bool((np.diff(slots) == 1).all())
        sent = [a for a in (windows, hash_ids) if a is not None]
        if is_inline and windows is not None and windows.shape[1] <= 4:
            places = [address_of(windows), address_of(slots)]
        elif is_inline:
            places = [*self._project_control.send(stream, *sent), address_of(slots)]
        else:
            places = self._project_control.send(stream, *sent, slots)
        self.engram.rows_from_windows(
            layer_index,
            count,
            stream,
            windows=places[0] if windows is not None else 0,
            hash_ids=places[0] if hash_ids is not None else 0,
        )
        self.engram.project(
            layer_index, count, stream, slots=places[1], first_slot=first if is_run else None
        )
        if not (is_inline and windows is not None and windows.shape[1] <= 4):
            self._project_control.release(stream)
        self._sequence += 1
        self._ends[self._sequence % _TRACKED].record(stream)
        self._made_by[slots] = self._sequence

    def _projection_of(self, slots: NDArray[np.int64]) -> Event | None:
        """The end of the last projection that any of the slots waits for, None if all ended."""
        self._select()
        last = int(self._made_by[slots].max()) if slots.size else 0
        if last <= self._finished:
            return None
        end = self._ends[last % _TRACKED]
        if not end.is_done():
            return end
        self._finished = max(self._finished, last)
        return None

    @staticmethod
    def _handle_of(event: Event | None) -> int:
        return event.handle if event is not None else 0

    def _await_sequence(self, last: int) -> None:
        if last > self._finished:
            self._ends[last % _TRACKED].wait()
            self._finished = max(self._finished, last)

    def _read_kv(
        self, slots: NDArray[np.int64], dead: NDArray[np.bool_], out: torch.Tensor
    ) -> None:
        after = self._projection_of(slots)
        if after is not None:
            self._urgent.wait(after)
        for turn, piece in enumerate(pieces(len(slots), self._sizes.lane_tokens)):
            lane = self._lanes[turn % len(self._lanes)]
            lane.finish()
            to = self._place(lane, out[piece])
            places, flags, is_sent = self._control_of(slots[piece], dead[piece])
            self.engram.read_kv(
                piece.stop - piece.start, to, self._urgent, slots=places, is_dead=flags
            )
            if is_sent:
                self._control.release(self._urgent)
            lane.end(self._urgent)
        self._finish_lanes()

    def _gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        params = self._gates[layer_index]
        params.after = self._handle_of(self._projection_of(slots))
        params.gate.is_f32 = residual.dtype == torch.float32
        if self._is_pinned(residual) and (out is residual or self._is_pinned(out)):
            self._gate_in_place(params, slots, dead, residual.data_ptr(), out.data_ptr())
            return
        stage = self._stage.address
        for piece in pieces(len(slots), self._stage_tokens):
            copy_memory(stage, residual[piece])
            self._gate_in_place(params, slots[piece], dead[piece], stage, stage)
            copy_memory(out[piece], stage)

    def _gate_in_place(
        self,
        params: abi.GateHost,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: int,
        out: int,
    ) -> None:
        """Gate between pinned buffers (addresses): one call, which waits. T >= 1."""
        gate = params.gate
        count = gate.num_tokens = len(slots)
        gate.slots, gate.is_dead = address_of(slots), address_of(dead)
        gate.residual, gate.out = residual, out
        params.is_mapped = count <= self._mapped_tokens
        params.piece_tokens = INLINE_TOKENS if params.is_mapped else _piece_tokens(count)
        self._native.gate_host(byref(params))

    def _control_of(
        self, slots: NDArray[np.int64], dead: NDArray[np.bool_]
    ) -> tuple[int, int, bool]:
        """Addresses of slots and dead flags, and whether they were sent to the device."""
        if fits_inline(len(slots)):
            return address_of(slots), address_of(dead), False
        places = self._control.send(self._urgent, slots, dead)
        return places[0], places[1], True

    def _place(self, lane: Lane, out: torch.Tensor) -> int:
        """Where the device can write what belongs in `out`."""
        if self._is_pinned(out):
            return out.data_ptr()
        lane.deliver(out)
        return lane.host.address

    def _is_pinned(self, data: torch.Tensor) -> bool:
        address, num_bytes = data.data_ptr(), data.numel() * data.element_size()
        if self._pinned is not None and self._pinned.holds(address, num_bytes):
            return True
        return any(pool.holds(address, num_bytes) for pool in self._pools)

    def _finish_lanes(self) -> None:
        for lane in self._lanes:
            lane.finish()

    # ---- refusals

    def _live_slots(self, slots: NDArray[np.int64], dead: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Check slots; those of dead positions become 0 and are never read."""
        _require("slots", slots, np.int64, (len(slots),))
        _require("dead", dead, np.bool_, (len(slots),))
        if not dead.any():
            self._require_slots(slots)
            return np.ascontiguousarray(slots)
        self._require_slots(slots[~dead])
        return np.where(dead, 0, slots)

    def _require_slots(self, slots: NDArray[np.int64]) -> None:
        _require("slots", slots, np.int64, (len(slots),))
        if not slots.size:
            return
        if slots.size <= abi.INLINE_TOKENS:  # numpy's reductions take longer than a short list
            values = slots.tolist()
            lowest, highest = min(values), max(values)
        else:
            lowest, highest = int(slots.min()), int(slots.max())
        if lowest < 0 or highest >= self.num_slots:
            got = [lowest, highest]
            expected = f"0..{self.num_slots - 1}"
            raise BadTensor(f"slots: expected {expected}, got {got}", expected=expected, got=got)

    def _require_rows(self, layer_index: int, hash_ids: NDArray[np.int64]) -> None:
        """The device does not look: an id outside the table would end the process's context."""
        num_rows = self._table_rows[layer_index]
        if hash_ids.size and not (hash_ids.min() >= 0 and hash_ids.max() < num_rows):
            got = [int(hash_ids.min()), int(hash_ids.max())]
            expected = f"0..{num_rows - 1}"
            raise RowOutOfRange(
                f"row ids: expected {expected}, got {got}", expected=expected, got=got
            )


def _piece_tokens(count: int) -> int:
    """Small enough that the link is busy both ways soon, large enough to outlast its launches."""
    if count <= 128:
        return 16
    return 32 if count <= 2048 else INLINE_TOKENS


def _flat(array: NDArray[_Scalar], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    return np.ascontiguousarray(array, dtype=dtype)


def _require(
    name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape:
        expected = f"{np.dtype(dtype)} {list(shape)}"
        got = f"{array.dtype} {list(array.shape)}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)


def _require_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    fits = tensor.dtype in dtypes and tuple(tensor.shape) == shape and tensor.is_contiguous()
    if not fits or tensor.device.type != "cpu":
        expected = f"contiguous {' or '.join(map(str, dtypes))} {list(shape)} on the CPU"
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise BadTensor(f"{name}: expected {expected}, got {got}", expected=expected, got=got)
