"""Bodies in pinned and in registered memory: worked on in place, with the bits of plain memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from engram_core.backends.cuda_backend import CudaBackend, Sizes
from engram_core.backends.native import Native
from engram_core.direct import Answer, Ask
from engram_core.engine import Engine
from engram_core.engine_types import (
    EPOCH_OPENED,
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepAnswer,
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


class Near:
    """An engine that belongs to this thread. turn: what is to be called at the end of its turn"""

    def __init__(self, native: Native) -> None:
        self.served = Served(native, Sizes())
        self.backend = self.served.backend
        self.backend.capture_graphs("on")
        self.backend.pin_in_flight(16 << 20)
        self.backend.offer_near_reads()
        assert "missing kv too" in self.backend.numerics["near_reads"]
        self.engine = Engine(self.backend, EngineLimits(near_tokens=512, ahead_tokens=0))
        self.turn: list[Callable[[], None]] = []
        self.engine.attach(self.turn.append)
        self.layers = self.served.geometry.layer_ids

    @property
    def num_by_lanes(self) -> float:
        """Batches that lanes have run."""
        return self.engine.counters["kv_batches"] + self.engine.counters["rows_batches"]

    def opened(self, tenant: str, count: int = 600) -> int:
        """A session whose every tenant reads other kv: the same windows, other keys."""
        session = self.engine.open(tenant, OpenRequest()).session_id
        ids, mask = np.arange(count) % 7, np.arange(count) % 5 != 3
        self.engine.push(tenant, session, 0, ids, mask)
        return session

    def step(self, tenant: str, request: StepRequest) -> StepAnswer:
        """By the lane: what the turn would do is left out."""
        took, self.engine._scheduler.near.take = self.engine._scheduler.near.take, lambda job: False  # type: ignore[method-assign]
        answer = self.engine.step(tenant, request).result(30)
        self.engine._scheduler.near.take = took  # type: ignore[method-assign]
        self.backend.synchronize()
        return answer

    def turned(self, tenant: str, requests: list[StepRequest]) -> list[StepAnswer]:
        """By this thread, at the end of one turn."""
        answers = [self.engine.step(tenant, request) for request in requests]
        before = self.num_by_lanes
        while self.turn:
            self.turn.pop()()
        assert self.num_by_lanes == before
        assert all(answer.done() for answer in answers)
        return [answer.result() for answer in answers]

    def close(self) -> None:
        self.engine.close()
        self.backend.close()
        self.served.arrays.close()


@pytest.fixture(scope="module")
def near(native: Native) -> Iterator[Near]:
    made = Near(native)
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 5, 16, 17, 33, 64, 65, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_reads_of_the_asking_thread_have_the_bits_of_a_lane_s(
    near: Near, count: int, dtype: torch.dtype
) -> None:
    engine, backend = near.engine, near.backend
    name = f"{count}-{dtype}"
    session, other = near.opened(name), near.opened(name + "-other")
    residual = torch.randn((count, 4, 1024)).to(dtype)
    there = backend.host_memory.tensor(tuple(residual.shape), dtype)
    for layer_index, layer in enumerate(near.layers):
        asked = Segments(np.array([count], np.int32), np.array([9]), np.array([session]))
        request = StepRequest(asked, Output.RESIDUAL, (layer,), residual.clone())
        want = near.step(name, request).tensors[layer]

        def read(tenant: str, address: int, at: int = layer_index) -> Answer | None:
            owner = session if tenant == name else other
            segments, is_f32 = [(owner, 9, count, EPOCH_OPENED)], dtype == torch.float32
            return engine.answer([Ask(tenant, segments, None, at, address, is_f32)])[0]

        plain = residual.clone()
        answer = read(name, plain.data_ptr())
        assert (answer is not None) == (count <= 16)  # a longer copy would have to be waited for
        assert same_bits(plain, residual if answer is None else want)
        there.copy_(residual)
        answer = read(name, there.data_ptr())
        assert answer is not None
        assert [spot.length for spot in answer.sessions] == [600]
        assert same_bits(there, want)
        # Of another tenant no kv is there: it is made here, up to 64 of them.
        before = engine.counters["kv_misses"]
        there.copy_(residual)
        answer = read(name + "-other", there.data_ptr())
        distinct = len({tuple(w) for w in windows_of(count)})
        assert (answer is not None) == (distinct <= 64)
        assert same_bits(there, residual if answer is None else want)
        if answer is not None:
            assert engine.counters["kv_misses"] == before + distinct
            there.copy_(residual)
            assert read(name + "-other", there.data_ptr()) is not None
            assert same_bits(there, want)
            assert engine.counters["kv_misses"] == before + distinct


def windows_of(count: int) -> list[list[int]]:
    """Windows of the positions of `Near.opened` from 9 on (ids are their own here, 2 pads)."""
    found = []
    for position in range(9, 9 + count):
        places = range(position, position - 4, -1)
        num_live = next((i for i, at in enumerate(places) if at % 5 == 3), 4)
        found.append([at % 7 if i < num_live else 2 for i, at in enumerate(places)])
    return found


@pytest.mark.parametrize("count", [1, 4, 16])
def test_what_is_pushed_and_read_at_once_is_what_two_steps_give(near: Near, count: int) -> None:
    engine, layer = near.engine, near.layers[1]
    names = f"push-{count}", f"push-{count}-other"
    one, other = (near.opened(name, 200) for name in names)
    ids = [3 + i for i in range(count)]
    residual = torch.randn((count, 4, 1024)).bfloat16()
    asked = Segments(
        np.array([count], np.int32), np.array([200]), np.array([one]), token_ids=np.array(ids)
    )
    request = StepRequest(asked, Output.RESIDUAL, (layer,), residual.clone())
    want = near.step(names[0], request).tensors[layer]
    there = near.backend.host_memory.tensor(tuple(residual.shape), torch.bfloat16)
    there.copy_(residual)
    segments = [(other, 200, count, EPOCH_OPENED)]
    (answer,) = engine.answer([Ask(names[1], segments, ids, 1, there.data_ptr())])
    assert answer is not None
    assert (
        [spot.length for spot in answer.sessions]
        == [200 + count]
        == [engine.get(names[1], other).length]
    )
    assert same_bits(there, want)
    assert (
        engine.get(names[0], one).compressed_lookback
        == engine.get(names[1], other).compressed_lookback
    )


@pytest.mark.parametrize("output", [Output.RESIDUAL, Output.KV, Output.ROWS, Output.HASH_IDS])
@pytest.mark.parametrize("counts", [[1], [1, 1, 3], [5] * 12, [60], [64]])
def test_steps_of_one_turn_are_one_batch_here_whatever_is_missing(
    near: Near, output: Output, counts: list[int]
) -> None:
    names = [f"turn-{output}-{counts}-{i}" for i in range(2)]
    sessions = [[near.opened(name) for _ in counts] for name in names]
    layers = near.layers[:1] if output is Output.RESIDUAL else near.layers
    total = sum(counts)
    residual = torch.randn((total, 4, 1024)).bfloat16()
    place = np.array([9 + 7 * i for i in range(len(counts))])

    def request(which: int) -> StepRequest:
        asked = Segments(np.array(counts, np.int32), place, np.array(sessions[which]))
        memory = near.backend.host_memory
        body = memory.tensor(tuple(residual.shape), torch.bfloat16)
        body.copy_(residual)
        is_residual = output is Output.RESIDUAL
        return StepRequest(asked, output, layers, body if is_residual else None)

    if total * len(layers) > 64:
        return
    want = near.step(names[0], request(0))
    # Some of it is there, in part of the tenant's sessions; then all of it.
    some = Segments(np.array([2], np.int32), place[:1], np.array(sessions[1][:1]))
    near.step(names[1], StepRequest(some, Output.KV, near.layers[:1]))
    for _ in range(2):
        for got in near.turned(names[1], [request(1)]):
            assert got.dead.tolist() == want.dead.tolist()
            for layer in layers:
                one, other = got.tensors[layer], want.tensors[layer]
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_several_steps_of_one_turn_share_what_is_made(near: Near) -> None:
    name = "shared-turn"
    sessions = [near.opened(name) for _ in range(8)]
    residual = torch.randn((1, 4, 1024)).bfloat16()
    requests = []
    for session in sessions:
        asked = Segments(np.array([1], np.int32), np.array([50]), np.array([session]))
        requests.append(StepRequest(asked, Output.RESIDUAL, near.layers[:1], residual.clone()))
    before = near.engine.counters
    answers = near.turned(name, requests)
    after = near.engine.counters
    assert after["near_batches"] == before["near_batches"] + 1
    assert after["kv_misses"] == before["kv_misses"] + 1
    assert after["kv_duplicates"] == before["kv_duplicates"] + 7
    first, *others = (answer.tensors[near.layers[0]] for answer in answers)
    assert all(same_bits(first, each) for each in others)


@pytest.mark.parametrize("counts", [[1, 1], [3, 1, 4], [4] * 16])
def test_a_few_segments_are_one_batch_whatever_is_missing(near: Near, counts: list[int]) -> None:
    names = [f"few-{counts}-{i}" for i in range(2)]
    sessions = [[near.opened(name, 200) for _ in counts] for name in names]
    total = sum(counts)
    residual = torch.randn((total, 4, 1024)).bfloat16()
    asked = Segments(
        np.array(counts, np.int32),
        np.full(len(counts), 200),
        np.array(sessions[0]),
        token_ids=np.arange(total) % 9,
    )
    layer = near.layers[1]
    want = near.step(names[0], StepRequest(asked, Output.RESIDUAL, (layer,), residual.clone()))
    there = near.backend.host_memory.tensor(tuple(residual.shape), torch.bfloat16)
    there.copy_(residual)
    segments = [(s, 200, count, EPOCH_OPENED) for s, count in zip(sessions[1], counts, strict=True)]
    before = near.num_by_lanes
    ids = (np.arange(total) % 9).tolist()
    (answer,) = near.engine.answer([Ask(names[1], segments, ids, 1, there.data_ptr())])
    assert answer is not None
    assert near.num_by_lanes == before
    assert [spot.length for spot in answer.sessions] == want.length.tolist()
    assert answer.dead == want.dead.tobytes()
    assert same_bits(there, want.tensors[layer])


@pytest.mark.parametrize("counts", [[1] * 8, [3, 1, 4], [8] * 8, [16, 40, 1]])
@pytest.mark.parametrize("is_apart", [False, True])
def test_asks_of_one_turn_are_one_batch_wherever_they_lie(
    near: Near, counts: list[int], is_apart: bool
) -> None:
    names = [f"asks-{counts}-{is_apart}-{i}" for i in range(2)]
    layer, total = near.layers[1], sum(counts)
    sessions = [[near.opened(name, 200) for _ in counts] for name in names]
    memory = near.backend.host_memory
    dtypes = [torch.float32 if is_apart and i == 1 else torch.bfloat16 for i in range(len(counts))]
    block = memory.tensor((total, 4, 1024), torch.bfloat16)
    asks, found, wanted, at = [], [], [], 0
    for place, count in enumerate(counts):
        residual = torch.randn((count, 4, 1024)).to(dtypes[place])
        ids = (np.arange(count) * (place + 1) % 9).tolist()
        asked = Segments(
            np.array([count], np.int32),
            np.array([200]),
            np.array([sessions[0][place]]),
            token_ids=np.array(ids),
        )
        request = StepRequest(asked, Output.RESIDUAL, (layer,), residual.clone())
        wanted.append(near.step(names[0], request).tensors[layer])
        there = block[at : at + count]
        if is_apart:
            there = memory.tensor(tuple(residual.shape), dtypes[place])
        there.copy_(residual)
        found.append(there)
        segments, is_f32 = (
            [(sessions[1][place], 200, count, EPOCH_OPENED)],
            dtypes[place] == torch.float32,
        )
        asks.append(Ask(names[1], segments, ids, 1, there.data_ptr(), is_f32))
        at += count
    before = near.engine.counters
    answers = near.engine.answer(asks)
    after = near.engine.counters
    assert after["near_batches"] == before["near_batches"] + 1
    assert after["near_largest_batch"] >= total
    for answer, count in zip(answers, counts, strict=True):
        assert answer is not None
        assert [spot.length for spot in answer.sessions] == [200 + count]
    for there, want in zip(found, wanted, strict=True):
        assert same_bits(there, want)
