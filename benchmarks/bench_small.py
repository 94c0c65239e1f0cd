"""Times batches of up to 64 tokens over every type of wkv on the GPU at hand, in turns with peers.

    python benchmarks/bench_small.py [--peers FOLDER] [--out FILE] [--rows N] [--what KINDS]

projections: each kernel over each type of weights, and SGLang's FP8 block GEMM (its activations
quantised beforehand, not counted; as it comes, with its own configuration for this shape and
device, and the fastest of some others). layers: windows to residual,
each type by its fastest kernel of this run, beside the peer's whole layer. passes: more than 64
tokens through the stored kernels in passes of 64, beside cublasLt over the bf16 copy. wall: from a
pinned residual to a pinned result, kv miss and hit, through `CudaBackend`.
GPU time and method: see bench_cuda.py. FOLDER also holds SGLang's gemm/fp8_kernel.py as
sglang_fp8_gemm.py and its configs folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from contextlib import ExitStack
from ctypes import byref
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_cuda import (
    Bench,
    Launch,
    Maker,
    TorchBuffer,
    empty_graph_us,
    load_peers,
    our_layer,
    peer_layer,
    table_lines,
    wall_us,
)
from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.device import Stream
from engram_core.backends.engram_v41 import DeviceLayer, EngramV41
from engram_core.backends.native import INLINE_TOKENS, cublaslt_candidates
from engram_core.backends.stored_wkv import (
    BATCH_CLASSES,
    CHAIN,
    CUBLASLT,
    STORED_FORMS,
    Stored,
    StoredWkv,
    arrange,
    edge_weights,
)

TYPES = {"FP8": "E4M3_E8M0_32", "Q8_0": "Q8_0", "Q4_K": "Q4_K", "Q3_K": "Q3_K", "Q2_K": "Q2_K"}
SIZES = (1, 4, 8, 16, 32, 64)
PASSES = (65, 96, 128, 192, 256, 512, 2048)
OUTPUTS, INPUTS = 25600, 6144
COPIES: dict[int, torch.Tensor] = {}
Slots = NDArray[np.int64]
Dead = NDArray[np.bool_]


def stored_weights(bench: Bench, encoding: str, owner: ExitStack) -> StoredWkv:
    """Random weights of an encoding, arranged twice: graphs take turns between cold copies."""
    codes = torch.from_numpy(edge_weights(encoding, OUTPUTS, INPUTS)).cuda()
    scales = torch.randint(108, 120, (OUTPUTS // 32, INPUTS // 32), dtype=torch.uint8).cuda()
    scales_at = scales.data_ptr() if encoding == "E4M3_E8M0_32" else 0
    torch.cuda.synchronize()
    place = Stored(encoding, OUTPUTS, INPUTS, codes.data_ptr(), scales_at)
    made = arrange(bench.native, place, Stream(bench.native), owner)
    if isinstance(made, str):
        sys.exit(f"{encoding}: {made}")
    made.kernels = tuple(STORED_FORMS)
    copy = torch.empty((OUTPUTS, INPUTS), dtype=torch.bfloat16, device="cuda")
    params = abi.Dequantize(
        format=abi.FORMATS[encoding],
        rows_per_scale=32 if scales_at else 1,
        num_rows=OUTPUTS,
        row_values=INPUTS,
        codes=codes.data_ptr(),
        scales=scales_at,
        out=copy.data_ptr(),
        stream=bench.stream.handle,
    )
    bench.native.dequantize(byref(params))
    torch.cuda.synchronize()
    COPIES[id(made)] = copy
    return made


def projection(
    bench: Bench, engram: EngramV41, kernel: str, rows: torch.Tensor, tokens: int
) -> Maker:
    """`tokens` rows through one kernel; a kernel over stored weights in passes of 64."""
    kv = torch.empty((tokens, OUTPUTS), dtype=torch.bfloat16, device="cuda")
    step = INLINE_TOKENS if kernel in STORED_FORMS else tokens

    def make(_: int) -> Launch:
        def launch() -> None:
            for first in range(0, tokens, step):
                params = engram.project_params(
                    min(step, tokens - first),
                    bench.stream,
                    to=kv.data_ptr() + first * OUTPUTS * 2,
                    rows=rows.data_ptr() + first * INPUTS * 2,
                )
                engram.project_with(kernel, 0, params)

        return launch

    return make


def projections(
    bench: Bench, engrams: dict[str, EngramV41], peer: ModuleType | None, sizes: tuple[int, ...]
) -> dict[tuple[str, int], str]:
    """Every kernel over every type. Returns the fastest of each type and size."""
    fastest: dict[tuple[str, int], str] = {}
    for tokens in sizes:
        rows = torch.randn((tokens, INPUTS), device="cuda").to(torch.bfloat16)
        variants = {}
        for name, engram in engrams.items():
            kernels = (CHAIN, CUBLASLT) if name == "bf16" else tuple(STORED_FORMS)
            for kernel in kernels:
                what = f"project {name} {kernel}"
                variants[what] = projection(bench, engram, kernel, rows, tokens)
        if peer is not None:
            variants |= block_gemms(peer, tokens)
        measured = bench.gpu_us(variants, 30)
        blocks = {k: us for k, us in measured.items() if k.startswith("peer")}
        if blocks:
            best = min(blocks, key=lambda k: blocks[k])
            print(tokens, "block GEMM:", best, {k: round(v, 1) for k, v in blocks.items()})
            measured = {k: v for k, v in measured.items() if k not in blocks}
            measured["peer FP8 block GEMM, best"] = blocks[best]
            measured["peer FP8 block GEMM, as it comes"] = blocks["peer block, as it comes"]
        bench.record(tokens, measured)
        for name in engrams:
            own = {k: us for k, us in measured.items() if k.startswith(f"project {name} ")}
            best = min(own, key=lambda k: own[k])
            fastest[name, tokens] = best.removeprefix(f"project {name} ")
        del variants
        torch.cuda.empty_cache()
    return fastest


def layers(
    bench: Bench,
    engrams: dict[str, EngramV41],
    fastest: dict[tuple[str, int], str],
    peers: dict[str, ModuleType],
    sizes: tuple[int, ...],
) -> None:
    for tokens in sizes:
        variants = {}
        for name, engram in engrams.items():
            size = next(size for size in BATCH_CLASSES if tokens <= size)
            engram.prefer(0, size, fastest[name, tokens])
            variants[f"layer, {name} weights"] = our_layer(bench, tokens, 8192, engram)
        if peers:
            variants["peer layer (bf16)"] = peer_layer(bench, peers, tokens)
        bench.record(tokens, bench.gpu_us(variants, 30))
        for name, engram in engrams.items():
            if name != "bf16":
                engram.prefer(0, next(s for s in BATCH_CLASSES if tokens <= s), CHAIN)


def passes(bench: Bench, engrams: dict[str, EngramV41], sizes: tuple[int, ...]) -> None:
    for tokens in sizes:
        rows = torch.randn((tokens, INPUTS), device="cuda").to(torch.bfloat16)
        variants = {"cublasLt over bf16": projection(bench, bench.engram, CUBLASLT, rows, tokens)}
        for name, engram in engrams.items():
            if name != "bf16":
                for kernel in STORED_FORMS:
                    what = f"{name} {kernel}, passes of 64"
                    variants[what] = projection(bench, engram, kernel, rows, tokens)
        bench.record(tokens, bench.gpu_us(variants, 12))
        del variants
        torch.cuda.empty_cache()


def wall(bench: Bench, made: dict[str, StoredWkv | str], sizes: tuple[int, ...]) -> None:
    """A kv miss and a hit from a pinned residual to a pinned result, each type of weights."""
    for name, stored in made.items():
        layer = layer_of(bench, stored)
        backend = CudaBackend(
            bench.native, bench.geometry, bench.tables, [layer], 512, sizes=Sizes()
        )
        backend.open_gemm(cublaslt_candidates())
        backend.choose_kernels()
        backend.capture_graphs("auto")
        print(name, dict(backend.numerics), flush=True)
        for tokens in sizes:
            buffer = backend.host_buffer(tokens * 4 * 5120 * 2)
            residual = buffer.view(torch.bfloat16).view(tokens, 4, 5120)
            residual.copy_(torch.randn(1, 4, 5120).to(torch.bfloat16).expand(tokens, 4, 5120))
            windows = [bench.random_windows(tokens).numpy() for _ in range(8)]
            slots, dead = np.arange(tokens), np.zeros(tokens, np.bool_)

            calls = {
                "hit": partial(_hit, backend, slots, dead, residual),
                "miss": partial(_miss, backend, slots, dead, residual, windows),
            }
            bench.record(
                tokens,
                {f"{what} wall, {name}": wall_us(call, tokens) for what, call in calls.items()},
            )
        backend.synchronize()


def _hit(b: CudaBackend, slots: Slots, dead: Dead, residual: torch.Tensor, _: int) -> None:
    b.gate(0, slots, dead, residual, residual)


def _miss(
    b: CudaBackend,
    slots: Slots,
    dead: Dead,
    residual: torch.Tensor,
    windows: list[NDArray[np.int32]],
    turn: int,
) -> None:
    b.project(0, slots, windows=windows[turn % len(windows)])
    b.gate(0, slots, dead, residual, residual)


def layer_of(bench: Bench, stored: StoredWkv | str) -> DeviceLayer:
    return DeviceLayer(
        "E4M3_E8M0_32",
        bench.num_rows,
        [TorchBuffer(bench.codes), TorchBuffer(bench.scales)],
        TorchBuffer(COPIES.get(id(stored), bench.wkvs[0])),
        TorchBuffer(bench.qk),
        False,
        stored,
    )


def load_block_gemm(folder: Path | None) -> ModuleType | None:
    """SGLang's FP8 block GEMM by path, what it imports of SGLang stood in for."""
    path = folder / "sglang_fp8_gemm.py" if folder else None
    if path is None or not path.is_file():
        print("block GEMM: not run")
        return None

    def plain(*_: Any, **__: Any) -> Any:
        return lambda function: function

    def no(*_: Any) -> bool:
        return False

    stands = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {"deep_gemm_wrapper": SimpleNamespace(ENABLE_JIT_DEEPGEMM=False)},
        "sglang.srt.runtime_context": {"get_platform": lambda: SimpleNamespace(is_sm90=True)},
        "sglang.srt.utils": {
            "get_device_core_count": lambda: 132,
            "get_device_name": torch.cuda.get_device_name,
            "is_cuda": lambda: True,
            "is_gfx1250_supported": no,
            "is_hip": no,
            "log_info_on_rank0": print,
        },
        "sglang.srt.utils.custom_op": {"register_custom_op": plain},
    }
    for name, members in stands.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("peer_fp8_gemm", path)
    if spec is None or spec.loader is None:
        sys.exit(f"peers: cannot load {path}")
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    return peer


