"""A bounded reader of safetensors headers: where each tensor lies, nothing mapped.

The library's torch reader maps the file writable and fails on a shard of 101 GB.

Source: the safetensors format (8-byte length, JSON header, data without holes).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_core.checkpoint.files import RegularFile, refusal, shown, tensor_refusal

MAX_JSON_BYTES = 16 << 20
_MAX_HEADER_BYTES = 16 << 20
_MAX_ASCII_FREE_BYTES = 4 << 20
_MAX_VALUES = 400_000
_MAX_DIMS = 8
_MAX_ELEMENTS = 1 << 48

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64,
    "I64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
"""Bits of a value. Other dtypes may stand in a file; whoever wants to read one refuses it."""


@dataclass(frozen=True)
class SafeTensor:
    """One tensor. offset: in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: a header that is too long or not the format's JSON, a duplicate name,
            offsets with holes, overlaps or outside the file, or sizes that differ from the shape.
    """
    with RegularFile(path) as file:
        length = int.from_bytes(file.read(0, 8, "header length"), "little")
        most = min(_MAX_HEADER_BYTES, file.size - 8)
        if not 2 <= length <= most:
            raise refusal(path, "header length", expected=f"2 to {most} bytes", got=length)
        raw = file.read(8, length, "header")
        if raw[:1] != b"{":
            raise refusal(path, "header", expected="JSON that starts with {", got=shown(raw[:1]))
        header = parse_json(path, raw, "header")
        base = 8 + length
        tensors = [
            _read_tensor(path, name, entry, base)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        _check_extents(path, file.size, base, tensors)
        return {tensor.name: tensor for tensor in tensors}


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most `limit` bytes."""
    with RegularFile(path) as file:
        return parse_json(path, file.read_all(limit), "file")


def parse_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly: no duplicate keys, no NaN, bounded nesting and integers.

    What it may become in memory is bounded before it is parsed: 16 MiB of `{},{},` are 400 MB of
    objects, and one character above U+FFFF makes a text of four bytes a character. (The index of
    V4.1 has 96,085 values, the header of one of its shards about 20,000.)
    """
    num_values = sum(raw.count(mark) for mark in (b"{", b"[", b","))
    if num_values > _MAX_VALUES:
        raise refusal(path, what, expected=f"at most {_MAX_VALUES} values", got=num_values)
    if len(raw) > _MAX_ASCII_FREE_BYTES and not raw.isascii():
        expected = f"ASCII above {_MAX_ASCII_FREE_BYTES} bytes"
        raise refusal(path, what, expected=expected, got=f"{len(raw)} bytes with other characters")
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_no_duplicates(path), parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        got = shown(str(error) or type(error).__name__)
        raise refusal(path, what, expected="strict JSON", got=got) from None
    if not isinstance(value, dict):
        raise refusal(path, what, expected="a JSON object", got=type(value).__name__)
    return value


def _no_duplicates(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            where = f"key {shown(name)}"
            raise refusal(path, where, expected="each name once", got="a duplicate")
        return result

    return build


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _read_tensor(path: Path, name: str, entry: object, base: int) -> SafeTensor:
    where = f"tensor {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        got = sorted(entry)[:8] if isinstance(entry, dict) else type(entry).__name__
        raise refusal(path, where, expected="dtype, shape and data_offsets", got=shown(got))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise refusal(path, where, expected="a dtype name", got=shown(dtype))
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise refusal(path, where, expected=f"a shape of 0 to {_MAX_DIMS} sizes", got=shown(shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refusal(path, where, expected="data_offsets [begin, end]", got=shown(offsets))
    begin, end = offsets
    _check_size(path, where, dtype, shape, end - begin)
    return SafeTensor(name, path, dtype, tuple(shape), base + begin, end - begin)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_size(path: Path, where: str, dtype: str, shape: list[int], num_bytes: int) -> None:
    elements = 1
    for length in shape:
        elements *= length
    if elements > _MAX_ELEMENTS:
        raise refusal(path, where, expected=f"at most {_MAX_ELEMENTS} values", got=shape)
    bits = ITEM_BITS.get(dtype)
    if bits is not None and elements * bits != num_bytes * 8:
        expected = f"{elements * bits // 8} bytes for {dtype} {shape}"
        raise refusal(path, where, expected=expected, got=f"{num_bytes} bytes")


def _check_extents(path: Path, size: int, base: int, tensors: list[SafeTensor]) -> None:
    """The data has no holes and no overlaps, and ends where the file ends."""
    end = base
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            got = f"byte {tensor.offset}"
            raise tensor_refusal(tensor, expected=f"data from byte {end} on", got=got)
        end += tensor.num_bytes
        if end > size:
            got = f"a file of {size} bytes"
            advice = "the file is truncated: download it again"
            raise tensor_refusal(tensor, expected=f"data up to byte {end}", got=got, advice=advice)
    if end != size:
        raise refusal(path, "file size", expected=f"{end} bytes", got=size)
