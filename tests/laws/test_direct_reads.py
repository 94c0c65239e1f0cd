"""A read answered directly is the read that the general way answers: bits, state, refusals."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engram_core.backends import cpu
from engram_core.backends.base import Backend, NearRead, Run
from engram_core.checkpoint import open_checkpoint
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
from engram_core.errors import EngramError
from engram_core.loader import load
from engram_core.sessions import Segment
from tests.native.host_library import build_cpu_library
from tests.projecting import ProjectingNear, let_it_project
from tests.recording import Clock

NEAR = 4
TENANTS = ("", "other")


@pytest.fixture(scope="module")
def backend(official_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_library", lambda: library)
        made = load(open_checkpoint(official_dir), num_slots=96)
    yield made
    made.close()


LIMITS = EngineLimits(near_tokens=NEAR, ahead_tokens=0, max_sessions=32, max_held_tokens=8192)


def attached(
    backend: Backend,
    clock: Clock | None = None,
    limits: EngineLimits = LIMITS,
    wall_us: Iterator[int] | None = None,
) -> Attached:
    wall = wall_us or iter(range(10**9))
    engine = Engine(backend, limits, clock=clock or Clock(), wall_clock_us=lambda: next(wall))
    turn: list[Callable[[], None]] = []
    engine.attach(turn.append)
    return Attached(engine, turn)


class Attached(NamedTuple):
    """An engine that belongs to this thread. turn: what is to be called at the end of its turn"""

    engine: Engine
    turn: list[Callable[[], None]]


class Reads:
    """Both ways to read one thing. num_direct: how often the direct one answered"""

    def __init__(self, attached: Attached, *, can_project: bool = False) -> None:
        self.engine, self._turn = attached
        self.num_direct = 0
        self._can_project = can_project

    def residual(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        sizes = self.engine.geometry
        generator = torch.Generator().manual_seed(count)
        return torch.randn((count, sizes.hc_mult, sizes.dim), generator=generator).to(dtype)

    def direct(
        self,
        tenant: str,
        ask: tuple[int, ...],
        residual: torch.Tensor,
        token_ids: list[int] | None = None,
    ) -> Answer | None:
        session_id, position, epoch, layer = ask
        segments = [(session_id, position, len(residual), epoch)]
        return self.engine.answer([asked(tenant, segments, layer, residual, token_ids)])[0]

    def request(
        self,
        ask: tuple[int, ...],
        residual: torch.Tensor,
        token_ids: NDArray[np.int64] | None = None,
    ) -> StepRequest:
        session_id, position, epoch, layer = ask
        segments = Segments(
            np.array([len(residual)], np.int32), np.array([position]),
            np.array([session_id]), np.array([epoch]), token_ids=token_ids,
        )  # fmt: skip
        layers = (self.engine.geometry.layer_ids[layer],)
        return StepRequest(segments, Output.RESIDUAL, layers, residual=residual)

    def end_turn(self) -> None:
        while self._turn:
            self._turn.pop()()

    def general(
        self,
        tenant: str,
        ask: tuple[int, ...],
        residual: torch.Tensor,
        token_ids: NDArray[np.int64] | None = None,
    ) -> StepAnswer:
        answer = self.engine.step(tenant, self.request(ask, residual, token_ids))
        self.end_turn()
        return answer.result(10)

    def compare(self, tenant: str, ask: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
        """Direct, then in general, then directly again, when the store holds what is read."""
        before = self.residual(count, dtype)
        first, second, third = before.clone(), before.clone(), before.clone()
        answer = self.direct(tenant, ask, first)
        try:
            expected = self.general(tenant, ask, second)
        except EngramError:
            assert answer is None
            assert self.direct(tenant, ask, third) is None
            assert same_bits(first, before)
            return
        assert same_bits(first, second if answer is not None else before)
        if self._can_project:
            assert (answer is not None) == (0 < count <= NEAR)
        again = self.direct(tenant, ask, third)
        assert (again is not None) == (0 < count <= NEAR)
        for got in (answer, again):
            if got is not None:
                self.num_direct += 1
                state = expected.length[0], expected.base[0], expected.epoch[0]
                assert state_in(got) == state
        if again is not None:
            assert same_bits(third, second)


def asked(
    tenant: str,
    segments: list[Segment],
    layer: int,
    residual: torch.Tensor,
    token_ids: list[int] | None = None,
) -> Ask:
    is_f32 = residual.dtype == torch.float32
    return Ask(tenant, segments, token_ids, layer, residual.data_ptr(), is_f32)


def state_in(answer: Answer) -> tuple[int, int, int]:
    (spot,) = answer.sessions
    return spot.length, spot.base, spot.epoch


def columns_in(answer: Answer) -> tuple[list[int], list[int]]:
    return [spot.length for spot in answer.sessions], [spot.epoch for spot in answer.sessions]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def projecting(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> ProjectingNear:
    """The backend as a GPU is: kv that is missing is made by the asking thread."""
    monkeypatch.setattr(backend, "near_batches", None)
    monkeypatch.setattr(backend, "near_reads", backend.near_reads)
    return let_it_project(backend)


@pytest.mark.parametrize("seed", range(4))
def test_any_read_where_what_is_missing_is_made_here(
    backend: Backend, projecting: ProjectingNear, seed: int
) -> None:
    any_program(Reads(attached(backend), can_project=True), seed)
    assert len(projecting.begun) > 10


@pytest.mark.parametrize("seed", range(8))
def test_any_read_after_any_program(backend: Backend, seed: int) -> None:
    any_program(Reads(attached(backend)), seed)


def any_program(reads: Reads, seed: int) -> None:
    rng = random.Random(seed)
    engine = reads.engine
    sessions: list[tuple[str, int]] = []
    with engine:
        for _ in range(1000):
            kind = rng.choice(["open", "push", "push", "cut", "fork", "close", *["read"] * 12])
            tenant = rng.choice(TENANTS)
            if not sessions or (kind == "open" and len(sessions) < 6):
                start = rng.choice([0, 0, 2, 300])
                before = tuple(rng.choice([None, 0, 1, 2]) for _ in range(min(start, 3)))
                opening = OpenRequest(position=start, lookback=before)
                sessions.append((tenant, engine.open(tenant, opening).session_id))
                continue
            owner, session_id = rng.choice(sessions)
            if kind != "read":
                change(engine, rng, kind, (owner, session_id), sessions)
                continue
            who = rng.choice([owner, owner, owner, tenant])
            ask, count = any_read(engine, rng, owner, session_id)
            reads.compare(who, ask, count, rng.choice([torch.bfloat16, torch.float32]))
        assert not engine._scheduler.store._pins.any()
    assert reads.num_direct > 50


def any_read(
    engine: Engine, rng: random.Random, owner: str, session_id: int
) -> tuple[tuple[int, ...], int]:
    """Around a session's ends, under its epoch and others: what to ask, and how many positions."""
    try:
        state = engine.get(owner, session_id)
        length, base, epoch = state.length, state.base, state.epoch
    except EngramError:
        length, base, epoch = 4, 0, 1
    position = max(0, rng.choice([base, length, length]) - rng.randrange(-1, 7))
    epoch = rng.choice([EPOCH_OPENED, EPOCH_OPENED, epoch, epoch, epoch - 1, epoch + 1])
    return (session_id, position, epoch, rng.randrange(2)), rng.randrange(NEAR + 2)


