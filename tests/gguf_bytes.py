"""GGUF files put together byte by byte, so that every part of one can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import derive_hash

SCALARS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "f64": (12, "<d"),
}  # fmt: skip
TOKEN_MAP = [0, 0, 1, 2, 1, 3, 4, 5, 5, 6, 7]
"""Pad: token 3, compressed 2."""
Q2_K, I8, F32, F16, IQ2_XXS, F64 = 10, 24, 0, 1, 16, 28


@dataclass
class Tensor:
    """ne: innermost first, as GGUF has it; offset: within the data, None = the next aligned."""

    ne: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None


@dataclass
class Gguf:
    """A file to be written. keys: name -> (type, value), a type in [] is an array."""

    keys: list[tuple[str, str, Any]] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"
    alignment: int = 32
    counts: tuple[int, int] | None = None
    tail: bytes = b""

    def set(self, name: str, kind: str, value: Any) -> None:
        """Give a key another type and value."""
        self.drop(name)
        self.keys.append((name, kind, value))

    def drop(self, name: str) -> None:
        self.keys = [key for key in self.keys if key[0] != name]

    def tensor(self, name: str) -> Tensor:
        return dict(self.tensors)[name]

    def rename(self, old: str, new: str) -> None:
        self.tensors = [(new if name == old else name, tensor) for name, tensor in self.tensors]

    def remove(self, name: str) -> None:
        self.tensors = [pair for pair in self.tensors if pair[0] != name]

    def header(self) -> bytes:
        """Everything up to the data, not padded."""
        counts = self.counts or (len(self.tensors), len(self.keys))
        raw = self.magic + struct.pack(self.order + "IQQ", self.version, *counts)
        for name, kind, value in self.keys:
            raw += _text(name) + _value(kind, value)
        end = 0
        for name, tensor in self.tensors:
            offset = _aligned(end, self.alignment) if tensor.offset is None else tensor.offset
            end = offset + len(tensor.data)
            shape = struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
            raw += _text(name) + shape + struct.pack("<IQ", tensor.type_id, offset)
        return raw

    def write(self, path: Path) -> Path:
        """Write the file."""
        raw = self.header()
        raw += bytes(_aligned(len(raw), self.alignment) - len(raw))
        base = len(raw)
        for _, tensor in self.tensors:
            end = len(raw) - base
            offset = _aligned(end, self.alignment) if tensor.offset is None else tensor.offset
            if tensor.data:
                raw = raw.ljust(base + offset, b"\0") + tensor.data
        path.write_bytes(raw + self.tail)
        return path


def toy(*, alignment: int = 32, eps: float = 1e-20) -> Gguf:
    """A valid layout A file: layers 1 and 14, 2 heads, base 5, head_dim 256, dim 64, 2 streams."""
    multipliers, primes, offsets = derive_hash((1, 14), 4, 2, 5, 8)
    file = Gguf(alignment=alignment)
    for name, kind, value in (
        ("general.architecture", "str", "deepseek41"),
        ("general.alignment", "u32", alignment),
        ("deepseek41.attention.layer_norm_rms_epsilon", "f32", eps),
        ("tokenizer.ggml.tokens", "[str]", ["a", "bc", ""]),
        ("deepseek41.engram.layer_ids", "[i32]", [1, 14]),
        ("deepseek41.engram.head_count", "u32", 2),
        ("deepseek41.engram.key_length", "u32", 256),
        ("deepseek41.engram.max_ngram_size", "u32", 4),
        ("deepseek41.engram.multipliers", "[u64]", _flat(multipliers)),
        ("deepseek41.engram.primes", "[u64]", _flat(primes)),
        ("deepseek41.engram.offsets", "[u64]", _flat(offsets)),
        ("deepseek41.engram.token_map", "[i32]", TOKEN_MAP),
        ("deepseek41.engram.pad_id", "u32", 2),
    ):
        file.set(name, kind, value)
    rng = np.random.default_rng(0)
    for layer_id, num_rows in ((1, 72), (14, 204)):
        name = f"blk.{layer_id}.engram_"
        file.tensors += [
            (f"{name}embd.weight", Tensor((256, num_rows), Q2_K, _blocks(rng, num_rows))),
            (f"{name}wkv.weight", Tensor((1536, 192), Q2_K, _blocks(rng, 192 * 6))),
            (f"{name}q.weight", Tensor((64, 2), F32, _floats(rng, 128))),
            (f"{name}k.weight", Tensor((64, 2), F32, _floats(rng, 128))),
        ]
    return file


def _blocks(rng: np.random.Generator, count: int) -> bytes:
    blocks = rng.integers(0, 256, (count, 84), np.uint8)
    blocks[:, 80:] = np.array([0.01, 0.02], "<f2").view(np.uint8)
    return blocks.tobytes()


def _floats(rng: np.random.Generator, count: int) -> bytes:
    return rng.standard_normal(count).astype("<f4").tobytes()


def _flat(values: Any) -> list[int]:
    return [int(value) for value in np.array(values, dtype=object).reshape(-1)]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: str, value: Any) -> bytes:
    if not kind.startswith("["):
        number = 8 if kind == "str" else SCALARS[kind][0]
        return struct.pack("<I", number) + _item(kind, value)
    item = kind[1:-1]
    number = 8 if item == "str" else SCALARS[item][0]
    head = struct.pack("<IIQ", 9, number, len(value))
    return head + b"".join(_item(item, one) for one in value)


def _item(kind: str, value: Any) -> bytes:
    return _text(value) if kind == "str" else struct.pack(SCALARS[kind][1], value)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
