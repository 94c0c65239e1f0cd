"""Gates between host buffers: one call of the library each, which waits for the end."""

from __future__ import annotations

import os
from contextlib import ExitStack
from ctypes import POINTER, byref, c_void_p, cast, pointer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.base import StageObserver
from engram_core.backends.device import WATCHDOG_MS, DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.native import INLINE_TOKENS
from engram_core.backends.projections import Projections
from engram_core.backends.staging import address_of
from engram_core.backends.timing import WayShares

MAPPED_TOKENS = 32
"""Up to here the gate reads and writes pinned host memory in place: it beats two copy launches."""

ALONE_TOKENS = 16
"""Pageable residuals of so many tokens are copied by the calling thread: waking others takes
longer."""


class HostGates:
    """The lanes that pieces of a residual pass through, the threads that copy, and the parameters.

    One call at a time (the caller's lock).

    keeps_lock: small gates keep the interpreter's lock
    stream: of gates in place; mapped_tokens: up to here they are in place
    """

    def __init__(
        self,
        engram: EngramV41,
        stream: Stream,
        projections: Projections,
        *,
        num_lanes: int,
        mapped_tokens: int,
        device_index: int,
        keeps_lock: bool = False,
    ) -> None:
        self._gate_small = (engram.native.held if keeps_lock else engram.native).gate_host
        self.mapped_tokens = mapped_tokens
        self._num_lanes = num_lanes
        self._native = engram.native
        self._projections = projections
        native, geometry = engram.native, engram.geometry
        piece_bytes = INLINE_TOKENS * geometry.hc_mult * geometry.dim * 4
        with ExitStack() as made:
            self._lanes = (abi.Lane * num_lanes)()
            for lane in self._lanes:
                device, stage = DeviceBuffer(native, piece_bytes), PinnedBuffer(native, piece_bytes)
                carrier, events = Stream(native, is_urgent=True), [Event(native) for _ in range(4)]
                for part in (device, stage, carrier):
                    made.callback(part.close)
                for event in events:
                    made.callback(event.close)
                lane.device, lane.stage = device.address, stage.address
                lane.stream = carrier.handle
                lane.arrived, lane.computed = events[0].handle, events[1].handle
                lane.done[:] = [event.handle for event in events[2:]]
            self._link = [Stream(native, is_urgent=True) for _ in range(2)]
            for direction in self._link:
                made.callback(direction.close)
            threads = min(num_lanes, os.cpu_count() or 1) - 1
            self._workers = native.make("workers_create", threads, device_index)
            made.callback(native.workers_destroy, self._workers)
            self._shares = WayShares(native)
            made.callback(self._shares.close)
            self._owned = made.pop_all()
        self._graphs: list[tuple[Any, Any]] = []
        self._params = []
        self._begin = engram.native.held.gate
        self._begun: list[list[abi.Gate]] = []
        for layer_index in range(geometry.num_layers):
            both = []
            tables = ((c_void_p * (INLINE_TOKENS + 1))(), (c_void_p * (INLINE_TOKENS + 1))())
            for is_f32, table in enumerate(tables):
                gate = engram.gate_params(layer_index)
                gate.stream, gate.is_f32 = stream.handle, is_f32
                both.append(self._params_of(gate, table))
            self._graphs.append(tables)
            self._params.append(both)
            self._begun.append([abi.Gate.from_buffer_copy(params.gate) for params, _ in both])

    def _params_of(self, gate: abi.Gate, graphs: Any) -> tuple[abi.GateHost, Any]:
        params = abi.GateHost()
        params.gate = gate
        params.num_lanes, params.lanes = self._num_lanes, self._lanes
        params.upload, params.download = (direction.handle for direction in self._link)
        params.workers = self._workers
        params.projections = pointer(self._projections.abi)
        params.graphs = cast(graphs, POINTER(c_void_p))
        params.timeout_ms = WATCHDOG_MS
        return params, byref(params)

    def use_graph(
        self, layer_index: int, is_f32: bool, num_tokens: int, graph: int, descriptor: int
    ) -> None:
        """Let a captured gate serve batches of so many tokens (0: no longer)."""
        self._graphs[layer_index][is_f32][num_tokens] = graph
        self._params[layer_index][is_f32][0].descriptor = descriptor

    def run(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
        *,
        is_pinned: bool,
        observer: StageObserver,
    ) -> None:
        """Gate and wait. Slots, dead: contiguous, T >= 1. Raises: BadTensor, Internal."""
        count = len(slots)
        is_f32 = residual.dtype is torch.float32
        params, reference = self._params[layer_index][is_f32]
        addresses = address_of(slots), address_of(dead), residual.data_ptr(), out.data_ptr()
        is_small = count <= INLINE_TOKENS and bool(self._graphs[layer_index][is_f32][count])
        is_mapped = is_small or count <= self.mapped_tokens
        params.way = abi.WAY_MAPPED if is_mapped else abi.WAY_COPIED
        params.is_pageable = not is_pinned
        params.piece_tokens = self._piece_tokens(count, is_pinned=is_pinned)
        if is_mapped:
            self._native.gate_host(reference, *addresses, count)
            return
        with self._shares.measure(params, observer):
            self._native.gate_host(reference, *addresses, count)

    def run_at(
        self,
        layer_index: int,
        count: int,
        addresses: tuple[int, int, int],
        *,
        is_f32: bool,
        is_pinned: bool,
    ) -> None:
        """Gate a residual, and wait. T >= 1. Raises: BadTensor, Internal.

        addresses: of slots (int64), dead flags, residual; up to ALONE_TOKENS it need not be pinned
        """
        params, reference = self._params[layer_index][is_f32]
        params.way = abi.WAY_MAPPED if count <= self.mapped_tokens else abi.WAY_COPIED
        params.is_pageable = not is_pinned
        params.piece_tokens = INLINE_TOKENS
        slots, dead, residual = addresses
        gate = self._gate_small if count <= INLINE_TOKENS else self._native.gate_host
        gate(reference, slots, dead, residual, residual, count)

    def begin_at(
        self, layer_index: int, count: int, addresses: tuple[int, int, int], *, is_f32: bool
    ) -> None:
        """Launch a gate in place, without a wait, on the stream of gates in place.

        The kv of its slots is there, or made on that stream. Raises: BadTensor, Internal.

        count: 1..INLINE_TOKENS; addresses: of slots (int64), dead flags, pinned residual
        """
        params = self._begun[layer_index][is_f32]
        params.slots, params.is_dead, params.residual = addresses
        params.out, params.num_tokens = params.residual, count
        self._begin(byref(params))

    def _piece_tokens(self, count: int, *, is_pinned: bool) -> int:
        """Largest piece; of pageable memory small enough that every lane gets some."""
        if is_pinned or count <= ALONE_TOKENS:
            return INLINE_TOKENS
        return min(INLINE_TOKENS // 2, max(4, -(-count // self._num_lanes)))

    def close(self) -> None:
        """End the threads, free the lanes."""
        self._owned.close()
