"""At the true width of wkv's input (6,144) torch's kernels change with the batch: ours do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram_core.checkpoint import open_checkpoint
from engram_core.loader import load
from tests.builders import WORDS, Shape, write_gguf
from tests.oracle import Interval, Oracle, same_bits

WIDE = Shape(num_heads=8, head_dim=256, dim=320, hc_mult=4, layer_ids=(1,))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return write_gguf(path, WIDE, table="Q2_K", wkv="Q2_K", seed=5)


@pytest.mark.parametrize("threads", [1, 2])
def test_kv_and_residual_of_every_batch_size(wide: Path, threads: int) -> None:
    """Sizes 1..20, 33, 64 and 200: each token as in the batch of 200, by bits, and in bounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        backend, oracle = load(open_checkpoint(wide), num_slots=256), Oracle.open(wide)
        tokens = np.random.default_rng(1).integers(0, len(WORDS), 200).tolist()
        compressed = oracle.compress(tokens)
        windows = np.array(oracle.windows(compressed), np.int32)
        slots, alive = np.arange(200), np.zeros(200, np.bool_)
        x = torch.randn(200, 4, 320, generator=torch.Generator().manual_seed(1))
        backend.project(0, slots, windows=windows)
        kv = torch.empty((200, 5, 320), dtype=torch.bfloat16)
        backend.read_kv(0, slots, alive, kv)
        out = torch.empty_like(x)
        backend.gate(0, slots, alive, x, out)
        rows = oracle.rows(1, oracle.layer_hash_ids(1, compressed))
        bound = oracle.kv_interval(1, rows)
        assert not bound.outside(kv).any()
        dead = torch.from_numpy(alive)
        for interval in (bound, Interval(kv, kv)):
            assert not oracle.residual_interval(1, x, interval, dead).outside(out).any()
        for size in [*range(1, 21), 33, 64]:
            first = 7 * size % (200 - size)
            part = slice(first, first + size)
            backend.project(0, slots[:size], windows=windows[part])
            again, gated = torch.empty_like(kv[:size]), torch.empty_like(x[:size])
            backend.read_kv(0, slots[:size], alive[:size], again)
            backend.gate(0, slots[:size], alive[:size], x[part], gated)
            assert same_bits(again, kv[part]), size
            assert same_bits(gated, out[part]), size
        backend.close()
    finally:
        torch.set_num_threads(before)
