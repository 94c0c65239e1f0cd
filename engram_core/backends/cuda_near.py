"""Small work on the GPU by the thread that asks, beside whatever a lane is running.

Streams, events, parameters and workspaces of its own, so that it waits for no lane: 25 us for a
token whose kv is there, some 60 more where it is missing, 600 for 512 tokens, while the general
way's arrays and hand-overs take 1,100 on such a host (docs/notes/gpu_host.md). What would have to
wait long, for chunks of a prefill or for large pageable memory, is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import addressof, byref, c_char, c_int64, pointer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.base import Run, StageObserver
from engram_core.backends.cpu import CpuLibrary, NearKeys
from engram_core.backends.device import DeviceBuffer, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.graphs import captured
from engram_core.backends.host_gates import ALONE_TOKENS, HostGates
from engram_core.backends.native import INLINE_TOKENS, Unsupported
from engram_core.backends.pinned import PinnedMemory
from engram_core.backends.projections import Projections
from engram_core.backends.read_outs import KvReadOut
from engram_core.backends.staging import address_of
from engram_core.backends.stored_wkv import CHAIN, CUBLASLT, STORED_FORMS
from engram_core.geometry import EngramHashTables

MAX_TOKENS = 512
"""Longer reads hold up others for longer than they gain."""

_WAITED_TOKENS = 2 * INLINE_TOKENS
"""Of a lane's projections under way: what these take is waited for, longer ones are not."""

_BESIDE_TOKENS = 8
"""Of weights as stored, beside the chunks of a prefill: 0.2 ms, at p95 0.5, on the few
multiprocessors that those leave free (16 tokens 0.6), where a lane would wait for two chunks."""

_WINDOW = 4
"""Longest window that a launch holds."""


class NearProjector:
    """Few windows into kv slots, in a stream: what comes behind there finds the kv.

    Only kernels without a workspace that a lane shares serve it: the chain or stored weights.

    projections: of the lane, whose slots may not be written while it writes them
    """

    def __init__(
        self, engram: EngramV41, stream: Stream, projections: Projections, *, with_graphs: bool
    ) -> None:
        self._engram, self._native, self._stream = engram, engram.native, stream
        self._lane = projections
        geometry = engram.geometry
        layers = range(geometry.num_layers)
        self.is_able = geometry.max_ngram_size <= _WINDOW and not any(
            engram.layer(i).on_disk for i in layers
        )
        with ExitStack() as made:
            num_bytes = INLINE_TOKENS * geometry.in_features * 2
            self._rows = DeviceBuffer(self._native, num_bytes)
            made.callback(self._rows.close)
            self._slots = DeviceBuffer(self._native, INLINE_TOKENS * 8)
            made.callback(self._slots.close)
            self._descriptor = PinnedBuffer(self._native, 4096)
            made.callback(self._descriptor.close)
            self._descriptor.bytes[:] = 0
            self._own = Projections(self._native, engram.num_slots)
            made.callback(self._own.close)
            self._replays: list[list[Any]] = [[None] for _ in layers]
            self._kept: list[abi.Replay] = []
            if with_graphs and self.is_able:
                try:
                    for layer_index in layers:
                        self._capture(made, layer_index)
                except Unsupported:
                    self._replays = [[None] for _ in layers]
            self._own.end_of(0).record(stream)
            self._own.end_of(0).wait()
            self._owned = made.pop_all()

    def begin(self, layer_index: int, slots: int, windows: int, count: int) -> None:
        """Enqueue a projection. slots, windows: addresses of int64 [T] and int32 [T, N] on the
        host, T in 1..64. Raises: BadTensor, Internal."""
        replays = self._replays[layer_index]
        if count < len(replays):
            self._native.held.replay(replays[count], slots, windows, count, 1)
        else:
            self._launch(layer_index, count, windows=windows, slots=slots)

    def may_begin(self, layer_index: int, slots: Sequence[int]) -> bool:
        """Whether slots can be written now, and the kernels come to their turn soon: little else
        is under way, or so few tokens are multiplied that the spare multiprocessors will do."""
        count = len(slots)
        return (
            self.is_able
            and (
                self._lane.under_way() <= _WAITED_TOKENS
                or (count <= _BESIDE_TOKENS and self._kernel_of(layer_index, count) in STORED_FORMS)
            )
            and self._lane.are_ended(slots)
        )

    def wait(self) -> None:
        """Wait until what was begun has ended. Raises: Internal."""
        end = self._own.end_of(0)
        end.record(self._stream)
        end.wait()

    def close(self) -> None:
        """Free graphs and workspaces. Nothing of them may be under way."""
        self._owned.close()

    def _capture(self, made: ExitStack, layer_index: int) -> None:
        descriptor = abi.Descriptor.from_address(self._descriptor.address)
        descriptor.slots[:] = [i % self._engram.num_slots for i in range(INLINE_TOKENS)]
        replays: list[Any] = [None]
        for count in range(1, INLINE_TOKENS + 1):

            def launch(count: int = count) -> None:
                self._launch(layer_index, count, descriptor=self._descriptor.address)

            params = abi.Replay(
                graph=captured(made, self._native, self._stream, launch),
                descriptor=self._descriptor.address,
                projections=pointer(self._own.abi),
                max_ngram_size=self._engram.geometry.max_ngram_size,
                stream=self._stream.handle,
            )
            self._kept.append(params)
            replays.append(byref(params))
        self._replays[layer_index] = replays

    def _launch(
        self, layer_index: int, count: int, *, windows: int = 0, slots: int = 0, descriptor: int = 0
    ) -> None:
        """Rows, then their product into slots: of a descriptor, or of the host's arrays."""
        engram = self._engram
        layer, kernel = engram.layer(layer_index), self._kernel_of(layer_index, count)
        engram.gather(
            layer_index,
            count,
            self._rows.address,
            self._stream,
            windows=windows,
            descriptor=descriptor,
            slots_out=self._slots.address if descriptor else 0,
            output=abi.OUT_REQUANTIZED if layer.requantize_input else abi.OUT_BF16,
            is_released_early=kernel in STORED_FORMS,
        )
        to = self._slots.address if descriptor else slots
        params = engram.project_params(count, self._stream, slots=to, rows=self._rows.address)
        params.slots_on_device = bool(descriptor)
        engram.project_with(kernel, layer_index, params)

    def _kernel_of(self, layer_index: int, count: int) -> str:
        """cublasLt's workspace is the lane's."""
        kernel = self._engram.kernel_of(layer_index, count)
        return CHAIN if kernel == CUBLASLT else kernel


