"""A backend for tests of the engine: exact, tiny, and it says what it was asked to do.

kv of a token is one small integer, a function of (layer, window) or (layer, hash_ids), in every
element; the gate adds it. A batch can be held, and a call can be made to fail.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Project, StageObserver, Unobserved
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.host_memory import HostMemory, PlainMemory

TOY = EngramHashTables.derive([1, 14], 4, 2, 100, np.arange(16), pad_token_id=2)
"""The shared toy of field-reports.md: identity map of 16 ids, pad 2."""

SIZES = Geometry(
    layer_ids=(1, 14),
    max_ngram_size=4,
    num_heads=2,
    head_dim=4,
    dim=3,
    hc_mult=2,
    eps=1e-20,
    table_rows=TOY.table_rows,
)


@dataclass(frozen=True)
class Call:
    """One call of the backend. thread: the name of who called."""

    name: str
    layer: int
    num_tokens: int
    thread: str


def kv_number(layer: int, keys: NDArray[Any]) -> NDArray[np.int64]:
    """The kv of tokens: int64 [T] in 1..127, exact as bfloat16. keys: windows or hash_ids."""
    weights = np.array([31, 17, 7, 3, 11, 5][: keys.shape[1]])
    return (keys.astype(np.int64) @ weights + 53 * layer) % 127 + 1


class RecordingBackend:
    """Implements `backends.base.Backend`."""

    name = "recording"
    near_reads: tuple[()] = ()
    near_batches = None
    project_beside: Project | None = None
    numerics: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, num_slots: int = 64) -> None:
        self.geometry = SIZES
        self.hash_tables = TOY
        self.num_slots = num_slots
        self.observer: StageObserver = Unobserved()
        self.serving = threading.Lock()
        self.encodings = ("F32", "F32")
        self.row_bytes = (16, 16)
        self.host_memory: HostMemory = PlainMemory()
        self.calls: list[Call] = []
        self.fail_on: str | None = None
        self.begun = threading.Semaphore(0)
        self._go_on = threading.Event()
        self._go_on.set()
        self._held = ""
        self._kv = np.zeros(num_slots, dtype=np.int64)
        self._kv_layer = np.full(num_slots, -1)

    def hold(self, thread: str = "") -> None:
        """Let the next calls (of a thread of that name) begin, then wait for `resume`."""
        self._held = thread
        self._go_on.clear()

    def resume(self) -> None:
        self._go_on.set()

    def wait_begun(self) -> None:
        """Wait until one more call has begun."""
        assert self.begun.acquire(timeout=30)

    def of(self, name: str) -> list[tuple[int, int]]:
        """(layer, tokens) of every call of a method."""
        return [(call.layer, call.num_tokens) for call in self.calls if call.name == name]

    def rows(
        self, layer_index: int, hash_ids: NDArray[np.int64], out: torch.Tensor, *, stored: bool
    ) -> None:
        self._begin("rows", layer_index, len(hash_ids))
        width = self.row_bytes[layer_index] if stored else SIZES.head_dim
        assert out.shape == (*hash_ids.shape, width)
        out.copy_(torch.from_numpy(hash_ids % 251)[:, :, None].expand(out.shape))

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        *,
        windows: NDArray[np.int32] | None = None,
        hash_ids: NDArray[np.int64] | None = None,
    ) -> None:
        self._begin("project", layer_index, len(slots))
        assert (windows is None) != (hash_ids is None)
        assert len(set(slots.tolist())) == len(slots)
        keys = windows if hash_ids is None else hash_ids
        assert keys is not None
        self._kv[slots] = kv_number(layer_index, keys)
        self._kv_layer[slots] = layer_index

    def read_kv(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        out: torch.Tensor,
    ) -> None:
        self._begin("read_kv", layer_index, len(slots))
        out.copy_(self._values(layer_index, slots, dead).expand(out.shape))

    def gate(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._begin("gate", layer_index, len(slots))
        out.copy_(residual + self._values(layer_index, slots, dead))

    def self_check(self) -> None:
        """Nothing to compare."""

    def close(self) -> None:
        """Nothing to free."""

    def _values(
        self, layer: int, slots: NDArray[np.int64], dead: NDArray[np.bool_]
    ) -> torch.Tensor:
        assert (self._kv_layer[slots] == layer).all(), "a slot of another layer, or never filled"
        return torch.from_numpy(np.where(dead, 0, self._kv[slots]))[:, None, None]

    def _begin(self, name: str, layer: int, num_tokens: int) -> None:
        self.calls.append(Call(name, layer, num_tokens, threading.current_thread().name))
        self.begun.release()
        if self._held in ("", threading.current_thread().name):
            assert self._go_on.wait(30)
        if self.fail_on == name:
            raise RuntimeError(f"{name} was made to fail")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
