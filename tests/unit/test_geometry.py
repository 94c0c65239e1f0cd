"""Sizes and hash constants: derived as the model derives them, refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_core.errors import CheckpointError, UnknownLayer
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hash_constants import derive_multipliers, smallest_primes
from tests.oracle import is_prime

GOLDEN = Path(__file__).parents[1] / "golden"
V41 = json.loads((GOLDEN / "v41_hash.json").read_text())
SMALL = json.loads((GOLDEN / "small_hash.json").read_text())
TOY = json.loads((GOLDEN / "toy.json").read_text())
V41_MAP = np.minimum(np.arange(129_280), 99_091)

FLAT: dict[str, Any] = {
    "token_map": [0, 1, 1, 2],
    "multipliers": [3, 5, 7, 9],
    "primes": [5, 7, 11, 13],
    "offsets": [0, 5, 0, 11],
    "pad_id": 1,
}


def geometry(**changed: Any) -> Geometry:
    true = {
        "layer_ids": (1, 14),
        "max_ngram_size": 4,
        "num_heads": 8,
        "head_dim": 256,
        "dim": 5120,
        "hc_mult": 4,
        "eps": 1e-20,
        "table_rows": (384_006_168, 384_016_682),
    }
    return Geometry(**{**true, **changed})


def from_flat(**changed: Any) -> EngramHashTables:
    """Two layers, 2-grams, two heads."""
    return EngramHashTables.from_flat((1, 14), 2, 2, **{**FLAT, **changed})


def test_sizes_of_the_true_geometry() -> None:
    true = geometry()
    assert (true.num_layers, true.n_hash_cols) == (2, 24)
    assert (true.in_features, true.out_features, true.kv_bytes) == (6144, 25600, 51200)
    assert [true.layer_index(layer_id) for layer_id in (1, 14)] == [0, 1]


def test_unknown_layer_names_those_there_are() -> None:
    with pytest.raises(UnknownLayer, match="layer 2 has no Engram; layers with one: 1, 14"):
        geometry().layer_index(2)


@pytest.mark.parametrize("hc_mult", [1, 2, 3, 4])
def test_one_to_four_streams_are_accepted(hc_mult: int) -> None:
    assert geometry(hc_mult=hc_mult).out_features == (hc_mult + 1) * 5120


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hc_mult", 0),
        ("hc_mult", 5),
        ("layer_ids", ()),
        ("layer_ids", (1, 1)),
        ("layer_ids", (-1, 1)),
        ("max_ngram_size", 1),
        ("num_heads", 0),
        ("head_dim", 0),
        ("dim", 0),
        ("eps", float("nan")),
        ("eps", -1e-20),
        ("table_rows", (1,)),
        ("table_rows", (0, 5)),
    ],
)
def test_impossible_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name):
        geometry(**{name: value})


def test_constants_of_the_true_geometry() -> None:
    tables = EngramHashTables.derive((1, 14), 4, 8, V41["base"], V41_MAP, 2)
    assert tables.multipliers.tolist() == V41["multipliers"]
    assert tables.primes.tolist() == V41["primes"]
    assert tables.offsets.tolist() == V41["offsets"]
    assert tables.table_rows == (384_006_168, 384_016_682)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("source", "wrap")])
def test_constants_of_small_geometries(name: str) -> None:
    case = SMALL[name]
    token_map = np.arange(case["compressed_vocab_size"])
    sizes = (case["layer_ids"], case["max_ngram"], case["n_heads"], case["engram_vocab_size"])
    tables = EngramHashTables.derive(*sizes, token_map, case["pad_compressed"])
    assert tables.primes.tolist() == case["primes"]
    assert tables.multipliers.tolist() == case["multipliers"]
    assert list(tables.table_rows) == case["row_totals"]


def test_constants_of_the_toy() -> None:
    tables = EngramHashTables.derive((1, 14), 4, 2, 100, np.arange(16), 2)
    assert tables.multipliers[0].tolist() == TOY["multipliers_layer_1"]
    assert tables.table_rows == (660, 864)


@pytest.mark.parametrize(("size", "first"), [(99_093, 76631322711135), (129_280, 58737837727525)])
def test_multipliers_depend_on_the_compressed_size(size: int, first: int) -> None:
    assert derive_multipliers(1, 4, size)[0] == first


def test_a_map_of_another_size_is_refused() -> None:
    tables = EngramHashTables.derive((1,), 4, 8, 100, np.arange(99_093), 2)
    with pytest.raises(CheckpointError, match="expected 99092, got 99093"):
        tables.require(compressed_vocab_size=99_092)


def test_rows_of_a_prime_search_restarted_for_each_layer_are_refused() -> None:
    tables = EngramHashTables.derive((1, 14), 4, 8, V41["base"], V41_MAP, 2)
    tables.require(table_rows=(384_006_168, 384_016_682), compressed_vocab_size=99_092)
    with pytest.raises(CheckpointError, match="rows"):
        tables.require(table_rows=(384_006_168, 384_006_168))


@given(st.integers(1, 50_000), st.integers(1, 40))
def test_primes_are_the_smallest_from_the_base_on(base: int, count: int) -> None:
    found = smallest_primes(base, count)
    assert found == [n for n in range(base, found[-1] + 1) if is_prime(n)]
    assert len(found) == count


@pytest.mark.parametrize("base", [0, -5, 2**31 + 1, 2**62])
def test_a_hostile_base_size_is_refused_before_any_work(base: int) -> None:
    with pytest.raises(CheckpointError, match="base_size"):
        smallest_primes(base, 1)


def test_flat_constants_are_kept_as_they_are() -> None:
    tables = from_flat()
    assert tables.primes.tolist() == [[[5, 7]], [[11, 13]]]
    assert tables.offsets.tolist() == [[0, 5], [0, 11]]
    assert (tables.vocab_size, tables.compressed_vocab_size, tables.pad_id) == (4, 3, 1)


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8"])
def test_integers_of_any_type_are_read_by_value(dtype: str) -> None:
    tables = from_flat(**{k: np.array(v, dtype) for k, v in FLAT.items() if k != "pad_id"})
    for name in ("token_map", "multipliers", "primes", "offsets"):
        assert (getattr(tables, name) == getattr(from_flat(), name)).all()


def test_absent_offsets_are_the_sums_of_the_primes() -> None:
    assert from_flat(offsets=None).offsets.tolist() == from_flat().offsets.tolist()


def test_a_pad_in_token_space_is_mapped_once_and_a_compressed_one_never() -> None:
    assert from_flat(pad_id=None, pad_token_id=2).pad_id == 1
    assert from_flat(pad_id=2).pad_id == 2


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"token_map": []}, "token_map"),
        ({"token_map": [0, -1, 1]}, r"token_map\[1\].*got -1"),
        ({"token_map": [0.0, 1.0]}, "expected integers, got float64"),
        ({"token_map": ["a"]}, "expected integers"),
        ({"multipliers": [3, 5, 7]}, "multipliers: expected 4 values, got 3"),
        ({"multipliers": [3, 5, 7, 8]}, "multipliers.*got 8"),
        ({"multipliers": [3, 5, 7, -9]}, "multipliers.*got -9"),
        ({"multipliers": [3, 5, 7, 2**62 + 1]}, "multipliers"),
        ({"multipliers": np.array([3, 5, 7, 2**63 + 1], "u8")}, "at most 9223372036854775807"),
        ({"primes": [5, 7, 11]}, "primes: expected 4 values, got 3"),
        ({"primes": [5, 7, 11, 0]}, "primes: expected at least 1 each, got 0"),
        ({"primes": [5, 7, 2**62, 2**62]}, "primes: expected a sum inside int64"),
        ({"offsets": [0, 5, 0]}, "offsets: expected 4 values, got 3"),
        ({"offsets": [0, 5, 0, 12]}, r"offsets\[1, 1\]: expected 11"),
        ({"pad_id": 3}, "pad_id: expected 0..2, got 3"),
        ({"pad_id": None, "pad_token_id": 4}, "pad_token_id: expected 0..3, got 4"),
        ({"pad_id": None}, "exactly one of pad_id"),
        ({"pad_token_id": 1}, "exactly one of pad_id"),
    ],
)
def test_a_broken_constant_is_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        from_flat(**changed)


@pytest.mark.parametrize("sizes", [((), 2, 2), ((1, 14), 1, 2), ((1, 14), 2, 0)])
def test_no_layers_orders_or_heads_are_refused(sizes: Any) -> None:
    with pytest.raises(CheckpointError):
        EngramHashTables.from_flat(*sizes, **FLAT)


def test_constants_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        from_flat().primes[0, 0, 0] = 1
