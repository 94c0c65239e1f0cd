"""What each output adds to a runner's step: measured here, and computed for other links.

A runner that knows its ids 0.2 ms before layer 1 and 2 ms before layer 14 asks for what it needs at
once and waits where it needs it; `added` is how much later its step ends than without an Engram.
Residuals exist only when their layer begins, so they wait for the whole exchange; the other outputs
travel while the runner computes. kv is in the store. Demo checkpoint on the CPU, a Python client.

For a link the exchange of the Unix socket is taken for the service's and the client's part, and the
bytes of a model's real geometry go on top of it: an upper bound, since it has moved the demo's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from served import ROOT, serving
from tokenizers import Tokenizer

from engram_client import EngramClient, Segment
from engram_core.tools.presets import tokenizer_json
from engram_core.tools.synth import synth

FIRST, SECOND = 1, 14
LEAD_MS = {FIRST: 0.2, SECOND: 2.0}
"""From the ids to the layer."""
OUTPUTS = ("residual", "kv", "rows", "rows stored", "hash_ids")
BATCHES = (1, 16, 64, 256)
LINKS = {"1 GbE": 0.125, "10 GbE": 1.25, "25 GbE": 3.125, "100 GbE": 12.5}
"""Bytes a nanosecond, as if nothing else were sent."""
PATH_MS = 0.05
"""A packet there and one back through a switch."""
REAL_BYTES = {"residual": (40_960, 40_960), "kv": (0, 51_200), "rows": (0, 12_288),
              "rows stored": (0, 2_016), "hash_ids": (0, 192)}  # fmt: skip
"""Of a token and layer, up and down: dim 5,120, 4 streams, 24 columns of 256 values, Q2_K."""


@dataclass(frozen=True)
class Cost:
    """ms. each: of an exchange of one layer, p50, by layer; added: to the step, p50 and p95."""

    transport: str
    output: str
    sequences: int
    each: dict[int, float]
    added: float
    added_p95: float


class Runner:
    """B sequences that decode a text again and again; after the first time all of it is stored."""

    def __init__(self, url: str, text: Sequence[int], sequences: int, output: str) -> None:
        self._clients = [EngramClient(url, owner=f"outputs-{i}") for i in range(2)]
        self._pool = ThreadPoolExecutor(2)
        self._sessions = [self._clients[0].open_session() for _ in range(sequences)]
        self._text, self._output, self._place = text, output, 0
        info = self._clients[0].info()["geometry"]
        shape = (sequences, int(info["hc_mult"]), int(info["dim"]))
        residual = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._residual = residual.astype(ml_dtypes.bfloat16)
        self._out = np.empty_like(self._residual)

    def close(self) -> None:
        """Close everything."""
        self._pool.shutdown()
        for client in self._clients:
            client.close_owner("outputs-0")
            client.close()

    def step(self) -> tuple[dict[int, float], float]:
        """Decode a token a sequence: ms of each layer's exchange, and what the step took longer."""
        offset = len(self._text) // len(self._sessions)
        pushed = [
            Segment(
                session, [self._text[(i * offset + self._place) % len(self._text)]], self._place
            )
            for i, session in enumerate(self._sessions)
        ]
        held = [Segment(session, position=self._place, count=1) for session in self._sessions]
        self._place = (self._place + 1) % 16
        begun = time.perf_counter()
        run = self._residuals if self._output == "residual" else self._others
        each = run(pushed, held, begun)
        return each, (time.perf_counter() - begun) * 1e3 - LEAD_MS[SECOND]

    def _residuals(
        self, pushed: list[Segment], held: list[Segment], begun: float
    ) -> dict[int, float]:
        push = self._pool.submit(self._push, pushed)
        each, late = {}, 0.0
        for layer in (FIRST, SECOND):
            at = _compute_until(begun, LEAD_MS[layer] + late)
            if layer == FIRST:
                push.result()
            asked = time.perf_counter()
            if len(held) == 1:
                self._sessions[0].apply(layer, self._residual, out=self._out)
            else:
                self._clients[0].step(
                    held, (layer,), "residual", self._out, residual=self._residual
                )
            each[layer] = (time.perf_counter() - asked) * 1e3
            late += (time.perf_counter() - at) * 1e3
        return each

    def _push(self, pushed: list[Segment]) -> None:
        self._clients[0].step(pushed, (FIRST, SECOND), "none", truncate=True)

    def _others(self, pushed: list[Segment], held: list[Segment], begun: float) -> dict[int, float]:
        name, _, stored = self._output.partition(" ")

        def ask(layer: int, pushes: bool) -> float:
            asked = time.perf_counter()
            client, segments = (self._clients[0], pushed) if pushes else (self._clients[1], held)
            client.step(segments, (layer,), name, truncate=pushes, stored=bool(stored))
            return (time.perf_counter() - asked) * 1e3

        def both() -> tuple[Future[float], Future[float]]:
            first = self._pool.submit(ask, FIRST, True)
            return first, self._pool.submit(lambda: (first.result(), ask(SECOND, False))[1])

        found = both()
        each, late = {}, 0.0
        for layer, asked in zip((FIRST, SECOND), found, strict=True):
            at = _compute_until(begun, LEAD_MS[layer] + late)
            each[layer] = asked.result()
            late += (time.perf_counter() - at) * 1e3
        return each


