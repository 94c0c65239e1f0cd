"""The hash: exact rows, sticky blocking, refusals that change nothing."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engram_core.errors import BadTensor, Gap, TokenOutOfRange, TooManyPositions
from engram_core.geometry import EngramHashTables
from engram_core.hashing import DEAD, EngramHasher, block, compress, hash_windows
from tests import oracle

GOLDEN = Path(__file__).parents[1] / "golden"
V41 = json.loads((GOLDEN / "v41_hash.json").read_text())
SMALL = json.loads((GOLDEN / "small_hash.json").read_text())
TOY = json.loads((GOLDEN / "toy.json").read_text())

REAL = EngramHashTables.derive((1, 14), 4, 8, V41["base"], np.arange(99_092), 2)
TABLES = EngramHashTables.derive((1, 14), 4, 2, 100, np.arange(16), 2)
IDS = np.array(TOY["compressed_ids"])


def hash_all(ids: Any, tables: EngramHashTables = TABLES) -> NDArray[np.int64]:
    """Hash one sequence of compressed ids (the maps here are the identity); -1 = dead."""
    ids = np.array(ids, dtype=np.int64)
    return EngramHasher(tables, len(ids)).hash(ids, 0, ids != DEAD)


def toy_rows(hasher: EngramHasher, ids: Any, position: int) -> list[list[int]]:
    rows: list[list[int]] = hasher.hash(np.array(ids, dtype=np.int64), position)[:, 0].tolist()
    return rows


@pytest.mark.parametrize("case", V41["hash"].values(), ids=V41["hash"])
def test_rows_of_the_true_geometry(case: dict[str, Any]) -> None:
    rows = hash_all(case["compressed_ids"], REAL)
    assert rows.tolist() == case["rows"]
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == case["sha256_i64le"]


def test_published_digests_come_out() -> None:
    rows = hash_all([0, 3], REAL).astype("<i8")
    published = V41["published_digest_check"]
    for part, name in ((rows, "all"), (rows[:, 0], "layer1"), (rows[:, 1], "layer14")):
        assert hashlib.sha256(part.tobytes()).hexdigest() == published[f"expected_{name}"]


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("source", "wrap")])
def test_rows_of_small_geometries(name: str) -> None:
    case = SMALL[name]
    sizes = (case["layer_ids"], case["max_ngram"], case["n_heads"], case["engram_vocab_size"])
    token_map = np.arange(case["compressed_vocab_size"])
    tables = EngramHashTables.derive(*sizes, token_map, case["pad_compressed"])
    assert hash_all(range(5), tables).tolist() == case["hash_of_0..4"]


def test_products_wrap_and_remainders_floor() -> None:
    case = SMALL["wrap"]
    primes = np.array(case["primes"])
    flat = primes.reshape(1, -1)
    tables = EngramHashTables(
        layer_ids=(1,),
        max_ngram_size=4,
        num_heads=2,
        token_map=np.arange(16),
        multipliers=np.array(case["multipliers"]),
        primes=primes,
        offsets=np.cumsum(flat, axis=1) - flat,
        pad_id=case["pad"],
    )
    assert hash_all(case["compressed_ids"], tables).tolist() == case["rows"]


def test_rows_of_the_toy() -> None:
    assert hash_all(IDS)[:, 0].tolist() == TOY["rows"]


@pytest.mark.parametrize("cuts", [c for n in range(5) for c in combinations(range(1, 5), n)])
def test_every_way_of_cutting_a_prompt_gives_the_same_rows(cuts: tuple[int, ...]) -> None:
    hasher, bounds = EngramHasher(TABLES, 5), [0, *cuts, 5]
    rows = []
    for start, stop in pairwise(bounds):
        rows += toy_rows(hasher, IDS[start:stop], start)
    assert rows == TOY["rows"]


def test_a_rewind_keeps_the_look_back() -> None:
    hasher = EngramHasher(TABLES, 5)
    hasher.hash(IDS[:4], 0)
    assert toy_rows(hasher, [3], 3) == [TOY["after_rewind_to_3_append_3"]]
    assert hasher.length == 4


def test_rows_after_a_retry_are_those_of_one_push() -> None:
    hasher = EngramHasher(TABLES, 5)
    hasher.hash(IDS[:2], 0)
    assert toy_rows(hasher, [9], 2) == toy_rows(hasher, [9], 2)
    assert toy_rows(hasher, [8], 3) == [TOY["after_retry_of_9_then_8"]]


def test_a_reset_forgets_the_look_back() -> None:
    hasher = EngramHasher(TABLES, 5)
    hasher.hash(IDS, 0)
    hasher.reset()
    assert toy_rows(hasher, IDS, 0) == TOY["rows"]


def test_a_window_stops_at_a_dead_position_and_stays_blocked() -> None:
    ids = np.array([[5, DEAD, 7, 8], [DEAD, 5, 6, 7], [5, 6, 7, DEAD]], dtype=np.int32)
    assert block(ids, 2).tolist() == [[5, 2, 2, 2], [2, 2, 2, 2], [5, 6, 7, 2]]


def test_a_live_token_that_is_the_pad_does_not_block() -> None:
    ids = np.array([[5, 2, 7, 8]], dtype=np.int32)
    assert block(ids, 2).tolist() == [[5, 2, 7, 8]]


def test_blocking_leaves_its_input_alone() -> None:
    ids = np.array([[5, DEAD, 7, 8]], dtype=np.int32)
    block(ids, 2)
    assert ids.tolist() == [[5, DEAD, 7, 8]]


def test_a_dead_position_blocks_three_successors_and_no_more() -> None:
    rows, without = hash_all([1, DEAD, 3, 4, 5, 6]), hash_all([1, 9, 3, 4, 5, 6])
    assert (rows[5] == without[5]).all()
    for p in range(1, 5):
        assert (rows[p] != without[p]).any()


@given(st.lists(st.integers(-1, 15), max_size=12), st.data())
def test_any_chunking_equals_the_oracle(ids: list[int], data: st.DataObject) -> None:
    hasher, rows, position = EngramHasher(TABLES, 12), [], 0
    while position < len(ids):
        count = data.draw(st.integers(0, len(ids) - position))
        chunk = np.array(ids[position : position + count], dtype=np.int64)
        rows += hasher.hash(chunk, position, chunk != DEAD).tolist()
        position += count
    recipe = oracle.derive_hash([1, 14], 4, 2, 100, 16)
    assert rows == [
        [
            oracle.hash_window(oracle.window(ids, p, 4, 2), *layer)
            for layer in zip(*recipe, strict=True)
        ]
        for p in range(len(ids))
    ]


def test_one_layer_is_its_part_of_all_layers() -> None:
    windows = np.random.default_rng(0).integers(0, 99_092, (5000, 4)).astype(np.int32)
    both = hash_windows(windows, REAL)
    assert (hash_windows(windows, REAL, [1])[:, 0] == both[:, 1]).all()
    assert (hash_windows(windows, REAL, [1, 0]) == both[:, ::-1]).all()


def test_every_id_lies_in_its_bucket() -> None:
    windows = np.random.default_rng(0).integers(0, 99_092, (5000, 4)).astype(np.int32)
    ids, primes = hash_windows(windows, REAL), REAL.primes.reshape(2, 24)
    assert ((ids >= REAL.offsets) & (ids < REAL.offsets + primes)).all()


@pytest.mark.parametrize("bad", [-1, 16, 2**31, 2**63 - 1, -(2**63)])
def test_an_id_outside_the_map_is_refused_by_index_and_value(bad: int) -> None:
    with pytest.raises(
        TokenOutOfRange, match=rf"token_ids\[1\]: expected 0\.\.15, got {bad}"
    ) as got:
        compress(np.array([5, bad, 9]), None, TABLES)
    assert (got.value.got, got.value.details["index"]) == (bad, 1)


def test_an_unsigned_id_above_int64_is_refused_by_its_value() -> None:
    with pytest.raises(TokenOutOfRange, match="18446744073709551615"):
        compress(np.array([2**64 - 1], dtype=np.uint64), None, TABLES)


def test_the_last_id_is_accepted() -> None:
    assert compress(np.array([15]), None, TABLES).tolist() == [15]


def test_ids_of_dead_positions_are_not_read() -> None:
    ids = np.array([5, -7, 2**62])
    mask = np.array([True, False, False])
    assert compress(ids, mask, TABLES).tolist() == [5, DEAD, DEAD]


def test_a_map_is_applied_before_the_hash() -> None:
    tables = EngramHashTables.derive((1,), 4, 2, 100, [0, 1, 1, 0], 2)
    assert compress(np.array([3, 2, 1, 0]), None, tables).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (np.zeros((2, 2), np.int64), None),
        (np.zeros(2), None),
        (np.zeros(2, np.bool_), None),
        (np.zeros(2, np.int64), np.ones(3, np.bool_)),
        (np.zeros(2, np.int64), np.ones(2, np.uint8)),
    ],
)
def test_ids_and_masks_of_another_form_are_refused(ids: Any, mask: Any) -> None:
    with pytest.raises(BadTensor):
        compress(ids, mask, TABLES)


def test_a_refused_push_changes_nothing() -> None:
    hasher = EngramHasher(TABLES, 5)
    hasher.hash(IDS[:2], 0)
    with pytest.raises(TokenOutOfRange):
        hasher.hash(np.array([9, 9, -1]), 1)
    assert hasher.length == 2
    assert toy_rows(hasher, IDS[2:], 2) == TOY["rows"][2:]


@pytest.mark.parametrize("position", [-1, 3, 2**40])
def test_a_gap_is_refused_with_the_true_length(position: int) -> None:
    hasher = EngramHasher(TABLES, 5)
    hasher.hash(IDS[:2], 0)
    with pytest.raises(Gap) as got:
        hasher.hash(IDS[:1], position)
    assert got.value.details["length"] == 2


def test_positions_beyond_the_last_are_refused() -> None:
    with pytest.raises(TooManyPositions, match="6 positions: expected at most 5"):
        EngramHasher(TABLES, 5).hash(np.zeros(6, np.int64), 0)


def test_no_tokens_give_no_rows() -> None:
    hasher = EngramHasher(TABLES, 5)
    assert hasher.hash(np.array([], dtype=np.int64), 0).shape == (0, 2, 6)
    assert compress(np.array([]), None, TABLES).shape == (0,)
    assert toy_rows(hasher, IDS, 0) == TOY["rows"]
