"""What the service costs beside its bytes: latency, ways in, concurrency, prefill, throughput.

Everything is taken in turns with its yardstick in the same run, so read the ratios: a bare echo on
a `BufferedProtocol` (`bare_echo.py`) of the same body over the same kind of socket, a bare FastAPI
echo (`echo.py`). Demo checkpoint on the CPU. Prints tables and one JSON line; `--quick` takes less
than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import ml_dtypes
import numpy as np
from recording import Recording
from served import ROOT, Counters, Served, barely_echoing, echoing, hit_ratio, serving
from tokenizers import Tokenizer

from engram_client import EngramClient, Segment, Session
from engram_client.connection import ConnectionPool
from engram_client.http1 import Request, parse_address
from engram_core.tools.presets import tokenizer_json
from engram_core.tools.synth import synth

HC, DIM = 4, 1024
"""Of the demo preset: 8 KiB a token."""
OCTETS = ("Content-Type", "application/octet-stream")
HELD = 512
"""Tokens of a session whose kv is there."""
PREFILL = 8192
PREFILL_TURNS = {"hit": 3, "fresh": 5}
"""Prefills with a decode client beside them, idle in between: some 1,000 calls with kv missing, and
as many idle, so that ten of each lie beyond the p99; tens of thousands with kv there."""
WAYS_CALLS = 4
"""Calls in a row of one way: a runner makes its calls one after the other, too."""


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in us."""
    ordered = sorted(seconds)
    return {
        f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1e6, 1)
        for q in (50, 95, 99)
    }


