"""Control work: check, append and window S segments; the whole step; the kv store's index.

Prints a table and one JSON line: medians of `REPEATS` runs. Reference figure of issue 2: 0.11 ms to
check, append and window 256 one-token segments; issue 3 allows 1 ms of control for 256 segments.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from engram_core.engine import Engine
from engram_core.engine_types import EngineLimits, OpenRequest, Output, Segments, StepRequest
from engram_core.fence import Asked
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import block, compress
from engram_core.host_memory import PlainMemory
from engram_core.kv_store import KvStore
from engram_core.registry import Opening
from engram_core.sessions import SessionPool

REPEATS = 300
VOCAB = 99_092
"""Compressed ids of the true model; the token map is the identity here, which costs the same."""


@dataclass(frozen=True)
class Figure:
    """One line of the table. us: of one call"""

    name: str
    segments: int
    tokens: int
    us: float


class NoBackend:
    """A backend whose work takes no time: what is left is ours."""

    name = "none"
    numerics: dict[str, str] = {}  # noqa: RUF012
    num_slots = 65_536
    encodings = ("BF16", "BF16")
    row_bytes = (512, 512)
    host_memory = PlainMemory()

    def __init__(self, tables: EngramHashTables) -> None:
        self.serving = threading.Lock()
        self.hash_tables = tables
        self.geometry = Geometry((1, 14), 4, 8, 256, 8, 4, 1e-20, tables.table_rows)

    def rows(self, *_: object, **__: object) -> None: ...
    def project(self, *_: object, **__: object) -> None: ...
    def read_kv(self, *_: object, **__: object) -> None: ...
    def gate(self, *_: object, **__: object) -> None: ...
    def self_check(self) -> None: ...
    def close(self) -> None: ...


def timed(run: Callable[[int], object]) -> float:
    """Median microseconds of run(0), run(1) ..."""
    times = []
    for i in range(REPEATS + 20):
        start = time.perf_counter()
        run(i)
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[20:])


def bench_pool(tables: EngramHashTables, segments: int, count: int) -> Figure:
    """Compress, check, append, window and block."""
    pool = SessionPool(
        EngineLimits(),
        4,
        clock=time.monotonic,
        wall_clock_us=lambda: time.time_ns() // 1000,
    )
    ids = np.array([pool.open("", Opening()).session_id for _ in range(segments)])
    counts, epochs = np.full(segments, count), np.full(segments, -1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, segments * count)

    def run(i: int) -> None:
        asked = Asked(ids, np.full(segments, i * count), counts, epochs)
        pushed = pool.push("", asked, compress(tokens, None, tables))
        block(pool.windows(pushed.rows, asked.position, counts), tables.pad_id)

    return Figure("check, append, window", segments, segments * count, timed(run))


def bench_step(tables: EngramHashTables, segments: int, count: int) -> Figure:
    """A whole step that pushes and applies a residual; the backend's work takes no time."""
    residual = torch.zeros(segments * count, 4, 8, dtype=torch.bfloat16)
    tokens = np.random.default_rng(0).integers(0, VOCAB, segments * count)
    with Engine(NoBackend(tables), EngineLimits()) as engine:
        opened = [engine.open("", OpenRequest()).session_id for _ in range(segments)]
        ids = np.array(opened)

        def run(i: int) -> None:
            source = Segments(
                count=np.full(segments, count, dtype=np.int32),
                position=np.full(segments, i * count, dtype=np.int64),
                session_id=ids,
                token_ids=np.roll(tokens, i),
            )
            request = StepRequest(source, Output.RESIDUAL, (1,), residual)
            engine.step("", request).result()

        return Figure("step, residual, no arithmetic", segments, segments * count, timed(run))


def bench_store(num_tokens: int, *, is_hit: bool) -> Figure:
    """Look a batch up in a full store of 65,536 slots."""
    store = KvStore(65_536)
    rng = np.random.default_rng(0)
    tenants = np.zeros(num_tokens, dtype=np.int64)
    windows = [rng.integers(0, VOCAB, (num_tokens, 4), dtype=np.int32) for _ in range(REPEATS + 20)]
    fill = rng.integers(0, VOCAB, (8192, 4), dtype=np.int32)
    for i in range(8):
        store.release(store.acquire(0, np.zeros(8192, dtype=np.int64), fill + i))

    def run(i: int) -> None:
        store.release(store.acquire(0, tenants, windows[0 if is_hit else i]))

    name = "store, all hits" if is_hit else "store, all misses, evicting"
    return Figure(name, 1, num_tokens, timed(run))


def main() -> None:
    token_map = np.arange(VOCAB)
    tables = EngramHashTables.derive([1, 14], 4, 8, 16_000_000, token_map, 2)
    figures = [
        *(bench_pool(tables, s, c) for s, c in ((1, 1), (256, 1), (256, 6), (1, 2048))),
        *(bench_step(tables, s, c) for s, c in ((1, 1), (256, 1), (256, 6))),
        *(bench_store(n, is_hit=hit) for n in (256, 2048) for hit in (True, False)),
    ]
    print(f"{'':<32}{'segments':>10}{'tokens':>10}{'us':>10}")
    for figure in figures:
        print(f"{figure.name:<32}{figure.segments:>10}{figure.tokens:>10}{figure.us:>10.0f}")
    rows = [figure.__dict__ for figure in figures]
    print(json.dumps({"bench": "sessions", "cpu": platform.processor(), "figures": rows}))


if __name__ == "__main__":
    main()
