"""What the CUDA backend checks about itself before it serves: bits against the chain, the chain
against float64, the gate against itself at other batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from ctypes import byref
from functools import partial

import numpy as np
import torch

from engram_core.backends import native as abi
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import GEMM_CLASSES, EngramV41
from engram_core.backends.race import Race
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    CHECKED_SIZES,
    CUBLASLT,
    STORED_FORMS,
    Stored,
    StoredWkv,
    arrange,
    edge_scales,
    edge_weights,
)
from engram_core.errors import SelfCheckFailed

_SEED = 41

EDGE_OUTPUTS = 160
"""Outputs of the weights that reach every code and edge: ten tiles, no two blocks alike."""


def gemm_matches_chain(engram: EngramV41, stream: Stream) -> list[int]:
    """Compare every cublasLt batch class with the chain by bits; returns the T that differ.

    Random rows: those of a table may be zeros. Each class is run at its largest T and just above
    the class before it.
    """
    geometry, most = engram.geometry, engram.max_tokens
    wanted = {min(size, most) for size in GEMM_CLASSES}
    wanted |= {size for size in (1, 8, 9, 16) if size <= most}
    wanted |= {size + 1 for size in (16, *GEMM_CLASSES) if size + 1 <= most}
    layer_index = layer_with_copy(engram)
    assert layer_index is not None, "cublasLt multiplies bf16 copies"
    with _Scratch(engram, stream) as scratch:
        rows = _random_rows(most, geometry.in_features)
        scratch.upload(rows)
        chain = scratch.project(most, CHAIN, layer_index=layer_index)
        return [
            count
            for count in sorted(wanted)
            if not torch.equal(
                scratch.project(count, CUBLASLT, layer_index=layer_index), chain[:count]
            )
        ]


def layer_with_copy(engram: EngramV41) -> int | None:
    """Index of the first layer whose bf16 copy of wkv is kept."""
    copies = [engram.layer(i).wkv is not None for i in range(engram.geometry.num_layers)]
    return copies.index(True) if any(copies) else None


def stored_matches_chain(
    engram: EngramV41, layer_index: int, stream: Stream, kernel: str
) -> list[int]:
    """Compare a kernel over a layer's stored wkv with the chain by bits; returns the T that differ.

    Random rows over the layer's weights (if their bf16 copy is kept), then over weights that reach
    every code and edge.
    """
    geometry, most = engram.geometry, min(engram.max_tokens, abi.INLINE_TOKENS)
    sizes = [size for size in CHECKED_SIZES if size <= most]
    different: set[int] = set()
    with _Scratch(engram, stream) as scratch:
        scratch.upload(_random_rows(most, geometry.in_features))
        if engram.layer(layer_index).wkv is not None:
            chain = scratch.project(most, CHAIN, layer_index=layer_index)
            different = {
                size
                for size in sizes
                if not _same_bits(
                    scratch.project(size, kernel, first=most - size, layer_index=layer_index),
                    chain[most - size :],
                )
            }
        with _edge_layer(engram, layer_index, stream) as (wkv, stored):
            scratch.edges = wkv, stored
            chain = scratch.project(most, CHAIN)
            different |= {
                size
                for size in sizes
                if not _same_bits(scratch.project(size, kernel), chain[:size])
            }
    return sorted(different)


def time_kernels(
    engram: EngramV41, layer_index: int, stream: Stream
) -> dict[int, dict[str, float]]:
    """Microseconds of every kernel that can serve a batch class, by its largest T."""
    times = {}
    with _Scratch(engram, stream) as scratch:
        scratch.upload(_random_rows(min(engram.max_tokens, 64), engram.geometry.in_features))
        first = engram.kernels_of(layer_index, 1)[0]
        before = partial(engram.project_with, first, layer_index, scratch.params(1))
        with closing(Race(engram.native, stream, before)) as race:
            for size in (size for size in BATCH_CLASSES if size <= engram.max_tokens):
                params = scratch.params(size)
                times[size] = race.run(
                    {
                        kernel: partial(engram.project_with, kernel, layer_index, params)
                        for kernel in engram.kernels_of(layer_index, size)
                    }
                )
    return times


def check_projection(engram: EngramV41, stream: Stream) -> None:
    """Compare the chain with float64, and a token's bits over batch sizes and places.

    Raises: SelfCheckFailed.
    """
    with ExitStack() as made:
        scratch = made.enter_context(_Scratch(engram, stream))
        layer_index = layer_with_copy(engram)
        if layer_index is None:  # then over weights of the first layer's encoding
            scratch.edges = made.enter_context(_edge_layer(engram, 0, stream))
        _check_chain(scratch, layer_index or 0)


def _check_chain(scratch: _Scratch, layer_index: int) -> None:
    engram = scratch.engram
    count = min(engram.max_tokens, 65)
    rows = _random_rows(count, engram.geometry.in_features)
    scratch.upload(rows)
    together = scratch.project(count, CHAIN, layer_index=layer_index)
    for size in (1, 2, 7, 8, 9, 16, 17, 33, 64):
        if size > count:
            break
        alone = scratch.project(size, CHAIN, first=count - size, layer_index=layer_index)
        if not _same_bits(alone, together[count - size :]):
            raise SelfCheckFailed(f"the projection of {size} tokens differs from {count}")
    _compare_with_float64(scratch, rows, together.view(torch.bfloat16), layer_index)


def check_gate(engram: EngramV41, stream: Stream) -> None:
    """Compare a token's gate over batch sizes, and a dead position with itself.

    Raises: SelfCheckFailed.
    """
    geometry, count = engram.geometry, 9
    generator = torch.Generator().manual_seed(_SEED)
    shape = (count, geometry.hc_mult, geometry.dim)
    residual = torch.randn(shape, generator=generator).to(torch.bfloat16)
    slots = np.zeros(count, dtype=np.int64)
    dead = np.zeros(count, dtype=np.bool_)
    dead[4] = True
    with _Scratch(engram, stream, residual.numel() * 2) as scratch:
        together = scratch.gate(residual, slots, dead)
        for place in range(count):
            alone = scratch.gate(residual[place : place + 1], slots[:1], dead[place : place + 1])
            if not torch.equal(alone[0].view(torch.int16), together[place].view(torch.int16)):
                raise SelfCheckFailed(f"the gate of token {place} depends on its batch")
        if not torch.equal(together[4].view(torch.int16), residual[4].view(torch.int16)):
            raise SelfCheckFailed("the gate changed a dead position")


class _Scratch:
    """Pinned and device memory for one check; the kv slots are not touched."""

    def __init__(self, engram: EngramV41, stream: Stream, num_bytes: int = 0) -> None:
        geometry = engram.geometry
        self.engram, self.stream = engram, stream
        native = engram.native
        self._end = Event(native)
        size = num_bytes or engram.max_tokens * max(geometry.kv_bytes, geometry.in_features * 2)
        self._host = PinnedBuffer(native, size)
        self._device = DeviceBuffer(native, size)
        self.edges: tuple[DeviceBuffer, StoredWkv] | None = None

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self._end, self._host, self._device):
            part.close()

    def upload(self, rows: torch.Tensor) -> None:
        """Put rows where projections read them (the rows workspace)."""
        self._host.tensor(rows.dtype, tuple(rows.shape)).copy_(rows)
        self._copy(self.engram.rows_workspace.address, self._host.address, rows.numel() * 2)

    def params(self, count: int, first: int = 0) -> abi.Project:
        """Rows first..first+count of the workspace into this scratch."""
        engram = self.engram
        return engram.project_params(
            count,
            self.stream,
            to=self._device.address,
            rows=engram.rows_workspace.address + first * engram.geometry.in_features * 2,
        )

    def project(
        self, count: int, kernel: str, *, first: int = 0, layer_index: int = 0
    ) -> torch.Tensor:
        """Bits of kv of rows first..first+count: int16 [count, out_features].

        Over the weights in `edges`, if there are some, instead of the layer's.
        """
        geometry, engram = self.engram.geometry, self.engram
        params = self.params(count, first)
        if self.edges is None:
            engram.project_with(kernel, layer_index, params)
            outputs = geometry.out_features
        else:
            outputs = params.out_features = EDGE_OUTPUTS
            self._project_edges(kernel, params)
        num_bytes = count * outputs * 2
        self._copy(self._host.address, self._device.address, num_bytes)
        return self._host.tensor(torch.int16, (count, outputs)).clone()

    def _project_edges(self, kernel: str, params: abi.Project) -> None:
        assert self.edges is not None
        wkv, stored = self.edges
        native = self.engram.native
        if kernel == CHAIN:
            params.wkv = wkv.address
            native.project_chain(byref(params))
            return
        params.wkv = stored.arranged.address
        whole = abi.ProjectStored(params, abi.FORMATS[stored.encoding], STORED_FORMS[kernel])
        native.project_stored(byref(whole))

    def wkv_rows(self, first: int, count: int, layer_index: int) -> torch.Tensor:
        """Some rows of the wkv that `project` multiplies: bfloat16 [count, in_features]."""
        row_bytes = self.engram.geometry.in_features * 2
        wkv = self.edges[0] if self.edges is not None else self.engram.layer(layer_index).wkv
        assert wkv is not None
        self._copy(self._device.address, wkv.address + first * row_bytes, count * row_bytes)
        self._copy(self._host.address, self._device.address, count * row_bytes)
        shape = (count, self.engram.geometry.in_features)
        return self._host.tensor(torch.bfloat16, shape).clone()

    def gate(self, residual: torch.Tensor, slots: np.ndarray, dead: np.ndarray) -> torch.Tensor:
        """Gate a few tokens in place in pinned memory."""
        staged = self._host.tensor(residual.dtype, tuple(residual.shape))
        staged.copy_(residual)
        self.engram.gate(
            0,
            len(residual),
            self._host.address,
            self._host.address,
            self.stream,
            slots=slots.ctypes.data,
            is_dead=dead.ctypes.data,
            is_f32=False,
        )
        self._wait()
        return staged.clone()

    def _copy(self, to: int, origin: int, num_bytes: int) -> None:
        self.engram.native.copy(to, origin, num_bytes, self.stream.handle)
        self._wait()

    def _wait(self) -> None:
        self._end.record(self.stream)
        self._end.wait()


@contextmanager
def _edge_layer(
    engram: EngramV41, layer_index: int, stream: Stream
) -> Iterator[tuple[DeviceBuffer, StoredWkv]]:
    """Weights [EDGE_OUTPUTS, in_features] of a layer's encoding: as bf16, and as stored."""
    native, stored = engram.native, engram.layer(layer_index).stored
    assert isinstance(stored, StoredWkv)
    encoding, inputs = stored.encoding, engram.geometry.in_features
    codes = edge_weights(encoding, EDGE_OUTPUTS, inputs)
    has_scales = encoding == "E4M3_E8M0_32"
    scales = edge_scales(EDGE_OUTPUTS, inputs) if has_scales else np.empty(0, np.uint8)
    with ExitStack() as made:
        end = Event(native)
        made.callback(end.close)
        staged = PinnedBuffer(native, codes.size + scales.size + 16)
        made.callback(staged.close)
        staged.bytes[: codes.size] = codes.reshape(-1)
        staged.bytes[codes.size : codes.size + scales.size] = scales.reshape(-1)
        wkv = DeviceBuffer(native, EDGE_OUTPUTS * inputs * 2)
        made.callback(wkv.close)
        scales_at = staged.address + codes.size if has_scales else 0
        params = abi.Dequantize(
            format=abi.FORMATS[encoding],
            rows_per_scale=32 if has_scales else 1,
            num_rows=EDGE_OUTPUTS,
            row_values=inputs,
            codes=staged.address,
            scales=scales_at,
            out=wkv.address,
            stream=stream.handle,
        )
        native.dequantize(byref(params))
        place = Stored(encoding, EDGE_OUTPUTS, inputs, staged.address, scales_at)
        arranged = arrange(native, place, stream, made)
        if isinstance(arranged, str):
            raise SelfCheckFailed(f"weights made for the check were refused: {arranged}")
        yield wkv, arranged


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits of bfloat16 seen as int16; a NaN equals any NaN."""
    both_nan = got.view(torch.bfloat16).isnan() & want.view(torch.bfloat16).isnan()
    return bool(((got == want) | both_nan).all())


def _random_rows(count: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn((count, in_features), generator=generator).to(torch.bfloat16)


def _compare_with_float64(
    scratch: _Scratch, rows: torch.Tensor, kv: torch.Tensor, layer_index: int
) -> None:
    """Hold a few outputs to NUMBERS.md C."""
    geometry = scratch.engram.geometry
    count = min(64, kv.shape[1])
    first = kv.shape[1] - count
    weights = scratch.wkv_rows(first, count, layer_index).double()
    x = rows[:16].double()
    exact = x @ weights.T
    got = kv[:16, first:].double()
    spread = x.abs() @ weights.abs().T
    tiny = 2.0**-126 * (weights.abs().sum(1) + x.abs().sum(1, keepdim=True))
    ulp = torch.exp2(torch.floor(torch.log2(got.abs().clamp_min(2.0**-126))) - 7)
    bound = ulp / 2 + 2.0**-22 * (geometry.in_features / 16 + 1) * spread + tiny
    if bool(((got - exact).abs() > bound).any()):
        worst = float(((got - exact).abs() - bound).max())
        raise SelfCheckFailed(f"the projection misses float64 by {worst:.3g} more than allowed")
