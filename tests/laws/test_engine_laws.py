"""Laws of the engine: whatever way a token's window comes, the same bits come back.

Each law also says which counters must have moved, so that it cannot hold by doing nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_core.backends.base import Backend
from engram_core.checkpoint import open_checkpoint
from engram_core.engine import Engine
from engram_core.engine_types import (
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepAnswer,
    StepRequest,
)
from engram_core.errors import NotPushed, StaleEpoch, StepRefused, UnknownSession
from engram_core.loader import load
from tests.builders import WORDS, Shape, write_gguf
from tests.laws.truth import Truth, int64, lookback_of
from tests.oracle import DEAD, same_bits

LAYERS = (1, 14)
LENGTH = 24
LIMITS = EngineLimits(
    max_tokens=256, max_sessions=80, max_held_tokens=1 << 16, ahead_tokens=64, chunk_tokens=16
)
ONE_BATCH = replace(LIMITS, chunk_tokens=64)

lengths = st.integers(1, LENGTH)
cuts = st.lists(st.integers(0, LENGTH), max_size=6).map(lambda c: sorted({0, LENGTH, *c}))


class Setting:
    """A backend and its truth; engines come and go over it."""

    def __init__(self, path: Path) -> None:
        self.truth = Truth(path)
        self.backend: Backend = load(open_checkpoint(path), num_slots=128)
        self.wholes: dict[int, torch.Tensor] = {}

    def engine(self, limits: EngineLimits = LIMITS) -> Engine:
        return Engine(self.backend, limits)

    def prompt(self, seed: int) -> tuple[list[int], list[bool], list[int]]:
        """Token ids, mask, compressed ids; some dead."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, len(WORDS), LENGTH).tolist()
        alive = (rng.random(LENGTH) > 0.1).tolist()
        return ids, alive, self.truth.oracle.compress(ids, alive)


@pytest.fixture(scope="module", params=["Q2_K", "Q8_0"])
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    path = tmp_path_factory.mktemp("engine") / "small.gguf"
    shape = Shape(head_dim=256 if request.param == "Q2_K" else 32, dim=32)
    made = Setting(write_gguf(path, shape, table=request.param, wkv="F16", seed=6))
    yield made
    made.backend.close()


def opened(engine: Engine, **fields: Any) -> int:
    return engine.open("t", OpenRequest(**fields)).session_id


def push(engine: Engine, name: int, position: int, ids: Any, mask: Any, **options: Any) -> Any:
    alive = np.array(mask, dtype=np.bool_)
    return engine.push("t", name, position, int64(ids), alive, **options)


def segments(parts: Sequence[tuple[int, int, int]], **more: Any) -> Segments:
    """(session id, position, count) each."""
    return Segments(
        count=np.array([n for _, _, n in parts], dtype=np.int32),
        position=int64([p for _, p, _ in parts]),
        session_id=int64([s for s, _, _ in parts]),
        **more,
    )


def run(engine: Engine, what: Segments, output: Output = Output.KV, **more: Any) -> StepAnswer:
    layers = more.pop("layers", LAYERS)
    request = StepRequest(what, output, layers, **more)
    return engine.step("t", request).result(timeout=60)


def kv_of(engine: Engine, name: int, position: int = 0, count: int = LENGTH) -> torch.Tensor:
    """Both layers' kv: [2, T, hc + 1, dim]."""
    answer = run(engine, segments([(name, position, count)]))
    return torch.stack([answer.tensors[layer] for layer in LAYERS])


def whole(setting: Setting, seed: int) -> torch.Tensor:
    """kv of a prompt pushed at once into a fresh store, held to the truth; kept by seed.

    Not beside another engine: the backend's slots are one engine's at a time.
    """
    if seed not in setting.wholes:
        ids, alive, compressed = setting.prompt(seed)
        with setting.engine() as engine:
            name = opened(engine)
            push(engine, name, 0, ids, alive, ahead=False)
            kv = kv_of(engine, name)
        windows = setting.truth.windows(compressed, 0, LENGTH)
        for layer, got in zip(LAYERS, kv, strict=True):
            setting.truth.check_kv(layer, windows, [c == DEAD for c in compressed], got)
        setting.wholes[seed] = kv
    return setting.wholes[seed]


