"""The reference backend: a token's bits depend on its window and its residual, on nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_core.backends import cpu, projection, self_check
from engram_core.backends.base import Backend
from engram_core.backends.gate import sigmoid
from engram_core.backends.projection import Cut, Projection, projection_bytes, rounding_bound
from engram_core.backends.reference import ReferenceBackend
from engram_core.errors import BadTensor, CheckpointError, RowOutOfRange, SelfCheckFailed
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import hash_windows
from engram_core.quant import ROW264, requantize
from engram_core.tables import HostTable
from engram_core.weights import EngramLayerWeights
from tests import oracle
from tests.native.host_library import build_cpu_library

GATES = json.loads((Path(__file__).parents[1] / "golden" / "gate.json").read_text())
TABLES = EngramHashTables.derive((1, 14), 4, 2, 100, np.arange(16), 2)
SIZES = Geometry((1, 14), 4, 2, 256, 64, 2, 1e-20, TABLES.table_rows)
NONE_DEAD = np.zeros(600, dtype=np.bool_)
SLOTS = np.arange(600)
BATCHES = [1, 2, 3, 7, 15, 16, 17, 33, 64, 100, 513]


def stored_rows(seed: int, num_rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Finite FP8 rows of moderate size."""
    rows = np.random.default_rng(seed).integers(0, 256, (num_rows, 264), dtype=np.uint8)
    rows[:, :256][rows[:, :256] & 127 == 127] = 0
    rows[:, 256:] = 120 + rows[:, 256:] % 6
    return rows


def layer_weights(sizes: Geometry, layer_id: int, *, requantized: bool) -> EngramLayerWeights:
    generator = torch.Generator().manual_seed(layer_id)
    wkv = torch.randn((sizes.out_features, sizes.in_features), generator=generator)
    qk = 1 + 0.05 * torch.randn((sizes.hc_mult, sizes.dim), generator=generator)
    wkv = (wkv * sizes.in_features**-0.5).to(torch.bfloat16)
    return EngramLayerWeights(layer_id, wkv, qk, requantized)


def make_backend(sizes: Geometry = SIZES, *, requantized: bool = False) -> ReferenceBackend:
    rows = [stored_rows(i, n) for i, n in enumerate(sizes.table_rows)]
    tables = [HostTable(ROW264, 256, [r[:, :256], r[:, 256:]]) for r in rows]
    weights = [layer_weights(sizes, i, requantized=requantized) for i in sizes.layer_ids]
    return ReferenceBackend(sizes, TABLES, tables, weights, num_slots=600)


