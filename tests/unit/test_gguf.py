"""The GGUF reader: equal to the package's, any legal alignment, integer type and split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.gguf import Skipped, read_gguf
from engram_core.errors import CheckpointError
from engram_core.tools.synth import synth
from tests.builders import Shape, write_gguf
from tests.gguf_bytes import Gguf, toy


def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", Shape(head_dim=256), table="Q2_K", wkv="F16", seed=1)
    ours, theirs = read_gguf(path), GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        got = ours.tensors[tensor.name]
        assert (got.type_id, got.offset) == (int(tensor.tensor_type), tensor.data_offset)
        assert got.num_bytes == tensor.n_bytes
        assert list(reversed(got.shape)) == tensor.shape.tolist()


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q2_K", "Q6_K", "MXFP4"])
def test_metadata_equals_the_gguf_package(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "a.gguf"
    synth(path, preset="tiny", fmt="gguf", quant=quant, seed=1)
    ours, theirs = read_gguf(path), GGUFReader(path)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for name, field in fields.items():
        assert np.array_equal(np.asarray(ours.metadata[name]), np.asarray(field.contents()))


def test_arrays_nobody_asks_for_are_stepped_over(tmp_path: Path) -> None:
    file = toy()
    file.set("tokenizer.ggml.scores", "[f32]", [0.5] * 1000)
    file.set("tokenizer.chat_template", "str", "x" * 100_000)
    file.set("tokenizer.ggml.merges", "[str]", ["merge " * (i % 7) for i in range(300_000)])
    metadata = read_gguf(file.write(tmp_path / "a.gguf")).metadata
    skipped = {name for name, value in metadata.items() if isinstance(value, Skipped)}
    assert skipped == {
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
        "tokenizer.chat_template",
    }


@pytest.mark.parametrize("alignment", [8, 24, 64, 4096])
def test_any_multiple_of_8_is_an_alignment(tmp_path: Path, alignment: int) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    other = open_checkpoint(toy(alignment=alignment).write(tmp_path / "other.gguf"))
    assert other.identity == plain.identity
    assert other.layers[1].table.parts[0].offset % alignment == 0


def test_version_2_and_zero_bytes_at_the_end_are_read(tmp_path: Path) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    file = toy()
    file.version, file.tail = 2, bytes(1000)
    assert open_checkpoint(file.write(tmp_path / "other.gguf")).identity == plain.identity


@pytest.mark.parametrize("primes", ["u32", "i32", "u64", "i64"])
@pytest.mark.parametrize("token_map", ["i32", "u32", "i64"])
def test_integer_type_of_arrays_does_not_matter(
    tmp_path: Path, primes: str, token_map: str
) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    file = toy()
    for name, kind in (("primes", primes), ("offsets", primes), ("token_map", token_map)):
        key = f"deepseek41.engram.{name}"
        file.set(key, f"[{kind}]", next(value for k, _, value in file.keys if k == key))
    assert open_checkpoint(file.write(tmp_path / "other.gguf")).identity == plain.identity


def test_pad_is_compressed_already_and_not_mapped_again(tmp_path: Path) -> None:
    tables = open_checkpoint(toy().write(tmp_path / "a.gguf")).hash_tables
    assert (tables.pad_id, int(tables.token_map[2])) == (2, 1)


def test_eps_is_its_shortest_decimal(tmp_path: Path) -> None:
    assert open_checkpoint(toy().write(tmp_path / "a.gguf")).geometry.eps == 1e-20


def test_eps_comes_from_the_config_beside_the_file(tmp_path: Path) -> None:
    file = toy()
    file.drop("deepseek41.attention.layer_norm_rms_epsilon")
    (tmp_path / "config.json").write_text('{"text_config": {"rms_norm_eps": 1e-20}}')
    assert open_checkpoint(file.write(tmp_path / "a.gguf")).geometry.eps == 1e-20


def split(file: Gguf, folder: Path) -> list[Path]:
    """Three shards: the small tensors, layer 1's table, layer 14's table."""
    tables = ["blk.1.engram_embd.weight", "blk.14.engram_embd.weight"]
    small = [pair for pair in file.tensors if pair[0] not in tables]
    parts = [small, *([(name, file.tensor(name))] for name in tables)]
    paths = []
    for i, tensors in enumerate(parts):
        shard = Gguf(keys=list(file.keys) if i == 0 else [], tensors=tensors)
        shard.set("split.no", "u16", i)
        shard.set("split.count", "u16", 3)
        shard.set("split.tensors.count", "i32", len(file.tensors))
        paths.append(shard.write(folder / f"m-{i + 1:05d}-of-00003.gguf"))
    return paths


def test_split_file_opens_from_any_shard_and_the_folder(tmp_path: Path) -> None:
    plain = open_checkpoint(toy().write(tmp_path / "plain.gguf"))
    folder = tmp_path / "split"
    folder.mkdir()
    for path in (*split(toy(), folder), folder):
        opened = open_checkpoint(path)
        assert opened.identity == plain.identity
        assert opened.layers[0].table.parts[0].path.name == "m-00002-of-00003.gguf"


def test_shards_may_be_links_into_a_cache(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    for i, path in enumerate(split(toy(), blobs)):
        (folder / path.name).symlink_to(path.rename(blobs / f"blob{i}"))
    assert open_checkpoint(folder / "m-00001-of-00003.gguf").geometry.table_rows == (72, 204)


def test_wrong_rows_in_a_later_shard_name_tensor_and_shard(tmp_path: Path) -> None:
    file = toy()
    table = file.tensor("blk.14.engram_embd.weight")
    table.ne, table.data = (256, 203), table.data[:-84]
    paths = split(file, tmp_path)
    with pytest.raises(CheckpointError, match=r"00003-of.*blk\.14\.engram_embd.*204.*203"):
        open_checkpoint(paths[0])
