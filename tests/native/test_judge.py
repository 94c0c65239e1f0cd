"""Small steps judged in C++ are those that the session pool allows, and do to it what it does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from engram_core.backends.cpu import CpuLibrary, NearKeys
from engram_core.engine_types import EPOCH_OPENED, MAX_POSITIONS, EngineLimits
from engram_core.fence import Asked
from engram_core.hashing import DEAD, block
from engram_core.kv_store import keys_of
from engram_core.pages import PAGE
from engram_core.registry import Opening
from engram_core.sessions import Segment, SessionPool
from tests.native.host_library import build_cpu_library
from tests.recording import TOY, Clock

TENANT, LAYER, MAX_TOKENS = 7, 1, 8
BEYOND = (
    -(2**63) - 1,
    -(2**63),
    -(2**62),
    -1,
    0,
    1,
    255,
    MAX_POSITIONS,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
)
"""Where an addition, a conversion or a comparison goes wrong if one does."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    flags = "-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"
    return build_cpu_library(tmp_path_factory.mktemp("cpu"), *flags)


class Judged:
    """A pool, and a twin that does everything in general."""

    def __init__(self, library: CpuLibrary, *, max_sessions: int = 6) -> None:
        self.clock = Clock()
        limits = EngineLimits(max_sessions=max_sessions, max_held_tokens=1 << 14)
        self.pool, self.twin = (
            SessionPool(limits, 4, clock=self.clock, wall_clock_us=iter(range(10**6)).__next__)
            for _ in range(2)
        )
        self.keys = NearKeys(library, LAYER, TOY, MAX_TOKENS)
        self.begins = True

    @property
    def pools(self) -> tuple[SessionPool, SessionPool]:
        return self.pool, self.twin

    def judge(self, segments: Sequence[Segment], ids: Sequence[int] | None = None) -> bool:
        """Whether they are taken into the batch."""
        row_of = self.pool.rows_of("")
        words = [word for name, *rest in segments for word in (row_of.get(name, -1), *rest)]
        at = self.pool.address
        num_tokens = self.keys.judge(at, TENANT, words, ids, begins=self.begins)
        assert num_tokens in (0, sum(segment[2] for segment in segments))
        self.begins &= not num_tokens
        return num_tokens > 0

    def settle(self) -> tuple[list[tuple[int, ...]], bytes]:
        spots, dead = self.keys.settle(self.pool.address, self.clock())
        self.begins = True
        return [spot[1:] for spot in spots], dead

    def expects(self, segments: Sequence[Segment], ids: Sequence[int] | None) -> bool:
        """What the rules say, in integers of any size."""
        seen, total = set[int](), 0
        for session_id, position, count, epoch in segments:
            row = self.pool.rows_of("").get(session_id, -1)
            length, base, now, opened = self.pool._fence[:, row].tolist()
            if row < 0 or count < 1 or now != (opened if epoch == EPOCH_OPENED else epoch):
                return False
            end, total = position + count, total + count
            if ids is None:
                if position < base or end > length:
                    return False
            elif position != length or row in seen or (end - 1) // PAGE != (length - 1) // PAGE:
                return False
            seen.add(row)
        if ids is None:
            return total <= MAX_TOKENS
        held, limit = self.pool.held_tokens, self.pool._limits.max_held_tokens
        in_vocabulary = all(0 <= each < TOY.vocab_size for each in ids)
        return len(ids) == total <= min(MAX_TOKENS, limit - held) and in_vocabulary

    def state(self, pool: SessionPool) -> list[object]:
        times = pool._registry._last_used.tolist()
        states = [
            (pool.get("", name), pool._registry.row("", name)) for name in sorted(pool.rows_of(""))
        ]
        pool._registry._last_used[:] = times  # `get` renews
        return [states, times, pool._fence.tolist(), pool.held_tokens]


def columns(segments: Sequence[Segment]) -> Asked:
    session_id, position, count, epoch = (
        np.array(column, dtype=np.int64) for column in zip(*segments, strict=True)
    )
    return Asked(session_id, position, count, epoch)


