"""Every known spelling of the same values opens, and is the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.dense import read_matrix, read_stored_rows
from engram_core.checkpoint.layouts import GGUF_KEYS, GGUF_LAYOUTS, gguf_layout, nearest
from engram_core.tools.synth import synth
from tests.gguf_bytes import F16, I8, TOKEN_MAP, Gguf, Tensor, toy

P = "deepseek41.engram."
ROWS = {1: 72, 14: 204}


def respell(file: Gguf, spellings: dict[str, str]) -> None:
    file.keys = [
        (P + spellings.get(name.removeprefix(P), name.removeprefix(P)), kind, value)
        if name.startswith(P)
        else (name, kind, value)
        for name, kind, value in file.keys
    ]


def rename_tensors(file: Gguf, spellings: dict[str, str]) -> None:
    for name, _ in list(file.tensors):
        prefix, stem, _weight = name.rsplit(".", 2)
        file.rename(name, f"{prefix}.{spellings.get(stem, stem)}.weight")


def as_token_pad(file: Gguf) -> None:
    file.drop(P + "pad_id")
    file.set(P + "pad_token_id", "u32", 3)


def layout_d(file: Gguf) -> None:
    names = {"layer_ids": "layers", "key_length": "head_dim", "multipliers": "hash_multipliers"}
    respell(file, names | {"primes": "head_bucket_sizes", "offsets": "head_offsets"})
    as_token_pad(file)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "table_rows", "[u32]", [72, 204])


def layout_e(file: Gguf) -> None:
    respell(file, {"head_count": "n_heads", "key_length": "head_dim"})
    as_token_pad(file)
    file.set(P + "token_map", "[u32]", TOKEN_MAP)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "num_embeddings", "[u32]", [72, 204])
    rename_tensors(file, {"engram_embd": "engram_embed"})


def layout_f(file: Gguf) -> None:
    """Primes and offsets are the loader's to derive."""
    respell(file, {"multipliers": "hash_multipliers"})
    as_token_pad(file)
    file.drop(P + "primes")
    file.drop(P + "offsets")
    file.set(P + "vocab_size", "u32", 5)
    file.set(P + "compressed_vocab_size", "u32", 8)


def other_prefix(file: Gguf) -> None:
    file.keys = [(name.replace(P, "deepseek4.engram."), kind, v) for name, kind, v in file.keys]


def constants_as_tensors(file: Gguf) -> None:
    """Layout G keeps the constants as I32 and I64 tensors."""
    for name, kind, type_id in (
        ("token_map", "<i4", 26),
        ("multipliers", "<i8", 27),
        ("primes", "<i8", 27),
        ("offsets", "<i8", 27),
    ):
        values = next(value for key, _, value in file.keys if key == P + name)
        file.drop(P + name)
        data = np.array(values, kind).tobytes()
        file.tensors.append((f"engram.{name}", Tensor((len(values),), type_id, data)))
    file.set(P + "pad_token_id", "u32", 3)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        (lambda file: None, "GGUF A"),
        (layout_d, "GGUF D"),
        (layout_e, "GGUF E"),
        (layout_f, "GGUF F"),
        (other_prefix, "GGUF A"),
        (constants_as_tensors, "GGUF, mixed spellings"),
    ],
    ids=["a", "d", "e", "f", "other_prefix", "constants_as_tensors"],
)
def test_other_spelling_is_the_same_checkpoint(
    tmp_path: Path, change: Callable[[Gguf], None], layout: str
) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    file = toy()
    change(file)
    other = open_checkpoint(file.write(tmp_path / "other.gguf"))
    assert (other.identity, other.layout) == (plain.identity, layout)
    assert other.hash_tables.pad_id == 2


