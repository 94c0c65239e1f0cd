"""The projection on the device: one chain of bits at every batch size, place, kernel and slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref

import numpy as np
import pytest
import torch

from engram_core.backends import native as abi
from engram_core.backends.cuda_check import gemm_matches_chain
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.native import Native, Unsupported, cublaslt_candidates
from engram_core.errors import BadTensor, TooManyTokens
from engram_core.quant import dequantize_fp8_matrix, row_format, to_bf16
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.layers import device_engram, geometry_of, hash_tables, random_layer
from tests.oracle import project as oracle_project

MOST = 8192
SIZES = [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 255, 256, 1000, 8192]


class Case:
    """The true projection, 8192 random rows, and their kv by the chain."""

    def __init__(self, native: Native) -> None:
        self.arrays = Arrays(native)
        tables = hash_tables(1000)
        self.geometry = geometry_of(tables, dim=5120)
        self.layer = random_layer(self.geometry, seed=1)
        self.engram = device_engram(
            self.arrays, self.geometry, tables, [self.layer], max_tokens=MOST, num_slots=MOST
        )
        generator = torch.Generator().manual_seed(2)
        shape = (MOST, self.geometry.in_features)
        self.rows = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.arrays.write(self.engram.rows_workspace.address, self.rows)
        self.kv = self.project(MOST, is_chain=True)

    def project(
        self, count: int, *, is_chain: bool, first: int = 0, slots: np.ndarray | None = None
    ) -> torch.Tensor:
        out_features = self.geometry.out_features
        num_slots = count if slots is None else int(slots.max()) + 1
        out = self.arrays.empty(num_slots * out_features * 2)
        address = 0
        if slots is not None:
            is_inline = count <= abi.INLINE_TOKENS
            address = slots.ctypes.data if is_inline else self.arrays.up(slots).address
        params = self.engram.project_params(
            count,
            self.arrays.stream,
            slots=address,
            to=out.address,
            rows=self.engram.rows_workspace.address + first * self.geometry.in_features * 2,
        )
        (self.engram.project_chain if is_chain else self.engram.project_gemm)(0, params)
        kv = self.arrays.down(out, torch.bfloat16, (num_slots, out_features))
        out.close()
        return kv


@pytest.fixture(scope="module")
def case(native: Native) -> Iterator[Case]:
    made = Case(native)
    yield made
    made.engram.close()
    made.arrays.close()


@pytest.fixture(scope="module")
def gemm(case: Case) -> EngramV41:
    for library in cublaslt_candidates():
        try:
            case.engram.open_gemm(library)
        except Unsupported:
            continue
        return case.engram
    pytest.fail(f"no cublasLt in {cublaslt_candidates()}")


def test_the_chain_keeps_the_bound_to_float64(case: Case) -> None:
    exact, error = oracle_project(case.rows[:24].float(), case.layer.wkv)
    got = case.kv[:24].double()
    ulp = torch.exp2(torch.floor(torch.log2(got.abs().clamp_min(2.0**-126))) - 7)
    assert bool(((got - exact).abs() <= error + ulp / 2).all())


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_chain_gives_a_token_the_same_bits_in_every_batch(
    case: Case, count: int, place: str
) -> None:
    first = {"first": 0, "middle": (MOST - count) // 2, "last": MOST - count}[place]
    got = case.project(count, is_chain=True, first=first)
    assert same_bits(got, case.kv[first : first + count])


@pytest.mark.parametrize("count", SIZES)
def test_cublaslt_gives_the_bits_of_the_chain(case: Case, gemm: EngramV41, count: int) -> None:
    first = MOST - count
    assert same_bits(case.project(count, is_chain=False, first=first), case.kv[first:])


def test_the_self_check_finds_no_class_that_differs(case: Case, gemm: EngramV41) -> None:
    saved = case.arrays.down(gemm.rows_workspace, torch.bfloat16, tuple(case.rows.shape))
    assert gemm_matches_chain(gemm, case.arrays.stream) == []
    case.arrays.write(gemm.rows_workspace.address, saved)


@pytest.mark.parametrize("count", [1, 9, 64, 65, 300])
def test_kv_goes_to_its_slot(case: Case, count: int) -> None:
    slots = np.random.default_rng(3).permutation(2 * count)[:count].astype(np.int64)
    got = case.project(count, is_chain=True, slots=slots)
    assert same_bits(got[torch.from_numpy(slots)], case.kv[:count])
    untouched = np.setdiff1d(np.arange(len(got)), slots)
    assert (got[torch.from_numpy(untouched)].view(torch.int16) == -23131).all()  # 0xA5A5


@pytest.mark.parametrize("shape", [(192, 1536), (200, 72), (8, 8), (5120, 6144)])
@pytest.mark.parametrize("count", [1, 8, 13, 40, 70])
def test_ragged_sizes_read_zeros_behind_their_ends(
    arrays: Arrays, shape: tuple[int, int], count: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    # Small integers: every order of summation gives the same exact result.
    wkv = torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)
    rows = torch.randint(-4, 5, (count, shape[1]), generator=generator).to(torch.bfloat16)
    out = arrays.empty(count * shape[0] * 2)
    params = abi.Project(
        rows=arrays.up(rows).address,
        wkv=arrays.up(wkv).address,
        kv=out.address,
        num_tokens=count,
        in_features=shape[1],
        out_features=shape[0],
        stream=arrays.stream.handle,
    )
    arrays.native.project_chain(byref(params))
    got = arrays.down(out, torch.bfloat16, (count, shape[0]))
    assert same_bits(got, (rows.float() @ wkv.float().T).to(torch.bfloat16))


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_bad_row_spoils_its_own_token_only(case: Case, gemm: EngramV41, is_chain: bool) -> None:
    in_features = case.geometry.in_features
    place = gemm.rows_workspace.address + 20 * in_features * 2
    case.arrays.write(place, torch.full((in_features,), torch.nan, dtype=torch.bfloat16))
    got = case.project(40, is_chain=is_chain)
    case.arrays.write(place, case.rows[20])
    assert got[20].isnan().all()
    others = [t for t in range(40) if t != 20]
    assert same_bits(got[others], case.kv[others])


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "F16", "F32", "BF16"])
def test_stored_weights_become_the_bits_of_the_definition(arrays: Arrays, name: str) -> None:
    form = row_format(name)
    shape = (96, form.row_bytes(512))
    stored = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    got = dequantize(arrays, abi.FORMATS[name], stored, (96, 512))
    assert same_bits(got, to_bf16(form.dequantize(stored)))


@pytest.mark.parametrize("has_powers", [True, False])
def test_fp8_weights_share_a_scale_over_32_rows(arrays: Arrays, has_powers: bool) -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (96, 512), dtype=np.uint8)
    scales = rng.integers(0, 256, (3, 16), dtype=np.uint8)
    name = "E4M3_E8M0_32"
    if not has_powers:
        scales, name = rng.standard_normal((3, 16)).astype(np.float32), "E4M3_F32_32"
    got = dequantize(arrays, abi.FORMATS[name], codes, (96, 512), scales)
    assert same_bits(got, to_bf16(dequantize_fp8_matrix(codes, scales)))


def dequantize(
    arrays: Arrays,
    form: int,
    codes: np.ndarray,
    shape: tuple[int, int],
    scales: np.ndarray | None = None,
) -> torch.Tensor:
    out = arrays.empty(shape[0] * shape[1] * 2)
    params = abi.Dequantize(
        format=form,
        rows_per_scale=1 if scales is None else 32,
        num_rows=shape[0],
        row_values=shape[1],
        codes=arrays.up(codes).address,
        scales=0 if scales is None else arrays.up(scales).address,
        out=out.address,
        stream=arrays.stream.handle,
    )
    arrays.native.dequantize(byref(params))
    return arrays.down(out, torch.bfloat16, shape)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda e, s: e.rows_from_windows(0, MOST + 1, s, windows=0, hash_ids=0), TooManyTokens),
        (lambda e, s: e.project(0, MOST + 1, s, slots=0), TooManyTokens),
    ],
)
def test_more_tokens_than_the_workspace_are_refused(
    case: Case, call: Callable[..., None], error: type[Exception]
) -> None:
    with pytest.raises(error, match="8192"):
        call(case.engram, case.arrays.stream)


def test_features_that_break_a_vector_are_refused(arrays: Arrays) -> None:
    params = abi.Project(num_tokens=1, in_features=12, out_features=8)
    with pytest.raises(BadTensor, match="multiples of 8, got 12"):
        arrays.native.project_chain(byref(params))
