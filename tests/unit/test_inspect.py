"""What `inspect` says of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram_core.checkpoint import Checkpoint
from engram_core.loader import ledger_on_cpu
from engram_core.memory import Ledger, Memory
from engram_core.tools.inspect import inspect
from engram_core.tools.synth import synth


def test_everything_is_json_ready_and_says_the_geometry(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    found = json.loads(json.dumps(inspect(tmp_path / "c").as_json()))
    assert found["geometry"]["table_rows"] == [72, 204]
    assert found["layout"] == "official names"
    assert found["image_token_id"] == 9
    assert found["hash"]["multipliers"][0][0] == "949203457676829153"
    assert [line["role"] for line in found["tensors"]] == ["table", "wkv", "q", "k"] * 2
    assert found["tensors"][0]["num_bytes"] == 72 * 264
    assert found["tensors"][1]["num_bytes"] == 192 * 1536 + 6 * 48


def test_ledger_of_every_placement_or_why_not(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)

    def ledgers_with(memory: Memory) -> dict[str, Ledger | str]:
        def ledger_of(checkpoint: Checkpoint, placement: str) -> Ledger:
            return ledger_on_cpu(checkpoint, num_slots=256, placement=placement, memory=memory)

        return inspect(tmp_path / "c", ledger_of).ledgers

    ledgers = ledgers_with(Memory(64 << 30))
    assert set(ledgers) == {"device", "host", "disk"}
    assert "there is no device" in str(ledgers["device"])
    assert isinstance(ledgers["host"], Ledger)
    short = ledgers_with(Memory(1 << 20))
    assert "do not fit" in str(short["host"])


@pytest.mark.parametrize(("quant", "warns"), [("F16", True), ("F32", True), ("BF16", False)])
def test_wkv_that_is_rounded_at_load_is_a_warning(tmp_path: Path, quant: str, warns: bool) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant=quant, seed=1)
    warnings = inspect(tmp_path / "c").warnings
    assert (
        any("rounded to bfloat16 (relative RMS of that 0.00" in text for text in warnings) is warns
    )


def test_unknown_image_token_is_a_warning(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    assert any("image_token_id" in text for text in inspect(tmp_path / "c").warnings)


def test_rows_that_are_not_finite_are_a_warning(tmp_path: Path) -> None:
    synth(tmp_path / "c", preset="tiny", fmt="safetensors", quant="FP8", seed=1)
    scale = inspect(tmp_path / "c").checkpoint.layers[1].table.parts[1]
    with open(scale.path, "r+b") as file:
        file.seek(scale.offset)
        file.write(b"\xff")
    warnings = inspect(tmp_path / "c").warnings
    assert warnings == ("layer 14: 1 of the sampled table rows are not finite",)
