"""The engine: every verb and every source, refused whole or done whole; waits, ends, failures."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_core import errors
from engram_core.engine import Engine
from engram_core.engine_types import (
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepAnswer,
    StepRequest,
)
from engram_core.errors import Conflict
from engram_core.hashing import DEAD, block, hash_windows
from tests.recording import SIZES, TOY, Clock, RecordingBackend, kv_number

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "toy.json").read_text())
IDS, ROWS = GOLDEN["compressed_ids"], GOLDEN["rows"]
LIMITS = EngineLimits(
    max_tokens=64, max_sessions=8, max_held_tokens=4096, ahead_tokens=16, chunk_tokens=8
)


class Bench:
    """An engine on a recording backend, with short calls."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.backend = RecordingBackend()
        merged = {**{k: getattr(LIMITS, k) for k in LIMITS.__dataclass_fields__}, **limits}
        self.engine = Engine(self.backend, EngineLimits(**merged), clock=self.clock)

    def open(self, session_id: int, ids: Sequence[int] = (), **opening: Any) -> int:
        """Open and push; returns the epoch."""
        state = self.engine.open("", OpenRequest(session_id=session_id, **opening))
        if ids:
            self.push(session_id, state.length, ids)
        return state.epoch

    def push(self, session_id: int, position: int, ids: Sequence[int], **named: Any) -> Any:
        named.setdefault("ahead", False)
        return self.engine.push("", session_id, position, np.array(ids, dtype=np.int64), **named)

    def begin(self, segments: Segments, output: Output, **named: Any) -> Future[StepAnswer]:
        named.setdefault("layers", () if output is Output.NONE else (1,))
        return self.engine.step("", StepRequest(segments, output, **named))

    def step(
        self, segments: Segments, output: Output = Output.HASH_IDS, **named: Any
    ) -> StepAnswer:
        return self.begin(segments, output, **named).result(30)


def of(
    *segments: tuple[int, int, int], epoch: Sequence[int] | None = None, **more: Any
) -> Segments:
    """Segments of (session_id, position, count)."""
    table = np.array(segments, dtype=np.int64).reshape(-1, 3)
    if "token_ids" in more:
        more["token_ids"] = np.array(more["token_ids"], dtype=np.int64)
    return Segments(
        count=table[:, 2].astype(np.int32),
        position=table[:, 1].copy(),
        session_id=table[:, 0].copy(),
        epoch=None if epoch is None else np.array(epoch, dtype=np.int64),
        **more,
    )


