"""Every kernel once over small ragged inputs: run under compute-sanitizer (see docs/notes/cuda.md).

compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize
compute-sanitizer --tool racecheck python -m tests.gpu.sanitize --own
--stored runs the kernels over stored wkv alone.

--own leaves cublasLt out: racecheck reports its kernels (nvjet), whose barriers it does not know.
"""

from __future__ import annotations

import sys
from collections import Counter
from ctypes import byref, pointer

import numpy as np
import torch

from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.native import cublaslt_candidates
from engram_core.backends.stored_wkv import STORED, WGMMA
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.conftest import open_device
from tests.gpu.layers import (
    device_layer,
    geometry_of,
    hash_tables,
    random_layer,
    random_windows,
)
from tests.gpu.test_stored import ENCODINGS, Weights


class Counted(abi.Native):
    """Counts launches by kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def count(self, what: str) -> None:
        self.launches[what] += 1


def gather_everything(arrays: Arrays, native: Counted) -> None:
    for name, form in abi.FORMATS.items():
        width = native.row_bytes(form, 256)
        rows = np.random.default_rng(form).integers(0, 256, (301, width), dtype=np.uint8)
        table = abi.Table(format=form, head_dim=256, num_rows=301, codes=arrays.up(rows).address)
        for count in (1, 13, 200):
            ids = np.random.default_rng(count).integers(0, 301, (count, 24))
            ids[-1, -1] = 300
            for output in (abi.OUT_BF16, abi.OUT_REQUANTIZED, abi.OUT_STORED):
                params = abi.Gather(
                    table=pointer(table),
                    hash_ids=arrays.up(ids).address,
                    num_tokens=count,
                    num_cols=24,
                    output=output,
                    out=arrays.empty(count * 24 * max(width, 512)).address,
                    stream=arrays.stream.handle,
                )
                native.gather(byref(params))
                native.count(f"gather {name} output {output}")
        dequantize = abi.Dequantize(
            format=form,
            rows_per_scale=1,
            num_rows=301,
            row_values=256,
            codes=table.codes,
            out=arrays.empty(301 * 512).address,
            stream=arrays.stream.handle,
        )
        native.dequantize(byref(dequantize))
        native.count(f"dequantize {name}")
        arrays.wait()


def serve_everything(
    arrays: Arrays, native: Counted, dim: int, hc_mult: int, *, with_cublaslt: bool
) -> None:
    tables = hash_tables(50, num_layers=2, num_heads=2)
    geometry = geometry_of(tables, dim=dim, hc_mult=hc_mult)
    layers = [
        random_layer(geometry, seed=1),
        random_layer(geometry, seed=2, requantize_input=True, layer_index=1),
    ]
    backend = CudaBackend(
        native,
        geometry,
        tables,
        [device_layer(arrays, layer) for layer in layers],
        400,
        sizes=Sizes(chunk_tokens=96, lane_tokens=80, num_lanes=2),
    )
    for with_gemm in (False, True)[: 1 + with_cublaslt]:
        if with_gemm and not backend.open_gemm(cublaslt_candidates()):
            print("cublasLt:", backend.numerics)
        for count in (1, 9, 17, 64, 65, 200):
            windows, slots = random_windows(count, seed=count), np.arange(count)
            dead = slots % 5 == 2
            backend.project(0, slots, windows=windows)
            backend.project(1, slots[::-1].copy(), windows=windows)
            out = torch.empty((count, hc_mult + 1, dim), dtype=torch.bfloat16)
            backend.read_kv(0, slots, dead, out)
            for dtype in (torch.bfloat16, torch.float32):
                residual = torch.randn((count, hc_mult, dim)).to(dtype)
                backend.gate(0, slots, dead, residual, residual)
                backend.gate(1, slots, dead, residual, torch.empty_like(residual))
                native.count(f"gate {dtype} dim {dim} T {count}")
            native.count(f"project T {count} gemm {with_gemm}")
    if with_cublaslt:
        backend.self_check()
    backend.close()


def replay_everything(arrays: Arrays, native: Counted) -> None:
    """Graphs of up to 17 tokens: every kernel that reads a descriptor, chain and gates."""
    tables = hash_tables(50, num_layers=2, num_heads=2)
    geometry = geometry_of(tables, dim=64, hc_mult=2)
    layers = [
        device_layer(arrays, random_layer(geometry, seed=index, layer_index=index))
        for index in range(2)
    ]
    sizes = Sizes(chunk_tokens=17, lane_tokens=17, num_lanes=2)
    backend = CudaBackend(native, geometry, tables, layers, 40, sizes=sizes)
    backend.capture_graphs("on")
    print("graphs:", backend.numerics["graphs"], flush=True)
    for count in (1, 8, 13, 17):
        windows, slots = random_windows(count, seed=count), np.arange(count)
        for layer_index in (0, 1):
            backend.project(layer_index, slots, windows=windows)
            for dtype in (torch.bfloat16, torch.float32):
                buffer = backend.host_buffer(count * 2 * 64 * dtype.itemsize)
                residual = buffer.view(dtype).view(count, 2, 64)
                residual.copy_(torch.randn((count, 2, 64)).to(dtype))
                backend.gate(layer_index, slots, slots % 5 == 2, residual, residual)
        native.count(f"graphs of projections and gates T {count}")
    backend.close()


def project_stored_everything(arrays: Arrays, native: Counted) -> None:
    device = native.device(0)
    kernels = [STORED, WGMMA] if (device.major, device.minor) == (9, 0) else [STORED]
    for encoding in ENCODINGS:
        for shape in ((32, 256), (160, 768), (4256, 512)):
            weights = Weights(arrays, encoding, *shape)
            native.count(f"arrange {encoding} {shape}")
            for count in (1, 8, 13, 32, 40, 64):
                for kernel in kernels:
                    got = weights.project(count, kernel)
                    assert same_bits(got, weights.kv[:count]), (encoding, shape, count, kernel)
                    native.count(f"project {kernel} {encoding} {shape} T {count}")
            weights.close()


def main() -> None:
    open_device()
    native = Counted()
    arrays = Arrays(native)
    project_stored_everything(arrays, native)
    if "--stored" in sys.argv:
        report(arrays, native)
        return
    gather_everything(arrays, native)
    print("gather done", flush=True)
    replay_everything(arrays, native)
    with_cublaslt = "--own" not in sys.argv
    serve_everything(arrays, native, 64, 2, with_cublaslt=with_cublaslt)
    serve_everything(arrays, native, 5120 if with_cublaslt else 512, 4, with_cublaslt=with_cublaslt)
    report(arrays, native)


def report(arrays: Arrays, native: Counted) -> None:
    arrays.close()
    for what, count in sorted(native.launches.items()):
        print(f"{count:4d} x {what}")
    print(f"{sum(native.launches.values())} launches counted, all kernels of csrc/cuda")


if __name__ == "__main__":
    main()