class CudaNear:
    """`backends.base.NearBatches`: projections, gates and kv read-outs in one stream.

    rows: as `CudaBackend.rows`, with buffers and a stream of its own; None: they lie on a disk
    is_pinned: whether the device works in a tensor itself; select: binds the thread to the GPU
    """

    def __init__(
        self,
        projector: NearProjector,
        gates: HostGates,
        read_out: KvReadOut,
        rows: Callable[..., None] | None,
        projections: Projections,
        *,
        is_pinned: Callable[[torch.Tensor], bool],
        select: Callable[[], None],
        observer: Callable[[], StageObserver],
    ) -> None:
        self.projector, self.gates = projector, gates
        self.has_rows, self._rows = rows is not None, rows
        self._read_out, self._projections = read_out, projections
        self._is_pinned, self.select, self._observer = is_pinned, select, observer

    def project(self, layer_index: int, slots: list[int], windows: NDArray[np.int32]) -> bool:
        """Compute kv of windows (see `NearBatches.project`). Raises Internal."""
        self.select()
        count = len(slots)
        if not 0 < count <= INLINE_TOKENS or not self.projector.may_begin(layer_index, slots):
            return False
        places, windows = np.array(slots, dtype=np.int64), np.ascontiguousarray(windows, np.int32)
        self.projector.begin(layer_index, address_of(places), address_of(windows), count)
        self.projector.wait()  # a lane's streams know nothing of this one
        return True

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        """Gather rows (see `Backend.rows`)."""
        assert self._rows is not None
        self._rows(layer_index, hash_ids, out, stored=stored)

    def is_ready(self, slots: NDArray[np.int64]) -> bool:
        """Whether the kv of slots is there, or soon (see `NearBatches.is_ready`)."""
        self.select()
        return (
            self._projections.of(slots) is None or self._projections.under_way() <= _WAITED_TOKENS
        )

    def is_there(self, slots: NDArray[np.int64]) -> bool:
        """Whether no lane is still at work on the kv of slots."""
        self.select()
        return self._projections.of(slots) is None

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add gate * value (see `Backend.gate`)."""
        is_pinned = self._is_pinned(residual) and (out is residual or self._is_pinned(out))
        self.gates.run(
            layer_index,
            np.ascontiguousarray(slots),
            np.ascontiguousarray(dead),
            residual,
            out,
            is_pinned=is_pinned,
            observer=self._observer(),
        )

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        """Copy kv out of slots (see `Backend.read_kv`)."""
        self._read_out.read(np.ascontiguousarray(slots), np.ascontiguousarray(dead), out)


class CudaNearRead(NearKeys):
    """`backends.base.NearRead`. token_values: of a residual"""

    def __init__(
        self,
        library: CpuLibrary,
        tables: EngramHashTables,
        layer_index: int,
        near: CudaNear,
        memory: PinnedMemory,
        token_values: int,
    ) -> None:
        super().__init__(library, layer_index, tables, MAX_TOKENS)
        self._layer_index = layer_index
        self._near, self._memory = near, memory
        self._token_values = token_values
        self.can_project = near.projector.is_able
        self._places = np.frombuffer(memoryview(self._slots).cast("B"), np.int64)
        self._addresses = addressof(self._slots), addressof(self._dead)
        # What is projected: few of the positions that the keys are of.
        self._window_bytes = tables.max_ngram_size * 4
        self._windows = (c_char * (self._window_bytes * INLINE_TOKENS))()
        self._to_windows = memoryview(self._windows).cast("B")
        self._fresh = (c_int64 * INLINE_TOKENS)()
        self._of_fresh = addressof(self._fresh), addressof(self._windows)

    def reaches(self, residual: int, count: int, *, is_f32: bool) -> bool:
        """Whether it is pinned, or small enough to be copied (see `NearRead.reaches`)."""
        return count <= ALONE_TOKENS or self._holds(residual, count, is_f32=is_f32)

    def project(self, slots: list[int], tokens: list[int]) -> bool:
        """Begin kv of some of the positions (see `NearRead.project`)."""
        near, count = self._near, len(slots)
        near.select()
        if count > INLINE_TOKENS or not near.projector.may_begin(self._layer_index, slots):
            return False
        width, view = self._width, self._view
        begin = width - self._window_bytes
        windows = b"".join([view[t * width + begin : (t + 1) * width] for t in tokens])
        self._to_windows[: len(windows)] = windows
        self._fresh[:count] = slots  # type: ignore[assignment]  # ctypes takes integers
        near.projector.begin(self._layer_index, *self._of_fresh, count)
        return True

    def wait(self) -> None:
        """Wait for what was begun (see `NearRead.wait`)."""
        self._near.projector.wait()

    def gate(self, slots: list[int], runs: list[Run]) -> bool:
        """Gate in place (see `NearRead.gate`). Raises Internal: the device has failed."""
        count = len(slots)
        self._slots[:count] = slots  # type: ignore[assignment]  # ctypes takes integers
        if len(runs) > 1:
            return self._gate_all(count, runs)
        ((_, _, residual, is_f32),) = runs
        is_pinned = self._holds(residual, count, is_f32=is_f32)
        if not is_pinned and count > ALONE_TOKENS:
            return False
        if not self._near.is_ready(self._places[:count]):
            return False
        addresses = (*self._addresses, residual)
        self._near.gates.run_at(
            self._layer_index, count, addresses, is_f32=is_f32, is_pinned=is_pinned
        )
        return True

    def _gate_all(self, count: int, runs: list[Run]) -> bool:
        """A launch for each, one wait for all of them."""
        near = self._near
        if count > INLINE_TOKENS or not near.is_there(self._places[:count]):
            return False
        for _, num_tokens, residual, is_f32 in runs:
            if not self._holds(residual, num_tokens, is_f32=is_f32):
                return False
        slots, dead = self._addresses
        for first, num_tokens, residual, is_f32 in runs:
            addresses = slots + 8 * first, dead + first, residual
            near.gates.begin_at(self._layer_index, num_tokens, addresses, is_f32=is_f32)
        near.projector.wait()
        return True

    def _holds(self, residual: int, count: int, *, is_f32: bool) -> bool:
        num_bytes = count * self._token_values * (4 if is_f32 else 2)
        return self._memory.holds(residual, num_bytes)
