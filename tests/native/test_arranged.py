"""Arranged weights on the host: nothing lost, and every lane's registers hold quant.py's bits."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends.native import FORMATS
from engram_core.quant import dequantize_fp8_matrix, row_format, to_bf16
from tests.native.host_library import address, build_host_library

FP8, Q2_K = FORMATS["E4M3_E8M0_32"], FORMATS["Q2_K"]
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


def test_arranging_keeps_every_byte_of_fp8(host: ctypes.CDLL) -> None:
    rng, shape = np.random.default_rng(4), (64, 512)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 16), dtype=np.uint8)
    arranged = arrange(host, FP8, shape, codes, scales)
    stored = np.concatenate([codes.reshape(-1), scales.reshape(-1)])
    assert np.array_equal(np.bincount(arranged, minlength=256), np.bincount(stored, minlength=256))
    assert np.array_equal(arranged[codes.size :], scales.reshape(-1))


@pytest.mark.parametrize(
    ("form", "shape", "size"),
    [
        (FP8, (25600, 6144), 25600 * 6144 + 800 * 192),
        (Q2_K, (25600, 6144), 25600 * 24 * 84),
        (FP8, (48, 256), -1),
        (FP8, (32, 128), -1),
        (Q2_K, (40, 256), -1),
        (FORMATS["Q8_0"], (32, 256), -1),
    ],
)
def test_arranged_weights_have_the_bytes_of_stored_ones(
    host: ctypes.CDLL, form: int, shape: tuple[int, int], size: int
) -> None:
    assert host.host_arranged_bytes(form, *shape) == size
