"""The CUDA backend through its protocol: bits against the kernels' promise, and against the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engram_core.backends.base import Unobserved
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.native import Device, Native, cublaslt_candidates
from engram_core.errors import BadTensor, RowOutOfRange, TooManyTokens
from engram_core.hashing import hash_windows
from engram_core.quant import requantize, row_format, to_bf16
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.layers import (
    HostLayer,
    device_layer,
    geometry_of,
    hash_tables,
    random_layer,
    random_windows,
)
from tests.oracle import project as oracle_project

if TYPE_CHECKING:
    from engram_core.engine import Engine
    from engram_core.engine_types import Output

SLOTS = 2000


class Served:
    """Two layers of dim 1024, the second with a re-quantised input; small chunks and lanes."""

    def __init__(self, native: Native, sizes: Sizes, *, is_integrated: bool = False) -> None:
        self.arrays = Arrays(native)
        self.tables = hash_tables(500, num_layers=2)
        self.geometry = geometry_of(self.tables, dim=1024)
        self.layers: list[HostLayer] = [
            random_layer(self.geometry, seed=1),
            random_layer(self.geometry, seed=2, requantize_input=True, layer_index=1),
        ]
        self.backend = CudaBackend(
            native,
            self.geometry,
            self.tables,
            [device_layer(self.arrays, layer) for layer in self.layers],
            SLOTS,
            device=Device(num_sms=132, integrated=is_integrated),
            sizes=sizes,
        )

    def kv(self, count: int, layer: int = 0, dead: np.ndarray | None = None) -> torch.Tensor:
        """Slots 0..count."""
        out = torch.empty((count, 5, 1024), dtype=torch.bfloat16)
        flags = np.zeros(count, np.bool_) if dead is None else dead
        self.backend.read_kv(layer, np.arange(count), flags, out)
        return out

    def rows(self, ids: np.ndarray, layer: int) -> torch.Tensor:
        stored = torch.from_numpy(self.layers[layer].rows[ids]).view(torch.bfloat16)
        return requantize(stored) if layer == 1 else stored


@pytest.fixture(scope="module")
def served(native: Native) -> Iterator[Served]:
    made = Served(native, Sizes(chunk_tokens=256, lane_tokens=100, num_lanes=3))
    yield made
    made.backend.close()
    made.arrays.close()


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return random_windows(1000, seed=3)


@pytest.fixture(scope="module")
def kv(served: Served, windows: np.ndarray) -> list[torch.Tensor]:
    """kv of 1000 windows of both layers, computed by the chain one token at a time."""
    answers = []
    for layer in range(2):
        for i in range(1000):
            served.backend.project(layer, np.array([i]), windows=windows[i : i + 1])
        answers.append(served.kv(1000, layer))
    return answers


@pytest.mark.parametrize("layer", [0, 1])
def test_kv_keeps_the_bound_to_float64(
    served: Served, windows: np.ndarray, kv: list[torch.Tensor], layer: int
) -> None:
    ids = hash_windows(windows[:50], served.tables, [layer])[:, 0]
    rows = served.rows(ids, layer).reshape(50, -1).float()
    exact, error = oracle_project(rows, served.layers[layer].wkv)
    got = kv[layer][:50].reshape(50, -1).double()
    ulp = torch.exp2(torch.floor(torch.log2(got.abs().clamp_min(2.0**-126))) - 7)
    assert bool(((got - exact).abs() <= error + ulp / 2).all())


@pytest.mark.parametrize("with_gemm", [False, True])
@pytest.mark.parametrize("count", [1, 2, 9, 64, 65, 255, 256, 257, 1000])
@pytest.mark.parametrize("source", ["windows", "hash_ids"])
def test_kv_has_the_same_bits_in_every_batch(
    served: Served,
    windows: np.ndarray,
    kv: list[torch.Tensor],
    with_gemm: bool,
    count: int,
    source: str,
) -> None:
    served.backend.engram.close_gemm()
    if with_gemm:
        assert served.backend.open_gemm(cublaslt_candidates())
    for layer in range(2):
        some = windows[1000 - count :]
        inputs = {"windows": some}
        if source == "hash_ids":
            inputs = {"hash_ids": hash_windows(some, served.tables, [layer])[:, 0]}
        slots = np.random.default_rng(count).permutation(SLOTS)[:count].astype(np.int64)
        for places in (slots, np.arange(count)):
            served.backend.project(layer, places, **inputs)
            out = torch.empty((count, 5, 1024), dtype=torch.bfloat16)
            served.backend.read_kv(layer, places, np.zeros(count, np.bool_), out)
            assert same_bits(out, kv[layer][1000 - count :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 16, 17, 64, 65, 100, 101, 350, 1000])
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_gate_gives_the_same_bits_by_every_way_in_and_out(
    served: Served,
    windows: np.ndarray,
    dtype: torch.dtype,
    count: int,
    is_pinned: bool,
    in_place: bool,
) -> None:
    slots, dead = np.arange(count), np.zeros(count, np.bool_)
    dead[::5] = True
    served.backend.project(0, slots, windows=windows[:count])
    generator = torch.Generator().manual_seed(count)
    residual = torch.randn((count, 4, 1024), generator=generator).to(dtype)
    one_by_one = torch.empty_like(residual)
    for i in range(count):
        place = slice(i, i + 1)
        served.backend.gate(0, slots[place], dead[place], residual[place], one_by_one[place])
    given, out = residual.clone(), torch.empty_like(residual)
    if is_pinned:
        given, out = pinned_like(served.backend, residual), pinned_like(served.backend, out)
    out = given if in_place else out
    served.backend.gate(0, slots, dead, given, out)
    assert same_bits(out, one_by_one)
    assert same_bits(out[::5], residual[::5])


def pinned_like(backend: CudaBackend, data: torch.Tensor) -> torch.Tensor:
    buffer = backend.host_buffer(data.numel() * data.element_size())
    copy = buffer.view(data.dtype).view(data.shape)
    copy.copy_(data)
    return copy


def test_memory_in_place_at_every_size_gives_the_same_bits(
    native: Native, windows: np.ndarray, kv: list[torch.Tensor]
) -> None:
    shared = Served(native, Sizes(chunk_tokens=64, lane_tokens=32), is_integrated=True)
    shared.backend.project(0, np.arange(300), windows=windows[:300])
    assert same_bits(shared.kv(300), kv[0][:300])
    residual = torch.randn((300, 4, 1024))
    slots, dead = np.arange(300), np.zeros(300, np.bool_)
    out = torch.empty_like(residual)
    shared.backend.gate(0, slots, dead, residual, out)
    shared.backend.gate(0, slots[:40], dead[:40], residual[:40], residual[:40])
    assert same_bits(residual[:40], out[:40])
    shared.backend.close()
    shared.arrays.close()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("count", [0, 1, 99, 350])
def test_rows_are_those_of_the_table(
    served: Served, windows: np.ndarray, stored: bool, count: int
) -> None:
    ids = hash_windows(windows[:count], served.tables, [1])[:, 0]
    width, dtype = (512, torch.uint8) if stored else (256, torch.bfloat16)
    out = torch.empty((count, 24, width), dtype=dtype)
    served.backend.rows(1, ids, out, stored=stored)
    want = torch.from_numpy(served.layers[1].rows[ids])
    assert torch.equal(out.view(torch.uint8).view(want.shape), want)


def test_dead_positions_read_as_zeros_and_their_slots_not_at_all(
    served: Served, kv: list[torch.Tensor], windows: np.ndarray
) -> None:
    served.backend.project(0, np.arange(9), windows=windows[:9])
    dead = np.zeros(9, np.bool_)
    dead[4] = True
    slots = np.arange(9)
    slots[4] = -1
    out = torch.empty((9, 5, 1024), dtype=torch.bfloat16)
    served.backend.read_kv(0, slots, dead, out)
    want = kv[0][:9].clone()
    want[4, :4], want[4, 4] = 0.0, -0.0
    assert same_bits(out, want)


def test_rows_may_run_beside_the_rest(
    served: Served, windows: np.ndarray, kv: list[torch.Tensor]
) -> None:
    ids = hash_windows(windows, served.tables, [0])[:, 0]
    want = torch.from_numpy(served.layers[0].rows[ids]).view(torch.bfloat16).view(1000, 24, 256)
    wrong: list[str] = []

    def read() -> None:
        out = torch.empty((1000, 24, 256), dtype=torch.bfloat16)
        for _ in range(20):
            served.backend.rows(0, ids, out, stored=False)
            if not same_bits(out, want):
                wrong.append("rows")

    beside = threading.Thread(target=read)
    beside.start()
    for _ in range(20):
        served.backend.project(0, np.arange(1000), windows=windows)
        if not same_bits(served.kv(1000), kv[0]):
            wrong.append("kv")
    beside.join()
    assert wrong == []


def test_gates_may_run_beside_projections_into_other_slots(
    served: Served, windows: np.ndarray
) -> None:
    slots, dead = np.arange(20), np.zeros(20, np.bool_)
    served.backend.project(0, slots, windows=windows[:20])
    residual = torch.randn((20, 4, 1024)).to(torch.bfloat16)
    want = torch.empty_like(residual)
    served.backend.gate(0, slots, dead, residual, want)
    wrong: list[int] = []

    def gate() -> None:
        out = torch.empty_like(residual)
        for turn in range(200):
            served.backend.gate(0, slots, dead, residual, out)
            if not torch.equal(out, want):
                wrong.append(turn)

    threads = [threading.Thread(target=gate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        served.backend.project(0, np.arange(1000, 2000), windows=windows)
    for thread in threads:
        thread.join()
    assert wrong == []


class Heard:
    """A `StageObserver` that writes down what it is told."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.lates: dict[str, list[float]] = {}

    def part(self, stage: str, seconds: float) -> None:
        self.parts[stage] = self.parts.get(stage, 0.0) + seconds

    def late(self, stage: str, seconds: float) -> None:
        self.lates.setdefault(stage, []).append(seconds)


