"""The safetensors reader: equal to the library's; names, dtypes and folders people have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.safetensors import read_safetensors
from engram_core.tools.synth import synth
from tests.builders import Shape, write_safetensors
from tests.safetensors_bytes import edit_header, edit_json, renamed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    synth(path, preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    return path


@pytest.mark.parametrize("quant", ["FP8", "BF16", "F16", "F32"])
def test_tensors_are_those_of_the_library(tmp_path: Path, quant: str) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant=quant, seed=1)
    for shard in sorted((tmp_path / "c").glob("*.safetensors")):
        ours = read_safetensors(shard)
        with safe_open(shard, framework="numpy") as theirs:
            assert set(ours) == set(theirs.keys())
            for name, tensor in ours.items():
                held = theirs.get_slice(name)
                assert (list(tensor.shape), tensor.dtype) == (held.get_shape(), held.get_dtype())


def test_offsets_are_where_the_bytes_are(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "c", Shape(head_dim=64), seed=2)
    for shard in path.glob("*.safetensors"):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensor = read_safetensors(shard)[name]
                assert tensor.offset == 8 + length + begin
                assert tensor.num_bytes == end - begin


def test_bare_shards_need_no_index(folder: Path) -> None:
    indexed = open_checkpoint(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert open_checkpoint(folder).identity == indexed.identity


def test_only_the_shards_with_engram_tensors_are_needed(folder: Path) -> None:
    plain = open_checkpoint(folder)
    with edit_json(folder / "model.safetensors.index.json") as index:
        index["weight_map"]["layers.0.attn.wq.weight"] = "model-00003-of-00003.safetensors"
    assert open_checkpoint(folder).identity == plain.identity


def test_shards_may_be_links_into_a_cache(folder: Path) -> None:
    plain = open_checkpoint(folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in sorted(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert open_checkpoint(folder).identity == plain.identity


def test_renames_of_inference_engines_are_read(folder: Path) -> None:
    plain = open_checkpoint(folder)
    renamed(
        folder,
        {
            "embed.weight": "embed_tokens.weight",
            "embed.scale": "embed_tokens.weight_scale_inv",
            "wkv.scale": "wkv.weight_scale_inv",
        },
    )
    assert open_checkpoint(folder).identity == plain.identity


def test_scales_as_u8_are_the_same_codes(folder: Path) -> None:
    plain = open_checkpoint(folder)
    for shard in folder.glob("*.safetensors"):
        with edit_header(shard) as header:
            for name, entry in header.items():
                if name.endswith("scale"):
                    entry["dtype"] = "U8"
    assert open_checkpoint(folder).identity == plain.identity


def test_config_keys_may_stand_at_the_top(folder: Path) -> None:
    plain = open_checkpoint(folder)
    with edit_json(folder / "config.json") as config:
        config.update(config.pop("text_config"))
        config["norm_eps"] = config.pop("rms_norm_eps")
        config["dim"] = config.pop("hidden_size")
        config["engram_pad_id"] = config.pop("engram_pad_token_id")
    assert open_checkpoint(folder).identity == plain.identity


def test_pad_token_is_mapped_once(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    tables = checkpoint.hash_tables
    assert (tables.pad_id, int(tables.token_map[tables.pad_id])) == (2, 1)
    assert checkpoint.image_token_id == 9


@pytest.mark.parametrize(("quant", "expected"), [("FP8", True), ("BF16", False)])
def test_only_an_fp8_wkv_requantizes_its_input(tmp_path: Path, quant: str, expected: bool) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant=quant, seed=1)
    layers = open_checkpoint(tmp_path / "c").layers
    assert {layer.requantize_input for layer in layers} == {expected}
