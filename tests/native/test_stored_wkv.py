"""What decides on the host about wkv as stored: sizes, edges, and who multiplies which batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engram_core.backends import choices
from engram_core.backends import native as abi
from engram_core.backends.choices import choose_kernels
from engram_core.backends.cuda import _wkv_bytes
from engram_core.backends.device import Stream
from engram_core.backends.engram_v41 import DeviceLayer, EngramV41
from engram_core.backends.native import FORMATS, Native, Unsupported
from engram_core.backends.race import Race
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    CUBLASLT,
    STORED,
    WGMMA,
    StoredWkv,
    arranged_bytes,
    edge_scales,
    edge_weights,
)
from engram_core.checkpoint.sources import TensorSource
from engram_core.errors import SelfCheckFailed
from engram_core.geometry import Geometry
from tests.native.host_library import build_host_library


@pytest.mark.parametrize("encoding", ["E4M3_E8M0_32", "Q2_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("shape", [(25600, 6144), (32, 256), (48, 256), (32, 128)])
def test_the_ledger_counts_the_bytes_of_the_kernels(
    tmp_path: Path, encoding: str, shape: tuple[int, int]
) -> None:
    host = build_host_library(tmp_path)
    size = host.host_arranged_bytes(FORMATS[encoding], *shape)
    assert arranged_bytes(encoding, *shape) == max(size, 0)


@pytest.mark.parametrize(
    ("kind", "with_copy", "without"),
    [("Q2_K", 2 + 84 / 256, 84 / 256), ("Q8_0", 2 + 34 / 32, 34 / 32), ("Q5_K", 2, 2)],
)
def test_the_ledger_counts_the_copy_that_is_kept(
    kind: str, with_copy: float, without: float
) -> None:
    geometry = Geometry((1,), 4, 8, 256, 5120, 4, 1e-20, (384_000_000,))
    tensor = cast(TensorSource, type("Tensor", (), {"type": kind, "scale": None})())
    count = 25600 * 6144
    assert _wkv_bytes(tensor, geometry, keeps_copy=True) == with_copy * count
    assert _wkv_bytes(tensor, geometry, keeps_copy=False) == without * count


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


def engram_of(stored: StoredWkv | str, *, has_gemm: bool, has_copy: bool = True) -> EngramV41:
    engram = object.__new__(EngramV41)
    wkv = object() if has_copy else None
    layer = cast(DeviceLayer, type("Layer", (), {"stored": stored, "wkv": wkv})())
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


@pytest.mark.parametrize(
    ("tokens", "kernel"), [(1, STORED), (9, WGMMA), (64, WGMMA), (65, WGMMA), (8192, WGMMA)]
)
def test_without_the_copy_stored_weights_serve_every_batch(tokens: int, kernel: str) -> None:
    both = StoredWkv("Q2_K", cast(Any, None), (STORED, WGMMA))
    engram = engram_of(both, has_gemm=False, has_copy=False)
    assert engram.kernels_of(0, min(tokens, 64)) == [STORED, WGMMA]
    assert engram.kernel_of(0, tokens) == STORED  # nothing was measured yet
    for size in BATCH_CLASSES[1:]:
        engram.prefer(0, size, WGMMA)
    engram.prefer(0, 8, STORED)
    assert engram.kernel_of(0, tokens) == kernel


class Launches:
    """Stands for the library: keeps what each launch of stored weights was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, int, int]] = []

    def project_stored(self, whole: Any) -> None:
        project = ctypes.cast(whole, ctypes.POINTER(abi.ProjectStored))[0].project
        self.asked.append(
            (
                project.num_tokens,
                project.rows or 0,
                project.kv or 0,
                project.slots or 0,
                project.slots_on_device,
            )
        )


def passes_of(tokens: int, *, slots: int) -> list[tuple[int, int, int, int, int]]:
    stored = StoredWkv("Q2_K", cast(Any, type("Buffer", (), {"address": 64})()))
    engram = engram_of(stored, has_gemm=False, has_copy=False)
    engram.native = cast(Native, Launches())
    params = abi.Project(
        rows=1 << 20, kv=1 << 30, slots=slots, num_tokens=tokens, in_features=256, out_features=32
    )
    engram.project_with(STORED, 0, params)
    return cast(Launches, engram.native).asked


def test_large_batches_go_in_passes_of_64_tokens() -> None:
    row, kv = 256 * 2, 32 * 2
    assert passes_of(64, slots=512) == [(64, 1 << 20, 1 << 30, 512, 0)]
    assert passes_of(130, slots=512) == [
        (64, 1 << 20, 1 << 30, 512, 1),
        (64, (1 << 20) + 64 * row, 1 << 30, 512 + 64 * 8, 1),
        (2, (1 << 20) + 128 * row, 1 << 30, 512 + 128 * 8, 1),
    ]
    assert passes_of(65, slots=0)[1] == (1, (1 << 20) + 64 * row, (1 << 30) + 64 * kv, 0, 1)


def test_stored_weights_with_other_bits_are_never_used() -> None:
    engram = engram_of(ARRANGED, has_gemm=False)
    engram.prefer(0, 8, STORED)
    engram.drop_stored(0, "other bits than the chain at T = [3]")
    assert engram.kernel_of(0, 3) == CHAIN
    assert engram.kernels_of(0, 3) == [CHAIN]


def checked(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int] | str], *, has_copy: bool = True
) -> tuple[StoredWkv | str, dict[str, str]]:
    """Choose kernels where each answers with the T that differ, or with why it cannot run."""

    def compare(*values: Any) -> list[int]:
        answer = answers[values[3]]
        if isinstance(answer, str):
            raise Unsupported(answer)
        return answer

    monkeypatch.setattr(choices, "stored_matches_chain", compare)
    monkeypatch.setattr(choices, "time_kernels", lambda *_: {8: {CHAIN: 76.0, STORED: 43.0}})
    engram = engram_of(StoredWkv("Q2_K", cast(Any, None)), has_gemm=False, has_copy=has_copy)
    engram.geometry = Geometry((1,), 4, 8, 256, 5120, 4, 1e-20, (1000,))
    numerics: dict[str, str] = {}
    choose_kernels(engram, cast(Stream, AnyStream()), numerics)
    return engram.layer(0).stored, numerics


def test_a_kernel_with_other_bits_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, numerics = checked(monkeypatch, {STORED: [], WGMMA: [3, 64]})
    assert isinstance(stored, StoredWkv)
    assert stored.kernels == (STORED,)
    assert "stored wgmma: other bits than the chain at T = [3, 64]" in numerics["wkv_stored_1"]
    assert numerics["wkv_kernels_1"] == "T <= 8 stored (chain 76.0, stored 43.0 us)"


def test_a_kernel_that_this_device_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, numerics = checked(monkeypatch, {STORED: [], WGMMA: "needs compute capability 9.0"})
    assert isinstance(stored, StoredWkv)
    assert stored.kernels == (STORED,)
    assert "needs compute capability 9.0" in numerics["wkv_stored_1"]


def test_without_any_kernel_the_copy_serves_or_the_start_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, list[int] | str] = {STORED: [1], WGMMA: "not here"}
    stored, numerics = checked(monkeypatch, answers)
    assert isinstance(stored, str)
    assert "other bits than the chain at T = [1]" in numerics["wkv_stored_1"]
    with pytest.raises(SelfCheckFailed, match="wkv_copy on"):
        checked(monkeypatch, answers, has_copy=False)