def change(judged: Judged, rng: random.Random) -> None:
    """Open, fork, push, cut or close something in both pools, as is."""
    kind, name = rng.choice(["push", "push", "cut", "fork", "close"]), rng.randint(1, 6)
    held = dict(judged.pool.rows_of(""))
    length, base, epoch, _ = judged.pool._fence[:, held.get(name, 0)].tolist()
    count = rng.choice([1, 2, 3, 9])
    ids = np.array([rng.randrange(DEAD, 16) for _ in range(count)], dtype=np.int32)
    start = rng.choice([0, 0, 2, PAGE - 2, PAGE, PAGE + 1])
    before = tuple(rng.randrange(DEAD, 16) for _ in range(min(start, 3)))
    closes = rng.random() < 0.3
    for pool in judged.pools:
        if name not in held:
            pool.open("", Opening(name, start, before))
        elif kind == "push":
            pool.push("", Asked.one(name, length, count, epoch), ids)
        elif kind == "cut":
            pool.rewind("", Asked.one(name, max(base, length - count), 0, epoch))
        elif kind == "fork" and len(held) < 6:
            free = min({*range(1, 7)} - {*held})
            pool.open("", Opening(free, fork_of=name, epoch=epoch))
        elif kind == "close" and closes:
            pool.close("", name)


def any_segment(judged: Judged, rng: random.Random, *, pushes: bool) -> Segment:
    """Around a session's ends, under its epoch and others; now and then anywhere."""
    name = rng.randint(1, 6)
    row = judged.pool.rows_of("").get(name, 0)
    length, base, epoch, _ = judged.pool._fence[:, row].tolist()
    position = length if pushes else rng.choice([base, length - 2, length - 1])
    position += rng.choice([0, 0, 0, 0, -1, 1])
    epoch = rng.choice([epoch, epoch, epoch, EPOCH_OPENED, epoch - 1, epoch + 1])
    segment = [name, position, rng.choice([1, 1, 1, 2, 3, 0]), epoch]
    if rng.random() < 0.05:
        segment[rng.randint(1, 3)] = rng.choice(BEYOND)
    return segment[0], segment[1], segment[2], segment[3]


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_ask_after_any_program(library: CpuLibrary, seed: int, pushes: bool) -> None:
    rng, judged, num_plain = random.Random(seed), Judged(library), 0
    for _ in range(3000):
        judged.clock.now_s += 1
        if rng.random() < 0.3:
            change(judged, rng)
            continue
        size = rng.choice([1, 1, 1, 2, 3])
        segments = [any_segment(judged, rng, pushes=pushes) for _ in range(size)]
        total = sum(segment[2] for segment in segments)
        num_ids = total if rng.random() < 0.95 and 0 <= total < 99 else rng.randrange(99)
        low = -1 if rng.random() < 0.05 else 0
        some = [rng.randrange(low, 17 if low else 16) for _ in range(num_ids)]
        ids = some if pushes else None
        before = judged.state(judged.pool)
        is_plain = judged.judge(segments, ids)
        assert is_plain == judged.expects(segments, ids)
        assert judged.state(judged.pool) == before  # until it is settled
        if not is_plain:
            continue
        num_plain += 1
        asked, keys = columns(segments), judged.keys.keys()
        spots, dead = judged.settle()
        if pushes:
            told = judged.twin.push("", asked, np.array(some, dtype=np.int32))
            state = told.length, told.base, told.epoch
        else:
            found = judged.twin.read("", asked)
            assert not found.verdict.any()
            state = found.fence.length, found.fence.base, found.fence.epoch
        assert spots == list(zip(*(column.tolist() for column in state), strict=True))
        assert judged.state(judged.pool) == judged.state(judged.twin)
        rows = judged.twin._registry.rows("", asked.session_id)
        raw = judged.twin.windows(rows, asked.position, asked.count)
        assert keys == keys_of(LAYER, np.full(total, TENANT), block(raw, TOY.pad_id))
        assert list(dead) == (raw[:, 0] == DEAD).tolist()
    assert num_plain > 200


