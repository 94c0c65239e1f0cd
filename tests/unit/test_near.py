"""Reads that the asking thread runs itself: what the store holds, small, together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_core.checkpoint import open_checkpoint
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
from engram_core.errors import EngramError
from engram_core.kv_store import KvStore
from engram_core.loader import load

LIMITS = EngineLimits(near_tokens=4, ahead_tokens=0)


@pytest.fixture
def engine(official_dir: Path) -> Iterator[Engine]:
    backend = load(open_checkpoint(official_dir), num_slots=512)
    with Engine(backend, LIMITS) as made:
        yield made
    backend.close()


def opened(engine: Engine, count: int = 8) -> int:
    """A session of `count` tokens whose kv of layer 1 is in the store."""
    session_id = engine.open("", OpenRequest()).session_id
    engine.push("", session_id, 0, np.arange(count) % 3)
    read(engine, session_id, 0, count).result(10)
    return session_id


def read(engine: Engine, session_id: int, position: int, count: int) -> Future[StepAnswer]:
    sizes = engine.geometry
    generator = torch.Generator().manual_seed(position)
    residual = torch.randn((count, sizes.hc_mult, sizes.dim), generator=generator).bfloat16()
    segments = Segments(
        np.array([count], np.int32), np.array([position]), np.array([session_id]),
        np.array([EPOCH_OPENED]),
    )  # fmt: skip
    request = StepRequest(segments, Output.RESIDUAL, (sizes.layer_ids[0],), residual=residual)
    return engine.step("", request)


def bits(answer: Future[StepAnswer]) -> torch.Tensor:
    (tensor,) = answer.result(10).tensors.values()
    return tensor.view(torch.int16)


class Turn:
    """The end of an event loop's turn."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def end(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def test_what_came_in_one_turn_is_one_batch_of_the_same_bits(engine: Engine) -> None:
    session_id = opened(engine)
    expected = [bits(read(engine, session_id, place, 2)) for place in (0, 2, 4)]
    turn = Turn()
    engine.attach(turn)
    answers = [read(engine, session_id, place, 2) for place in (0, 2, 4)]
    assert not any(answer.done() for answer in answers)
    assert len(turn.calls) == 1
    turn.end()
    assert all(torch.equal(bits(a), b) for a, b in zip(answers, expected, strict=True))
    assert engine.counters["near_batches"] == 1


def test_other_threads_large_reads_and_what_is_not_there_go_to_a_lane(engine: Engine) -> None:
    session_id = opened(engine)
    turn = Turn()
    engine.attach(turn)
    read(engine, session_id, 0, 5).result(10)
    engine.push("", session_id, 8, np.array([2, 2]))
    read(engine, session_id, 9, 1).result(10)
    thread = threading.Thread(target=lambda: read(engine, session_id, 0, 1).result(10))
    thread.start()
    thread.join()
    assert not turn.calls


def test_a_cancelled_read_is_not_run(engine: Engine) -> None:
    session_id = opened(engine)
    turn = Turn()
    engine.attach(turn)
    assert read(engine, session_id, 0, 1).cancel()
    turn.end()
    assert engine.counters["near_batches"] == 0
    assert not engine._scheduler.store._pins.any()


def test_what_waits_at_close_is_refused(engine: Engine) -> None:
    session_id = opened(engine)
    turn = Turn()
    engine.attach(turn)
    answer = read(engine, session_id, 0, 1)
    engine.close()
    turn.end()
    with pytest.raises(EngramError):
        answer.result(10)


def test_find_sees_an_entry_only_once_it_is_filled() -> None:
    store = KvStore(4)
    tenants, windows = np.zeros(1, np.int64), np.ones((1, 4), np.int32)
    lease = store.acquire(0, tenants, windows)
    assert store.find(0, tenants, windows) is None
    store.fill(lease)
    store.release(lease)
    found = store.find(0, tenants, windows)
    assert found is not None
    assert found.slots.tolist() == lease.slots.tolist()
    store.release(found)
    assert not store._pins.any()
