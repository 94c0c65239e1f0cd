"""The fence under a network that duplicates, delays, reorders and loses messages and answers.

A client keeps its own copy of what its session should hold and never has two calls under way.
After a call of unknown outcome it repeats the call unchanged, or abandons it: it rewinds with its
epoch to where the abandoned call began, or below. (Not above: a stale rewind to the present length
is answered without a look at the ids, and an abandoned truncating push may have made that length.)

Whenever nothing of the client is under way, the session must hold exactly the client's copy at the
client's epoch, whatever old messages still arrive. No call may be refused but as stale after an
abandoned one. Weaker rules are simulated too: each of them must lose something, or the simulation
could not see it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from engram_core import fence as rules
from engram_core import sessions
from engram_core.backends.cpu import NearKeys
from engram_core.engine_types import EPOCH_OPENED, EngineLimits
from engram_core.errors import EngramError, StepRefused
from engram_core.fence import Asked, Fence, Judgement
from engram_core.registry import Opening
from engram_core.sessions import SessionPool
from tests.native.host_library import build_cpu_library
from tests.recording import TOY

SEEDS = int(os.environ.get("FENCE_SEEDS", "1500"))
CALLS = 14
"""Calls a client makes in one simulation."""


class ViolationError(Exception):
    """Something was lost, doubled or wrongly refused."""


@dataclass(frozen=True, eq=False)
class Call:
    """One message. copy: what a read expects (the client's ids when it was sent)."""

    kind: str
    position: int = 0
    ids: tuple[int, ...] = ()
    epoch: int = EPOCH_OPENED
    truncate: bool = False
    count: int = 0
    copy: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    length: int
    epoch: int
    refused: str = ""


class Server:
    """One session of a pool behind messages.

    keys: what judges small steps in C++, as `direct.py` has them done; None: nothing does
    """

    def __init__(self, pool: SessionPool, session_id: int, keys: NearKeys | None = None) -> None:
        self.pool = pool
        self.session_id = session_id
        self.keys = keys

    def handle(self, call: Call) -> Answer:
        try:
            return getattr(self, call.kind)(call)  # type: ignore[no-any-return]
        except StepRefused as refused:
            return self._refusal(refused.first)
        except EngramError as error:
            return self._refusal(error)

    def open(self, call: Call) -> Answer:
        state = self.pool.open("", Opening(self.session_id))
        return Answer(state.length, state.epoch)

    def push(self, call: Call) -> Answer:
        asked = Asked.one(self.session_id, call.position, len(call.ids), call.epoch)
        ids = np.array(call.ids, dtype=np.int32)
        if not call.truncate and self._judge(call, len(ids), call.ids):
            assert self.keys is not None
            ((spot,), _) = self.keys.settle(self.pool.address, 0.0)
            return Answer(spot.length, spot.epoch)
        pushed = self.pool.push("", asked, ids, truncate=call.truncate)
        return Answer(int(pushed.length[0]), int(pushed.epoch[0]))

    def rewind(self, call: Call) -> Answer:
        pushed = self.pool.rewind("", Asked.one(self.session_id, call.position, 0, call.epoch))
        return Answer(int(pushed.length[0]), int(pushed.epoch[0]))

    def read(self, call: Call) -> Answer:
        """A read answers with its copy, or is refused: it never sees other ids."""
        asked = Asked.one(self.session_id, call.position, call.count, call.epoch)
        found = self.pool.read("", asked)
        is_plain = self._judge(call, call.count)
        if self.keys is not None and is_plain == bool(found.verdict.any()):
            raise ViolationError(f"a direct read is allowed: {is_plain}, a read: {found.verdict}")
        if not found.verdict.any():
            seen = self.pool.windows(found.rows, asked.position, asked.count)[:, 0].tolist()
            if tuple(seen) != call.copy:
                raise ViolationError(f"a read saw {seen}, not {call.copy}")
        return Answer(0, 0)

    def _judge(self, call: Call, count: int, ids: tuple[int, ...] | None = None) -> bool:
        if self.keys is None:
            return False
        segment = self.pool.rows_of("").get(self.session_id, -1), call.position, count, call.epoch
        return self.keys.judge(self.pool.address, 0, segment, ids, begins=True) > 0

    def held(self) -> tuple[list[int], int]:
        """The ids held, and the epoch."""
        state = self.pool.get("", self.session_id)
        asked = Asked.one(self.session_id, 0, state.length, state.epoch)
        found = self.pool.read("", asked)
        ids = self.pool.windows(found.rows, asked.position, asked.count)[:, 0]
        return ids.tolist(), state.epoch

    @staticmethod
    def _refusal(error: EngramError) -> Answer:
        return Answer(error.details.get("length") or 0, error.details.get("epoch") or 0, error.code)


class Simulation:
    """One client, one session, one bad network."""

    def __init__(
        self,
        pool: SessionPool,
        seed: int,
        *,
        is_careless: bool = False,
        keys: NearKeys | None = None,
    ) -> None:
        self.is_careless = is_careless
        self.random = random.Random(seed)
        self.server = Server(pool, seed + 1, keys)
        self.network: list[Call] = []
        self.copy: list[int] = []
        self.epoch = EPOCH_OPENED
        self.was_cut = False
        self.call: Call | None = None
        self.abandoned = False
        self.num_answered = 0

    def run(self) -> None:
        self._begin(Call("open"))
        while self.num_answered < CALLS:
            if self.call is None:
                self._begin(self._next_call())
            if not self.network or self.random.random() < 0.15:
                self._time_out()
            else:
                self._deliver()
        while self.network:  # what is still under way arrives at last
            self._deliver(last=True)
        self.server.pool.close("", self.server.session_id)

    def _deliver(self, *, last: bool = False) -> None:
        i = self.random.randrange(len(self.network))
        call = self.network[i]
        if last or self.random.random() < 0.7:
            del self.network[i]  # else a duplicate of it stays under way
        if self.random.random() < 0.15:
            return  # lost
        answer = self.server.handle(call)
        if call is self.call and self.random.random() < 0.75:
            self._receive(call, answer)
        if self.call is None:
            self._check()

    def _time_out(self) -> None:
        call = self.call
        assert call is not None
        if call.kind == "open" or self.random.random() < 0.6:
            self.network.append(call)
            return
        position = self.random.randint(max(0, call.position - 2), call.position)
        if self.is_careless:
            position = len(self.copy)
        self.abandoned = True
        self._begin(Call("rewind", position, epoch=call.epoch))

    def _receive(self, call: Call, answer: Answer) -> None:
        if answer.refused == "stale_epoch" and self.abandoned:
            # The abandoned call had landed: its epoch is the present one now.
            self.epoch, self.was_cut = answer.epoch, True
            self._begin(replace(call, epoch=answer.epoch))
            return
        if answer.refused:
            raise ViolationError(f"{call} was refused as {answer.refused}")
        if call.kind == "open":
            self.epoch = answer.epoch
        else:
            self._follow(call, answer)
        self.call, self.abandoned = None, False
        self.num_answered += 1

    def _follow(self, call: Call, answer: Answer) -> None:
        """Do to the copy what the call did to the session."""
        cuts = call.kind == "rewind" or call.truncate
        if answer.epoch != self.epoch + cuts:
            raise ViolationError(f"epoch {answer.epoch} after {call} at {self.epoch}")
        self.copy[call.position :] = call.ids
        if answer.length != len(self.copy):
            raise ViolationError(f"length {answer.length} after {call}, not {len(self.copy)}")
        self.epoch = answer.epoch
        self.was_cut |= cuts

    def _check(self) -> None:
        held, epoch = self.server.held()
        if (held, epoch) != (self.copy, self.epoch):
            raise ViolationError(f"held {held} at {epoch}, not {self.copy} at {self.epoch}")

    def _begin(self, call: Call) -> None:
        self.call = call
        self.network.append(call)
        if self.copy and self.random.random() < 0.5:
            start = self.random.randrange(len(self.copy))
            seen = tuple(self.copy[start : start + 3])
            if start + len(seen) <= call.position:  # what is under way does not touch these
                epoch = self.epoch
                read = Call("read", start, count=len(seen), epoch=epoch, copy=seen)
                self.network.append(read)

    def _next_call(self) -> Call:
        """Push some ids of few values (chance equality matters), truncate, or rewind."""
        length = len(self.copy)
        epoch = self.epoch
        if not self.was_cut and self.random.random() < 0.5:
            epoch = EPOCH_OPENED
        kind = self.random.random()
        if kind < 0.2:
            return Call("rewind", self.random.randint(max(0, length - 4), length), epoch=epoch)
        ids = tuple(self.random.choices(range(2), k=self.random.randint(0, 4)))
        if kind < 0.6:
            return Call("push", length, ids, epoch)
        position = self.random.randint(max(0, length - 4), length)
        return Call("push", position, ids, epoch, truncate=True)


def simulate(
    seeds: range, *, is_careless: bool = False, keys: NearKeys | None = None
) -> str | None:
    """Run simulations; the first violation, or None."""
    clock = iter(range(1, 2**62)).__next__
    pool = SessionPool(
        EngineLimits(max_sessions=4, max_held_tokens=4096),
        4,
        clock=lambda: 0.0,
        wall_clock_us=clock,
    )
    for seed in seeds:
        try:
            Simulation(pool, seed, is_careless=is_careless, keys=keys).run()
        except ViolationError as violation:
            return f"seed {seed}: {violation}"
    return None


def test_nothing_is_lost_doubled_or_wrongly_refused() -> None:
    assert simulate(range(SEEDS)) is None


def test_nor_where_small_steps_are_judged_in_cpp(tmp_path: Path) -> None:
    keys = NearKeys(build_cpu_library(tmp_path, "-O1"), 0, TOY)
    assert simulate(range(SEEDS, 2 * SEEDS), keys=keys) is None


def test_client_must_abandon_to_where_the_abandoned_call_began() -> None:
    assert simulate(range(500), is_careless=True) is not None


# ---- weaker rules


@contextmanager
def rule(name: str, judge: Callable[..., Judgement]) -> Iterator[None]:
    with patch.object(sessions, name, judge):
        yield


def push_ignores_epoch(fence: Fence, asked: Asked, *args: object, **named: object) -> Judgement:
    return rules.judge_push(fence, replace(asked, epoch=fence.epoch), *args, **named)  # type: ignore[arg-type]


def push_moves_only_if_it_removes(
    fence: Fence, asked: Asked, held: np.ndarray, same: np.ndarray, *, truncate: bool
) -> Judgement:
    judged = rules.judge_push(fence, asked, held, same, truncate=truncate)
    removes = judged.moves & (asked.position + same < fence.length)
    return replace(judged, moves=removes | (judged.moves & (not truncate)))


def push_stale_is_never_answered(
    fence: Fence, asked: Asked, held: np.ndarray, same: np.ndarray, *, truncate: bool
) -> Judgement:
    judged = rules.judge_push(fence, asked, held, same, truncate=truncate)
    stale = fence.resolve(asked.epoch) != fence.epoch
    return replace(judged, verdict=np.where(stale, np.int8(2), judged.verdict))


def rewind_ignores_epoch(fence: Fence, asked: Asked) -> Judgement:
    return rules.judge_rewind(fence, replace(asked, epoch=fence.epoch))


def rewind_moves_only_if_it_removes(fence: Fence, asked: Asked) -> Judgement:
    judged = rules.judge_rewind(fence, asked)
    return replace(judged, moves=judged.moves & (asked.position < fence.length))


WEAKER = [
    ("judge_push", push_ignores_epoch),
    ("judge_push", push_moves_only_if_it_removes),
    ("judge_push", push_stale_is_never_answered),
    ("judge_rewind", rewind_ignores_epoch),
    ("judge_rewind", rewind_moves_only_if_it_removes),
]


@pytest.mark.parametrize(("name", "judge"), WEAKER, ids=[judge.__name__ for _, judge in WEAKER])
def test_every_weaker_rule_loses_something(name: str, judge: Callable[..., Judgement]) -> None:
    with rule(name, judge):
        assert simulate(range(500)) is not None