def test_an_observer_is_told_the_stages_of_the_device(served: Served, windows: np.ndarray) -> None:
    heard = Heard()
    slots, dead = np.arange(350), np.zeros(350, np.bool_)
    residual = torch.randn((350, 4, 1024))
    served.backend.observer = heard
    try:
        for _ in range(40):
            served.backend.project(0, slots, windows=windows[:350])
            served.backend.synchronize()
        assert set(heard.lates) == {"hash_gather", "wkv"}
        assert all(0 < seconds < 1 for some in heard.lates.values() for seconds in some)
        begin = time.perf_counter()
        for _ in range(5):
            served.backend.gate(0, slots, dead, residual, residual)
        seconds = time.perf_counter() - begin
        assert set(heard.parts) == {"h2d", "d2h"}
        assert 0 < sum(heard.parts.values()) < seconds
        heard.parts.clear()
        served.backend.gate(0, slots[:9], dead[:9], residual[:9], residual[:9])
        assert not heard.parts  # in place: no copies to tell
    finally:
        served.backend.observer = Unobserved()


def test_two_payloads_in_turn_never_mix(served: Served, windows: np.ndarray) -> None:
    """Field report F2: a copy that returns before it has read."""
    slots, dead = np.arange(350), np.zeros(350, np.bool_)
    served.backend.project(0, slots, windows=windows[:350])
    payloads = [torch.randn((350, 4, 1024)) for _ in range(2)]
    wanted = [torch.empty_like(payloads[0]) for _ in range(2)]
    for payload, want in zip(payloads, wanted, strict=True):
        served.backend.gate(0, slots, dead, payload, want)
    scratch, out = torch.empty_like(payloads[0]), torch.empty_like(payloads[0])
    for turn in range(200):
        scratch.copy_(payloads[turn % 2])
        served.backend.gate(0, slots, dead, scratch, out)
        scratch.fill_(7.0)
        assert torch.equal(out, wanted[turn % 2])


