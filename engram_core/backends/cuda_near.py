"""Small residual reads on the GPU by the thread that asks, beside whatever a lane is running.

Gates of their own (streams, events, parameters), so that they wait for no lane: 25 us for a token,
some 600 for 512, while the general way's arrays and hand-overs take 1,100 on such a host
(docs/notes/gpu_host.md). What would have to wait, for a projection or for pageable memory, is not
taken.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof

import numpy as np

from engram_core.backends.cpu import CpuLibrary, NearKeys
from engram_core.backends.host_gates import HostGates
from engram_core.backends.pinned import PinnedMemory
from engram_core.backends.projections import Projections
from engram_core.geometry import EngramHashTables

MAX_TOKENS = 512
"""Longer reads hold up others for longer than they gain."""


class CudaNearRead(NearKeys):
    """`backends.base.NearRead`. token_values: of a residual; select: binds the thread to the GPU"""

    def __init__(
        self,
        library: CpuLibrary,
        tables: EngramHashTables,
        layer_index: int,
        gates: HostGates,
        projections: Projections,
        memory: PinnedMemory,
        token_values: int,
        select: Callable[[], None],
    ) -> None:
        super().__init__(library, layer_index, tables, MAX_TOKENS)
        self._layer_index = layer_index
        self._gates, self._projections, self._memory = gates, projections, memory
        self._token_values = token_values
        self._select = select
        self._places = np.frombuffer(memoryview(self._slots).cast("B"), np.int64)
        self._addresses = addressof(self._slots), addressof(self._dead)

    def gate(self, slots: list[int], residual: int, *, is_f32: bool) -> bool:
        """Gate in pinned memory (see `NearRead.gate`). Raises Internal: the device has failed."""
        count = len(slots)
        num_bytes = count * self._token_values * (4 if is_f32 else 2)
        if not self._memory.holds(residual, num_bytes):
            return False
        self._slots[:count] = slots  # type: ignore[assignment]  # ctypes takes integers
        self._select()
        if self._projections.of(self._places[:count]) is not None:
            return False
        self._gates.run_at(self._layer_index, count, (*self._addresses, residual), is_f32=is_f32)
        return True