def _compute_until(begun: float, ms: float) -> float:
    """Stand for the runner's own computation; returns the present time."""
    left = begun + ms / 1e3 - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return time.perf_counter()


def measure(url: str, text: Sequence[int], sequences: int, output: str, seconds: float) -> Cost:
    """Steps of one kind, after two passes that fill the store."""
    runner = Runner(url, text, sequences, output)
    try:
        for _ in range(32):
            runner.step()
        steps = [runner.step() for _ in range(8)]
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            steps.append(runner.step())
    finally:
        runner.close()
    added = sorted(added for _, added in steps)
    return Cost(
        "unix" if url.startswith("unix") else "tcp",
        output,
        sequences,
        {layer: round(median(each[layer] for each, _ in steps), 3) for layer in LEAD_MS},
        round(median(added), 3),
        round(added[len(added) * 95 // 100], 3),
    )


def over_link(cost: Cost, bytes_a_ns: float) -> float:
    """ms that an output adds to a step of the real geometry over a link."""
    up, down = (size * cost.sequences / bytes_a_ns / 1e6 for size in REAL_BYTES[cost.output])
    whole = {layer: ms + up + down + PATH_MS for layer, ms in cost.each.items()}
    if cost.output == "residual":
        return sum(whole.values())
    first = max(0.0, whole[FIRST] - LEAD_MS[FIRST])
    # The second layer's bytes come behind the first one's.
    return first + max(0.0, whole[FIRST] + whole[SECOND] - LEAD_MS[SECOND] - first)


def print_costs(costs: Sequence[Cost]) -> None:
    """Print what was measured, and what follows for links."""
    print(
        "ms added to a step, p50 (p95), kv in the store, ids 0.2 ms before layer 1, 2 ms before 14"
    )
    cell: Callable[[Cost], str] = lambda cost: f"{cost.added:.2f} ({cost.added_p95:.2f})"  # noqa: E731
    for transport in ("unix", "tcp"):
        print(f"\n{transport:<6}{'B':>5}", *(f"{output:>16}" for output in OUTPUTS))
        for sequences in BATCHES:
            row = [c for c in costs if (c.transport, c.sequences) == (transport, sequences)]
            if row:
                print(f"{'':<6}{sequences:>5}", *(f"{cell(cost):>16}" for cost in row))
    print("\ncomputed for dim 5,120, 4 streams, 24 columns, Q2_K rows")
    for link, rate in LINKS.items():
        print(f"\n{link:<8}{'B':>5}", *(f"{output:>12}" for output in OUTPUTS))
        for sequences in BATCHES:
            row = [c for c in costs if (c.transport, c.sequences) == ("unix", sequences)]
            if row:
                times = [over_link(cost, rate) for cost in row]
                best = min(times)
                print(f"{'':<8}{sequences:>5}",
                      *(f"{ms:>11.2f}{'*' if ms == best else ' '}" for ms in times))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What each output adds to a runner's step.")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    quick = parser.parse_args().quick
    seconds, batches = (0.2, BATCHES[:2]) if quick else (1.5, BATCHES)
    load = os.getloadavg()[0]
    text = Tokenizer.from_buffer(tokenizer_json("demo", None)).encode(
        (ROOT / "service" / "demo_text.txt").read_text("utf-8")
    ).ids  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name:
        folder = Path(name)
        path = synth(folder / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1).path
        with serving(path, folder / "s") as served:
            costs = [
                measure(url, text, sequences, output, seconds)
                for _, url in sorted(served.urls.items())
                for sequences in batches
                for output in OUTPUTS
            ]
    print_costs(costs)
    print(f"\n{os.cpu_count()} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    record: dict[str, Any] = {"bench": "outputs", "costs": [asdict(cost) for cost in costs]}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