def beside(
    position: Sequence[int], lookback: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> Segments:
    """Segments that have their look-back beside them."""
    return Segments(
        count=np.array([len(t) for t in texts], dtype=np.int32),
        position=np.array(position, dtype=np.int64),
        lookback=np.array(lookback, dtype=np.int32).reshape(-1, 3),
        token_ids=np.array([t for text in texts for t in text], dtype=np.int64),
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.backend.resume()
    made.engine.close()


def refused(code: type[errors.EngramError], call: Any) -> errors.EngramError:
    """The refusal of a call, or of a step's first failing segment."""
    with pytest.raises(errors.EngramError) as caught:
        call()
    error = caught.value
    error = error.first if isinstance(error, errors.StepRefused) else error
    assert type(error) is code, error
    return error


# ---- one session


def test_step_pushes_and_reads_toy_rows(bench: Bench) -> None:
    bench.open(1)
    answer = bench.step(of((1, 0, 5), token_ids=IDS))
    assert answer.tensors[1].tolist() == ROWS
    assert (answer.length.tolist(), answer.base.tolist()) == ([5], [0])
    assert answer.dead.tolist() == [False] * 5


def test_placeholder_ids_are_refused_and_change_nothing(bench: Bench) -> None:  # A4, A5, G1
    bench.open(1)
    for bad, index in (([5, -1, 9], 1), ([16], 0), ([2**31], 0), ([2**63 - 1], 0)):
        error = refused(errors.TokenOutOfRange, lambda bad=bad: bench.push(1, 0, bad))
        assert error.details["index"] == index
    assert bench.engine.get("", 1).length == 0
    assert bench.step(of((1, 0, 3), token_ids=IDS[:3])).tensors[1].tolist() == ROWS[:3]
    assert bench.push(1, 3, [15]).length == 4


def test_idle_ranks_and_empty_batches_are_answered(bench: Bench) -> None:  # A19, G25
    bench.open(1)
    bench.open(2)
    bench.open(3)
    answer = bench.step(of((1, 0, 0), (2, 0, 1), (3, 0, 5), token_ids=[5, *IDS]))
    assert answer.length.tolist() == [0, 1, 5]
    assert answer.tensors[1].tolist() == [ROWS[0], *ROWS]
    for output in (Output.KV, Output.ROWS, Output.HASH_IDS):
        assert len(bench.step(of((1, 0, 0)), output).tensors[1]) == 0
        assert len(bench.step(of(), output).tensors[1]) == 0
    residual = torch.empty(0, SIZES.hc_mult, SIZES.dim)
    assert bench.step(of(), Output.RESIDUAL, residual=residual).tensors[1] is residual
    assert bench.step(of(token_ids=[]), Output.NONE).length.tolist() == []


def test_masked_positions_are_dead_and_their_ids_are_not_read(bench: Bench) -> None:
    bench.open(1)
    mask = np.array([True, False, True])
    residual = torch.full((3, SIZES.hc_mult, SIZES.dim), float("nan"))
    segments = of((1, 0, 3), token_ids=[5, -7, 9], mask=mask)
    answer = bench.step(segments, Output.RESIDUAL, residual=residual)
    assert answer.dead.tolist() == [False, True, False]
    assert bench.engine.get("", 1).compressed_lookback == (5, DEAD, 9)
    rows = bench.step(of((1, 1, 2))).tensors[1]
    windows = np.array([[2, 2, 2, 2], [9, 2, 2, 2]], dtype=np.int32)
    assert rows.tolist() == hash_windows(windows, TOY, [0])[:, 0].tolist()


def test_residual_is_updated_in_place_for_every_dtype(bench: Bench) -> None:
    bench.open(1, IDS)
    expected = kv_number(1, block(_toy_windows(), TOY.pad_id)).tolist()
    for dtype in (torch.bfloat16, torch.float32):
        residual = torch.zeros(5, SIZES.hc_mult, SIZES.dim, dtype=dtype)
        answer = bench.step(of((1, 0, 5)), Output.RESIDUAL, layers=(14,), residual=residual)
        assert answer.tensors[14] is residual
        assert residual[:, 1, 2].tolist() == expected


def _toy_windows() -> np.ndarray:
    padded = [DEAD] * 3 + IDS
    return np.array([padded[i : i + 4][::-1] for i in range(5)], dtype=np.int32)


def test_any_positions_in_any_segments_and_layers_are_read(bench: Bench) -> None:
    bench.open(1, IDS)
    answer = bench.step(of((1, 3, 2), (1, 0, 2), (1, 3, 1)), layers=(14, 1))
    assert list(answer.tensors) == [14, 1]
    assert answer.tensors[1].tolist() == [ROWS[i] for i in (3, 4, 0, 1, 3)]
    kv = bench.step(of((1, 3, 2)), Output.KV, layers=(14, 1)).tensors
    windows = block(_toy_windows()[3:], TOY.pad_id)
    for index, layer in enumerate((1, 14)):
        assert kv[layer][:, 2, 2].tolist() == kv_number(index, windows).tolist()


def test_stored_rows_have_the_tables_bytes(bench: Bench) -> None:
    bench.open(1, IDS)
    stored = bench.step(of((1, 0, 5)), Output.ROWS, stored=True).tensors[1]
    assert (stored.shape, stored.dtype) == ((5, SIZES.n_hash_cols, 16), torch.uint8)
    live = bench.step(of((1, 0, 5)), Output.ROWS).tensors[1]
    assert (live.shape, live.dtype) == ((5, SIZES.n_hash_cols, SIZES.head_dim), torch.bfloat16)


def test_read_is_not_changed_by_what_happens_to_the_session_later(bench: Bench) -> None:
    bench.open(1, IDS)
    bench.backend.hold()
    first = bench.begin(of((1, 0, 5)), Output.KV)
    bench.backend.wait_begun()
    second = bench.begin(of((1, 0, 5)), Output.KV)
    epoch = bench.engine.rewind("", 1, 0).epoch
    bench.push(1, 0, [1, 1, 1, 1, 1], epoch=epoch)
    bench.engine.close_session("", 1)
    bench.backend.resume()
    expected = kv_number(0, block(_toy_windows(), TOY.pad_id)).tolist()
    for answer in (first, second):
        assert answer.result(30).tensors[1][:, 0, 0].tolist() == expected


def test_epoch_of_a_step_that_pushes_is_checked_for_the_push_only(bench: Bench) -> None:
    epoch = bench.open(1, IDS)
    for _ in range(2):  # and its retry, whose epoch is stale then
        answer = bench.step(of((1, 3, 1), token_ids=[8]), truncate=True)
        assert answer.epoch.tolist() == [epoch + 1]
        assert answer.length.tolist() == [4]
    refused(errors.StaleEpoch, lambda: bench.step(of((1, 3, 1), epoch=[epoch])))
    assert bench.step(of((1, 3, 1), epoch=[epoch + 1])).tensors[1].tolist() != [ROWS[3]]


def test_output_none_probes_the_fence(bench: Bench) -> None:
    epoch = bench.open(1, IDS)
    answer = bench.step(of((1, 2, 3)), Output.NONE)
    assert (answer.length.tolist(), answer.epoch.tolist(), answer.tensors) == ([5], [epoch], {})
    assert bench.backend.calls == []


def test_single_verbs_answer_with_the_state(bench: Bench) -> None:
    epoch = bench.open(1)
    pushed = bench.push(1, 0, IDS)
    assert (pushed.length, pushed.base, pushed.epoch) == (5, 0, epoch)
    assert (pushed.appended, pushed.removed) == (5, 0)
    cut = bench.push(1, 2, [1], truncate=True)
    assert (cut.length, cut.epoch, cut.appended, cut.removed) == (3, epoch + 1, 1, 3)
    rewound = bench.engine.rewind("", 1, 1, epoch + 1)
    assert (rewound.length, rewound.epoch, rewound.removed) == (1, epoch + 2, 2)
    counters = bench.engine.counters
    assert counters["tokens_pushed"] == 6
    assert counters["positions_cut"] == 5
    assert (counters["rewinds"], counters["truncating_pushes"]) == (1, 1)


def test_open_maps_lookback_and_refuses_what_contradicts_itself(bench: Bench) -> None:
    state = bench.engine.open("", OpenRequest(position=4, lookback=(7, None, 11)))
    assert (state.base, state.compressed_lookback, state.created) == (4, (7, DEAD, 11), True)
    assert state.session_id > 0
    for request, code in (
        (OpenRequest(position=4), errors.SchemaError),
        (OpenRequest(position=2, lookback=(1, 2, 3)), errors.SchemaError),
        (OpenRequest(position=-1), errors.SchemaError),
        (OpenRequest(session_id=0), errors.SchemaError),
        (OpenRequest(session_id=2**63), errors.SchemaError),
        (OpenRequest(epoch=5), errors.BadRequest),
        (OpenRequest(fork_of=1, lookback=()), errors.BadRequest),
        (OpenRequest(fork_of=1), errors.UnknownSession),
        (OpenRequest(position=1, lookback=(16,)), errors.TokenOutOfRange),
        (OpenRequest(position=1, lookback=(-1,)), errors.TokenOutOfRange),
    ):
        refused(code, lambda request=request: bench.engine.open("", request))
    assert bench.engine.counters["sessions_open"] == 1


# ---- the other sources


def test_lookback_equals_session(bench: Bench) -> None:
    bench.open(1, IDS)
    segments = beside([3, 0, 1], [[5, 7, 9], [-1, -1, -1], [-1, -1, 5]], [[11, 3], [5], []])
    answer = bench.step(segments)
    assert answer.tensors[1].tolist() == [ROWS[3], ROWS[4], ROWS[0]]
    assert answer.length.tolist() == answer.base.tolist() == answer.epoch.tolist() == [-1] * 3


def test_lookback_before_the_start_is_refused_with_every_segment(bench: Bench) -> None:
    segments = beside([0, 5, 2], [[-1, -1, 1], [16, 1, 1], [4, 1, 1]], [[1], [1], [1]])
    with pytest.raises(errors.StepRefused) as caught:
        bench.step(segments)
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [
        (0, "bad_request"),
        (1, "token_out_of_range"),
        (2, "bad_request"),
    ]


def test_lookback_without_output_fills_the_store(bench: Bench) -> None:
    bench.open(1, IDS)
    candidates = beside([5, 5], [[9, 11, 3], [9, 11, 3]], [[1], [2]])
    assert bench.step(candidates, Output.NONE, layers=(14,)).tensors == {}
    assert bench.engine.drain(30)
    assert bench.backend.of("project") == [(1, 2)]
    bench.step(of((1, 5, 1), token_ids=[2]), Output.KV, layers=(14,))
    assert bench.backend.of("project") == [(1, 2)]
    assert bench.engine.counters["kv_hits"] == 1


def given_rows(rows: Any, **more: Any) -> Segments:
    hash_ids = np.array(rows, dtype=np.int64)[:, None, :]
    return Segments(
        count=np.array([len(rows)], dtype=np.int32),
        position=np.array([0], dtype=np.int64),
        hash_ids=hash_ids,
        **more,
    )


def test_hash_ids_are_read_as_they_are_and_nothing_is_kept(bench: Bench) -> None:
    mask = np.array([True] * 4 + [False])
    answer = bench.step(given_rows(ROWS, mask=mask), Output.KV)
    expected = kv_number(0, np.array(ROWS)).tolist()
    assert answer.tensors[1][:, 0, 0].tolist() == [*expected[:4], 0]
    assert answer.dead.tolist() == [False] * 4 + [True]
    assert bench.engine.counters["kv_entries"] == 0
    assert bench.step(given_rows(ROWS)).tensors[1].tolist() == ROWS
    for _ in range(20):  # more than the store has room for
        bench.step(given_rows(ROWS), Output.KV)


@pytest.mark.parametrize(("column", "value"), [(0, -1), (1, 100), (0, 101), (5, 660), (5, -53)])
def test_hash_ids_outside_their_bucket_are_refused(bench: Bench, column: int, value: int) -> None:
    rows = np.array(ROWS)
    rows[3, column] = value
    error = refused(errors.RowOutOfRange, lambda: bench.step(given_rows(rows), Output.KV))
    assert (error.details["token"], error.details["column"]) == (3, column)


# ---- refused whole


def test_every_failing_segment_is_listed_and_nothing_changes(bench: Bench) -> None:
    bench.open(1, IDS)
    bench.open(2)
    with pytest.raises(errors.StepRefused) as caught:
        bench.step(of((2, 0, 1), (1, 4, 1), (7, 0, 1), token_ids=[1, 1, 1]))
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [
        (1, "conflict"),
        (2, "unknown_session"),
    ]
    assert bench.engine.get("", 2).length == 0
    with pytest.raises(errors.StepRefused) as caught:
        bench.step(of((1, 4, 2), (2, 0, 0), (7, 0, 1)))
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [
        (0, "not_pushed"),
        (2, "unknown_session"),
    ]


def test_expiry_of_one_among_many_is_listed(bench: Bench) -> None:
    for i in range(1, 7):
        bench.open(i, [5])
    bench.clock.now_s += LIMITS.session_ttl_s - 1
    for i in (1, 2, 3, 5, 6):
        bench.engine.get("", i)
    bench.clock.now_s += 2
    assert bench.engine.sweep() == 1
    with pytest.raises(errors.StepRefused) as caught:
        bench.step(of(*((i, 1, 1) for i in range(1, 7)), token_ids=[7] * 6))
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [(3, "unknown_session")]


def steps_that_contradict_themselves() -> list[tuple[str, Any, dict[str, Any], Any]]:
    one = of((1, 0, 1), token_ids=[5])
    residual = torch.zeros(1, SIZES.hc_mult, SIZES.dim)
    read = of((1, 0, 1))
    none = np.zeros(0, dtype=np.int64)
    return [
        ("no source", Segments(none.astype(np.int32), none), {}, errors.BadRequest),
        ("unknown layer", one, {"layers": (2,)}, errors.UnknownLayer),
        ("layer twice", one, {"layers": (1, 1)}, errors.SchemaError),
        ("no layer", one, {"layers": ()}, errors.BadRequest),
        ("no residual", one, {"output": Output.RESIDUAL}, errors.BadRequest),
        ("residual for kv", one, {"residual": residual}, errors.BadRequest),
        (
            "two layers of residual",
            one,
            {"output": Output.RESIDUAL, "layers": (1, 14), "residual": residual},
            errors.BadRequest,
        ),
        (
            "residual of another shape",
            one,
            {"output": Output.RESIDUAL, "residual": residual[:, :1]},
            errors.BadTensor,
        ),
        (
            "residual of another dtype",
            one,
            {"output": Output.RESIDUAL, "residual": residual.to(torch.float64)},
            errors.BadTensor,
        ),
        ("stored kv", one, {"output": Output.KV, "stored": True}, errors.BadRequest),
        ("truncate without ids", read, {"truncate": True}, errors.BadRequest),
        ("wait too long", read, {"wait_ms": 1001}, errors.SchemaError),
        ("mask without ids", of((1, 0, 1), mask=np.array([True])), {}, errors.BadRequest),
        ("ids too short", of((1, 0, 2), token_ids=[5]), {}, errors.BadTensor),
        ("negative count", of((1, 0, -1)), {}, errors.BadTensor),
        ("negative position", of((1, -1, 1)), {}, errors.BadTensor),
        ("too many tokens", of((1, 0, 65), token_ids=[1] * 65), {}, errors.TooManyTokens),
        ("sum beyond int32", of((1, 0, 2**31 - 1), (2, 0, 2**31 - 1)), {}, errors.TooManyTokens),
        ("too many segments", of(*[(1, 0, 0)] * 65), {}, errors.TooManyTokens),
        ("position beyond all", of((1, 2**63 - 1, 1)), {}, errors.TooManyPositions),
    ]


@pytest.mark.parametrize(
    ("segments", "named", "code"),
    [case[1:] for case in steps_that_contradict_themselves()],
    ids=[case[0] for case in steps_that_contradict_themselves()],
)
def test_step_that_contradicts_itself_is_refused(
    bench: Bench, segments: Segments, named: dict[str, Any], code: Any
) -> None:
    bench.open(1)
    refused(code, lambda: bench.step(segments, **named))
    assert bench.engine.get("", 1).length == 0


def test_single_push_is_refused_without_a_list(bench: Bench) -> None:
    bench.open(1, IDS)
    with pytest.raises(errors.Conflict) as caught:
        bench.push(1, 3, [11, 4])
    assert caught.value.details["index"] == 1
    refused(errors.TooManyTokens, lambda: bench.push(1, 5, [1] * 65))
    refused(errors.SchemaError, lambda: bench.push(1, -1, [1]))
    refused(errors.SchemaError, lambda: bench.push(1, 5, [1], epoch=2**63))
    refused(errors.BadTensor, lambda: bench.push(1, 5, [[1]]))
    refused(errors.BadTensor, lambda: bench.push(1, 5, [1], mask=np.ones(2, dtype=np.bool_)))


# ---- work ahead


def test_push_alone_starts_kv_of_what_it_appends(bench: Bench) -> None:
    bench.open(1, IDS)
    bench.push(1, 3, [11, 3, 4, 6], ahead=True)
    assert bench.engine.drain(30)
    assert bench.backend.of("project") == [(0, 2), (1, 2)]
    bench.step(of((1, 5, 2)), Output.KV, layers=(1, 14))
    assert bench.engine.counters["kv_hits"] == 4


def test_step_that_pushes_alone_starts_kv_for_its_layers(bench: Bench) -> None:
    bench.open(1)
    bench.step(of((1, 0, 2), token_ids=[5, 7]), Output.NONE)
    bench.step(of((1, 2, 1), token_ids=[9]), Output.NONE, ahead=False)
    bench.step(of((1, 3, 1), token_ids=[11]), Output.HASH_IDS)
    assert bench.engine.drain(30)
    assert bench.backend.of("project") == [(0, 2), (1, 2)]


def test_long_push_is_not_worked_ahead(bench: Bench) -> None:
    bench.open(1)
    bench.push(1, 0, [1] * 17, ahead=True)
    assert bench.engine.drain(30)
    assert bench.backend.calls == []


# ---- waits


def test_read_waits_for_ids(bench: Bench) -> None:
    bench.open(1, IDS[:3])
    early = bench.begin(of((1, 3, 1), (1, 0, 1)), Output.HASH_IDS, wait_ms=1000)
    bench.push(1, 3, IDS[3:4])
    assert early.result(30).tensors[1].tolist() == [ROWS[3], ROWS[0]]
    assert early.result().length.tolist() == [4, 4]
    assert bench.engine.counters["waiting"] == 0


def test_who_is_told_the_end_of_a_wait_may_call_the_engine(bench: Bench) -> None:
    """A wait for ids that reads nothing is answered by the push itself."""
    bench.open(1)
    early = bench.begin(of((1, 0, 1)), Output.NONE, wait_ms=1000)
    told = []
    early.add_done_callback(lambda _: told.append(bench.engine._lock.locked()))
    bench.push(1, 0, [5])
    assert early.result(30).length.tolist() == [1]
    assert told == [False]


def test_read_waits_for_a_greater_epoch(bench: Bench) -> None:
    epoch = bench.open(1, [5, 7, 9, 8])
    segments = of((1, 3, 1), epoch=[epoch + 1])
    error = refused(errors.NotPushed, lambda: bench.step(segments))
    assert (error.expected, error.got) == (epoch, epoch + 1)
    early = bench.begin(segments, Output.HASH_IDS, wait_ms=1000)
    bench.step(of((1, 3, 1), token_ids=[11]), Output.NONE, truncate=True)
    assert early.result(30).tensors[1].tolist() == [ROWS[3]]


def test_wait_ends_when_its_epoch_becomes_stale(bench: Bench) -> None:
    epoch = bench.open(1, IDS)
    early = bench.begin(of((1, 5, 1), epoch=[epoch]), Output.KV, wait_ms=1000)
    bench.engine.rewind("", 1, 5)
    error = refused(errors.StaleEpoch, lambda: early.result(30))
    assert error.details["epoch"] == epoch + 1


def test_waiting_keeps_a_session_from_expiring(bench: Bench) -> None:
    bench.open(1)
    bench.clock.now_s += LIMITS.session_ttl_s - 0.1
    early = bench.begin(of((1, 0, 1)), Output.HASH_IDS, wait_ms=1000)
    bench.clock.now_s += 0.5
    assert bench.engine.sweep() == 0
    bench.push(1, 0, [5])
    assert early.result(30).tensors[1].tolist() == [ROWS[0]]


@pytest.mark.parametrize("end", ["close", "owner", "sweep", "tenant"])
def test_wait_ends_when_its_session_does(bench: Bench, end: str) -> None:
    bench.open(1, owner="A")
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=1000)
    bench.clock.now_s += LIMITS.session_ttl_s + 1 if end == "sweep" else 0
    {
        "close": lambda: bench.engine.close_session("", 1),
        "owner": lambda: bench.engine.close_owner("", "A"),
        "sweep": bench.engine.sweep,
        "tenant": lambda: bench.engine.close_tenant(""),
    }[end]()
    refused(errors.UnknownSession, lambda: early.result(30))


def test_wait_ends_at_its_time(bench: Bench) -> None:
    bench.open(1)
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=500)
    bench.clock.now_s += 0.4
    bench.engine.sweep()
    assert not early.done()
    bench.clock.now_s += 0.2
    bench.engine.sweep()
    refused(errors.NotPushed, lambda: early.result(30))