@pytest.mark.parametrize("pushes", [False, True])
def test_integers_of_any_size_are_compared_not_added(library: CpuLibrary, pushes: bool) -> None:
    judged = Judged(library)
    for pool in judged.pools:
        pool.open("", Opening(1, 5, (1, 2, 3)))
        pool.push("", Asked.one(1, 5, 2, EPOCH_OPENED), np.array([4, 5], dtype=np.int32))
    state = judged.state(judged.pool)
    epoch = int(judged.pool._fence[2, 0])
    epochs = (EPOCH_OPENED, epoch, *BEYOND)
    num_plain = 0
    for position, count, asked in itertools.product((5, 6, 7, *BEYOND), (2, *BEYOND), epochs):
        segments = [(1, position, count, asked)]
        if pushes:
            segments.append((1, 0, 8 - count, epoch))  # so that the sum is a small one
        ids = [6] * 8 if pushes else None
        is_plain = judged.judge(segments, ids)
        assert is_plain == judged.expects(segments, ids)
        judged.begins = True
        num_plain += is_plain
        assert judged.state(judged.pool) == state
    assert pushes or num_plain > 8
    for token_id in (*BEYOND, 16):
        told = judged.judge([(1, 7, 1, epoch)], [token_id])
        assert told == (0 <= token_id < 16)
        judged.begins = True


def test_a_batch_takes_what_has_room_and_no_session_twice(library: CpuLibrary) -> None:
    judged = Judged(library)
    for name in (1, 2):
        judged.pool.open("", Opening(name))
        judged.pool.push(
            "", Asked.one(name, 0, 3, EPOCH_OPENED), np.array([1, 2, 3], dtype=np.int32)
        )
    epoch = EPOCH_OPENED
    assert not judged.judge([(1, 3, 1, epoch), (9, 3, 1, epoch)], [4, 5])
    assert judged.judge([(1, 3, 2, epoch)], [6, 7])
    assert not judged.judge([(1, 3, 1, epoch)], [8])  # those ids would lie where these do
    assert not judged.judge([(2, 3, 1, epoch), (1, 3, 1, epoch)], [8, 9])
    assert not judged.judge([(2, 3, 1, epoch), (2, 3, 1, epoch)], [8, 9])
    assert judged.judge([(1, 0, 3, epoch), (1, 2, 1, epoch)])  # what is held may be read
    assert not judged.judge([(1, 2, 2, epoch)])
    assert not judged.judge([(2, 0, 3, epoch)])  # MAX_TOKENS
    assert judged.judge([(2, 3, 2, epoch)], [9, 10])
    found = judged.keys.keys()
    keys = [np.frombuffer(key, np.int32).tolist() for key in found]
    assert [key[2:] for key in keys] == [
        [6, 3, 2, 1], [7, 6, 3, 2], [1, 2, 2, 2], [2, 1, 2, 2], [3, 2, 1, 2], [3, 2, 1, 2],
        [9, 3, 2, 1], [10, 9, 3, 2],
    ]  # fmt: skip
    spots, _ = judged.settle()
    assert [length for length, _, _ in spots] == [5, 3, 3, 5]
    assert [judged.pool.get("", name).length for name in (1, 2)] == [5, 5]
    assert judged.judge([(1, 5, 1, epoch)], [8])  # the next batch


def test_an_append_that_needs_a_page_is_left_to_the_general_way(library: CpuLibrary) -> None:
    judged = Judged(library)
    for name, start in ((1, 0), (2, PAGE), (3, PAGE - 1)):
        judged.pool.open("", Opening(name, start, (1, 2, 3)[: min(start, 3)]))
    assert not judged.judge([(1, 0, 1, EPOCH_OPENED)], [4])
    assert not judged.judge([(2, PAGE, 1, EPOCH_OPENED)], [4])
    assert not judged.judge([(3, PAGE - 1, 2, EPOCH_OPENED)], [4, 5])
    assert judged.judge([(3, PAGE - 1, 1, EPOCH_OPENED)], [4])