def change(
    engine: Engine,
    rng: random.Random,
    kind: str,
    name: tuple[str, int],
    sessions: list[tuple[str, int]],
) -> None:
    """Do something to a session, whatever comes of it."""
    owner, session_id = name
    try:
        length = engine.get(owner, session_id).length
        if kind == "push":
            count = rng.randint(1, 8)
            ids = np.array([rng.randrange(3) for _ in range(count)])
            mask = np.array([rng.random() < 0.8 for _ in range(count)])
            truncate = rng.random() < 0.3
            place = length - rng.randrange(4) if truncate else length
            engine.push(owner, session_id, place, ids, mask, truncate=truncate)
        elif kind == "cut":
            engine.rewind(owner, session_id, length - rng.randrange(5))
        elif kind == "fork" and len(sessions) < 8:
            sessions.append((owner, engine.open(owner, OpenRequest(fork_of=session_id)).session_id))
        elif kind == "close" and len(sessions) > 4:
            engine.close_session(owner, session_id)
            if rng.random() < 0.9:
                sessions.remove(name)
    except EngramError:
        pass


@pytest.fixture
def held(backend: Backend) -> Iterator[tuple[Reads, int, Clock]]:
    """A session of eight tokens whose kv of layer 0 is in the store."""
    clock = Clock()
    reads = Reads(attached(backend, clock))
    with reads.engine as engine:
        session_id = engine.open("", OpenRequest()).session_id
        engine.push("", session_id, 0, np.arange(8) % 3)
        ask = session_id, 0, EPOCH_OPENED, 0
        reads.general("", ask, reads.residual(8, torch.bfloat16))
        yield reads, session_id, clock


