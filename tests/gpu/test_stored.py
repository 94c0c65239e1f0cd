"""wkv multiplied as stored: the chain's bits at every T from 1 to 64, over every kind of weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends import native as abi
from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.cuda_check import stored_matches_chain
from engram_core.backends.device import DeviceBuffer
from engram_core.backends.engram_v41 import DeviceLayer
from engram_core.backends.native import Native, Unsupported, cublaslt_candidates
from engram_core.backends.stored_wkv import (
    CHAIN,
    STORED,
    STORED_FORMS,
    WGMMA,
    Stored,
    StoredWkv,
    arrange,
    edge_scales,
    edge_weights,
)
from engram_core.errors import BadTensor
from engram_core.quant import dequantize_fp8_matrix, row_format, to_bf16
from tests.gpu.arrays import Arrays, same_bits
from tests.gpu.layers import device_layer, geometry_of, hash_tables, random_layer, random_windows

ENCODINGS = ["E4M3_E8M0_32", "Q8_0", "Q2_K", "Q3_K", "Q4_K"]
EVERY_SIZE = list(range(1, 65))


class Weights:
    """One wkv three ways: its stored bytes arranged, its bf16 copy, and 64 rows to multiply."""

    def __init__(self, arrays: Arrays, encoding: str, outputs: int, inputs: int) -> None:
        self.arrays, self.shape, self.owned = arrays, (outputs, inputs), ExitStack()
        self.codes = edge_weights(encoding, outputs, inputs)
        is_fp8 = encoding == "E4M3_E8M0_32"
        self.scales = edge_scales(outputs, inputs) if is_fp8 else None
        codes = arrays.up(self.codes)
        scales = arrays.up(self.scales).address if self.scales is not None else 0
        made = arrange(
            arrays.native,
            Stored(encoding, outputs, inputs, codes.address, scales),
            arrays.stream,
            self.owned,
        )
        assert isinstance(made, StoredWkv), made
        self.stored = made
        self.wkv = arrays.empty(outputs * inputs * 2)
        dequantize = abi.Dequantize(
            format=abi.FORMATS[encoding],
            rows_per_scale=32 if is_fp8 else 1,
            num_rows=outputs,
            row_values=inputs,
            codes=codes.address,
            scales=scales,
            out=self.wkv.address,
            stream=arrays.stream.handle,
        )
        arrays.native.dequantize(byref(dequantize))
        arrays.wait()
        codes.close()
        generator = torch.Generator().manual_seed(inputs)
        self.rows = torch.randn((64, inputs), generator=generator).to(torch.bfloat16)
        self.device_rows = arrays.up(self.rows)
        self.kv = self.project(64, CHAIN)

    def project(
        self, count: int, kernel: str, *, first: int = 0, slots: NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        outputs, inputs = self.shape
        num_slots = count if slots is None else int(slots.max()) + 1
        out = self.arrays.empty(num_slots * outputs * 2)
        params = abi.Project(
            rows=self.device_rows.address + first * inputs * 2,
            wkv=(self.wkv if kernel == CHAIN else self.stored.arranged).address,
            kv=out.address,
            slots=0 if slots is None else slots.ctypes.data,
            num_tokens=count,
            in_features=inputs,
            out_features=outputs,
            stream=self.arrays.stream.handle,
        )
        if kernel == CHAIN:
            self.arrays.native.project_chain(byref(params))
        else:
            format_id = abi.FORMATS[self.stored.encoding]
            whole = abi.ProjectStored(params, format_id, STORED_FORMS[kernel])
            self.arrays.native.project_stored(byref(whole))
        kv = self.arrays.down(out, torch.bfloat16, (num_slots, outputs))
        out.close()
        return kv

    def close(self) -> None:
        self.owned.close()


@pytest.fixture(params=list(STORED_FORMS))
def kernel(native: Native, request: pytest.FixtureRequest) -> str:
    """Each form that this device has; wgmma exists on compute capability 9.0 alone."""
    device = native.device(0)
    if request.param == WGMMA and (device.major, device.minor) != (9, 0):
        params = abi.Project(num_tokens=1, in_features=256, out_features=32)
        whole = abi.ProjectStored(params, abi.FORMATS["Q2_K"], abi.STORED_WGMMA)
        with pytest.raises(Unsupported, match=r"compute capability 9\.0"):
            native.project_stored(byref(whole))
        return STORED
    return str(request.param)


@pytest.fixture(scope="module", params=ENCODINGS)
def weights(native: Native, request: pytest.FixtureRequest) -> Iterator[Weights]:
    arrays = Arrays(native)
    made = Weights(arrays, request.param, 25600, 6144)
    yield made
    made.close()
    arrays.close()


@pytest.mark.parametrize("count", EVERY_SIZE)
def test_stored_weights_give_the_bits_of_the_chain(
    weights: Weights, kernel: str, count: int
) -> None:
    for first in {0, 64 - count}:
        got = weights.project(count, kernel, first=first)
        assert same_bits(got, weights.kv[first : first + count])


def test_most_weights_of_the_test_are_finite(weights: Weights) -> None:
    assert float(weights.kv.isfinite().float().mean()) > 0.95
    assert len(weights.kv.unique()) > 1000


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "shape", [(32, 256), (160, 512), (64, 768), (4256, 1280), (30720, 256), (64, 11520)]
)
@pytest.mark.parametrize("count", [1, 8, 13, 16, 29, 32, 50, 64])
def test_small_and_odd_weights_give_the_bits_of_the_chain(
    arrays: Arrays, kernel: str, encoding: str, shape: tuple[int, int], count: int
) -> None:
    made = Weights(arrays, encoding, *shape)
    assert same_bits(made.project(count, kernel, first=64 - count), made.kv[64 - count :])
    made.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_chain_of_the_test_multiplies_the_definition(arrays: Arrays, encoding: str) -> None:
    made = Weights(arrays, encoding, 160, 512)
    if made.scales is None:
        want = row_format(encoding).dequantize(made.codes)
    else:
        want = dequantize_fp8_matrix(made.codes, made.scales)
    assert same_bits(arrays.down(made.wkv, torch.bfloat16, (160, 512)), to_bf16(want))
    made.close()


@pytest.mark.parametrize("count", [1, 9, 30, 64])
def test_kv_goes_to_its_slot_and_nowhere_else(weights: Weights, kernel: str, count: int) -> None:
    slots = np.random.default_rng(3).permutation(2 * count)[:count].astype(np.int64)
    got = weights.project(count, kernel, slots=slots)
    assert same_bits(got[torch.from_numpy(slots)], weights.kv[:count])
    untouched = np.setdiff1d(np.arange(len(got)), slots)
    assert (got[torch.from_numpy(untouched)].view(torch.int16) == -23131).all()  # 0xA5A5


@pytest.mark.parametrize("count", [5, 16, 32, 64])
def test_a_bad_row_spoils_its_own_token_only(weights: Weights, kernel: str, count: int) -> None:
    inputs = weights.shape[1]
    place = weights.device_rows.address + 3 * inputs * 2
    weights.arrays.write(place, torch.full((inputs,), torch.nan, dtype=torch.bfloat16))
    got = weights.project(count, kernel)
    weights.arrays.write(place, weights.rows[3])
    others = [t for t in range(count) if t != 3]
    assert got[3].isnan().all()
    assert same_bits(got[others], weights.kv[others])


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 120), (0xFF, 120), (0x10, 135), (0x10, 255)])
def test_weights_beyond_the_kernel_are_refused(arrays: Arrays, code: int, scale: int) -> None:
    codes, scales = np.full((32, 256), 0x21, np.uint8), np.full((1, 8), 120, np.uint8)
    codes[31, 255], scales[0, 7] = code, scale
    place = Stored("E4M3_E8M0_32", 32, 256, arrays.up(codes).address, arrays.up(scales).address)
    with ExitStack() as owned:
        assert "NaN codes" in str(arrange(arrays.native, place, arrays.stream, owned))


def test_more_than_64_tokens_are_refused(arrays: Arrays) -> None:
    params = abi.Project(num_tokens=65, in_features=256, out_features=32)
    whole = abi.ProjectStored(project=params, format=abi.FORMATS["Q2_K"])
    with pytest.raises(BadTensor, match=r"0\.\.64, got 65"):
        arrays.native.project_stored(byref(whole))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_backend_says_what_it_measured_and_keeps_the_bits(
    arrays: Arrays, native: Native, encoding: str
) -> None:
    tables = hash_tables(500)
    geometry = geometry_of(tables, dim=1024)
    made = Weights(arrays, encoding, geometry.out_features, geometry.in_features)
    layer = device_layer(arrays, random_layer(geometry, seed=1))
    layers = [with_weights(layer, made)]
    backend = CudaBackend(native, geometry, tables, layers, 200, sizes=Sizes(chunk_tokens=256))
    assert backend.open_gemm(cublaslt_candidates())
    windows, dead = random_windows(64, seed=3), np.zeros(64, np.bool_)
    answers = []
    for _ in range(2):
        backend.project(0, np.arange(64), windows=windows)
        out = torch.empty((64, 5, 1024), dtype=torch.bfloat16)
        backend.read_kv(0, np.arange(64), dead, out)
        answers.append(out)
        backend.choose_kernels()
    assert same_bits(answers[0], answers[1])
    for kernel in made.stored.kernels:
        assert stored_matches_chain(backend.engram, 0, arrays.stream, kernel) == []
    print(dict(backend.numerics))
    assert "T <= 64" in backend.numerics["wkv_kernels_1"]
    assert "as stored" in backend.numerics["wkv_stored_1"]
    backend.close()
    made.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_without_the_bf16_copy_every_batch_has_the_same_bits(
    arrays: Arrays, native: Native, encoding: str
) -> None:
    tables = hash_tables(500)
    geometry = geometry_of(tables, dim=1024)
    answers: list[list[torch.Tensor]] = []
    for has_copy in (True, False):
        made = Weights(arrays, encoding, geometry.out_features, geometry.in_features)
        layer = with_weights(device_layer(arrays, random_layer(geometry, seed=1)), made)
        layer.wkv = layer.wkv if has_copy else None
        sizes = Sizes(chunk_tokens=256)
        backend = CudaBackend(native, geometry, tables, [layer], 400, sizes=sizes)
        assert backend.open_gemm(cublaslt_candidates()) == has_copy
        backend.choose_kernels()
        backend.capture_graphs("on")
        backend.self_check()
        answers.append([kv_of(backend, count) for count in (1, 9, 64, 65, 130, 300)])
        backend.close()
        made.close()
    assert "passes of 64" in backend.numerics["wkv"]
    for got, want in zip(*answers, strict=True):
        assert same_bits(got, want)


def kv_of(backend: CudaBackend, count: int) -> torch.Tensor:
    slots = np.random.default_rng(count).permutation(400)[:count].astype(np.int64)
    backend.project(0, slots, windows=random_windows(count, seed=count))
    out = torch.empty((count, 5, 1024), dtype=torch.bfloat16)
    backend.read_kv(0, slots, np.zeros(count, np.bool_), out)
    return out


def with_weights(layer: DeviceLayer, made: Weights) -> DeviceLayer:
    """The layer over these weights; the backend frees its copies."""
    layer.wkv, layer.stored = Borrowed(made.wkv), made.stored
    return layer


class Borrowed(DeviceBuffer):
    """Somebody else's memory."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.address, self.num_bytes = buffer.address, buffer.num_bytes

    def close(self) -> None:
        """Leave it."""
