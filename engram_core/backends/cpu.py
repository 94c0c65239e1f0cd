"""libengram_cpu through ctypes: the gate, and what a small read needs, without torch.

The library is built where this package is installed and a C++ compiler is there. Where it is
missing torch's gate serves (`gate.py`); one process uses one of the two for everything.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
)
from functools import cache
from itertools import chain
from pathlib import Path
from struct import Struct, pack_into
from struct import error as StructError  # noqa: N812
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.backends.base import Run
from engram_core.backends.gate import Gate
from engram_core.errors import BadTensor, Internal
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.sessions import Spot

ABI_VERSION = 3
NUMERICS = (
    "float32, 32 partial sums in a fixed tree, no fused multiply-add; bits do not depend on the "
    "batch, nor on the CPU"
)

_LIBRARY = "libengram_cpu.so"

_SPOT = Struct("4q")
_ASK_WORDS, _SEGMENT_WORDS = 4, 4  # int64 of an engram_cpu_ask, and of each segment behind it


class GateParams(Structure):
    """engram_cpu_gate_params."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "slots", "is_dead", "qk", "residual", "out")),
        *((name, c_int64) for name in ("num_slots", "num_tokens", "dim")),
        *((name, c_int32) for name in ("hc_mult", "is_f32", "num_threads")),
        ("eps", c_float),
    )


class BatchParams(Structure):
    """engram_cpu_batch."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "is_dead", "spots", "token_map")),
        *((name, c_int64) for name in ("vocab_size", "max_tokens")),
        *((name, c_int64) for name in ("num_tokens", "num_spots", "num_ids")),
        *((name, c_int32) for name in ("max_ngram_size", "pad_id", "layer")),
    )


class CpuLibrary:
    """The library. Raises Internal: it is of another version than these structures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        version = library.engram_cpu_abi_version()
        if version != ABI_VERSION:
            raise Internal(
                f"{path}: expected version {ABI_VERSION}, got {version}; install again "
                "(make setup)",
                expected=ABI_VERSION,
                got=version,
            )
        library.engram_cpu_target.restype = c_char_p
        self.target = library.engram_cpu_target().decode()
        self.gate = library.engram_cpu_gate
        self.gate.argtypes = (POINTER(GateParams),)
        # These keep the interpreter's lock: having it again costs more than they take.
        library = ctypes.PyDLL(str(path))
        self.near_gate, self.judge = library.engram_cpu_gate, library.engram_cpu_judge
        self.near_gate.argtypes = (POINTER(GateParams),)
        self.judge.argtypes, self.judge.restype = (c_void_p, c_void_p, c_void_p), c_int64
        self.settle = library.engram_cpu_settle
        self.settle.argtypes, self.settle.restype = (c_void_p, c_void_p, c_double), None


