"""What a CUDA backend decides once at start: who multiplies, and what is a graph. By bits first,
then by the time measured on the device at hand; `numerics` says what was decided and why."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engram_core.backends.base import Backend
from engram_core.backends.cuda_check import (
    gemm_matches_chain,
    layer_with_copy,
    stored_matches_chain,
    time_kernels,
)
from engram_core.backends.device import Stream
from engram_core.backends.engram_v41 import CHAIN_TOKENS, EngramV41
from engram_core.backends.graphs import GraphUse
from engram_core.backends.native import INLINE_TOKENS, Unsupported
from engram_core.backends.stored_wkv import STORED_FORMS, StoredWkv
from engram_core.errors import SelfCheckFailed

GRAPH_CLASSES = (1, 8, 16, 32, 64)
"""Largest T of each class of batches that graphs or launches serve, whichever was faster."""

_WORTH = 0.98
"""A graph serves a class where it takes at most this share of the launches' time."""

_ROUNDS = 11

Numerics = dict[str, str]


class Served(Backend, Protocol):
    """A backend that `choose_graphs` can time."""

    def synchronize(self) -> None:
        """Wait for every enqueued projection."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Make pinned memory: uint8 [num_bytes]."""


def open_gemm(
    engram: EngramV41, stream: Stream, numerics: Numerics, candidates: Sequence[str], num_sms: int
) -> bool:
    """Take the first cublasLt whose every batch class gives the chain's bits.

    Without one the chain serves every T.
    """
    reasons = []
    if layer_with_copy(engram) is None:
        numerics["wkv"] = (
            f"as stored, in passes of {INLINE_TOKENS} tokens, one float32 accumulator a value, k "
            "ascending; no bf16 copies were kept (wkv_copy off); bits do not depend on the batch"
        )
        return False
    for library in candidates:
        try:
            version = engram.open_gemm(library, num_sms=num_sms)
        except Unsupported as error:
            reasons.append(error.message)
            continue
        different = gemm_matches_chain(engram, stream)
        if not different:
            numerics["wkv"] = (
                f"chain of mma.sync m16n8k16 up to {CHAIN_TOKENS} tokens, cublasLt {version} "
                f"above on {num_sms} SMs, each batch class compared with the chain by bits at start"
            )
            return True
        engram.close_gemm()
        reasons.append(f"{library}: other bits than the chain at T = {different}")
    numerics["wkv_without_cublaslt"] = "; ".join(reasons) or "no library was tried"
    return False


def choose_kernels(engram: EngramV41, stream: Stream, numerics: Numerics) -> None:
    """Compare what multiplies wkv as stored with the chain by bits, then let the fastest kernel
    measured here serve each class of batches up to 64 tokens."""
    for layer_index, layer_id in enumerate(engram.geometry.layer_ids):
        layer = engram.layer(layer_index)
        if isinstance(layer.stored, StoredWkv):
            _check_stored(engram, stream, numerics, layer_index)
        times = time_kernels(engram, layer_index, stream)
        if not isinstance(layer.stored, StoredWkv):
            numerics[f"wkv_stored_{layer_id}"] = f"not used: {layer.stored}"
        lines = []
        for size, by_kernel in times.items():
            fastest = min(by_kernel, key=lambda name: by_kernel[name])
            engram.prefer(layer_index, size, fastest)
            measured = ", ".join(f"{name} {us:.1f}" for name, us in by_kernel.items())
            lines.append(f"T <= {size} {fastest} ({measured} us)")
        numerics[f"wkv_kernels_{layer_id}"] = "; ".join(lines)
        if layer.wkv is None:
            numerics[f"wkv_kernels_{layer_id}"] += f"; above in passes of {INLINE_TOKENS} tokens"


def _check_stored(engram: EngramV41, stream: Stream, numerics: Numerics, layer_index: int) -> None:
    stored, layer_id = engram.layer(layer_index).stored, engram.geometry.layer_ids[layer_index]
    assert isinstance(stored, StoredWkv)
    kernels, reasons = [], []
    for kernel in STORED_FORMS:
        try:
            different = stored_matches_chain(engram, layer_index, stream, kernel)
        except Unsupported as error:
            reasons.append(f"{kernel}: {error.message}")
            continue
        if different:
            reasons.append(f"{kernel}: other bits than the chain at T = {different}")
        else:
            kernels.append(kernel)
    if not kernels and engram.layer(layer_index).wkv is None:
        raise SelfCheckFailed(
            f"wkv of layer {layer_id}: {'; '.join(reasons)} ({stored.encoding}); keep the bf16 "
            "copy (wkv_copy on)"
        )
    if not kernels:
        engram.drop_stored(layer_index, f"{'; '.join(reasons)} ({stored.encoding})")
        return
    stored.kernels = tuple(kernels)
    has_copy = engram.layer(layer_index).wkv is not None
    numerics[f"wkv_stored_{layer_id}"] = (
        f"{stored.encoding} as stored, up to {INLINE_TOKENS} tokens: bf16-rounded in registers, "
        "the chain's bits (compared at start); "
        + ("its bf16 copy serves larger batches" if has_copy else "larger batches in passes")
        + "".join(f"; not used: {reason}" for reason in reasons)
    )


def choose_graphs(backend: Served, use: GraphUse, mode: str) -> str:
    """Let graphs serve every class of batches (mode "on"), or those where they are faster here
    ("auto"). Returns what was decided."""
    lines, below = [], 0
    residual = _residual(backend) if mode == "auto" else None
    for size in (size for size in GRAPH_CLASSES if size <= use.max_tokens):
        counts = range(below + 1, size + 1)
        below = size
        for what, switch in (("miss", use.misses), ("hit", use.hits)):
            if residual is None:
                switch(counts, True)
                continue
            call = _call(backend, what, size, residual)
            if call is None:
                continue
            launched, captured = _race(call, partial(switch, [size]))
            is_worth = captured <= _WORTH * launched
            switch(counts, is_worth)
            lines.append(
                f"{what} T <= {size} {'graph' if is_worth else 'launches'} "
                f"({launched:.1f} us launched, {captured:.1f} as a graph)"
            )
    return "; ".join(lines) or f"batches of up to {use.max_tokens} tokens"


def _residual(backend: Served) -> torch.Tensor:
    geometry = backend.geometry
    shape = (INLINE_TOKENS, geometry.hc_mult, geometry.dim)
    buffer = backend.host_buffer(int(np.prod(shape)) * 2)
    buffer.zero_()
    return buffer.view(torch.bfloat16).view(shape)


def _call(
    backend: Served, what: str, count: int, residual: torch.Tensor
) -> Callable[[], None] | None:
    """A miss (projection and wait) or a hit (gate) of so many tokens; None: not so many slots."""
    if count > backend.num_slots:
        return None
    slots, dead = np.arange(count), np.zeros(count, np.bool_)
    if what == "hit":
        return lambda: backend.gate(0, slots, dead, residual[:count], residual[:count])
    rng = np.random.default_rng(count)
    shape = (2 * _ROUNDS, count, backend.geometry.max_ngram_size)
    fresh = iter(rng.integers(0, 1 << 30, shape, dtype=np.int32))

    def miss() -> None:
        backend.project(0, slots, windows=next(fresh))
        backend.synchronize()

    return miss


def _race(call: Callable[[], None], switch: Callable[[bool], None]) -> tuple[float, float]:
    """Median wall microseconds of a call, launched and as a graph, in turns; the first round does
    not count."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(_ROUNDS):
        for is_graph, some in enumerate(times):
            switch(bool(is_graph))
            begin = time.perf_counter()
            call()
            some.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])
