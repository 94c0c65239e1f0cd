"""The layer recomputed the plain way, for `verify`: shares no arithmetic with the backends.

Python integers for the hash, the `gguf` package and `ml_dtypes` for stored values, float64 for
the projection and the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engram_core.checkpoint.sources import TensorSource
from engram_core.geometry import EngramHashTables
from engram_core.tables import TableSource

_F32_EPS = 2.0**-24
_CLAMP = 1e-6


def plain_windows(
    token_ids: Sequence[int], is_live: Sequence[bool], tables: EngramHashTables
) -> list[list[int]]:
    """Windows of a whole sequence, newest first, pad from the first dead or missing id on."""
    ids = [
        int(tables.token_map[t]) if live else None
        for t, live in zip(token_ids, is_live, strict=True)
    ]
    windows = []
    for position in range(len(ids)):
        window: list[int] = []
        for shift in range(tables.max_ngram_size):
            source = ids[position - shift] if position >= shift else None
            if source is None:
                window += [tables.pad_id] * (tables.max_ngram_size - shift)
                break
            window.append(source)
        windows.append(window)
    return windows


def plain_hash(window: Sequence[int], layer_index: int, tables: EngramHashTables) -> list[int]:
    """Row ids of one window: products, exclusive or, remainder; wrapped to 64 bits."""
    multipliers = [int(m) for m in tables.multipliers[layer_index]]
    mixed, row_ids, start = window[0] * multipliers[0], [], 0
    for order in range(1, tables.max_ngram_size):
        mixed ^= window[order] * multipliers[order]
        signed = (mixed + 2**63) % 2**64 - 2**63
        for prime in (int(p) for p in tables.primes[layer_index, order - 1]):
            row_ids.append(signed % prime + start)
            start += prime
    return row_ids


def stored_rows(table: TableSource, row_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Read rows by seek and read: uint8 [n, row_bytes]."""
    columns = []
    for part in table.parts:
        with open(part.path, "rb") as file:
            rows = []
            for row_id in row_ids:
                file.seek(part.offset + row_id * part.row_bytes)
                rows.append(np.frombuffer(file.read(part.row_bytes), np.uint8))
        columns.append(np.stack(rows))
    return np.concatenate(columns, axis=1)


def decoded_rows(encoding: str, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Decode stored rows and round them to bfloat16: float64 [n, values]."""
    return _as_bf16(_decoded(encoding, rows))


def decoded_wkv(wkv: TensorSource, first: int, count: int) -> NDArray[np.float64]:
    """Read `count` outputs of wkv from `first` (a multiple of 32), rounded: float64 [count, in]."""
    rows = _raw(wkv, first, count)
    if wkv.scale is None:
        return decoded_rows(wkv.type, rows)
    codes = rows.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    is_float = wkv.scale.type == "F32"
    kind = np.dtype("<f4") if is_float else np.dtype(ml_dtypes.float8_e8m0fnu)
    scales = _raw(wkv.scale, first // 32, -(-count // 32)).view(kind)
    blocks = np.repeat(np.repeat(scales.astype(np.float64), 32, axis=0), 32, axis=1)
    values: NDArray[np.float64] = codes * blocks[: codes.shape[0], : codes.shape[1]]
    return _as_bf16(values)


def decoded_gate(q: TensorSource, k: TensorSource) -> NDArray[np.float64]:
    """Read q * k as stored, not rounded: float64 [hc, dim]."""
    first, second = (_decoded(t.type, _raw(t, 0, t.shape[0])) for t in (q, k))
    return first * second


def requantized(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round the input of an FP8 wkv: e4m3 per 32 values, power-of-two scale, amax floor 1e-4."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(1e-4))
    ratio = amax.astype(np.float32) * np.float32(1 / 448)
    scale = np.exp2(np.ceil(np.log2(ratio.astype(np.float64))))
    codes = np.clip(groups / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    values: NDArray[np.float64] = (codes.astype(np.float64) * scale).reshape(rows.shape)
    return values


def gate_interval(
    residual: NDArray[np.float64],
    kv: NDArray[np.float64],
    qk: NDArray[np.float64],
    eps: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bound the gated residual from below and above, before its last rounding.

    The gate jumps where its argument changes sign, so a fixed tolerance would be wrong: the
    argument is computed in float64, widened by what float32 sums of `dim` terms may lose, and
    both ends go through the (monotonic) gate.

    residual: [T, hc, dim]; kv: [T, hc+1, dim]; qk: [hc, dim]
    """
    key, value = kv[:, :-1], kv[:, -1:]
    dim = residual.shape[-1]
    terms = residual * qk * key
    rstd = 1 / np.sqrt(np.square(residual).mean(-1) + eps)
    rstd = rstd / np.sqrt(np.square(key).mean(-1) + eps) * dim**-0.5
    dot = terms.sum(-1) * rstd
    loss = (np.abs(terms).sum(-1) * rstd) * _F32_EPS * (2 * dim + 16)
    ends = [_gate(dot - loss) - 8 * _F32_EPS, _gate(dot + loss) + 8 * _F32_EPS]
    sides = [residual + end[:, :, None] * value for end in ends]
    slack = _F32_EPS * (np.abs(residual) + 2 * np.abs(value))
    return np.minimum(*sides) - slack, np.maximum(*sides) + slack


def _decoded(encoding: str, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    if encoding in _FP8_GROUPS:
        codes, scales = _FP8_GROUPS[encoding](rows)
        groups = np.repeat(scales.astype(np.float64), 32, axis=1)
        scaled: NDArray[np.float64] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scaled *= groups
        return scaled
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[encoding])
    decoded: NDArray[np.float64] = values.astype(np.float64)
    return decoded


def _as_bf16(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        rounded: NDArray[np.float64] = (
            values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        )
    return rounded


def _codes_then_scales(rows: NDArray[np.uint8]) -> _CodesAndScales:
    codes = rows.shape[1] // 33 * 32
    return rows[:, :codes].copy(), rows[:, codes:].copy().view(ml_dtypes.float8_e8m0fnu)


def _codes_then_floats(rows: NDArray[np.uint8]) -> _CodesAndScales:
    codes = rows.shape[1] // 36 * 32
    return rows[:, :codes].copy(), rows[:, codes:].copy().view("<f4")


def _scale_before_each_group(rows: NDArray[np.uint8]) -> _CodesAndScales:
    groups = rows.reshape(len(rows), -1, 33)
    codes = groups[:, :, 1:].reshape(len(rows), -1)
    return codes, groups[:, :, 0].copy().view(ml_dtypes.float8_e8m0fnu)


_CodesAndScales = tuple[NDArray[np.uint8], NDArray[Any]]
_FP8_GROUPS: dict[str, Callable[[NDArray[np.uint8]], _CodesAndScales]] = {
    "E4M3_E8M0_32": _codes_then_scales,
    "E4M3_F32_32": _codes_then_floats,
    "E8M0_E4M3_32": _scale_before_each_group,
}


def _gate(dot: NDArray[np.float64]) -> NDArray[np.float64]:
    root = np.copysign(np.sqrt(np.maximum(np.abs(dot), _CLAMP)), dot)
    return 1 / (1 + np.exp(-root))


def _raw(source: TensorSource, first: int, count: int) -> NDArray[np.uint8]:
    row_bytes = source.num_bytes // source.shape[0]
    with open(source.path, "rb") as file:
        file.seek(source.offset + first * row_bytes)
        raw = file.read(count * row_bytes)
    return np.frombuffer(raw, np.uint8).reshape(count, row_bytes).copy()
