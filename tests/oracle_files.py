"""Checkpoints read by hand, for the oracle: struct, json and numpy over the file's bytes.

Imports nothing of ours. Trusts its files (the tests wrote them); stored formats are decoded by the
`gguf` package, or by the formulas of `engram-format.md` 3 (e4m3, e8m0) spelled out here.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray

GGUF_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


def e4m3_value(code: int) -> float:
    """The value of an e4m3fn code: bias 7, subnormals m * 2^-9, 7F and FF are NaN, no infinity."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0_value(code: int) -> float:
    """The value of an e8m0 code: 2^(code - 127), 255 is NaN; 0 is 2^-127, not zero."""
    return float("nan") if code == 255 else 2.0 ** (code - 127)


E4M3 = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)
E8M0 = np.array([e8m0_value(code) for code in range(256)], dtype=np.float32)


def to_bf16(values: NDArray[np.float32]) -> torch.Tensor:
    """Round float32 to bfloat16, ties to even (torch's own conversion)."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its bytes as rows, and how one row becomes float32.

    data: uint8 [rows, row_bytes]; scale: uint8 [rows, scale_bytes] where codes and scales are apart
    """

    data: NDArray[np.uint8]
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    scale: NDArray[np.uint8] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[0])

    def stored(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """uint8 [n, row_bytes], codes first and then scales."""
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_rows):
            raise IndexError(f"row outside 0..{self.num_rows - 1}")
        rows = np.array(self.data[ids])
        if self.scale is None:
            return rows
        return np.concatenate([rows, np.array(self.scale[ids])], axis=1)

    def rows(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """bfloat16 [n, row values]."""
        return to_bf16(self.decode(self.stored(ids)))

    def all_rows(self) -> torch.Tensor:
        return self.rows(np.arange(self.num_rows, dtype=np.int64))


@dataclass
class Files:
    """What a checkpoint says. token_map is compressed ids by token; pad_id is compressed; wkv makes
    bfloat16 [out, in] when called."""

    layer_ids: list[int]
    max_ngram_size: int
    num_heads: int
    head_dim: int
    eps: float
    pad_id: int
    token_map: list[int]
    multipliers: list[list[int]]
    primes: list[list[list[int]]]
    offsets: list[list[int]]
    tables: dict[int, Stored] = field(default_factory=dict)
    wkv: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    q: dict[int, torch.Tensor] = field(default_factory=dict)
    k: dict[int, torch.Tensor] = field(default_factory=dict)
    requantize_input: dict[int, bool] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- GGUF


class _Cursor:
    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        (value,) = struct.unpack(form, self.data[self.at : self.at + size].tobytes())
        self.at += size
        return value

    def text(self) -> str:
        size = self.scalar("<Q")
        self.at += size
        return self.data[self.at - size : self.at].tobytes().decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.scalar(GGUF_SCALARS[kind])
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item == 8:
            return [self.text() for _ in range(count)]
        form = GGUF_SCALARS[item]
        size = count * struct.calcsize(form)
        self.at += size
        return np.frombuffer(self.data[self.at - size : self.at].tobytes(), form).tolist()


def _gguf_decoder(kind: int) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    quant = gguf.GGMLQuantizationType(kind)
    return lambda rows: np.asarray(dequantize(rows, quant), dtype=np.float32)


def _e4m3_row264(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of codes followed by one e8m0 scale per 32 codes."""
    codes = rows.shape[1] * 32 // 33
    values = E4M3[rows[:, :codes]].reshape(len(rows), -1, 32)
    with np.errstate(over="ignore"):
        return (values * E8M0[rows[:, codes:]][:, :, None]).reshape(len(rows), codes)


def read_gguf_part(path: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], Stored]]]:
    """The keys and tensors of one GGUF file: name -> (dims, ne0 first; bytes as rows)."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(data)
    assert data[:4].tobytes() == b"GGUF"
    cursor.at = 4
    assert cursor.scalar("<I") == 3
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        name = cursor.text()
        keys[name] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(num_tensors):
        name, num_dims = cursor.text(), cursor.scalar("<I")
        dims = [cursor.scalar("<Q") for _ in range(num_dims)]
        infos.append((name, dims, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = keys.get("general.alignment", 32)
    start = (cursor.at + alignment - 1) // alignment * alignment
    tensors = {}
    for name, dims, kind, offset in infos:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        row_bytes = dims[0] // block * block_bytes
        count = int(np.prod(dims[1:], dtype=np.int64))
        begin = start + offset
        rows = data[begin : begin + count * row_bytes].reshape(count, row_bytes)
        is_codes = kind == gguf.GGMLQuantizationType.I8
        tensors[name] = dims, Stored(rows, _e4m3_row264 if is_codes else _gguf_decoder(kind))
    return keys, tensors


def _parts(path: Path) -> list[Path]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    stem, total = match.group(1), int(match.group(2))
    return [path.with_name(f"{stem}-{i:05}-of-{total:05}.gguf") for i in range(1, total + 1)]


def read_gguf(path: Path) -> Files:
    """Read layout A of `engram-format.md` 4 (pad_id is compressed, offsets may be absent)."""
    keys: dict[str, Any] = {}
    tensors: dict[str, tuple[list[int], Stored]] = {}
    for part in _parts(path):
        part_keys, part_tensors = read_gguf_part(part)
        keys = {**part_keys, **keys}
        tensors.update(part_tensors)
    arch = keys["general.architecture"]

    def key(name: str) -> Any:
        return keys[f"{arch}.engram.{name}"]

    layer_ids, ngram, heads = key("layer_ids"), key("max_ngram_size"), key("head_count")
    eps = keys.get(f"{arch}.attention.layer_norm_rms_epsilon")
    if eps is None:
        config = json.loads((path.parent / "config.json").read_text())
        eps = config.get("text_config", config)["rms_norm_eps"]
    shape = (len(layer_ids), ngram - 1, heads)
    files = Files(
        layer_ids=list(layer_ids),
        max_ngram_size=ngram,
        num_heads=heads,
        head_dim=key("key_length"),
        eps=float(eps),
        pad_id=key("pad_id"),
        token_map=key("token_map"),
        multipliers=np.array(key("multipliers"), dtype=object).reshape(-1, ngram).tolist(),
        primes=np.array(key("primes"), dtype=object).reshape(shape).tolist(),
        offsets=np.array(key("offsets"), dtype=object).reshape(shape[0], -1).tolist(),
    )
    for layer in layer_ids:
        files.tables[layer] = tensors[f"blk.{layer}.engram_embd.weight"][1]
        files.wkv[layer] = tensors[f"blk.{layer}.engram_wkv.weight"][1].all_rows
        q, k = (tensors[f"blk.{layer}.engram_{name}.weight"][1] for name in "qk")
        everything = np.arange(q.num_rows)
        files.q[layer], files.k[layer] = (
            torch.from_numpy(t.decode(t.stored(everything)).copy()) for t in (q, k)
        )
        files.requantize_input[layer] = False
    return files


# ------------------------------------------------------------------------------------ safetensors

_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}


def _float_decoder(dtype: str) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    if dtype == "BF16":
        return lambda rows: (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return lambda rows: rows.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def read_safetensors_headers(folder: Path) -> dict[str, tuple[str, list[int], NDArray[np.uint8]]]:
    """Every tensor of every shard: name -> (dtype, shape, bytes)."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        (size,) = struct.unpack("<Q", data[:8].tobytes())
        head = json.loads(data[8 : 8 + size].tobytes())
        for name, entry in head.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                raw = data[8 + size + begin : 8 + size + end]
                tensors[name] = entry["dtype"], entry["shape"], raw
    return tensors


def _block_scaled(codes: NDArray[np.uint8], scale: NDArray[np.uint8]) -> torch.Tensor:
    """FP8 weights with one e8m0 scale per 32 x 32 block, as bfloat16 (exact)."""
    values = E4M3[codes]
    scales = np.repeat(np.repeat(E8M0[scale], 32, axis=0), 32, axis=1)
    return to_bf16(values * scales[: codes.shape[0], : codes.shape[1]])


def _plain(dtype: str, raw: NDArray[np.uint8], outs: int, ins: int) -> torch.Tensor:
    return to_bf16(_float_decoder(dtype)(np.array(raw)).reshape(outs, ins))


def read_safetensors(
    folder: Path, token_map: list[int], derive_hash: Callable[..., tuple[Any, Any, Any]]
) -> Files:
    """Read the official directory (`engram-format.md` 1.1 and 3); constants by recipe."""
    config = json.loads((folder / "config.json").read_text())
    text = {**config, **config.get("text_config", {})}
    layer_ids, heads = text["engram_layer_ids"], text["engram_n_heads"]
    ngram = text["engram_max_ngram_size"]
    recipe = derive_hash(layer_ids, ngram, heads, text["engram_vocab_size"], max(token_map) + 1)
    files = Files(
        layer_ids=list(layer_ids),
        max_ngram_size=ngram,
        num_heads=heads,
        head_dim=text["engram_head_dim"],
        eps=float(text["rms_norm_eps"]),
        pad_id=token_map[text["engram_pad_token_id"]],
        token_map=token_map,
        multipliers=recipe[0],
        primes=recipe[1],
        offsets=recipe[2],
    )
    tensors = read_safetensors_headers(folder)
    for layer in layer_ids:
        prefix = f"layers.{layer}.engram."
        dtype, (num_rows, head_dim), raw = tensors[prefix + "embed.weight"]
        if dtype == "F8_E4M3":
            scale = tensors[prefix + "embed.scale"][2].reshape(num_rows, head_dim // 32)
            files.tables[layer] = Stored(raw.reshape(num_rows, head_dim), _e4m3_row264, scale)
        else:
            rows = raw.reshape(num_rows, head_dim * _FLOATS[dtype])
            files.tables[layer] = Stored(rows, _float_decoder(dtype))
        dtype, (outs, ins), raw = tensors[prefix + "wkv.weight"]
        files.requantize_input[layer] = dtype == "F8_E4M3"
        if dtype == "F8_E4M3":
            _, shape, scale = tensors[prefix + "wkv.scale"]
            files.wkv[layer] = partial(_block_scaled, raw.reshape(outs, ins), scale.reshape(shape))
        else:
            files.wkv[layer] = partial(_plain, dtype, raw, outs, ins)
        for name, target in (("q_weight", files.q), ("k_weight", files.k)):
            dtype, shape, raw = tensors[prefix + name]
            values = _float_decoder(dtype)(np.array(raw)).reshape(shape)
            target[layer] = torch.from_numpy(values)
    return files