@pytest.mark.parametrize("with_gemm", [False, True])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_seeds_calls_give_the_same_bits(
    served: Served, windows: np.ndarray, with_gemm: bool, count: int
) -> None:
    engram, arrays = served.backend.engram, served.arrays
    served.backend.synchronize()
    engram.close_gemm()
    if with_gemm:
        assert served.backend.open_gemm(cublaslt_candidates())
    slots, dead = np.arange(count), np.zeros(count, np.bool_)
    served.backend.project(0, slots, windows=windows[:count])
    residual = torch.randn((count, 4, 1024))
    want = torch.empty_like(residual)
    served.backend.gate(0, slots, dead, residual, want)
    ids = hash_windows(windows[:count], served.tables, [0])[:, 0]
    rows, streams = arrays.up(served.rows(ids, 0)), arrays.up(residual)
    engram.rows_from_bf16(rows.address, ids.size, arrays.stream)
    engram.apply(0, streams.address, count, arrays.stream)
    assert same_bits(arrays.down(streams, torch.float32, tuple(residual.shape)), want)


def test_q2k_rows_fill_the_workspace(served: Served) -> None:
    engram, arrays = served.backend.engram, served.arrays
    served.backend.synchronize()
    stored = np.random.default_rng(1).integers(0, 256, (48, 84), dtype=np.uint8)
    engram.rows_from_q2k(arrays.up(stored).address, 48, arrays.stream)
    got = arrays.down(engram.rows_workspace, torch.bfloat16, (48, 256))
    assert same_bits(got, to_bf16(row_format("Q2_K").dequantize(stored)))
    with pytest.raises(TooManyTokens, match="holds 6144 rows, got 6145"):
        engram.rows_from_q2k(0, 6145, arrays.stream)
    with pytest.raises(TooManyTokens, match="holds 6144 rows, got 6145"):
        engram.rows_from_bf16(0, 6145, arrays.stream)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_store_is_refused(
    served: Served, windows: np.ndarray, slot: int
) -> None:
    with pytest.raises(BadTensor, match=f"slots: expected 0..{SLOTS - 1}"):
        served.backend.project(0, np.array([slot]), windows=windows[:1])