def block_gemms(peer: ModuleType, tokens: int) -> dict[str, Maker]:
    """Weights of 32 x 32 blocks, activations of 32; bfloat16 out. 32 of k a step, as its scales
    ask for."""
    x = torch.randn((tokens, INPUTS), device="cuda").to(torch.float8_e4m3fn)
    x_scales = torch.rand((tokens, INPUTS // 32), device="cuda") + 0.5
    weights = [
        torch.randn((OUTPUTS, INPUTS), device="cuda").to(torch.float8_e4m3fn) for _ in range(2)
    ]
    scales = torch.rand((OUTPUTS // 32, INPUTS // 32), device="cuda") + 0.5
    default = peer.get_w8a8_block_fp8_configs

    def variant(config: dict[str, int] | None) -> Maker:
        def make(i: int) -> Launch:
            def launch() -> None:
                if config is not None:
                    peer.get_w8a8_block_fp8_configs = lambda *_: {tokens: config}
                peer.w8a8_block_fp8_matmul_triton(
                    x, weights[i % 2], x_scales, scales, [32, 32], torch.bfloat16
                )
                peer.get_w8a8_block_fp8_configs = default

            return launch

        return make

    made: dict[str, Maker] = {"peer block, as it comes": variant(None)}
    for rows, columns, stages in ((16, 64, 5), (16, 128, 5), (64, 64, 5), (64, 128, 4)):
        config = {
            "BLOCK_SIZE_M": rows,
            "BLOCK_SIZE_N": columns,
            "BLOCK_SIZE_K": 32,
            "GROUP_SIZE_M": 1,
            "num_warps": 4,
            "num_stages": stages,
        }
        made[f"peer block {rows}x{columns} {stages} stages"] = variant(config)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=384_000_000)
    parser.add_argument("--what", default="projections,layers,passes,wall")
    parser.add_argument("--types", default=",".join(TYPES))
    options = parser.parse_args()
    what = options.what.split(",")
    torch.manual_seed(0)
    bench = Bench(options.rows)
    bench.engram.open_gemm(next(path for path in cublaslt_candidates() if Path(path).is_file()))
    print("one fill in a graph, us:", round(empty_graph_us(bench), 2))
    with ExitStack() as owner:
        made: dict[str, StoredWkv | str] = {
            name: stored_weights(bench, TYPES[name], owner) for name in options.types.split(",")
        }
        engrams = {"bf16": bench.engram}
        engrams |= {name: bench.make_engram(stored) for name, stored in made.items()}
        fastest: dict[tuple[str, int], str] = {}
        if "projections" in what or "layers" in what:
            fastest = projections(bench, engrams, load_block_gemm(options.peers), SIZES)
        if "layers" in what:
            layers(bench, engrams, fastest, load_peers(options.peers), SIZES)
        if "passes" in what:
            passes(bench, engrams, PASSES)
        if "wall" in what:
            wall(bench, {"bf16": "bf16 alone", **made}, (1, 4, 16, 64))
    lines = table_lines(bench.results)
    print("\n".join(lines))
    answer = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": bench.num_rows,
        "us": bench.results,
        "fastest": {f"{name} T {tokens}": kernel for (name, tokens), kernel in fastest.items()},
    }
    print(json.dumps(answer))
    if options.out:
        options.out.write_text("\n".join([*lines, "", json.dumps(answer), ""]))


if __name__ == "__main__":
    main()
