"""Graphs: the bits of launches at every batch size, hit and miss, whoever multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.native import Native, cublaslt_candidates
from engram_core.backends.stored_wkv import BATCH_CLASSES, CHAIN, CUBLASLT, STORED, Stored, arrange
from engram_core.errors import BadTensor, EngramError
from engram_core.quant import row_format, to_bf16
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.layers import (
    device_layer,
    geometry_of,
    hash_tables,
    random_layer,
    random_windows,
)

SIZES = [1, 2, 7, 8, 9, 16, 17, 33, 64]
SLOTS = 1000
DIM = 1024


class Captured:
    """Two layers, the second with a re-quantised input and weights as stored (Q2_K)."""

    def __init__(self, native: Native, kernel: str) -> None:
        self.arrays, self.owned = Arrays(native), ExitStack()
        self.tables = hash_tables(500, num_layers=2)
        geometry = geometry_of(self.tables, dim=DIM)
        layers = []
        for index in range(2):
            host = random_layer(
                geometry, seed=index, requantize_input=index == 1, layer_index=index
            )
            codes = self._weights(geometry.out_features, geometry.in_features, seed=index)
            values = row_format("Q2_K").dequantize(codes)
            host.wkv = to_bf16(values)
            layer = device_layer(self.arrays, host)
            on_device = self.arrays.up(codes)
            place = Stored(
                "Q2_K", geometry.out_features, geometry.in_features, on_device.address, 0
            )
            layer.stored = arrange(native, place, self.arrays.stream, ExitStack())
            layers.append(layer)
        self.backend = CudaBackend(
            native,
            geometry,
            self.tables,
            layers,
            SLOTS,
            sizes=Sizes(chunk_tokens=128, lane_tokens=64, num_lanes=4),
        )
        if kernel == CUBLASLT:
            assert self.backend.open_gemm(cublaslt_candidates())
        for index in range(2):
            for size in BATCH_CLASSES:
                self.backend.engram.prefer(index, size, kernel)
        self.backend.capture_graphs("on")
        assert self.backend.numerics["graphs"] == "batches of up to 64 tokens"

    @staticmethod
    def _weights(outputs: int, inputs: int, seed: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        blocks = rng.integers(0, 256, (outputs, inputs // 256, 84), dtype=np.uint8)
        factors = rng.standard_normal((outputs, inputs // 256, 2)).astype(np.float16) * 0.01
        blocks[:, :, 80:] = factors.astype(np.float16).view(np.uint8).reshape(outputs, -1, 4)
        return blocks.reshape(outputs, -1)

    def eager(self, is_eager: bool) -> None:
        """Launch one by one, or by graphs again."""
        use = self.backend._graphs
        assert use is not None
        use.misses(range(1, 65), not is_eager)
        use.hits(range(1, 65), not is_eager)

    def kv(self, slots: NDArray[np.int64]) -> torch.Tensor:
        out = torch.empty((len(slots), 5, DIM), dtype=torch.bfloat16)
        self.backend.read_kv(0, slots, np.zeros(len(slots), np.bool_), out)
        return out

    def close(self) -> None:
        self.backend.close()
        self.arrays.close()


@pytest.fixture(scope="module", params=[CHAIN, CUBLASLT, STORED])
def captured(native: Native, request: pytest.FixtureRequest) -> Iterator[Captured]:
    made = Captured(native, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_miss_has_the_bits_of_launches(captured: Captured, count: int, layer: int) -> None:
    windows = random_windows(count, seed=count)
    slots = np.random.default_rng(count).permutation(SLOTS)[:count].astype(np.int64)
    answers = []
    for is_eager in (True, False):
        captured.eager(is_eager)
        # What the slots held before must not pass for the answer.
        captured.backend.project(layer, slots, windows=random_windows(count, seed=999))
        captured.backend.synchronize()
        before = captured.kv(slots)
        captured.backend.project(layer, slots, windows=windows)
        answers.append(captured.kv(slots))
        assert not same_bits(before, answers[-1])
    assert same_bits(*answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_hit_has_the_bits_of_launches(
    captured: Captured, dtype: torch.dtype, count: int, is_pinned: bool, in_place: bool
) -> None:
    backend = captured.backend
    slots = np.random.default_rng(count).permutation(SLOTS)[:count].astype(np.int64)
    dead = np.arange(count) % 5 == 3
    backend.project(1, slots, windows=random_windows(count, seed=count))
    slots[dead] = -7  # never looked at
    generator = torch.Generator().manual_seed(count)
    residual = torch.randn((count, 4, DIM), generator=generator).to(dtype)
    answers = []
    for is_eager in (True, False):
        captured.eager(is_eager)
        given, out = residual.clone(), torch.empty_like(residual)
        if is_pinned:
            given, out = pinned(backend, given), pinned(backend, out)
        out = given if in_place else out
        backend.gate(1, slots, dead, given, out)
        answers.append(out.clone())
    assert same_bits(*answers)
    assert not same_bits(answers[0], residual)


def pinned(backend: CudaBackend, data: torch.Tensor) -> torch.Tensor:
    buffer = backend.host_buffer(data.numel() * data.element_size())
    copy = buffer.view(data.dtype).view(data.shape)
    copy.copy_(data)
    return copy


def test_a_queue_of_replays_keeps_each_its_own_windows_and_slots(captured: Captured) -> None:
    """Descriptors are written again while projections before are still under way."""
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 65, 300)
    windows = random_windows(SLOTS, seed=77)
    captured.eager(False)
    for count in counts:
        some = rng.permutation(SLOTS)[:count].astype(np.int64)
        captured.backend.project(0, some, windows=windows[some])
    every = np.arange(SLOTS)
    for first in range(0, SLOTS, 64):
        some = every[first : first + 64]
        captured.backend.project(0, some, windows=windows[some])
    got = captured.kv(every)
    captured.eager(True)
    for first in range(0, SLOTS, 128):
        some = every[first : first + 128]
        captured.backend.project(0, some, windows=windows[some])
    assert same_bits(got, captured.kv(every))


def test_a_gate_waits_for_the_replay_its_slots_come_from(captured: Captured) -> None:
    captured.eager(False)
    backend = captured.backend
    residual = pinned(backend, torch.randn((64, 4, DIM)).to(torch.bfloat16))
    slots, dead = np.arange(64), np.zeros(64, np.bool_)
    windows = random_windows(640, seed=8).reshape(10, 64, 4)
    wanted = []
    for some in windows:
        backend.project(0, slots, windows=some)
        backend.synchronize()
        out = torch.empty_like(residual)
        backend.gate(0, slots, dead, residual, out)
        wanted.append(out)
    for turn in range(100):
        backend.project(0, slots, windows=windows[turn % 10])
        out = torch.empty_like(residual)
        backend.gate(0, slots, dead, residual, out)
        assert same_bits(out, wanted[turn % 10])


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_store_is_refused(captured: Captured, slot: int) -> None:
    captured.eager(False)
    slots = np.array([3, slot])
    with pytest.raises(BadTensor, match=f"slots: expected 0..{SLOTS - 1}"):
        captured.backend.project(0, slots, windows=random_windows(2, seed=1))
    residual = torch.zeros((2, 4, DIM))
    with pytest.raises(BadTensor, match=f"slots: expected 0..{SLOTS - 1}"):
        captured.backend.gate(0, slots, np.zeros(2, np.bool_), residual, residual)


def test_off_captures_nothing_and_auto_says_what_it_measured(native: Native) -> None:
    arrays = Arrays(native)
    tables = hash_tables(100)
    geometry = geometry_of(tables, dim=64)
    for mode in ("off", "auto"):
        layer = device_layer(arrays, random_layer(geometry, seed=1))
        backend = CudaBackend(
            native, geometry, tables, [layer], 40, sizes=Sizes(chunk_tokens=64, num_lanes=2)
        )
        backend.capture_graphs(mode)
        said = backend.numerics["graphs"]
        if mode == "off":
            assert said == "off"
            assert backend._graphs is None
        else:
            # 40 slots: what cannot be measured is launched.
            assert "miss T <= 32" in said
            assert "hit T <= 1 " in said
            assert "T <= 64" not in said
            assert not backend._graphs.has_miss(64)
        backend.close()
    arrays.close()


def test_the_end_of_no_capture_is_refused_and_leaves_the_stream_usable(arrays: Arrays) -> None:
    native, stream = arrays.native, arrays.stream
    with pytest.raises(EngramError, match="graph could not be captured"):
        native.make("capture_end", stream.handle)
    assert bool((arrays.down(arrays.up(np.arange(9)), torch.int64, (9,)) == torch.arange(9)).all())


def test_a_descriptor_holds_64_tokens(arrays: Arrays) -> None:
    params = abi.Gate(descriptor=16, num_tokens=65, dim=64, hc_mult=1, eps=1e-20)
    with pytest.raises(BadTensor, match="a descriptor holds 64 tokens, got 65"):
        arrays.native.gate(byref(params))
