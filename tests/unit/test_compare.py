"""`compare`: zero where nothing differs, the truth where something does, a picture."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_core.backends.cpu import make_gate
from engram_core.checkpoint import open_checkpoint
from engram_core.errors import CheckpointError, EngramError, SchemaError
from engram_core.geometry import Geometry
from engram_core.hashing import EngramHasher
from engram_core.quant import to_bf16
from engram_core.tables import DiskTable
from engram_core.tools.compare import Comparison, Distance, compare
from engram_core.tools.extract import extract
from engram_core.tools.gate_terms import gate_values, updates
from engram_core.tools.plot import plot
from engram_core.tools.synth import synth

TEXT = "The cat sat on the Mat . the mat sat on The Cat mat cat"


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "c"
    synth(path, preset="tiny", fmt="safetensors", quant="BF16", seed=1)
    return path


@pytest.fixture(scope="module")
def rounded(official: Path) -> Path:
    return extract(official, official.with_name("fp8.gguf"), quant="FP8").path


def test_a_checkpoint_is_no_distance_from_itself(official: Path) -> None:
    found = compare(official, official, TEXT)
    assert found.num_tokens == 15
    assert [(d.layer_id, d.order) for d in found.distances] == [
        (layer, order) for layer in (1, 14) for order in (2, 3, 4, 0)
    ]
    assert {value for d in found.distances for value in vars(d).values()} == {1, 14, 2, 3, 4, 0}


def test_rows_are_as_far_apart_as_the_tables_say(official: Path, rounded: Path) -> None:
    found = compare(official, rounded, TEXT, max_tokens=9)
    a, b = open_checkpoint(official), open_checkpoint(rounded)
    ids = [0, 2, 5, 6, 1, 8, 10, 1, 7]  # "." is <unk>
    hash_ids = EngramHasher(a.hash_tables, 9).hash(np.array(ids), 0)[:, 1]
    for order in (2, 3, 4):
        wanted = hash_ids[:, 2 * (order - 2) : 2 * (order - 1)].reshape(-1)
        one, other = (DiskTable(c.layers[1].table, 256).gather(wanted).double() for c in (a, b))
        expected = ((other - one).square().sum() / one.square().sum()).sqrt().item()
        got = next(d for d in found.distances if (d.layer_id, d.order) == (14, order))
        assert got.rows == pytest.approx(expected, rel=1e-6)


def test_each_order_moves_kv_gate_and_update(official: Path, rounded: Path) -> None:
    for layer in (1, 14):
        lines = [d for d in compare(official, rounded, TEXT).distances if d.layer_id == layer]
        *orders, everything = lines
        for name in ("kv", "gate", "update"):
            values = [getattr(d, name) for d in orders]
            assert min(values) > 0
        assert everything.kv > max(d.kv for d in orders)


def test_gate_and_update_are_the_backends() -> None:
    generator = torch.Generator().manual_seed(0)
    geometry = Geometry((1,), 4, 2, 32, 64, 2, 1e-20, (9,))
    residual, qk = (torch.randn(shape, generator=generator) for shape in ((5, 2, 64), (2, 64)))
    kv = to_bf16(torch.randn((5, 3, 64), generator=generator).numpy())
    gate = gate_values(residual, kv.float(), qk, geometry.eps)
    expected = make_gate(geometry, qk)(residual, kv)
    torch.testing.assert_close(residual + updates(gate, kv.float()), expected)


def test_another_model_is_refused(official: Path, tmp_path: Path) -> None:
    synth(tmp_path / "q2.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1)
    with pytest.raises(CheckpointError, match="not of the same model"):
        compare(official, tmp_path / "q2.gguf", TEXT)


def test_text_without_tokens_is_refused(official: Path) -> None:
    with pytest.raises(SchemaError, match="at least one token"):
        compare(official, official, "")


def test_without_a_tokenizer_the_error_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synth(tmp_path / "a.gguf", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    monkeypatch.setattr("engram_core.tools.compare.installed_tokenizer", lambda: None)
    with pytest.raises(CheckpointError, match="--tokenizer"):
        compare(tmp_path / "a.gguf", tmp_path / "a.gguf", TEXT)


def test_everything_is_json_ready(official: Path, rounded: Path) -> None:
    found = json.loads(json.dumps(compare(official, rounded, TEXT).as_json()))
    assert (found["a"], found["b"], found["num_tokens"]) == ("BF16", "E4M3_E8M0_32", 15)
    assert set(found["distances"][0]) == {"layer_id", "order", "rows", "kv", "gate", "update"}


def small() -> Comparison:
    distances = [
        Distance(layer, order, 0.1, 0.05, 0.01, 0.06) for layer in (1, 14) for order in (2, 3, 4, 0)
    ]
    return Comparison("E4M3_E8M0_32", "Q2_K", 100, tuple(distances))


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra plot (matplotlib)")
    plot(small(), tmp_path / "a.png")
    raw = (tmp_path / "a.png").read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", raw[16:24]) == (1200, 840)


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EngramError, match=r"engram-service\[plot\]"):
        plot(small(), tmp_path / "a.png")


class Axes:
    """Takes any call; keeps the heights of bars."""

    def __init__(self) -> None:
        self.heights: list[list[float]] = []

    def bar(self, _: object, heights: list[float], *args: object, **named: object) -> None:
        self.heights.append(heights)

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *args, **named: None


def test_panel_has_a_bar_for_each_layer_and_order() -> None:
    from engram_core.tools.plot import _panel

    axes = Axes()
    _panel(axes, small(), "kv")
    assert axes.heights == [[0.05] * 4] * 2
