"""Row formats, bit for bit: vectors, field reports, and the packages that define the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engram_core.errors import BadTensor, CheckpointError
from engram_core.quant import (
    BLOCK33,
    ROW264,
    ROW288,
    dequantize_fp8_matrix,
    e4m3_to_f32,
    e8m0_to_f32,
    requantize,
    row_format,
    row_format_of_type,
    to_bf16,
)
from tests import oracle

FORMATS = json.loads((Path(__file__).parents[1] / "golden" / "formats.json").read_text())
CODES = np.arange(256, dtype=np.uint8)
I = np.arange(256)  # noqa: E741  the index of the field reports' rules


def bf16_bits(values: NDArray[np.float32]) -> list[int]:
    bits: list[int] = to_bf16(values).view(torch.uint16).reshape(-1).tolist()
    return bits


def half(value: float) -> NDArray[np.uint8]:
    return np.array([value], dtype="<f2").view(np.uint8)


def row264(codes: Any, scale: int) -> NDArray[np.uint8]:
    """256 codes in groups of one scale, as a stored row."""
    return np.concatenate([np.resize(codes, 256), np.full(8, scale)]).astype(np.uint8)[None]


def decode_q2_k(scales: Any, codes: Any, d: float, dmin: float) -> NDArray[np.float32]:
    head = np.concatenate([scales, codes]).astype(np.uint8)
    row = np.concatenate([head, half(d), half(dmin)])
    return row_format("Q2_K").dequantize(row[None])[0]


def decode_q3_k(hmask: Any, codes: Any, scales: Any, d: float) -> NDArray[np.float32]:
    head = np.concatenate([hmask, codes, scales]).astype(np.uint8)
    return row_format("Q3_K").dequantize(np.concatenate([head, half(d)])[None])[0]


def test_e4m3_and_e8m0_are_those_of_the_vectors() -> None:
    for code, value in FORMATS["e4m3"].items():
        assert e4m3_to_f32(CODES)[int(code, 16)] == value
    for code, value in FORMATS["e8m0"].items():
        assert e8m0_to_f32(CODES)[int(code)] == value


def test_every_e4m3_code_equals_ml_dtypes_by_bits() -> None:
    expected = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = e4m3_to_f32(CODES)
    assert np.array_equal(got, expected, equal_nan=True)
    assert (np.signbit(got) == (CODES >= 128)).all()
    assert np.flatnonzero(np.isnan(got)).tolist() == [0x7F, 0xFF]


def test_every_e8m0_code_equals_ml_dtypes() -> None:
    expected = CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(e8m0_to_f32(CODES), expected, equal_nan=True)
    assert np.flatnonzero(np.isnan(e8m0_to_f32(CODES))).tolist() == [255]


def test_a_row_of_all_codes_at_scale_one() -> None:
    values = row_format(ROW264).dequantize(row264(CODES, 127))[0]
    assert values[[0x01, 0x07, 0x08, 0x7E]].tolist() == [0.001953125, 0.013671875, 0.015625, 448]
    assert np.signbit(values[0x80])
    assert np.isnan(values[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize(
    ("code", "scale", "bits"),
    [
        (0x38, 0, 0x0040),  # 1 * 2^-127: a subnormal, not zero
        (0x01, 0, 0x0000),  # 2^-136 rounds to zero
        (0x7E, 246, 0x7F60),  # 448 * 2^119 is finite
        (0x7E, 247, 0x7F80),  # 448 * 2^120 overflows
        (0xFE, 247, 0xFF80),
    ],
)
def test_scales_at_both_ends(code: int, scale: int, bits: int) -> None:
    assert set(bf16_bits(row_format(ROW264).dequantize(row264([code], scale)))) == {bits}


def test_scale_255_makes_its_own_group_nan_only() -> None:
    row = row264([0x38], 127)
    row[0, 256 + 3] = 255
    nan = np.isnan(row_format(ROW264).dequantize(row)[0])
    assert np.flatnonzero(nan).tolist() == list(range(96, 128))


def test_each_group_of_32_has_its_own_scale() -> None:
    row = row264([0x38], 127)
    row[0, 256:] = np.arange(124, 132)
    values = row_format(ROW264).dequantize(row)[0]
    assert values[::32].tolist() == [2.0**e for e in range(-3, 5)]
    assert (values.reshape(8, 32) == values[::32, None]).all()


def test_q2_k_block_of_the_vectors() -> None:
    case = FORMATS["q2_k_block"]
    block = np.frombuffer(bytes.fromhex(case["hex"]), dtype=np.uint8)[None]
    values = row_format("Q2_K").dequantize(block)
    assert values[0].tolist() == case["y_f32"]
    assert bf16_bits(values) == case["y_bf16_bits"]


def test_q2_k_scales_go_to_their_lanes() -> None:
    case, j = FORMATS["q2_k_pattern"], I[:16]
    values = decode_q2_k(j | ((15 - j) << 4), (37 * I[:64] + 11) & 255, 0.5, 0.25)
    assert {k: values[int(k)] for k in case["values"]} == case["values"]
    assert values.sum(dtype=np.float64) == case["sum"]


def test_q2_k_rounds_once_and_to_even() -> None:
    values = decode_q2_k(np.full(16, 6 | 7 << 4), np.full(64, 0b01010101), 0.6328125, 0.927734375)
    assert values[0] == -2.697265625
    assert to_bf16(values)[0].item() == -2.703125


def test_q3_k_scales_have_six_bits() -> None:
    case = FORMATS["q3_k_pattern"]
    rule = ((73 * I[:32] + 5) & 255, (37 * I[:64] + 11) & 255, (29 * I[:12] + 200) & 255)
    values = decode_q3_k(*rule, 0.125)
    assert {k: values[int(k)] for k in case["values"]} == case["values"]
    assert values.sum(dtype=np.float64) == case["sum"]


def test_an_all_zero_q3_k_block_is_not_zero() -> None:
    zeros = np.zeros(64)
    assert (decode_q3_k(zeros[:32], zeros, zeros[:12], 1.0) == 128.0).all()


PACKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
PACKED += ["IQ4_NL", "IQ4_XS", "MXFP4", "BF16", "F16", "F32"]


@pytest.mark.parametrize("name", PACKED)
def test_random_rows_equal_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    form = row_format(name)
    raw = np.random.default_rng(1).integers(0, 256, (37, form.row_bytes(512)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(form.dequantize(raw), expected, equal_nan=True)
    assert row_format_of_type(int(kind)) is form


def test_row_bytes_are_those_of_the_vectors() -> None:
    for name, num_bytes in FORMATS["row_bytes"].items():
        if name != "lloyd4_e5m3_32_r136":
            ours = ROW264 if name == "fp8+e8m0" else name
            assert row_format(ours).row_bytes(256) == num_bytes


@pytest.mark.parametrize(
    ("type_id", "name"),
    [(16, "IQ2_XXS"), (28, "F64"), (250, "unknown"), (24, "I8"), (-1, "unknown")],
)
def test_an_unsupported_type_is_refused_by_name_and_number(type_id: int, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"GGUF type {name} \({type_id}\) is not supported"):
        row_format_of_type(type_id)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'lloyd4' is not supported; known: F32"):
        row_format("lloyd4")


@pytest.mark.parametrize(("name", "head_dim"), [("Q2_K", 128), ("Q8_0", 48), ("F32", 0)])
def test_a_row_that_is_no_whole_blocks_is_refused(name: str, head_dim: int) -> None:
    with pytest.raises(CheckpointError, match=f"{name} rows hold a multiple of"):
        row_format(name).row_bytes(head_dim)


@pytest.mark.parametrize(
    "rows", [np.zeros((1, 83), np.uint8), np.zeros(84, np.uint8), np.zeros((1, 84))]
)
def test_rows_of_another_form_are_refused(rows: Any) -> None:
    with pytest.raises(BadTensor, match="Q2_K rows: expected uint8"):
        row_format("Q2_K").dequantize(rows)


@pytest.mark.parametrize("name", [ROW264, "Q2_K", "F32"])
def test_no_rows_decode_to_no_rows(name: str) -> None:
    form = row_format(name)
    empty = np.empty((0, form.row_bytes(256)), dtype=np.uint8)
    assert form.dequantize(empty).shape == (0, 256)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80))
def test_bf16_is_nearest_even_and_keeps_nan(patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    got = np.array(bf16_bits(values))
    nan = np.isnan(values)
    expected = [(p + 0x7FFF + (p >> 16 & 1)) >> 16 for p in patterns]
    assert (got == expected)[~nan].all()
    assert ((got[nan] & 0x7FFF) > 0x7F80).all()


def test_bf16_keeps_subnormals() -> None:
    patterns = np.arange(1, 128, dtype=np.uint32) << 16
    assert bf16_bits(patterns.view(np.float32)) == list(range(1, 128))


def test_an_fp8_matrix_has_one_scale_for_each_32_by_32_block() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (70, 96), dtype=np.uint8)
    scales = rng.integers(0, 256, (3, 3), dtype=np.uint8)
    values = dequantize_fp8_matrix(codes, scales)
    with np.errstate(all="ignore"):
        for i, j in ((0, 0), (31, 32), (32, 31), (69, 95), (64, 63)):
            expected = e4m3_to_f32(codes[i, j]) * e8m0_to_f32(scales[i // 32, j // 32])
            assert np.array_equal(values[i, j], expected, equal_nan=True)


def test_an_fp8_matrix_with_scales_of_another_shape_is_refused() -> None:
    with pytest.raises(BadTensor, match=r"expected \[2, 1\], got \[1, 1\]"):
        dequantize_fp8_matrix(np.zeros((33, 32), np.uint8), np.zeros((1, 1), np.uint8))


@pytest.mark.parametrize("amax", [float(a) for a in FORMATS["act_scale"]])
def test_input_scales_are_those_of_the_vectors(amax: float) -> None:
    # The smallest step of a group is scale * 2^-9: the next smaller value rounds up to it.
    scale = FORMATS["act_scale"][str(amax)]
    rows = torch.zeros((1, 32), dtype=torch.bfloat16)
    rows[0, 0], rows[0, 1] = amax, scale * 2.0**-9 * 0.75
    if rows[0, 0].item() == amax:  # bfloat16 cannot hold 0.0001 and 449
        assert requantize(rows)[0, 1].item() == scale * 2.0**-9


@given(st.lists(st.integers(0, 2**16 - 1), min_size=64, max_size=64))
def test_requantised_input_equals_the_oracle(patterns: list[int]) -> None:
    rows = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = torch.where(rows.isfinite(), rows, 0.0).reshape(1, 64)
    expected = oracle.quantised_input(rows)
    got = requantize(rows)
    assert torch.equal(got.float(), expected)
    assert torch.equal(got.signbit(), expected.signbit())


def test_requantising_fp8_rows_changes_nothing_above_the_floor() -> None:
    codes = np.random.default_rng(0).integers(0, 256, 256)
    codes[codes & 127 == 127] = 0
    rows = to_bf16(row_format(ROW264).dequantize(row264(codes, 120)))
    assert torch.equal(requantize(rows), rows)


def test_requantising_rounds_groups_below_the_floor() -> None:
    rows = torch.full((1, 32), 1e-10, dtype=torch.bfloat16)
    assert requantize(rows).unique().tolist() == [0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_value_makes_its_own_group_nan_only(bad: float) -> None:
    rows = torch.ones((2, 64), dtype=torch.bfloat16)
    rows[0, 40] = bad
    nan = requantize(rows).isnan()
    assert nan[0, 32:].all()
    assert not nan[0, :32].any()
    assert not nan[1].any()


def test_requantising_no_rows_gives_no_rows() -> None:
    assert requantize(torch.empty((0, 64), dtype=torch.bfloat16)).shape == (0, 64)


F16_EDGES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]
"""+-0, subnormals, the smallest normal, 1, +-largest, +-infinity, NaN."""

F16_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block keeps its float16 scales."""


