"""Every layout of the same values gives the same rows and residuals; so does what is extracted."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file, save

from engram_core.checkpoint import open_checkpoint
from engram_core.tools.extract import extract
from tests.gguf_bytes import toy
from tests.layout_answers import Answers, answers, assert_same
from tests.layout_files import LAYOUTS, ROWS, layout_a, table, write_official

OFFICIAL = {
    "embd.weight": "embed.weight",
    "wkv.weight": "wkv.weight",
    "q.weight": "q_weight",
    "k.weight": "k_weight",
}


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers(open_checkpoint(write_official(tmp_path_factory.mktemp("official") / "c")))


def test_official_rows_are_the_models_numbers(official: Answers) -> None:
    for layer_id in ROWS:
        expected = torch.from_numpy(table(layer_id).numbers[official.hash_ids[layer_id]])
        assert torch.equal(official.rows[layer_id].float(), expected)


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_answers_as_the_official_names_do(
    tmp_path: Path, official: Answers, name: str, placement: str
) -> None:
    checkpoint = open_checkpoint(LAYOUTS[name](tmp_path / "c"))
    if name[0] in "ABCDEFG":
        assert checkpoint.layout == f"GGUF {name[0]}" or "upload" in name
    assert_same(answers(checkpoint, placement), official)


@pytest.mark.parametrize("name", LAYOUTS)
def test_extract_answers_as_its_source_does(tmp_path: Path, official: Answers, name: str) -> None:
    source = open_checkpoint(LAYOUTS[name](tmp_path / "c"))
    made = extract(source.path, tmp_path / "new" / "out.gguf", piece_bytes=10_000)
    extracted = open_checkpoint(made.path)
    assert extracted.identity == source.identity == made.identity
    assert extracted.layout == "GGUF A, extracted"
    assert extracted.image_token_id == source.image_token_id
    assert [layer.requantize_input for layer in extracted.layers] == [
        layer.requantize_input for layer in source.layers
    ]
    assert_same(answers(extracted), official)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_that_fp8_holds_survive_it(tmp_path: Path, official: Answers, name: str) -> None:
    made = extract(LAYOUTS[name](tmp_path / "c"), tmp_path / "out.gguf", quant="FP8")
    layers = open_checkpoint(made.path).layers
    assert {layer.table.encoding for layer in layers} == {"E4M3_E8M0_32"}
    assert all(error.rms == 0 for error in made.errors)
    assert_same(answers(open_checkpoint(made.path)), official)


def test_k_quant_answers_as_the_official_names_with_its_values(tmp_path: Path) -> None:
    """Layout A as the seed has it, random Q2_K blocks, against what they decode to in BF16."""
    path = toy().write(tmp_path / "a.gguf")
    plain = write_official(tmp_path / "c", plain=True)
    reader = GGUFReader(path)
    for shard, layer_id in zip(sorted(plain.glob("*.safetensors")), ROWS, strict=True):
        tensors = load_file(shard)
        for tensor in reader.tensors:
            stem, name = f"blk.{layer_id}.engram_", tensor.name
            if name.startswith(stem):
                official = f"layers.{layer_id}.engram.{OFFICIAL[name.removeprefix(stem)]}"
                values = dequantize(tensor.data, tensor.tensor_type)
                kind = np.float32 if official.endswith("_weight") else ml_dtypes.bfloat16
                tensors[official] = values.astype(kind)
        shard.write_bytes(save(tensors))
    assert_same(answers(open_checkpoint(path)), answers(open_checkpoint(plain)))


def test_extracted_twice_is_the_same_bytes(tmp_path: Path) -> None:
    path = layout_a().write(tmp_path / "a.gguf")
    first = extract(path, tmp_path / "1.gguf").path
    second = extract(first, tmp_path / "2.gguf").path
    assert first.read_bytes() == second.read_bytes()
