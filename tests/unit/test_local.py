"""Gating and projecting at the client gives the bits of the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engram_client.local import LocalLayer, gate, project
from engram_core import (
    Geometry,
    Projection,
    make_gate,
    product_dtype,
    requantize,
    row_format,
    to_bf16,
)

HC, DIM, COLS, HEAD_DIM = 2, 96, 6, 32
GEOMETRY = Geometry((1,), 4, 2, HEAD_DIM, DIM, HC, 1e-20, (9,))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


QK, WKV = random(HC, DIM), random((HC + 1) * DIM, COLS * HEAD_DIM, dtype=torch.bfloat16)
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 33, 100])
def test_the_gate_is_the_reference_backends(count: int, dtype: torch.dtype) -> None:
    x, kv = random(count, HC, DIM, dtype=dtype), random(count, HC + 1, DIM, dtype=torch.bfloat16)
    got = gate(x, kv, QK, GEOMETRY.eps)
    assert same_bits(got, make_gate(GEOMETRY, QK)(x, kv))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_positions_keep_their_bits_and_disturb_nobody(dtype: torch.dtype) -> None:
    x, kv = random(40, HC, DIM, dtype=dtype), random(40, HC + 1, DIM, dtype=torch.bfloat16)
    dead = torch.arange(40) % 3 == 0
    x[0], kv[3] = float("nan"), float("inf")
    got = gate(x, kv, QK, GEOMETRY.eps, dead)
    assert same_bits(got[dead], x[dead])
    assert same_bits(got[~dead], gate(x[~dead], kv[~dead], QK, GEOMETRY.eps))


def test_the_residual_given_is_not_changed() -> None:
    x, kv = random(3, HC, DIM), random(3, HC + 1, DIM, dtype=torch.bfloat16)
    before = x.clone()
    gate(x, kv, QK, GEOMETRY.eps)
    assert same_bits(x, before)


@pytest.mark.parametrize("count", [0, 1, 17, 600])
def test_the_projection_is_the_reference_backends_in_any_batch(count: int) -> None:
    rows = random(count, COLS, HEAD_DIM, dtype=torch.bfloat16)
    projection = Projection(WKV, product_dtype())
    got = project(rows, WKV, HC)
    assert got.shape == (count, HC + 1, DIM)
    for at in range(0, count, 40):
        alone = projection(rows[at].flatten().unsqueeze(0))
        assert same_bits(got[at].flatten(), alone.flatten())


def test_the_input_of_fp8_projections_is_requantised() -> None:
    rows = random(5, COLS, HEAD_DIM, dtype=torch.bfloat16)
    got = project(rows, WKV, HC, requantizes=True)
    assert same_bits(got, project(requantize(rows.flatten(1)), WKV, HC))
    assert not same_bits(got, project(rows, WKV, HC))


class Weights:
    """A client that has weights to give, and remembers which were asked for."""

    def __init__(self, wkv_input: str) -> None:
        self._info = {
            "table": {"encodings": {"1": "Q8_0"}},
            "geometry": {"eps": 1e-20},
            "numerics": {"wkv_input": wkv_input},
        }
        self.names: Any = None

    def info(self) -> dict[str, Any]:
        return self._info

    def weights(self, layer: int, names: Any) -> dict[str, np.ndarray[Any, Any]]:
        import ml_dtypes

        self.names = names
        wkv = WKV.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        every = {"qk": QK.numpy(), "wkv": wkv}
        return {name: every[name] for name in names}


def test_a_layer_is_made_from_what_the_service_tells() -> None:
    client: Any = Weights("bfloat16 rows")
    rows = random(4, COLS, HEAD_DIM, dtype=torch.bfloat16)
    layer = LocalLayer.fetch(client, 1, projects=True)
    kv = layer.project(rows)
    assert same_bits(kv, project(rows, WKV, HC))
    x = random(4, HC, DIM)
    assert same_bits(layer.gate(x, kv), gate(x, kv, QK, 1e-20))
    fp8: Any = Weights("e4m3 per 32 values")
    got = LocalLayer.fetch(fp8, 1, projects=True).project(rows)
    assert same_bits(got, project(rows, WKV, HC, requantizes=True))


@pytest.mark.parametrize("count", [0, 3, 600])
def test_stored_rows_are_projected_as_what_they_mean(count: int) -> None:
    client: Any = Weights("bfloat16 rows")
    layer = LocalLayer.fetch(client, 1, projects=True)
    form = row_format("Q8_0")
    generator = torch.Generator().manual_seed(3)
    shape = (count, COLS, form.row_bytes(HEAD_DIM))
    stored = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    stored[..., 1] &= 0x3F  # a scale of float16 below 2
    values = form.dequantize(stored.flatten(0, 1).numpy())
    rows = to_bf16(values).view(count, COLS, HEAD_DIM)
    assert same_bits(layer.project(stored), layer.project(rows))


@pytest.mark.parametrize("width", [0, 33, 34 * 2, 35])
def test_stored_rows_of_another_width_or_type_are_refused(width: int) -> None:
    client: Any = Weights("bfloat16 rows")
    layer = LocalLayer.fetch(client, 1, projects=True)
    with pytest.raises(
        ValueError, match=r"rows: expected bfloat16 .* or Q8_0 as stored, got uint8"
    ):
        layer.project(torch.zeros((2, COLS, width), dtype=torch.uint8))
    with pytest.raises(ValueError, match="no stored ones"):
        project(torch.zeros((2, COLS, 34), dtype=torch.uint8), WKV, HC)


def test_wkv_is_fetched_only_to_project() -> None:
    client: Any = Weights("bfloat16 rows")
    layer = LocalLayer.fetch(client, 1)
    assert client.names == ("qk",)
    with pytest.raises(ValueError, match="projects=True"):
        layer.project(random(1, COLS, HEAD_DIM, dtype=torch.bfloat16))


X, KV = random(3, HC, DIM), random(3, HC + 1, DIM, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "kv", "qk", "dead"),
    [
        (X[:2], KV, QK, None),
        (X.double(), KV, QK, None),
        (X[:, :1], KV, QK, None),
        (X, KV.float(), QK, None),
        (X, KV[:, :2], QK, None),
        (X, KV, QK.double(), None),
        (X, KV, QK[0], None),
        (X, KV, QK, torch.zeros(2, dtype=torch.bool)),
        (X, KV, QK, torch.zeros(3)),
    ],
)
def test_other_shapes_and_dtypes_are_refused(
    x: torch.Tensor, kv: torch.Tensor, qk: torch.Tensor, dead: torch.Tensor | None
) -> None:
    with pytest.raises(ValueError, match="expected"):
        gate(x, kv, qk, 1e-20, dead)


def test_rows_and_wkv_of_other_widths_are_refused() -> None:
    rows = random(2, COLS, HEAD_DIM, dtype=torch.bfloat16)
    for wrong in (rows[:, :-1], rows.float()):
        with pytest.raises(ValueError, match="expected"):
            project(wrong, WKV, HC)
    with pytest.raises(ValueError, match="expected"):
        project(rows, WKV, 4)
