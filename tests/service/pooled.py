"""A backend that wants bodies and answers in a block of its own, as a GPU's does, on the CPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engram_core.backends.base import Backend
from engram_core.engine import Engine
from engram_core.host_memory import PooledMemory
from service.state import Model

BLOCK_BYTES = 2 << 20


class PooledBackend:
    """The reference backend with a block that stands for pinned memory.

    in_place: for each gate, kv and rows, whether it was told to work in the block
    `hold` stops the next call in the middle, as a device does that is still busy.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend: Any = backend
        self.serving = threading.Lock()
        self.block = np.zeros(BLOCK_BYTES, np.uint8)
        self.host_memory = PooledMemory(self.block)
        self.in_place: list[bool] = []
        self.is_writing = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.engine: Engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def gate(self, layer: int, slots: Any, dead: Any, residual: Any, out: Any) -> None:
        self._note(out)
        self._backend.gate(layer, slots, dead, residual, out)

    def read_kv(self, layer: int, slots: Any, dead: Any, out: Any) -> None:
        self._note(out)
        self._backend.read_kv(layer, slots, dead, out)

    def rows(self, layer: int, hash_ids: Any, out: Any, *, stored: bool) -> None:
        self._note(out)
        self._backend.rows(layer, hash_ids, out, stored=stored)

    @property
    def used_bytes(self) -> int:
        """What something refers to once the lanes are idle: one holds a batch until its end."""
        assert self.engine.drain(30)
        return self.host_memory.pieces.used_bytes

    def _note(self, out: torch.Tensor) -> None:
        start = self.block.__array_interface__["data"][0]
        self.in_place.append(start <= out.data_ptr() < start + BLOCK_BYTES)
        self.is_writing.set()
        assert self.go_on.wait(30)


def pooled(model: Model) -> tuple[Model, PooledBackend]:
    """Return a model on the same tables whose reads run on the lanes, as a GPU's do."""
    backend = PooledBackend(model.backend)
    limits = replace(model.limits, near_tokens=0)
    engine = backend.engine = Engine(backend, limits)  # type: ignore[arg-type]
    return replace(model, engine=engine, backend=backend, limits=limits), backend  # type: ignore[arg-type]
