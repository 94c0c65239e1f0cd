"""Time the reference backend's layer at the true sizes: `python benchmarks/bench_reference.py`.

Prints a table and one JSON line. The peer of the same run is torch's own `linear` on the same
`wkv`; the layer adds hash, gather, dequantisation, kv slots and gate. The table is small (its rows
come from memory), everything else has the true size; `wkv` (315 MB) is colder than any cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import torch

from engram_core.backends.reference import ReferenceBackend
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.quant import row_format
from engram_core.tables import HostTable
from engram_core.weights import EngramLayerWeights

TOKENS = (1, 16, 64, 512)
RUNS = 15


def make_backend(encoding: str) -> ReferenceBackend:
    """One layer, dim 5120, four streams, rows of 256; random rows and weights."""
    tables = EngramHashTables.derive((1,), 4, 8, 20_000, np.arange(99_092), 2)
    sizes = Geometry((1,), 4, 8, 256, 5120, 4, 1e-20, tables.table_rows)
    row_bytes = row_format(encoding).row_bytes(256)
    rows = np.random.default_rng(0).integers(0, 256, (sizes.table_rows[0], row_bytes), np.uint8)
    if encoding == "Q2_K":
        rows[:, 80:] = np.array([0.01, 0.02], dtype="<f2").view(np.uint8)
    wkv = torch.randn((sizes.out_features, sizes.in_features)) * sizes.in_features**-0.5
    weights = EngramLayerWeights(1, wkv.to(torch.bfloat16), torch.ones((4, 5120)), False)
    table = HostTable(encoding, 256, [rows])
    return ReferenceBackend(sizes, tables, [table], [weights], num_slots=max(TOKENS))


def best_ms(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Shortest of RUNS runs of each, in turns, so that a busy machine is busy for all of them."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(RUNS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def time_layer(backend: ReferenceBackend, num_tokens: int) -> dict[str, float]:
    """Milliseconds of torch's linear, of kv (hash to slots), of the gate, and of the layer."""
    generator = np.random.default_rng(num_tokens)
    windows = generator.integers(0, 99_092, (num_tokens, 4)).astype(np.int32)
    slots, dead = np.arange(num_tokens), np.zeros(num_tokens, dtype=np.bool_)
    residual = torch.randn((num_tokens, 4, 5120)).to(torch.bfloat16)
    wkv = backend._projections[0].wkv
    x = torch.randn((num_tokens, 6144)).to(wkv.dtype)

    def linear() -> None:
        torch.nn.functional.linear(x, wkv)

    def project() -> None:
        backend.project(0, slots, windows=windows)

    def gate() -> None:
        backend.gate(0, slots, dead, residual, residual)

    def layer() -> None:
        project()
        gate()

    times = best_ms({"linear": linear, "kv": project, "gate": gate, "layer": layer})
    return times | {"ratio": times["layer"] / times["linear"]}


def main() -> None:
    """Print the table and the JSON line."""
    backend = make_backend("Q2_K")
    start = time.perf_counter()
    backend.self_check()
    checked_s = time.perf_counter() - start
    results = {count: time_layer(backend, count) for count in TOKENS}
    print(f"{torch.get_num_threads()} threads, {backend.numerics['wkv']}; ms, best of {RUNS}")
    print("tokens   linear       kv     gate    layer   layer / linear")
    for count, t in results.items():
        parts = "  ".join(f"{t[name]:7.2f}" for name in ("linear", "kv", "gate", "layer"))
        print(f"{count:6}  {parts}   {t['ratio']:6.2f}")
    print(f"self-check of the whole wkv: {checked_s:.2f} s")
    print(json.dumps({"bench": "reference", "ms": results, "self_check_s": checked_s}))


if __name__ == "__main__":
    main()
