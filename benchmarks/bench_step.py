"""A model runner's steps against a real server process: time by stage, hit ratio, bytes.

B sequences of a real text, started at different places, both layers: one decoded token each, or a
verify block of 6 of which 3 are accepted, per output, over TCP and a Unix socket. Every row has an
API key of its own, so its first pass finds an empty store (`cold`); the same positions are then
replayed (`p50`, `p95`). A step of output residual is a runner's three calls: ids pushed, then one
residual a layer. After the table: 256 pushes as JSON beside one step, and what control costs
(`step_control.py`). Prints tables and one JSON line; `--quick` takes less than 30 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from recording import Recording
from served import ROOT, Counters, Served, hit_ratio, serving
from step_control import control, print_control
from tokenizers import Tokenizer

from engram_client import EngramClient, Segment
from engram_core.tools.presets import tokenizer_json
from engram_core.tools.synth import synth

LAYERS = (1, 14)
OUTPUTS = ("none", "residual", "kv", "rows", "rows stored", "hash_ids")
PROMPT, BLOCK, ACCEPTED = 4, 6, 3
SHAPES = tuple((sequences, block) for sequences in (1, 16, 64, 256) for block in (1, BLOCK))
QUICK_SHAPES = ((16, BLOCK), (256, 1))
STEPS_OF_A_PASS = {1: 24, 16: 8, 64: 3, 256: 2}
JSON_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One output of one shape over one transport. Times in ms, bytes of a step; hits: share of
    token-layers found in the store (cold: in the first pass), None where none was looked for."""

    transport: str
    output: str
    sequences: int
    block: int
    steps: int
    cold_ms: float | None
    p50_ms: float
    p95_ms: float
    server_cpu_ms: float
    cold_hits: float | None
    hits: float | None
    bytes_up: int
    bytes_down: int
    stages_p50_ms: dict[str, float]
    stages_p95_ms: dict[str, float]


