"""Row formats: how stored bytes become float32, and float32 bfloat16. The one definition of each.

Every value is computed in float32 without fused multiply-add, then rounded once to bfloat16
(nearest even). Kernels are held to these bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import BadTensor, CheckpointError

QUANT_GROUP = 32
"""Values that share one e8m0 scale."""

ROW264 = "E4M3_E8M0_32"
"""Rows of FP8 checkpoints: head_dim e4m3 codes, then head_dim / 32 e8m0 scales."""

ROW288 = "E4M3_F32_32"
"""The same with scales in float32: head_dim codes, then head_dim / 32 floats."""

BLOCK33 = "E8M0_E4M3_32"
"""Groups of an e8m0 scale and its 32 e4m3 codes, one after the other (layout G)."""

_BLOCK33_TYPE = 64
"""Its GGUF type: a number of ds4's own, above every number ggml has given out."""

AMAX_FLOOR = 1e-4
"""Smallest group maximum the official model assumes when it quantises the input of wkv."""

_Decode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one table (or weight) are stored.

    name: the GGUF type's name, or this project's; type_id: the GGUF type's number, if it has one
    block_values, block_bytes: the packed unit; a row is a whole number of them
    """

    name: str
    type_id: int | None
    block_values: int
    block_bytes: int
    decode: _Decode

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row of head_dim values. Raises: CheckpointError."""
        if head_dim < 1 or head_dim % self.block_values:
            raise CheckpointError(
                f"{self.name} rows hold a multiple of {self.block_values} values, got {head_dim}",
                expected=f"a multiple of {self.block_values}",
                got=head_dim,
            )
        return head_dim // self.block_values * self.block_bytes

    def dequantize(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Decode rows: uint8 [n, row_bytes] -> float32 [n, head_dim]. Raises: BadTensor."""
        shape = list(rows.shape)
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % self.block_bytes:
            expected = f"uint8 [n, a multiple of {self.block_bytes}]"
            got = f"{rows.dtype} {shape}"
            raise BadTensor(
                f"{self.name} rows: expected {expected}, got {got}", expected=expected, got=got
            )
        head_dim = rows.shape[1] // self.block_bytes * self.block_values
        if rows.size == 0:
            return np.empty((len(rows), head_dim), dtype=np.float32)
        # A file may hold any bits, infinities and NaN among them: they decode to what they say.
        with np.errstate(all="ignore"):
            return self.decode(np.ascontiguousarray(rows)).reshape(len(rows), head_dim)


def row_format(name: str) -> RowFormat:
    """Look a format up by name. Raises: CheckpointError naming it and the known ones."""
    if name not in _BY_NAME:
        known = ", ".join(_BY_NAME)
        raise CheckpointError(
            f"row format {name!r} is not supported; known: {known}", expected=known, got=name
        )
    return _BY_NAME[name]


def row_format_of_type(type_id: int) -> RowFormat:
    """Look a format up by GGUF type number. Raises: CheckpointError naming type and number."""
    if type_id not in _BY_TYPE:
        names = {int(t): t.name for t in gguf.GGMLQuantizationType}
        known = ", ".join(f"{f.name} ({i})" for i, f in _BY_TYPE.items())
        raise CheckpointError(
            f"GGUF type {names.get(type_id, 'unknown')} ({type_id}) is not supported; "
            f"known: {known}",
            expected=known,
            got=type_id,
        )
    return _BY_TYPE[type_id]


def to_bf16(values: NDArray[np.float32]) -> torch.Tensor:
    """Round float32 to bfloat16: nearest, ties to even; NaN stays NaN, subnormals stay."""
    return torch.from_numpy(values).to(torch.bfloat16)


def e4m3_to_f32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode e4m3fn: bias 7, subnormals m * 2^-9, largest 448, 7F and FF NaN, no infinity."""
    return np.take(_E4M3, codes)


def e8m0_to_f32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode e8m0: 2^(code - 127). Code 0 is 2^-127 (subnormal, not zero), 255 is NaN."""
    return np.take(_E8M0, codes)


def dequantize_fp8_matrix(codes: NDArray[np.uint8], scales: NDArray[Any]) -> NDArray[np.float32]:
    """Decode a weight with one scale for each 32x32 block.

    codes: uint8 [n, k] e4m3; scales: uint8 (e8m0) or float32 [ceil(n/32), ceil(k/32)]
    Returns: float32 [n, k]

    Raises: BadTensor.
    """
    want = tuple(-(-size // QUANT_GROUP) for size in codes.shape)
    if codes.ndim != 2 or scales.shape != want:
        raise BadTensor(
            f"scales of codes {list(codes.shape)}: expected {list(want)}, got {list(scales.shape)}",
            expected=list(want),
            got=list(scales.shape),
        )
    factors = e8m0_to_f32(scales) if scales.dtype == np.uint8 else scales
    by_row = np.repeat(factors, QUANT_GROUP, axis=1)[:, : codes.shape[1]]
    values = e4m3_to_f32(codes)
    for group, scale in enumerate(by_row):
        with np.errstate(all="ignore"):
            values[group * QUANT_GROUP : (group + 1) * QUANT_GROUP] *= scale
    return values


def requantize(rows: torch.Tensor) -> torch.Tensor:
    """Round wkv's input as the official model does: e4m3 with a power-of-two scale per 32 values.

    amax = max(largest |x| of the group, 1e-4); scale = 2^ceil(log2(amax / 448)); the value is
    e4m3(clamp(x / scale, +-448)) * scale. A NaN or infinity makes its group NaN.

    rows: bfloat16 [..., k], k a multiple of 32
    Returns: bfloat16, the same shape (a code times a power of two is exact)

    Source: `act_quant` of the official inference code; engram-format 5.
    """
    groups = rows.float().reshape(*rows.shape[:-1], rows.shape[-1] // QUANT_GROUP, QUANT_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    # 2^ceil(log2) by bits: carry into the exponent unless the mantissa is zero, then clear it.
    bits = (amax * (1.0 / 448.0)).view(torch.int32)
    power = ((bits + 0x007F_FFFF) & 0x7F80_0000).view(torch.float32)
    scale = torch.where(amax.isfinite(), power, torch.nan)
    codes = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).reshape(rows.shape).to(torch.bfloat16)


def _e4m3_table() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    subnormal = mantissa * 2.0**-9
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    magnitude = np.where(exponent == 0, subnormal, normal)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


def _e8m0_table() -> NDArray[np.float32]:
    values = 2.0 ** (np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


def _decode_row264(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    num_groups = rows.shape[1] // (QUANT_GROUP + 1)
    codes, scales = rows[:, : num_groups * QUANT_GROUP], rows[:, num_groups * QUANT_GROUP :]
    values = e4m3_to_f32(codes).reshape(len(rows), num_groups, QUANT_GROUP)
    values *= e8m0_to_f32(scales)[:, :, None]
    return values


def _decode_row288(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    num_groups = rows.shape[1] // (QUANT_GROUP + 4)
    codes, scales = rows[:, : num_groups * QUANT_GROUP], rows[:, num_groups * QUANT_GROUP :]
    values = e4m3_to_f32(codes).reshape(len(rows), num_groups, QUANT_GROUP)
    values *= np.ascontiguousarray(scales).view("<f4")[:, :, None]
    return values


def _decode_block33(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    groups = rows.reshape(-1, QUANT_GROUP + 1)
    values = e4m3_to_f32(groups[:, 1:])
    values *= e8m0_to_f32(groups[:, :1])
    return values


def _decode_blocks(name: str, block_bytes: int) -> _Decode:
    """Decode with the `gguf` package, whole arrays at a time (its own entry takes 16 rows)."""
    quant = getattr(gguf.quants, name)

    def decode(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = quant.dequantize_blocks(rows.reshape(-1, block_bytes))
        return values

    return decode


def _decode_float(dtype: str) -> _Decode:
    return lambda rows: rows.view(dtype).astype(np.float32)


def _decode_bf16(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _formats() -> list[RowFormat]:
    plain = [
        RowFormat("F32", 0, 1, 4, _decode_float("<f4")),
        RowFormat("F16", 1, 1, 2, _decode_float("<f2")),
        RowFormat("BF16", 30, 1, 2, _decode_bf16),
        RowFormat(ROW264, None, QUANT_GROUP, QUANT_GROUP + 1, _decode_row264),
        RowFormat(ROW288, None, QUANT_GROUP, QUANT_GROUP + 4, _decode_row288),
        RowFormat(BLOCK33, _BLOCK33_TYPE, QUANT_GROUP, QUANT_GROUP + 1, _decode_block33),
    ]
    packed = []
    for name in _GGUF_BLOCKS:
        kind = gguf.GGMLQuantizationType[name]
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        packed.append(
            RowFormat(name, int(kind), values, num_bytes, _decode_blocks(name, num_bytes))
        )
    return plain + packed


_GGUF_BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""What is accepted. The grid types (IQ1..IQ3, TQ, NVFP4) are refused: no Engram file has them."""

_E4M3 = _e4m3_table()
_E8M0 = _e8m0_table()
_BY_NAME = {form.name: form for form in _formats()}
_BY_TYPE = {form.type_id: form for form in _BY_NAME.values() if form.type_id is not None}