def test_wait_ends_by_the_engines_own_clock() -> None:
    with Engine(RecordingBackend(), LIMITS) as engine:
        engine.open("", OpenRequest(session_id=1))
        request = StepRequest(of((1, 0, 1)), Output.KV, (1,), wait_ms=1)
        refused(errors.NotPushed, lambda: engine.step("", request).result(30))


def test_wait_is_refused_at_once_where_waiting_cannot_help(bench: Bench) -> None:
    epoch = bench.open(1, position=4, lookback=(1, 2, 3))
    for segments, code in (
        (of((1, 3, 1)), errors.HistoryTruncated),
        (of((1, 4, 1), epoch=[epoch - 1]), errors.StaleEpoch),
        (of((2, 0, 1)), errors.UnknownSession),
    ):
        refused(code, lambda s=segments: bench.begin(s, Output.KV, wait_ms=1000))


def test_cancelled_wait_is_forgotten(bench: Bench) -> None:
    bench.open(1)
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=1000)
    assert early.cancel()
    bench.push(1, 0, [5])
    assert bench.engine.counters["waiting"] == 0
    with pytest.raises(CancelledError):
        early.result(30)
    assert bench.backend.calls == []


def test_callback_of_a_refused_wait_may_call_the_engine(bench: Bench) -> None:
    bench.open(1)
    seen: list[int] = []
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=1000)
    early.add_done_callback(lambda _: seen.append(bench.engine.open("", OpenRequest()).length))
    bench.engine.close_session("", 1)
    assert seen == [0]


