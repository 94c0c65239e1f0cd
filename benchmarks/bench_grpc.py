"""A step on a gRPC stream beside a bare grpc.aio echo stream of the same bytes, in turns.

A residual whose kv is in the store, on one stream of one session; both ends' messages are bytes
made beforehand, so that both sides of the ratio have the same client. Then what the service tells
of its own work (check, queue, gate) in the same calls. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import ml_dtypes
import numpy as np

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.proto import engram_pb2_grpc, message_options
from engram_core.tools.synth import synth

ROOT = Path(__file__).resolve().parents[1]

METHOD = "/engram.v1.Engram/Stream"
TOKENS = (5, 80, 512)
"""At the demo's dim of 1,024: 40 KB, 640 KB and 4 MB."""


@dataclass(frozen=True)
class Row:
    """Times in ms of one size. work: what the service tells of its stages, a step; door_ratio: of a
    step without its work to an echo."""

    num_bytes: int
    rounds: int
    echo_p50: float
    echo_p95: float
    step_p50: float
    step_p95: float
    ratio: float
    work: float
    door_ratio: float


class Line:
    """One stream of bytes: send one message, wait for its answer."""

    def __init__(self, url: str, method: str) -> None:
        self.channel = grpc.insecure_channel(url.partition("://")[2], options=message_options(-1))
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self.channel.stream_stream(method)(iter(self._outbox.get, None))

    def ask(self, message: bytes) -> bytes:
        self._outbox.put(message)
        answer: bytes = next(self._answers)
        return answer

    def timed(self, message: bytes) -> float:
        """Ask; the time in ms."""
        begin = time.perf_counter()
        self.ask(message)
        return (time.perf_counter() - begin) * 1e3

    def close(self) -> None:
        self._outbox.put(None)
        self.channel.close()


@contextmanager
def process(num_urls: int, *arguments: str) -> Iterator[dict[str, str]]:
    """Run a Python process that says `ready URL`; its URLs by scheme."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        cwd=ROOT,
    ) as running:  # fmt: skip
        try:
            assert running.stdout is not None
            lines = (line.split()[1] for line in running.stdout if line.startswith("ready "))
            yield {url.partition("://")[0]: url for url in islice(lines, num_urls)}
        finally:
            running.terminate()
            running.communicate()


def tensor(array: Any) -> pb.Tensor:
    view = wire.as_view(array)
    return pb.Tensor(dtype=view.dtype, shape=view.shape, data=bytes(view.data))


def step_message(channel: grpc.Channel, num_tokens: int) -> bytes:
    """Push ids to a new session; the step that applies a residual to them."""
    stub = engram_pb2_grpc.EngramStub(channel)
    geometry = json.loads(stub.GetInfo(pb.GetInfoRequest()).json)["geometry"]
    session_id = stub.OpenSession(pb.OpenSessionRequest()).session_id
    ids = np.random.default_rng(0).integers(1, 1000, num_tokens)
    stub.Push(pb.PushRequest(session_id=session_id, position=0, token_ids=ids, ahead=False))
    shape = (num_tokens, geometry["hc_mult"], geometry["dim"])
    residual = np.random.default_rng(1).standard_normal(shape, np.float32)
    message = pb.StepRequest(
        request_id=1,
        output=pb.OUTPUT_RESIDUAL,
        layers=[1],
        tensors={
            "count": tensor(np.array([num_tokens], np.int32)),
            "position": tensor(np.array([0], np.int64)),
            "session_id": tensor(np.array([session_id], np.int64)),
            "residual": tensor(residual.astype(ml_dtypes.bfloat16)),
        },
    )
    return bytes(message.SerializeToString())


def work_ms(url: str) -> float:
    """What the service has told of its stages so far, in ms."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    told = re.findall(r'^engram_stage_seconds_sum\{stage="(\w+)"\} (\S+)$', text, re.M)
    return 1e3 * sum(float(seconds) for stage, seconds in told if stage != "send")


def bench(echo_url: str, urls: dict[str, str], num_tokens: int, seconds: float) -> Row:
    """Time one size, an echo and a step in turns."""
    echo, step = Line(echo_url, "/Echo/Stream"), Line(urls["grpc"], METHOD)
    message = step_message(step.channel, num_tokens)
    for _ in range(30):
        assert pb.StepReply.FromString(step.ask(message)).problem.code == ""
        echo.ask(message)
    before = work_ms(urls["http"])
    echoes, steps = [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        echoes.append(echo.timed(message))
        steps.append(step.timed(message))
    work = (work_ms(urls["http"]) - before) / len(steps)
    echo.close()
    step.close()
    return Row(
        num_bytes=len(message),
        rounds=len(steps),
        echo_p50=median(echoes),
        echo_p95=_p95(echoes),
        step_p50=median(steps),
        step_p95=_p95(steps),
        ratio=median(steps) / median(echoes),
        work=work,
        door_ratio=(median(steps) - work) / median(echoes),
    )


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def print_rows(rows: list[Row]) -> None:
    print("ms; work: check, queue and gate as the service tells them; without: ratio without it")
    print(f"{'KB':>7}{'rounds':>8}{'echo p50':>10}{'p95':>8}{'step p50':>10}{'p95':>8}"
          f"{'ratio':>7}{'work':>8}{'without':>9}")  # fmt: skip
    for row in rows:
        print(
            f"{row.num_bytes / 1e3:>7.0f}{row.rounds:>8}{row.echo_p50:>10.3f}{row.echo_p95:>8.3f}"
            f"{row.step_p50:>10.3f}{row.step_p95:>8.3f}{row.ratio:>7.2f}{row.work:>8.3f}"
            f"{row.door_ratio:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of one size")
    seconds = parser.parse_args().seconds
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name:
        path = synth(Path(name) / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1).path
        flags = ("-m", "service", "serve", str(path), "--port", "0", "--grpc-port", "0")
        echo = str(ROOT / "benchmarks" / "grpc_echo.py")
        with process(2, *flags) as urls, process(1, echo) as echoing:
            rows = [bench(echoing["grpc"], urls, count, seconds) for count in TOKENS]
    print_rows(rows)
    print(f"{os.cpu_count()} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    record = {
        "bench": "grpc",
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
