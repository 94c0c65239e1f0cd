"""Ten times the load the service sustains, then what is left; or a soak of clients that misbehave.

Overload: connections post steps (64 tokens of random ids pushed, residual of one layer). At the
limit there are as many as there is room for, each asking again when it is answered; then four times
as many ask at ten times the rate that was answered, and mind no Retry-After. What is checked:
accepted pushes and nothing else are in the sessions at the end (length, and the hash of every row,
against a model made by the library in this process), resident memory stays where it was at the
limit, refusals are 429 and nothing else.

Soak (`--soak MINUTES`): clients that vanish inside a body or an answer, send slowly, repeat every
call and reconnect, beside honest ones; descriptors, threads, sessions and memory return to the
start. Prints a table and one JSON line; ends with status 1 if a check fails. Demo checkpoint, CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from served import Counters, Served, serving

from engram_client import EngramClient, wire
from engram_client.connection import Connection
from engram_client.http1 import Request, Response, parse_address
from engram_client.problems import EngramClientError
from engram_core.backends.base import Backend
from engram_core.checkpoint import open_checkpoint
from engram_core.hashing import EngramHasher
from engram_core.loader import load
from engram_core.tools.synth import synth

HC, DIM, VOCAB = 4, 1024, 90_000
TOKENS = 64
BODY_BYTES = TOKENS * HC * DIM * 2
LIMIT, MORE, TIMES = 12, 48, 10
"""Connections at the limit and above it, and the rate there by that of the limit."""
IN_FLIGHT_BYTES = 8 << 20
"""Room for a dozen steps of 64 tokens: what comes on top is refused."""
KV_STORE_BYTES, KV_BYTES = 16 << 20, (HC + 1) * DIM * 2
PIECE = 256
"""Tokens whose rows are read at once in the end."""
MAX_TOKENS = 65_536
"""Of a session: then another is opened."""


@dataclass
class Found:
    """What one phase saw. seconds: by code, of each request."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, code: str, seconds: float) -> None:
        """Note an answer."""
        with self.lock:
            self.seconds[code].append(seconds)

    def told(self, seconds: float) -> dict[str, Any]:
        """Rates and p50, p99 in ms by code."""
        found = {}
        for code, times in sorted(self.seconds.items()):
            times.sort()
            found[code] = {
                "per_s": round(len(times) / seconds, 1),
                "p50_ms": round(times[len(times) // 2] * 1e3, 2),
                "p99_ms": round(times[min(len(times) - 1, len(times) * 99 // 100)] * 1e3, 2),
            }
        return found


def connect(url: str) -> Connection:
    """A connection without a protocol above it."""
    return Connection(parse_address(url), b"Host: localhost\r\n", None)


class Pusher:
    """One connection and its sessions; `held` is the model of each: the ids that were accepted."""

    def __init__(self, url: str, seed: int, tokens: int) -> None:
        self.held: dict[int, list[int]] = {}
        self._rng = np.random.default_rng(seed)
        self._random = random.Random(seed)
        self._url = url
        self._line = connect(url)
        self._residual = wire.TensorView("BF16", (tokens, HC, DIM), memoryview(bytes(
            tokens * HC * DIM * 2
        )))  # fmt: skip
        self._tokens = tokens
        self._session = 0

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def once(self, found: Found) -> None:
        """Push and read once; whatever is refused has changed nothing."""
        if len(self.held.get(self._session, ())) + self._tokens > MAX_TOKENS or not self._session:
            self._open(found)
            return
        ids = self._rng.integers(0, VOCAB, self._tokens)
        held = self.held[self._session]
        body = wire.encode_tensors(
            {
                "residual": self._residual,
                "count": wire.as_view(np.array([self._tokens], np.int32)),
                "position": wire.as_view(np.array([len(held)], np.int64)),
                "session_id": wire.as_view(np.array([self._session], np.int64)),
                "token_ids": wire.as_view(ids),
            }
        )
        request = Request(
            "POST", "/v1/step?output=residual&layers=1",
            [("Content-Type", wire.TENSOR_MEDIA)], body, max_answer_bytes=1 << 30,
        )  # fmt: skip
        if self._ask(request, found).status == 200:
            held += ids.tolist()

    def _open(self, found: Found) -> None:
        session = self._random.getrandbits(62) + 1
        body = json.dumps({"session_id": str(session)}).encode()
        headers = [("Content-Type", wire.JSON_MEDIA)]
        if self._ask(Request("POST", "/v1/sessions", headers, [body]), found).status < 300:
            self._session = session
            self.held[session] = []

    def _ask(self, request: Request, found: Found) -> Response:
        begin = time.perf_counter()
        response = self._line.exchange(request, 60)
        seconds = time.perf_counter() - begin
        if not response.keep_alive:  # refused before its body was read
            self._line.close()
            self._line = connect(self._url)
        code = "opened" if response.status == 201 else "ok"
        if response.status >= 400:
            code = str(json.loads(bytes(response.body))["code"])
        found.add(code, seconds)
        return response


def press(
    served: Served, pushers: list[Pusher], seconds: float, per_s: float = 0.0
) -> tuple[dict[str, Any], float]:
    """Press for so long; return what was seen and the highest resident bytes.

    per_s: requests of all pushers; 0 = each asks again when it is answered
    """
    found = Found()
    begin = time.perf_counter()
    until = begin + seconds
    pause = len(pushers) / per_s if per_s else 0.0

    def run(pusher: Pusher) -> None:
        due = begin
        while time.perf_counter() < until:
            pusher.once(found)
            due = max(due + pause, time.perf_counter() - pause)
            time.sleep(max(0.0, due - time.perf_counter()))

    threads = [threading.Thread(target=run, args=(pusher,)) for pusher in pushers]
    for thread in threads:
        thread.start()
    highest = 0.0
    while any(thread.is_alive() for thread in threads):
        highest = max(highest, served.rss_bytes())
        threads[0].join(0.1)
    return found.told(seconds), highest


def wrong_sessions(url: str, checkpoint: Path, pushers: list[Pusher]) -> list[str]:
    """Compare every session with its model: its length, and the hash of its rows."""
    backend = load(open_checkpoint(checkpoint), num_slots=256)
    wrong = []
    for pusher in pushers:
        for session, ids in pusher.held.items():
            got = _rows_hash(url, session, len(ids))
            if got != _model_hash(backend, ids):
                wrong.append(f"session {session}: {len(ids)} tokens, got {got}")
    backend.close()
    return wrong


def _rows_hash(url: str, session: int, count: int) -> str:
    """Hash a session's rows of layer 1 as served; the answer's length header must be its own."""
    line = connect(url)
    hashed = hashlib.sha256()
    path = f"/v1/sessions/{session}"
    state = json.loads(bytes(line.exchange(Request("GET", path), 60).body))
    if state["length"] != count:
        return f"length {state['length']}"
    for begin in range(0, count, PIECE):
        query = f"position={begin}&count={min(PIECE, count - begin)}"
        request = Request("GET", f"{path}/layers/1/rows?{query}", max_answer_bytes=1 << 30)
        answer = line.exchange(request, 60)
        if answer.status != 200:
            return bytes(answer.body).decode()
        hashed.update(answer.body)
    line.close()
    return hashed.hexdigest()


def _model_hash(backend: Backend, ids: list[int]) -> str:
    hashed = hashlib.sha256()
    if ids:
        sizes = backend.geometry
        hasher = EngramHasher(backend.hash_tables, len(ids))
        hash_ids = hasher.hash(np.array(ids), 0)[:, 0]
        for begin in range(0, len(ids), PIECE):
            part = hash_ids[begin : begin + PIECE]
            rows = torch.empty((*part.shape, sizes.head_dim), dtype=torch.bfloat16)
            backend.rows(0, part, rows, stored=False)
            hashed.update(rows.view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def overload(folder: Path, checkpoint: Path, seconds: float, tokens: int) -> dict[str, Any]:
    """Return what both phases saw, and the faults that were found."""
    flags = ("--in-flight-bytes", str(IN_FLIGHT_BYTES), "--kv-store-bytes", str(KV_STORE_BYTES))
    with serving(checkpoint, folder / "s", *flags) as served:
        url = served.urls["unix"]
        pushers = [Pusher(url, seed, tokens) for seed in range(MORE)]
        # At first until the kv store is full, so that its memory is resident.
        counters, misses = Counters(served), 0.0
        while misses < KV_STORE_BYTES / KV_BYTES:
            press(served, pushers[:LIMIT], 1.0)
            misses += counters.look()["store_misses"]
        limit, start = press(served, pushers[:LIMIT], max(2.0, seconds / 4))
        rate = TIMES * limit["ok"]["per_s"]
        over, highest = press(served, pushers, seconds, rate)
        for pusher in pushers:
            pusher.close()
        wrong = wrong_sessions(url, checkpoint, pushers)
    grown = highest - start
    # Beside bodies and answers: the ids held, more connections, and what malloc keeps in pieces.
    bound = IN_FLIGHT_BYTES + (32 << 20)
    faults = [f"wrong {each}" for each in wrong]
    faults += [f"code {code}" for code in over if code not in ("ok", "opened", "overloaded")]
    if grown > bound:
        faults.append(f"resident memory grew by {grown / 2**20:.0f} MiB, over {bound >> 20}")
    if "overloaded" not in over:
        faults.append("nothing was refused: this was no overload")
    return {
        "seconds": seconds,
        "tokens": tokens,
        "at_the_limit": limit,
        "asked_per_s": rate,
        "overloaded": over,
        "p99_ratio": round(over["ok"]["p99_ms"] / limit["ok"]["p99_ms"], 2),
        "grown_mib": round(grown / 2**20, 1),
        "sessions": sum(len(pusher.held) for pusher in pushers),
        "tokens_held": sum(len(ids) for pusher in pushers for ids in pusher.held.values()),
        "faults": faults,
    }


# ---------------------------------------------------------------------- soak


class Rude:
    """Ways to misbehave, each on a connection of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self._address = parse_address(url)
        self._random = random.Random(seed)

    def once(self) -> None:
        """Misbehave in one way."""
        self._random.choice([self._vanish_in_body, self._vanish_in_answer, self._send_slowly])()

    def _connect(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.connect(self._address.path)
        line.settimeout(5)
        return line

    def _step(self, length: int) -> bytes:
        return (
            "POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {wire.TENSOR_MEDIA}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def _vanish_in_body(self) -> None:
        with self._connect() as line:
            line.sendall(self._step(1 << 20) + bytes(self._random.randrange(1 << 18)))

    def _vanish_in_answer(self) -> None:
        with self._connect() as line:
            line.sendall(b"GET /v1/layers/1/weights HTTP/1.1\r\nHost: localhost\r\n\r\n")
            line.recv(self._random.randrange(1, 1 << 16))

    def _send_slowly(self) -> None:
        with self._connect() as line, contextlib.suppress(OSError):
            line.sendall(self._step(1 << 20))
            line.recv(1 << 12)  # until it is told that it is too slow


def honest(url: str, seed: int) -> Callable[[], None]:
    """A client that opens, pushes, repeats its push, reads, rewinds and closes."""
    rng = np.random.default_rng(seed)

    def once() -> None:
        with (
            EngramClient(url, owner=f"soak-{seed}") as client,
            contextlib.suppress(EngramClientError),
        ):
            session = client.open_session()
            ids = rng.integers(0, VOCAB, 16).tolist()
            session.push(ids)
            session.push(ids, position=0)
            residual = np.zeros((16, HC, DIM), ml_dtypes.bfloat16)
            session.apply(1, residual, position=0)
            session.rewind(8)
            session.close()

    return once


def soak(folder: Path, checkpoint: Path, seconds: float) -> dict[str, Any]:
    """Return what was held when ready, at the start (after a quarter or 10 s) and at the end."""
    # A small kv store: it is full, and so resident, at the start.
    flags = ("--session-ttl-s", "5", "--kv-store-bytes", str(KV_STORE_BYTES))
    with serving(checkpoint, folder / "s", *flags) as served:
        url = served.urls["unix"]
        ready = _settled(served)
        calls = [honest(url, i) for i in range(4)] + [Rude(url, i).once for i in range(4)]
        _press_for(calls, min(10.0, seconds / 4))
        start = _settled(served)
        done = _press_for(calls, seconds)
        end = _settled(served, int(start["descriptors"]))
    faults = [
        f"{name}: {start[name]} at the start, {end[name]} at the end"
        for name in ("descriptors", "sessions")
        if end[name] > start[name]
    ]
    # asyncio's pool has a thread more whenever none is idle, up to its bound: by then or later.
    most = ready["threads"] + min(32, (os.cpu_count() or 1) + 4)
    if end["threads"] > most:
        faults.append(f"threads: {end['threads']} at the end, expected {most} at most")
    if end["rss_mib"] > start["rss_mib"] * 1.1 + 32:
        faults.append(f"resident MiB: {start['rss_mib']} at the start, {end['rss_mib']} at the end")
    return {
        "seconds": seconds,
        "calls": done,
        "ready": ready,
        "start": start,
        "end": end,
        "faults": faults,
    }


def _press_for(calls: list[Callable[[], None]], seconds: float) -> int:
    """Keep the service about 70 % busy: each client rests half as long as its call took."""
    until = time.perf_counter() + seconds
    done: Counter[int] = Counter()

    def run(index: int) -> None:
        while time.perf_counter() < until:
            begin = time.perf_counter()
            calls[index]()
            done[index] += 1
            time.sleep((time.perf_counter() - begin) / 2)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done.total()


def _settled(served: Served, descriptors: int = 0) -> dict[str, float]:
    """What the process holds once nothing is asked and its sessions have expired.

    descriptors: waited for; a connection that was asked over closes a moment later
    """
    counters = Counters(served)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (
        counters.gauge("sessions") or counters.gauge("active_requests") > 1
    ):
        time.sleep(0.2)
    while time.monotonic() < deadline and served.num_descriptors() > descriptors > 0:
        time.sleep(0.1)
    return {
        "rss_mib": round(served.rss_bytes() / 2**20),
        "descriptors": served.num_descriptors(),
        "threads": served.num_threads(),
        "sessions": counters.gauge("sessions"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each step")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="soak instead")
    parser.add_argument("--checkpoint", type=Path, help="instead of a new demo one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engram-load-") as name:
        folder = Path(name)
        path = (
            arguments.checkpoint
            or synth(folder / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1).path
        )
        if arguments.soak:
            found = soak(folder, path, arguments.soak * 60)
        else:
            found = overload(folder, path, arguments.seconds, arguments.tokens)
    for key, value in found.items():
        print(f"{key:<12} {value}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(json.dumps(found))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