def residual(count: int, seed: int = 0) -> Any:
    """bfloat16 [count, HC, DIM]."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((count, HC, DIM), np.float32).astype(ml_dtypes.bfloat16)


class Turns:
    """Calls taken in turns, one of each after the other. times: seconds by name."""

    def __init__(self, **calls: Callable[[], object]) -> None:
        self._calls = calls
        self.times: dict[str, list[float]] = {name: [] for name in calls}

    def take(self, rounds: int, calls: int = 1) -> None:
        """Take so many turns, of so many calls in a row each; the first tenth is not counted."""
        for i in range(rounds + rounds // 10):
            for name, call in self._calls.items():
                for _ in range(calls):
                    begin = time.perf_counter()
                    call()
                    if i >= rounds // 10:
                        self.times[name].append(time.perf_counter() - begin)

    def beside(self, name: str, other: str) -> float:
        """Median over the turns of how much longer one took than the other, us."""
        pairs = zip(self.times[name], self.times[other], strict=True)
        return round(median(one - two for one, two in pairs) * 1e6, 1)

    def ratio(self, name: str, other: str) -> float:
        """Medians, one by the other."""
        return round(median(self.times[name]) / median(self.times[other]), 2)


@dataclass(frozen=True)
class Latency:
    """A residual beside the bare echo of its body; us; cpu: of the serving process a request."""

    transport: str
    tokens: int
    echo: dict[str, float]
    residual: dict[str, float]
    client: dict[str, float]
    beside_echo: float
    echo_cpu: float
    served_cpu: float


def raw(url: str) -> ConnectionPool:
    """Connections without a protocol above them."""
    return ConnectionPool([parse_address(url)], [b"Host: localhost\r\n"], timeout_s=60)


def residual_request(session: Session, body: Any, layer: str = "1") -> Request:
    """A read of positions 0 on."""
    return Request(
        "POST",
        f"/v1/sessions/{session.state.session_id}/layers/{layer}/residual?position=0",
        [OCTETS, ("X-Engram-Shape", ",".join(map(str, body.shape))), ("X-Engram-Dtype", "BF16")],
        [body.tobytes()],
        max_answer_bytes=body.nbytes,
    )


def held(client: EngramClient, text: Sequence[int]) -> Session:
    """A session whose kv of layer 1 is in the store."""
    session = client.open_session()
    session.push(text[:HELD])
    session.kv(1, position=0, count=HELD)
    return session


def latency(served: Served, echo: Served, text: Sequence[int], rounds: int) -> list[Latency]:
    """kv hit, one client, one connection."""
    found = []
    for transport, url in sorted(served.urls.items()):
        with EngramClient(url) as client:
            session = held(client, text)
            for tokens in (1, 16, 512):
                count = max(20, rounds // (1 if tokens < 100 else 20))
                found.append(_latency(transport, session, (served, echo), tokens, count))
    return found


def _latency(
    transport: str, session: Session, pair: tuple[Served, Served], tokens: int, count: int
) -> Latency:
    served, echo = pair
    body = residual(tokens)
    request, out = residual_request(session, body), np.empty_like(body)
    ours, theirs = raw(served.urls[transport]), raw(echo.urls[transport])
    turns = Turns(echo=lambda: theirs.exchange(request), residual=lambda: ours.exchange(request))
    before = served.cpu_s(), echo.cpu_s()
    turns.take(count)
    each = 1e6 / (count + count // 10)
    cpu = (served.cpu_s() - before[0]) * each, (echo.cpu_s() - before[1]) * each
    through = Turns(client=lambda: session.apply(1, body, 0, out=out))
    through.take(count)
    ours.close()
    theirs.close()
    return Latency(
        transport=transport,
        tokens=tokens,
        echo=quantiles(turns.times["echo"]),
        residual=quantiles(turns.times["residual"]),
        client=quantiles(through.times["client"]),
        beside_echo=turns.beside("residual", "echo"),
        echo_cpu=round(cpu[1], 1),
        served_cpu=round(cpu[0], 1),
    )


def ways(served: Served, plain_echo: Served, text: Sequence[int], rounds: int) -> dict[str, Any]:
    """40 KB over TCP: our client, httpx on FastAPI's own route, httpx on a bare FastAPI echo.

    A percent-encoded layer takes the ordinary way.
    """
    body = residual(5)
    with EngramClient(served.urls["tcp"]) as client, httpx.Client(trust_env=False) as web:
        session, out = held(client, text), np.empty_like(body)
        plain = residual_request(session, body, layer="%31")
        headers, content = dict(plain.headers), body.tobytes()
        fast = residual_request(session, body)
        base, echo = served.urls["tcp"], plain_echo.urls["tcp"]

        def post(url: str) -> None:
            answer = web.post(url, content=content, headers=headers)
            assert answer.status_code == 200, answer.text
            assert len(answer.content) == len(content)

        turns = Turns(
            client=lambda: session.apply(1, body, 0, out=out),
            httpx_plain=lambda: post(base + plain.target),
            httpx_fast=lambda: post(base + fast.target),
            httpx_echo=lambda: post(f"{echo}/echo"),
        )
        turns.take(rounds // WAYS_CALLS, WAYS_CALLS)
    return {
        **{name: quantiles(times) for name, times in turns.times.items()},
        "plain_by_client": turns.ratio("httpx_plain", "client"),
        "plain_by_echo": turns.ratio("httpx_plain", "httpx_echo"),
    }


@dataclass
class Load:
    """One concurrency: decoded tokens a second, and each stage's quantiles."""

    clients: int
    tokens_per_s: float = 0.0
    hits: float | None = None
    wall: dict[str, float] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


def concurrency(served: Served, text: Sequence[int], clients: int, seconds: float) -> Load:
    """Each client decodes the text from a place of its own: a token pushed, a residual a layer."""
    wall: list[float] = []
    stages: defaultdict[str, list[float]] = defaultdict(list)
    counters = Counters(served)
    body = residual(1)

    def decode(index: int) -> None:
        with Recording(served.urls["tcp"], owner=f"load-{clients}-{index}") as client:
            session = client.open_session()
            place = index * len(text) // clients
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                begin = time.perf_counter()
                segment = Segment(session, token_ids=[text[place % len(text)]])
                client.step([segment], (1,), residual=body)
                session.apply(14, body)
                wall.append(time.perf_counter() - begin)
                place += 1
            session.close()
            for name, values in client.stages.items():
                stages[name] += values

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(
        clients,
        round(len(wall) / seconds, 1),
        hit_ratio(counters.look()),
        quantiles(wall),
        {name: quantiles(values) for name, values in stages.items()},
    )


