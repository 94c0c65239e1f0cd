"""Encoders: FP8 by its definition, the rest against the package that defines the format."""

from __future__ import annotations

import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engram_core.errors import CheckpointError, SchemaError
from engram_core.quant import ROW264, row_format
from engram_core.tools.encode import QUANTS, encode_fp8, encoder

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K")


def rows(seed: int = 0, count: int = 40) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, 256)) * np.exp2(rng.integers(-9, 9, (count, 1)))).astype(
        np.float32
    )


def test_fp8_is_the_nearest_code_under_the_smallest_scale() -> None:
    values = rows()
    stored = encode_fp8(values)
    groups = values.reshape(40, 8, 32)
    scale = np.exp2(stored[:, 256:].astype(np.float64) - 127)
    amax = np.abs(groups).max(-1)
    assert (amax <= 448 * scale).all()
    assert (amax > 448 * scale / 2).all()
    expected = (groups / scale[:, :, None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(stored[:, :256], expected.view(np.uint8).reshape(40, 256))


def test_fp8_gives_fp8_values_back() -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (100, 264), np.uint8)
    stored[:, 256:] = rng.integers(10, 240, (100, 8))
    values = row_format(ROW264).dequantize(stored)
    again = row_format(ROW264).dequantize(encode_fp8(values))
    assert np.array_equal(again, values, equal_nan=True)
    finite = np.isfinite(values)
    assert np.array_equal(np.signbit(again)[finite], np.signbit(values)[finite])


@pytest.mark.parametrize("value", [0.0, -0.0, 448.0, 449.0, 2.0**-149, 2.0**-126, 3e38])
def test_fp8_at_both_ends(value: float) -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 3] = value
    got = row_format(ROW264).dequantize(encode_fp8(values))
    assert abs(got[0, 3] - np.float32(value)) <= max(abs(value) / 16, 2.0**-137)
    assert (np.delete(got[0], 3) == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_becomes_nan_alone(bad: float) -> None:
    values = rows()[:1].copy()
    plain = row_format(ROW264).dequantize(encode_fp8(np.where(np.arange(256) == 7, 0, values)))
    values[0, 7] = bad
    got = row_format(ROW264).dequantize(encode_fp8(values))
    assert np.flatnonzero(np.isnan(got)).tolist() == [7]
    assert np.array_equal(np.delete(got, 7), np.delete(plain, 7))


@pytest.mark.parametrize("quant", ["Q8_0", "BF16"])
def test_plain_encoders_give_the_bytes_of_the_gguf_package(quant: str) -> None:
    values = rows()
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[quant])
    assert encoder(quant)(values).tobytes() == expected.tobytes()


@pytest.mark.parametrize("quant", QUANTS)
def test_bytes_of_a_row_do_not_depend_on_the_others(quant: str) -> None:
    if quant in K_QUANTS:
        pytest.importorskip("ggml", reason="K-quants need the extra ggml (ggml-python)")
    encode, values = encoder(quant), rows()
    whole = encode(values)
    for row in (0, 17, 39):
        assert encode(values[row : row + 1]).tobytes() == whole[row].tobytes()


@pytest.mark.parametrize(("quant", "worst"), [("Q2_K", 0.32), ("Q3_K", 0.19), ("Q4_K", 0.1)])
def test_k_quants_of_ggml_are_decoded_to_about_their_values(quant: str, worst: float) -> None:
    pytest.importorskip("ggml", reason="K-quants need the extra ggml (ggml-python)")
    values = rows()
    got = row_format(quant).dequantize(encoder(quant)(values))
    relative = np.sqrt(np.square(got - values).mean(1) / np.square(values).mean(1))
    assert 0 < relative.max() < worst


@pytest.mark.parametrize("quant", K_QUANTS)
def test_without_ggml_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    monkeypatch.setitem(sys.modules, "ggml", None)
    with pytest.raises(CheckpointError, match=r"engram-service\[ggml\]"):
        encoder(quant)


def test_unknown_quant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SchemaError, match=r"quant: expected FP8, BF16, Q8_0, Q2_K.*got 'Q5_K'"):
        encoder("Q5_K")
