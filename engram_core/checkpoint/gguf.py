"""A bounded reader of GGUF headers: metadata, and where each tensor lies.

`gguf.GGUFReader` needs 7.5 s and 500 MB for a shard with a tokenizer inside, since it makes an
object of every string; here arrays that nobody asks for are stepped over.

Source: the GGUF specification (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engram_core.checkpoint.files import Cursor, RegularFile, refusal, shown, tensor_refusal
from engram_core.quant import BLOCK33, row_format

_MAX_HEADER_BYTES = 32 << 20
_MAX_KEYS = 16_384
_MAX_TENSORS = 32_768
_MAX_NAME_BYTES = 1_024
_MAX_KEPT_STRING = 4_096
_MAX_KEPT_ELEMENTS = 1 << 22
_MAX_STRINGS = 1 << 21
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 48
_DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


_BLOCK33 = row_format(BLOCK33)


@dataclass(frozen=True)
class Skipped:
    """A value that was stepped over; `text` says what it was."""

    text: str


Value = int | float | bool | str | NDArray[np.generic] | Skipped


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: outermost first (GGUF's ne, reversed); offset: in the file."""

    name: str
    path: Path
    type_id: int
    shape: tuple[int, ...]
    offset: int

    @property
    def type_name(self) -> str:
        """The ggml name of the type (or ours), or its number."""
        if self.type_id == _BLOCK33.type_id:
            return _BLOCK33.name
        try:
            return GGMLQuantizationType(self.type_id).name
        except ValueError:
            return f"ggml type {self.type_id}"

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the data; None for a type that is not known."""
        packed = _block(self.type_id)
        if packed is None:
            return None
        block, block_bytes = packed
        elements = 1
        for length in self.shape:
            elements *= length
        return elements // block * block_bytes


@dataclass(frozen=True)
class GgufFile:
    """The header of one file. metadata: arrays only under keys that contain "engram"."""

    path: Path
    size: int
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of one GGUF file.

    Raises:
        CheckpointError: not GGUF, another version or byte order, a count, length or offset that
            does not fit, a duplicate name, or data that the file does not hold.
    """
    with RegularFile(path) as file:
        cursor = Cursor(file, _MAX_HEADER_BYTES)
        version = _read_version(path, cursor)
        num_tensors = _count(path, cursor, "tensor count", _MAX_TENSORS, _MIN_TENSOR_BYTES, file)
        num_keys = _count(path, cursor, "key count", _MAX_KEYS, _MIN_KEY_BYTES, file)
        metadata = _read_metadata(path, cursor, num_keys)
        infos = [_read_tensor_info(path, cursor) for _ in range(num_tensors)]
        alignment = _alignment(path, metadata)
        base = -(-cursor.position // alignment) * alignment
        tensors = _place(path, infos, base, alignment)
        _check_extents(file.size, tensors)
        return GgufFile(path, file.size, version, metadata, {t.name: t for t in tensors})


def _read_version(path: Path, cursor: Cursor) -> int:
    magic = cursor.take(4)
    if magic == b"FUGG":
        raise refusal(path, "byte order", expected="little-endian GGUF", got="magic reversed")
    if magic != b"GGUF":
        raise refusal(path, "magic", expected="GGUF", got=shown(magic))
    version = cursor.u32()
    if version & 0xFFFF == 0:
        advice = "convert the file to little-endian"
        got = "a big-endian file"
        raise refusal(path, "byte order", expected="little-endian", got=got, advice=advice)
    if version not in (2, 3):
        raise refusal(path, "version", expected="GGUF version 2 or 3", got=version)
    return version


def _count(
    path: Path, cursor: Cursor, what: str, limit: int, min_bytes: int, file: RegularFile
) -> int:
    count = cursor.u64()
    most = min(limit, file.size // min_bytes)
    if count > most:
        got = f"{count} in a file of {file.size} bytes"
        raise refusal(path, what, expected=f"at most {most}", got=got)
    return count


def _read_metadata(path: Path, cursor: Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = _read_name(path, cursor, "key")
        if key in metadata:
            raise refusal(path, f"key {shown(key)}", expected="each key once", got="a duplicate")
        metadata[key] = _read_value(path, cursor, key)
    return metadata


def _read_name(path: Path, cursor: Cursor, what: str) -> str:
    length = cursor.u64()
    if not 0 < length <= _MAX_NAME_BYTES:
        where = f"{what} name at byte {cursor.position}"
        raise refusal(path, where, expected=f"1 to {_MAX_NAME_BYTES} bytes", got=length)
    try:
        return cursor.take(length).decode()
    except UnicodeDecodeError:
        raise refusal(path, f"{what} name", expected="UTF-8", got="other bytes") from None


def _read_value(path: Path, cursor: Cursor, key: str) -> Value:
    kind = cursor.u32()
    if kind == _STRING:
        return _read_string(cursor)
    if kind == _ARRAY:
        return _read_array(path, cursor, key)
    if kind not in _SCALARS:
        raise refusal(path, f"key {shown(key)}", expected="a GGUF value type", got=kind)
    dtype = np.dtype(_SCALARS[kind])
    value = np.frombuffer(cursor.take(dtype.itemsize), dtype)[0].item()
    return bool(value) if kind == _BOOL else value


def _read_string(cursor: Cursor) -> Value:
    length = cursor.u64()
    if length > _MAX_KEPT_STRING:  # a chat template, say
        cursor.skip(length)
        return Skipped(f"a string of {length} bytes")
    return cursor.take(length).decode(errors="replace")


def _read_array(path: Path, cursor: Cursor, key: str) -> Value:
    kind, count = cursor.u32(), cursor.u64()
    if kind == _STRING:
        _skip_strings(path, cursor, key, count)
        return Skipped(f"an array of {count} strings")
    if kind not in _SCALARS:
        where = f"key {shown(key)}"
        raise refusal(path, where, expected="an array of numbers or strings", got=f"type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    if "engram" not in key:
        cursor.skip(count * dtype.itemsize)
        return Skipped(f"an array of {count} numbers")
    if count > _MAX_KEPT_ELEMENTS:
        where = f"key {shown(key)}"
        raise refusal(path, where, expected=f"at most {_MAX_KEPT_ELEMENTS} elements", got=count)
    values = np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
    return values.astype(np.bool_) if kind == _BOOL else values


def _skip_strings(path: Path, cursor: Cursor, key: str, count: int) -> None:
    """Step over strings; each costs time, however short it is."""
    if cursor.num_skipped + count > _MAX_STRINGS:
        got = f"{count} more" if cursor.num_skipped else count
        expected = f"at most {_MAX_STRINGS} strings"
        raise refusal(path, f"key {shown(key)}", expected=expected, got=got)
    cursor.skip_strings(count)


def _read_tensor_info(path: Path, cursor: Cursor) -> GgufTensor:
    name = _read_name(path, cursor, "tensor")
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        where = f"tensor {shown(name)}"
        raise refusal(path, where, expected=f"1 to {_MAX_DIMS} dimensions", got=num_dims)
    ne = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    type_id, offset = cursor.u32(), cursor.u64()
    tensor = GgufTensor(name, path, type_id, tuple(reversed(ne)), offset)
    _check_shape(tensor)
    return tensor


def _check_shape(tensor: GgufTensor) -> None:
    elements = 1
    for length in tensor.shape:
        elements *= length
    if not 0 < elements <= _MAX_ELEMENTS:
        expected = f"1 to {_MAX_ELEMENTS} elements"
        raise tensor_refusal(tensor, expected=expected, got=list(tensor.shape))
    packed = _block(tensor.type_id)
    # A type that is not known is refused by whoever wants to read it.
    if packed is not None and tensor.shape[-1] % packed[0]:
        expected = f"rows of a multiple of {packed[0]} values for {tensor.type_name}"
        raise tensor_refusal(tensor, expected=expected, got=tensor.shape[-1])


def _block(type_id: int) -> tuple[int, int] | None:
    """Values and bytes of a type's packed unit; None for a type that is not known."""
    if type_id == _BLOCK33.type_id:
        return _BLOCK33.block_values, _BLOCK33.block_bytes
    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
        return None


def _alignment(path: Path, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    valid = type(alignment) is int and 0 < alignment <= 1 << 30 and alignment % 8 == 0
    if not valid:
        where = "key 'general.alignment'"
        raise refusal(path, where, expected="a non-zero multiple of 8", got=shown(alignment))
    return int(alignment)  # type: ignore[arg-type]


def _place(path: Path, infos: list[GgufTensor], base: int, alignment: int) -> list[GgufTensor]:
    """Turn offsets within the data into offsets within the file."""
    names: set[str] = set()
    placed = []
    for info in infos:
        if info.name in names:
            raise tensor_refusal(info, expected="each tensor once", got="a duplicate")
        if info.offset % alignment:
            raise tensor_refusal(info, expected=f"a multiple of {alignment}", got=info.offset)
        names.add(info.name)
        offset = base + info.offset
        placed.append(GgufTensor(info.name, path, info.type_id, info.shape, offset))
    return placed


def _check_extents(size: int, tensors: list[GgufTensor]) -> None:
    """Every tensor lies inside the file, and none on another."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise tensor_refusal(tensor, expected=f"data from byte {end} on", got=tensor.offset)
        end = tensor.offset + (tensor.num_bytes or 0)
        if end > size:
            got = f"a file of {size} bytes"
            advice = "the file is truncated: download it again"
            raise tensor_refusal(tensor, expected=f"data up to byte {end}", got=got, advice=advice)
