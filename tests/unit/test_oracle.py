"""The oracle's own readers and bounds: it must be right, and able to see what is wrong."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests import oracle
from tests.builders import IMAGE_TOKEN_ID, Shape, write_gguf, write_safetensors
from tests.oracle import Interval, Oracle

TOKENS = [0, 1, 2, 3, 9, 20, 4, 5, 4, 5, 4, 5, 13, 16, 17, 18]
MASK = [True] * 4 + [False] + [True] * 11


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "small.gguf"
    return write_gguf(path, Shape(), table="Q8_0", wkv="F16")


@pytest.fixture(scope="module")
def official_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("oracle") / "official", Shape())


@pytest.fixture(scope="module")
def layer(gguf_file: Path) -> Oracle:
    return Oracle.open(gguf_file)


def kv_of(layer: Oracle) -> tuple[torch.Tensor, Interval, torch.Tensor]:
    compressed = layer.compress(TOKENS, MASK)
    rows = layer.rows(1, layer.layer_hash_ids(1, compressed))
    return rows, layer.kv_interval(1, rows), layer.kv_reference(1, rows)


def test_reader_by_hand_equals_the_gguf_package(gguf_file: Path, layer: Oracle) -> None:
    reader = gguf.GGUFReader(gguf_file)
    tensors = {t.name: t for t in reader.tensors}
    for layer_id in (1, 14):
        table = tensors[f"blk.{layer_id}.engram_embd.weight"]
        every_row = np.arange(len(table.data))
        assert np.array_equal(layer.table(layer_id).stored(every_row), table.data)
        theirs = torch.from_numpy(gguf.quants.dequantize(table.data, table.tensor_type))
        assert oracle.same_bits(layer.table(layer_id).rows(every_row), theirs.bfloat16())
    primes = reader.get_field("deepseek41.engram.primes")
    assert primes is not None
    flat = [p for part in layer.files.primes for heads in part for p in heads]
    assert flat == primes.contents()


def test_reader_by_hand_equals_the_safetensors_package(official_dir: Path) -> None:
    layer = Oracle.open(official_dir)
    with safe_open(official_dir / "model-00001-of-00002.safetensors", framework="pt") as file:
        codes = file.get_tensor("layers.1.engram.embed.weight").float()
        scale = file.get_tensor("layers.1.engram.embed.scale").float()
        wkv = file.get_tensor("layers.1.engram.wkv.weight").float()
        blocks = file.get_tensor("layers.1.engram.wkv.scale").float()
    rows = (codes.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()
    assert oracle.same_bits(layer.table(1).rows(np.arange(len(codes))), rows)
    expanded = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert oracle.same_bits(layer.wkv(1), (wkv * expanded).bfloat16())


def test_dead_position_blocks_and_expires_after_three(layer: Oracle) -> None:
    pad = layer.pad_id
    windows = layer.windows([5, 6, oracle.DEAD, 7, 8, 9, 10])
    assert windows[2] == [pad] * 4
    assert windows[3] == [7, pad, pad, pad]
    assert windows[5] == [9, 8, 7, pad]
    assert windows[6] == [10, 9, 8, 7]


def test_pad_as_a_token_does_not_block(layer: Oracle) -> None:
    assert layer.windows([5, layer.pad_id, 6])[2] == [6, layer.pad_id, 5, layer.pad_id]


def test_pad_is_mapped_once(layer: Oracle) -> None:
    assert (layer.pad_id, layer.files.token_map[layer.pad_id]) == (1, 0)


def test_dead_id_is_not_read(layer: Oracle) -> None:
    assert layer.compress([2**62, 0], [False, True]) == [oracle.DEAD, 0]
    with pytest.raises(ValueError, match="token id"):
        layer.compress([len(layer.files.token_map)])


def test_float32_product_lies_inside_the_bound(layer: Oracle) -> None:
    _, interval, kv = kv_of(layer)
    assert not interval.outside(kv).any()


def test_bound_sees_one_ulp_too_many(layer: Oracle) -> None:
    """Most values have an interval of one bfloat16 or two neighbours: two steps away is outside."""
    _, interval, kv = kv_of(layer)
    moved = (kv.view(torch.int16) + 2).view(torch.bfloat16)
    assert interval.outside(moved).float().mean() > 0.95


def test_bound_sees_an_input_of_another_row(layer: Oracle) -> None:
    rows, interval, _ = kv_of(layer)
    rows = rows.clone()
    rows[3, 0] = rows[4, 0]
    assert interval.outside(layer.kv_reference(1, rows))[3].any()


def test_reference_gate_lies_inside_its_interval(layer: Oracle) -> None:
    _, interval, kv = kv_of(layer)
    dead = ~torch.tensor(MASK)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(len(kv), 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        out = layer.apply_reference(1, x, kv, dead)
        assert not layer.residual_interval(1, x, Interval(kv, kv), dead).outside(out).any()
        assert not layer.residual_interval(1, x, interval, dead).outside(out).any()


@pytest.mark.parametrize("wrong", ["joint", "no_copysign", "eps", "sum_over_mean", "next_stream"])
def test_tight_interval_sees_a_wrong_gate(layer: Oracle, wrong: str) -> None:
    _, _, kv = kv_of(layer)
    x = torch.randn(len(kv), 2, 64, generator=torch.Generator().manual_seed(2)) * 1e-2
    x[:, 1] *= 50
    key, value = kv[:, :-1].float(), kv[:, -1:].float()
    eps, weight = (1e-3 if wrong == "eps" else layer.eps), layer.weight(1)
    mean = x.square().mean(-1)
    if wrong == "joint":
        mean = mean.mean(-1, keepdim=True)
    if wrong == "sum_over_mean":
        mean = x.square().sum(-1)
    if wrong == "next_stream":
        key = key.roll(1, dims=1)
    rstd = torch.rsqrt(mean + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * weight * key).sum(-1) * rstd * 64**-0.5
    root = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(root if wrong == "no_copysign" else torch.copysign(root, dot))
    out = x + gate.unsqueeze(-1) * value
    alive = torch.zeros(len(kv), dtype=torch.bool)
    assert layer.residual_interval(1, x, Interval(kv, kv), alive).outside(out).any()


def test_one_gate_explains_two_roundings_and_not_an_fma(layer: Oracle) -> None:
    _, _, kv = kv_of(layer)
    alive = torch.zeros(len(kv), dtype=torch.bool)
    x = torch.randn(len(kv), 2, 64, generator=torch.Generator().manual_seed(3))
    gates = layer.gate_interval(1, x, Interval(kv, kv))
    out = layer.apply_reference(1, x, kv, alive)
    assert oracle.explained_by_one_gate(x, kv[:, -1], gates, out).all()
    middle = ((gates.low.double() + gates.high.double()) / 2).float().double()
    fused = (x.double() + middle[..., None] * kv[:, -1:].double()).float()
    assert not oracle.explained_by_one_gate(x, kv[:, -1], gates, fused).any()


def test_dead_residual_keeps_its_bits_under_nan_values(layer: Oracle) -> None:
    kv = torch.full((1, 3, 64), torch.nan, dtype=torch.bfloat16)
    x = torch.randn(1, 2, 64)
    assert oracle.same_bits(layer.apply_reference(1, x, kv, torch.tensor([True])), x)


def test_image_token_is_an_ordinary_id(layer: Oracle) -> None:
    assert layer.compress([IMAGE_TOKEN_ID]) != [oracle.DEAD]