# ---- tenants, failure, end


def test_kv_is_private_to_a_tenant_and_goes_with_it(bench: Bench) -> None:
    for tenant in ("A", "B", "A"):
        bench.engine.open(tenant, OpenRequest(session_id=1))
        request = StepRequest(of((1, 0, 1), token_ids=[5]), Output.KV, (1,))
        bench.engine.step(tenant, request).result(30)
        bench.engine.close_tenant(tenant)
    assert bench.engine.counters["kv_misses"] == 3
    assert bench.engine.counters["kv_hits"] == 0


def test_failure_stops_the_engine(bench: Bench) -> None:
    bench.open(1, IDS)
    bench.backend.fail_on = "project"
    refused(errors.Internal, lambda: bench.step(of((1, 0, 5)), Output.KV))
    assert isinstance(bench.engine.failure, errors.Internal)
    for call in (
        lambda: bench.push(1, 5, [1]),
        lambda: bench.engine.get("", 1),
        lambda: bench.step(of((1, 0, 5))),
    ):
        refused(errors.Internal, call)


def test_what_waits_when_the_backend_fails_is_told_that(bench: Bench) -> None:
    bench.open(1)
    bench.open(2, IDS)
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=500)
    bench.backend.fail_on = "project"
    refused(errors.Internal, lambda: bench.step(of((2, 0, 5)), Output.KV))
    bench.clock.now_s += 0.6
    bench.engine._end_waits()  # as its timer does, whose clock stands still here
    refused(errors.Internal, lambda: early.result(30))