def test_it_answers_and_counts(held: tuple[Reads, int, Clock]) -> None:
    reads, session_id, _ = held
    before = reads.engine.counters
    reads.compare("", (session_id, 3, EPOCH_OPENED, 0), 2, torch.bfloat16)
    after = reads.engine.counters
    assert reads.num_direct == 2
    assert after["near_batches"] - before["near_batches"] == 3
    assert after["kv_hits"] - before["kv_hits"] == 6
    assert after["kv_misses"] == before["kv_misses"]


def test_it_renews_the_session(held: tuple[Reads, int, Clock]) -> None:
    reads, session_id, clock = held
    ask = session_id, 3, EPOCH_OPENED, 0
    for _ in range(4):
        clock.now_s += 400.0
        assert reads.direct("", ask, reads.residual(1, torch.bfloat16)) is not None
        assert reads.engine.sweep() == 0
    clock.now_s += 601.0
    assert reads.engine.sweep() == 1


def test_a_refused_read_does_not(held: tuple[Reads, int, Clock]) -> None:
    reads, session_id, clock = held
    clock.now_s += 400.0
    assert (
        reads.direct("", (session_id, 8, EPOCH_OPENED, 0), reads.residual(1, torch.bfloat16))
        is None
    )
    clock.now_s += 201.0
    assert reads.engine.sweep() == 1


def test_another_thread_and_a_closed_engine_get_none(held: tuple[Reads, int, Clock]) -> None:
    reads, session_id, _ = held
    ask, answers = (session_id, 3, EPOCH_OPENED, 0), []

    def ask_there() -> None:
        answers.append(reads.direct("", ask, reads.residual(1, torch.bfloat16)))

    thread = threading.Thread(target=ask_there)
    thread.start()
    thread.join()
    reads.engine.close()
    ask_there()
    assert answers == [None, None]


def test_it_finds_only_what_is_filled(held: tuple[Reads, int, Clock]) -> None:
    reads, session_id, _ = held
    store = reads.engine._scheduler.store
    store._filled[:] = False
    residual = reads.residual(1, torch.bfloat16)
    assert reads.direct("", (session_id, 3, EPOCH_OPENED, 0), residual) is None


class Held:
    """A near read of the backend's that would have to wait, or fails."""

    def __init__(self, of: NearRead, error: Exception | None) -> None:
        self._of, self._error, self.can_project = of, error, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def project(self, slots: list[int], tokens: list[int]) -> bool:
        return False

    def wait(self) -> None:
        return

    def gate(self, slots: list[int], runs: list[Run]) -> bool:
        if self._error is not None:
            raise self._error
        return False


