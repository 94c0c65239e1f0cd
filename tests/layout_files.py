"""One model in every layout people have: the same values, written as each converter writes them.

Values are e2m1 times a power of two, which MXFP4, Q8_0, FP8, F16 and bfloat16 all hold exactly, so
whatever a layout stores, rows and wkv are the same numbers. Written byte by byte, without the
product's writers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from engram_core.tools.presets import tokenizer_json
from tests.gguf_bytes import TOKEN_MAP, Gguf, Tensor, toy

P = "deepseek41.engram."
ROWS = {1: 72, 14: 204}
F32, F16, Q8_0, I8, I32, I64, BF16, MXFP4, F8_BLOCKS = 0, 1, 8, 24, 26, 27, 30, 39, 64
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_HEAD_DIM, _IN, _OUT, _DIM, _HC = 256, 1536, 192, 64, 2

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Values:
    """Numbers of one tensor. codes: e2m1, 0..15 without -0; power: of two, by group of 32."""

    codes: NDArray[np.int64]
    power: NDArray[np.int64]

    @property
    def mantissa(self) -> NDArray[np.float64]:
        """The e2m1 values, before their power of two."""
        values: NDArray[np.float64] = _E2M1[self.codes & 7] * np.where(self.codes & 8, -1, 1)
        return values

    @property
    def numbers(self) -> NDArray[np.float32]:
        groups = self.mantissa.reshape(len(self.codes), -1, 32)
        scaled = groups * np.exp2(self.power)[:, :, None]
        return scaled.reshape(self.codes.shape).astype(np.float32)

    @property
    def e4m3(self) -> Bytes:
        return self.mantissa.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    @property
    def e8m0(self) -> Bytes:
        return (self.power + 127).astype(np.uint8)


def table(layer_id: int) -> Values:
    """The rows of a layer's table."""
    rng = np.random.default_rng(layer_id)
    return _values(rng, ROWS[layer_id], _HEAD_DIM, rng.integers(-8, 1, (ROWS[layer_id], 8)))


