"""The lane beside the kv lane: what it takes, that it waits for nobody, and the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_core.beside import READ_TOKENS
from engram_core.checkpoint import open_checkpoint
from engram_core.engine import Engine
from engram_core.engine_types import (
    BESIDE_TOKENS,
    EPOCH_OPENED,
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepRequest,
)
from engram_core.errors import Draining, Internal
from engram_core.jobs import Job, Read
from engram_core.loader import load
from engram_core.near import MAX_PINNED
from engram_core.scheduler import Scheduler
from tests.recording import RecordingBackend
from tests.unit.test_scheduler import is_right, job, wait

LIMITS = EngineLimits(max_tokens=512, chunk_tokens=128, near_tokens=4)
KV_LANE, BESIDE = "engram-kv", "engram-beside"


@contextmanager
def beside_a_prefill(
    num_slots: int = 1024, limits: EngineLimits = LIMITS
) -> Iterator[tuple[Scheduler, RecordingBackend, Job]]:
    """A scheduler whose kv lane is busy with a prefill until `resume`."""
    backend = RecordingBackend(num_slots)
    backend.project_beside = backend.project
    made = Scheduler(backend, limits)
    try:
        backend.hold(KV_LANE)
        prefill = job(512, client="prefill", start=500)
        made.submit(prefill)
        backend.wait_begun()
        yield made, backend, prefill
    finally:
        backend.resume()
        made.close()


def projected_by(backend: RecordingBackend, thread: str) -> list[tuple[int, int]]:
    calls = [call for call in backend.calls if call.name == "project" and call.thread == thread]
    return [(call.layer, call.num_tokens) for call in calls]


def test_small_reads_do_not_wait_for_a_prefill() -> None:
    with beside_a_prefill() as (made, backend, prefill):
        small = job(1, output=Output.RESIDUAL, layers=(0, 1))
        largest = job(READ_TOKENS, client="b", start=100)
        for each in (small, largest):
            made.submit(each)
        wait(small, largest)
        assert prefill.answer is not None
        assert not prefill.answer.done()
        backend.resume()
        wait(prefill)
        assert all(map(is_right, (largest, prefill)))
        assert {n for _, n in projected_by(backend, KV_LANE)} == {128}
        counters = made.counters
        assert (counters["kv_batch_tokens"], counters["beside_batch_tokens"]) == (512, 66)


def test_a_prefill_does_not_wait_for_small_reads() -> None:
    backend = RecordingBackend(1024)
    backend.project_beside = backend.project
    made = Scheduler(backend, LIMITS)
    try:
        backend.hold(BESIDE)
        smalls = [job(1, client=f"c{i}", start=i) for i in range(8)]
        for each in smalls:
            made.submit(each)
        backend.wait_begun()
        prefill = job(300, client="prefill", start=500)
        made.submit(prefill)
        wait(prefill)
        assert is_right(prefill)
        backend.resume()
        wait(*smalls)
    finally:
        backend.resume()
        made.close()


def test_what_is_large_or_of_given_hash_ids_is_for_the_kv_lane() -> None:
    with beside_a_prefill() as (made, backend, _):
        large, given = job(READ_TOKENS + 1, client="a"), job(2, client="b")
        given.read = Read(given.read.dead, hash_ids=np.zeros((2, 1, 6), dtype=np.int64))
        for each in (large, given):
            made.submit(each)
        backend.resume()
        wait(large, given)
        assert projected_by(backend, BESIDE) == []


def test_a_decodes_work_ahead_is_beside_and_a_prefills_is_not() -> None:
    with beside_a_prefill() as (made, backend, _):
        made.work_ahead(job(3, output=Output.NONE, start=5), is_decode=False)
        made.work_ahead(job(2, output=Output.NONE), is_decode=True)
        read = job(2)
        made.submit(read)
        wait(read)
        assert is_right(read)
        backend.resume()
        assert made.drain(30)
        assert projected_by(backend, BESIDE) == [(0, 2)], "what is worked ahead is found, or finds"
        assert (0, 3) in projected_by(backend, KV_LANE)
        assert made.counters["ahead_tokens"] == 5


def test_work_ahead_of_both_lanes_counts_as_waiting() -> None:
    with beside_a_prefill(num_slots=640) as (made, backend, _):
        backend.hold()
        made.submit(job(1, start=400))
        backend.wait_begun()
        for i in range(11):
            made.work_ahead(job(60, output=Output.NONE, start=60 * i), is_decode=True)
        assert (made.counters["ahead_tokens"], made.counters["ahead_dropped"]) == (600, 60)


def test_windows_that_the_prefill_computes_are_computed_beside_it_too() -> None:
    with beside_a_prefill() as (made, backend, prefill):
        read = job(4, start=500)
        made.submit(read)
        wait(read)
        assert is_right(read)
        backend.resume()
        wait(prefill)
        assert is_right(prefill)
        assert len(made.store) == 512


def test_batches_of_both_lanes_fit_a_small_store() -> None:
    # At the same time, and beside what near reads may pin.
    num_slots = MAX_PINNED + 2 * BESIDE_TOKENS
    limits = replace(LIMITS, chunk_tokens=num_slots)
    with beside_a_prefill(num_slots, limits) as (made, backend, prefill):
        made.store.lend(MAX_PINNED)
        smalls = [job(60, client=f"c{i}", start=1000 + 100 * i) for i in range(6)]
        for each in smalls:
            made.submit(each)
        wait(*smalls)
        backend.resume()
        wait(prefill)
        assert all(map(is_right, (*smalls, prefill)))
        for lane in (KV_LANE, BESIDE):
            assert max(n for _, n in projected_by(backend, lane)) <= BESIDE_TOKENS


def test_a_failure_beside_fails_everything() -> None:
    with beside_a_prefill() as (made, backend, prefill):
        waiting = job(300, client="b", start=3000)
        made.submit(waiting)
        backend.fail_on = "project"
        small = job(1)
        made.submit(small)
        for each in (small, waiting):
            assert each.answer is not None
            with pytest.raises(Internal, match="project was made to fail"):
                each.answer.result(30)
        with pytest.raises(Internal):
            made.submit(job(1, start=9))
        backend.resume()
        assert prefill.answer is not None
        with pytest.raises(Internal):
            prefill.answer.result(30)


def test_drain_and_close_wait_for_it() -> None:
    backend = RecordingBackend(1024)
    backend.project_beside = backend.project
    made = Scheduler(backend, LIMITS)
    backend.hold()
    first, second = job(1), job(1, start=9)
    made.submit(first)
    backend.wait_begun()
    made.submit(second)
    assert not made.drain(0)
    closing = threading.Thread(target=made.close)
    closing.start()
    assert second.answer is not None
    with pytest.raises(Draining):
        second.answer.result(30)
    backend.resume()
    closing.join(30)
    wait(first)
    assert not any(lane._thread.is_alive() for lane in made.lanes)


def test_lanes_share_the_cores_that_are_left() -> None:
    """Whatever the asking thread has set for itself before a lane computes."""
    backend, threads = RecordingBackend(1024), {}
    project = backend.project

    def count(*given: Any, **named: Any) -> None:
        threads[threading.current_thread().name] = torch.get_num_threads()
        project(*given, **named)

    before = torch.get_num_threads()
    torch.set_num_threads(8)
    backend.project, backend.project_beside = count, count  # type: ignore[method-assign]
    made = Scheduler(backend, LIMITS)
    try:
        torch.set_num_threads(1)
        jobs = job(1), job(100, client="b", start=50)
        for each in jobs:
            made.submit(each)
        wait(*jobs)
        assert threads == {KV_LANE: 3, BESIDE: 3}
        assert torch.get_num_threads() == 1
    finally:
        made.close()
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_slots", "projects"), [(1024, False), (MAX_PINNED + 2 * BESIDE_TOKENS - 1, True)]
)
def test_a_backend_of_one_thread_or_of_few_slots_has_no_such_lane(
    num_slots: int, projects: bool
) -> None:
    backend = RecordingBackend(num_slots)
    backend.project_beside = backend.project if projects else None
    made = Scheduler(backend, LIMITS)
    try:
        read = job(1)
        made.submit(read)
        wait(read)
        assert len(made.lanes) == 2
        assert {call.thread for call in backend.calls} == {KV_LANE}
    finally:
        made.close()


def test_bits_do_not_depend_on_the_lane(official_dir: Path) -> None:
    """Prefills and small reads of the same and of other windows, at the same time."""
    backend = load(open_checkpoint(official_dir), num_slots=600)  # fewer than there are windows
    sizes, rng = backend.geometry, np.random.default_rng(0)
    ids = rng.integers(0, 9, 700)

    def step(engine: Engine, session: int, position: int, count: int) -> StepRequest:
        generator = torch.Generator().manual_seed(position)
        residual = torch.randn((count, sizes.hc_mult, sizes.dim), generator=generator).bfloat16()
        segments = Segments(
            np.array([count], np.int32), np.array([position]), np.array([session]),
            np.array([EPOCH_OPENED]),
        )  # fmt: skip
        return StepRequest(segments, Output.RESIDUAL, (sizes.layer_ids[1],), residual=residual)

    reads = [(0, 700), *((int(place), 1 + int(place) % 64) for place in rng.integers(0, 600, 150))]
    answers: list[list[torch.Tensor]] = []
    for near_tokens in (0, 4):
        limits = EngineLimits(ahead_tokens=0, chunk_tokens=64, near_tokens=near_tokens)
        with Engine(backend, limits) as engine:
            session = engine.open("", OpenRequest()).session_id
            engine.push("", session, 0, ids)
            futures = [engine.step("", step(engine, session, *read)) for read in reads]
            tensors = [next(iter(future.result(60).tensors.values())) for future in futures]
            answers.append([tensor.view(torch.int16) for tensor in tensors])
            beside = engine.counters["beside_batches"]
    assert beside > 0
    assert all(torch.equal(one, two) for one, two in zip(*answers, strict=True))
    backend.close()
