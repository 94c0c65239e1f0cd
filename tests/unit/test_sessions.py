"""The session pool: histories by position, the fence, and the ways a session is made and ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_core import errors
from engram_core.engine_types import EPOCH_OPENED, MAX_POSITIONS, EngineLimits, SessionState
from engram_core.fence import Asked, Verdict
from engram_core.hashing import DEAD, block, hash_windows
from engram_core.pages import PAGE
from engram_core.registry import Opening
from engram_core.sessions import Pushed, SessionPool
from tests.recording import TOY, Clock

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "toy.json").read_text())
ROWS = GOLDEN["rows"]
IDS = GOLDEN["compressed_ids"]


class Pool:
    """A session pool with one session at a time in view, and plain Python arguments."""

    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.wall_us = 5000
        self.pool = SessionPool(
            EngineLimits(**{"max_sessions": 8, "max_held_tokens": 4096, **limits}),  # type: ignore[arg-type]
            4,
            clock=self.clock,
            wall_clock_us=lambda: self.wall_us,
        )

    def open(self, session_id: int | None = 1, **opening: object) -> SessionState:
        return self.pool.open("", Opening(session_id, **opening))  # type: ignore[arg-type]

    def push(
        self,
        position: int,
        ids: Sequence[int],
        *,
        epoch: int = EPOCH_OPENED,
        truncate: bool = False,
        session_id: int = 1,
    ) -> Pushed:
        asked = Asked.one(session_id, position, len(ids), epoch)
        return self.pool.push("", asked, np.array(ids, dtype=np.int32), truncate=truncate)

    def rewind(self, position: int, epoch: int = EPOCH_OPENED, session_id: int = 1) -> Pushed:
        return self.pool.rewind("", Asked.one(session_id, position, 0, epoch))

    def state(self, session_id: int = 1) -> SessionState:
        return self.pool.get("", session_id)

    def windows(self, position: int, count: int, session_id: int = 1) -> np.ndarray:
        found = self.pool.read("", Asked.one(session_id, position, count, self.state().epoch))
        assert not found.verdict.any()
        return self.pool.windows(found.rows, np.array([position]), np.array([count]))

    def rows(self, position: int, count: int) -> list[list[int]]:
        """Row ids of TOY layer 1."""
        windows = block(self.windows(position, count), TOY.pad_id)
        return hash_windows(windows, TOY, [0])[:, 0].tolist()


@pytest.fixture
def toy() -> Pool:
    """Session 1 holding 5, 7, 9, 11, 3."""
    pool = Pool()
    pool.open()
    pool.push(0, IDS)
    return pool


def refused(code: type[errors.EngramError], call: object, *args: object, **named: object) -> dict:
    """Call; the refusal of its only segment. Returns its values."""
    with pytest.raises((code, errors.StepRefused)) as caught:
        call(*args, **named)  # type: ignore[operator]
    error = caught.value
    error = error.first if isinstance(error, errors.StepRefused) else error
    assert type(error) is code
    return dict(error.details)


# ---- field reports, part A


def test_toy_rows_come_out() -> None:
    pool = Pool()
    pool.open()
    pool.push(0, IDS)
    assert pool.rows(0, 5) == ROWS


def test_rewind_keeps_the_look_back(toy: Pool) -> None:  # A1
    toy.rewind(3)
    toy.push(3, [3], epoch=toy.state().epoch)
    assert toy.rows(3, 1)[0] == GOLDEN["after_rewind_to_3_append_3"]


@pytest.mark.parametrize("cuts", range(16))
def test_any_cutting_of_a_prompt_gives_the_same_rows(cuts: int) -> None:  # A3
    pool = Pool()
    pool.open()
    ends = [i + 1 for i in range(4) if cuts >> i & 1] + [5]
    start = 0
    for end in ends:
        pool.push(start, IDS[start:end])
        assert pool.rows(start, end - start) == ROWS[start:end]
        start = end


def test_lookback_is_oldest_first() -> None:  # A13
    pool = Pool()
    pool.open(position=3, lookback=(5, 7, 9))
    pool.push(3, [11])
    assert pool.rows(3, 1)[0] == [99, 113, 272, 355, 448, 575]


def test_resume_at_any_position_gives_the_rows_of_the_whole() -> None:  # A15
    for position in range(5):
        pool = Pool()
        lookback = tuple(IDS[max(0, position - 3) : position])
        assert pool.open(position=position, lookback=lookback).length == position
        pool.push(position, IDS[position:])
        assert pool.rows(position, 5 - position) == ROWS[position:]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 20])
def test_prompt_in_chunks_gives_the_same_windows(chunk: int) -> None:  # A21
    ids = [(7 * i + 3) % 16 for i in range(20)]
    whole, chunked = Pool(), Pool()
    for pool, size in ((whole, 20), (chunked, chunk)):
        pool.open()
        for start in range(0, 20, size):
            pool.push(start, ids[start : start + size])
    assert (whole.windows(0, 20) == chunked.windows(0, 20)).all()


def test_length_counts_the_positions_held() -> None:  # A22
    pool = Pool()
    pool.open()
    for i, token in enumerate(IDS):
        assert pool.push(i, [token]).length[0] == i + 1
        assert pool.rows(i, 1)[0] == ROWS[i]


def test_sessions_do_not_mix_under_batching() -> None:  # A23
    rng = np.random.default_rng(0)
    pool = Pool(max_sessions=64, max_held_tokens=64 * 50 * 4).pool
    ids = np.array([pool.open("", Opening()).session_id for _ in range(64)])
    texts = rng.integers(0, 16, (64, 50 * 4), dtype=np.int32)
    lengths = np.zeros(64, dtype=np.int64)
    for _ in range(50):
        who = rng.permutation(64)[: rng.integers(1, 65)]
        count = rng.integers(0, 5, len(who))
        position = lengths[who]
        flat = [texts[i, p : p + c] for i, p, c in zip(who, position, count, strict=True)]
        asked = Asked(ids[who], position, count, np.full(len(who), EPOCH_OPENED))
        pushed = pool.push("", asked, np.concatenate(flat))
        lengths[who] += count
        assert (pushed.length == lengths[who]).all()
    for i in range(64):
        rows = np.array([pool._registry.row("", int(ids[i]))])
        held = pool.windows(rows, np.array([0]), lengths[i : i + 1])
        assert (held[:, 0] == texts[i, : lengths[i]]).all()


def test_retried_push_is_not_doubled() -> None:  # G5
    pool = Pool()
    pool.open()
    pool.push(0, [5, 7])
    first = pool.push(2, [9])
    again = pool.push(2, [9])
    assert (first.length[0], first.appended[0]) == (3, 1)
    assert (again.length[0], again.appended[0]) == (3, 0)
    pool.push(3, [8])
    assert pool.rows(3, 1)[0] == GOLDEN["after_retry_of_9_then_8"]


def test_gap_tells_the_true_length() -> None:  # G7
    pool = Pool()
    pool.open()
    pool.push(0, [5, 7, 9])
    assert refused(errors.Gap, pool.push, 5, [1])["length"] == 3
    assert pool.state().length == 3
    assert pool.push(3, [11]).length[0] == 4


def test_empty_push_changes_nothing() -> None:  # G25
    pool = Pool()
    pool.open()
    assert pool.push(0, []).length[0] == 0
    pool.push(0, [5])
    assert pool.rows(0, 1)[0] == ROWS[0]


# ---- the fence


def test_append_keeps_the_epoch_and_cuts_move_it(toy: Pool) -> None:
    opened = toy.state().epoch
    assert toy.push(5, [1]).epoch[0] == opened
    assert toy.rewind(6).epoch[0] == opened + 1, "a rewind that removes nothing fences too"
    assert toy.push(6, [], epoch=opened + 1, truncate=True).epoch[0] == opened + 2
    assert toy.rewind(2, opened + 2).epoch[0] == opened + 3


def test_truncating_push_ends_where_it_says(toy: Pool) -> None:
    pushed = toy.push(1, [7, 8], truncate=True)
    assert (pushed.length[0], pushed.appended[0], pushed.removed[0]) == (3, 1, 3)
    assert toy.windows(2, 1).tolist() == [[8, 7, 5, DEAD]]


def test_truncating_push_of_ids_in_place_cuts_what_is_longer(toy: Pool) -> None:
    pushed = toy.push(1, [7, 9], truncate=True)
    assert (pushed.length[0], pushed.appended[0], pushed.removed[0]) == (3, 0, 2)


def test_conflict_names_the_first_difference(toy: Pool) -> None:
    values = refused(errors.Conflict, toy.push, 1, [7, 8, 8])
    assert (values["index"], values["length"], values["epoch"]) == (1, 5, toy.state().epoch)


def test_conflict_says_what_to_do_in_the_words_of_every_door(toy: Pool) -> None:
    with pytest.raises(errors.StepRefused) as caught:
        toy.push(1, [7, 8, 8])
    message = caught.value.first.message
    assert message.endswith("push with truncate (over HTTP on_conflict=truncate)")


def test_dead_flag_takes_part_in_the_comparison(toy: Pool) -> None:
    assert refused(errors.Conflict, toy.push, 4, [DEAD])["index"] == 0
    toy.push(5, [DEAD])
    assert toy.push(5, [DEAD]).appended[0] == 0


def test_epoch_left_out_is_the_opening_one(toy: Pool) -> None:
    toy.rewind(4)
    values = refused(errors.StaleEpoch, toy.push, 4, [3])
    assert values == {"length": 4, "epoch": toy.state().epoch}
    refused(errors.StaleEpoch, toy.rewind, 3)


def test_stale_push_of_ids_in_place_is_answered(toy: Pool) -> None:
    opened = toy.state().epoch
    toy.rewind(4)
    again = toy.push(0, IDS[:4], epoch=opened)
    assert (again.length[0], again.epoch[0], again.appended[0]) == (4, opened + 1, 0)
    refused(errors.StaleEpoch, toy.push, 0, IDS, epoch=opened)


def test_stale_truncating_push_is_answered_only_where_it_ends(toy: Pool) -> None:
    opened = toy.state().epoch
    toy.push(3, [1], truncate=True)
    assert toy.push(3, [1], truncate=True).epoch[0] == opened + 1, "a retry"
    toy.push(4, [6], epoch=opened + 1)
    refused(errors.StaleEpoch, toy.push, 3, [1], truncate=True)
    assert toy.state().length == 5


def test_stale_rewind_to_the_present_length_is_answered(toy: Pool) -> None:
    opened = toy.state().epoch
    assert toy.rewind(3).epoch[0] == opened + 1
    assert toy.rewind(3).epoch[0] == opened + 1
    refused(errors.StaleEpoch, toy.rewind, 2)


def test_push_from_the_future_is_stale(toy: Pool) -> None:
    refused(errors.StaleEpoch, toy.push, 5, [1], epoch=toy.state().epoch + 1)


def test_rewind_beyond_the_length_is_a_gap(toy: Pool) -> None:
    assert refused(errors.Gap, toy.rewind, 6)["length"] == 5


def test_epochs_are_never_used_again() -> None:
    pool = Pool()
    first = pool.open().epoch
    for _ in range(3):
        pool.rewind(0, pool.state().epoch)
    pool.pool.close("", 1)
    assert pool.open().epoch == first + 4, "a cut's epoch counts as used; the clock stood still"
    pool.pool.close("", 1)
    pool.wall_us = 9000
    assert pool.open().epoch == 9000
    pool.wall_us = 10
    assert pool.open(2).epoch == 9001, "a clock set back"


# ---- positions, base, look-back


def test_base_is_zero_where_the_lookback_is_the_whole_history() -> None:
    pool = Pool()
    assert pool.open(position=3, lookback=(5, 7, 9)).base == 0
    assert pool.rows(0, 3) == ROWS[:3]
    pool.rewind(0)
    assert pool.state().length == 0


def test_base_is_where_a_resumed_session_begins() -> None:
    pool = Pool()
    state = pool.open(position=4, lookback=(7, 9, 11))
    assert (state.base, state.length, state.compressed_lookback) == (4, 4, (7, 9, 11))
    for call in (lambda: pool.push(3, [11]), lambda: pool.rewind(3)):
        assert refused(errors.HistoryTruncated, call)["base"] == 4
    found = pool.pool.read("", Asked.one(1, 3, 1, EPOCH_OPENED))
    assert found.verdict.tolist() == [Verdict.HISTORY_TRUNCATED]
    pool.push(4, [3])
    assert pool.rows(4, 1)[0] == ROWS[4]


def test_dead_lookback_blocks() -> None:
    pool = Pool()
    pool.open(position=4, lookback=(7, DEAD, 11))
    pool.push(4, [3])
    assert pool.windows(4, 1).tolist() == [[3, 11, DEAD, 7]]


def test_longest_position_is_refused_whole() -> None:
    pool = Pool()
    pool.open(position=MAX_POSITIONS - 1, lookback=(1, 2, 3))
    refused(errors.TooManyPositions, pool.push, MAX_POSITIONS - 1, [1, 1])
    assert pool.push(MAX_POSITIONS - 1, [1]).length[0] == MAX_POSITIONS
    refused(errors.TooManyPositions, pool.push, 2**63 - 1, [1])
    refused(errors.TooManyPositions, pool.open, 2, position=MAX_POSITIONS + 1, lookback=(1, 2, 3))


# ---- open again, fork, owner, limits, time


def test_opening_alike_finds_the_session(toy: Pool) -> None:
    again = toy.open()
    assert (again.created, again.length, again.epoch) == (False, 5, toy.state().epoch)
    for other in ({"position": 1, "lookback": (1,)}, {"owner": "B"}, {"fork_of": 1}):
        assert refused(errors.SessionExists, toy.open, **other)["length"] == 5


def test_fork_has_the_history_and_its_own_future(toy: Pool) -> None:
    fork = toy.open(2, fork_of=1, position=3)
    assert (fork.length, fork.base) == (3, 0)
    assert fork.epoch > toy.state().epoch
    toy.push(3, [8], session_id=2)
    toy.push(1, [1], truncate=True)
    assert toy.windows(0, 4, session_id=2)[:, 0].tolist() == [5, 7, 9, 8]
    assert toy.windows(0, 2)[:, 0].tolist() == [5, 1]


def test_fork_without_position_takes_all_and_may_be_repeated(toy: Pool) -> None:
    assert toy.open(2, fork_of=1).length == 5
    toy.push(5, [1])
    assert toy.open(2, fork_of=1).created is False


def test_fork_inherits_base_and_lookback() -> None:
    pool = Pool()
    pool.open(position=600, lookback=(7, DEAD, 11))
    pool.push(600, [3] * 300)
    fork = pool.open(2, fork_of=1, position=600)
    assert (fork.base, fork.compressed_lookback) == (600, (7, DEAD, 11))
    refused(errors.HistoryTruncated, pool.open, 3, fork_of=1, position=599)


def test_fork_is_fenced_by_its_parent(toy: Pool) -> None:
    with pytest.raises(errors.NotPushed, match=r"^position 6: the session holds 5 at epoch "):
        toy.open(2, fork_of=1, position=6)
    toy.rewind(4)
    refused(errors.StaleEpoch, toy.open, 2, fork_of=1)
    refused(errors.UnknownSession, toy.open, 2, fork_of=9)
    assert len(toy.pool) == 1
    assert toy.open(2, fork_of=1, epoch=toy.state().epoch).length == 4


def test_tenants_do_not_see_each_other(toy: Pool) -> None:
    with pytest.raises(errors.UnknownSession):
        toy.pool.get("other", 1)
    assert toy.pool.open("other", Opening(1)).created
    assert toy.state().length == 5


def test_owner_closes_its_former_incarnation() -> None:
    pool = Pool()
    for i, owner in enumerate(("A", "A", "B"), start=1):
        pool.open(i, owner=owner)
    assert pool.pool.close_owner("", "A") == [("", 1), ("", 2)]
    assert pool.pool.close_owner("", "A") == []
    assert pool.state(3).owner == "B"


def test_close_checks_an_epoch_that_is_given(toy: Pool) -> None:
    opened = toy.state().epoch
    toy.rewind(4)
    refused(errors.StaleEpoch, toy.pool.close, "", 1, opened)
    refused(errors.StaleEpoch, toy.pool.close, "", 1, EPOCH_OPENED)
    toy.pool.close("", 1, opened + 1)
    refused(errors.UnknownSession, toy.pool.close, "", 1)


def test_idle_sessions_expire_and_every_use_renews() -> None:
    pool = Pool(session_ttl_s=10.0)
    for i in range(1, 6):
        pool.open(i)
    pool.clock.now_s += 8
    pool.push(0, [1], session_id=1)
    pool.rewind(0, session_id=2)
    pool.state(3)
    pool.pool.read("", Asked.one(4, 0, 0, EPOCH_OPENED))
    pool.clock.now_s += 8
    assert pool.pool.sweep() == [("", 5)]
    assert len(pool.pool) == 4


def test_refused_call_does_not_renew() -> None:
    pool = Pool(session_ttl_s=10.0)
    pool.open()
    pool.clock.now_s += 8
    refused(errors.Gap, pool.push, 5, [1])
    pool.clock.now_s += 8
    assert pool.pool.sweep() == [("", 1)]


def test_too_many_sessions() -> None:
    pool = Pool(max_sessions=2)
    pool.open(1)
    pool.open(2)
    refused(errors.TooManySessions, pool.open, 3)
    pool.pool.close("", 1)
    assert pool.open(3).created


def test_held_tokens_are_counted_exactly() -> None:
    pool = Pool(max_held_tokens=10)
    pool.open(position=100, lookback=(1, 2, 3))
    pool.push(100, [1] * 6)
    assert refused(errors.HeldTokensFull, pool.push, 106, [1, 1])["length"] == 106
    assert pool.push(106, [1]).length[0] == 107
    refused(errors.HeldTokensFull, pool.open, 2, position=4, lookback=(1, 2, 3))
    pool.rewind(100)
    assert pool.pool.held_tokens == 3
    pool.pool.close("", 1)
    assert pool.pool.held_tokens == 0


# ---- many segments


def many(pool: Pool, segments: list[tuple[int, int, list[int]]]) -> Pushed:
    ids, position, tokens = zip(*segments, strict=True)
    asked = Asked(
        np.array(ids),
        np.array(position),
        np.array([len(t) for t in tokens]),
        np.full(len(ids), EPOCH_OPENED),
    )
    return pool.pool.push("", asked, np.array([t for ids in tokens for t in ids], dtype=np.int32))


def test_one_refused_segment_refuses_all_and_every_failing_one_is_listed(toy: Pool) -> None:
    toy.open(2)
    toy.open(3)
    with pytest.raises(errors.StepRefused) as caught:
        many(toy, [(2, 0, [1]), (9, 0, [1]), (1, 4, [9]), (3, 7, [1])])
    segments = caught.value.segments
    assert [(s["index"], s["code"], s["length"]) for s in segments] == [
        (1, "unknown_session", None),
        (2, "conflict", 5),
        (3, "gap", 0),
    ]
    assert segments[1]["token_index"] == 0
    assert (toy.state(2).length, toy.state().length) == (0, 5)


@pytest.mark.parametrize("second", [5, 6])
def test_session_named_twice_in_a_push_is_refused(toy: Pool, second: int) -> None:
    with pytest.raises(errors.StepRefused) as caught:
        many(toy, [(1, 5, [1]), (1, second, [1])])
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [(1, "duplicate_session")]
    assert toy.state().length == 5


def test_growth_that_does_not_fit_is_listed_from_where_the_room_ends() -> None:
    pool = Pool(max_held_tokens=10)
    for i in (1, 2, 3):
        pool.open(i)
    with pytest.raises(errors.StepRefused) as caught:
        many(pool, [(1, 0, [1] * 8), (2, 0, [1] * 4), (3, 0, [])])
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [(1, "held_tokens_full")]
    assert pool.pool.held_tokens == 0


def test_no_segments_are_fine(toy: Pool) -> None:
    none = np.zeros(0, dtype=np.int64)
    assert len(toy.pool.push("", Asked(none, none, none, none), np.zeros(0, np.int32)).rows) == 0


# ---- laws


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pool_agrees_with_plain_lists(data: st.DataObject) -> None:
    """Lengths around page borders, several sessions, cuts and forks; pages never leak."""
    pool = Pool(max_sessions=4, max_held_tokens=8 * PAGE)
    model: dict[int, list[int]] = {}
    epoch: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "push", "cut", "rewind", "fork", "close"]))
        one = data.draw(st.sampled_from(sorted(model))) if model else 0
        free = [i for i in range(1, 5) if i not in model]
        if action == "open" and free:
            epoch[free[0]], model[free[0]] = pool.open(free[0]).epoch, []
        elif action == "fork" and free and one:
            cut = data.draw(st.integers(0, len(model[one])))
            if sum(map(len, model.values())) + cut > 8 * PAGE:
                continue
            state = pool.open(free[0], fork_of=one, position=cut, epoch=epoch[one])
            epoch[free[0]], model[free[0]] = state.epoch, model[one][:cut]
        elif action in ("push", "cut") and one:
            position = len(model[one])
            if action == "cut":
                position = data.draw(st.integers(0, position))
            count = data.draw(st.sampled_from([0, 1, 5, PAGE - 1, PAGE, PAGE + 1]))
            ids = [(position + 3 * i + len(epoch)) % 16 for i in range(count)]
            if sum(map(len, model.values())) - len(model[one]) + position + count > 8 * PAGE:
                continue
            pushed = pool.push(
                position, ids, epoch=epoch[one], truncate=action == "cut", session_id=one
            )
            epoch[one], model[one] = int(pushed.epoch[0]), model[one][:position] + ids
        elif action == "rewind" and one:
            cut = data.draw(st.integers(0, len(model[one])))
            epoch[one] = int(pool.rewind(cut, epoch[one], session_id=one).epoch[0])
            del model[one][cut:]
        elif action == "close" and one:
            pool.pool.close("", one)
            del model[one]
        for session_id, ids in model.items():
            row = np.array([pool.pool._registry.row("", session_id)])
            held = pool.pool.windows(row, np.array([0]), np.array([len(ids)]))
            assert held[:, 0].tolist() == ids
    assert pool.pool.held_tokens == sum(map(len, model.values()))
    assert pool.pool._ids.num_used == sum(-(-len(ids) // PAGE) for ids in model.values())
