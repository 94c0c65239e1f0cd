"""The scheduler: ragged batches of one layer, who goes first, fairness, failure, ended threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from engram_core.engine_types import EngineLimits, Output, StepAnswer
from engram_core.errors import Draining, Internal
from engram_core.jobs import Job, Read
from engram_core.queues import FairQueue
from engram_core.scheduler import Scheduler
from tests.recording import SIZES, TOY, RecordingBackend, kv_number

LIMITS = EngineLimits(max_tokens=64, chunk_tokens=8)
KV, ROWS, HASH_IDS, RESIDUAL, NONE = (
    Output.KV,
    Output.ROWS,
    Output.HASH_IDS,
    Output.RESIDUAL,
    Output.NONE,
)


@contextmanager
def scheduler(
    num_slots: int = 256, limits: EngineLimits = LIMITS
) -> Iterator[tuple[Scheduler, RecordingBackend]]:
    backend = RecordingBackend(num_slots)
    made = Scheduler(backend, limits)
    try:
        yield made, backend
    finally:
        backend.resume()
        made.close()


@contextmanager
def held(num_slots: int = 256) -> Iterator[tuple[Scheduler, RecordingBackend]]:
    """A scheduler whose kv lane is busy with a batch of one token until `resume`."""
    with scheduler(num_slots) as (made, backend):
        backend.hold()
        made.submit(job(1, client="first", start=900))
        backend.wait_begun()
        yield made, backend


def job(
    num_tokens: int,
    *,
    client: str = "",
    output: Output = KV,
    layers: tuple[int, ...] = (0,),
    start: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Job:
    """A job of distinct windows start, start + 1 ..."""
    windows = np.zeros((num_tokens, 4), dtype=np.int32)
    windows[:, 1] = np.arange(start, start + num_tokens)
    dead = np.zeros(num_tokens, dtype=np.bool_)
    shape = {
        KV: (num_tokens, SIZES.hc_mult + 1, SIZES.dim),
        ROWS: (num_tokens, SIZES.n_hash_cols, SIZES.head_dim),
        HASH_IDS: (num_tokens, SIZES.n_hash_cols),
        RESIDUAL: (num_tokens, SIZES.hc_mult, SIZES.dim),
        NONE: (0,),
    }[output]
    dtype = {KV: torch.bfloat16, ROWS: torch.bfloat16, HASH_IDS: torch.int64}.get(output, dtype)
    tensors = tuple(torch.zeros(shape, dtype=dtype) for _ in layers)
    none = np.full(1, -1)
    answer: Future[StepAnswer] | None = None if output is NONE else Future()
    result = StepAnswer(none, none, none, dead, dict(zip(layers, tensors, strict=True)))
    read = Read(dead, windows)
    return Job(0, client, output, layers, read, tensors, result=result, answer=answer)


def wait(*jobs: Job) -> None:
    for each in jobs:
        assert each.answer is not None
        each.answer.result(30)


def is_right(done: Job) -> bool:
    assert done.read.windows is not None
    return all(
        (tensor[:, 0, 0].to(torch.int64).numpy() == kv_number(layer, done.read.windows)).all()
        for layer, tensor in zip(done.layers, done.tensors, strict=True)
    )


# ---- ragged batches


def test_what_waits_for_a_layer_is_one_batch() -> None:
    with held() as (made, backend):
        jobs = [job(n, client=f"c{n}", start=20 * n) for n in (3, 1, 5)]
        other = job(2, client="c9", layers=(1,), start=500)
        for each in (*jobs, other):
            made.submit(each)
        backend.resume()
        wait(*jobs, other)
        assert backend.of("project") == [(0, 1), (0, 9), (1, 2)]
        assert all(map(is_right, (*jobs, other)))


def test_one_clients_small_reads_are_one_batch() -> None:
    with held() as (made, backend):
        jobs = [job(1, client="a", start=i) for i in range(8)]
        for each in jobs:
            made.submit(each)
        backend.resume()
        wait(*jobs)
        assert backend.of("project") == [(0, 1), (0, 8)]
        assert backend.of("read_kv")[1:] == [(0, 8)], "small answers are made in one call"
        assert all(map(is_right, jobs))


def test_residuals_of_both_dtypes_and_kv_share_a_projection() -> None:
    with held() as (made, backend):
        jobs = [
            job(2, client="a", output=RESIDUAL, dtype=torch.bfloat16),
            job(3, client="b", output=RESIDUAL),
            job(2, client="c", output=RESIDUAL),
            job(4, client="d", output=KV),
        ]
        for each in jobs:
            made.submit(each)
        backend.resume()
        wait(*jobs)
        assert backend.of("project")[1:] == [(0, 4)], "equal windows are computed once"
        assert backend.of("gate") == [(0, 2), (0, 5)]
        assert made.counters["kv_duplicates"] == 7
        assert all(map(is_right, jobs))


def test_batch_is_no_larger_than_a_launch() -> None:
    with held() as (made, backend):
        jobs = [job(8, client=f"c{i}", start=8 * i) for i in range(20)]
        for each in jobs:
            made.submit(each)
        backend.resume()
        wait(*jobs)
        assert [n for _, n in backend.of("project")] == [1, 64, 64, 32]


def test_batch_always_fits_a_small_store() -> None:
    with scheduler(num_slots=3) as (made, backend):
        jobs = [job(11, client=f"c{i}", layers=(0, 1), start=40 * i) for i in range(4)]
        for each in jobs:
            made.submit(each)
        wait(*jobs)
        assert max(n for _, n in backend.of("project")) <= 3
        assert all(map(is_right, jobs))


def test_layers_of_a_chunk_follow_each_other() -> None:
    with scheduler() as (made, backend):
        read = job(20, layers=(0, 1))
        made.submit(read)
        wait(read)
        order = [(0, 8), (1, 8), (0, 8), (1, 8), (0, 4), (1, 4)]
        assert backend.of("project") == order
        assert is_right(read)


# ---- order


def test_big_request_does_not_starve_a_small_one() -> None:
    with held() as (made, backend):
        big = job(64, client="big", start=0)
        made.submit(big)
        smalls = [job(1, client="small", layers=(1,), start=500 + i) for i in range(2)]
        for each in smalls:
            made.submit(each)
        backend.resume()
        wait(big, *smalls)
        assert backend.of("project")[:3] == [(0, 1), (1, 2), (0, 8)]


def test_small_requests_leave_every_second_batch_to_big_ones() -> None:
    with held() as (made, backend):
        big = job(24, client="big", start=0)
        smalls = [job(1, client="small", start=500 + i) for i in range(24)]
        for each in (big, *smalls):
            made.submit(each)
        backend.resume()
        wait(big, *smalls)
        assert [n for _, n in backend.of("project")] == [1, 8, 16, 8, 8, 8]


def test_clients_of_one_layer_share_every_batch() -> None:
    with held() as (made, backend):
        jobs = [job(24, client=c, start=100 * i) for i, c in enumerate("ab")]
        late = job(2, client="c", start=700)
        for each in (*jobs, late):
            made.submit(each)
        backend.resume()
        wait(*jobs, late)
        assert [n for _, n in backend.of("project")] == [1, 2, 16, 16, 16]


def test_reads_then_decode_ahead_then_prefill_ahead_by_chunk_and_layer() -> None:
    with held() as (made, backend):
        made.work_ahead(job(20, output=NONE, layers=(0, 1), start=100), is_decode=False)
        made.work_ahead(job(10, output=NONE, layers=(0, 1), start=200), is_decode=False)
        made.work_ahead(job(3, output=NONE, layers=(0, 1), start=300), is_decode=True)
        made.work_ahead(job(2, output=NONE, layers=(0, 1), start=400), is_decode=True)
        read = job(5, start=600)
        made.submit(read)
        backend.resume()
        assert made.drain(30)
        reads, decode = [(0, 1), (0, 5)], [(0, 5), (1, 5)]
        first = [(0, 8), (0, 8), (1, 8), (1, 8)]
        rest = [(0, 8), (1, 8), (0, 4), (1, 4)]
        order = backend.of("project")
        assert order[:8] == reads + decode + first
        assert sorted(order[8:]) == sorted([*rest[:2], (0, 2), (1, 2), (0, 4), (1, 4)])


def test_read_finds_what_was_worked_ahead() -> None:
    with scheduler() as (made, backend):
        made.work_ahead(job(5, output=NONE), is_decode=True)
        assert made.drain(30)
        read = job(5, output=RESIDUAL)
        made.submit(read)
        wait(read)
        assert backend.of("project") == [(0, 5)]
        assert made.counters["kv_hits"] == 5
        assert made.counters["kv_misses"] == 5
        assert made.counters["ahead_tokens"] == 5


def test_read_goes_before_work_ahead_for_the_same_tokens() -> None:
    with held() as (made, backend):
        made.work_ahead(job(5, output=NONE), is_decode=True)
        read = job(5)
        made.submit(read)
        backend.resume()
        wait(read)
        assert made.drain(30)
        assert backend.of("project") == [(0, 1), (0, 5)]
        assert is_right(read)


def test_too_much_work_ahead_is_dropped_and_counted() -> None:
    with held(num_slots=16) as (made, backend):
        for i in range(3):
            made.work_ahead(job(4, output=NONE, layers=(0, 1), start=9 * i), is_decode=True)
        assert made.counters["ahead_tokens"] == 16
        assert made.counters["ahead_dropped"] == 8
        backend.resume()
        assert made.drain(30)


def test_rows_and_hash_ids_do_not_wait_for_wkv() -> None:
    with scheduler() as (made, backend):
        backend.hold()
        slow = job(4)
        made.submit(slow)
        backend.wait_begun()
        ids = job(9, output=HASH_IDS, layers=(0, 1))
        made.submit(ids)
        wait(ids)
        assert slow.answer is not None
        assert not slow.answer.done()
        first, size = TOY.offsets[1], TOY.primes[1].ravel()
        rows = ids.tensors[1].numpy()
        assert ((rows >= first) & (rows < first + size)).all()
        backend.resume()
        rows_read = job(9, output=ROWS)
        made.submit(rows_read)
        wait(slow, rows_read)
        assert {c.thread for c in backend.calls if c.name == "rows"} == {"engram-rows"}
        assert made.counters["rows_gathered"] == 9 * SIZES.n_hash_cols


# ---- cancelling, failing, ending


def test_cancelled_read_drops_its_remaining_pieces() -> None:
    with held() as (made, backend):
        unwanted, wanted = job(64, client="a"), job(3, client="b", start=500)
        made.submit(unwanted)
        made.submit(wanted)
        assert unwanted.answer is not None
        assert unwanted.answer.cancel()
        backend.resume()
        wait(wanted)
        assert made.drain(30)
        assert backend.of("project") == [(0, 1), (0, 3)]


def test_cancelled_while_running_stops_after_the_piece() -> None:
    with scheduler() as (made, backend):
        backend.hold()
        read = job(64)
        made.submit(read)
        backend.wait_begun()
        assert read.answer is not None
        assert read.answer.cancel()
        backend.resume()
        assert made.drain(30)
        assert backend.of("project") == [(0, 8)]


@pytest.mark.parametrize("method", ["project", "gate"])
def test_failure_fails_the_batch_and_all_that_waits(method: str) -> None:
    with held() as (made, backend):
        failing = job(2, client="a", output=RESIDUAL)
        waiting = job(2, client="b", layers=(1,))
        made.submit(failing)
        made.submit(waiting)
        backend.fail_on = method
        backend.resume()
        for each in (failing, waiting):
            assert each.answer is not None
            with pytest.raises(Internal, match=f"{method} was made to fail"):
                each.answer.result(30)
        assert isinstance(made.failure, Internal)
        assert isinstance(made.failure.__cause__, RuntimeError)
        for output in (KV, ROWS):
            with pytest.raises(Internal, match="was made to fail"):
                made.submit(job(1, output=output))


def test_failed_projection_leaves_no_entry() -> None:
    with scheduler() as (made, backend):
        backend.fail_on = "project"
        read = job(3)
        made.submit(read)
        assert read.answer is not None
        with pytest.raises(Internal):
            read.answer.result(30)
        assert len(made.store) == 0


def test_close_ends_the_batch_fails_what_waits_and_ends_the_threads() -> None:
    with held() as (made, backend):
        waiting = job(2)
        made.submit(waiting)
        closing = threading.Thread(target=made.close)
        closing.start()
        assert waiting.answer is not None
        with pytest.raises(Draining):
            waiting.answer.result(30)
        backend.resume()
        closing.join(30)
        assert not any(lane._thread.is_alive() for lane in made.lanes)
        with pytest.raises(Draining):
            made.submit(job(1))
        made.close()


def test_stages_are_told_to_the_job_and_batches_counted() -> None:
    with scheduler() as (made, _):
        read = job(20, output=RESIDUAL)
        made.submit(read)
        wait(read)
        assert read.result is not None
        assert set(read.result.stages) == {"queue", "store", "gate"}
        counters = made.counters
        assert counters["kv_batches"] == 3
        assert counters["kv_batch_tokens"] == 20
        assert counters["kv_largest_batch"] == 8


def test_drain_tells_when_it_did_not_finish() -> None:
    with held() as (made, backend):
        assert not made.drain(0)
        backend.resume()
        assert made.drain(30)


def test_jobs_cancelled_while_a_batch_is_taken_do_not_leave_others_waiting() -> None:
    queue = FairQueue(8)
    # Asked for its outcome when the queue is tidied, and again when its piece is given: in between
    # its client cancels.
    answer = _CancelledLater(times=1)
    gone, other = job(1, client="a"), job(1, client="b", layers=(1,))
    gone.answer = answer
    for each in (gone, other):
        for piece in each.pieces(8):
            queue.push(piece)
    assert [piece.job for piece in queue.take(64)] == [other]
    assert answer.asked == 2
    assert (queue.take(64), queue.num_tokens) == ([], 0)


class _CancelledLater(Future[StepAnswer]):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.asked, self._times = 0, times

    def done(self) -> bool:
        self.asked += 1
        return self.asked > self._times
