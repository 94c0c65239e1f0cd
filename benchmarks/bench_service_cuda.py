"""The service on a GPU host: client GPU -> service's GPU -> client GPU, over every socket.

Each call takes turns with a bare echo of the same bytes on the same kind of socket, whose server
copies them to the GPU and back (`gpu_echo.py`). True geometry: the flash preset, a sparse file.
Prints tables and one JSON line. `--preset demo --device cpu` rehearses it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import torch
from bench_service import Turns, quantiles
from served import Served, serving

from engram_client import EngramClient, Segment
from engram_core.tools.synth import synth

HELD = 512
PREFILL = 8192
LENGTH = struct.Struct("<q")
_REGISTERED: list[Any] = []
ON_LANES = (
    "import sys; import service.loading as loading;"
    "loading.TORCH_NEAR_TOKENS = loading.CPU_NEAR_TOKENS = loading.CUDA_NEAR_TOKENS = 0;"
    "from service.cli import main; sys.argv[0] = 'engram'; main()"
)


class Bare:
    """A client of `gpu_echo.py`: device -> pinned -> socket -> pinned -> device."""

    def __init__(self, url: str, device: str, num_bytes: int) -> None:
        self._far = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        self._host = torch.empty(num_bytes + 8, dtype=torch.uint8, pin_memory=device == "cuda")
        self._buffer = self._host.numpy().data
        if url.startswith("unix:"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(url.removeprefix("unix:"))
        else:
            host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()  # type: ignore[union-attr]
            self._socket = socket.create_connection((host, int(port)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        LENGTH.pack_into(self._buffer, 0, num_bytes)

    def __call__(self) -> None:
        self._host[8:].copy_(self._far)
        self._socket.sendall(self._buffer)
        at = 0
        while at < len(self._buffer):
            at += self._socket.recv_into(self._buffer[at:])
        self._far.copy_(self._host[8:])


class BareShared:
    """The same through a region: only its length crosses the socket."""

    def __init__(self, url: str, device: str, num_bytes: int) -> None:
        self._far = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        descriptor = os.memfd_create("echo")
        os.ftruncate(descriptor, 64 << 20)
        memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        if device == "cuda":
            torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
        _REGISTERED.append(memory)  # else the next region may come to lie there
        self._host = torch.from_numpy(memory)[:num_bytes]
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(Path(url.removeprefix("unix:")).with_suffix(".shared")))
        socket.send_fds(self._socket, [b"r"], [descriptor])
        self._message = LENGTH.pack(num_bytes)

    def __call__(self) -> None:
        self._host.copy_(self._far)
        self._socket.sendall(self._message)
        self._socket.recv(8)
        self._far.copy_(self._host)


@contextmanager
def bare_gpu_echo(path: Path, device: str) -> Iterator[Served]:
    served = Served([str(Path(__file__).with_name("gpu_echo.py")), str(path), device])
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def serving_on_lanes(checkpoint: Path, path: Path, *flags: str) -> Iterator[Served]:
    """Serve with all reads on the lanes, none on the loop's thread: an experiment, no setting."""
    more = ["serve", str(checkpoint), "--port", "0", "--uds", str(path), *flags]
    served = Served(["-c", ON_LANES, *more])
    try:
        yield served
    finally:
        served.stop()


