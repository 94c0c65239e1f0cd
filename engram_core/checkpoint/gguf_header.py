"""The header of a GGUF file to be written: keys, tensors, and where their data will lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engram_core.checkpoint.sources import NewTensor
from engram_core.quant import BLOCK33, row_format

GgufValue = int | float | str | Sequence[str] | NDArray[np.generic]

_VERSION = 3
_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_ARRAY_TYPES = {"int32": 5, "uint32": 4, "int64": 11, "uint64": 10}


@dataclass(frozen=True)
class GgufHeader:
    """raw: up to the data, padded; offsets: in the file, by tensor; file_bytes: with all data."""

    raw: bytes
    offsets: dict[str, int]
    file_bytes: int


def gguf_header(
    arch: str, metadata: Mapping[str, GgufValue], tensors: Sequence[NewTensor]
) -> GgufHeader:
    """Lay a file out (version 3, little-endian, alignment 32).

    An integer becomes u32, a float f32; an array keeps its type: the `gguf` package would store
    the 47-bit multipliers as i32.
    """
    keys: dict[str, GgufValue] = {"general.architecture": arch, **metadata}
    raw = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(keys))
    raw += b"".join(_text(key) + _value(value) for key, value in keys.items())
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end = _aligned(end + tensor.num_bytes)
    raw += b"".join(_info(tensor, start) for tensor, start in zip(tensors, starts, strict=True))
    raw = raw.ljust(_aligned(len(raw)), b"\0")
    offsets = {t.name: len(raw) + start for t, start in zip(tensors, starts, strict=True)}
    return GgufHeader(raw, offsets, len(raw) + end)


def gguf_type(name: str) -> int:
    """Number of a type. Raises: KeyError for a name GGUF has no number for."""
    if name == BLOCK33:
        return row_format(name).type_id or 0
    return int(GGMLQuantizationType[name])


def _info(tensor: NewTensor, start: int) -> bytes:
    ne = tuple(reversed(tensor.shape))
    shape = struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
    return _text(tensor.name) + shape + struct.pack("<IQ", gguf_type(tensor.type), start)


def _value(value: GgufValue) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", _ARRAY, _ARRAY_TYPES[value.dtype.name], value.size)
        return head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
    return head + b"".join(_text(item) for item in value)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
