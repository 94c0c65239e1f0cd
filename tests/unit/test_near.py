"""Reads that the asking thread runs itself: what the store holds, small, together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

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
from tests.projecting import ProjectingNear, let_it_project

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


def read(
    engine: Engine, session_id: int, position: int, count: int, tenant: str = ""
) -> Future[StepAnswer]:
    sizes = engine.geometry
    generator = torch.Generator().manual_seed(position)
    residual = torch.randn((count, sizes.hc_mult, sizes.dim), generator=generator).bfloat16()
    segments = Segments(
        np.array([count], np.int32), np.array([position]), np.array([session_id]),
        np.array([EPOCH_OPENED]),
    )  # fmt: skip
    request = StepRequest(segments, Output.RESIDUAL, (sizes.layer_ids[0],), residual=residual)
    return engine.step(tenant, request)


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


# ---- where the asking thread makes kv, too


@pytest.fixture
def projecting(official_dir: Path) -> Iterator[tuple[Engine, ProjectingNear, Turn]]:
    backend = load(open_checkpoint(official_dir), num_slots=512)
    near = let_it_project(backend)
    turn = Turn()
    with Engine(backend, EngineLimits(near_tokens=16, ahead_tokens=0)) as made:
        made.attach(turn)
        yield made, near, turn
    backend.close()


def both(engine: Engine, session_id: int, count: int, tenant: str = "") -> Future[StepAnswer]:
    """The kv of both layers."""
    segments = Segments(
        np.array([count], np.int32), np.array([0]), np.array([session_id]),
        np.array([EPOCH_OPENED]),
    )  # fmt: skip
    return engine.step(tenant, StepRequest(segments, Output.KV, engine.geometry.layer_ids))


def fresh(engine: Engine, tenant: str = "") -> int:
    """A session of eight tokens of which nothing is in the store."""
    session_id = engine.open(tenant, OpenRequest()).session_id
    engine.push(tenant, session_id, 0, np.arange(8) % 3, ahead=False)
    return session_id


def test_what_came_in_one_turn_is_one_batch_whatever_of_it_is_missing(
    projecting: tuple[Engine, ProjectingNear, Turn],
) -> None:
    engine, near, turn = projecting
    session_id, other = fresh(engine), fresh(engine, "other")
    near.is_busy = True
    left = [read(engine, session_id, place, 2) for place in (0, 2, 4)]
    turn.end()
    expected = [bits(answer) for answer in left]  # by the lane
    assert engine.counters["near_batches"] == 0
    near.is_busy = False
    before = engine.counters
    answers = [read(engine, other, place, 2, "other") for place in (0, 2, 4)]
    assert not any(answer.done() for answer in answers)
    turn.end()
    assert all(answer.done() for answer in answers)
    assert all(torch.equal(bits(a), b) for a, b in zip(answers, expected, strict=True))
    after = engine.counters
    assert after["kv_batches"] == before["kv_batches"]
    assert after["near_batches"] == 1
    assert after["kv_misses"] - before["kv_misses"] == sum(map(len, near.begun)) > 0
    assert not engine._scheduler.store._pins.any()


def test_layers_that_cannot_be_made_now_are_made_by_the_lane(
    projecting: tuple[Engine, ProjectingNear, Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, near, turn = projecting
    session_id, other = fresh(engine), fresh(engine, "other")
    answer = both(engine, session_id, 5)
    turn.end()
    expected = answer.result(10).tensors
    project = near.project
    for able in ([0], [1], []):
        engine.close_tenant("other")
        other = fresh(engine, "other")

        def some(layer: int, *arguments: Any, able: list[int] = able) -> bool:
            return layer in able and project(layer, *arguments)

        monkeypatch.setattr(near, "project", some)
        answer = both(engine, other, 5, "other")
        turn.end()
        got = answer.result(10).tensors
        assert all(torch.equal(got[layer], expected[layer]) for layer in expected)
    assert not engine._scheduler.store._pins.any()


def test_what_another_is_still_projecting_is_left_to_the_lane_behind_it(
    projecting: tuple[Engine, ProjectingNear, Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, near, turn = projecting
    session_id = fresh(engine)
    monkeypatch.setattr(near, "is_ready", lambda slots: False)
    answer = read(engine, session_id, 0, 4)
    turn.end()
    assert answer.result(10).length[0] == 8
    assert engine.counters["near_batches"] == 0


def test_a_job_taken_for_the_turn_ends_with_it_whatever_happens(
    projecting: tuple[Engine, ProjectingNear, Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, near, turn = projecting
    session_id = fresh(engine)
    assert read(engine, session_id, 0, 1).cancel()
    turn.end()
    assert near.begun == []
    large = read(engine, session_id, 0, 8), both(engine, session_id, 8)
    many = [read(engine, session_id, i, 2) for i in range(6)]
    turn.end()
    for answer in (*large, *many):
        answer.result(10)

    def fail(*_: Any) -> bool:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(near, "gate", fail)
    failed = read(engine, session_id, 0, 1)
    turn.end()
    with pytest.raises(EngramError, match="the device is gone"):
        failed.result(10)
    with pytest.raises(EngramError, match="the device is gone"):
        read(engine, session_id, 0, 1)


def test_what_waits_for_the_turn_at_close_is_refused(
    projecting: tuple[Engine, ProjectingNear, Turn],
) -> None:
    engine, _, turn = projecting
    answer = read(engine, fresh(engine), 0, 1)
    engine.close()
    turn.end()
    with pytest.raises(EngramError):
        answer.result(10)


def asked(engine: Engine, session_id: int, output: Output, count: int = 5) -> StepRequest:
    segments = Segments(
        np.array([count], np.int32), np.array([0]), np.array([session_id]),
        np.array([EPOCH_OPENED]),
    )  # fmt: skip
    return StepRequest(segments, output, engine.geometry.layer_ids)


@pytest.mark.parametrize("output", [Output.ROWS, Output.HASH_IDS])
def test_rows_and_ids_of_small_reads_are_made_in_the_turn(
    projecting: tuple[Engine, ProjectingNear, Turn],
    monkeypatch: pytest.MonkeyPatch,
    output: Output,
) -> None:
    engine, _, turn = projecting
    request = asked(engine, fresh(engine), output)
    answer = engine.step("", request)
    assert not answer.done()
    turn.end()
    assert answer.done()
    assert engine.counters["rows_batches"] == 0
    assert engine.counters["near_batches"] == 2
    monkeypatch.setattr(engine._scheduler.near, "take", lambda job: False)
    by_lane = engine.step("", request).result(10)
    assert engine.counters["rows_batches"] == 2
    for layer, tensor in answer.result().tensors.items():
        assert torch.equal(tensor.view(torch.uint8), by_lane.tensors[layer].view(torch.uint8))


def test_small_work_ahead_is_done_behind_the_turn_s_reads(
    official_dir: Path,
) -> None:
    backend = load(open_checkpoint(official_dir), num_slots=512)
    near, turn = let_it_project(backend), Turn()
    with Engine(backend, EngineLimits(near_tokens=16, ahead_tokens=64)) as engine:
        engine.attach(turn)
        session_id = engine.open("", OpenRequest()).session_id
        engine.push("", session_id, 0, np.arange(3))
        answer = read(engine, session_id, 0, 1)
        assert near.begun == []
        turn.end()
        assert answer.done()
        counters = engine.counters
        assert counters["ahead_tokens"] == 6
        assert (counters["kv_batches"], counters["near_batches"]) == (0, 3)
        assert len(near.begun[0]) == 1  # the read's, before what is made ahead
        answers = read(engine, session_id, 0, 3), both(engine, session_id, 3)
        turn.end()
        assert all(answer.done() for answer in answers)
        assert engine.counters["kv_misses"] == counters["kv_misses"]
        near.is_busy = True  # then it is for the lane, as a read is
        engine.push("", session_id, 3, np.arange(4))
        turn.end()
        assert engine.drain(10)
        assert engine.counters["ahead_tokens"] == 6 + 8
        assert engine.counters["kv_batches"] > 0
    backend.close()
