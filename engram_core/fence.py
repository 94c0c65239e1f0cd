"""The fence: what a session's epoch lets a push, a rewind and a read do.

Pure rules over the present state of S sessions; `sessions.py` holds that state. They were
simulated with duplicated, delayed, reordered and abandoned messages
(`tests/unit/test_fence_simulation.py`); every weaker rule tried loses a token there:

- opening gives a session an epoch that this server never used;
- every rewind, and every truncating push, that carries the present epoch moves it by one, whether
  or not it removes anything; an append never does;
- a call with another epoch is stale and changes nothing. So that a retry is safe it is nevertheless
  answered if it asks for what already is: a push whose ids are all in place, a truncating push if
  moreover the session ends where it would, a rewind to the present length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engram_core.engine_types import EPOCH_OPENED, MAX_POSITIONS
from engram_core.pages import Ints

Flags = NDArray[np.bool_]


class Verdict(IntEnum):
    """Why a segment is refused (OK: it is not)."""

    OK = 0
    UNKNOWN_SESSION = 1
    STALE_EPOCH = 2
    TOO_MANY_POSITIONS = 3
    HISTORY_TRUNCATED = 4
    GAP = 5
    CONFLICT = 6
    NOT_PUSHED = 7


@dataclass(frozen=True)
class Fence:
    """The present state of S sessions: int64 [S] each.

    known: bool [S]; the rest means nothing where it is False
    length: positions held; base: lowest length it can be cut to
    epoch: the present one; opened: the one it was opened with
    """

    known: Flags
    length: Ints
    base: Ints
    epoch: Ints
    opened: Ints

    def resolve(self, epoch: Ints) -> Ints:
        """Put the opening epoch where one was left out."""
        return np.where(epoch == EPOCH_OPENED, self.opened, epoch)


@dataclass(frozen=True)
class Asked:
    """What S segments ask for: int64 [S] each.

    position: of the first token; count: of tokens; epoch: EPOCH_OPENED = left out
    """

    session_id: Ints
    position: Ints
    count: Ints
    epoch: Ints

    @classmethod
    def one(cls, session_id: int, position: int, count: int, epoch: int) -> Asked:
        """A single segment."""
        return cls(*(np.array([v], dtype=np.int64) for v in (session_id, position, count, epoch)))

    @property
    def end(self) -> Ints:
        """One more than the last position (clipped: a client's position must not wrap the sum)."""
        return np.minimum(self.position, MAX_POSITIONS + 1) + self.count


@dataclass(frozen=True)
class Judgement:
    """verdict: int8 [S] of Verdict; moves: bool [S]  it carries the present epoch, so it changes
    what there is to change; length: int64 [S]  afterwards."""

    verdict: NDArray[np.int8]
    moves: Flags
    length: Ints


def overlap(fence: Fence, asked: Asked) -> Ints:
    """How many leading ids of each push have a counterpart in its session: int64 [S]."""
    held = np.minimum(fence.length, asked.end) - asked.position
    held[(asked.position < fence.base) | ~fence.known] = 0
    return np.maximum(held, 0)


def judge_push(fence: Fence, asked: Asked, held: Ints, same: Ints, *, truncate: bool) -> Judgement:
    """Judge pushes.

    held: int64 [S]  `overlap`; same: int64 [S]  how many leading ids of those are equal
    truncate: the session ends exactly at position + count afterwards
    """
    end, position = asked.end, asked.position
    fresh = fence.resolve(asked.epoch) == fence.epoch
    below = position < fence.base
    gap = position > fence.length
    in_place = (same == asked.count) & ~(below | gap)
    if truncate:
        in_place &= end == fence.length
    verdict = _first(
        (~fence.known, Verdict.UNKNOWN_SESSION),
        (~(fresh | in_place), Verdict.STALE_EPOCH),
        (fresh & (end > MAX_POSITIONS), Verdict.TOO_MANY_POSITIONS),
        (fresh & below, Verdict.HISTORY_TRUNCATED),
        (fresh & gap, Verdict.GAP),
        (fresh & (same < held) & (not truncate), Verdict.CONFLICT),
    )
    length = end if truncate else np.maximum(end, fence.length)
    return Judgement(verdict, fresh, np.where(fresh, length, fence.length))


def judge_read(fence: Fence, asked: Asked) -> NDArray[np.int8]:
    """Judge reads: int8 [S] of Verdict.

    NOT_PUSHED may become OK later: the ids, or the epoch, are still to come.
    """
    epoch = fence.resolve(asked.epoch)
    end = asked.end
    return _first(
        (~fence.known, Verdict.UNKNOWN_SESSION),
        (epoch < fence.epoch, Verdict.STALE_EPOCH),
        (end > MAX_POSITIONS, Verdict.TOO_MANY_POSITIONS),
        (asked.position < fence.base, Verdict.HISTORY_TRUNCATED),
        ((epoch > fence.epoch) | (end > fence.length), Verdict.NOT_PUSHED),
    )


def judge_rewind(fence: Fence, asked: Asked) -> Judgement:
    """Judge rewinds to `asked.position`."""
    position = asked.position
    fresh = fence.resolve(asked.epoch) == fence.epoch
    verdict = _first(
        (~fence.known, Verdict.UNKNOWN_SESSION),
        (~fresh & (position != fence.length), Verdict.STALE_EPOCH),
        (fresh & (position < fence.base), Verdict.HISTORY_TRUNCATED),
        (fresh & (position > fence.length), Verdict.GAP),
    )
    return Judgement(verdict, fresh, np.where(fresh, position, fence.length))


def judge_fork(fence: Fence, asked: Asked) -> NDArray[np.int8]:
    """Judge forks of the history up to `asked.position`: int8 [S] of Verdict."""
    return _first(
        (~fence.known, Verdict.UNKNOWN_SESSION),
        (fence.resolve(asked.epoch) != fence.epoch, Verdict.STALE_EPOCH),
        (asked.position < fence.base, Verdict.HISTORY_TRUNCATED),
        (asked.position > fence.length, Verdict.NOT_PUSHED),
    )


def judge_close(fence: Fence, asked: Asked) -> NDArray[np.int8]:
    """Judge closes that carry an epoch: int8 [S] of Verdict."""
    return _first(
        (~fence.known, Verdict.UNKNOWN_SESSION),
        (fence.resolve(asked.epoch) != fence.epoch, Verdict.STALE_EPOCH),
    )


def _first(*cases: tuple[Flags, Verdict]) -> NDArray[np.int8]:
    """The first verdict whose condition holds, else OK."""
    verdict = np.zeros(len(cases[0][0]), dtype=np.int8)
    for condition, value in reversed(cases):
        verdict[condition] = value
    return verdict