class Prefiller:
    """Another process, which prefills 8,192 random tokens whenever it is told to."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--prefill", served.urls["tcp"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self) -> None:
        """Begin, and wait until something is computed."""
        counters, misses = Counters(self._served), 0.0
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        while misses < 256:
            misses += counters.look()["store_misses"]

    def is_done(self) -> bool:
        """Whether it has its answer."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def tokens_per_s(self) -> float:
        """Wait for its answer."""
        assert self._process.stdout is not None
        return PREFILL / float(self._process.stdout.readline())

    def stop(self) -> None:
        """End it."""
        self._process.communicate()


def prefill(served: Served, text: Sequence[int], most_turns: int) -> dict[str, Any]:
    """A decode client's quantiles in turns: beside a prefill, then as many calls idle; and tokens/s
    of a prefill alone and beside a client whose kv is missing."""
    rng = np.random.default_rng(1)
    body = residual(1)
    found: dict[str, Any] = {}
    other = Prefiller(served)
    with EngramClient(served.urls["tcp"]) as client:
        session = held(client, text)

        def hit() -> None:
            session.apply(1, body, 7)

        def fresh() -> None:
            segment = Segment(session, token_ids=[int(rng.integers(90_000))])
            client.step([segment], (1,), residual=body)

        other.begin()
        other.tokens_per_s()  # its first one is slower
        speeds: dict[str, list[float]] = {"alone": [], "beside_fresh": []}
        for name, call in (("hit", hit), ("fresh", fresh)):
            idle, beside = Turns(call=call), Turns(call=call)
            for _ in range(min(most_turns, PREFILL_TURNS[name])):
                before = len(beside.times["call"])
                other.begin()
                while not other.is_done():
                    beside.take(1)
                speed = other.tokens_per_s()
                for _ in range(len(beside.times["call"]) - before):
                    idle.take(1)
                if name == "fresh":
                    speeds["beside_fresh"].append(speed)
                    other.begin()
                    speeds["alone"].append(other.tokens_per_s())
            found[name] = {
                "idle": quantiles(idle.times["call"]),
                "beside_prefill": quantiles(beside.times["call"]),
                "calls": len(beside.times["call"]),
            }
            one, two = found[name]["beside_prefill"]["p99"], found[name]["idle"]["p99"]
            found[name]["p99_ratio"] = round(one / two, 2)
    other.stop()
    return found | {"tokens_per_s": {name: round(median(all_)) for name, all_ in speeds.items()}}


def run_prefill(url: str) -> None:
    """Prefill 8,192 random tokens for each line that is read; say how many seconds it took."""
    rng = np.random.default_rng(os.getpid())
    body = residual(PREFILL)
    with EngramClient(url) as client:
        for _ in sys.stdin:
            session = client.open_session()
            segment = Segment(session, token_ids=rng.integers(0, 90_000, PREFILL))
            begin = time.perf_counter()
            client.step([segment], (1,), residual=body, out=body)
            print(time.perf_counter() - begin, flush=True)
            session.close()