def test_close_refuses_what_waits_and_ends_every_thread() -> None:
    before = set(threading.enumerate())
    bench = Bench()
    bench.open(1)
    early = bench.begin(of((1, 0, 1)), Output.KV, wait_ms=1000)
    bench.engine.close()
    bench.engine.close()
    refused(errors.Draining, lambda: early.result(30))
    refused(errors.Draining, lambda: bench.push(1, 0, [1]))
    assert set(threading.enumerate()) <= before


def test_answered_steps_leave_nothing_behind(bench: Bench) -> None:  # G24
    bench.open(1, IDS)
    residual = torch.zeros(5, SIZES.hc_mult, SIZES.dim)
    gone = weakref.ref(residual)
    bench.step(of((1, 0, 5)), Output.RESIDUAL, residual=residual)
    assert bench.engine.drain(30)
    del residual
    gc.collect()
    assert gone() is None


# ---- laws


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_steps_from_many_threads_agree_with_serial_sessions(data: st.DataObject) -> None:
    texts = [data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=30)) for _ in range(4)]
    chunks = data.draw(st.integers(1, 7))
    bench = Bench()
    wrong: list[int] = []

    def client(number: int) -> None:
        bench.open(number + 1)
        text = texts[number]
        for start in range(0, len(text), chunks):
            ids = text[start : start + chunks]
            segments = of((number + 1, start, len(ids)), token_ids=ids)
            kv = bench.step(segments, Output.KV, client=number).tensors[1][:, 0, 0]
            padded = np.array([DEAD] * 3 + text, dtype=np.int32)
            at = np.arange(start, start + len(ids))[:, None] + 3 - np.arange(4)
            if kv.tolist() != kv_number(0, block(padded[at], TOY.pad_id)).tolist():
                wrong.append(number)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    counters = bench.engine.counters
    bench.engine.close()
    assert not wrong
    assert counters["tokens_pushed"] == sum(map(len, texts))
    total = counters["kv_hits"] + counters["kv_misses"] + counters["kv_duplicates"]
    assert total == counters["tokens_pushed"]


def test_a_backend_serves_one_engine_at_a_time() -> None:
    backend = RecordingBackend()
    with Engine(backend, LIMITS), pytest.raises(Conflict, match="serves an engine already"):
        Engine(backend, LIMITS)
    Engine(backend, LIMITS).close()
