"""csrc's row formats and hash, built for the host, against the definitions in engram_core."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends.engram_v41 import require_encoding
from engram_core.backends.native import FORMATS, Hash
from engram_core.errors import CheckpointError
from engram_core.geometry import EngramHashTables
from engram_core.hashing import hash_windows
from engram_core.quant import QUANT_GROUP, dequantize_fp8_matrix, requantize, row_format, to_bf16
from tests.native.host_library import address, build_host_library

NAMES = sorted(FORMATS)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_host_library(tmp_path_factory.mktemp("native"))


def dequantize(
    host: ctypes.CDLL, name: str, codes: NDArray[np.uint8], values: int, scales: Any = None
) -> NDArray[np.float32]:
    """Rows through the C headers; scales apart from the codes where given."""
    form = FORMATS[name]
    tail = codes[:, values:] if name.startswith("E4M3_") and scales is None else codes
    tail = tail if scales is None else scales
    out = np.empty((len(codes), values), np.float32)
    status = host.host_dequantize(
        c_int32(form),
        c_int64(len(codes)),
        c_int64(values),
        address(codes),
        c_int64(codes.strides[0]),
        address(tail),
        c_int64(tail.strides[0]),
        address(out),
    )
    assert status == 0
    return out


def same_bits(got: NDArray[np.float32], want: NDArray[np.float32]) -> bool:
    """Equal bits; a NaN equals any NaN."""
    both_nan = np.isnan(got) & np.isnan(want)
    return bool(((got.view(np.uint32) == want.view(np.uint32)) | both_nan).all())


@pytest.mark.parametrize("name", NAMES)
def test_row_bytes_are_those_of_the_definition(host: ctypes.CDLL, name: str) -> None:
    assert host.host_row_bytes(FORMATS[name], 256) == row_format(name).row_bytes(256)
    assert host.host_row_bytes(FORMATS[name], 6144) == row_format(name).row_bytes(6144)


def test_unknown_format_and_broken_rows_have_no_size(host: ctypes.CDLL) -> None:
    assert host.host_row_bytes(2, 256) == -1  # Q4_0
    assert host.host_row_bytes(FORMATS["Q2_K"], 128) == -1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", [256, 512])
def test_random_bytes_decode_to_the_same_bits(host: ctypes.CDLL, name: str, values: int) -> None:
    rng = np.random.default_rng(FORMATS[name])
    form = row_format(name)
    rows = rng.integers(0, 256, (2000, form.row_bytes(values)), dtype=np.uint8)
    assert same_bits(dequantize(host, name, rows, values), form.dequantize(rows))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F, 0x01])
def test_uniform_bytes_decode_to_the_same_bits(host: ctypes.CDLL, name: str, byte: int) -> None:
    rows = np.full((3, row_format(name).row_bytes(256)), byte, np.uint8)
    assert same_bits(dequantize(host, name, rows, 256), row_format(name).dequantize(rows))


def test_every_e4m3_code_meets_every_scale(host: ctypes.CDLL) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    rows = np.concatenate([codes, scales], axis=1)
    want = row_format("E4M3_E8M0_32").dequantize(rows)
    assert same_bits(dequantize(host, "E4M3_E8M0_32", rows, 256), want)
    apart = dequantize(host, "E4M3_E8M0_32", codes, 256, np.ascontiguousarray(scales))
    assert same_bits(apart, want)


def test_float_scales_apart_give_the_same_rows(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(4)
    rows = rng.integers(0, 256, (500, 288), dtype=np.uint8)
    apart = dequantize(
        host,
        "E4M3_F32_32",
        np.ascontiguousarray(rows[:, :256]),
        256,
        np.ascontiguousarray(rows[:, 256:]),
    )
    assert same_bits(apart, row_format("E4M3_F32_32").dequantize(rows))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_K", "IQ2_XS"])
def test_a_row_format_without_kernels_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(CheckpointError, match=f"does not read {encoding} rows; use device cpu"):
        require_encoding(encoding)


def test_every_format_of_floats_and_e4m3_has_kernels() -> None:
    for name in ("F32", "F16", "BF16", "E4M3_E8M0_32", "E4M3_F32_32", "E8M0_E4M3_32"):
        require_encoding(name)


def test_a_matrix_with_scales_of_32_rows_decodes_alike(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (64, 128), dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 4), dtype=np.uint8)
    by_row = np.repeat(scales, QUANT_GROUP, axis=0)
    got = dequantize(host, "E4M3_E8M0_32", codes, 128, by_row)
    assert same_bits(got, dequantize_fp8_matrix(codes, scales))


def test_bf16_rounds_to_nearest_even(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    halves = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([bits, halves]).view(np.float32)
    got = np.empty(len(values), np.uint16)
    host.host_to_bf16(c_int64(len(values)), address(values), address(got))
    want = to_bf16(values)
    keep = ~np.isnan(values)
    assert np.array_equal(got[keep], want.view(torch.int16).numpy().view(np.uint16)[keep])
    assert torch.from_numpy(got[~keep].view(np.int16)).view(torch.bfloat16).isnan().all()


def test_the_wkv_input_is_requantised_to_the_same_bits(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4096, 32)).astype(np.float32)
    x *= np.exp2(rng.integers(-40, 40, (4096, 1))).astype(np.float32)
    x[0], x[1, 3], x[2, 5] = 0.0, np.inf, np.nan
    rows = to_bf16(x)
    wide = np.ascontiguousarray(rows.float().numpy())
    got = np.empty_like(wide)
    host.host_requantize(c_int64(wide.size), address(wide), address(got))
    assert same_bits(to_bf16(got).float().numpy(), requantize(rows).float().numpy())


@pytest.mark.parametrize("prime", [1, 2, 5, 16000057, 2**31 - 1, 2**61 - 1, 2**63 - 25])
def test_remainders_are_those_of_floor_division(host: ctypes.CDLL, prime: int) -> None:
    rng = np.random.default_rng(prime % 1000)
    edges = [0, 1, -1, prime, -prime, prime - 1, 2**63 - 1, -(2**63)]
    for value in [*edges, *rng.integers(-(2**63), 2**63 - 1, 2000).tolist()]:
        assert host.host_floor_mod(value, prime) == value % prime


def test_windows_hash_to_the_ids_of_the_definition(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(11)
    tables = EngramHashTables.derive([1, 14], 4, 8, 16_000_000, np.arange(99_092), 2)
    windows = rng.integers(0, 99_092, (500, 4), dtype=np.int32)
    for layer in range(2):
        constants = Hash(max_ngram_size=4, num_heads=8)
        constants.multipliers[:4] = tables.multipliers[layer].tolist()
        constants.primes[:24] = tables.primes[layer].reshape(-1).tolist()
        constants.offsets[:24] = tables.offsets[layer].tolist()
        ids = np.empty((500, 24), np.int64)
        host.host_hash(ctypes.byref(constants), c_int64(500), address(windows), address(ids))
        assert np.array_equal(ids, hash_windows(windows, tables, [layer])[:, 0])


def test_wrapping_products_and_negative_sums_hash_as_in_python(host: ctypes.CDLL) -> None:
    multipliers, primes = [2**62 + 1, 2**61 + 3], [101, 103]
    constants = Hash(max_ngram_size=2, num_heads=2)
    constants.multipliers[:2], constants.primes[:2] = multipliers, primes
    constants.offsets[:2] = [0, 101]
    windows = np.array([[3, 5], [7, 2], [1, 1], [2**31 - 1, 9]], np.int32)
    ids = np.empty((4, 2), np.int64)
    host.host_hash(ctypes.byref(constants), c_int64(4), address(windows), address(ids))

    def wrap(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    for row, (newest, older) in zip(ids.tolist(), windows.tolist(), strict=True):
        mixed = wrap(newest * multipliers[0]) ^ wrap(older * multipliers[1])
        assert row == [mixed % 101, mixed % 103 + 101]