def edge_blocks(name: str) -> NDArray[np.uint8]:
    """Blocks of zeros, of ones, and of random codes under every kind of scale."""
    form, rng = row_format(name), np.random.default_rng(2)
    blocks = [np.full((1, form.block_bytes), fill, np.uint8) for fill in (0x00, 0xFF, 0x7F, 0x80)]
    scales: list[tuple[int, NDArray[np.uint8]]] = []
    for at in F16_AT.get(name, ()):
        scales += [(at, np.array([bits], "<u2").view(np.uint8)) for bits in F16_EDGES]
    if name == "MXFP4":
        scales += [(0, np.array([e], np.uint8)) for e in (0, 1, 2, 127, 254, 255)]
    for at, scale in scales:
        block = rng.integers(0, 256, (8, form.block_bytes), np.uint8)
        block[:, at : at + len(scale)] = scale
        blocks.append(block)
    if form.block_values == 1:  # every float of 16 bits, and each as the upper half of 32
        halves = np.arange(1 << 16, dtype="<u2")
        wide = halves.astype("<u4") << 16 | 1 if name == "F32" else halves
        blocks.append(np.ascontiguousarray(wide).view(np.uint8).reshape(-1, form.block_bytes))
    return np.concatenate(blocks)


def assert_same_f32(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Equal by bits, zeros' signs included; NaN is NaN, whatever its payload."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", PACKED)
def test_edge_blocks_equal_the_gguf_package_by_bits(name: str) -> None:
    blocks = edge_blocks(name)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    got = row_format(name).dequantize(blocks)
    assert_same_f32(got, expected.astype(np.float32).reshape(got.shape))


def test_every_format_the_gguf_package_decodes_is_read_or_refused_by_name() -> None:
    for kind in gguf.quants._type_traits:
        if kind.name in PACKED:
            assert row_format_of_type(int(kind)).name == kind.name
        else:
            with pytest.raises(CheckpointError, match=kind.name):
                row_format_of_type(int(kind))


@pytest.mark.parametrize("name", [ROW264, BLOCK33, ROW288])
def test_fp8_rows_of_every_code_and_scale_equal_ml_dtypes_by_bits(name: str) -> None:
    codes = np.resize(CODES, (256, 256)) if name != ROW288 else np.resize(CODES, (8, 256))
    scales = CODES.repeat(8).reshape(256, 8)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    rows = np.concatenate([codes, scales[: len(codes)]], axis=1)
    if name == BLOCK33:
        groups = [scales[:, :, None], codes.reshape(256, 8, 32)]
        rows = np.concatenate(groups, axis=2).reshape(256, 264)
    if name == ROW288:
        edges = [0.0, -0.0, 2.0**-149, 0.1, -3.0, 3e38, np.inf, np.nan]
        factors = np.array(edges, "<f4").repeat(8).reshape(8, 8)
        rows = np.concatenate([codes, np.ascontiguousarray(factors).view(np.uint8)], axis=1)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = values * factors.repeat(32, axis=1)
    assert_same_f32(row_format(name).dequantize(np.ascontiguousarray(rows)), expected)


def test_an_fp8_matrix_takes_float32_scales() -> None:
    codes = np.full((40, 40), 0x38, np.uint8)  # 1.0
    scales = np.array([[0.5, 3.0], [0.1, -2.0]], "<f4")
    values = dequantize_fp8_matrix(codes, scales)
    assert values[[0, 0, 39, 39], [0, 39, 0, 39]].tolist() == [0.5, 3.0, np.float32(0.1), -2.0]