@pytest.fixture(scope="module", autouse=True, params=["torch", "native"])
def gate_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Everything here holds for both gates."""
    library = None
    if request.param == "native":
        library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_library", lambda: library)
        yield request.param


@pytest.fixture(scope="module")
def backend(gate_kind: str) -> ReferenceBackend:
    return make_backend()


@pytest.fixture(params=[True, False], ids=["bf16_products", "f32_products"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    monkeypatch.setattr(projection, "has_bf16_products", lambda: request.param)
    return make_backend()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def windows_of(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 16, (count, 4)).astype(np.int32)


def residual_of(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((count, 2, 64), generator=generator).to(dtype)


def kv_of(backend: ReferenceBackend, windows: Any, layer_index: int = 0) -> torch.Tensor:
    count = len(windows)
    backend.project(layer_index, SLOTS[:count], windows=windows)
    out = torch.empty((count, 3, 64), dtype=torch.bfloat16)
    backend.read_kv(layer_index, SLOTS[:count], NONE_DEAD[:count], out)
    return out


def gated(
    backend: ReferenceBackend, residual: torch.Tensor, dead: Any = None, layer_index: int = 0
) -> torch.Tensor:
    """Gate against what the first slots hold."""
    count, out = len(residual), torch.empty_like(residual)
    dead = NONE_DEAD[:count] if dead is None else dead
    backend.gate(layer_index, SLOTS[:count], dead, residual, out)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def gate_alone(h: Any, kv: Any, qk: Any, eps: float = 1e-20) -> torch.Tensor:
    """Gate [T, hc, dim] without a backend; kv holds keys, then the value."""
    h = torch.as_tensor(h, dtype=torch.float32)
    sizes = replace(SIZES, hc_mult=h.shape[1], dim=h.shape[2], eps=eps)
    kv, qk = torch.tensor(kv).to(torch.bfloat16), torch.tensor(qk, dtype=torch.float32)
    return cpu.make_gate(sizes, qk)(h, kv)


# ---------------------------------------------------------------------- rows


def test_it_is_a_backend(backend: ReferenceBackend) -> None:
    checked: Backend = backend
    assert (checked.encodings, checked.row_bytes) == ((ROW264, ROW264), (264, 264))
    assert set(checked.numerics) == {"wkv", "gate", "wkv_input"}


@pytest.mark.parametrize("count", [0, 1, 513])
@pytest.mark.parametrize("layer_index", [0, 1])
def test_rows_are_those_of_the_table(
    backend: ReferenceBackend, count: int, layer_index: int
) -> None:
    ids = hash_windows(windows_of(count), TABLES)[:, layer_index]
    raw = torch.empty((count, 6, 264), dtype=torch.uint8)
    rows = torch.empty((count, 6, 256), dtype=torch.bfloat16)
    backend.rows(layer_index, ids, raw, stored=True)
    backend.rows(layer_index, ids, rows, stored=False)
    stored = stored_rows(layer_index, SIZES.table_rows[layer_index])
    assert (raw.numpy() == stored[ids]).all()
    table = HostTable(ROW264, 256, [stored])
    assert torch.equal(rows, table.gather(ids.reshape(-1)).view(count, 6, 256))


def test_a_row_outside_the_table_is_refused(backend: ReferenceBackend) -> None:
    ids = np.full((1, 6), 660)
    with pytest.raises(RowOutOfRange):
        backend.rows(0, ids, torch.empty((1, 6, 264), dtype=torch.uint8), stored=True)
    with pytest.raises(RowOutOfRange):
        backend.project(0, SLOTS[:1], hash_ids=ids)


# ---------------------------------------------------------------------- projection


@pytest.mark.parametrize("count", BATCHES)
def test_kv_does_not_depend_on_the_batch(
    either: ReferenceBackend, threads: int, count: int
) -> None:
    windows = windows_of(513)
    whole = kv_of(either, windows)
    assert same_bits(kv_of(either, windows[:count]), whole[:count])
    assert same_bits(kv_of(either, windows[-count:]), whole[-count:])


def test_kv_does_not_depend_on_its_slot_or_its_mates(backend: ReferenceBackend) -> None:
    windows = windows_of(40)
    alone = kv_of(backend, windows[7:8])
    slots = np.random.default_rng(1).permutation(600)[:40]
    backend.project(0, slots, windows=windows)
    out = torch.empty((1, 3, 64), dtype=torch.bfloat16)
    backend.read_kv(0, slots[7:8], NONE_DEAD[:1], out)
    assert same_bits(out, alone)


def test_windows_and_their_hash_ids_give_the_same_kv(backend: ReferenceBackend) -> None:
    windows = windows_of(20)
    expected = kv_of(backend, windows, layer_index=1)
    backend.project(1, SLOTS[:20], hash_ids=hash_windows(windows, TABLES)[:, 1])
    out = torch.empty_like(expected)
    backend.read_kv(1, SLOTS[:20], NONE_DEAD[:20], out)
    assert same_bits(out, expected)


@pytest.mark.parametrize("requantized", [False, True])
def test_kv_is_one_float32_accumulation_rounded_once(requantized: bool) -> None:
    backend, windows = make_backend(requantized=requantized), windows_of(50)
    got = kv_of(backend, windows).view(50, -1).double()
    ids = hash_windows(windows, TABLES)[:, 0]
    rows = torch.empty((50, 6, 256), dtype=torch.bfloat16)
    backend.rows(0, ids, rows, stored=False)
    x = rows.view(50, -1)
    x = requantize(x).double() if requantized else x.double()
    wkv = layer_weights(SIZES, 1, requantized=False).wkv.double()
    assert ((got - x @ wkv.t()).abs() <= rounding_bound(got, x, wkv)).all()


def test_requantising_changes_kv_where_a_group_is_below_the_floor() -> None:
    row = np.full((SIZES.table_rows[0], 264), 0x01, dtype=np.uint8)
    row[:, 256:] = 100  # 2^-9 * 2^-27: far below 1e-4 / 448
    kv = []
    for requantized in (False, True):
        sizes = replace(SIZES, layer_ids=(1,), table_rows=SIZES.table_rows[:1])
        tables = EngramHashTables.derive((1,), 4, 2, 100, np.arange(16), 2)
        weights = [layer_weights(sizes, 1, requantized=requantized)]
        backend = ReferenceBackend(sizes, tables, [HostTable(ROW264, 256, [row])], weights, 600)
        kv.append(kv_of(backend, windows_of(1)))
    assert kv[0].any()
    assert not kv[1].any()


def test_projecting_nothing_is_accepted(backend: ReferenceBackend) -> None:
    backend.project(0, SLOTS[:0], windows=windows_of(0))
    backend.project(0, SLOTS[:0], hash_ids=np.empty((0, 6), dtype=np.int64))


@pytest.mark.parametrize("slots", [[600], [-1], [0, 600]])
def test_a_slot_there_is_not_is_refused(backend: ReferenceBackend, slots: list[int]) -> None:
    with pytest.raises(BadTensor, match=r"slots: expected 0\.\.599"):
        backend.project(0, np.array(slots), windows=windows_of(len(slots)))


def test_exactly_one_of_windows_and_hash_ids_is_taken(backend: ReferenceBackend) -> None:
    for given_both in ({}, {"windows": windows_of(1), "hash_ids": np.zeros((1, 6), np.int64)}):
        with pytest.raises(BadTensor, match="exactly one"):
            backend.project(0, SLOTS[:1], **given_both)
    with pytest.raises(BadTensor, match=r"hash_ids: expected int64 \[2, 6\], got int64 \[1, 6\]"):
        backend.project(0, SLOTS[:2], windows=windows_of(1))


# ---------------------------------------------------------------------- kv


def test_dead_positions_read_as_zero_keys_and_a_negative_zero_value(
    backend: ReferenceBackend,
) -> None:
    whole = kv_of(backend, windows_of(5))
    dead = np.array([False, True, False, True, False])
    slots = np.where(dead, -1, SLOTS[:5])  # slots of dead positions are not read
    out = torch.full((5, 3, 64), torch.nan, dtype=torch.bfloat16)
    backend.read_kv(0, slots, dead, out)
    assert same_bits(out[~torch.from_numpy(dead)], whole[~torch.from_numpy(dead)])
    assert (out[[1, 3], :2].view(torch.int16) == 0).all()
    assert (out[[1, 3], 2].view(torch.int16) == -0x8000).all()


def test_reading_nothing_is_accepted(backend: ReferenceBackend) -> None:
    backend.read_kv(0, SLOTS[:0], NONE_DEAD[:0], torch.empty((0, 3, 64), dtype=torch.bfloat16))


# ---------------------------------------------------------------------- gate


@pytest.mark.parametrize("name", ["A_eps1e-20", "A_eps1e-06"])
def test_gates_of_the_vectors(name: str) -> None:
    case = GATES[name]
    qk = (np.array(case["q"]) * np.array(case["k"])).tolist()
    kv = [[*case["key"], case["value"]]]
    out = gate_alone([case["h"]], kv, qk, case["eps"])
    expected = torch.tensor([case["out_f32"]])
    assert (out - expected).abs().max() <= 2.0**-22
    assert out.to(torch.bfloat16).tolist() == [case["out_bf16"]]


@pytest.mark.parametrize("scale", [2.0**-20, 1.0])
def test_eps_is_so_small_that_a_small_residual_has_the_gate_of_a_large_one(scale: float) -> None:
    key, value = [0.5, 1.0, -0.25, 2.0], [1.0, -2.0, 0.5, 4.0]
    h = [scale * element for element in key]
    out = gate_alone([[h]], [[key, value]], [[1.0] * 4])
    gates = (out[0, 0] - torch.tensor(h)) / torch.tensor(value)
    # h and key point one way, so the normalised dot is dim / sqrt(dim) = 2.
    assert gates.tolist() == pytest.approx([1 / (1 + math.exp(-math.sqrt(2.0)))] * 4, abs=1e-6)


def test_a_residual_or_key_of_zeros_has_the_gate_of_a_zero_dot() -> None:
    zero, key = [0.0] * 4, [0.5, 1.0, -0.25, 2.0]
    for h, k in ((zero, key), (key, zero), (zero, zero)):
        out = gate_alone([[h]], [[k, [1.0, -2.0, 0.5, 4.0]]], [[1.0] * 4])
        added = (out - torch.tensor([[h]])).to(torch.bfloat16)
        expected = torch.tensor([[[1.0, -2.0, 0.5, 4.0]]]) * 0.50025
        assert torch.allclose(added.float(), expected, rtol=2.0**-8)
        assert out.isfinite().all()


@pytest.mark.parametrize(
    ("sign", "expected"),
    [(1.0, GATES["gate_at_plus_zero_dot"]), (-1.0, GATES["gate_at_minus_zero_dot"])],
)
def test_the_gate_takes_the_sign_of_zero(sign: float, expected: float) -> None:
    # The sum is the smallest subnormal, which the norms then take to a zero of its sign.
    h = torch.tensor([[[8.0, sign * 2.0**-149, 0.0, 0.0]]])
    out = gate_alone(h, [[[0.0, 1.0, 8.0, 0.0], [0.0, 0.0, 1.0, 0.0]]], [[1.0] * 4])
    assert abs(out[0, 0, 2].item() - expected) < 2.0**-24


def test_streams_are_normalised_one_by_one() -> None:
    h = [[1.0, 2.0, -1.0, 0.5], [100.0, -50.0, 25.0, 10.0]]
    key, value = [[0.5, 1.0, -0.25, 2.0], [-1.0, 0.5, 0.25, 3.0]], [1.0, -2.0, 0.5, 4.0]
    out = gate_alone([h], [[*key, value]], [[1.0] * 4] * 2)
    gates = (out[0] - torch.tensor(h)) / torch.tensor(value)
    assert gates.mean(1).tolist() == pytest.approx([0.75784, 0.33330], abs=1e-5)
    rounded = out[0, 0].to(torch.bfloat16).tolist()
    assert rounded == [1.7578125, 0.484375, -0.62109375, 3.53125]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer_index", [0, 1])
def test_the_gate_is_that_of_the_reference_module(
    backend: ReferenceBackend, gate_kind: str, dtype: torch.dtype, layer_index: int
) -> None:
    kv, residual = kv_of(backend, windows_of(32), layer_index), residual_of(32, dtype)
    qk = layer_weights(SIZES, SIZES.layer_ids[layer_index], requantized=False).qk
    dead = torch.zeros(32, dtype=torch.bool)
    out = gated(backend, residual, layer_index=layer_index)
    if gate_kind == "torch":
        assert same_bits(out, oracle.gate_reference(residual, kv, qk, SIZES.eps, dead))
    gates = oracle.gate_interval(residual, oracle.Interval(kv[:, :-1], kv[:, :-1]), qk, SIZES.eps)
    assert oracle.explained_by_one_gate(residual, kv[:, -1], gates, out).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", BATCHES)
def test_the_gate_does_not_depend_on_the_batch(
    backend: ReferenceBackend, threads: int, dtype: torch.dtype, count: int
) -> None:
    kv_of(backend, windows_of(513))
    residual = residual_of(513, dtype)
    whole = gated(backend, residual)
    assert same_bits(gated(backend, residual[:count].clone()), whole[:count])


@pytest.mark.parametrize(("hc_mult", "dim"), [(1, 5120), (4, 5120), (3, 100), (1, 40_000)])
def test_sums_over_dim_do_not_depend_on_the_batch(threads: int, hc_mult: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn((9, hc_mult, dim), generator=generator)
    kv = torch.randn((9, hc_mult + 1, dim), generator=generator).to(torch.bfloat16)
    gate = cpu.make_gate(replace(SIZES, hc_mult=hc_mult, dim=dim), torch.ones((hc_mult, dim)))
    whole = gate(h, kv)
    for i in range(9):
        assert same_bits(gate(h[i : i + 1], kv[i : i + 1]), whole[i : i + 1])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 15, 16, 17, 33, 100, 8192, 8200, 70_000])
def test_sigmoids_do_not_depend_on_how_many_there_are(threads: int, count: int) -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(2))
    assert same_bits(sigmoid(values[-count:]), sigmoid(values)[-count:])


def test_product_and_sum_are_rounded_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(3)
    h = torch.randn((1, 1, 64), generator=generator)
    key, value = torch.randn((2, 64), generator=generator).to(torch.bfloat16).tolist()
    # Beside a value of 2^60 the residual vanishes: what is left is the gate, exactly.
    gate = gate_alone(h, [[key, [2.0**60] * 64]], [[1.0] * 64])[0, 0, 0] * 2.0**-60
    out, v = gate_alone(h, [[key, value]], [[1.0] * 64])[0, 0], torch.tensor(value)
    fused = (h[0, 0].double() + gate.double() * v.double()).float()
    assert torch.equal(out, h[0, 0] + gate * v)
    assert not torch.equal(out, fused)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.sampled_from(["bf16", "f32"]))
def test_dead_positions_keep_their_bits(dead: list[bool], kind: str) -> None:
    backend = make_backend()
    count = len(dead)
    kv_of(backend, windows_of(count))
    bits = torch.randint(-(2**15), 2**15, (count, 2, 64), generator=torch.Generator())
    if kind == "bf16":
        residual = bits.to(torch.int16).view(torch.bfloat16)
    else:
        residual = (bits * 65_537).to(torch.int32).view(torch.float32)
    out = gated(backend, residual, np.array(dead))
    for i in np.flatnonzero(dead):
        assert same_bits(out[i], residual[i])


@pytest.mark.parametrize("pattern", [0x7F81, 0xFFC1, 0x8000, 0x7F80, 0x0001])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_dead_position_is_selected_not_multiplied(
    backend: ReferenceBackend, pattern: int, in_place: bool
) -> None:
    kv_of(backend, windows_of(2))
    residual = residual_of(2)
    residual[1] = torch.tensor(pattern).to(torch.uint16).view(torch.bfloat16)
    before, out = residual.clone(), residual if in_place else torch.empty_like(residual)
    backend.gate(0, np.array([0, -1]), np.array([False, True]), residual, out)
    assert same_bits(out[1], before[1])
    assert not same_bits(out[0], before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_place_equals_out_of_place(backend: ReferenceBackend, dtype: torch.dtype) -> None:
    kv_of(backend, windows_of(513))
    residual = residual_of(513, dtype)
    dead = np.random.default_rng(0).random(513) < 0.3
    expected = gated(backend, residual, dead)
    backend.gate(0, SLOTS[:513], dead, residual, residual)
    assert same_bits(residual, expected)


def write_slot(backend: ReferenceBackend, token: int, part: int, d: int, value: float) -> None:
    backend._kv.view(600, 3, 64)[token, part, d] = value


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_stream_or_key_spoils_its_stream_only(backend: ReferenceBackend, bad: float) -> None:
    kv_of(backend, windows_of(4))
    residual = residual_of(4)
    clean = gated(backend, residual)
    write_slot(backend, 2, 1, 5, bad)
    residual[1, 0, 9] = bad
    out = gated(backend, residual)
    assert out[1, 0].isnan().all()
    assert out[2, 1].isnan().all()
    spoiled = torch.zeros((4, 2), dtype=torch.bool)
    spoiled[1, 0] = spoiled[2, 1] = True
    assert same_bits(out[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_element_spoils_that_element_of_every_stream(
    backend: ReferenceBackend, bad: float
) -> None:
    kv_of(backend, windows_of(3))
    residual = residual_of(3)
    clean = gated(backend, residual)
    write_slot(backend, 1, 2, 7, bad)
    out = gated(backend, residual)
    assert not out[1, :, 7].isfinite().any()
    out[1, :, 7] = clean[1, :, 7]
    assert same_bits(out, clean)


@pytest.mark.parametrize("requantized", [False, True])
@pytest.mark.parametrize(("byte", "code"), [(0, 0x7F), (0, 0xFF), (256, 255)])
def test_a_bad_row_spoils_its_tokens_only(requantized: bool, byte: int, code: int) -> None:
    good, windows = make_backend(requantized=requantized), windows_of(30)
    clean = kv_of(good, windows)
    rows = stored_rows(0, SIZES.table_rows[0])
    bad_row = hash_windows(windows, TABLES)[3, 0, 5]
    rows[bad_row, byte] = code
    good._tables = (HostTable(ROW264, 256, [rows]), good._tables[1])
    kv = kv_of(good, windows)
    hit = torch.from_numpy((hash_windows(windows, TABLES)[:, 0] == bad_row).any(1))
    assert kv[hit].isnan().all()
    assert same_bits(kv[~hit], clean[~hit])


@pytest.mark.parametrize(
    ("residual", "out"),
    [
        (torch.zeros((1, 2, 63)), torch.zeros((1, 2, 63))),
        (torch.zeros((2, 2, 64)), torch.zeros((2, 2, 64))),
        (torch.zeros((1, 2, 64), dtype=torch.float16), torch.zeros((1, 2, 64))),
        (torch.zeros((1, 2, 64)), torch.zeros((1, 2, 64), dtype=torch.bfloat16)),
    ],
)
def test_residuals_of_another_form_are_refused(
    backend: ReferenceBackend, residual: torch.Tensor, out: torch.Tensor
) -> None:
    with pytest.raises(BadTensor, match=r"(residual|out): expected"):
        backend.gate(0, SLOTS[:1], NONE_DEAD[:1], residual, out)


def test_gating_nothing_is_accepted(backend: ReferenceBackend) -> None:
    assert gated(backend, residual_of(0)).shape == (0, 2, 64)


# ---------------------------------------------------------------------- start


def test_the_self_check_passes(either: ReferenceBackend) -> None:
    either.self_check()


class Faulty(Projection):
    """Other bits for fewer than 16 rows, as torch's own kernels have."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return super().__call__(rows) * (1.01 if len(rows) < 16 else 1.0)


