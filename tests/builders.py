"""Small checkpoints of any geometry, written with the `gguf` and `safetensors` packages.

They are made without our own `synth`, so that a mistake shared by writer and reader shows. Values
are seeded; every row of a table differs from every other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.oracle import derive_hash, token_map

WORDS = [
    *("The", "the", "<pad>", "THE", "cat", "Cat", "sat", "SAT", "on", "mat", "hat", "Hat"),
    *("of", "a", "A", "is", "it", "nine", "ten", "x", "y", "z"),
]
"""Raw vocabulary of 22 words, 16 when compressed; token_map[2] = 1, so pad is not its own image."""

PAD_TOKEN_ID = 2
IMAGE_TOKEN_ID = 21


@dataclass(frozen=True)
class Shape:
    """The geometry of a small checkpoint; `base` is where its primes are searched from."""

    layer_ids: tuple[int, ...] = (1, 14)
    max_ngram_size: int = 4
    num_heads: int = 2
    base: int = 11
    head_dim: int = 32
    dim: int = 64
    hc_mult: int = 2
    eps: float = 1e-20

    @property
    def in_features(self) -> int:
        return (self.max_ngram_size - 1) * self.num_heads * self.head_dim

    @property
    def out_features(self) -> int:
        return (self.hc_mult + 1) * self.dim


def write_tokenizer(path: Path) -> list[int]:
    """A WordLevel tokenizer.json of WORDS; returns its token map by the oracle."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    Tokenizer(WordLevel(vocab, unk_token="<pad>")).save(str(path))
    return token_map(path)


def _normal(rng: np.random.Generator, shape: Sequence[int], scale: float) -> NDArray[np.float32]:
    return (rng.standard_normal(tuple(shape)) * scale).astype(np.float32)


