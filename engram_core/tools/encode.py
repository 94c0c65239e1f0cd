"""Float32 rows into a row format: plain code where the format is plain, ggml's own for K-quants.

`engram_core.quant` decodes every format; encoding is needed by `extract` alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import CheckpointError, SchemaError
from engram_core.quant import QUANT_GROUP, ROW264, row_format

Encode = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
"""float32 [n, head_dim] -> uint8 [n, row_bytes]; a row's bytes do not depend on the others."""

QUANTS = {"FP8": ROW264, "BF16": "BF16", "Q8_0": "Q8_0"} | {q: q for q in ("Q2_K", "Q3_K", "Q4_K")}
"""What `--quant` may be -> the row format it makes."""


_SERIAL_VALUES = 16_384
"""Values that torch converts in the caller's thread (from 32,768 on it takes others too)."""


def encoder(quant: str) -> Encode:
    """Find the encoder of a quant type.

    Raises: SchemaError naming the known ones; CheckpointError where ggml is not installed.
    """
    if quant not in QUANTS:
        known = ", ".join(QUANTS)
        raise SchemaError(f"quant: expected {known}, got {quant!r}", expected=known, got=quant)
    plain = {"FP8": encode_fp8, "BF16": _encode_bf16, "Q8_0": _encode_q8_0}
    return plain[quant] if quant in plain else _ggml_encoder(quant)


def encode_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to e4m3 with the smallest power of two for each 32 values that keeps them <= 448.

    float32 [n, k] -> uint8 [n, k + k/32]: codes, then e8m0 scales. Values that are e4m3 times a
    power of two come back exactly. What is not finite becomes e4m3's NaN.
    """
    num_rows, num_values = values.shape
    groups = values.reshape(num_rows, num_values // QUANT_GROUP, QUANT_GROUP)
    magnitude = np.where(np.isfinite(groups), np.abs(groups), 0)
    mantissa, exponent = np.frexp(magnitude.max(axis=-1))
    # 448 = 0.875 * 2^9: the exact ceil(log2(amax / 448)).
    power = np.clip(exponent - np.where(mantissa <= 0.875, 9, 8), -127, 127)
    power = np.where(mantissa == 0, 0, power)
    scaled = np.ldexp(groups, -power[:, :, None].astype(np.int32))
    scaled = np.where(np.isfinite(groups), scaled, np.nan)
    rows = np.empty((num_rows, num_values + num_values // QUANT_GROUP), np.uint8)
    codes = _cast(scaled.astype(np.float32), torch.float8_e4m3fn)
    rows[:, :num_values] = codes.reshape(num_rows, num_values)
    rows[:, num_values:] = power + 127
    return rows


def _encode_bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return _cast(values, torch.bfloat16).reshape(len(values), -1)


def _cast(values: NDArray[np.float32], dtype: torch.dtype) -> NDArray[np.uint8]:
    """Round to a torch type, in slices that torch does not cut for threads: ours are enough."""
    source = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
    out = torch.empty(source.shape, dtype=dtype)
    for start in range(0, len(source), _SERIAL_VALUES):
        out[start : start + _SERIAL_VALUES] = source[start : start + _SERIAL_VALUES]
    codes: NDArray[np.uint8] = out.view(torch.uint8).numpy()
    return codes


def _encode_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode with the `gguf` package, whole arrays at a time."""
    num_bytes = row_format("Q8_0").row_bytes(values.shape[1])
    with np.errstate(all="ignore"):
        blocks = gguf.quants.Q8_0.quantize_blocks(values.reshape(-1, QUANT_GROUP))
    rows: NDArray[np.uint8] = blocks.reshape(len(values), num_bytes)
    return rows


def _ggml_encoder(quant: str) -> Encode:
    """Encode with ggml's own quantiser (no importance matrix); it lets go of the GIL."""
    try:
        ggml: Any = import_module("ggml")
    except ImportError:
        advice = "install engram-service[ggml] (the package ggml-python)"
        raise CheckpointError(
            f"quant {quant} is made by ggml, which is not installed; {advice}",
            expected="ggml-python",
            got="none",
        ) from None
    form, floats = row_format(quant), ctypes.POINTER(ctypes.c_float)

    def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        values = np.ascontiguousarray(values, np.float32)
        num_rows, num_values = values.shape
        rows = np.empty((num_rows, form.row_bytes(num_values)), np.uint8)
        source = values.ctypes.data_as(floats)
        sizes = (0, num_rows, num_values)
        ggml.ggml_quantize_chunk(form.type_id, source, rows.ctypes.data, *sizes, None)
        return rows

    return encode
