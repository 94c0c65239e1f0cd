"""Stages do not overlap, are told once a batch, and to every request that waited for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from engram_core.backends.base import STAGES
from engram_core.engine_types import EngineLimits, Output, StepAnswer
from engram_core.jobs import Job, Read
from engram_core.scheduler import Scheduler
from engram_core.stages import StageClock
from tests.recording import RecordingBackend
from tests.unit.test_reference_backend import make_backend, windows_of

ALIVE = np.zeros(4, dtype=np.bool_)
NOBODY = np.zeros(0, dtype=np.int64)


class Watched(StageClock):
    """A clock and what it told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float]] = []
        self.watch(lambda stage, seconds: self.told.append((stage, seconds)))


def job() -> Job:
    windows = windows_of(4)
    result = StepAnswer(NOBODY, NOBODY, NOBODY, ALIVE, {})
    return Job(0, "", Output.NONE, (0,), Read(ALIVE, windows), result=result)


def test_a_part_is_taken_off_its_call() -> None:
    clock = Watched()
    begun = time.perf_counter()
    with clock.measure("gate", []):
        clock.part("h2d", 1e-9)
        clock.part("h2d", 2e-9)
    wall = time.perf_counter() - begun
    told = dict(clock.told)
    assert told["h2d"] == pytest.approx(3e-9)
    assert 0 < told["gate"] < wall
    assert len(clock.told) == 2, "each stage once"


def test_parts_longer_than_their_call_leave_nothing_of_it() -> None:
    clock = Watched()
    with clock.measure("gate", []):
        clock.part("d2h", 3600.0)
    assert dict(clock.told) == {"d2h": 3600.0, "gate": 0.0}


def test_a_part_belongs_to_the_call_of_its_own_thread() -> None:
    clock = Watched()
    with clock.measure("gate", []):
        other = threading.Thread(target=clock.part, args=("wkv", 1.0))
        other.start()
        other.join()
    assert [stage for stage, _ in clock.told] == ["gate"]


def test_what_a_device_tells_late_is_no_part_of_the_present_call() -> None:
    clock, waiting = Watched(), job()
    with clock.measure("gate", []):
        clock.late("wkv", 5.0)
    assert clock.told[0] == ("wkv", 5.0)
    assert waiting.stages == {}


def test_reference_backend_tells_hash_and_gather_from_wkv() -> None:
    backend, clock = make_backend(), Watched()
    backend.observer = clock
    begun = time.perf_counter()
    with clock.measure("store", []):
        backend.project(0, np.arange(4), windows=windows_of(4))
    wall = time.perf_counter() - begun
    told = dict(clock.told)
    assert set(told) == {"store", "hash_gather", "wkv"}
    assert all(seconds > 0 for seconds in told.values())
    assert sum(told.values()) <= wall
    assert {"hash_gather", "wkv"} < set(STAGES)


def test_work_ahead_is_told_too_and_every_waiting_job_gets_the_whole_batch() -> None:
    told: list[str] = []
    made = Scheduler(make_backend(), EngineLimits(max_tokens=64, chunk_tokens=8))
    made.clock.watch(lambda stage, _: told.append(stage))
    made.work_ahead(job(), is_decode=True)
    assert made.drain(30)
    made.close()
    assert sorted(told) == ["hash_gather", "store", "wkv"]


def test_two_jobs_of_one_batch_have_its_stages_alike() -> None:
    backend = RecordingBackend()
    made = Scheduler(backend, EngineLimits(max_tokens=64, chunk_tokens=8))
    backend.hold()
    first = job()
    made.work_ahead(first, is_decode=True)
    backend.wait_begun()
    reads = [job(), job()]
    for read in reads:
        read.answer = Future()
        made.submit(read)
    backend.resume()
    stages = [{**read.answer.result(30).stages} for read in reads if read.answer]
    made.close()
    assert stages[0]["store"] == stages[1]["store"]
    assert "queue" in stages[0]
