"""The loaded layer against the oracle, for every geometry, format and batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_core.backends.base import Backend
from engram_core.checkpoint import open_checkpoint
from engram_core.errors import RowOutOfRange
from engram_core.hashing import EngramHasher, block, hash_windows
from engram_core.loader import load
from tests import oracle
from tests.builders import WORDS, Shape, write_gguf, write_safetensors
from tests.oracle import DEAD, Interval, Oracle, same_bits

SLOTS = 64

CHECKPOINTS: dict[str, Any] = {
    "q2_k": (write_gguf, Shape(head_dim=256), {"table": "Q2_K", "wkv": "Q2_K"}),
    "q2_k-two-blocks": (write_gguf, Shape(head_dim=512), {"table": "Q2_K", "wkv": "F16"}),
    "q8_0": (write_gguf, Shape(), {"table": "Q8_0", "wkv": "Q8_0"}),
    "bf16": (write_gguf, Shape(hc_mult=4), {"table": "BF16", "wkv": "BF16"}),
    "one-stream": (
        write_gguf,
        Shape(hc_mult=1, num_heads=3, max_ngram_size=3, layer_ids=(0, 2, 5), dim=96),
        {"table": "F32", "wkv": "F32"},
    ),
    "bigrams": (write_gguf, Shape(hc_mult=3, max_ngram_size=2), {"table": "F16", "wkv": "F16"}),
    "official": (write_safetensors, Shape(head_dim=64), {}),
    "official-bf16-wkv": (write_safetensors, Shape(), {"wkv": "BF16"}),
    "official-fp8-wkv-f16-rows": (write_safetensors, Shape(head_dim=64), {"table": "F16"}),
    "official-f16-rows": (write_safetensors, Shape(), {"table": "F16", "wkv": "F32"}),
}


class Loaded:
    """A checkpoint twice: by the product, by the oracle."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = open_checkpoint(path)
        self.backend: Backend = load(self.checkpoint, num_slots=SLOTS)
        self.oracle = Oracle.open(path)
        self.geometry = self.checkpoint.geometry

    def kv(self, layer: int, windows: np.ndarray[Any, Any], slots: Any = None) -> torch.Tensor:
        """Project windows and read them back: bfloat16 [T, hc + 1, dim]."""
        slots = np.arange(len(windows)) if slots is None else np.array(slots)
        self.backend.project(layer, slots, windows=windows)
        return self.read(layer, slots, np.zeros(len(slots), dtype=np.bool_))

    def read(self, layer: int, slots: Any, dead: Any) -> torch.Tensor:
        out = torch.empty((len(slots), self.geometry.hc_mult + 1, self.geometry.dim)).bfloat16()
        self.backend.read_kv(layer, slots, dead, out)
        return out


@pytest.fixture(scope="module", params=CHECKPOINTS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    write, shape, options = CHECKPOINTS[request.param]
    folder = tmp_path_factory.mktemp("layer")
    name = "it.gguf" if write is write_gguf else "it"
    made = Loaded(write(folder / name, shape, seed=3, **options))
    yield made
    made.backend.close()


def sequence(seed: int, length: int) -> tuple[list[int], list[bool]]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, len(WORDS), length).tolist()
    return tokens, (rng.random(length) > 0.15).tolist()


TOKENS, ALIVE = sequence(9, 40)


def windows_of(loaded: Loaded) -> np.ndarray[Any, Any]:
    compressed = loaded.oracle.compress(TOKENS, ALIVE)
    return np.array(loaded.oracle.windows(compressed), dtype=np.int32)


def test_hasher_equals_the_oracle(loaded: Loaded) -> None:
    hasher = EngramHasher(loaded.checkpoint.hash_tables, 64)
    got = hasher.hash(np.array(TOKENS), 0, np.array(ALIVE))
    expected = loaded.oracle.hash_ids(loaded.oracle.compress(TOKENS, ALIVE))
    assert np.array_equal(got, expected)


def test_constants_equal_the_oracles(loaded: Loaded) -> None:
    tables, files = loaded.checkpoint.hash_tables, loaded.oracle.files
    assert tables.token_map.tolist() == files.token_map
    assert tables.pad_id == files.pad_id != files.token_map[files.pad_id]
    assert tables.multipliers.tolist() == files.multipliers
    assert tables.primes.tolist() == files.primes
    assert tables.offsets.tolist() == files.offsets
    assert np.float32(loaded.geometry.eps) == np.float32(files.eps) == np.float32(1e-20)