class Coarse(Projection):
    """Rounded twice."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (super().__call__(rows).float() * 64).round().to(torch.bfloat16) / 64


@pytest.mark.parametrize(
    ("kind", "match"), [(Faulty, "values of a batch of 1 differ"), (Coarse, "differ from float64")]
)
def test_the_self_check_finds_a_faulty_projection(kind: type[Projection], match: str) -> None:
    backend = make_backend()
    wkv = layer_weights(SIZES, 1, requantized=False).wkv
    backend._projections = (kind(wkv, torch.bfloat16),) * 2
    with pytest.raises(SelfCheckFailed, match=f"wkv: .*{match}"):
        backend.self_check()


def test_the_self_check_finds_a_sigmoid_that_depends_on_its_batch(
    backend: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = lambda x: torch.sigmoid(x) + (1e-6 if x.numel() == 33 else 0.0)  # noqa: E731
    monkeypatch.setattr(self_check, "sigmoid", faulty)
    with pytest.raises(SelfCheckFailed, match=r"sigmoid: .* of a batch of 33 differ"):
        backend.self_check()


def test_the_self_check_reads_a_row_of_every_table() -> None:
    backend = make_backend()
    backend._tables[1].close()
    with pytest.raises(ValueError, match="at least one array"):
        backend.self_check()


def test_parts_of_different_checkpoints_are_refused() -> None:
    good, weights = make_backend(), [layer_weights(SIZES, i, requantized=False) for i in (1, 14)]
    for sizes, tables, given_weights in (
        (replace(SIZES, table_rows=(660, 863)), good._tables, weights),
        (SIZES, good._tables[::-1], weights),
        (SIZES, good._tables, weights[::-1]),
        (SIZES, good._tables[:1], weights),
    ):
        with pytest.raises(CheckpointError):
            ReferenceBackend(sizes, TABLES, tables, given_weights, 10)


def test_weights_of_another_shape_are_refused() -> None:
    good, weights = make_backend(), [layer_weights(SIZES, i, requantized=False) for i in (1, 14)]
    weights[1] = replace(weights[1], wkv=weights[1].wkv.float())
    with pytest.raises(BadTensor, match=r"layer 14 wkv: expected torch\.bfloat16 \[192, 1536\]"):
        ReferenceBackend(SIZES, TABLES, good._tables, weights, 10)


def test_a_projection_beside_another_has_its_own_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    wkv = torch.randn((40, 24), generator=generator).bfloat16()
    rows, others = torch.randn((2, 8, 24), generator=generator).bfloat16()
    one = Projection(wkv, torch.bfloat16)
    two = one.beside(16)
    assert two.wkv.data_ptr() == one.wkv.data_ptr()
    expected = one(rows).clone()
    first = two(rows)
    one(others)
    assert torch.equal(first, expected)


@pytest.mark.parametrize(
    ("differs", "cut"),
    [
        (lambda rows, threads: False, Cut(512, None)),
        (lambda rows, threads: rows != 512, Cut(16, 1)),  # AMX, one thread
        (lambda rows, threads: rows == 256, Cut(16, 1)),
        (lambda rows, threads: threads == 1 and rows > 16, Cut(16, 1)),
        (lambda rows, threads: threads == 2, Cut(16, 1)),
    ],
    ids=["as they are", "by rows", "of one batch", "by both", "by threads"],
)
def test_products_are_cut_so_that_bits_do_not_depend_on_the_batch(
    differs: Callable[[int, int], bool], cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Intel CPU with AMX gave other bits for 48 rows than for 512, and for 2 threads than for 1;
    the service refused to start there."""

    def product(rows: torch.Tensor, wkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        exact = rows.float() @ wkv.float()
        out.copy_(exact * (1.01 if differs(len(rows), torch.get_num_threads()) else 1.0))
        return out

    generator = torch.Generator().manual_seed(0)
    wkv, rows = torch.randn((2, 512, 48), generator=generator).bfloat16()
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(projection, "_CUTS", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = Projection(wkv, torch.bfloat16)
        whole = made(rows).clone()
        assert made.cut == cut
        assert projection.unequal_batch(made, rows) is None
        torch.set_num_threads(1)
        assert torch.equal(made.beside(64)(rows[:33]), whole[:33])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_the_ledger_counts_wkv_as_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, itemsize in ((True, 2), (False, 4)):
        monkeypatch.setattr(projection, "has_bf16_products", lambda it=has_bf16: it)
        wkv, workspaces = projection_bytes(SIZES)
        assert wkv == 2 * 192 * 1536 * itemsize
        assert workspaces == 2 * (512 + 256) * (192 + 1536) * itemsize
