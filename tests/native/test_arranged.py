"""Arranged weights on the host: nothing lost, and every lane's registers hold quant.py's bits."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends.native import FORMATS
from engram_core.backends.stored_wkv import edge_weights
from engram_core.quant import dequantize_fp8_matrix, row_format, to_bf16
from tests.native.host_library import address, build_host_library

FP8, Q2_K = FORMATS["E4M3_E8M0_32"], FORMATS["Q2_K"]
BLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q8_0"]
FACTORS_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q8_0": (0,)}
PLAIN_SCALES = 135
"""Scale codes 0..134; larger ones, and NaN codes, are refused by the device's arrange."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_host_library(tmp_path_factory.mktemp("native"))


def arrange(
    host: ctypes.CDLL,
    form: int,
    shape: tuple[int, int],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    out = np.full(host.host_arranged_bytes(form, *shape), 0xA5, np.uint8)
    scales = np.empty(0, np.uint8) if scales is None else scales
    sizes = (c_int64(shape[0]), c_int64(shape[1]))
    host.host_arrange(c_int32(form), *sizes, address(codes), address(scales), address(out))
    return out


def decode(
    host: ctypes.CDLL, form: int, shape: tuple[int, int], arranged: NDArray[np.uint8]
) -> torch.Tensor:
    out = np.empty(shape, np.uint16)
    sizes = (c_int64(shape[0]), c_int64(shape[1]))
    host.host_decode_arranged(c_int32(form), *sizes, address(arranged), address(out))
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, signs of zero included; a NaN equals any NaN."""
    both_nan = got.isnan() & want.isnan()
    return bool(((got.view(torch.int16) == want.view(torch.int16)) | both_nan).all())


def plain_codes(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.uint8]:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    return codes


def test_fp8_registers_hold_the_rounded_weights(host: ctypes.CDLL) -> None:
    rng, shape = np.random.default_rng(1), (160, 1536)
    codes = plain_codes(rng, shape)
    scales = rng.integers(0, PLAIN_SCALES, (5, 48), dtype=np.uint8)
    got = decode(host, FP8, shape, arrange(host, FP8, shape, codes, scales))
    assert same_bits(got, to_bf16(dequantize_fp8_matrix(codes, scales)))


def test_every_plain_fp8_code_meets_every_plain_scale(host: ctypes.CDLL) -> None:
    shape = (32, 32 * 256)
    codes = np.tile(np.arange(256, dtype=np.uint8), (32, 32))
    codes[(codes & 0x7F) == 0x7F] = 0
    every = np.roll(codes.reshape(32, 256, 32), np.arange(32), axis=(0,))
    codes = np.ascontiguousarray(every.reshape(shape))
    for first in range(PLAIN_SCALES):
        scales = np.full((1, 256), first, np.uint8)
        got = decode(host, FP8, shape, arrange(host, FP8, shape, codes, scales))
        assert same_bits(got, to_bf16(dequantize_fp8_matrix(codes, scales)))


def test_q2k_registers_hold_the_rounded_weights(host: ctypes.CDLL) -> None:
    rng, shape = np.random.default_rng(2), (320, 1536)
    stored = rng.integers(0, 256, (320, 6 * 84), dtype=np.uint8)  # d of every kind, NaN among them
    got = decode(host, Q2_K, shape, arrange(host, Q2_K, shape, stored))
    assert same_bits(got, to_bf16(row_format("Q2_K").dequantize(stored)))


@pytest.mark.parametrize("d", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00])
def test_q2k_edges_keep_their_signs_and_infinities(host: ctypes.CDLL, d: int) -> None:
    rng, shape = np.random.default_rng(d), (64, 512)
    blocks = rng.integers(0, 256, (64, 2, 84), dtype=np.uint8)
    blocks[:, :, 80:82] = np.array([d], np.uint16).view(np.uint8)
    blocks[::2, :, 82:84] = np.array([d], np.uint16).view(np.uint8)
    blocks[1::4, :, 82:84] = 0
    stored = blocks.reshape(64, -1)
    got = decode(host, Q2_K, shape, arrange(host, Q2_K, shape, stored))
    assert same_bits(got, to_bf16(row_format("Q2_K").dequantize(stored)))


def test_every_q2k_scale_byte_meets_every_code(host: ctypes.CDLL) -> None:
    rng, shape = np.random.default_rng(3), (64, 1024)
    blocks = rng.integers(0, 256, (64, 4, 84), dtype=np.uint8)
    scales = np.arange(64 * 4 * 16, dtype=np.int64) % 256
    blocks[:, :, :16] = scales.astype(np.uint8).reshape(64, 4, 16)
    blocks[:, :, 80:] = rng.standard_normal((64, 4, 2)).astype(np.float16).view(np.uint8)
    stored = blocks.reshape(64, -1)
    got = decode(host, Q2_K, shape, arrange(host, Q2_K, shape, stored))
    assert same_bits(got, to_bf16(row_format("Q2_K").dequantize(stored)))


def test_arranging_keeps_every_bit_of_fp8(host: ctypes.CDLL) -> None:
    """As many bytes as stored, the scales as they were, and a bit of a code is a bit arranged."""
    rng, shape = np.random.default_rng(4), (64, 512)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 16), dtype=np.uint8)
    once = arrange(host, FP8, shape, codes, scales)
    assert np.array_equal(once[codes.size :], scales.reshape(-1))
    places = set()
    for bit in rng.choice(codes.size * 8, 300, replace=False):
        other = codes.copy().reshape(-1)
        other[bit // 8] ^= 1 << (bit % 8)
        changed = once ^ arrange(host, FP8, shape, other.reshape(shape), scales)
        (place,) = np.flatnonzero(np.unpackbits(changed))
        places.add(place)
    assert len(places) == 300


@pytest.mark.parametrize("name", BLOCKS)
def test_registers_of_blocks_hold_the_rounded_weights(host: ctypes.CDLL, name: str) -> None:
    """Random bytes: every code, scale and kind of factor, NaN and infinities among them."""
    rng, shape = np.random.default_rng(FORMATS[name]), (320, 1536)
    stored = rng.integers(0, 256, (320, row_format(name).row_bytes(1536)), dtype=np.uint8)
    got = decode(host, FORMATS[name], shape, arrange(host, FORMATS[name], shape, stored))
    assert same_bits(got, to_bf16(row_format(name).dequantize(stored)))


@pytest.mark.parametrize("name", BLOCKS)
def test_edge_weights_of_blocks_hold_the_rounded_weights(host: ctypes.CDLL, name: str) -> None:
    shape = (160, 1024)
    stored = edge_weights(name, *shape)
    want = to_bf16(row_format(name).dequantize(stored))
    got = decode(host, FORMATS[name], shape, arrange(host, FORMATS[name], shape, stored))
    assert same_bits(got, want)
    assert float(want.isfinite().float().mean()) > 0.95


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("d", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00])
def test_edges_of_blocks_keep_their_signs_and_infinities(
    host: ctypes.CDLL, name: str, d: int
) -> None:
    rng, shape, form = np.random.default_rng(d), (64, 512), row_format(name)
    blocks = rng.integers(0, 256, (64, 512 // form.block_values, form.block_bytes), dtype=np.uint8)
    factor = np.array([d], np.uint16).view(np.uint8)
    for index, at in enumerate(FACTORS_AT[name]):
        blocks[:: index + 1, :, at : at + 2] = factor
    stored = blocks.reshape(64, -1)
    got = decode(host, FORMATS[name], shape, arrange(host, FORMATS[name], shape, stored))
    assert same_bits(got, to_bf16(form.dequantize(stored)))


@pytest.mark.parametrize("name", BLOCKS)
def test_arranging_keeps_every_byte_that_is_not_repacked(host: ctypes.CDLL, name: str) -> None:
    """As many bytes as stored, and no two stored files arrange to the same bytes."""
    rng, shape, form = np.random.default_rng(9), (32, 256), row_format(name)
    stored = rng.integers(0, 256, (32, form.row_bytes(256)), dtype=np.uint8)
    once = arrange(host, FORMATS[name], shape, stored)
    assert once.size == stored.size
    for bit in rng.integers(0, stored.size * 8, 300):
        other = stored.copy().reshape(-1)
        other[bit // 8] ^= 1 << (bit % 8)
        changed = once ^ arrange(host, FORMATS[name], shape, other.reshape(stored.shape))
        assert np.unpackbits(changed).sum() == 1


@pytest.mark.parametrize(
    ("form", "shape", "size"),
    [
        (FP8, (25600, 6144), 25600 * 6144 + 800 * 192),
        (Q2_K, (25600, 6144), 25600 * 24 * 84),
        (FP8, (48, 256), -1),
        (FP8, (32, 128), -1),
        (Q2_K, (40, 256), -1),
        (FORMATS["Q8_0"], (25600, 6144), 25600 * 192 * 34),
        (FORMATS["Q3_K"], (25600, 6144), 25600 * 24 * 110),
        (FORMATS["Q4_K"], (25600, 6144), 25600 * 24 * 144),
        (FORMATS["Q8_0"], (48, 256), -1),
        (FORMATS["Q4_K"], (32, 128), -1),
        (FORMATS["Q5_K"], (32, 256), -1),
    ],
)
def test_arranged_weights_have_the_bytes_of_stored_ones(
    host: ctypes.CDLL, form: int, shape: tuple[int, int], size: int
) -> None:
    assert host.host_arranged_bytes(form, *shape) == size