def test_every_row_by_bits(loaded: Loaded) -> None:
    """As bfloat16 and as stored, the last row too; one beyond is refused."""
    for i, layer_id in enumerate(loaded.geometry.layer_ids):
        num_rows = loaded.geometry.table_rows[i]
        ids = np.arange(num_rows).reshape(-1, 1)
        rows = torch.empty((num_rows, 1, loaded.geometry.head_dim), dtype=torch.bfloat16)
        loaded.backend.rows(i, ids, rows, stored=False)
        assert same_bits(rows, loaded.oracle.rows(layer_id, ids))
        width = loaded.backend.row_bytes[i]
        stored = torch.empty((num_rows, 1, width), dtype=torch.uint8)
        loaded.backend.rows(i, ids, stored, stored=True)
        assert torch.equal(stored, torch.from_numpy(loaded.oracle.stored_rows(layer_id, ids)))
        for bad in (num_rows, -1, 2**31, -(2**63)):
            with pytest.raises(RowOutOfRange):
                loaded.backend.rows(i, np.array([[bad]]), rows[:1], stored=False)


def test_disk_serves_the_same_rows(loaded: Loaded) -> None:
    disk = load(loaded.checkpoint, num_slots=1, placement="disk")
    for i, num_rows in enumerate(loaded.geometry.table_rows):
        ids = np.arange(num_rows)[::-1].reshape(-1, 1)
        both = []
        for backend in (loaded.backend, disk):
            out = torch.empty((num_rows, 1, loaded.geometry.head_dim), dtype=torch.bfloat16)
            backend.rows(i, ids, out, stored=False)
            both.append(out)
        assert same_bits(*both)
    disk.close()


def test_kv_lies_within_its_bound(loaded: Loaded) -> None:
    windows = windows_of(loaded)
    compressed = loaded.oracle.compress(TOKENS, ALIVE)
    for i, layer_id in enumerate(loaded.geometry.layer_ids):
        kv = loaded.kv(i, windows)
        rows = loaded.oracle.rows(layer_id, loaded.oracle.layer_hash_ids(layer_id, compressed))
        assert not loaded.oracle.kv_interval(layer_id, rows).outside(kv).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_lies_within_its_interval(loaded: Loaded, dtype: torch.dtype) -> None:
    """Against float64 kv (wide), and against the served kv bits (tight)."""
    windows, dead = windows_of(loaded), ~np.array(ALIVE)
    compressed = loaded.oracle.compress(TOKENS, ALIVE)
    shape = (len(TOKENS), loaded.geometry.hc_mult, loaded.geometry.dim)
    for i, layer_id in enumerate(loaded.geometry.layer_ids):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        kv, out = loaded.kv(i, windows), torch.empty_like(x)
        loaded.backend.gate(i, np.arange(len(x)), dead, x, out)
        rows = loaded.oracle.rows(layer_id, loaded.oracle.layer_hash_ids(layer_id, compressed))
        mask = torch.from_numpy(dead)
        for bound in (loaded.oracle.kv_interval(layer_id, rows), Interval(kv, kv)):
            assert not loaded.oracle.residual_interval(layer_id, x, bound, mask).outside(out).any()
        assert same_bits(out[mask], x[mask])


def test_add_is_never_contracted(loaded: Loaded) -> None:
    """One float32 gate explains all of a stream's elements, by bits: no FMA does."""
    windows = windows_of(loaded)[:12]
    shape = (12, loaded.geometry.hc_mult, loaded.geometry.dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    kv, out, layer_id = loaded.kv(0, windows), torch.empty_like(x), loaded.geometry.layer_ids[0]
    loaded.backend.gate(0, np.arange(12), np.zeros(12, np.bool_), x, out)
    gates = loaded.oracle.gate_interval(layer_id, x, Interval(kv, kv))
    assert oracle.explained_by_one_gate(x, kv[:, -1], gates, out).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e-4, 1e3, 1e8])
def test_residual_of_any_size(loaded: Loaded, scale: float) -> None:
    """eps is 1e-20: a residual of 1e-9 still has its direction."""
    shape = (8, loaded.geometry.hc_mult, loaded.geometry.dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6)) * scale
    kv, out, layer_id = loaded.kv(0, windows_of(loaded)[:8]), torch.empty_like(x), None
    layer_id = loaded.geometry.layer_ids[0]
    alive = np.zeros(8, np.bool_)
    loaded.backend.gate(0, np.arange(8), alive, x, out)
    bound = loaded.oracle.residual_interval(layer_id, x, Interval(kv, kv), torch.from_numpy(alive))
    assert not bound.outside(out).any()


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_zero_residual_takes_the_sign_of_its_zero(loaded: Loaded, sign: float) -> None:
    """dot = +0 gives sigmoid(+0.001): copysign, not sign (which gives 0.5)."""
    kv = loaded.kv(0, windows_of(loaded)[:1])
    x = torch.full((1, loaded.geometry.hc_mult, loaded.geometry.dim), sign)
    out = torch.empty_like(x)
    loaded.backend.gate(0, np.arange(1), np.zeros(1, np.bool_), x, out)
    alive = torch.zeros(1, dtype=torch.bool)
    layer_id = loaded.geometry.layer_ids[0]
    assert same_bits(out, loaded.oracle.apply_reference(layer_id, x, kv, alive))


