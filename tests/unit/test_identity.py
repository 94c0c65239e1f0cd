"""The identity tells apart what answers differently, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_core.checkpoint import open_checkpoint
from engram_core.checkpoint.identity import sampled_row_ids
from engram_core.tools.synth import synth
from tests.gguf_bytes import Gguf, toy

P = "deepseek41.engram."


def identity(tmp_path: Path, file: Gguf) -> str:
    return open_checkpoint(file.write(tmp_path / "a.gguf")).identity


@pytest.mark.parametrize("quant", ["BF16", "F16", "F32"])
def test_format_of_the_file_does_not_matter(tmp_path: Path, quant: str) -> None:
    for fmt in ("gguf", "safetensors"):
        synth(tmp_path / fmt, preset="tiny", fmt=fmt, quant=quant, seed=1)
    first, second = (open_checkpoint(tmp_path / fmt) for fmt in ("gguf", "safetensors"))
    assert first.identity == second.identity
    assert len(first.identity) == 64


def test_another_seed_is_another_table(tmp_path: Path) -> None:
    for seed in (1, 2):
        synth(tmp_path / f"{seed}", preset="tiny", fmt="gguf", quant="Q2_K", seed=seed)
    assert open_checkpoint(tmp_path / "1").identity != open_checkpoint(tmp_path / "2").identity


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("embd", 0),
        ("embd", -1),
        ("wkv", 0),
        ("wkv", -1),
        ("wkv", 84 * 6 * 96),
        ("q", 3),
        ("k", -1),
    ],
)
def test_a_changed_byte_at_the_ends_changes_it(tmp_path: Path, name: str, at: int) -> None:
    plain, file = identity(tmp_path, toy()), toy()
    tensor = file.tensor(f"blk.14.engram_{name}.weight")
    raw = bytearray(tensor.data)
    raw[at] ^= 1
    tensor.data = bytes(raw)
    assert identity(tmp_path, file) != plain


def test_eps_pad_and_map_change_it(tmp_path: Path) -> None:
    plain = identity(tmp_path, toy())
    pad, token_map = toy(), toy()
    pad.set(P + "pad_id", "u32", 1)
    token_map.set(P + "token_map", "[i32]", [0, 0, 1, 2, 1, 3, 4, 5, 5, 7, 6])
    others = [identity(tmp_path, file) for file in (pad, token_map, toy(eps=1e-6))]
    assert len({plain, *others}) == 4


def test_samples_hold_both_ends() -> None:
    for num_rows in (1, 2, 63, 64, 65, 384_006_168):
        ids = sampled_row_ids(num_rows)
        assert (ids[0], ids[-1]) == (0, num_rows - 1)
        assert len(ids) == min(64, num_rows)