class TokenGate(Protocol):
    """A layer's gate on the CPU: torch's (`gate.Gate`), or `CpuGate`. Same rules, other last bits.

    numerics: what runs, for `info`
    """

    numerics: str

    def __call__(self, residual: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Gate tokens that have their kv beside them, none of them dead.

        residual: bfloat16 or float32 [T, hc_mult, dim]; kv: bfloat16 [T, hc_mult + 1, dim]
        Returns: as residual
        """

    def update(
        self,
        store: torch.Tensor,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Gate tokens whose kv lies in slots; dead ones keep their bits.

        store: bfloat16 [slots, (hc_mult + 1) * dim]; slots: int64 [T]; dead: bool [T]
        residual, out: bfloat16 or float32 [T, hc_mult, dim], contiguous; out may be residual
        """


class CpuGate:
    """`TokenGate` in C++.

    qk: float32 [hc_mult, dim]
    """

    def __init__(self, library: CpuLibrary, geometry: Geometry, qk: torch.Tensor) -> None:
        self.library = library
        self._qk = qk.contiguous()
        self.numerics = f"{NUMERICS} (libengram_cpu, {library.target})"
        self._params = GateParams(
            qk=self._qk.data_ptr(), dim=geometry.dim, hc_mult=geometry.hc_mult, eps=geometry.eps
        )

    def __call__(self, residual: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Gate tokens that have their kv beside them (see `TokenGate`)."""
        residual, kv = residual.contiguous(), kv.contiguous()
        out = torch.empty_like(residual)
        self._call(kv, 0, 0, residual, out)
        return out

    def update(
        self,
        store: torch.Tensor,
        slots: NDArray[np.int64],
        dead: NDArray[np.bool_],
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Gate tokens whose kv lies in slots (see `TokenGate`)."""
        slots, dead = np.ascontiguousarray(slots), np.ascontiguousarray(dead)
        self._call(store, slots.ctypes.data, dead.ctypes.data, residual, out)

    def _call(
        self,
        kv: torch.Tensor,
        slots: int,
        dead: int,
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        params = self.params_of(kv)
        params.slots, params.is_dead = slots, dead
        params.residual, params.out = residual.data_ptr(), out.data_ptr()
        params.num_tokens, params.is_f32 = len(residual), residual.dtype == torch.float32
        params.num_threads = torch.get_num_threads()
        if self.library.gate(byref(params)):
            raise BadTensor("gate: expected slots of the store", expected=f"0..{len(kv) - 1}")

    def params_of(self, store: torch.Tensor) -> GateParams:
        """Return parameters of their own. store: bfloat16 [slots, (hc_mult + 1) * dim]"""
        params = GateParams.from_buffer_copy(self._params)
        params.kv, params.num_slots = store.data_ptr(), len(store)
        return params


class NearKeys:
    """Sessions of a batch judged, the kv store's keys of its positions, and which are dead: half of
    a `NearRead`.

    max_tokens: of a batch
    """

    def __init__(
        self, library: CpuLibrary, layer_index: int, tables: EngramHashTables, max_tokens: int = 64
    ) -> None:
        self.max_tokens = max_tokens
        self._width = (2 + tables.max_ngram_size) * 4
        self._keys = (c_char * (self._width * max_tokens))()
        self._view = memoryview(self._keys).cast("B")
        self._dead = (c_char * max_tokens)()
        self._slots = (c_int64 * max_tokens)()
        spots = (c_char * (_SPOT.size * max_tokens))()
        self._spots = memoryview(spots).cast("B")
        self._key = Struct(f"{self._width}s")
        self._ask = (c_int64 * (_ASK_WORDS + (_SEGMENT_WORDS + 1) * max_tokens))()
        self._token_map = np.ascontiguousarray(tables.token_map, dtype=np.int32)
        self._of_batch = BatchParams(
            keys=addressof(self._keys),
            is_dead=addressof(self._dead),
            spots=addressof(spots),
            token_map=self._token_map.ctypes.data,
            vocab_size=len(self._token_map),
            max_tokens=max_tokens,
            max_ngram_size=tables.max_ngram_size,
            pad_id=tables.pad_id,
            layer=layer_index,
        )
        self._dead_at = addressof(self._dead)
        self._ask_at, self._batch_at = addressof(self._ask), addressof(self._of_batch)
        self._run_judge, self._run_settle = library.judge, library.settle

    def judge(
        self,
        sessions: int,
        tenant: int,
        segments: Sequence[int],
        token_ids: Sequence[int] | None,
        *,
        begins: bool,
    ) -> int:
        """Take segments into a batch if they are plain (see `NearRead.judge`)."""
        num_segments = len(segments) // _SEGMENT_WORDS
        num_ids = -1 if token_ids is None else len(token_ids)
        ids = token_ids or ()
        try:
            pack_into(
                f"{_ASK_WORDS + len(segments) + len(ids)}q", self._ask, 0,
                begins, num_segments, num_ids, tenant, *segments, *ids,
            )  # fmt: skip
        except StructError:  # more than it takes, or no int64
            return 0
        judged: int = self._run_judge(sessions, self._batch_at, self._ask_at)
        return judged

    def keys(self) -> list[bytes]:
        """Return the kv store's keys of the batch (see `NearRead.keys`)."""
        keys = self._key.iter_unpack(self._view[: self._of_batch.num_tokens * self._width])
        return list(chain.from_iterable(keys))

    def settle(self, sessions: int, now_s: float) -> tuple[list[Spot], bytes]:
        """End and renew the sessions of the batch (see `NearRead.settle`)."""
        batch = self._of_batch
        self._run_settle(sessions, self._batch_at, now_s)
        spots = _SPOT.iter_unpack(self._spots[: batch.num_spots * _SPOT.size])
        return [Spot(*spot) for spot in spots], self._dead.raw[: batch.num_tokens]


class CpuNearRead(NearKeys):
    """`backends.base.NearRead`. store: bfloat16 [slots, (hc_mult + 1) * dim], kept"""

    can_project = False

    def __init__(
        self, gate: CpuGate, layer_index: int, tables: EngramHashTables, store: torch.Tensor
    ) -> None:
        super().__init__(gate.library, layer_index, tables)
        self._kept = gate, store
        self._of_gate = gate.params_of(store)
        self._of_gate.num_threads = 1
        self._slots_at = addressof(self._slots)
        self._run_gate, self._to_gate = gate.library.near_gate, byref(self._of_gate)

    def reaches(self, residual: int, count: int, *, is_f32: bool) -> bool:
        """Any memory (see `NearRead.reaches`)."""
        return True

    def project(self, slots: list[int], tokens: list[int]) -> bool:
        """Nothing: it takes milliseconds here (see `NearRead.project`)."""
        return False

    def wait(self) -> None:
        """Nothing was begun (see `NearRead.wait`)."""

    def gate(self, slots: list[int], runs: list[Run]) -> bool:
        """Gate in place (see `NearRead.gate`). Raises Internal: no such slots."""
        params = self._of_gate
        self._slots[: len(slots)] = slots  # type: ignore[assignment]  # ctypes takes integers
        for first, count, residual, is_f32 in runs:
            params.slots, params.is_dead = self._slots_at + 8 * first, self._dead_at + first
            params.residual = params.out = residual
            params.is_f32, params.num_tokens = is_f32, count
            if first + count > len(slots) or self._run_gate(self._to_gate):
                raise Internal(f"slots {slots} of {params.num_slots}")
        return True


@cache
def find_library() -> CpuLibrary | None:
    """Return the library beside this file (installed), in build/cpu (a source tree), or installed
    apart from it (an editable install); None where this install has none.

    Raises Internal: it is of another version.
    """
    here = Path(__file__).resolve()
    installed = Path(sysconfig.get_path("platlib"), *__package__.split("."), _LIBRARY)
    build = here.parents[2] / "build" / "cpu" / _LIBRARY
    for path in (here.with_name(_LIBRARY), build, installed):
        if path.is_file():
            return CpuLibrary(path)
    return None


def make_gate(geometry: Geometry, qk: torch.Tensor) -> TokenGate:
    """Return a layer's gate as this process computes it. qk: float32 [hc_mult, dim]."""
    library = find_library()
    return Gate(geometry, qk) if library is None else CpuGate(library, geometry, qk)


def near_reads(
    gates: Sequence[TokenGate], tables: EngramHashTables, store: torch.Tensor
) -> tuple[CpuNearRead, ...]:
    """Return what small reads take, by layer index; nothing where torch gates."""
    native = [gate for gate in gates if isinstance(gate, CpuGate)]
    if len(native) < len(gates):
        return ()
    return tuple(CpuNearRead(gate, i, tables, store) for i, gate in enumerate(native))