@given(data=st.data())
def test_a_token_is_the_same_in_any_batch(loaded: Loaded, data: st.DataObject) -> None:
    """kv and residual by bits: alone, and among any mates in any order and slots."""
    layer = data.draw(st.integers(0, loaded.geometry.num_layers - 1))
    order = data.draw(st.permutations(range(40)))[: data.draw(st.integers(2, 40))]
    mates = np.array(order)
    slots = np.array(data.draw(st.permutations(range(SLOTS)))[: len(mates)])
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    one = data.draw(st.integers(0, len(mates) - 1))
    windows = windows_of(loaded)
    together = loaded.kv(layer, windows[mates], slots)
    x = torch.randn(40, loaded.geometry.hc_mult, loaded.geometry.dim).to(dtype)
    dead = np.zeros(len(mates), np.bool_)
    out = torch.empty_like(x[mates])
    loaded.backend.gate(layer, slots, dead, x[mates], out)
    alone = loaded.kv(layer, windows[mates[one : one + 1]], slots[one : one + 1])
    assert same_bits(together[one : one + 1], alone)
    single = torch.empty_like(x[:1])
    loaded.backend.gate(layer, slots[one : one + 1], dead[:1], x[mates[one : one + 1]], single)
    assert same_bits(out[one : one + 1], single)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_bad_residual_stays_in_its_stream(loaded: Loaded, value: float) -> None:
    shape = (5, loaded.geometry.hc_mult, loaded.geometry.dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    loaded.kv(0, windows_of(loaded)[:5])
    slots, dead = np.arange(5), np.zeros(5, np.bool_)
    good, bad = torch.empty_like(x), torch.empty_like(x)
    loaded.backend.gate(0, slots, dead, x, good)
    x[2, 0, 3] = value
    loaded.backend.gate(0, slots, dead, x, bad)
    assert torch.isnan(bad[2, 0]).all()
    good[2, 0], bad[2, 0] = 0, 0
    assert same_bits(bad, good)


def test_dead_position_keeps_nan_payloads(loaded: Loaded) -> None:
    shape = (3, loaded.geometry.hc_mult, loaded.geometry.dim)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    x.view(torch.int16)[1] = 0x7FA5
    out = torch.ones_like(x)
    dead = np.array([False, True, False])
    loaded.kv(0, windows_of(loaded)[:3])
    loaded.backend.gate(0, np.arange(3), dead, x, out)
    assert same_bits(out[1], x[1])
    kv = loaded.read(0, np.arange(3), dead)
    assert same_bits(kv[1, :-1], torch.zeros_like(kv[1, :-1]))
    assert same_bits(kv[1, -1], torch.full_like(kv[1, -1], -0.0))


@given(data=st.data())
def test_hash_of_any_chunking_is_the_oracles(loaded: Loaded, data: st.DataObject) -> None:
    """Chunks, overwrites and cuts in any order: the hash speaks of the ids now held."""
    tables, hasher = loaded.checkpoint.hash_tables, None
    hasher = EngramHasher(tables, 64)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(held)))
        count = data.draw(st.integers(0, 10))
        tokens, alive = sequence(data.draw(st.integers(0, 2**16)), count)
        got = hasher.hash(np.array(tokens, np.int64), position, np.array(alive, np.bool_))
        held = held[:position] + loaded.oracle.compress(tokens, alive)
        assert np.array_equal(got, loaded.oracle.hash_ids(held, position))


@given(raw=st.lists(st.lists(st.integers(-1, 15), min_size=4, max_size=4), max_size=9))
def test_blocking_and_hashing_of_any_window(raw: list[list[int]], loaded: Loaded) -> None:
    ngram = loaded.geometry.max_ngram_size
    ids = np.array(raw, np.int32).reshape(-1, 4)[:, :ngram]
    got = hash_windows(block(ids, loaded.oracle.pad_id), loaded.checkpoint.hash_tables)
    for newest_first, hashed in zip(ids.tolist(), got, strict=True):
        assert np.array_equal(loaded.oracle.hash_ids(newest_first[::-1], ngram - 1)[0], hashed)


def test_dead_is_minus_one() -> None:
    from engram_core.hashing import DEAD as OURS

    assert OURS == DEAD == -1