def fp8_rows(num_rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(num_rows)
    codes = rng.integers(0, 256, (num_rows, 256), np.uint8)
    codes[codes & 127 == 127] = 0
    return codes, rng.integers(110, 130, (num_rows, 8), np.uint8)


def f16_wkv(file: Gguf) -> None:
    for layer_id in ROWS:
        values = np.random.default_rng(layer_id).standard_normal(192 * 1536).astype("<f2")
        tensor = file.tensor(f"blk.{layer_id}.engram_wkv.weight")
        tensor.type_id, tensor.data = F16, values.tobytes()


def layout_b() -> Gguf:
    """Packed FP8 rows; no offsets, no sizes."""
    file = toy()
    f16_wkv(file)
    for name in ("offsets", "head_count", "key_length", "max_ngram_size"):
        file.drop(P + name)
    file.set(P + "encoding", "str", "e4m3_e8m0_32_row264")
    file.set(P + "rows", "[u32]", [72, 204])
    file.set(P + "compressed_vocab_size", "u32", 8)
    for layer_id, num_rows in ROWS.items():
        data = np.concatenate(fp8_rows(num_rows), axis=1).tobytes()
        table = file.tensor(f"blk.{layer_id}.engram_embd.weight")
        table.ne, table.type_id, table.data = (264, num_rows), I8, data
    names = {"engram_q": "engram_q_norm", "engram_k": "engram_k_norm", "engram_wkv": "engram_kv"}
    rename_tensors(file, names)
    return file


def layout_c() -> Gguf:
    """Codes and scales in tensors of their own; the pad is a token."""
    file = toy()
    f16_wkv(file)
    names = {"layer_ids": "layers", "max_ngram_size": "ngram_size", "key_length": "head_dim"}
    respell(file, names | {"primes": "head_bucket_sizes", "offsets": "head_offsets"})
    as_token_pad(file)
    file.set(P + "compressed_vocab_size", "u32", 8)
    file.set(P + "embedding_counts", "[u32]", [72, 204])
    for layer_id, num_rows in ROWS.items():
        codes, scales = fp8_rows(num_rows)
        table = file.tensor(f"blk.{layer_id}.engram_embd.weight")
        table.type_id, table.data = I8, codes.tobytes()
        scale = Tensor((8, num_rows), I8, scales.tobytes())
        file.tensors.append((f"blk.{layer_id}.engram_embd_scale.weight", scale))
    names = {"engram_q": "engram_q_weight", "engram_k": "engram_k_weight"}
    rename_tensors(file, names | {"engram_wkv": "engram_kv"})
    return file


def test_packed_rows_and_separate_scales_are_the_same_table(tmp_path: Path) -> None:
    b = open_checkpoint(layout_b().write(tmp_path / "b.gguf"))
    c = open_checkpoint(layout_c().write(tmp_path / "c.gguf"))
    assert (b.layout, c.layout) == ("GGUF B", "GGUF C")
    assert b.identity == c.identity
    codes, scales = fp8_rows(204)
    stored = read_stored_rows(c.layers[1].table, range(204))
    assert np.array_equal(stored, np.concatenate([codes, scales], axis=1))
    assert not b.layers[0].requantize_input


def test_constants_missing_are_derived_from_the_files_beside(tmp_path: Path) -> None:
    """The first uploads lacked them; config.json and tokenizer.json say the same."""
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    synth(tmp_path / "model", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tmp_path / "model" / name, folder / name)
    file = toy()
    for name in ("multipliers", "primes", "offsets", "token_map", "pad_id"):
        file.drop(P + name)
    bare = open_checkpoint(file.write(folder / "bare.gguf"))
    assert bare.identity == plain.identity
    assert bare.image_token_id == json.loads((folder / "config.json").read_text())["image_token_id"]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q3_K"])
def test_q_and_k_may_be_of_any_type(tmp_path: Path, kind: str) -> None:
    """Early uploads quantised them as the rest of the file."""
    file = toy()
    type_id, num_bytes = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2), "Q3_K": (11, 0)}[kind]
    dim = 256 if kind == "Q3_K" else 64
    rng = np.random.default_rng(0)
    for layer_id in ROWS:
        for role in "qk":
            tensor = file.tensor(f"blk.{layer_id}.engram_{role}.weight")
            raw = rng.integers(0, 60, 2 * (110 if kind == "Q3_K" else dim * num_bytes), np.uint8)
            tensor.ne, tensor.type_id, tensor.data = (dim, 2), type_id, raw.tobytes()
        wkv = file.tensor(f"blk.{layer_id}.engram_wkv.weight")
        wkv.ne, wkv.data = (1536, 3 * dim), bytes(3 * dim * 6 * 84)
    checkpoint = open_checkpoint(file.write(tmp_path / "a.gguf"))
    assert checkpoint.layers[0].q.type == kind
    assert read_matrix(checkpoint.layers[0].q).shape == (2, dim)


def test_every_key_of_every_layout_is_known() -> None:
    for letter, keys in GGUF_LAYOUTS.items():
        assert set(keys.split()) <= set(GGUF_KEYS), letter
        assert gguf_layout(keys.split()) == f"GGUF {letter}"


def test_unknown_name_is_answered_with_the_nearest() -> None:
    assert nearest("multipliers_", GGUF_KEYS) == "the nearest known one is 'multipliers'"
    assert nearest("xyz", ["a", "b"]) == "known: a, b"