def q2_k_rows(rng: np.random.Generator, num_rows: int, values: int) -> NDArray[np.uint8]:
    """Random Q2_K quant blocks: any bytes are legal, d and dmin are kept small and positive."""
    blocks = rng.integers(0, 256, (num_rows, values // 256, 84), np.uint8)
    scales = rng.uniform(0.002, 0.02, (num_rows, values // 256, 2)).astype("<f2")
    blocks[:, :, 80:] = scales.view(np.uint8).reshape(num_rows, values // 256, 4)
    return blocks.reshape(num_rows, -1)


def _add(
    writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str, seed: int
) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    if kind == "Q2_K":
        raw = q2_k_rows(np.random.default_rng(seed), len(values), values.shape[1])
        writer.add_tensor(name, raw, raw_dtype=quant)
    elif kind in ("F32", "F16"):
        writer.add_tensor(name, values.astype("<f4" if kind == "F32" else "<f2"))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)


def write_gguf(
    path: Path, shape: Shape, *, table: str = "Q8_0", wkv: str = "F16", seed: int = 0
) -> Path:
    """Layout A of `engram-format.md` 4; pad_id is compressed there."""
    compressed = write_tokenizer(path.with_suffix(".tokenizer.json"))
    num_heads, ngram = shape.num_heads, shape.max_ngram_size
    recipe = derive_hash(shape.layer_ids, ngram, num_heads, shape.base, max(compressed) + 1)
    multipliers, primes, offsets = (np.array(part, dtype=np.uint64).ravel() for part in recipe)
    writer = gguf.GGUFWriter(path, "deepseek41")
    writer.add_layer_norm_rms_eps(shape.eps)
    prefix = "deepseek41.engram."
    for name, value in (
        ("head_count", num_heads),
        ("key_length", shape.head_dim),
        ("max_ngram_size", ngram),
        ("pad_id", compressed[PAD_TOKEN_ID]),
    ):
        writer.add_uint32(prefix + name, value)
    for name, values, kind in (
        ("layer_ids", shape.layer_ids, gguf.GGUFValueType.INT32),
        ("multipliers", multipliers, gguf.GGUFValueType.UINT64),
        ("primes", primes, gguf.GGUFValueType.UINT64),
        ("offsets", offsets, gguf.GGUFValueType.UINT64),
        ("token_map", compressed, gguf.GGUFValueType.INT32),
    ):
        numbers = [int(v) for v in values]
        writer.add_key_value(prefix + name, numbers, gguf.GGUFValueType.ARRAY, sub_type=kind)
    rng = np.random.default_rng(seed)
    for i, layer in enumerate(shape.layer_ids):
        num_rows = sum(p for heads in recipe[1][i] for p in heads)
        tensors = {
            "embd": (_normal(rng, (num_rows, shape.head_dim), 1.0), table),
            "wkv": (
                _normal(rng, (shape.out_features, shape.in_features), shape.in_features**-0.5),
                wkv,
            ),
            "q": (1 + _normal(rng, (shape.hc_mult, shape.dim), 0.05), "F32"),
            "k": (1 + _normal(rng, (shape.hc_mult, shape.dim), 0.05), "F32"),
        }
        for n, (name, (values, kind)) in enumerate(tensors.items()):
            _add(writer, f"blk.{layer}.engram_{name}.weight", values, kind, seed + 10 * layer + n)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(
    folder: Path, shape: Shape, *, wkv: str = "FP8", table: str = "FP8", seed: int = 0
) -> Path:
    """The official directory: config.json, tokenizer.json, FP8 or BF16 tensors in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    compressed = write_tokenizer(folder / "tokenizer.json")
    recipe = derive_hash(
        shape.layer_ids, shape.max_ngram_size, shape.num_heads, shape.base, max(compressed) + 1
    )
    config = {
        "model_type": "deepseek_v41",
        "image_token_id": IMAGE_TOKEN_ID,
        "text_config": {
            "vocab_size": len(compressed),
            "hidden_size": shape.dim,
            "hc_mult": shape.hc_mult,
            "rms_norm_eps": shape.eps,
            "engram_layer_ids": list(shape.layer_ids),
            "engram_num_embeddings": [sum(sum(heads) for heads in part) for part in recipe[1]],
            "engram_max_ngram_size": shape.max_ngram_size,
            "engram_vocab_size": shape.base,
            "engram_n_heads": shape.num_heads,
            "engram_head_dim": shape.head_dim,
            "engram_pad_token_id": PAD_TOKEN_ID,
            "engram_compressed_vocab_size": max(compressed) + 1,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    shards, weight_map = len(shape.layer_ids), {}
    for i, layer in enumerate(shape.layer_ids):
        num_rows = sum(p for heads in recipe[1][i] for p in heads)
        embed = _normal(rng, (num_rows, shape.head_dim), 0.5)
        matrix = _normal(rng, (shape.out_features, shape.in_features), shape.in_features**-0.5)
        q, k = (1 + _normal(rng, (shape.hc_mult, shape.dim), 0.05) for _ in "qk")
        tensors = {
            "q_weight": q.astype(ml_dtypes.bfloat16),
            "k_weight": k.astype(ml_dtypes.bfloat16),
        }
        for name, values, kind, by in (
            ("embed", embed, table, (1, 32)),
            ("wkv", matrix, wkv, (32, 32)),
        ):
            if kind == "FP8":
                codes, scale = quantise_fp8(values, by)
                tensors |= {f"{name}.weight": codes, f"{name}.scale": scale}
            else:
                dtype = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[kind]
                tensors[f"{name}.weight"] = values.astype(dtype)
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        named = {f"layers.{layer}.engram.{name}": value for name, value in tensors.items()}
        (folder / file).write_bytes(save(named))
        weight_map |= dict.fromkeys(named, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def quantise_fp8(
    values: NDArray[np.float32], by: tuple[int, int]
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """e4m3 codes and e8m0 scales, one scale per `by` block (rows, columns)."""
    rows, cols = values.shape
    tiles = values.reshape(rows // by[0], by[0], cols // by[1], by[1])
    amax = np.abs(tiles).max(axis=(1, 3), keepdims=True)
    exponent = np.ceil(np.log2(np.maximum(amax, 1e-9) / 448))
    codes = (tiles / 2.0**exponent).astype(ml_dtypes.float8_e4m3fn).reshape(rows, cols)
    scale = (2.0 ** exponent[:, 0, :, 0]).astype(ml_dtypes.float8_e8m0fnu)
    return codes, scale