@given(seed=st.integers(0, 50), cuts=cuts, ahead=st.booleans(), by_step=st.booleans())
def test_any_chunking_gives_the_same_bits(
    setting: Setting, seed: int, cuts: list[int], *, ahead: bool, by_step: bool
) -> None:
    ids, alive, _ = setting.prompt(seed)
    with setting.engine() as engine:
        name = opened(engine)
        for a, b in itertools.pairwise(cuts):
            if by_step:
                tokens = {"token_ids": int64(ids[a:b]), "mask": np.array(alive[a:b], np.bool_)}
                run(engine, segments([(name, a, b - a)], **tokens), Output.HASH_IDS)
            else:
                push(engine, name, a, ids[a:b], alive[a:b], ahead=ahead)
        kv = kv_of(engine, name)
        sliced = [kv_of(engine, name, a, b - a) for a, b in itertools.pairwise(cuts)]
        counters = engine.counters
    assert same_bits(kv, whole(setting, seed))
    assert same_bits(torch.cat(sliced, dim=1), kv)
    assert counters["tokens_pushed"] == LENGTH
    assert counters["kv_hits"] + counters["kv_misses"] + counters["kv_duplicates"] >= 2
    assert (counters["ahead_tokens"] > 0) == (ahead and not by_step)


@given(seed=st.integers(0, 20), data=st.data())
def test_a_segment_is_the_same_in_any_batch(
    setting: Setting, seed: int, data: st.DataObject
) -> None:
    wholes = [whole(setting, seed + i) for i in range(3)]
    with setting.engine() as engine:
        names = [opened(engine) for _ in range(3)]
        for i, name in enumerate(names):
            ids, alive, _ = setting.prompt(seed + i)
            push(engine, name, 0, ids, alive, ahead=False)
        parts = []
        for _ in range(data.draw(st.integers(1, 8))):
            position = data.draw(st.integers(0, LENGTH))
            count = data.draw(st.integers(0, LENGTH - position))
            parts.append((data.draw(st.sampled_from(names)), position, count))
        together = run(engine, segments(parts))
        offset = 0
        for name, position, count in parts:
            alone = kv_of(engine, name, position, count)
            expected = wholes[names.index(name)]
            assert same_bits(alone, expected[:, position : position + count])
            for layer, single in zip(LAYERS, alone, strict=True):
                assert same_bits(together.tensors[layer][offset : offset + count], single)
            offset += count
        counters = engine.counters
    if offset > 0:
        assert counters["kv_hits"] > 0


@given(seed=st.integers(0, 20), position=st.integers(0, LENGTH - 1))
def test_look_back_equals_the_session(setting: Setting, seed: int, position: int) -> None:
    """By a session opened at the position, and by no session at all."""
    ids, alive, compressed = setting.prompt(seed)
    expected = whole(setting, seed)[:, position:]
    row = lookback_of(setting.truth, compressed, position)
    rest = {"token_ids": int64(ids[position:]), "mask": np.array(alive[position:], np.bool_)}
    with setting.engine() as engine:
        own = row[len(row) - min(position, 3) :]
        lookback = tuple(None if t == -1 else t for t in own)
        name = opened(engine, position=position, lookback=lookback)
        push(engine, name, position, rest["token_ids"], rest["mask"])
        assert same_bits(kv_of(engine, name, position, LENGTH - position), expected)
        sourced = Segments(
            count=np.array([LENGTH - position], dtype=np.int32),
            position=int64([position]),
            lookback=np.array([row], dtype=np.int32),
            **rest,
        )
        answer = run(engine, sourced)
        assert engine.counters["kv_hits"] > 0
    for layer, kv in zip(LAYERS, expected, strict=True):
        assert same_bits(answer.tensors[layer], kv)


@given(seed=st.integers(0, 20))
def test_hash_ids_source_equals_the_session(setting: Setting, seed: int) -> None:
    _, alive, compressed = setting.prompt(seed)
    windows = setting.truth.windows(compressed, 0, LENGTH)
    per_layer = [setting.truth.hash_ids(layer, windows).numpy() for layer in LAYERS]
    sourced = Segments(
        count=np.array([LENGTH], dtype=np.int32),
        position=int64([0]),
        hash_ids=np.ascontiguousarray(np.stack(per_layer, axis=1)),
        mask=np.array(alive, np.bool_),
    )
    with setting.engine() as engine:
        answer = run(engine, sourced)
        assert engine.counters["kv_entries"] == 0, "nothing is stored"
        assert engine.counters["kv_batch_tokens"] > 0
    for layer, kv in zip(LAYERS, whole(setting, seed), strict=True):
        assert same_bits(answer.tensors[layer], kv)