@pytest.mark.parametrize("error", [None, RuntimeError("the device has failed")])
def test_a_gate_that_cannot_run_here_is_left_to_the_lane_and_one_that_fails_ends_all(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    reads = Reads(attached(backend))
    with reads.engine as engine:
        ask = (engine.open("", OpenRequest()).session_id, 0, EPOCH_OPENED, 0)
        engine.push("", ask[0], 0, np.arange(3))
        before = reads.residual(1, torch.bfloat16)
        expected = reads.general("", ask, before.clone()).tensors
        held = [Held(read, error) for read in backend.near_reads]
        monkeypatch.setattr(backend, "near_reads", held)
        residual = before.clone()
        if error is None:
            assert reads.direct("", ask, residual) is None
            answer = reads.general("", ask, residual)
            assert same_bits(*answer.tensors.values(), *expected.values())
            assert engine.failure is None
        else:
            assert reads.direct("", ask, residual) is None
            assert "the device has failed" in str(engine.failure)
            assert reads.direct("", ask, residual) is None
        assert same_bits(residual, before) or error is None


class Twins:
    """Two engines over one table: one pushes and reads directly where it can, one in general."""

    def __init__(self, direct: Reads, general: Reads) -> None:
        self.direct, self.general = direct, general
        self.num_direct = 0

    def push(self, tenant: str, ask: tuple[int, ...], ids: list[int], rng: random.Random) -> None:
        """Push ids and read them: the same bits, state and refusals."""
        session_id = ask[0]
        before = self.direct.residual(len(ids), rng.choice([torch.bfloat16, torch.float32]))
        one, other = before.clone(), before.clone()
        held = state_of(self.direct.engine, tenant, session_id)
        answer = self.direct.direct(tenant, ask, one, ids)
        if answer is None:  # nothing was changed: the general way does it
            assert same_bits(one, before)
            assert state_of(self.direct.engine, tenant, session_id) == held
            first = outcome(self.direct, tenant, ask, one, ids)
        else:
            self.num_direct += 1
            first = *state_in(answer), answer.dead
        assert first == outcome(self.general, tenant, ask, other, ids)
        assert same_bits(one, other)
        assert state_of(self.direct.engine, tenant, session_id) == state_of(
            self.general.engine, tenant, session_id
        )


def outcome(
    reads: Reads, tenant: str, ask: tuple[int, ...], residual: torch.Tensor, ids: list[int]
) -> object:
    try:
        answer = reads.general(tenant, ask, residual, token_ids=np.array(ids, np.int64))
    except EngramError as error:
        return error.code, error.message
    state = answer.length[0], answer.base[0], answer.epoch[0]
    return *state, answer.dead.tobytes()


def state_of(engine: Engine, tenant: str, session_id: int) -> object:
    try:
        state = engine.get(tenant, session_id)
    except EngramError as error:
        return error.code
    held = engine.counters
    return (
        state.length, state.base, state.epoch, state.compressed_lookback,
        held["held_tokens"], held["tokens_pushed"],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_any_push_and_read_after_any_program(
    backend: Backend, projecting: ProjectingNear, official_dir: Path, seed: int
) -> None:
    rng = random.Random(seed)
    plain = load(open_checkpoint(official_dir), num_slots=96)
    clock = Clock()
    limits = replace(LIMITS, max_held_tokens=1500)
    direct = Reads(attached(backend, clock, limits))
    general = Reads(attached(plain, clock, replace(limits, near_tokens=0)))
    twins = Twins(direct, general)
    sessions: list[tuple[str, int]] = []
    with direct.engine, general.engine:
        for _ in range(600):
            tenant = rng.choice(TENANTS)
            kind = rng.choice(["open", "change", "change", *["push"] * 8])
            if not sessions or (kind == "open" and len(sessions) < 6):
                start = rng.choice([0, 0, 2, 250])
                before = tuple(rng.choice([None, 0, 1, 2]) for _ in range(min(start, 3)))
                opening = OpenRequest(len(sessions) + 1 + 10 * seed, start, before)
                for engine in (direct.engine, general.engine):
                    engine.open(tenant, opening)
                sessions.append((tenant, opening.session_id or 0))
                continue
            owner, session_id = rng.choice(sessions)
            if kind == "change":
                state = rng.getstate()
                for engine in (direct.engine, general.engine):
                    rng.setstate(state)
                    what = rng.choice(["push", "push", "cut"])
                    change(engine, rng, what, (owner, session_id), [])
                continue
            who = rng.choice([owner, owner, owner, owner, tenant])
            ask, _ = any_read(direct.engine, rng, owner, session_id)
            if rng.random() < 0.7:
                ask = session_id, direct.engine.get(owner, session_id).length, *ask[2:]
            projecting.is_busy = rng.random() < 0.1
            ids = [
                rng.randrange(-1 if rng.random() < 0.05 else 0, 12)
                for _ in range(rng.randint(1, 5))
            ]
            twins.push(who, ask, ids, rng)
            projecting.is_busy = False
        assert not direct.engine._scheduler.store._pins.any()
    assert twins.num_direct > 40
    plain.close()


def test_an_append_made_directly_answers_who_waits_for_it(
    backend: Backend, projecting: ProjectingNear
) -> None:
    reads = Reads(attached(backend))
    with reads.engine as engine:
        session_id = engine.open("", OpenRequest()).session_id
        engine.push("", session_id, 0, np.arange(3))
        waiting = reads.request((session_id, 3, EPOCH_OPENED, 1), reads.residual(1, torch.bfloat16))
        answer = engine.step("", replace(waiting, wait_ms=1000))
        assert engine.counters["waiting"] == 1
        residual = reads.residual(1, torch.bfloat16)
        assert reads.direct("", (session_id, 3, EPOCH_OPENED, 0), residual, [5]) is not None
        reads.end_turn()
        assert answer.result(10).length[0] == 4


def test_a_direct_append_keeps_to_the_room_for_ids(
    backend: Backend, projecting: ProjectingNear
) -> None:
    reads = Reads(attached(backend, limits=replace(LIMITS, max_held_tokens=5)))
    with reads.engine as engine:
        session_id = engine.open("", OpenRequest()).session_id
        engine.push("", session_id, 0, np.arange(3))
        for count, fits in ((3, False), (2, True)):
            residual = reads.residual(count, torch.bfloat16)
            ask = session_id, 3, EPOCH_OPENED, 0
            assert (reads.direct("", ask, residual, [5] * count) is not None) == fits
        assert engine.counters["held_tokens"] == engine.get("", session_id).length == 5


def any_segments(
    engine: Engine, rng: random.Random, owner: str, names: list[int], *, distinct: bool
) -> list[tuple[int, int, int, int]]:
    """Of two to four segments, mostly at the ends of sessions."""
    size = rng.randint(2, 4)
    chosen = rng.sample(names, min(size, len(names))) if distinct else rng.choices(names, k=size)
    segments = []
    for session_id in chosen:
        (_, position, epoch, _), count = any_read(engine, rng, owner, session_id)
        if rng.random() < 0.85:
            state, count = engine.get(owner, session_id), rng.randint(1, 2)
            epoch = state.epoch
            position = state.length if distinct else max(state.base, state.length - count)
        segments.append((session_id, position, max(count, 0), epoch))
    return segments


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pushes", [False, True])
def test_a_few_segments_after_any_program(
    backend: Backend, projecting: ProjectingNear, official_dir: Path, seed: int, pushes: bool
) -> None:
    """Directly they give the bits, states and refusals of the general way, or change nothing."""
    rng = random.Random(100 * seed + pushes)
    plain = load(open_checkpoint(official_dir), num_slots=96)
    clock = Clock()
    limits = replace(LIMITS, near_tokens=8, max_held_tokens=1500)
    direct = Reads(attached(backend, clock, limits))
    general = Reads(attached(plain, clock, replace(limits, near_tokens=0)))
    num_direct, names = 0, list(range(1, 6))
    with direct.engine, general.engine:
        engines = direct.engine, general.engine
        for session_id in names:
            for engine in engines:
                engine.open(
                    "",
                    OpenRequest(
                        session_id, (session_id * 63) % 256, (None,) * min(3, session_id * 63)
                    ),
                )
        for _ in range(300):
            session_id = rng.choice(names)
            state = direct.engine.get("", session_id)
            new, cut = rng.choices(range(3), k=rng.randint(1, 5)), rng.randrange(4)
            mask = np.array([rng.random() < 0.8 for _ in new])
            for engine in engines:
                if cut == 3:
                    place = max(state.base, state.length - len(new))
                    engine.rewind("", session_id, place, state.epoch)
                elif state.length < 280:
                    where = "", session_id, state.length
                    engine.push(*where, np.array(new), mask, epoch=state.epoch)
            segments = any_segments(
                direct.engine, rng, "", names, distinct=pushes and rng.random() < 0.9
            )
            total, layer = sum(count for _, _, count, _ in segments), rng.randrange(2)
            ids = [rng.randrange(12) for _ in range(total)] if pushes else None
            before = direct.residual(total, rng.choice([torch.bfloat16, torch.float32]))
            one, other = before.clone(), before.clone()
            projecting.is_busy = rng.random() < 0.1
            held = [state_of(direct.engine, "", name) for name in names]
            (answer,) = direct.engine.answer([asked("", segments, layer, one, ids)])
            if answer is None:
                assert same_bits(one, before)
                assert [state_of(direct.engine, "", name) for name in names] == held
                first = outcome_of(direct, segments, layer, one, ids)
            else:
                num_direct += 1
                first = *columns_in(answer), answer.dead
            projecting.is_busy = False
            assert first == outcome_of(general, segments, layer, other, ids)
            assert same_bits(one, other)
            assert [state_of(direct.engine, "", name) for name in names] == [
                state_of(general.engine, "", name) for name in names
            ]
        assert not direct.engine._scheduler.store._pins.any()
    assert num_direct > 60
    plain.close()


def outcome_of(
    reads: Reads,
    segments: list[tuple[int, int, int, int]],
    layer: int,
    residual: torch.Tensor,
    ids: list[int] | None,
    tenant: str = "",
) -> object:
    session_id, position, count, epoch = (
        np.array(column) for column in zip(*segments, strict=True)
    )
    asked = Segments(
        count.astype(np.int32), position, session_id, epoch,
        token_ids=None if ids is None else np.array(ids, np.int64),
    )  # fmt: skip
    layers = (reads.engine.geometry.layer_ids[layer],)
    try:
        answer = reads.engine.step(
            tenant, StepRequest(asked, Output.RESIDUAL, layers, residual=residual)
        )
        reads.end_turn()
        told = answer.result(10)
    except EngramError as error:
        return error.code, error.message
    return told.length.tolist(), told.epoch.tolist(), told.dead.tobytes()


def test_a_few_segments_that_are_refused_renew_nothing(
    backend: Backend, projecting: ProjectingNear
) -> None:
    for position, num_expired in ((3, 2), (2, 0)):
        clock = Clock()
        reads = Reads(attached(backend, clock, replace(LIMITS, session_ttl_s=10)))
        with reads.engine as engine:
            first, second = (engine.open("", OpenRequest()).session_id for _ in range(2))
            for session_id in (first, second):
                engine.push("", session_id, 0, np.arange(3))
            clock.now_s += 6
            residual = reads.residual(2, torch.bfloat16)
            segments = [(first, 2, 1, EPOCH_OPENED), (second, position, 1, EPOCH_OPENED)]
            (answer,) = engine.answer([asked("", segments, 0, residual)])
            assert (answer is None) == (num_expired == 2)
            clock.now_s += 6
            assert engine.sweep() == num_expired


@pytest.mark.parametrize("seed", range(6))
def test_a_few_pushes_after_any_program(backend: Backend, official_dir: Path, seed: int) -> None:
    """Directly they give the states, answers and refusals of the general way."""
    rng = random.Random(300 + seed)
    plain = load(open_checkpoint(official_dir), num_slots=96)
    clock = Clock()
    limits = replace(LIMITS, max_held_tokens=1500, ahead_tokens=16)
    direct = Reads(attached(backend, clock, limits))
    general = Reads(attached(plain, clock, replace(limits, near_tokens=0)))
    num_direct, names = 0, list(range(1, 6))
    with direct.engine, general.engine:
        engines = direct.engine, general.engine
        for session_id in names:
            start = session_id * 63 % 256
            opening = OpenRequest(session_id, start, (None,) * min(3, start))
            for engine in engines:
                engine.open("", opening)
        for _ in range(400):
            for session_id in names:
                state = direct.engine.get("", session_id)
                if rng.random() < 0.05 or state.length > 280:
                    for engine in engines:
                        engine.rewind("", session_id, state.base, state.epoch)
            segments = any_segments(direct.engine, rng, "", names, distinct=rng.random() < 0.9)
            total = sum(count for _, _, count, _ in segments)
            ids = [rng.randrange(12) for _ in range(total)]
            held = [state_of(direct.engine, "", name) for name in names]
            ahead = (0, 1) if rng.random() < 0.5 else ()
            (answer,) = direct.engine.answer([Ask("", segments, ids, ahead=ahead)])
            if answer is None:
                assert [state_of(direct.engine, "", name) for name in names] == held
                first = pushed(direct, segments, ids)
            else:
                num_direct += 1
                first = *columns_in(answer), answer.dead
            assert first == pushed(general, segments, ids)
            assert [state_of(direct.engine, "", name) for name in names] == [
                state_of(general.engine, "", name) for name in names
            ]
        direct.end_turn()
        assert direct.engine.drain(10)
        assert direct.engine.counters["ahead_tokens"] > 0
    assert num_direct > 100
    plain.close()


def pushed(
    reads: Reads, segments: list[tuple[int, int, int, int]], ids: list[int], tenant: str = ""
) -> object:
    columns = (np.array(column) for column in zip(*segments, strict=True))
    session_id, position, count, epoch = columns
    asked = Segments(
        count.astype(np.int32), position, session_id, epoch, token_ids=np.array(ids, np.int64)
    )
    try:
        request = StepRequest(asked, Output.NONE, reads.engine.geometry.layer_ids, ahead=False)
        told = reads.engine.step(tenant, request).result(10)
    except EngramError as error:
        return error.code, error.message
    return told.length.tolist(), told.epoch.tolist(), told.dead.tobytes()


def test_what_is_appended_directly_is_worked_ahead(
    backend: Backend, projecting: ProjectingNear
) -> None:
    reads = Reads(attached(backend, limits=replace(LIMITS, ahead_tokens=16)))
    with reads.engine as engine:
        sessions = [engine.open("", OpenRequest()).session_id for _ in range(2)]
        for session_id in sessions:
            engine.push("", session_id, 0, np.arange(3), ahead=False)
        segments = [(session_id, 3, 2, EPOCH_OPENED) for session_id in sessions]
        before = engine.counters["kv_misses"]
        assert engine.answer([Ask("", segments, [5, 6, 7, 8], ahead=(0, 1))])[0] is not None
        reads.end_turn()
        assert engine.drain(10)
        misses = engine.counters["kv_misses"]
        assert misses > before
        residual = reads.residual(4, torch.bfloat16)
        assert engine.answer([asked("", segments, 1, residual)])[0] is not None
        assert engine.counters["kv_misses"] == misses


class Asked:
    """One ask of a turn; the general way has a residual of its own."""

    def __init__(self, ask: Ask, one: torch.Tensor, other: torch.Tensor) -> None:
        self.ask, self.one, self.other = ask, one, other
        self.before = one.clone()

    @property
    def order(self) -> tuple[int, bool]:
        return self.ask.layer_index, self.ask.token_ids is not None

    def in_general(self, reads: Reads, residual: torch.Tensor) -> object:
        ask = self.ask
        if ask.layer_index < 0:
            assert ask.token_ids is not None
            return pushed(reads, ask.segments, ask.token_ids, ask.tenant)
        return outcome_of(reads, ask.segments, ask.layer_index, residual, ask.token_ids, ask.tenant)


def any_turn(reads: Reads, rng: random.Random, names: dict[str, list[int]]) -> list[Asked]:
    """One to six asks, of any layer, dtype and tenant; some of one session; some residuals lie one
    behind the other."""
    block = torch.randn((64, 2, 64), generator=torch.Generator().manual_seed(rng.randrange(99)))
    blocks = {dtype: block.to(dtype) for dtype in (torch.bfloat16, torch.float32)}
    found, at = [], 0
    for _ in range(rng.randint(1, 6)):
        tenant = rng.choice(TENANTS)
        pushes = rng.random() < 0.6
        segments = any_segments(reads.engine, rng, tenant, names[tenant], distinct=pushes)
        segments = segments[: rng.randint(1, 3)]
        total = sum(segment[2] for segment in segments)
        ids = [rng.randrange(-1 if rng.random() < 0.03 else 0, 12) for _ in range(total)]
        layer = rng.randrange(-1 if pushes else 0, 2)
        dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
        end = at + total
        if rng.random() < 0.3:
            at, end = at + 1, end + 1
        one = blocks[dtype][at:end]
        at = end
        is_f32 = dtype == torch.float32
        address = one.data_ptr() if layer >= 0 else 0
        ask = Ask(tenant, segments, ids if pushes else None, layer, address, is_f32)
        found.append(Asked(ask, one, one.clone()))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_what_is_asked_in_one_turn_is_answered_as_one_after_the_other(
    backend: Backend, projecting: ProjectingNear, official_dir: Path, seed: int
) -> None:
    rng = random.Random(500 + seed)
    plain = load(open_checkpoint(official_dir), num_slots=96)
    clock = Clock()
    limits = replace(LIMITS, near_tokens=8, max_held_tokens=2500)
    direct = Reads(attached(backend, clock, limits))
    general = Reads(attached(plain, clock, replace(limits, near_tokens=0)))
    names = {tenant: list(range(1, 5)) for tenant in TENANTS}
    num_together = num_refused = num_left = 0
    with direct.engine, general.engine:
        engines = direct.engine, general.engine

        def states(engine: Engine) -> list[object]:
            return [state_of(engine, who, name) for who in TENANTS for name in names[who]]

        for tenant in TENANTS:
            for name in names[tenant]:
                start = name * 63 % 256
                for engine in engines:
                    engine.open(tenant, OpenRequest(name, start, (None,) * min(3, start)))
        for _ in range(150):
            for tenant in TENANTS:
                for name in names[tenant]:
                    state = direct.engine.get(tenant, name)
                    if rng.random() < 0.05 or state.length > 280:
                        for engine in engines:
                            engine.rewind(tenant, name, state.base, state.epoch)
            turn = any_turn(direct, rng, names)
            projecting.is_busy = rng.random() < 0.1
            batches = direct.engine.counters["near_batches"]
            answers = direct.engine.answer([each.ask for each in turn])
            projecting.is_busy = False
            answered = [answer for answer in answers if answer is not None]
            batches = direct.engine.counters["near_batches"] - batches
            num_together += batches < sum(
                answer is not None and each.ask.layer_index >= 0
                for each, answer in zip(turn, answers, strict=True)
            )
            # Pushes alone first, then layer by layer, reads before pushes: any order would do.
            order = sorted(range(len(turn)), key=lambda place: turn[place].order)
            for place in [i for i in order if answers[i] is not None]:
                answer, each = answers[place], turn[place]
                assert answer is not None
                told = *columns_in(answer), answer.dead
                assert told == each.in_general(general, each.other)
                assert same_bits(each.one, each.other)
            assert states(direct.engine) == states(general.engine)
            for place in [i for i in range(len(turn)) if answers[i] is None]:
                each = turn[place]
                assert same_bits(each.one, each.before)  # nothing was done
                first = each.in_general(direct, each.one)
                assert first == each.in_general(general, each.other)
                assert same_bits(each.one, each.other)
                num_refused += isinstance(first, tuple) and isinstance(first[0], str)
                num_left += bool(answered)
            assert states(direct.engine) == states(general.engine)
        assert not direct.engine._scheduler.store._pins.any()
    assert num_together > 15
    assert num_refused > 20
    assert num_left > 20
    plain.close()


def turn_of(
    reads: Reads, sessions: list[int], ids: list[list[int]]
) -> tuple[list[Ask], torch.Tensor]:
    """Pushes of one id or more each behind three, their residuals one behind the other."""
    block = reads.residual(sum(map(len, ids)), torch.bfloat16)
    asks, at = [], 0
    for session_id, own in zip(sessions, ids, strict=True):
        segments = [(session_id, 3, len(own), EPOCH_OPENED)]
        asks.append(asked("", segments, 0, block[at : at + len(own)], own))
        at += len(own)
    return asks, block


def opened_at_three(reads: Reads, count: int) -> list[int]:
    sessions = [reads.engine.open("", OpenRequest()).session_id for _ in range(count)]
    for session_id in sessions:
        reads.engine.push("", session_id, 0, np.arange(3), ahead=False)
    return sessions


def test_asks_of_one_turn_are_one_projection_and_one_gate(
    backend: Backend, projecting: ProjectingNear
) -> None:
    reads = Reads(attached(backend))
    with reads.engine as engine:
        asks, block = turn_of(reads, opened_at_three(reads, 3), [[5], [6, 7], [5]])
        before, projecting.begun[:] = engine.counters, []
        answers = engine.answer(asks)
        after = engine.counters
        assert [answer and answer.sessions[0].length for answer in answers] == [4, 5, 4]
        assert [len(slots) for slots in projecting.begun] == [3]  # two of the four are alike
        assert after["near_batches"] == before["near_batches"] + 1
        assert after["near_batch_tokens"] == before["near_batch_tokens"] + 4
        assert after["tokens_pushed"] == before["tokens_pushed"] + 4
        shares = {answer.gate_s for answer in answers if answer is not None}
        assert len(shares) == 1
        assert not same_bits(block, reads.residual(4, torch.bfloat16))


def test_the_second_push_to_a_session_in_one_turn_is_left_to_the_general_way(
    backend: Backend, projecting: ProjectingNear
) -> None:
    reads = Reads(attached(backend))
    with reads.engine as engine:
        (session_id,) = opened_at_three(reads, 1)
        asks, _ = turn_of(reads, [session_id] * 2, [[5], [6]])
        one, other = engine.answer(asks)
        assert one is not None
        assert other is None
        state = engine.get("", session_id)
        assert state.length == 4
        assert state.compressed_lookback[-1] == engine.hash_tables.token_map[5]


def test_a_turn_keeps_to_the_room_for_ids(backend: Backend, projecting: ProjectingNear) -> None:
    reads = Reads(attached(backend, limits=replace(LIMITS, max_held_tokens=12)))
    with reads.engine as engine:
        asks, _ = turn_of(reads, opened_at_three(reads, 3), [[5, 5], [6, 6], [7]])
        answers = engine.answer(asks)
        assert [answer is not None for answer in answers] == [True, False, True]
        assert engine.counters["held_tokens"] == 12


@pytest.mark.parametrize("num_slots", [None, 2])
def test_what_cannot_be_made_together_is_made_in_parts(
    backend: Backend, projecting: ProjectingNear, num_slots: int | None
) -> None:
    """A batch that finds no slots is tried again by halves."""
    reads = Reads(attached(backend))
    with reads.engine as engine:
        store = engine._scheduler.store
        _, ids = np.unique(engine.hash_tables.token_map, return_index=True)
        asks, _ = turn_of(reads, opened_at_three(reads, 3), [[int(i)] for i in ids[:3]])
        held = store.lend(96 - num_slots) if num_slots else np.empty(0, np.int64)
        answers = engine.answer(asks)
        store.give_back(held)
        assert all(answer is not None for answer in answers)
        assert [len(slots) for slots in projecting.begun] == ([1, 2] if num_slots else [3])


def test_a_device_that_fails_in_a_turn_has_appended_nothing(
    backend: Backend, projecting: ProjectingNear, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(attached(backend))
    with reads.engine as engine:
        sessions = opened_at_three(reads, 3)
        asks, _ = turn_of(reads, sessions, [[5], [6], [7]])
        error = RuntimeError("the device has failed")
        failing = [Held(read, error) for read in backend.near_reads]
        for read in failing:
            read.can_project, read.project = True, lambda *_: True  # type: ignore[method-assign]
        monkeypatch.setattr(backend, "near_reads", failing)
        asks[2] = asks[2]._replace(layer_index=-1, residual=0)  # only a push: it needs no device
        answers = engine.answer(asks)
        assert [answer is not None for answer in answers] == [False, False, True]
        assert engine.failure is not None
        lengths = engine._pool._fence[0, [engine._pool._registry.row("", s) for s in sessions]]
        assert lengths.tolist() == [3, 3, 4]