@pytest.mark.parametrize("row", [-1, 10**9])
def test_a_row_outside_the_table_is_refused(served: Served, row: int) -> None:
    ids = np.zeros((2, 24), np.int64)
    ids[1, 7] = row
    out = torch.empty((2, 24, 256), dtype=torch.bfloat16)
    with pytest.raises(RowOutOfRange, match="row ids"):
        served.backend.rows(0, ids, out, stored=False)
    with pytest.raises(RowOutOfRange, match="row ids"):
        served.backend.project(0, np.arange(2), hash_ids=ids)


def test_windows_and_ids_together_are_refused(served: Served, windows: np.ndarray) -> None:
    with pytest.raises(BadTensor, match="exactly one"):
        served.backend.project(
            0, np.array([0]), windows=windows[:1], hash_ids=np.zeros((1, 24), np.int64)
        )


def test_the_self_check_passes(served: Served) -> None:
    served.backend.self_check()


@pytest.mark.parametrize(("fmt", "quant"), [("gguf", "Q2_K"), ("safetensors", "FP8")])
def test_a_checkpoint_is_loaded_and_verified(
    native: Native, tmp_path: Path, fmt: str, quant: str
) -> None:
    from engram_core.tools.synth import FORMATS, synth
    from engram_core.tools.verify import verify

    assert quant in FORMATS[fmt], FORMATS
    out = tmp_path / ("tiny.gguf" if fmt == "gguf" else "tiny")
    synth(out, preset="tiny", fmt=fmt, quant=quant, seed=1)
    result = verify(out, device="cuda:0")
    assert result.ok, result
    assert result.backend == "cuda"