class Runner:
    """B sequences and the step they make. text: token ids, read as if it had no end."""

    def __init__(
        self, client: Recording, text: Sequence[int], sequences: int, block: int, output: str
    ) -> None:
        info = client.info()["geometry"]
        self._client, self._output, self._block = client, output, block
        self._advance = ACCEPTED if block > 1 else 1
        self._sessions = [client.open_session() for _ in range(sequences)]
        self._texts = [
            [*text[i * len(text) // sequences :], *text[: i * len(text) // sequences]]
            for i in range(sequences)
        ]
        self._position = 0
        shape = (sequences * block, int(info["hc_mult"]), int(info["dim"]))
        self._residual = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._residual = self._residual.astype(ml_dtypes.bfloat16)
        self._out = np.empty_like(self._residual)

    def begin(self) -> None:
        """Put every sequence back to its prompt."""
        self._position = 0
        ids = [text[:PROMPT] for text in self._texts]
        self._client.step(self._segments(ids), LAYERS, "none", truncate=True, ahead=False)
        self._position = PROMPT

    @property
    def pass_steps(self) -> int:
        """Steps of one pass over the text."""
        return STEPS_OF_A_PASS[len(self._sessions)]

    def timed_step(self) -> float:
        """Make the next step; its time in ms."""
        ids = self._draft()
        return _ms(lambda: self._step(ids))

    def _draft(self) -> list[list[int]]:
        """The ids of the next step; of a block only the first half is right."""
        right = [text[self._position : self._position + self._advance] for text in self._texts]
        wrong = self._block - self._advance
        tails = [text[len(text) - wrong :] for text in self._texts]
        return [ids + tail for ids, tail in zip(right, tails, strict=True)]

    def _step(self, ids: list[list[int]]) -> None:
        """Push a block a sequence, read both layers, go on."""
        truncate, segments = self._block > 1, self._segments(ids)
        if self._output == "residual":
            self._client.step(segments, LAYERS, "none", truncate=truncate)
            held = [segment._replace(token_ids=None, count=self._block) for segment in segments]
            for layer in LAYERS:
                self._client.step(held, (layer,), "residual", self._out, residual=self._residual)
        else:
            name, _, stored = self._output.partition(" ")
            self._client.step(segments, LAYERS, name, truncate=truncate, stored=bool(stored))
        self._position += self._advance

    def _segments(self, ids: list[list[int]]) -> list[Segment]:
        return [
            Segment(session, token_ids=block, position=self._position)
            for session, block in zip(self._sessions, ids, strict=True)
        ]


def bench(
    served: Served,
    keys: Sequence[str],
    text: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    seconds: float,
) -> list[Row]:
    """Run every shape and output. keys: one a row of both transports; seconds: of one replay."""
    rows = []
    fresh = iter(keys)
    for sequences, block in shapes:
        for output in OUTPUTS:
            key = next(fresh)
            for transport, url in sorted(served.urls.items()):
                with Recording(url, api_key=key, owner=f"{transport}-{key}") as client:
                    runner = Runner(client, text, sequences, block, output)
                    counters = Counters(served)
                    row = _row(client, runner, counters, seconds, is_cold=transport == "tcp")
                    rows.append(Row(transport, output, sequences, block, **row))
                    client.close_owner(f"{transport}-{key}")
    return rows


def _row(
    client: Recording, runner: Runner, counters: Counters, seconds: float, *, is_cold: bool
) -> dict[str, Any]:
    runner.begin()
    counters.look()
    # Over the second transport all of it is found already.
    cold = [runner.timed_step() for _ in range(runner.pass_steps)]
    first = counters.look()
    times: list[float] = []
    stages: defaultdict[str, list[float]] = defaultdict(list)
    totals: defaultdict[str, float] = defaultdict(float)
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        runner.begin()
        counters.look()
        for _ in range(runner.pass_steps):
            client.stages.clear()
            times.append(runner.timed_step())
            for name, seconds_of in client.stages.items():
                stages[name].append(sum(seconds_of) * 1e3)
        for name, value in counters.look().items():
            totals[name] += value
    return {
        "steps": len(times),
        "cold_ms": median(cold) if is_cold else None,
        "p50_ms": median(times),
        "p95_ms": _p95(times),
        "server_cpu_ms": totals["cpu_s"] / len(times) * 1e3,
        "cold_hits": hit_ratio(first) if is_cold else None,
        "hits": hit_ratio(totals),
        "bytes_up": round(totals["received_bytes"] / len(times)),
        "bytes_down": round(totals["sent_bytes"] / len(times)),
        "stages_p50_ms": {name: round(median(values), 3) for name, values in stages.items()},
        "stages_p95_ms": {name: round(_p95(values), 3) for name, values in stages.items()},
    }


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def bench_json(served: Served, key: str, text: Sequence[int]) -> dict[str, float]:
    """256 sequences, one token each: 256 pushes as JSON beside one step, in turns."""
    with EngramClient(served.urls["tcp"], key, "json") as client:
        sessions = [client.open_session() for _ in range(256)]

        def push() -> None:
            for session, token in zip(sessions, text, strict=False):
                session.push([token], ahead=False)

        def step() -> None:
            segments = [
                Segment(session, token_ids=[token])
                for session, token in zip(sessions, text, strict=False)
            ]
            client.step(segments, LAYERS, "none", ahead=False)

        pushed, stepped = [], []
        for _ in range(JSON_ROUNDS):
            pushed.append(_ms(push))
            stepped.append(min(_ms(step) for _ in range(3)))
        client.close_owner("json")
    ratios = [one / other for one, other in zip(pushed, stepped, strict=True)]
    return {"json_ms": median(pushed), "step_ms": median(stepped), "ratio": median(ratios)}


def _ms(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line a row, its largest stages last."""
    print("ms of a step, both layers; hits: share of token-layers found in the store")
    print(
        f"{'B':>4}{'ids':>4} {'output':<12}{'over':<5}{'steps':>6}{'cold':>9}{'p50':>8}{'p95':>8}"
        f"{'cpu':>7}{'hits cold':>10}{'hits':>6}{'KB up':>9}{'KB down':>9}  stages p50/p95"
    )
    for row in rows:
        largest = sorted(row.stages_p50_ms.items(), key=lambda item: -item[1])[:4]
        stages = ", ".join(f"{n} {ms:.2f}/{row.stages_p95_ms[n]:.2f}" for n, ms in largest)
        print(
            f"{row.sequences:>4}{row.block:>4} {row.output:<12}{row.transport:<5}{row.steps:>6}"
            f"{_text(row.cold_ms, 1):>9}{row.p50_ms:>8.2f}{row.p95_ms:>8.2f}"
            f"{row.server_cpu_ms:>7.2f}{_text(row.cold_hits, 2):>10}{_text(row.hits, 2):>6}"
            f"{row.bytes_up / 1e3:>9.1f}{row.bytes_down / 1e3:>9.1f}  {stages}"
        )


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="less of everything, below 30 s")
    quick = parser.parse_args().quick
    shapes = QUICK_SHAPES if quick else SHAPES
    began, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name:
        folder = Path(name)
        keys = [f"key-{i}" for i in range(len(shapes) * len(OUTPUTS) + 1)]
        keys_file = folder / "keys"
        keys_file.write_text(
            "".join(f"{key} use {hashlib.sha256(key.encode()).hexdigest()}\n" for key in keys)
        )
        path = synth(folder / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1).path
        tokenizer = Tokenizer.from_buffer(tokenizer_json("demo", None))
        text = tokenizer.encode((ROOT / "service" / "demo_text.txt").read_text("utf-8")).ids
        with serving(path, folder / "socket", "--keys-file", str(keys_file)) as served:
            rows = bench(served, keys, text, shapes, 0.05 if quick else 0.5)
            beside = bench_json(served, keys[-1], text)
        print_rows(rows)
        print(
            f"\n256 pushes as JSON: {beside['json_ms']:.1f} ms; as one step: "
            f"{beside['step_ms']:.2f} ms; ratio {beside['ratio']:.0f}"
        )
        costs = control(folder, 50 if quick else 500)
        print_control(costs)
    seconds = time.perf_counter() - began
    print(f"\n{seconds:.0f} s; {os.cpu_count()} cores, load {load:.1f} before, "
          f"{os.getloadavg()[0]:.1f} after")  # fmt: skip
    record = {
        "bench": "step",
        "quick": quick,
        "text_tokens": len(text),
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "rows": [asdict(row) for row in rows],
        "json_pushes": beside,
        "control": {**costs, "end_to_end": [asdict(row) for row in costs["end_to_end"]]},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