@given(seed=st.integers(0, 20), position=st.integers(0, LENGTH))
def test_fork_and_rewind_are_inverses_of_a_detour(
    setting: Setting, seed: int, position: int
) -> None:
    """Rewind, say something else, rewind again, say the prompt: as if it had been said once."""
    ids, alive, _ = setting.prompt(seed)
    other_ids, other_alive, _ = setting.prompt(seed + 1)
    expected = whole(setting, seed)
    with setting.engine() as engine:
        name = opened(engine)
        push(engine, name, 0, ids, alive)
        fork = opened(engine, fork_of=name, position=position)
        push(engine, fork, position, other_ids[position:], other_alive[position:])
        detour = kv_of(engine, fork)
        assert same_bits(kv_of(engine, name), expected), "the fork changed its parent"
        first = engine.rewind("t", name, position).epoch
        push(engine, name, position, other_ids, other_alive, epoch=first)
        second = engine.rewind("t", name, position, first).epoch
        assert second == first + 1
        push(engine, name, position, ids[position:], alive[position:], epoch=second)
        answer = run(engine, segments([(name, 0, LENGTH)], epoch=int64([second])))
        for layer, kv in zip(LAYERS, expected, strict=True):
            assert same_bits(answer.tensors[layer], kv)
        assert same_bits(kv_of(engine, fork), detour), "the parent changed its fork"
        assert same_bits(detour[:, :position], expected[:, :position])
        counters = engine.counters
    assert (counters["rewinds"], counters["sessions_opened"]) == (2, 2)
    assert counters["positions_cut"] == (LENGTH - position) + LENGTH
    assert counters["kv_hits"] > 0


@given(seed=st.integers(0, 20), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_hit_miss_and_duplicate_give_the_same_bits(
    setting: Setting, seed: int, dtype: torch.dtype
) -> None:
    ids, alive, _ = setting.prompt(seed)
    which = [i % 6 for i in range(LENGTH)]
    outs = []
    with setting.engine(ONE_BATCH) as engine:
        names = [opened(engine) for _ in range(2)]
        for name in names:
            push(engine, name, 0, ids, alive, ahead=False)
        counts = [engine.counters]
        for _ in range(2):  # misses with duplicates (the second session), then hits
            x = setting.truth.residual([*which, *which], dtype).contiguous()
            parts = segments([(name, 0, LENGTH) for name in names])
            answer = run(engine, parts, Output.RESIDUAL, layers=(14,), residual=x)
            outs.append(answer.tensors[14].clone())
            counts.append(engine.counters)
    first, second = (
        {k: after[k] - before[k] for k in ("kv_hits", "kv_misses", "kv_duplicates")}
        for before, after in itertools.pairwise(counts)
    )
    assert first["kv_misses"] <= LENGTH <= first["kv_duplicates"]
    assert first["kv_misses"] + first["kv_duplicates"] == 2 * LENGTH
    assert second == {"kv_hits": 2 * LENGTH, "kv_misses": 0, "kv_duplicates": 0}
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0][:LENGTH], outs[0][LENGTH:])


@given(seed=st.integers(0, 20))
def test_work_ahead_makes_every_read_a_hit(setting: Setting, seed: int) -> None:
    ids, alive, _ = setting.prompt(seed)
    with setting.engine() as engine:
        name = opened(engine)
        push(engine, name, 0, ids, alive)
        assert engine.drain(60)
        before = engine.counters
        kv = kv_of(engine, name)
        after = engine.counters
    assert after["kv_misses"] == before["kv_misses"] > 0
    assert after["kv_hits"] - before["kv_hits"] == 2 * LENGTH
    assert after["ahead_tokens"] == 2 * LENGTH
    assert same_bits(kv, whole(setting, seed))


@given(seed=st.integers(0, 20), good=st.integers(0, 2))
def test_refused_step_changes_no_session(setting: Setting, seed: int, good: int) -> None:
    """One bad segment among three: the other two are not pushed."""
    ids, alive, _ = setting.prompt(seed)
    with setting.engine() as engine:
        names = [opened(engine) for _ in range(3)]
        for name in names:
            push(engine, name, 0, ids[:4], alive[:4], ahead=False)
        parts = [(name, 4, 2) for name in names]
        parts[good] = (names[good], 5, 2)  # a gap
        tokens = int64(ids[4:6] * 3)
        before = [engine.get("t", name) for name in names]
        with pytest.raises(StepRefused) as caught:
            run(engine, segments(parts, token_ids=tokens))
        assert [s["index"] for s in caught.value.segments] == [good]
        after = [engine.get("t", name) for name in names]
        assert [(s.length, s.epoch) for s in before] == [(s.length, s.epoch) for s in after]
        assert engine.counters["tokens_pushed"] == 12


