"""Bodies in pinned and in registered memory: worked on in place, with the bits of plain memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.native import Native
from engram_core.direct import OneAnswer, OneRead
from engram_core.engine import Engine
from engram_core.engine_types import (
    EPOCH_OPENED,
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepRequest,
)
from engram_core.host_memory import PlainMemory
from service.shm import Regions
from tests.gpu.arrays import same_bits
from tests.gpu.layers import random_windows
from tests.gpu.test_backend import Served

COUNTS = [1, 32, 33, 300]


@pytest.fixture(scope="module")
def served(native: Native) -> Iterator[Served]:
    made = Served(native, Sizes())
    made.backend.pin_in_flight(64 << 20)
    made.backend.project(0, np.arange(300), windows=random_windows(300, seed=3))
    yield made
    made.backend.close()
    made.arrays.close()


def is_pinned(backend: CudaBackend, tensor: torch.Tensor) -> bool:
    return backend._is_pinned(tensor)


def plain_gate(served: Served, residual: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(residual)
    count = len(residual)
    served.backend.gate(0, np.arange(count), np.zeros(count, np.bool_), residual, out)
    return out


def check(served: Served, memory: np.ndarray, count: int, *, in_place: bool) -> None:
    """A residual and its kv in `memory` have the bits they have in plain memory."""
    residual = torch.randn((count, 4, 1024), generator=torch.Generator().manual_seed(count))
    residual = residual.bfloat16()
    want = plain_gate(served, residual)
    slots, dead = np.arange(count), np.zeros(count, np.bool_)
    there = torch.from_numpy(memory[: count * 8192]).view(torch.bfloat16).view(residual.shape)
    there.copy_(residual)
    assert is_pinned(served.backend, there) == in_place
    served.backend.gate(0, slots, dead, there, there)
    assert same_bits(there, want)
    kv = torch.empty((count, 5, 1024), dtype=torch.bfloat16)
    served.backend.read_kv(0, slots, dead, kv)
    there = torch.from_numpy(memory[: count * 10240]).view(torch.bfloat16).view(kv.shape)
    served.backend.read_kv(0, slots, dead, there)
    assert same_bits(there, kv)


@pytest.mark.parametrize("count", COUNTS)
def test_a_body_of_the_pool_is_worked_on_in_place(served: Served, count: int) -> None:
    memory = served.backend.host_memory.buffer(count * 10240)
    check(served, memory, count, in_place=True)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [2, 8])
def test_a_body_that_is_not_aligned_is_copied(served: Served, count: int, offset: int) -> None:
    memory = served.backend.host_memory.buffer(count * 10240 + 16)
    check(served, memory[offset:], count, in_place=False)


@pytest.mark.parametrize("count", COUNTS)
def test_registered_memory_is_worked_on_in_place_until_it_is_forgotten(
    served: Served, count: int
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
    check(served, memory, count, in_place=False)
    assert served.backend.host_memory.register(memory)
    check(served, memory, count, in_place=True)
    served.backend.host_memory.unregister(memory.ctypes.data)
    check(served, memory, count, in_place=False)


def test_regions_are_registered_and_end(served: Served) -> None:
    regions = Regions(64 << 20, served.backend.host_memory)
    assert regions.mode == "in place"
    for _ in range(3):
        region = regions.open("", 4 << 20)
        check(served, region.memory, 33, in_place=True)
        del region
        assert regions.used_bytes == 0


def test_memory_that_cannot_be_registered_is_said_so(served: Served) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    assert served.backend.host_memory.register(memory)
    assert not served.backend.host_memory.register(memory)  # it is already
    check(served, memory, 33, in_place=True)
    served.backend.host_memory.unregister(memory.ctypes.data)
    check(served, memory, 33, in_place=False)


def test_more_than_can_be_pinned_stays_plain(native: Native) -> None:
    made = Served(native, Sizes())
    made.backend.pin_in_flight(1 << 50)
    assert isinstance(made.backend.host_memory, PlainMemory)
    assert "copied once" in made.backend.numerics["in_flight"]
    made.backend.project(0, np.arange(9), windows=random_windows(9, seed=3))
    check(made, np.empty(1 << 20, np.uint8), 9, in_place=False)
    made.backend.close()
    made.arrays.close()


@pytest.mark.parametrize("count", [1, 5, 33, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_reads_of_the_asking_thread_have_the_bits_of_a_lane_s(
    native: Native, count: int, dtype: torch.dtype
) -> None:
    made = Served(native, Sizes())
    made.backend.pin_in_flight(16 << 20)
    made.backend.offer_near_reads()
    assert len(made.backend.near_reads) == 2, made.backend.numerics["near_reads"]
    limits = EngineLimits(near_tokens=512, near_jobs=False, ahead_tokens=0)
    with Engine(made.backend, limits) as engine:
        engine.attach(lambda call: call())
        session = engine.open("", OpenRequest()).session_id
        ids, mask = np.arange(600) % 7, np.arange(600) % 5 != 3
        engine.push("", session, 0, ids, mask)
        residual = torch.randn((count, 4, 1024)).to(dtype)
        for layer_index, layer in enumerate(made.geometry.layer_ids):
            request = StepRequest(
                Segments(np.array([count], np.int32), np.array([9]), np.array([session])),
                Output.RESIDUAL,
                (layer,),
                residual.clone(),
            )
            want = engine.step("", request).result(30).tensors[layer]
            made.backend.synchronize()
            there = made.backend.host_memory.tensor(tuple(residual.shape), dtype)
            there.copy_(residual)

            def read(address: int, at: int = layer_index) -> OneAnswer | None:
                one = OneRead(session, 9, count, EPOCH_OPENED, at, address, dtype == torch.float32)
                return engine.read_residual("", one)

            plain = residual.clone()
            assert read(plain.data_ptr()) is None  # a copy would have to be waited for
            assert same_bits(plain, residual)
            answer = read(there.data_ptr())
            assert answer is not None
            assert answer.length == 600
            assert same_bits(there, want)
    made.backend.close()
    made.arrays.close()
