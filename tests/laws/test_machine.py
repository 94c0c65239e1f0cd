"""Any history of calls: an engine against plain lists and the oracle, 10,000 steps a run.

Several tenants open, push, push again, truncate, rewind, fork, read in every output and from every
source, expire and close, in a store far too small. `MACHINE_STEPS=1000000 MACHINE_SEED=7 pytest -s
tests/laws/test_machine.py` runs longer; without MACHINE_SEED a longer run draws one and prints it.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engram_core.backends.base import Backend
from engram_core.checkpoint import open_checkpoint
from engram_core.engine import Engine
from engram_core.engine_types import (
    EPOCH_OPENED,
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepRequest,
)
from engram_core.errors import EngramError, StepRefused
from engram_core.loader import load
from tests.builders import WORDS, Shape, write_gguf
from tests.laws.truth import NUM_RESIDUALS, Truth, int64, is_dead, lookback_of, raw
from tests.oracle import DEAD
from tests.session_model import Refused, Session, Sessions

STEPS = int(os.environ.get("MACHINE_STEPS", "10000"))
IS_LONG = "MACHINE_STEPS" in os.environ
SEED = int(os.environ.get("MACHINE_SEED", secrets.randbits(32) if IS_LONG else 1))
STEPS_A_RUN = 50

LAYERS = (1, 14)
TENANTS = ("alice", "bob")
LIMITS = EngineLimits(
    max_tokens=24,
    max_sessions=5,
    max_held_tokens=32,
    session_ttl_s=60.0,
    ahead_tokens=6,
    chunk_tokens=5,
)
NUM_SLOTS = 12

small = st.integers(0, 3)
picks = st.integers(0, 15)
tenants = st.sampled_from(TENANTS)
epochs = st.sampled_from([*["present"] * 6, "left out", "past", "opened", "future"])
tokens = st.lists(st.tuples(st.integers(0, len(WORDS) - 1), st.integers(0, 6)), max_size=7)
outputs = st.sampled_from(list(Output))
some_layers = st.sampled_from([(1,), (14,), (1, 14), (14, 1)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


class Clock:
    """Idle time as the machine says; the wall clock stands still, so epochs must move alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine(RuleBasedStateMachine):
    """One engine over a shared backend, and what it must be."""

    backend: ClassVar[Backend]
    truth: ClassVar[Truth]
    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.engine = Engine(
            self.backend, LIMITS, clock=self.clock, wall_clock_us=lambda: 1_000_000
        )
        self.model = Sessions(self.truth.oracle.max_ngram_size)

    @initialize(positions=st.lists(st.integers(0, 6), min_size=2, max_size=4))
    def some_sessions(self, positions: list[int]) -> None:
        for i, position in enumerate(positions):
            self.open(TENANTS[i % 2], i // 2, position, [(i, 0), (i + 1, 6), (i + 2, 0)])

    def teardown(self) -> None:
        self.totals.update({k: int(v) for k, v in self.engine.counters.items()})
        self.engine.close()

    # ---- what is asked, and what must come of it

    def expect(self, call: Callable[[], Any], codes: set[str]) -> Any:
        """Run a call that must be refused with one of the codes, or (none) must succeed."""
        if not codes:
            return call()
        with pytest.raises(EngramError) as caught:
            call()
        error = caught.value
        code = error.first.code if isinstance(error, StepRefused) else error.code
        assert code in codes, f"{code} not in {codes}: {error}"
        self.totals[f"refused {code}"] += 1
        return None

    def named(self, pick: int) -> tuple[str, int]:
        """Tenant and id: mostly of an open session."""
        if self.model.held and pick < 15:
            return list(self.model.held)[pick % len(self.model.held)]
        return TENANTS[pick % 2], pick % 4 + 1

    def held(self) -> int:
        before = self.model.ngram - 1
        return sum(s.length - max(s.base - before, 0) for s in self.model.held.values())

    def session(self, tenant: str, session_id: int) -> Session | None:
        return self.model.held.get((tenant, session_id))

    def epoch(self, session: Session | None, kind: str) -> int:
        if session is None or kind == "left out":
            return EPOCH_OPENED
        return {
            "present": session.epoch,
            "past": session.epoch - 1,
            "opened": session.opened_epoch,
            "future": session.epoch + 2,
        }[kind]

    def touch(self, *sessions: Session) -> None:
        for session in sessions:
            session.last_used = self.clock.now

    def own(self, tenant: str, pick: int) -> int:
        """The id of a session of one tenant, mostly an open one."""
        mine = [session_id for owner, session_id in self.model.held if owner == tenant]
        return mine[pick % len(mine)] if mine and pick < 15 else pick % 4 + 1

    def check_state(self, tenant: str, session_id: int, state: Any) -> None:
        session = self.model.held[tenant, session_id]
        assert (state.length, state.base, state.epoch) == (
            session.length,
            session.base,
            session.epoch,
        )

    def ids_of(self, drawn: Sequence[tuple[int, int]]) -> tuple[Any, Any, list[int]]:
        """Token ids, mask and compressed ids; one in seven is dead, its id out of range."""
        alive = [dead != 6 for _, dead in drawn]
        ids = [t if a else -(2**40) for (t, _), a in zip(drawn, alive, strict=True)]
        compressed = self.truth.oracle.compress(ids, alive)
        return int64(ids), np.array(alive, dtype=np.bool_), compressed

    # ---- sessions

    def opened(self, tenant: str, session_id: int, state: Any, made: Session | None) -> None:
        if made is None:
            self.touch(self.model.held[tenant, session_id])
            assert not state.created
        else:
            assert state.created
            assert state.epoch > self.model.highest_epoch
            made.epoch = made.opened_epoch = state.epoch
            self.note_epoch(made)
            self.touch(made)
        self.check_state(tenant, session_id, state)

    def note_epoch(self, session: Session) -> None:
        self.model.highest_epoch = max(self.model.highest_epoch, session.epoch)

    def open_codes(self, adds: int) -> set[str]:
        codes = set()
        if len(self.model.held) >= LIMITS.max_sessions:
            codes.add("too_many_sessions")
        if self.held() + adds > LIMITS.max_held_tokens:
            codes.add("held_tokens_full")
        return codes

    @rule(tenant=tenants, session_id=small, position=st.integers(0, 9), drawn=tokens)
    def open(self, tenant: str, session_id: int, position: int, drawn: list[Any]) -> None:
        session_id += 1
        drawn = (drawn + [(5, 0)] * 3)[: min(position, 3)]
        ids, alive, compressed = self.ids_of(drawn)
        request = OpenRequest(
            session_id=session_id,
            position=position,
            lookback=tuple(int(i) if a else None for i, a in zip(ids, alive, strict=True)),
        )
        codes = set()
        if (tenant, session_id) not in self.model.held:
            codes = self.open_codes(len(compressed))
        made = None
        if not codes:
            try:
                made = self.model.open(tenant, session_id, ids=compressed, position=position)
            except Refused as refused:
                codes = refused.codes
        state = self.expect(lambda: self.engine.open(tenant, request), codes)
        if not codes:
            self.opened(tenant, session_id, state, made)

    @rule(pick=picks, session_id=small, back=st.integers(-1, 5), kind=epochs)
    def fork(self, pick: int, session_id: int, back: int, kind: str) -> None:
        session_id += 1
        tenant, source_id = self.named(pick)
        source = self.session(tenant, source_id)
        position = max(0, (source.length if source else 2) - back)
        epoch = self.epoch(source, kind)
        request = OpenRequest(
            session_id=session_id, position=position, fork_of=source_id, epoch=epoch
        )
        codes: set[str] = set()
        if (tenant, session_id) not in self.model.held and source is not None:
            adds = position - max(source.base - self.model.ngram + 1, 0)
            codes = self.open_codes(max(adds, 0))
        before = dict(self.model.held)
        made = None
        try:
            made = self.model.fork(tenant, session_id, source_id, position, epoch)
        except Refused as refused:
            codes = codes | refused.codes
        if codes:
            self.model.held = before
        state = self.expect(lambda: self.engine.open(tenant, request), codes)
        if not codes:
            if made is not None and source is not None:
                self.touch(source)
            self.opened(tenant, session_id, state, made)

    @rule(pick=picks, chance=st.integers(0, 3))
    def close(self, pick: int, chance: int) -> None:
        if chance:
            return
        name = self.named(pick)
        codes = set() if name in self.model.held else {"unknown_session"}
        self.expect(lambda: self.engine.close_session(*name), codes)
        self.model.held.pop(name, None)

    @rule(tenant=tenants, chance=st.integers(0, 9))
    def close_all_of_a_key(self, tenant: str, chance: int) -> None:
        if chance:
            return
        names = [name for name in self.model.held if name[0] == tenant]
        assert self.engine.close_tenant(tenant) == len(names)
        for name in names:
            del self.model.held[name]

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        idle = [
            name
            for name, session in self.model.held.items()
            if session.last_used < self.clock.now - LIMITS.session_ttl_s
        ]
        assert self.engine.sweep() == len(idle)
        for name in idle:
            del self.model.held[name]

    @rule(pick=picks)
    def get(self, pick: int) -> None:
        tenant, session_id = self.named(pick)
        session = self.session(tenant, session_id)
        codes = set() if session else {"unknown_session"}
        state = self.expect(lambda: self.engine.get(tenant, session_id), codes)
        if session is not None:
            self.touch(session)
            self.check_state(tenant, session_id, state)
            known = [c for c in session.ids[-3:] if c is not None]
            assert list(state.compressed_lookback) == known

    @rule(pick=picks, back=st.integers(-1, 6), kind=epochs)
    def rewind(self, pick: int, back: int, kind: str) -> None:
        tenant, session_id = self.named(pick)
        session = self.session(tenant, session_id)
        position = max(0, (session.length if session else 3) - back)
        epoch, codes = self.epoch(session, kind), {"unknown_session"}
        if session is not None:
            try:
                self.model.rewind(session, position, epoch)
                codes = set()
            except Refused as refused:
                codes = refused.codes
        result = self.expect(lambda: self.engine.rewind(tenant, session_id, position, epoch), codes)
        if session is not None and not codes:
            self.touch(session)
            self.note_epoch(session)
            self.check_state(tenant, session_id, result)

    # ---- pushes

    def push_codes(
        self, session: Session | None, position: int, ids: list[int], epoch: int, *, truncate: bool
    ) -> set[str]:
        if session is None:
            return {"unknown_session"}
        return self.model.push_refused(session, position, ids, epoch, truncate=truncate)

    def growth(
        self, session: Session, position: int, ids: list[int], epoch: int, *, truncate: bool
    ) -> int:
        if self.model.named(session, epoch) != session.epoch:
            return 0
        end = position + len(ids)
        return (end if truncate else max(end, session.length)) - session.length

    @rule(
        pick=picks,
        back=st.sampled_from([0, 0, 0, 0, -1, 1, 2, 3, 4, 6]),
        drawn=tokens,
        kind=epochs,
        truncate=st.booleans(),
        again=st.booleans(),
    )
    def push(
        self,
        pick: int,
        back: int,
        drawn: list[Any],
        kind: str,
        *,
        truncate: bool,
        again: bool,
    ) -> None:
        """Push, or push what is there already (`again`) with more behind it."""
        tenant, session_id = self.named(pick)
        session = self.session(tenant, session_id)
        position = max(0, (session.length if session else 0) - back)
        ids, alive, compressed = self.ids_of(drawn)
        if again and session is not None:
            held, mask = raw(self.truth, session.ids[position:])
            ids = np.concatenate([int64(held), ids])
            alive = np.concatenate([np.array(mask, dtype=np.bool_), alive])
            compressed = [DEAD if c is None else c for c in session.ids[position:]] + compressed
            ids, alive, compressed = ids[:24], alive[:24], compressed[:24]
        epoch = self.epoch(session, kind)
        codes = self.push_codes(session, position, compressed, epoch, truncate=truncate)
        if session is not None and not codes:
            grown = self.growth(session, position, compressed, epoch, truncate=truncate)
            if grown > 0 and self.held() + grown > LIMITS.max_held_tokens:
                codes = {"held_tokens_full"}

        def call() -> Any:
            return self.engine.push(
                tenant, session_id, position, ids, alive, epoch=epoch, truncate=truncate
            )

        result = self.expect(call, codes)
        if session is not None and not codes:
            self.model.push(session, position, compressed, epoch, truncate=truncate)
            self.touch(session)
            self.note_epoch(session)
            self.check_state(tenant, session_id, result)

    # ---- steps

    def run_step(
        self,
        tenant: str,
        segments: Segments,
        output: Output,
        layers: tuple[int, ...],
        held: list[tuple[list[int | None], int, int]],
        dtype: torch.dtype,
        *,
        truncate: bool = False,
    ) -> Any:
        """Run a step that must succeed: check what it brings against (ids, position, count)s."""
        layers = layers[:1] if output is Output.RESIDUAL else layers
        windows = [w for ids, p, n in held for w in self.truth.windows(ids, p, n)]
        dead = [d for ids, p, n in held for d in is_dead(ids[p : p + n])]
        which = [(7 * i + len(windows)) % NUM_RESIDUALS for i in range(len(windows))]
        stored = output is Output.ROWS and len(windows) % 2 == 1
        residual = None
        if output is Output.RESIDUAL:
            residual = self.truth.residual(which, dtype).contiguous()
        request = StepRequest(
            segments, output, layers, residual, stored=stored, truncate=truncate, client=tenant
        )
        answer = self.engine.step(tenant, request).result(timeout=60)
        assert answer.dead.tolist() == dead
        for layer in layers:
            if output is Output.HASH_IDS:
                self.truth.check_hash_ids(layer, windows, answer.tensors[layer])
            elif output is Output.ROWS:
                self.truth.check_rows(layer, windows, answer.tensors[layer], stored=stored)
            elif output is Output.KV:
                self.truth.check_kv(layer, windows, dead, answer.tensors[layer])
            elif output is Output.RESIDUAL:
                got = answer.tensors[layer]
                self.truth.check_residual(layer, windows, dead, which, got)
        return answer

    def refuse_step(
        self, tenant: str, segments: Segments, codes: dict[int, set[str]], *, truncate: bool = False
    ) -> None:
        """A step that must be refused whole, with exactly these segments listed."""
        request = StepRequest(segments, Output.HASH_IDS, LAYERS, truncate=truncate)
        with pytest.raises(StepRefused) as caught:
            self.engine.step(tenant, request).result(timeout=60)
        listed = {s["index"]: s["code"] for s in caught.value.segments}
        assert listed.keys() == codes.keys()
        for index, code in listed.items():
            assert code in codes[index]
            self.totals[f"refused {code}"] += 1

    @rule(
        tenant=tenants,
        wanted=st.lists(st.tuples(picks, st.integers(0, 8), st.integers(0, 6)), max_size=4),
        kind=epochs,
        output=outputs,
        layers=some_layers,
        dtype=dtypes,
    )
    def read(
        self,
        tenant: str,
        wanted: list[tuple[int, int, int]],
        kind: str,
        output: Output,
        layers: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Read up to four segments of sessions, the same one several times perhaps."""
        asked, codes, held = [], {}, []
        for index, (pick, back, count) in enumerate(wanted):
            session_id = self.own(tenant, pick)
            session = self.session(tenant, session_id)
            length = session.length if session else 2
            position = max(0, length - back)
            if session is not None and back != 8:
                count = min(count, length - position)
                position = max(position, session.base) if count else position
                count = min(count, length - position)
            epoch = self.epoch(session, kind)
            asked.append((session_id, position, count, epoch))
            refused = {"unknown_session"}
            if session is not None:
                refused = self.model.reading_refused(session, position, count, epoch)
                held.append((session.ids, position, count))
            if refused:
                codes[index] = refused
        segments = Segments(
            count=np.array([c for _, _, c, _ in asked], dtype=np.int32),
            position=int64([p for _, p, _, _ in asked]),
            session_id=int64([s for s, _, _, _ in asked]),
            epoch=int64([e for _, _, _, e in asked]),
        )
        if codes:
            self.refuse_step(tenant, segments, codes)
            return
        answer = self.run_step(tenant, segments, output, layers, held, dtype)
        sessions = [self.model.held[tenant, s] for s, _, _, _ in asked]
        assert answer.length.tolist() == [s.length for s in sessions]
        assert answer.epoch.tolist() == [s.epoch for s in sessions]
        self.touch(*sessions)

    @rule(
        tenant=tenants,
        first=picks,
        pushes=st.lists(st.tuples(st.sampled_from([0, 0, 0, -1, 1, 3]), tokens), max_size=3),
        kind=epochs,
        output=outputs,
        layers=some_layers,
        dtype=dtypes,
        truncate=st.booleans(),
    )
    def push_and_read(
        self,
        tenant: str,
        first: int,
        pushes: list[tuple[int, list[Any]]],
        kind: str,
        output: Output,
        layers: tuple[int, ...],
        dtype: torch.dtype,
        *,
        truncate: bool,
    ) -> None:
        """The runner's verb on up to three sessions: all are pushed, or none."""
        asked, codes, pushed, grown = [], {}, [], 0
        for place, (back, drawn) in enumerate(pushes):
            session_id = self.own(tenant, first + place)
            if session_id in [s for s, *_ in asked]:
                continue
            index = len(asked)
            session = self.session(tenant, session_id)
            position = max(0, (session.length if session else 0) - back)
            ids, alive, compressed = self.ids_of(drawn)
            epoch = self.epoch(session, kind)
            asked.append((session_id, position, epoch, ids, alive, compressed))
            refused = self.push_codes(session, position, compressed, epoch, truncate=truncate)
            if refused:
                codes[index] = refused
            elif session is not None:
                grown += self.growth(session, position, compressed, epoch, truncate=truncate)
                pushed.append(session)
        segments = Segments(
            count=np.array([len(c) for *_, c in asked], dtype=np.int32),
            position=int64([p for _, p, *_ in asked]),
            session_id=int64([s for s, *_ in asked]),
            epoch=int64([e for _, _, e, *_ in asked]),
            token_ids=np.concatenate([int64([]), *(i for *_, i, _, _ in asked)]),
            mask=np.concatenate([np.array([], np.bool_), *(a for *_, a, _ in asked)]),
        )
        if codes:
            self.refuse_step(tenant, segments, codes, truncate=truncate)
            return
        if grown > 0 and self.held() + grown > LIMITS.max_held_tokens:
            request = StepRequest(segments, Output.HASH_IDS, LAYERS, truncate=truncate)
            self.expect(lambda: self.engine.step(tenant, request), {"held_tokens_full"})
            return
        for session, (_, position, epoch, _, _, compressed) in zip(pushed, asked, strict=True):
            self.model.push(session, position, compressed, epoch, truncate=truncate)
            self.touch(session)
            self.note_epoch(session)
        held = [
            (session.ids, position, len(compressed))
            for session, (_, position, *_, compressed) in zip(pushed, asked, strict=True)
        ]
        answer = self.run_step(tenant, segments, output, layers, held, dtype, truncate=truncate)
        assert answer.length.tolist() == [s.length for s in pushed]
        assert answer.epoch.tolist() == [s.epoch for s in pushed]

    @precondition(lambda self: self.model.held)
    @rule(
        pick=st.integers(0, 99),
        back=st.integers(1, 8),
        output=outputs,
        layers=some_layers,
        dtype=dtypes,
        by_hash_ids=st.booleans(),
    )
    def read_without_a_session(
        self,
        pick: int,
        back: int,
        output: Output,
        layers: tuple[int, ...],
        dtype: torch.dtype,
        *,
        by_hash_ids: bool,
    ) -> None:
        """What a session holds, read by look-back or by hash_ids, under another key even."""
        session = list(self.model.held.values())[pick % len(self.model.held)]
        position = max(session.base, session.length - back)
        count = session.length - position
        held = [(session.ids, position, count)]
        if output is Output.RESIDUAL:
            layers = layers[:1]
        where = {"count": np.array([count], dtype=np.int32), "position": int64([position])}
        dead = is_dead(session.ids[position:])
        if by_hash_ids:
            windows = self.truth.windows(session.ids, position, count)
            per_layer = [self.truth.hash_ids(layer, windows).numpy() for layer in layers]
            ids = np.ascontiguousarray(np.stack(per_layer, axis=1))
            segments = Segments(**where, hash_ids=ids, mask=~np.array(dead, dtype=np.bool_))
        else:
            token_ids, alive = raw(self.truth, session.ids[position:])
            row = lookback_of(self.truth, session.ids, position)
            segments = Segments(
                **where,
                lookback=np.array([row], dtype=np.int32),
                token_ids=int64(token_ids),
                mask=np.array(alive, dtype=np.bool_),
            )
        tenant = TENANTS[pick % 2]
        answer = self.run_step(tenant, segments, output, layers, held, dtype)
        assert answer.length.tolist() == answer.epoch.tolist() == [-1]


Machine.TestCase.settings = settings(
    max_examples=max(1, STEPS // STEPS_A_RUN),
    stateful_step_count=STEPS_A_RUN,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=settings().phases,
)


def test_any_history_of_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And everything that was meant to happen did happen: each counter moved."""
    path = tmp_path_factory.mktemp("machine") / "tiny.gguf"
    shape = Shape(base=5, dim=16, head_dim=32)
    checkpoint = write_gguf(path, shape, table="Q8_0", wkv="BF16", seed=4)
    Machine.backend = load(open_checkpoint(checkpoint), num_slots=NUM_SLOTS)
    Machine.truth = Truth(checkpoint)
    if IS_LONG:
        print(f"MACHINE_STEPS={STEPS} MACHINE_SEED={SEED}")
    case = seed(SEED)(Machine.TestCase)
    try:
        case("runTest").runTest()
    finally:
        Machine.backend.close()
    totals, seen = Machine.totals, Machine.truth.seen
    if STEPS < 10_000:
        return  # too short a run to meet everything
    for counter in (
        *("kv_hits", "kv_misses", "kv_duplicates", "kv_evicted", "ahead_tokens"),
        *("sessions_opened", "sessions_closed", "sessions_expired", "rewinds"),
        *("tokens_pushed", "truncating_pushes", "positions_cut"),
        *(f"refused {code}" for code in ("conflict", "gap", "stale_epoch", "not_pushed")),
        *(f"refused {code}" for code in ("history_truncated", "unknown_session")),
        *(f"refused {code}" for code in ("session_exists", "too_many_sessions")),
        "refused held_tokens_full",
    ):
        assert totals[counter] > 0, f"{counter}: {dict(totals)}"
    # A tenth of the usual: what a history meets differs from run to run, though its seed does not.
    for output in ("hash_ids", "rows", "stored", "kv", "residual", "dead"):
        assert seen[output] > 16, dict(seen)