def throughput(served: Served, seconds: float) -> dict[str, Any]:
    """Tokens a second of kv misses: one sequence, 64 in a step, 64 over eight connections."""
    rng = np.random.default_rng(2)

    def rate(sequences: int, connections: int) -> float:
        each = sequences // connections
        done = [0] * connections

        def run(index: int) -> None:
            with EngramClient(served.urls["tcp"], owner=f"rate-{sequences}-{index}") as client:
                sessions = [client.open_session() for _ in range(each)]
                body = residual(each)
                until = time.perf_counter() + seconds
                while time.perf_counter() < until:
                    ids = rng.integers(0, 90_000, each).tolist()
                    segments = [
                        Segment(session, token_ids=[token])
                        for session, token in zip(sessions, ids, strict=True)
                    ]
                    client.step(segments, (1,), residual=body)
                    done[index] += each
                for session in sessions:
                    session.close()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(connections)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begin)

    rates: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        rates["one"].append(rate(1, 1))
        rates["64_in_a_step"].append(rate(64, 1))
        rates["64_over_8"].append(rate(64, 8))
    found = {name: round(median(values), 1) for name, values in rates.items()}
    ratios = {f"{name}_by_one": round(found[name] / found["one"], 2) for name in list(found)[1:]}
    return found | ratios


def print_all(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(
        "residual, kv hit, us                p50      p95      p99   (echo p50)  beside echo  cpu"
    )
    for row in found["latency"]:
        print(
            f"  {row.transport:<5} T={row.tokens:<4} raw        {_row(row.residual)}"
            f"   ({row.echo['p50']:8.1f}) {row.beside_echo:>11.1f} "
            f"{row.served_cpu:.0f} ({row.echo_cpu:.0f})"
        )
        print(f"  {'':<12} our client {_row(row.client)}")
    print(f"\n40 KB over TCP, {WAYS_CALLS} calls in a row each, us")
    for name in ("client", "httpx_fast", "httpx_plain", "httpx_echo"):
        print(f"  {name:<23} {_row(found['ways'][name])}")
    print(
        f"  plain route / our client {found['ways']['plain_by_client']}, "
        f"plain route / bare FastAPI echo {found['ways']['plain_by_echo']}"
    )
    print("\na real text decoded, both layers a token, us")
    for load in found["concurrency"]:
        hits = "-" if load.hits is None else f"{load.hits:.2f}"
        print(f"  {load.clients:>2} clients {load.tokens_per_s:>7} tokens/s, hits {hits}")
        for name, values in {"wall": load.wall, **load.stages}.items():
            print(f"    {name:<21} {_row(values)}")
    print("\ndecode beside a prefill of 8,192 tokens, us")
    for name in ("hit", "fresh"):
        row = found["prefill"][name]
        print(f"  {name:<6} idle            {_row(row['idle'])}  {row['calls']} calls")
        print(f"  {'':<6} beside prefill  {_row(row['beside_prefill'])}  p99 x {row['p99_ratio']}")
    print(f"  the prefill, tokens/s: {found['prefill']['tokens_per_s']}")
    print(f"\nkv misses, tokens/s: {found['throughput']}")


def _row(values: dict[str, float]) -> str:
    return " ".join(f"{value:>8.1f}" for value in values.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--prefill", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prefill:
        run_prefill(arguments.prefill)
        return
    rounds, seconds = (200, 1.0) if arguments.quick else (2000, 4.0)
    began, load = time.perf_counter(), os.getloadavg()[0]
    tokenizer = Tokenizer.from_buffer(tokenizer_json("demo", None))
    text = tokenizer.encode((ROOT / "service" / "demo_text.txt").read_text("utf-8")).ids
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as name:
        folder = Path(name)
        path = synth(folder / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1).path
        with (
            serving(path, folder / "s") as served,
            barely_echoing(folder / "b") as bare,
            echoing(folder / "e", "fastapi") as plain,
        ):
            found: dict[str, Any] = {
                "latency": latency(served, bare, text, rounds),
                "ways": ways(served, plain, text, rounds // 4),
                "concurrency": [concurrency(served, text, n, seconds) for n in (1, 4, 16)],
                "prefill": prefill(served, text, 2 if arguments.quick else 9),
                "throughput": throughput(served, seconds),
            }
    print_all(found)
    print(
        f"\n{time.perf_counter() - began:.0f} s; {os.cpu_count()} cores, load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after"
    )
    found["latency"] = [asdict(row) for row in found["latency"]]
    found["concurrency"] = [asdict(row) for row in found["concurrency"]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
