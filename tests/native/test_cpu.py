"""csrc/cpu built here with warnings as errors: one gate on every CPU, and the store's keys."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_core.backends.cpu import ABI_VERSION, CpuGate, CpuLibrary, NearKeys
from engram_core.backends.gate import Gate
from engram_core.engine_types import EPOCH_OPENED, EngineLimits
from engram_core.errors import BadTensor, Internal
from engram_core.fence import Asked
from engram_core.geometry import Geometry
from engram_core.hashing import DEAD, block
from engram_core.kv_store import keys_of
from engram_core.registry import Opening
from engram_core.sessions import SessionPool
from tests import oracle
from tests.native.host_library import build_cpu_library
from tests.recording import TOY


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    return build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The same source without vectors of a chosen width, hardly optimised."""
    return build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O1", "-DENGRAM_NO_CLONES")


def geometry(hc_mult: int, dim: int) -> Geometry:
    return Geometry((1,), 4, 2, 8, dim, hc_mult, 1e-20, (9,))


def inputs(count: int, hc_mult: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(dim)
    size = 10.0 ** torch.randint(-12, 12, (count, 1, 1), generator=generator)
    residual = (torch.randn((count, hc_mult, dim), generator=generator) * size).to(dtype)
    kv = torch.randn((count, hc_mult + 1, dim), generator=generator).to(torch.bfloat16)
    qk = 1 + 0.05 * torch.randn((hc_mult, dim), generator=generator)
    return residual, kv, qk


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hc_mult", "dim"), [(4, 1024), (1, 1), (2, 31), (3, 33), (4, 5120)])
def test_bits_are_those_of_any_instruction_set(
    library: CpuLibrary, plain: CpuLibrary, hc_mult: int, dim: int, dtype: torch.dtype
) -> None:
    residual, kv, qk = inputs(40, hc_mult, dim, dtype)
    residual[3], kv[5, 0] = float("nan"), float("inf")
    sizes = geometry(hc_mult, dim)
    one, other = (CpuGate(each, sizes, qk)(residual, kv) for each in (library, plain))
    assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hc_mult", "dim"), [(4, 1024), (1, 1), (2, 31), (4, 5120)])
def test_one_gate_of_the_interval_explains_each_stream(
    library: CpuLibrary, hc_mult: int, dim: int, dtype: torch.dtype
) -> None:
    residual, kv, qk = inputs(24, hc_mult, dim, dtype)
    out = CpuGate(library, geometry(hc_mult, dim), qk)(residual, kv)
    keys = oracle.Interval(kv[:, :-1], kv[:, :-1])
    gates = oracle.gate_interval(residual, keys, qk, 1e-20)
    assert oracle.explained_by_one_gate(residual, kv[:, -1], gates, out).all()


def test_it_is_torchs_gate_to_the_last_bits_of_float32(library: CpuLibrary) -> None:
    residual, kv, qk = inputs(64, 4, 1024, torch.float32)
    one, other = CpuGate(library, geometry(4, 1024), qk), Gate(geometry(4, 1024), qk)
    added, expected = (each(residual, kv).double() - residual for each in (one, other))
    close = (added - expected).abs() <= 2.0**-18 * (residual.abs() + kv[:, -1:].abs().float())
    assert close.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_stream_stays_in_it(library: CpuLibrary, bad: float) -> None:
    residual, kv, qk = inputs(3, 2, 40, torch.float32)
    gate = CpuGate(library, geometry(2, 40), qk)
    clean = gate(residual, kv)
    residual[1, 0, 39] = bad
    out = gate(residual, kv)
    assert out[1, 0].isnan().all()
    out[1, 0] = clean[1, 0]
    assert same_bits(out, clean)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gate_takes_the_sign_of_zero(library: CpuLibrary, sign: float) -> None:
    # The sum is the smallest subnormal, which the norms then take to a zero of its sign.
    residual = torch.tensor([[[8.0, sign * 2.0**-149, 0.0, 0.0]]])
    kv = torch.tensor([[[0.0, 1.0, 8.0, 0.0], [0.0, 0.0, 1.0, 0.0]]], dtype=torch.bfloat16)
    out = CpuGate(library, geometry(1, 4), torch.ones((1, 4)))(residual, kv)
    assert out[0, 0, 2] == torch.sigmoid(torch.tensor(sign * 1e-3).double()).float()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_no_bits(library: CpuLibrary, threads: int) -> None:
    residual, kv, qk = inputs(700, 4, 1024, torch.bfloat16)
    gate = CpuGate(library, geometry(4, 1024), qk)
    whole = torch.cat([gate(residual[i : i + 1], kv[i : i + 1]) for i in range(700)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    got = gate(residual, kv)
    torch.set_num_threads(before)
    assert same_bits(got, whole)


@pytest.mark.parametrize("slot", [-1, 8, 1 << 40])
def test_a_slot_there_is_not_is_refused_and_nothing_is_written(
    library: CpuLibrary, slot: int
) -> None:
    residual, kv, qk = inputs(8, 2, 32, torch.bfloat16)
    before, slots = residual.clone(), np.arange(8)
    slots[7] = slot
    gate = CpuGate(library, geometry(2, 32), qk)
    with pytest.raises(BadTensor, match="slots"):
        gate.update(kv.flatten(1), slots, np.zeros(8, np.bool_), residual, residual)
    assert same_bits(residual, before)
    dead = np.arange(8) == 7  # nobody reads the slot of a dead position
    gate.update(kv.flatten(1), slots, dead, residual, residual)
    assert same_bits(residual[7], before[7])


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    build_cpu_library(tmp_path, "-O1")
    source = tmp_path / "other.cc"
    source.write_text('extern "C" int engram_cpu_abi_version(void) { return 99; }')
    compiler = shutil.which("c++") or "g++"
    other = tmp_path / "other.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    with pytest.raises(Internal, match=f"expected version {ABI_VERSION}, got 99"):
        CpuLibrary(other)


@settings(deadline=None)
@given(st.data())
def test_keys_are_those_of_the_arrays(library: CpuLibrary, data: st.DataObject) -> None:
    """Whatever is dead, wherever a page or the sequence begins."""
    length = data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    ids = rng.integers(0, 50, length).astype(np.int32)
    ids[rng.random(length) < data.draw(st.sampled_from([0.0, 0.2, 0.9]))] = DEAD
    limits = EngineLimits(max_sessions=3, max_held_tokens=2048)
    pool = SessionPool(limits, 4, clock=lambda: 0.0, wall_clock_us=lambda: 1)
    pool.open("", Opening(1))
    pool.push("", Asked.one(1, 0, length, EPOCH_OPENED), ids)
    position = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, min(64, length - position)))
    row = pool.rows_of("")[1]
    raw = pool.windows(*(np.array([each]) for each in (row, position, count)))
    keys = NearKeys(library, 1, TOY)
    assert keys.judge(pool.address, 7, (row, position, count, EPOCH_OPENED), None, begins=True)
    assert keys.keys() == keys_of(1, np.full(count, 7), block(raw, TOY.pad_id))
    _, dead = keys.settle(pool.address, 0.0)
    assert list(dead) == (raw[:, 0] == DEAD).tolist()
