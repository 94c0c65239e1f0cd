"""What a GPU lets the asking thread do, on the CPU backend: kv that is missing made there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Backend, Run
from engram_core.backends.cpu import CpuNearRead


class ProjectingNear:
    """`backends.base.NearBatches` over a backend, for tests in which no lane projects meanwhile: a
    CPU backend's workspace is one. is_busy: as beside a long prefill; begun: the slots of every
    projection"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.is_busy, self.has_rows = False, True
        self.begun: list[list[int]] = []

    def project(self, layer_index: int, slots: list[int], windows: NDArray[np.int32]) -> bool:
        if self.is_busy:
            return False
        self.begun.append(slots)
        self._backend.project(layer_index, np.array(slots), windows=np.ascontiguousarray(windows))
        return True

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        self._backend.rows(layer_index, hash_ids, out, stored=stored)

    def is_ready(self, slots: NDArray[np.int64]) -> bool:
        return not self.is_busy

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        self._backend.read_kv(layer_index, slots, dead, out)

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._backend.gate(layer_index, slots, dead, residual, out)


class ProjectingRead:
    """`backends.base.NearRead` of a layer: the CPU's, and what is missing by `ProjectingNear`."""

    can_project = True

    def __init__(self, of: CpuNearRead, layer_index: int, near: ProjectingNear) -> None:
        self._of, self._layer_index, self._near = of, layer_index, near

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def project(self, slots: list[int], tokens: list[int]) -> bool:
        keys = np.frombuffer(self._of._view, np.int32).reshape(-1, self._of._width // 4)
        return self._near.project(self._layer_index, slots, keys[tokens, 2:])

    def gate(self, slots: list[int], runs: list[Run]) -> bool:
        return not self._near.is_busy and self._of.gate(slots, runs)


def let_it_project(backend: Backend) -> ProjectingNear:
    """Have a CPU backend let the asking thread project."""
    near = ProjectingNear(backend)
    backend.near_batches = near
    reads = [each for each in backend.near_reads if isinstance(each, CpuNearRead)]
    backend.near_reads = [ProjectingRead(each, i, near) for i, each in enumerate(reads)]
    return near
