"""One named refusal for every way a safetensors folder can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_core.checkpoint import open_checkpoint
from engram_core.errors import CheckpointError
from engram_core.tools.synth import synth
from tests.safetensors_bytes import edit_header, edit_json, renamed, write_raw

SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
E = "layers.14.engram."


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "ckpt"
    synth(path, preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    return path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "ckpt"))


def config(folder: Path, key: str, value: object) -> None:
    """Set a key of text_config; None drops it."""
    with edit_json(folder / "config.json") as content:
        content["text_config"][key] = value
        if value is None:
            del content["text_config"][key]


def entry(folder: Path, name: str, **changes: object) -> None:
    with edit_header(folder / SHARD) as header:
        header[E + name].update(changes)


def shifted(folder: Path, name: str, begin: int, end: int) -> None:
    with edit_header(folder / SHARD) as header:
        offsets = header[E + name]["data_offsets"]
        header[E + name]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]


def header_bytes(folder: Path, change: Callable[[bytes], bytes]) -> None:
    raw = (folder / SHARD).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    write_raw(folder / SHARD, change(raw[8 : 8 + length]), raw[8 + length :])


def header_length(folder: Path, length: int) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(length.to_bytes(8, "little") + raw[8:])


def cut(folder: Path, keep: int) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(raw[:keep])


def rename(folder: Path, old: str, new: str) -> None:
    renamed(folder, {f"14.engram.{old}": f"14.engram.{new}"})


def remove(folder: Path, *names: str) -> None:
    """Take tensors out of shard and index, data and all."""
    path = folder / SHARD
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    data, kept = b"", {}
    for name, held in header.items():
        if name in [E + gone for gone in names]:
            continue
        begin, end = held["data_offsets"]
        piece = raw[8 + length + begin : 8 + length + end]
        kept[name] = held | {"data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    write_raw(path, json.dumps(kept).encode(), data)
    with edit_json(folder / INDEX) as index:
        for name in names:
            index["weight_map"].pop(E + name)


def index_entry(folder: Path, name: object, tensor: str = f"{E}wkv.weight") -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"][tensor] = name


def other_tokenizer(folder: Path) -> None:
    with edit_json(folder / "tokenizer.json") as tokenizer:
        tokenizer["model"]["vocab"]["dog"] = 11


def unmapped(folder: Path) -> None:
    rename(folder, "q_weight", "conv.weight")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty_file": (lambda f: cut(f, 0), "header length"),
    "seven_bytes": (lambda f: cut(f, 7), "header length"),
    "header_cut": (lambda f: cut(f, 100), "header length: expected 2 to 92 bytes"),
    "one_byte_cut": (lambda f: cut(f, -1), "truncated"),
    "one_row_cut": (lambda f: cut(f, -264), "data up to byte"),
    "trailing_bytes": (lambda f: header_bytes(f, lambda raw: raw[:-1] + b"}x"), "strict JSON"),
    "file_too_long": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"\0"),
        "file size: expected",
    ),
    "header_length_huge": (lambda f: header_length(f, 2**63), "header length: expected 2 to"),
    "header_length_zero": (lambda f: header_length(f, 0), "header length: expected 2 to"),
    "header_not_an_object": (lambda f: header_bytes(f, lambda raw: b"[1]"), "starts with {"),
    "header_not_utf8": (lambda f: header_bytes(f, lambda raw: b"{\xff" + raw), "strict JSON"),
    "header_nested_deep": (
        lambda f: header_bytes(f, lambda raw: b'{"a":' * 100_000),
        "strict JSON",
    ),
    "header_with_nan": (
        lambda f: header_bytes(f, lambda raw: b'{"a":NaN,' + raw[1:]),
        "strict JSON",
    ),
    "integer_of_5000_digits": (
        lambda f: header_bytes(f, lambda raw: b'{"a":' + b"1" * 5000 + b"," + raw[1:]),
        "strict JSON",
    ),
    "duplicate_tensor": (
        lambda f: header_bytes(f, lambda raw: b'{"a":{},"a":{},' + raw[1:]),
        "key 'a': expected each name once",
    ),
    "entry_without_dtype": (
        lambda f: header_bytes(f, lambda raw: b'{"a":{"shape":[]},' + raw[1:]),
        "dtype, shape and data_offsets",
    ),
    "entry_with_more": (lambda f: entry(f, "q_weight", strides=[1]), "dtype, shape and"),
    "dtype_not_text": (lambda f: entry(f, "q_weight", dtype=5), "a dtype name"),
    "shape_negative": (lambda f: entry(f, "q_weight", shape=[-2, -64]), "a shape of"),
    "shape_bool": (lambda f: entry(f, "q_weight", shape=[True, 128]), "a shape of"),
    "shape_float": (lambda f: entry(f, "q_weight", shape=[2.0, 64]), "a shape of"),
    "shape_of_nine": (lambda f: entry(f, "q_weight", shape=[1] * 9), "0 to 8 sizes"),
    "shape_overflows": (lambda f: entry(f, "q_weight", shape=[2**40, 2**40]), "values"),
    "offsets_of_three": (lambda f: entry(f, "q_weight", data_offsets=[0, 1, 2]), "begin, end"),
    "offsets_reversed": (lambda f: entry(f, "q_weight", data_offsets=[9, 1]), "begin, end"),
    "offset_above_2_63": (
        lambda f: entry(f, "q_weight", data_offsets=[2**63, 2**63 + 256]),
        "begin, end",
    ),
    "bytes_differ_from_shape": (lambda f: entry(f, "q_weight", dtype="F32"), "512 bytes for F32"),
    "overlap": (lambda f: shifted(f, "k_weight", -256, -256), "expected data from byte"),
    "hole": (lambda f: shifted(f, "k_weight", 256, 256), "expected data from byte"),
    "table_rows_wrong": (
        lambda f: entry(f, "embed.weight", shape=[408, 128]),
        r"embed.weight.*\[204, 256\], got .*\[408, 128\]",
    ),
    "table_dtype_int": (lambda f: entry(f, "embed.weight", dtype="I8"), "F8_E4M3, BF16"),
    "table_dtype_e5m2": (lambda f: entry(f, "embed.weight", dtype="F8_E5M2"), "F8_E4M3, BF16"),
    "table_dtype_unknown": (lambda f: entry(f, "embed.weight", dtype="F8_NEW"), "got 'F8_NEW'"),
    "scale_dtype": (
        lambda f: entry(f, "embed.scale", dtype="F8_E4M3"),
        "embed.scale.*expected scales of type F8_E8M0, U8, F32",
    ),
    "scale_f32": (
        lambda f: entry(f, "embed.scale", dtype="F32", shape=[204, 2]),
        "embed.scale",
    ),
    "scale_shape": (lambda f: entry(f, "embed.scale", shape=[8, 204]), r"\[204, 8\], got"),
    "scale_absent": (lambda f: remove(f, "embed.scale"), "scales beside F8_E4M3, got none"),
    "wkv_scale_absent": (lambda f: remove(f, "wkv.scale"), "scales beside F8_E4M3, got none"),
    "wkv_scale_shape": (lambda f: entry(f, "wkv.scale", shape=[48, 6]), r"\[6, 48\], got"),
    "wkv_shape": (lambda f: entry(f, "wkv.weight", shape=[1536, 192]), r"\[192, 1536\], got"),
    "q_fp8": (lambda f: entry(f, "q_weight", dtype="F8_E4M3", shape=[2, 128]), "q_weight"),
    "q_shape": (lambda f: entry(f, "q_weight", shape=[4, 32]), r"q_weight.*\[2, 64\], got"),
    "tensor_absent": (lambda f: remove(f, "wkv.weight", "wkv.scale"), "layer 14: .*got no wkv"),
    "unmapped_engram_tensor": (unmapped, "conv.weight.*known name"),
    "two_of_one_role": (
        lambda f: rename(f, "k_weight", "embed_tokens.weight"),
        "one table, got a second",
    ),
    "layer_without_number": (
        lambda f: renamed(f, {"layers.14.engram.q_weight": "engram.q_weight"}),
        "known name",
    ),
    "index_names_a_parent": (lambda f: index_entry(f, "../x.safetensors"), "a plain file name"),
    "index_names_a_root": (lambda f: index_entry(f, "/etc/passwd"), "a plain file name"),
    "index_names_a_folder": (lambda f: index_entry(f, "a/b.safetensors"), "a plain file name"),
    "index_names_dots": (lambda f: index_entry(f, ".."), "a plain file name"),
    "index_name_with_nul": (lambda f: index_entry(f, "a\0b"), "a plain file name"),
    "index_names_a_number": (lambda f: index_entry(f, 5), "a plain file name"),
    "index_names_a_missing_shard": (lambda f: index_entry(f, "gone.safetensors"), "gone"),
    "index_names_the_wrong_shard": (
        lambda f: index_entry(f, "model-00001-of-00002.safetensors"),
        "00001-of.*wkv.weight.*a shard without it",
    ),
    "index_without_weight_map": (lambda f: (f / INDEX).write_text("{}"), "'weight_map'"),
    "index_is_no_json": (lambda f: (f / INDEX).write_text("{"), "strict JSON"),
    "no_shards": (lambda f: [p.unlink() for p in f.glob("*.safetensors")], "neither"),
    "no_config": (lambda f: (f / "config.json").unlink(), "config.json: file"),
    "no_tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: file"),
    "tokenizer_is_no_tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "not a tokenizer.json",
    ),
    "tokenizer_of_another_model": (other_tokenizer, "compressed vocabulary.*expected 8, got 9"),
    "config_keys_missing": (
        lambda f: [config(f, "engram_n_heads", None), config(f, "hc_mult", None)],
        "keys: expected engram_n_heads, hc_mult, got none",
    ),
    "config_said_twice": (
        lambda f: edit(f / "config.json", lambda c: c.update(hidden_size=128)),
        "hidden_size'.*as said elsewhere",
    ),
    "config_heads_float": (lambda f: config(f, "engram_n_heads", 2.0), "an integer in"),
    "config_heads_bool": (lambda f: config(f, "engram_n_heads", True), "an integer in"),
    "config_heads_negative": (lambda f: config(f, "engram_n_heads", -1), "an integer in"),
    "config_heads_wrong": (lambda f: config(f, "engram_n_heads", 3), "engram_num_embeddings"),
    "config_rows_wrong": (
        lambda f: config(f, "engram_num_embeddings", [72, 205]),
        r"engram_num_embeddings'.*\[72, 204\].*got \[72, 205\]",
    ),
    "config_rows_text": (lambda f: config(f, "engram_num_embeddings", "72"), "integers"),
    "config_base_huge": (lambda f: config(f, "engram_vocab_size", 2**62), "base_size"),
    "config_vocabulary_wrong": (
        lambda f: config(f, "engram_compressed_vocab_size", 9),
        "compressed vocabulary.*expected 9, got 8",
    ),
    "config_pad_out_of_range": (
        lambda f: config(f, "engram_pad_token_id", 11),
        "pad_token_id",
    ),
    "config_eps_text": (lambda f: config(f, "rms_norm_eps", "1e-20"), "a number in"),
    "config_eps_negative": (lambda f: config(f, "rms_norm_eps", -1.0), "a number in"),
    "config_dim_wrong": (lambda f: config(f, "hidden_size", 128), "dim 128"),
    "config_streams_wrong": (lambda f: config(f, "hc_mult", 4), "hc_mult 4"),
    "config_layer_absent": (
        lambda f: [
            config(f, "engram_layer_ids", [1, 14, 20]),
            config(f, "engram_num_embeddings", [72, 204, 358]),
        ],
        "engram_num_embeddings|layer 20",
    ),
    "config_layers_one_less": (
        lambda f: [
            config(f, "engram_layer_ids", [1]),
            config(f, "engram_num_embeddings", [72]),
        ],
        "layer 14: expected layers",
    ),
    "text_config_is_a_list": (
        lambda f: edit(f / "config.json", lambda c: c.update(text_config=[])),
        "text_config",
    ),
    "config_duplicate_key": (
        lambda f: (f / "config.json").write_text('{"hc_mult": 2, "hc_mult": 2}'),
        "hc_mult'.*each name once",
    ),
    "gguf_beside": (lambda f: (f / "a.gguf").write_bytes(b""), "got both"),
}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with edit_json(path) as content:
        change(content)


@pytest.mark.parametrize("case", CASES)
def test_safetensors_folder_is_refused(folder: Path, case: str) -> None:
    mutate, message = CASES[case]
    mutate(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in caught.value.message


def test_the_pristine_folder_is_accepted(folder: Path) -> None:
    assert open_checkpoint(folder).layout == "official names"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", INDEX, SHARD])
def test_fifo_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: file: expected a regular file, got a FIFO"):
        open_checkpoint(folder)


def test_a_shard_in_the_place_of_its_folder_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder of a safetensors checkpoint"):
        open_checkpoint(folder / SHARD)


def test_folder_in_the_place_of_a_shard_is_refused(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    with pytest.raises(CheckpointError, match="a regular file, got a directory"):
        open_checkpoint(folder)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_header_never_crashes(pristine: Path, flips: list[tuple[float, int]]) -> None:
    """Opened or refused, in bounded memory; nothing else."""
    with TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(pristine, Path(scratch) / "ckpt"))
        raw = bytearray((folder / SHARD).read_bytes())
        length = 8 + int.from_bytes(raw[:8], "little")
        for where, value in flips:
            raw[int(where * (length - 1))] = value
        (folder / SHARD).write_bytes(raw)
        tracemalloc.start()
        with suppress(CheckpointError):
            open_checkpoint(folder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 << 20
