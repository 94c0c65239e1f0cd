"""Every known spelling of the same values opens, and is the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.dense import read_matrix, read_stored_rows
from engram_core.checkpoint.layouts import GGUF_KEYS, GGUF_LAYOUTS, gguf_layout, nearest
from engram_core.errors import CheckpointError
from engram_core.quant import row_format
from engram_core.tools.synth import synth
from tests.gguf_bytes import Gguf, Tensor, toy
from tests.layout_files import (
    ROWS,
    P,
    as_row264,
    layout_c,
    layout_d,
    layout_e,
    layout_f,
    layout_g,
    other_prefix,
    table,
    write_config,
    write_official,
)


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
    tmp_path: Path, change: Callable[[Gguf], object], layout: str
) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    file = toy()
    change(file)
    other = open_checkpoint(file.write(tmp_path / "other.gguf"))
    assert (other.identity, other.layout) == (plain.identity, layout)
    assert other.hash_tables.pad_id == 2


def test_packed_rows_and_separate_scales_are_the_same_table(tmp_path: Path) -> None:
    c = open_checkpoint(layout_c().write(tmp_path / "c.gguf"))
    official = open_checkpoint(write_official(tmp_path / "official"))
    rows = read_stored_rows(c.layers[1].table, range(204))
    assert rows.tobytes() == as_row264(table(14))
    assert np.array_equal(rows, read_stored_rows(official.layers[1].table, range(204)))
    assert not c.layers[0].requantize_input
    assert official.layers[0].requantize_input


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


def test_side_file_without_config_says_where_eps_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layer_norm_rms_epsilon.*config\.json"):
        open_checkpoint(layout_g().write(tmp_path / "g.gguf"))


def test_side_file_may_hold_eps_itself(tmp_path: Path) -> None:
    file = layout_g()
    file.set("deepseek4-engram.attention.layer_norm_rms_epsilon", "f32", 1e-20)
    assert open_checkpoint(file.write(tmp_path / "g.gguf")).geometry.eps == 1e-20


def test_orders_said_must_be_those_of_the_n_gram_size(tmp_path: Path) -> None:
    file = layout_g()
    file.set("deepseek4-engram.ngram_count", "u32", 4)
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match="ngram_count': expected 3, got 4"):
        open_checkpoint(file.write(tmp_path / "g.gguf"))


def test_digest_of_a_forks_converter_is_stepped_over(tmp_path: Path) -> None:
    file = layout_d()
    file.set(P + "hash_contract_sha256", "str", "9a" * 32)
    assert open_checkpoint(file.write(tmp_path / "d.gguf")).geometry.table_rows == (72, 204)


def test_constant_said_as_key_and_as_tensor_is_refused(tmp_path: Path) -> None:
    file = toy()
    tensor = Tensor((11,), 26, np.zeros(11, "<i4").tobytes())
    file.tensors.append(("engram.token_map", tensor))
    with pytest.raises(CheckpointError, match="one spelling, got a second token_map"):
        open_checkpoint(file.write(tmp_path / "a.gguf"))


@pytest.mark.parametrize("scales", ["F8_E8M0", "U8", "F32"])
def test_scales_of_any_type_scale_alike(tmp_path: Path, scales: str) -> None:
    """Field report B21: a float32 scale is a factor, a byte of 127 is 1.0."""
    checkpoint = open_checkpoint(write_official(tmp_path / "c", scales=scales))
    rows = read_stored_rows(checkpoint.layers[0].table, range(72))
    values = row_format(checkpoint.layers[0].table.encoding).dequantize(rows)
    assert np.array_equal(values, table(1).numbers)
