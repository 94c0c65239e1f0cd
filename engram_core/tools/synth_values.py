"""Seeded values in any row format: sane magnitudes, both signs, no quantiser needed.

A float is a random sign and mantissa under one of four exponents, a packed block random bytes
under a chosen scale; a power of two for each row varies the magnitude of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engram_core.quant import QUANT_GROUP, ROW264, row_format


@dataclass(frozen=True)
class _FloatCode:
    """Bits that stay random, those that are set (exponents of 2^-3..2^0), and one exponent step."""

    dtype: str
    keep: int
    fix: int
    step: int


_FLOATS = {
    "F32": _FloatCode("<u4", 0x81FFFFFF, 0x3E000000, 1 << 23),
    "BF16": _FloatCode("<u2", 0x81FF, 0x3E00, 1 << 7),
    "F16": _FloatCode("<u2", 0x8FFF, 0x3000, 1 << 10),
    "F8_E4M3": _FloatCode("u1", 0x9F, 0x20, 0),
}

_BLOCK_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1 / 127),),
    "Q2_K": ((80, 1 / 45), (82, 1.5 / 45)),
    "Q3_K": ((108, 1 / 128),),
    "Q4_K": ((0, 1 / 945), (2, 7.5 / 945)),
    "Q5_K": ((0, 1 / 1953), (2, 15.5 / 1953)),
    "Q6_K": ((208, 1 / 4096),),
}
"""Where a block keeps its float16 scales, and their size for values of about 1 around 0."""


def random_rows(
    rng: np.random.Generator, encoding: str, shape: tuple[int, int], *, octave: int, spread: int
) -> NDArray[np.uint8]:
    """Make rows as stored: uint8 [n, row_bytes] for shape (n, values of a row).

    octave: values are about 2^octave; spread: rows differ by up to 2^-spread
    """
    num_rows, num_values = shape
    down = rng.integers(0, spread + 1, (num_rows, 1)) - octave
    if encoding == ROW264:
        codes = _random_floats(rng, "F8_E4M3", shape, down)
        jitter = rng.integers(0, 2, (num_rows, num_values // QUANT_GROUP))
        return np.concatenate([codes, (127 - down - jitter).astype(np.uint8)], axis=1)
    if encoding in _FLOATS:
        return _random_floats(rng, encoding, shape, down)
    form = row_format(encoding)
    num_blocks = num_values // form.block_values
    blocks = _random_bytes(rng, (num_rows, num_blocks, form.block_bytes))
    if encoding == "MXFP4":
        blocks[:, :, 0] = 125 - down
    for at, size in _BLOCK_SCALES.get(encoding, ()):
        factor = rng.uniform(0.5, 1.0, (num_rows, num_blocks)) * np.exp2(-down)
        scale = (factor * size).astype("<f2")
        blocks[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def _random_floats(
    rng: np.random.Generator, encoding: str, shape: tuple[int, int], down: NDArray[np.int64]
) -> NDArray[np.uint8]:
    code = _FLOATS[encoding]
    dtype = np.dtype(code.dtype)
    raw = _random_bytes(rng, (shape[0], shape[1] * dtype.itemsize)).view(dtype)
    raw &= dtype.type(code.keep)
    raw |= dtype.type(code.fix)
    raw -= (down * code.step).astype(dtype)
    return raw.view(np.uint8)


def _random_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(rng.bytes(int(np.prod(shape)))), np.uint8).reshape(shape)
