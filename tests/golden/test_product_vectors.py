"""The product against the papers' vectors, by bits."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from engram_core.geometry import EngramHashTables
from engram_core.hashing import DEAD, EngramHasher, block, compress, hash_windows
from engram_core.quant import requantize, row_format, to_bf16
from engram_core.token_map import token_map_from_tokenizer
from tests.golden.test_oracle_vectors import SMALL, TOY, V41, golden, tokenizer_json


def identity_tables(
    layers: list[int], ngram: int, heads: int, base: int, size: int, pad: int
) -> Any:
    token_map = np.arange(size, dtype=np.int32)
    return EngramHashTables.derive(layers, ngram, heads, base, token_map, pad)


def hash_all(tables: EngramHashTables, compressed: list[int]) -> np.ndarray[Any, Any]:
    """Rows of a sequence of compressed ids (the token map is the identity)."""
    alive = np.array(compressed) != DEAD
    ids = np.where(alive, compressed, 0)
    return EngramHasher(tables, 64).hash(ids, 0, alive)


@pytest.fixture(scope="module")
def v41() -> EngramHashTables:
    return identity_tables([1, 14], 4, 8, V41["base"], V41["compressed_vocab_size"], 2)


def test_constants_of_the_true_geometry(v41: EngramHashTables) -> None:
    assert v41.multipliers.tolist() == V41["multipliers"]
    assert v41.primes.tolist() == V41["primes"]
    assert v41.offsets.tolist() == V41["offsets"]
    assert list(v41.table_rows) == V41["row_totals"]


@pytest.mark.parametrize("case", V41["hash"].values(), ids=V41["hash"])
def test_rows_of_the_true_geometry(case: dict[str, Any], v41: EngramHashTables) -> None:
    rows = hash_all(v41, case["compressed_ids"])
    assert rows.tolist() == case["rows"]
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == case["sha256_i64le"]


@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("source", "wrap")])
def test_rows_of_small_geometries(name: str) -> None:
    case = SMALL[name]
    tables = identity_tables(
        case["layer_ids"],
        case["max_ngram"],
        case["n_heads"],
        case["engram_vocab_size"],
        case["compressed_vocab_size"],
        case["pad_compressed"],
    )
    assert tables.multipliers.tolist() == case["multipliers"]
    assert tables.primes.tolist() == case["primes"]
    assert hash_all(tables, [0, 1, 2, 3, 4]).tolist() == case["hash_of_0..4"]


def test_hash_wraps_and_takes_the_floor_remainder() -> None:
    case = SMALL["wrap"]
    tables = identity_tables([1], 4, 2, 5, 16, case["pad"])
    primes = np.array(case["primes"], dtype=np.int64)
    flat = primes.reshape(1, -1)
    offsets = np.cumsum(flat, axis=1) - flat
    for name, value in (
        ("multipliers", np.array(case["multipliers"], dtype=np.int64)),
        ("primes", primes),
        ("offsets", offsets),
    ):
        object.__setattr__(tables, name, value)
    assert hash_all(tables, case["compressed_ids"]).tolist() == case["rows"]


def test_toy_of_the_field_reports() -> None:
    tables = identity_tables([1, 14], 4, 2, 100, 16, 2)
    assert hash_all(tables, TOY["compressed_ids"])[:, 0].tolist() == TOY["rows"]
    hasher = EngramHasher(tables, 16)
    hasher.hash(np.array([5, 7, 9, 11, 3]), 0)
    after = hasher.hash(np.array([3]), 3)
    assert after[0, 0].tolist() == TOY["after_rewind_to_3_append_3"]
    assert hash_all(tables, [5, 7, 9, 8])[-1, 0].tolist() == TOY["after_retry_of_9_then_8"]


def test_token_map_of_the_real_tokenizer_has_the_published_digest() -> None:
    token_map = token_map_from_tokenizer(tokenizer_json())
    digest = hashlib.sha256(np.asarray(token_map, "<i8").tobytes()).hexdigest()
    assert (digest, len(token_map)) == (V41["token_map"]["sha256_int64"], 129_280)


def test_hash_from_raw_tokens_has_the_published_digests() -> None:
    token_map = token_map_from_tokenizer(tokenizer_json())
    tables = EngramHashTables.derive([1, 14], 4, 8, V41["base"], token_map, 2)
    rows = EngramHasher(tables, 4).hash(np.array([0, 3]), 0).astype("<i8")
    published = V41["published_digest_check"]
    assert hashlib.sha256(rows.tobytes()).hexdigest() == published["expected_all"]
    first = hashlib.sha256(np.ascontiguousarray(rows[:, 0]).tobytes()).hexdigest()
    assert first == published["expected_layer1"]


def test_windows_are_newest_first_and_blocking_is_sticky() -> None:
    raw = np.array([[7, DEAD, 5, 4], [DEAD, 7, 6, 5], [8, 7, 6, DEAD], [2, 2, DEAD, 1]], np.int32)
    pad = 2
    assert block(raw, pad).tolist() == [[7, 2, 2, 2], [2, 2, 2, 2], [8, 7, 6, 2], [2, 2, 2, 2]]
    assert hash_windows(block(raw, pad), identity_tables([1], 4, 2, 5, 16, 2)).shape == (4, 1, 6)


def test_dead_id_is_not_read(v41: EngramHashTables) -> None:
    ids = np.array([5, 2**62, -1])
    assert compress(ids, np.array([True, False, False]), v41).tolist() == [5, DEAD, DEAD]


def test_q2_k_block_of_the_papers() -> None:
    block_bytes = golden("formats")["q2_k_block"]
    raw = np.frombuffer(bytes.fromhex(block_bytes["hex"]), np.uint8).reshape(1, 84)
    values = row_format("Q2_K").dequantize(raw)
    assert values[0].tolist() == block_bytes["y_f32"]
    bits = to_bf16(values)[0].view(torch.int16).numpy().view(np.uint16)
    assert bits.tolist() == block_bytes["y_bf16_bits"]


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K"])
def test_k_quant_patterns_of_the_field_reports(name: str) -> None:
    """Two patterned quant blocks in one row: the second is decoded too."""
    codes = [(37 * i + 11) & 255 for i in range(64)]
    if name == "Q2_K":
        scales = [j | ((15 - j) << 4) for j in range(16)]
        raw = bytes(scales + codes) + np.array([0.5, 0.25], "<f2").tobytes()
    else:
        masks = [(73 * i + 5) & 255 for i in range(32)]
        scales = [(29 * i + 200) & 255 for i in range(12)]
        raw = bytes(masks + codes + scales) + np.array([0.125], "<f2").tobytes()
    pattern = golden("formats")[f"{name.lower()}_pattern"]
    row = np.frombuffer(raw * 2, np.uint8).reshape(1, -1)
    for values in row_format(name).dequantize(row).reshape(2, 256):
        assert {i: values[int(i)] for i in pattern["values"]} == pattern["values"]
        assert values.sum() == pattern["sum"]


def test_fp8_row_of_every_code_and_scale() -> None:
    codes = np.arange(256, dtype=np.uint8)
    formats = golden("formats")
    for scale, expected in formats["e8m0"].items():
        row = np.concatenate([codes, np.full(8, int(scale), np.uint8)])[None]
        values = row_format("E4M3_E8M0_32").dequantize(row)[0]
        for code, value in formats["e4m3"].items():
            with np.errstate(over="ignore"):
                product = np.float32(value) * np.float32(expected)
            assert values[int(code, 16)].tobytes() == product.tobytes(), (scale, code)
    assert np.isnan(values[[0x7F, 0xFF]]).all()


def test_each_group_has_its_own_scale() -> None:
    row = np.concatenate([np.full(256, 0x38), np.arange(120, 128)]).astype(np.uint8)[None]
    values = row_format("E4M3_E8M0_32").dequantize(row)[0].reshape(8, 32)
    assert values.tolist() == [[2.0 ** (i - 7)] * 32 for i in range(8)]


def test_scale_255_makes_the_group_nan() -> None:
    row = np.concatenate([np.full(32, 0x38), [255]]).astype(np.uint8)[None]
    assert np.isnan(row_format("E4M3_E8M0_32").dequantize(row)).all()


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    values = np.array([-2.697265625, 1.00390625, 1.01171875, 1e-39], dtype=np.float32)
    assert to_bf16(values).tolist()[:3] == [-2.703125, 1.0, 1.015625]
    assert to_bf16(values)[3] != 0


def test_scale_of_the_wkv_input() -> None:
    """The smallest code beside a group's amax survives; half of it rounds to nothing."""
    for amax, scale in golden("formats")["act_scale"].items():
        value = torch.tensor(float(amax)).bfloat16()
        if float(value) != float(amax):
            continue  # the group's amax must be a bfloat16
        x = torch.zeros(1, 32, dtype=torch.bfloat16)
        x[0, 0], x[0, 1], x[0, 2] = value, scale * 2.0**-9, scale * 2.0**-10 * 0.99
        quantised = requantize(x).float()
        assert (quantised[0, 1], quantised[0, 2]) == (scale * 2.0**-9, 0), amax