class Bench:
    """One service, one echo, and the geometry."""

    def __init__(self, served: Served, echo: Served, device: str, scale: float) -> None:
        self.served, self.echo, self.device, self.scale = served, echo, device, scale
        self._seed = 0
        with EngramClient(served.urls["tcp"]) as client:
            self.info = client.info()
        geometry = self.info["geometry"]
        self.shape = geometry["hc_mult"], geometry["dim"]
        self.layers = tuple(geometry["layer_ids"][:2])
        self.vocabulary = min(90_000, self.info["hash"]["vocab_size"])
        self.ways = {
            "tcp": (served.urls["tcp"], "socket"),
            "unix": (served.urls["unix"], "socket"),
            "shared": (served.urls["unix"], "auto"),
        }

    def residual(self, tokens: int) -> torch.Tensor:
        """On the client's device: bfloat16 [tokens, hc, dim]."""
        return torch.randn((tokens, *self.shape), device=self.device).bfloat16()

    def client(self, way: str) -> EngramClient:
        url, transport = self.ways[way]
        return EngramClient(url, transport=transport)  # type: ignore[arg-type]

    def latency(self) -> list[dict[str, Any]]:
        """kv hit, one connection, GPU to GPU, in turns with the bare echo."""
        found = []
        for way in self.ways:
            with self.client(way) as client:
                session = client.open_session()
                ids = np.random.default_rng(0).integers(0, self.vocabulary, HELD)
                session.push(ids)
                session.kv(self.layers[0], 0, HELD)
                for tokens in (1, 16, 64, 512):
                    x, out = self.residual(tokens), self.residual(tokens)
                    kind = BareShared if way == "shared" else Bare
                    url = self.echo.urls["tcp" if way == "tcp" else "unix"]
                    turns = Turns(
                        echo=kind(url, self.device, x.numel() * 2),
                        apply=partial(session.apply, self.layers[0], x, 0, out=out),
                    )
                    turns.take(int((1500 if tokens < 100 else 150) * self.scale))
                    times = {name: quantiles(each) for name, each in turns.times.items()}
                    beside = turns.beside("apply", "echo")
                    found.append({"way": way, "tokens": tokens, **times, "beside_echo": beside})
        return found

    def one_sequence(self) -> dict[str, Any]:
        """A decode step with a kv miss, host memory: its time by (bare echo + its own compute).

        The compute is the mean that the service's metrics tell of the stages of its steps.
        """
        rng = np.random.default_rng(5)
        x = self.residual(1).cpu()
        echo = Bare(self.echo.urls["tcp"], "cpu", x.numel() * 2)
        with EngramClient(self.served.urls["tcp"]) as client:
            session = client.open_session()
            before = self.stage_sums()

            def step() -> None:
                segment = Segment(session, token_ids=rng.integers(0, self.vocabulary, 1))
                client.step([segment], self.layers[:1], residual=x)

            turns = Turns(echo=echo, step=step)
            rounds = int(1000 * self.scale)
            turns.take(rounds)
        num_steps = rounds + rounds // 10
        stages = {
            name: (after - before.get(name, 0.0)) / num_steps * 1e6
            for name, after in self.stage_sums().items()
        }
        own = ("store", "hash_gather", "wkv", "h2d", "gate", "d2h", "project")
        compute = sum(value for name, value in stages.items() if name in own)
        times = {name: quantiles(each) for name, each in turns.times.items()}
        anchor = times["echo"]["p50"] + compute
        return {
            **times,
            "stages": {name: round(value, 1) for name, value in stages.items()},
            "compute": round(compute, 1),
            "by_anchor": round(times["step"]["p50"] / anchor, 2),
        }

    def stage_sums(self) -> dict[str, float]:
        """Seconds that each stage has taken so far."""
        with urllib.request.urlopen(f"{self.served.urls['tcp']}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r'^engram_stage_seconds_sum\{stage="(\w+)"\} (\S+)$', text, re.M)
        return {name: float(value) for name, value in found}

    def throughput(self) -> dict[str, Any]:
        """kv misses, tokens a second: one sequence; 64 over 1 and 8 connections and 64 sockets."""
        seconds = max(1.0, 3.0 * self.scale)
        cases = {"one": (1, 1), "64_over_1": (64, 1), "64_over_8": (64, 8), "64_sockets": (64, 64)}
        found = {name: self._rate(*case, seconds) for name, case in cases.items()}
        for name in list(found)[1:]:
            found[f"{name}_by_one"] = round(found[name] / found["one"], 2)
        return found

    def _rate(self, sequences: int, connections: int, seconds: float) -> float:
        """In up to 8 processes."""
        processes = min(8, connections)
        each = connections // processes
        run = [sys.executable, __file__, "--worker", self.served.urls["tcp"]]
        run += [str(each), str(sequences // connections), str(seconds)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [subprocess.Popen(run, **pipes) for _ in range(processes)]
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        for worker in workers:
            worker.stdin.write("go\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
        return round(sum(float(worker.communicate()[0]) for worker in workers), 1)

    def prefill(self) -> dict[str, Any]:
        """A decode client alone, and while another process prefills 8,192 tokens.

        Its tensors are on the device, which the service's kernels have as well, or on the host.
        """
        rng = np.random.default_rng(1)
        x = self.residual(1)
        y = x.cpu()
        found: dict[str, Any] = {}
        with self.client("unix") as client:
            session = client.open_session()
            session.push(rng.integers(0, self.vocabulary, HELD))
            session.kv(self.layers[0], 0, HELD)

            def hit(residual: torch.Tensor) -> None:
                session.apply(self.layers[0], residual, 7)

            def fresh(residual: torch.Tensor) -> None:
                segment = Segment(session, token_ids=rng.integers(0, self.vocabulary, 1))
                client.step([segment], self.layers[:1], residual=residual)

            calls = {"hit": (hit, x), "fresh": (fresh, x)}
            calls |= {"hit, host memory": (hit, y), "fresh, host memory": (fresh, y)}
            run = [sys.executable, __file__, "--prefill", self.served.urls["unix"]]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            with (
                subprocess.Popen(run, text=True, **pipes) as other,
                ThreadPoolExecutor(1) as pool,
            ):
                assert other.stdout.readline() == "ready\n"  # type: ignore[union-attr]
                for name, (of, residual) in calls.items():
                    call = partial(of, residual)
                    alone, beside = Turns(call=call), Turns(call=call)
                    alone.take(int(6000 * self.scale))
                    other.stdin.write(f"{max(2.0, 4 * self.scale)}\n")  # type: ignore[union-attr]
                    other.stdin.flush()  # type: ignore[union-attr]
                    said = pool.submit(other.stdout.readline)  # type: ignore[union-attr]
                    while not said.done():
                        beside.take(20)
                    one, two = quantiles(alone.times["call"]), quantiles(beside.times["call"])
                    found[name] = {
                        "idle": one,
                        "beside_prefill": two,
                        "p99_ratio": round(two["p99"] / one["p99"], 2),
                        "calls_beside": len(beside.times["call"]),
                        "prefill_ms": float(said.result()),
                    }
                other.stdin.close()  # type: ignore[union-attr]
        return found

    def runner(self) -> list[dict[str, Any]]:
        """Time added to a step: ids known 0.2 ms before layer 1, 2 ms before layer 14. us

        Not counted for kv and rows: the client's own gate and wkv. Fresh ids: every kv is missing.
        """
        found = []
        for way in self.ways:
            for sequences in (1, 16, 64, 256):
                for output in ("residual", "kv", "rows"):
                    with self.client(way) as client, ThreadPoolExecutor(2) as pool:
                        added = self._added(client, pool, output, sequences)
                    row = {"way": way, "sequences": sequences, "output": output}
                    found.append(row | quantiles(added))
        return found

    def _added(
        self, client: EngramClient, pool: ThreadPoolExecutor, output: str, sequences: int
    ) -> list[float]:
        self._seed += 1  # other ids each time: every kv is missing
        rng = np.random.default_rng((3, self._seed))
        sessions = [client.open_session() for _ in range(sequences)]
        first, second = self.layers
        x, y = self.residual(sequences), self.residual(sequences)
        outs = self._outs(output, sequences)
        seconds = []
        rounds = max(10, int((100 if sequences < 200 else 40) * self.scale))
        for _ in range(rounds + 3):
            ids = rng.integers(0, self.vocabulary, (sequences, 1))
            pushed = [Segment(s, token_ids=i) for s, i in zip(sessions, ids, strict=True)]
            if output == "residual":
                took = self._step_residual(client, pool, (first, second), pushed, (x, y))
            else:
                took = self._step_ahead(client, (output, first, second), pushed, outs)
            seconds.append(took)
        for session in sessions:
            session.close()
        return seconds[3:]

    def _outs(self, output: str, sequences: int) -> list[torch.Tensor]:
        geometry, table = self.info["geometry"], self.info["table"]
        if output == "rows":
            found = []
            for layer in self.layers:
                width = table["row_bytes"][str(layer)]
                shape = sequences, geometry["n_hash_cols"], width
                found.append(torch.empty(shape, dtype=torch.uint8, device=self.device))
            return found
        hc, dim = self.shape
        shape = sequences, hc + 1, dim
        return [torch.empty(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)]

    def _step_residual(
        self,
        client: EngramClient,
        pool: ThreadPoolExecutor,
        layers: tuple[int, int],
        pushed: list[Segment],
        tensors: tuple[torch.Tensor, torch.Tensor],
    ) -> float:
        """Ids are pushed in the background; each layer's residual goes when it is there."""
        x, y = tensors
        known = time.perf_counter()
        push = pool.submit(client.step, pushed, layers, "none")
        added = 0.0
        for layer, lead in zip(layers, (0.2e-3, 2e-3), strict=True):
            _wait_until(known + lead + added)
            begin = time.perf_counter()
            push.result()  # a client's session knows its length only then
            reads = [Segment(s.session, count=1) for s in pushed]
            client.step(reads, (layer,), residual=x, out=y, wait_ms=1000)
            added += time.perf_counter() - begin
        return added

    def _step_ahead(
        self,
        client: EngramClient,
        what: tuple[str, int, int],
        pushed: list[Segment],
        outs: list[torch.Tensor],
    ) -> float:
        """kv or rows of both layers are asked for as soon as ids are known."""
        output, first, second = what
        stored = output == "rows"
        known = time.perf_counter()
        client.step(pushed, (first,), output, out=outs[0], stored=stored)
        one = max(0.0, time.perf_counter() - known - 0.2e-3)
        reads = [Segment(s.session, count=1) for s in pushed]
        client.step(reads, (second,), output, out=outs[1], stored=stored)
        return one + max(0.0, time.perf_counter() - known - 2e-3 - one)


def _wait_until(when: float) -> None:
    while (left := when - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - 100e-6) if left > 300e-6 else 0)


def run_worker(url: str, connections: int, sequences: int, seconds: float) -> None:
    """Step sequences with fresh ids over connections of this process; says how many tokens/s."""
    with EngramClient(url) as client:
        geometry = client.info()["geometry"]
        vocabulary = min(90_000, client.info()["hash"]["vocab_size"])
    shape = sequences, geometry["hc_mult"], geometry["dim"]
    layer = geometry["layer_ids"][0]
    x = np.ones(shape, ml_dtypes.bfloat16)
    done, started = [0] * connections, threading.Barrier(connections + 1)

    def run(index: int) -> None:
        rng = np.random.default_rng((os.getpid(), index))
        out = np.empty_like(x)
        with EngramClient(url, owner=f"worker-{os.getpid()}-{index}") as client:
            sessions = [client.open_session() for _ in range(sequences)]
            started.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                ids = rng.integers(0, vocabulary, (sequences, 1))
                pushed = [Segment(s, token_ids=i) for s, i in zip(sessions, ids, strict=True)]
                client.step(pushed, (layer,), residual=x, out=out)
                done[index] += sequences

    threads = [threading.Thread(target=run, args=(index,)) for index in range(connections)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    started.wait()
    for thread in threads:
        thread.join()
    print(sum(done) / (time.perf_counter() - begin))


def run_prefill(url: str) -> None:
    """Prefill 8,192 fresh tokens again and again, for as many seconds as each line of the standard
    input says; says the median ms of one."""
    rng = np.random.default_rng(os.getpid())
    with EngramClient(url) as client:
        info = client.info()
        geometry = info["geometry"]
        x = np.ones((PREFILL, geometry["hc_mult"], geometry["dim"]), ml_dtypes.bfloat16)
        vocabulary = min(90_000, info["hash"]["vocab_size"])
        print("ready", flush=True)
        for line in sys.stdin:
            times = list[float]()
            until = time.perf_counter() + float(line)
            while time.perf_counter() < until:
                session = client.open_session()
                segment = Segment(session, token_ids=rng.integers(0, vocabulary, PREFILL))
                begin = time.perf_counter()
                client.step([segment], tuple(geometry["layer_ids"][:1]), residual=x, out=x)
                times.append(time.perf_counter() - begin)
                session.close()
            print(median(times) * 1e3, flush=True)


def print_all(found: dict[str, Any]) -> None:
    """Print the tables."""

    def row(values: dict[str, float]) -> str:
        return " ".join(f"{values[name]:>9.1f}" for name in ("p50", "p95", "p99"))

    print(f"{found['backend']}, in flight: {found['in_flight']}, shared: {found['shared_memory']}")
    for name, part in found.items():
        if name.startswith("latency"):
            print(f"\n{name}: client GPU -> service GPU -> client GPU, kv hit, us (p50, p95, p99)")
            for each in part:
                print(
                    f"  {each['way']:<7} T={each['tokens']:<4} {row(each['apply'])}   bare echo "
                    f"{row(each['echo'])}   beside it {each['beside_echo']:>9.1f}"
                )
    if "one_sequence" in found:
        one = found["one_sequence"]
        print(f"\none sequence, kv miss, TCP, us: {row(one['step'])}, echo {row(one['echo'])}")
        print(f"  compute {one['compute']}, by (echo + compute) {one['by_anchor']}")
        print(f"  stages {one['stages']}")
    if "throughput" in found:
        print(f"\nkv misses, tokens/s: {found['throughput']}")
    if "prefill" in found:
        print("\ndecode beside prefills of 8,192 tokens, GPU to GPU if not said, Unix socket, us")
        for name, each in found["prefill"].items():
            print(f"  {name:<18} idle           {row(each['idle'])}")
            print(
                f"  {'':<18} beside prefill {row(each['beside_prefill'])}"
                f"  p99 x {each['p99_ratio']}"
                f"  ({each['calls_beside']} calls, a prefill {each['prefill_ms']:.1f} ms)"
            )
    if "runner" in found:
        print("\nadded to a runner's step of both layers, fresh ids, us (p50, p95, p99)")
        for each in found["runner"]:
            print(f"  {each['way']:<7} B={each['sequences']:<4} {each['output']:<9} {row(each)}")


def bench(path: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every part against one service, then the latency alone with small reads on the loop."""
    flags = ["--shared-memory-bytes", "512MiB"]
    flags += ["--device", "cpu"] if arguments.device == "cpu" else []
    found: dict[str, Any] = {}
    parts = arguments.parts.split(",")
    with bare_gpu_echo(folder / "e", arguments.device) as echo:
        with serving(path, folder / "s", *flags) as served:
            made = Bench(served, echo, arguments.device, arguments.scale)
            found["backend"] = made.info["backend"]
            found["in_flight"] = made.info["numerics"].get("in_flight", "plain memory")
            found["shared_memory"] = made.info["shared_memory"]["mode"]
            found["numerics"] = made.info["numerics"]
            for part in parts:
                begin = time.perf_counter()
                found[part] = getattr(made, part)()
                print(f"{part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if arguments.lanes:
            with serving_on_lanes(path, folder / "n", *flags) as served:
                made = Bench(served, echo, arguments.device, arguments.scale)
                found["latency_on_lanes"] = made.latency()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="flash")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", type=float, default=1.0, help="fewer rounds below 1")
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoint is made")
    parser.add_argument("--lanes", action="store_true", help="also: see serving_on_lanes")
    parser.add_argument("--parts", default="latency,one_sequence,throughput,prefill,runner")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--prefill", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        url, connections, sequences, seconds = arguments.worker
        run_worker(url, int(connections), int(sequences), float(seconds))
        return
    if arguments.prefill:
        run_prefill(arguments.prefill)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="eg", dir=arguments.folder) as name:
        folder = Path(name)
        path = folder / "table.gguf"
        synth(path, preset=arguments.preset, fmt="gguf", quant="Q2_K", seed=1)
        print(f"synth: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        found = bench(path, folder, arguments)
    print_all(found)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"\n{time.perf_counter() - began:.0f} s; {device}, {os.cpu_count()} cores")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
