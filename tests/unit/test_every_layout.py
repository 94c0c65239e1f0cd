"""Every layout of the same values gives the same rows and residuals; so does what is extracted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file, save

from engram_core.checkpoint import Checkpoint, open_checkpoint
from engram_core.engine import Engine
from engram_core.engine_types import EngineLimits, OpenRequest, Output, Segments, StepRequest
from engram_core.loader import load
from engram_core.tools.extract import extract
from tests.gguf_bytes import toy
from tests.layout_files import LAYOUTS, ROWS, layout_a, table, write_official

TOKEN_IDS = np.array([0, 2, 5, 6, 9, 1, 8, 3, 4, 10, 7, 2], np.int64)
MASK = TOKEN_IDS != 9
OFFICIAL = {
    "embd.weight": "embed.weight",
    "wkv.weight": "wkv.weight",
    "q.weight": "q_weight",
    "k.weight": "k_weight",
}
LIMITS = EngineLimits(max_tokens=64, max_sessions=4, max_held_tokens=4096)


@dataclass(frozen=True)
class Answers:
    """What an engine says of one sequence, by layer."""

    hash_ids: dict[int, torch.Tensor]
    rows: dict[int, torch.Tensor]
    residual: dict[int, torch.Tensor]


def answers(checkpoint: Checkpoint, placement: str = "host") -> Answers:
    """Push a sequence with a dead position and read all there is to read."""
    backend = load(checkpoint, placement=placement, num_slots=64)
    count = np.array([len(TOKEN_IDS)], np.int32)
    with Engine(backend, LIMITS) as engine:
        engine.open("", OpenRequest(session_id=1))
        engine.push("", 1, 0, TOKEN_IDS, mask=MASK)
        segments = Segments(count, np.zeros(1, np.int64), session_id=np.ones(1, np.int64))

        def step(output: Output, layer: int) -> torch.Tensor:
            residual = None
            if output is Output.RESIDUAL:
                generator = torch.Generator().manual_seed(layer)
                residual = torch.randn((len(TOKEN_IDS), 2, 64), generator=generator)
            request = StepRequest(segments, output, (layer,), residual=residual)
            return engine.step("", request).result(30).tensors[layer]

        outputs = (Output.HASH_IDS, Output.ROWS, Output.RESIDUAL)
        read = [{layer: step(output, layer) for layer in ROWS} for output in outputs]
    return Answers(*read)


def same_bits(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return all(torch.equal(one[i].view(torch.uint8), other[i].view(torch.uint8)) for i in ROWS)


def assert_same(one: Answers, other: Answers) -> None:
    assert same_bits(one.hash_ids, other.hash_ids)
    assert same_bits(one.rows, other.rows)
    assert same_bits(one.residual, other.residual)


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