def test_reads_of_64_sessions_never_mix(setting: Setting) -> None:
    """Eight threads, 64 sessions, interleaved pushes and reads: each as if it were alone."""
    expected = {seed: whole(setting, seed) for seed in range(64)}
    failures: list[BaseException] = []
    with setting.engine() as engine:

        def work(seeds: range) -> None:
            try:
                names = {seed: opened(engine) for seed in seeds}
                for start in range(0, LENGTH, 3):
                    for seed, name in names.items():
                        ids, alive, _ = setting.prompt(seed)
                        part = slice(start, start + 3)
                        push(engine, name, start, ids[part], alive[part], ahead=seed % 2 == 0)
                        kv = kv_of(engine, name, start, 3)
                        assert same_bits(kv, expected[seed][:, part]), (seed, start)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(range(i, 64, 8),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counters = engine.counters
    assert not failures, failures[0]
    assert counters["sessions_opened"] == 64
    assert counters["kv_largest_batch"] > 3, "batches were shared"
    assert counters["kv_evicted"] > 0


# ---------------------------------------------------------------------- waiting


def waiting(engine: Engine, name: int, position: int, count: int, **more: Any) -> Future[Any]:
    request = StepRequest(
        segments([(name, position, count)], **more), Output.KV, LAYERS, wait_ms=1000
    )
    return engine.step("t", request)


@settings(max_examples=15)
@given(seed=st.integers(0, 20), cuts=cuts)
def test_waiting_read_is_answered_by_the_last_push(
    setting: Setting, seed: int, cuts: list[int]
) -> None:
    ids, alive, _ = setting.prompt(seed)
    with setting.engine() as engine:
        name = opened(engine)
        read = waiting(engine, name, 0, LENGTH)
        for a, b in itertools.pairwise(cuts):
            assert not read.done()
            push(engine, name, a, ids[a:b], alive[a:b])
        answer = read.result(timeout=60)
        counters = engine.counters
    assert (counters["waits"], counters["waiting"]) == (1, 0)
    kv = torch.stack([answer.tensors[layer] for layer in LAYERS])
    assert same_bits(kv, whole(setting, seed))


def test_waiting_read_of_a_greater_epoch_gets_the_new_ids(setting: Setting) -> None:
    ids, alive, _ = setting.prompt(1)
    other, other_alive, _ = setting.prompt(2)
    with setting.engine() as engine:
        state = engine.open("t", OpenRequest())
        push(engine, state.session_id, 0, other, other_alive)
        epoch = int64([state.epoch + 1])
        read = waiting(engine, state.session_id, 0, LENGTH, epoch=epoch)
        assert not read.done()
        push(engine, state.session_id, 0, ids, alive, truncate=True)
        answer = read.result(timeout=60)
    kv = torch.stack([answer.tensors[layer] for layer in LAYERS])
    assert same_bits(kv, whole(setting, 1))


def test_waiting_read_of_an_epoch_that_a_cut_ends_is_stale(setting: Setting) -> None:
    with setting.engine() as engine:
        name = opened(engine)
        read = waiting(engine, name, 0, 1)
        engine.rewind("t", name, 0)
        assert read.done(), "at once, not when its time is over"
        with pytest.raises(StepRefused) as caught:
            read.result(timeout=60)
        assert isinstance(caught.value.first, StaleEpoch)


def test_waiting_read_of_a_session_that_is_closed(setting: Setting) -> None:
    with setting.engine() as engine:
        name = opened(engine)
        read = waiting(engine, name, 0, 1)
        engine.close_session("t", name)
        assert read.done(), "at once, not when its time is over"
        with pytest.raises(StepRefused) as caught:
            read.result(timeout=60)
        assert isinstance(caught.value.first, UnknownSession)


def test_wait_that_ends_is_not_pushed(setting: Setting) -> None:
    with setting.engine() as engine:
        name = opened(engine)
        what = segments([(name, 0, 1)])
        read = engine.step("t", StepRequest(what, Output.KV, LAYERS, wait_ms=1))
        with pytest.raises(StepRefused) as caught:
            read.result(timeout=60)
        assert isinstance(caught.value.first, NotPushed)
        assert engine.counters["waiting"] == 0


def test_answer_speaks_of_the_ids_at_the_time_of_the_call(setting: Setting) -> None:
    """A read that passed its checks is not changed by a cut that follows at once."""
    ids, alive, _ = setting.prompt(3)
    expected = whole(setting, 3)
    with setting.engine() as engine:
        name = opened(engine)
        push(engine, name, 0, ids, alive, ahead=False)
        reads = [engine.step("t", StepRequest(segments([(name, 0, LENGTH)]), Output.KV, LAYERS))]
        engine.rewind("t", name, 0)
        engine.close_session("t", name)
        for read in reads:
            answer = read.result(timeout=60)
            kv = torch.stack([answer.tensors[layer] for layer in LAYERS])
            assert same_bits(kv, expected)
