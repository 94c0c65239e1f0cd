"""What decides on the host about wkv as stored: sizes, edges, and who multiplies which batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engram_core.backends.device import Stream
from engram_core.backends.engram_v41 import DeviceLayer, EngramV41
from engram_core.backends.native import FORMATS, Native
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    CUBLASLT,
    STORED,
    Race,
    StoredWkv,
    arranged_bytes,
    edge_scales,
    edge_weights,
)
from tests.native.host_library import build_host_library


@pytest.mark.parametrize("encoding", ["E4M3_E8M0_32", "Q2_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("shape", [(25600, 6144), (32, 256), (48, 256), (32, 128)])
def test_the_ledger_counts_the_bytes_of_the_kernels(
    tmp_path: Path, encoding: str, shape: tuple[int, int]
) -> None:
    host = build_host_library(tmp_path)
    size = host.host_arranged_bytes(FORMATS[encoding], *shape)
    assert arranged_bytes(encoding, *shape) == max(size, 0)


def test_edge_weights_reach_every_plain_code_and_scale() -> None:
    codes, scales = edge_weights("E4M3_E8M0_32", 160, 6144), edge_scales(160, 6144)
    assert set(np.unique(codes)) == {code for code in range(256) if code & 0x7F != 0x7F}
    assert set(np.unique(scales[0])) == set(range(135))
    assert scales.max() <= 134


def test_edge_weights_of_q2k_reach_every_scale_and_kind_of_factor() -> None:
    blocks = edge_weights("Q2_K", 160, 6144).reshape(160, 24, 84)
    assert set(np.unique(blocks[:, :, :16])) == set(range(256))
    factors = blocks[:, :, 80:].copy().view(np.float16)
    assert np.isinf(factors).sum() == 1
    assert np.isnan(factors).sum() == 1
    assert np.isfinite(factors[20:]).all()


class Clock:
    """Stands for the library: launches append to a log, and events read a clock that they move."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now, self.marks = 0.0, dict[int, float]()

    def make(self, verb: str, *_: int) -> int:
        assert verb == "event_create"
        self.marks[len(self.marks) + 1] = 0.0
        return len(self.marks)

    def event_record(self, event: int, _: int) -> None:
        self.marks[event] = self.now

    def event_wait(self, event: int, _: int) -> None:
        assert event in self.marks

    def event_elapsed_us(self, begin: int, end: int, answer: Any) -> None:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_float))[0] = self.marks[end] - self.marks[begin]

    def event_destroy(self, event: int) -> None:
        del self.marks[event]

    def launch(self, name: str, us: float) -> Callable[[], None]:
        def go() -> None:
            self.log.append(name)
            self.now += us

        return go


class AnyStream:
    handle = 0


def test_a_race_times_each_kernel_behind_a_busy_device() -> None:
    clock = Clock()
    before = clock.launch("before", 75)
    race = Race(cast(Native, clock), cast(Stream, AnyStream()), before)
    times = race.run({"chain": clock.launch("chain", 76), "stored": clock.launch("stored", 43)})
    race.close()
    assert times == {"chain": 76, "stored": 43}
    assert clock.log[:6] == ["before", "before", "chain", "before", "before", "stored"]
    assert not clock.marks


def engram_of(stored: StoredWkv | str, *, has_gemm: bool) -> EngramV41:
    engram = object.__new__(EngramV41)
    layer = cast(DeviceLayer, type("Layer", (), {"stored": stored})())
    engram._layers = [(layer, cast(Any, None), cast(Any, None))]
    engram._gemm, engram._largest_gemm = int(has_gemm), 8192 * has_gemm
    engram._fastest = {}
    return engram


ARRANGED = StoredWkv("Q2_K", cast(Any, None))


@pytest.mark.parametrize(
    ("tokens", "has_gemm", "kernel"),
    [(1, True, CHAIN), (16, True, CHAIN), (17, True, CUBLASLT), (17, False, CHAIN)],
)
def test_without_a_measurement_no_stored_weights_are_used(
    tokens: int, has_gemm: bool, kernel: str
) -> None:
    assert engram_of(ARRANGED, has_gemm=has_gemm).kernel_of(0, tokens) == kernel


@pytest.mark.parametrize(
    ("tokens", "kernel"),
    [(1, STORED), (8, STORED), (9, CHAIN), (64, STORED), (65, CUBLASLT), (9000, CHAIN)],
)
def test_a_batch_goes_to_the_fastest_kernel_of_its_class(tokens: int, kernel: str) -> None:
    engram = engram_of(ARRANGED, has_gemm=True)
    for size, fastest in zip(BATCH_CLASSES, (STORED, CHAIN, CUBLASLT, STORED), strict=True):
        engram.prefer(0, size, fastest)
    assert engram.kernel_of(0, tokens) == kernel


def test_stored_weights_with_other_bits_are_never_used() -> None:
    engram = engram_of(ARRANGED, has_gemm=False)
    engram.prefer(0, 8, STORED)
    engram.drop_stored(0, "other bits than the chain at T = [3]")
    assert engram.kernel_of(0, 3) == CHAIN
    assert engram.kernels_of(0, 3) == [CHAIN]