def wkv(layer_id: int) -> Values:
    """wkv: one power for each 32 x 32 block."""
    rng = np.random.default_rng(100 + layer_id)
    power = rng.integers(-9, -5, (_OUT // 32, _IN // 32)).repeat(32, axis=0)
    return _values(rng, _OUT, _IN, power)


def gate_weight(layer_id: int, role: str) -> NDArray[np.float32]:
    """q or k: eighths of bfloat16's last place around 1."""
    rng = np.random.default_rng([layer_id, ord(role)])
    return (1 + rng.integers(-16, 17, (_HC, _DIM)) / 64).astype(np.float32)


def _values(
    rng: np.random.Generator, num_rows: int, num_columns: int, power: NDArray[np.int64]
) -> Values:
    codes = rng.integers(0, 16, (num_rows, num_columns))
    return Values(np.where(codes == 8, 0, codes), power)


def as_f32(values: NDArray[np.float32]) -> bytes:
    return values.astype("<f4").tobytes()


def as_f16(values: NDArray[np.float32]) -> bytes:
    return values.astype("<f2").tobytes()


def as_bf16(values: NDArray[np.float32]) -> bytes:
    return values.astype(ml_dtypes.bfloat16).tobytes()


def as_row264(values: Values) -> bytes:
    return np.concatenate([values.e4m3, values.e8m0], axis=1).tobytes()


def as_f8_blocks(values: Values) -> bytes:
    groups = values.e4m3.reshape(len(values.codes), -1, 32)
    return np.concatenate([values.e8m0[:, :, None], groups], axis=2).tobytes()


def as_q8_0(values: Values) -> bytes:
    scale = np.exp2(values.power - 1).astype("<f2")[:, :, None].view(np.uint8)
    halves = (values.mantissa * 2).astype(np.int8).view(np.uint8)
    return np.concatenate([scale, halves.reshape(*values.power.shape, 32)], axis=2).tobytes()


def as_mxfp4(values: Values) -> bytes:
    groups = values.codes.astype(np.uint8).reshape(*values.power.shape, 32)
    nibbles = groups[:, :, :16] | groups[:, :, 16:] << 4
    return np.concatenate([values.e8m0[:, :, None], nibbles], axis=2).tobytes()


_TABLE = {Q8_0: as_q8_0, MXFP4: as_mxfp4, F8_BLOCKS: as_f8_blocks}
_PLAIN = {F32: as_f32, F16: as_f16, BF16: as_bf16}


def encoded(values: Values, type_id: int) -> bytes:
    """The bytes of a tensor of a type."""
    return _TABLE[type_id](values) if type_id in _TABLE else _PLAIN[type_id](values.numbers)


# ------------------------------------------------------------------------------------------- GGUF


def layout_a(table_type: int = Q8_0, wkv_type: int = BF16, gate_type: int = F32) -> Gguf:
    """Layout A with the model's values."""
    file = toy()
    for layer_id, num_rows in ROWS.items():
        stem = f"blk.{layer_id}.engram_"
        _set(file, f"{stem}embd.weight", (256, num_rows), table_type, table(layer_id))
        _set(file, f"{stem}wkv.weight", (_IN, _OUT), wkv_type, wkv(layer_id))
        for role in "qk":
            tensor = file.tensor(f"{stem}{role}.weight")
            tensor.type_id = gate_type
            tensor.data = _PLAIN[gate_type](gate_weight(layer_id, role))
    return file


def _set(file: Gguf, name: str, ne: tuple[int, ...], type_id: int, values: Values) -> None:
    tensor = file.tensor(name)
    tensor.ne, tensor.type_id, tensor.data = ne, type_id, encoded(values, type_id)


def layout_b() -> Gguf:
    """Packed FP8 rows; no offsets, no sizes."""
    file = layout_a(wkv_type=F16)
    for name in ("offsets", "head_count", "key_length", "max_ngram_size"):
        file.drop(P + name)
    file.set(P + "encoding", "str", "e4m3_e8m0_32_row264")
    file.set(P + "rows", "[u32]", list(ROWS.values()))
    file.set(P + "compressed_vocab_size", "u32", 8)
    for layer_id, num_rows in ROWS.items():
        rows = file.tensor(f"blk.{layer_id}.engram_embd.weight")
        rows.ne, rows.type_id, rows.data = (264, num_rows), I8, as_row264(table(layer_id))
    names = {"engram_q": "engram_q_norm", "engram_k": "engram_k_norm", "engram_wkv": "engram_kv"}
    rename_tensors(file, names)
    return file


def layout_c() -> Gguf:
    """Codes and scales in tensors of their own; the pad is a token."""
    file = layout_a(gate_type=F16)
    names = {"layer_ids": "layers", "max_ngram_size": "ngram_size", "key_length": "head_dim"}
    respell(file, names | {"primes": "head_bucket_sizes", "offsets": "head_offsets"})
    as_token_pad(file)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "embedding_counts", "[u32]", list(ROWS.values()))
    for layer_id, num_rows in ROWS.items():
        codes = file.tensor(f"blk.{layer_id}.engram_embd.weight")
        codes.type_id, codes.data = I8, table(layer_id).e4m3.tobytes()
        scale = Tensor((8, num_rows), I8, table(layer_id).e8m0.tobytes())
        file.tensors.append((f"blk.{layer_id}.engram_embd_scale.weight", scale))
    names = {"engram_q": "engram_q_weight", "engram_k": "engram_k_weight"}
    rename_tensors(file, names | {"engram_wkv": "engram_kv"})
    return file


def layout_d(file: Gguf | None = None) -> Gguf:
    """Other keys; the pad is a token."""
    file = file or layout_a(table_type=BF16, wkv_type=Q8_0, gate_type=BF16)
    names = {"layer_ids": "layers", "key_length": "head_dim", "multipliers": "hash_multipliers"}
    respell(file, names | {"primes": "head_bucket_sizes", "offsets": "head_offsets"})
    as_token_pad(file)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "table_rows", "[u32]", list(ROWS.values()))
    return file


