"""Written aside, synced, renamed; holes stay holes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors import safe_open

from engram_core.checkpoint.sources import NewTensor
from engram_core.checkpoint.write import (
    create_gguf,
    create_safetensors,
    write_rows,
    written_aside,
)
from engram_core.errors import CheckpointError


def test_nothing_is_left_when_the_body_raises(tmp_path: Path) -> None:
    def write() -> None:
        with written_aside(tmp_path / "out") as aside:
            aside.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_written_aside_too(tmp_path: Path) -> None:
    with written_aside(tmp_path / "new" / "out") as aside:
        aside.mkdir()
        (aside / "a").write_bytes(b"x")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "a").read_bytes() == b"x"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_path_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="a path not in use"), written_aside(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_bytes() == b"mine"


def test_gguf_package_reads_keys_of_64_bits_and_data(tmp_path: Path) -> None:
    tensor = NewTensor("t", "F32", (3, 2), 24)
    large = np.array([2**47 + 1, 3], np.uint64)
    metadata = {"a": 5, "b": "text", "c": 1e-20, "d": large, "e": ["x", ""]}
    offsets = create_gguf(tmp_path / "a.gguf", "arch", metadata, [tensor])
    values = np.arange(6, dtype="<f4").reshape(3, 2)
    with open(tmp_path / "a.gguf", "r+b") as file:
        write_rows(file.fileno(), offsets["t"], np.array([0, 2]), values[[0, 2]].view(np.uint8))
    reader = GGUFReader(tmp_path / "a.gguf")
    assert reader.get_field("d").contents() == large.tolist()
    assert reader.get_field("e").contents() == ["x", ""]
    assert reader.tensors[0].data.tolist() == [[0, 1], [0, 0], [4, 5]]


def test_safetensors_library_reads_what_is_created(tmp_path: Path) -> None:
    tensors = [NewTensor("a", "F32", (2,), 8), NewTensor("b", "I64", (1, 3), 24)]
    offsets = create_safetensors(tmp_path / "a.safetensors", tensors)
    assert offsets["b"] - offsets["a"] == 8
    assert offsets["a"] % 8 == 0
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert file.get_tensor("b").tolist() == [[0, 0, 0]]


def test_rows_above_2_32_bytes_land_where_they_belong(tmp_path: Path) -> None:
    num_rows = (1 << 33) // 84
    offsets = create_gguf(
        tmp_path / "a.gguf", "arch", {}, [NewTensor("t", "Q2_K", (num_rows, 256), num_rows * 84)]
    )
    ids = np.array([5, 51_130_563, 51_130_564, num_rows - 1])
    rows = np.random.default_rng(0).integers(0, 256, (4, 84), np.uint8)
    with open(tmp_path / "a.gguf", "r+b") as file:
        write_rows(file.fileno(), offsets["t"], ids, rows)
        for row_id, row in zip(ids.tolist(), rows, strict=True):
            file.seek(offsets["t"] + row_id * 84)
            assert file.read(84) == row.tobytes()
    assert (tmp_path / "a.gguf").stat().st_blocks * 512 < 1 << 20
