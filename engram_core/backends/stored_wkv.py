"""wkv as stored: its bytes arranged once for the tensor cores, and who multiplies which batch.

Up to 64 tokens the layer's time is one pass over wkv. Stored weights are a sixth (Q2_K) to a half
(FP8, Q8_0) of their bf16 copy, which stays for larger batches; the bits are the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import byref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.native import Native
from engram_core.quant import ROW264, row_format

BATCH_CLASSES = (8, 16, 32, 64)
"""Largest T of each class whose kernel is chosen by measurement."""

CHECKED_SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
"""T at which a kernel is compared with the chain by bits: every class, full and ragged."""

CHAIN, STORED, WGMMA, CUBLASLT = "chain", "stored", "stored wgmma", "cublasLt"

STORED_FORMS = {STORED: abi.STORED_MMA, WGMMA: abi.STORED_WGMMA}
"""Kernels over wkv as stored: name -> engram_stored_form."""

_FACTORS = {"Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2)}
"""Formats of quant blocks that the kernels read; where a block keeps its f16 factors."""

_EXOTIC = "it holds NaN codes or scales above 2^7"


@dataclass
class StoredWkv:
    """encoding: a name of `quant`; arranged: the stored bytes in the tensor cores' order

    kernels: those of STORED_FORMS that may multiply it
    """

    encoding: str
    arranged: DeviceBuffer
    kernels: tuple[str, ...] = (STORED,)


@dataclass(frozen=True)
class Stored:
    """Where a weight lies on the device, as in its file. scales: an address, or 0"""

    encoding: str
    out_features: int
    in_features: int
    codes: int
    scales: int


def arranged_bytes(encoding: str, out_features: int, in_features: int) -> int:
    """Device bytes of a wkv kept as stored; 0 where no kernel reads it (its bf16 copy serves)."""
    if out_features % 32 or in_features % 256:
        return 0
    count = out_features * in_features
    if encoding == ROW264:
        return count // 1024 * 1025
    return row_format(encoding).row_bytes(count) if encoding in _FACTORS else 0


def arrange(native: Native, stored: Stored, stream: Stream, owner: ExitStack) -> StoredWkv | str:
    """Arrange a weight; `owner` frees the result. Waits.

    Returns: the weight, or the reason why its bf16 copy alone serves.
    """
    size = arranged_bytes(stored.encoding, stored.out_features, stored.in_features)
    if not size:
        shape = f"{stored.out_features} x {stored.in_features}"
        return f"no kernel reads {stored.encoding} of {shape} as stored"
    with ExitStack() as made:
        buffer = DeviceBuffer(native, size)
        made.callback(buffer.close)
        if _is_exotic(native, stored, buffer, stream):
            return _EXOTIC
        owner.push(made.pop_all())
    return StoredWkv(stored.encoding, buffer)


def _is_exotic(native: Native, stored: Stored, to: DeviceBuffer, stream: Stream) -> bool:
    with ExitStack() as made:
        flag = PinnedBuffer(native, 4)
        made.callback(flag.close)
        end = Event(native)
        made.callback(end.close)
        flag.bytes[:] = 0
        params = abi.Arrange(
            format=abi.FORMATS[stored.encoding],
            out_features=stored.out_features,
            in_features=stored.in_features,
            codes=stored.codes,
            scales=stored.scales,
            arranged=to.address,
            is_exotic=flag.address,
            stream=stream.handle,
        )
        native.arrange(byref(params))
        end.record(stream)
        end.wait()
        return bool(flag.bytes.any())


def edge_weights(
    encoding: str, out_features: int, in_features: int, seed: int = 41
) -> NDArray[np.uint8]:
    """Stored bytes that reach every code and edge the kernels serve, rows first.

    Returns: uint8 [out_features, row_bytes]; for E4M3_E8M0_32 codes alone (scales: `edge_scales`)
    """
    rng = np.random.default_rng(seed)
    if encoding == ROW264:
        codes = rng.integers(0, 256, (out_features, in_features), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x80
        return codes
    form = row_format(encoding)
    shape = (out_features, in_features // form.block_values, form.block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    # d, dmin: -0, subnormal, largest; and in one row an infinity, in another a NaN.
    edges = np.array([0x8000, 0x0001, 0x7BFF, 0x0000, 0xFBFF], np.uint16).view(np.float16)
    for index, place in enumerate(_FACTORS[encoding]):
        factors = (rng.standard_normal(shape[:2]) * 0.05).astype(np.float16)
        factors[index : 4 * len(edges) : 4, 0] = edges
        factors[2 + index, 0] = (np.inf, np.nan)[index]
        blocks[:, :, place : place + 2] = factors.view(np.uint8).reshape(*shape[:2], 2)
    return blocks.reshape(out_features, -1)


def edge_scales(out_features: int, in_features: int) -> NDArray[np.uint8]:
    """e8m0 scales for `edge_weights`: every one the kernels serve, most near 1."""
    rng = np.random.default_rng(42)
    scales = rng.integers(110, 128, (out_features // 32, in_features // 32), dtype=np.uint8)
    scales[0] = np.arange(in_features // 32) % 135
    return scales