def layout_e(file: Gguf | None = None) -> Gguf:
    """MXFP4 rows, Q8_0 wkv, BF16 gate weights."""
    file = file or layout_a(table_type=MXFP4, wkv_type=Q8_0, gate_type=BF16)
    respell(file, {"head_count": "n_heads", "key_length": "head_dim"})
    as_token_pad(file)
    file.set(P + "token_map", "[u32]", TOKEN_MAP)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "num_embeddings", "[u32]", list(ROWS.values()))
    rename_tensors(file, {"engram_embd": "engram_embed"})
    return file


def layout_f(file: Gguf | None = None) -> Gguf:
    """Primes and offsets are the loader's to derive."""
    file = file or layout_a(table_type=MXFP4, wkv_type=F32)
    respell(file, {"multipliers": "hash_multipliers"})
    as_token_pad(file)
    file.drop(P + "primes")
    file.drop(P + "offsets")
    file.set(P + "vocab_size", "u32", 5)
    file.set(P + "compressed_vocab_size", "u32", 8)
    return file


def layout_g() -> Gguf:
    """A side file: its own architecture, official tensor names, constants as tensors, no eps."""
    plain = layout_a(table_type=F8_BLOCKS, gate_type=BF16)
    held = {name: value for name, _, value in plain.keys}
    prefix = "deepseek4-engram."
    file = Gguf(keys=[("general.architecture", "str", "deepseek4-engram")])
    for name, kind, value in (
        ("checkpoint_variant", "str", "flash-v41"),
        ("layers", "[u32]", list(ROWS)),
        ("row_counts", "[u32]", list(ROWS.values())),
        ("max_ngram_size", "u32", 4),
        ("ngram_count", "u32", 3),
        ("head_count", "u32", 2),
        ("head_dim", "u32", 256),
        ("vocab_size", "u32", 5),
        ("compressed_vocab_size", "u32", 8),
        ("pad_token_id", "u32", 3),
        ("compressed_pad_id", "u32", 2),
        ("language.block_count", "u32", 43),
        ("language.embedding_length", "u32", 64),
        ("language.vocab_size", "u64", 11),
    ):
        file.set(prefix + name, kind, value)
    for name, key, dtype, columns in (
        ("token_map", "token_map", "<i4", 11),
        ("hash_multipliers", "multipliers", "<i8", 4),
        ("hash_primes", "primes", "<i8", 6),
        ("hash_offsets", "offsets", "<i8", 6),
    ):
        values = np.array(held[P + key], dtype)
        ne = (columns, values.size // columns) if values.size > columns else (columns,)
        type_id = I32 if dtype == "<i4" else I64
        file.tensors.append((f"engram.{name}", Tensor(ne, type_id, values.tobytes())))
    official = {"embd": "embed.weight", "wkv": "wkv.weight", "q": "q_weight", "k": "k_weight"}
    for layer_id in ROWS:
        for stem, name in official.items():
            tensor = plain.tensor(f"blk.{layer_id}.engram_{stem}.weight")
            file.tensors.append((f"layers.{layer_id}.engram.{name}", tensor))
    return file


def first_upload() -> Gguf:
    """Layout A as it was first uploaded: another prefix, and no constants of the hash."""
    file = layout_a()
    for name in ("multipliers", "primes", "offsets", "token_map", "pad_id"):
        file.drop(P + name)
    return other_prefix(file)


def respell(file: Gguf, spellings: dict[str, str]) -> None:
    """Give keys other names."""
    file.keys = [
        (P + spellings.get(name.removeprefix(P), name.removeprefix(P)), kind, value)
        if name.startswith(P)
        else (name, kind, value)
        for name, kind, value in file.keys
    ]


def rename_tensors(file: Gguf, spellings: dict[str, str]) -> None:
    """Give tensors other stems."""
    for name, _ in list(file.tensors):
        prefix, stem, _weight = name.rsplit(".", 2)
        file.rename(name, f"{prefix}.{spellings.get(stem, stem)}.weight")


def as_token_pad(file: Gguf) -> None:
    """Say the pad as a token."""
    file.drop(P + "pad_id")
    file.set(P + "pad_token_id", "u32", 3)


def other_prefix(file: Gguf) -> Gguf:
    """Put the keys under the other architecture."""
    file.keys = [(name.replace(P, "deepseek4.engram."), kind, v) for name, kind, v in file.keys]
    return file


# ------------------------------------------------------------------------------------ safetensors


def write_official(folder: Path, *, scales: str = "F8_E8M0", plain: bool = False) -> Path:
    """Official names: FP8 with scales of a type, or (plain) everything in BF16."""
    folder.mkdir(parents=True)
    write_config(folder)
    for i, layer_id in enumerate(ROWS):
        tensors: dict[str, Any] = {}
        for name, values, step in (("embed", table(layer_id), 1), ("wkv", wkv(layer_id), 32)):
            if plain:
                tensors[f"{name}.weight"] = values.numbers.astype(ml_dtypes.bfloat16)
                continue
            tensors[f"{name}.weight"] = values.e4m3.view(ml_dtypes.float8_e4m3fn)
            power = values.power[::step]
            tensors[f"{name}.scale"] = _SCALES[scales](power)
        for role in "qk":
            tensors[f"{role}_weight"] = gate_weight(layer_id, role).astype(ml_dtypes.bfloat16)
        named = {f"layers.{layer_id}.engram.{name}": value for name, value in tensors.items()}
        (folder / f"model-{i + 47:05}-of-00048.safetensors").write_bytes(save(named))
    return folder


_SCALES: dict[str, Callable[[NDArray[np.int64]], NDArray[Any]]] = {
    "F8_E8M0": lambda power: (power + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
    "U8": lambda power: (power + 127).astype(np.uint8),
    "F32": lambda power: np.exp2(power).astype("<f4"),
}


def write_config(folder: Path) -> None:
    """config.json and tokenizer.json of the model."""
    (folder / "tokenizer.json").write_bytes(tokenizer_json("tiny", None))
    text = {
        "hidden_size": _DIM,
        "rms_norm_eps": 1e-20,
        "hc_mult": _HC,
        "engram_layer_ids": list(ROWS),
        "engram_num_embeddings": list(ROWS.values()),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 5,
        "engram_n_heads": 2,
        "engram_head_dim": _HEAD_DIM,
        "engram_pad_token_id": 3,
        "engram_compressed_vocab_size": 8,
    }
    (folder / "config.json").write_text(json.dumps({"image_token_id": 9, "text_config": text}))


# ------------------------------------------------------------------------------------ all of them


def _gguf(make: Callable[[], Gguf], *, beside: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        if beside:
            write_config(folder)
        return make().write(folder / "model.gguf")

    return write


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "A": _gguf(layout_a),
    "A, first upload": _gguf(first_upload, beside=True),
    "B": _gguf(layout_b),
    "C": _gguf(layout_c),
    "D": _gguf(layout_d),
    "E": _gguf(layout_e),
    "F": _gguf(layout_f),
    "G": _gguf(layout_g, beside=True),
    "official": write_official,
    "official, U8 scales": lambda folder: write_official(folder, scales="U8"),
    "official, F32 scales": lambda folder: write_official(folder, scales="F32"),
    "official, BF16": lambda folder: write_official(folder, plain=True),
}
"""Name -> what writes it into a new folder and gives the path to open."""
