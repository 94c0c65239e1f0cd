"""CUDA graphs: projections of windows and gates of up to 64 tokens, captured once at start.

Their kernels read slots, windows, dead flags and pointers from a descriptor in pinned host memory
when they run, so nothing is captured again. There is a graph for every number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from ctypes import byref, c_void_p, pointer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.host_gates import HostGates
from engram_core.backends.native import INLINE_TOKENS, Native
from engram_core.backends.projections import QUEUED, Projections
from engram_core.backends.staging import address_of
from engram_core.errors import EngramError

_WINDOW = 4
"""Longest window that a descriptor holds."""

_DESCRIPTOR_BYTES = 4096


class Graphs:
    """Captured launches, one set a layer.

    Two descriptors of projections take turns: at most `QUEUED` projections are under way, so the
    one before last has ended when its descriptor is filled in again. One descriptor of gates: a
    gate is waited for.

    Raises: Unsupported: a capture failed; EngramError: the geometry's windows do not fit.
    """

    def __init__(
        self, engram: EngramV41, projections: Projections, project: Stream, gate: Stream
    ) -> None:
        if engram.geometry.max_ngram_size > _WINDOW:
            raise EngramError(
                f"a descriptor holds windows of {_WINDOW} ids, got {engram.geometry.max_ngram_size}"
            )
        self._engram, self._native = engram, engram.native
        self._projections = projections
        self._project, self._gate = project, gate
        self.max_tokens = min(INLINE_TOKENS, engram.max_tokens)
        self._replays: list[list[dict[int, Any]]] = []
        self._kept: list[abi.Replay] = []
        self.gates: dict[tuple[int, bool, int], int] = {}
        with ExitStack() as made:
            size = (QUEUED + 1) * _DESCRIPTOR_BYTES
            self._descriptors = PinnedBuffer(self._native, size)
            made.callback(self._descriptors.close)
            self._descriptors.bytes[:] = 0
            self._slots = DeviceBuffer(self._native, INLINE_TOKENS * 8)
            made.callback(self._slots.close)
            self._scratch = PinnedBuffer(
                self._native, self.max_tokens * engram.geometry.hc_mult * engram.geometry.dim * 4
            )
            self._scratch.bytes[:] = 0
            made.callback(self._scratch.close)
            self._capture(made)
            self._finish(made)
            self._owned = made.pop_all()

    @property
    def gate_descriptor(self) -> int:
        """Address of what captured gates read."""
        return self._descriptors.address + QUEUED * _DESCRIPTOR_BYTES

    def replay(
        self, layer_index: int, slots: NDArray[np.int64], windows: NDArray[np.int32]
    ) -> None:
        """Project windows into slots. Contiguous, T in 1..64. Raises: BadTensor, Internal."""
        number = self._projections.begin(len(slots))
        params = self._replays[layer_index][number % QUEUED][len(slots)]
        self._native.replay(params, address_of(slots), address_of(windows), len(slots), number)

    def _capture(self, made: ExitStack) -> None:
        engram = self._engram
        for turn in range(QUEUED + 1):
            self._fill(self._descriptors.address + turn * _DESCRIPTOR_BYTES)
        for layer_index in range(engram.geometry.num_layers):
            turns: list[dict[int, Any]] = []
            for turn in range(QUEUED):
                address = self._descriptors.address + turn * _DESCRIPTOR_BYTES
                replays = {}
                for count in range(1, self.max_tokens + 1):
                    launch = self._projection(layer_index, count, address)
                    graph = captured(made, self._native, self._project, launch)
                    params = abi.Replay(
                        graph=graph,
                        descriptor=address,
                        projections=pointer(self._projections.abi),
                        max_ngram_size=engram.geometry.max_ngram_size,
                        stream=self._project.handle,
                    )
                    self._kept.append(params)
                    replays[count] = byref(params)
                turns.append(replays)
            self._replays.append(turns)
            for is_f32 in (False, True):
                for count in range(1, self.max_tokens + 1):
                    launch = self._gate_of(layer_index, count, is_f32=is_f32)
                    key = layer_index, is_f32, count
                    self.gates[key] = captured(made, self._native, self._gate, launch)

    def _finish(self, made: ExitStack) -> None:
        end = Event(self._native)
        made.callback(end.close)
        for stream in (self._project, self._gate):
            end.record(stream)
            end.wait()

    def _fill(self, address: int) -> None:
        """Make a descriptor that can be run: slots in a row, nobody dead, a scratch residual."""
        descriptor = abi.Descriptor.from_address(address)
        num_slots = self._projections.abi.num_slots
        descriptor.slots[:] = [i % num_slots for i in range(INLINE_TOKENS)]
        descriptor.residual = descriptor.out = self._scratch.address

    def _projection(self, layer_index: int, count: int, address: int) -> Callable[[], None]:
        def launch() -> None:
            self._engram.rows_from_windows(
                layer_index,
                count,
                self._project,
                descriptor=address,
                slots_out=self._slots.address,
            )
            self._engram.project(
                layer_index,
                count,
                self._project,
                slots=self._slots.address,
                slots_on_device=True,
            )

        return launch

    def _gate_of(self, layer_index: int, count: int, *, is_f32: bool) -> Callable[[], None]:
        params = self._engram.gate_params(layer_index)
        params.descriptor = self.gate_descriptor
        params.num_tokens, params.is_f32 = count, is_f32
        params.stream = self._gate.handle
        return lambda: self._native.gate(byref(params))

    def close(self) -> None:
        """Destroy the graphs. Nothing of them may be under way."""
        self._owned.close()


def captured(made: ExitStack, native: Native, stream: Stream, launch: Callable[[], None]) -> int:
    """Run launches once, as they are, then capture them. Returns the graph, which `made` frees."""
    launch()
    native.capture_begin(stream.handle)
    handle = c_void_p()
    try:
        launch()
    finally:
        native.capture_end(stream.handle, byref(handle))
    graph = handle.value or 0
    made.callback(native.graph_destroy, graph)
    return graph


class GraphUse:
    """Which batches graphs serve."""

    def __init__(self, graphs: Graphs, gates: HostGates, num_layers: int) -> None:
        self.max_tokens = graphs.max_tokens
        self._graphs, self._gates, self._num_layers = graphs, gates, num_layers
        self._has_miss = [False] * (INLINE_TOKENS + 1)

    def misses(self, counts: Iterable[int], is_used: bool) -> None:
        """Project windows of so many tokens by graphs, or by launches."""
        for count in counts:
            self._has_miss[count] = is_used

    def hits(self, counts: Iterable[int], is_used: bool) -> None:
        """Gate so many tokens by graphs, or by launches."""
        descriptor = self._graphs.gate_descriptor
        for count in counts:
            for layer_index in range(self._num_layers):
                for is_f32 in (False, True):
                    graph = self._graphs.gates[layer_index, is_f32, count] if is_used else 0
                    self._gates.use_graph(layer_index, is_f32, count, graph, descriptor)

    def replay(
        self, layer_index: int, slots: NDArray[np.int64], windows: NDArray[np.int32]
    ) -> None:
        """See `Graphs.replay`."""
        self._graphs.replay(layer_index, slots, windows)

    def has_miss(self, count: int) -> bool:
        """Whether a graph projects so many windows."""
        return count <= INLINE_TOKENS and self._has_miss[count]