@pytest.mark.parametrize(("fmt", "quant"), [("gguf", "Q2_K"), ("safetensors", "FP8")])
def test_rows_from_host_and_disk_have_the_bits_of_the_device(
    native: Native, tmp_path: Path, fmt: str, quant: str
) -> None:
    from engram_core.backends.cuda import load
    from engram_core.checkpoint import open_checkpoint
    from engram_core.memory import Budget
    from engram_core.tools.synth import synth

    out = tmp_path / ("tiny.gguf" if fmt == "gguf" else "tiny")
    synth(out, preset="tiny", fmt=fmt, quant=quant, seed=3)
    checkpoint = open_checkpoint(out)
    answers = {}
    for placement in ("device", "host", "disk"):
        backend = load(
            checkpoint,
            device="cuda:0",
            placement=placement,
            num_slots=4096,
            budget=Budget(),
            progress=lambda *_: None,
        )
        answers[placement] = kv_and_rows(backend)
        backend.self_check()
        backend.close()
    for placement in ("host", "disk"):
        for got, want in zip(answers[placement], answers["device"], strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def kv_and_rows(backend: CudaBackend) -> list[torch.Tensor]:
    """Of random windows and of their ids, in batches of every kind."""
    geometry, tables = backend.geometry, backend.hash_tables
    rng, answers = np.random.default_rng(1), []
    for count in (1, 64, 65, 2500):
        shape = (count, geometry.max_ngram_size)
        windows = rng.integers(0, tables.compressed_vocab_size, shape, dtype=np.int32)
        slots = rng.permutation(4096)[:count].astype(np.int64)
        for layer in range(geometry.num_layers):
            ids = hash_windows(windows, tables, [layer])[:, 0]
            for inputs in ({"windows": windows}, {"hash_ids": ids}):
                backend.project(layer, slots, **inputs)
                kv = torch.empty((count, geometry.hc_mult + 1, geometry.dim), dtype=torch.bfloat16)
                backend.read_kv(layer, slots, np.zeros(count, np.bool_), kv)
                answers.append(kv)
            for stored in (True, False):
                width = backend.row_bytes[layer] if stored else geometry.head_dim
                dtype = torch.uint8 if stored else torch.bfloat16
                rows = torch.empty((count, geometry.n_hash_cols, width), dtype=dtype)
                backend.rows(layer, ids, rows, stored=stored)
                answers.append(rows)
    return answers


def test_the_engine_serves_the_same_answers_on_the_device(native: Native, tmp_path: Path) -> None:
    """Rows and ids by bits; kv and residuals as close as two backends may be."""
    from engram_core.checkpoint import open_checkpoint
    from engram_core.engine import Engine
    from engram_core.engine_types import EngineLimits, Output
    from engram_core.loader import load
    from engram_core.tools.synth import synth

    out = tmp_path / "tiny.gguf"
    synth(out, preset="tiny", fmt="gguf", quant="Q2_K", seed=2)
    checkpoint = open_checkpoint(out)
    answers: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda:0"):
        backend = load(checkpoint, device=device, num_slots=4096)
        with Engine(backend, EngineLimits(ahead_tokens=64, chunk_tokens=64)) as engine:
            answers[device] = [
                tensor
                for output in (Output.HASH_IDS, Output.ROWS, Output.KV, Output.RESIDUAL)
                for tensor in _read(engine, output)
            ]
        backend.close()
    pairs = zip(answers["cpu"], answers["cuda:0"], strict=True)
    for want, got in pairs:
        if want.dtype == torch.int64:
            assert torch.equal(got, want)
        else:
            assert torch.allclose(got.float(), want.float(), rtol=2**-6, atol=2**-9)


def _read(engine: Engine, output: Output) -> list[torch.Tensor]:
    """100 tokens of two anonymous segments, both layers (a residual: one after the other)."""
    from engram_core.engine_types import Output, Segments, StepRequest

    count = np.array([60, 40], np.int32)
    tokens = np.random.default_rng(1).integers(0, 9, 100)
    lookback = np.array([[-1, -1, -1], [1, -1, 2]], np.int32)
    segments = Segments(count, np.array([0, 3]), lookback=lookback, token_ids=tokens)
    tensors: list[torch.Tensor] = []
    for layers in ((1,), (14,)):
        residual = None
        if output is Output.RESIDUAL:
            generator = torch.Generator().manual_seed(3)
            residual = torch.randn((100, 2, 64), generator=generator)
        request = StepRequest(segments, output, layers, residual=residual)
        answer = engine.step("", request).result(timeout=60)
        tensors.append(answer.tensors[layers[0]].clone())
    return tensors
