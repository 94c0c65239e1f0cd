"""Sessions: the compressed ids of every sequence by absolute position, and their fence.

Everything on S segments at once is array operations. A session's history is addressed by
position, so its windows never depend on how the ids came: in what chunks, after which rewinds, in
which fork.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engram_core.engine_types import MAX_POSITIONS, EngineLimits, SessionState
from engram_core.errors import EngramError, StepRefused, TooManyPositions
from engram_core.fence import (
    Asked,
    Fence,
    judge_close,
    judge_fork,
    judge_push,
    judge_read,
    judge_rewind,
    overlap,
)
from engram_core.pages import PAGE, Ints, PagedIds, page_end, page_start, spread
from engram_core.refusals import (
    duplicates,
    held_full,
    refusals,
    session_exists,
    too_many_held,
    too_many_sessions,
    unknown_session,
)
from engram_core.registry import Opening, Registry

_LENGTH, _BASE, _EPOCH, _OPENED = range(4)


@dataclass(frozen=True)
class Pushed:
    """What a push did to S sessions: int64 [S] each.

    rows: of the pool; length, base, epoch: afterwards
    appended: positions written, the last of each segment; removed: positions cut
    """

    rows: Ints
    length: Ints
    base: Ints
    epoch: Ints
    appended: Ints
    removed: Ints


@dataclass(frozen=True)
class Found:
    """S sessions as a read finds them. rows: int64 [S] of the pool; verdict: int8 [S]."""

    rows: Ints
    fence: Fence
    verdict: NDArray[np.int8]


Segment = tuple[int, int, int, int]
"""Session id, position, number of tokens, epoch (EPOCH_OPENED = left out): int64 each."""


class Spot(NamedTuple):
    """A session as a small step leaves it. row: of the pool"""

    row: int
    length: int
    base: int
    epoch: int


class SessionMemory(Structure):
    """engram_cpu_sessions: where a pool's sessions lie, for small steps judged in C++."""

    _fields_ = (
        *((name, c_void_p) for name in ("fence", "last_used_s", "ids", "starts")),
        *(
            (name, c_int64)
            for name in ("num_rows", "pages_per_row", "held_tokens", "max_held_tokens")
        ),
    )


class SessionPool:
    """All sessions of all tenants. Not thread-safe: the engine's lock guards it.

    A refused call changes nothing, idle times included. A session id names one life of a session:
    a message without an epoch cannot be told from one to a former life of the same id, so whoever
    opens again after an expiry takes a new id.

    rows_of: see `Registry`; address: of a `SessionMemory`, for whoever changes them in C++
    clock: seconds, monotonic (idle times); wall_clock_us: microseconds (epochs at open)
    """

    def __init__(
        self,
        limits: EngineLimits,
        max_ngram_size: int,
        *,
        clock: Callable[[], float],
        wall_clock_us: Callable[[], int],
    ) -> None:
        self.clock = clock
        self._limits = limits
        self._num_before = max_ngram_size - 1
        self._wall_clock_us = wall_clock_us
        self._last_epoch = 0
        self._registry = Registry(limits.max_sessions, clock)
        self.rows_of = self._registry.rows_of
        self._fence = np.zeros((4, limits.max_sessions), dtype=np.int64)
        # A session may waste most of its first page and of its last one: with two pages each the
        # limit that is met first is always `max_held_tokens`.
        num_pages = limits.max_held_tokens // PAGE + 2 * limits.max_sessions
        self._ids = PagedIds(limits.max_sessions, num_pages, MAX_POSITIONS)
        self._memory = SessionMemory(
            self._fence.ctypes.data,
            self._registry.last_used_address,
            self._ids.address,
            self._ids.starts_address,
            limits.max_sessions,
            self._ids.pages_per_row,
            max_held_tokens=limits.max_held_tokens,
        )
        self.address = addressof(self._memory)

    def __len__(self) -> int:
        return len(self._registry)

    @property
    def held_tokens(self) -> int:
        """Ids of all sessions."""
        held: int = self._memory.held_tokens
        return held

    def open(self, tenant: str, opening: Opening) -> SessionState:
        """Make a session, or find the one that an alike opening made (`created` is False then).

        Raises: SessionExists, TooManySessions, HeldTokensFull, TooManyPositions; for a fork also
            UnknownSession, StaleEpoch, HistoryTruncated, NotPushed of its parent.
        """
        present = self._registry.row(tenant, opening.session_id)
        if present is not None:
            return self._find_alike(present, opening)
        parent = None
        position = opening.position or 0
        base = 0 if position <= self._num_before else position
        if opening.fork_of is not None:
            parent, position, base = self._check_fork(tenant, opening)
        first = self._first(base)
        self._check_room(position, position - first)

        row = self._registry.add(tenant, opening)
        pages = page_start(np.array([first])), page_end(np.array([position]))
        self._ids.resize(np.array([row]), *pages)
        if parent is None:
            lookback = np.array(opening.lookback, dtype=np.int32)
            self._ids.write(np.array([row]), np.arange(first, position), lookback)
        else:
            self._ids.copy(parent, row, range(int(pages[0][0]), int(pages[1][0])))
            self._registry.touch(parent)
        epoch = self._new_epoch()
        self._fence[:, row] = position, base, epoch, epoch
        self._memory.held_tokens += position - first
        return self._state(row, created=True)

    def get(self, tenant: str, session_id: int) -> SessionState:
        """Tell a session's state. Raises: UnknownSession."""
        row = self._registry.row(tenant, session_id)
        if row is None:
            raise unknown_session(session_id)
        self._registry.touch(row)
        return self._state(row)

    def push(
        self, tenant: str, asked: Asked, ids: NDArray[np.int32], *, truncate: bool = False
    ) -> Pushed:
        """Push ids to S sessions: to all of them, or to none if one is refused.

        Ids already there must be equal and are skipped, the rest is appended. truncate: each
        session ends exactly at position + count afterwards: what differs is replaced, what is
        longer is cut, and the epoch moves. A stale push of ids that are all in place is answered
        and changes nothing (a truncating one only if the session also ends at position + count).

        ids: int32 [T]  compressed, DEAD = dead; T = sum(asked.count)

        Raises: StepRefused of UnknownSession, StaleEpoch, TooManyPositions, HistoryTruncated, Gap,
            Conflict, HeldTokensFull or DuplicateSession.
        """
        rows, fence = self._look_up(tenant, asked)
        if not truncate and (plain := self._append_all(rows, fence, asked, ids)) is not None:
            return plain
        held = overlap(fence, asked)
        same = self._ids.leading_equal(rows, asked.position, asked.count, ids, held=held)
        judged = judge_push(fence, asked, held, same, truncate=truncate)
        growth = judged.length - fence.length
        _refuse(duplicates(fence, asked) + refusals(judged.verdict, fence, asked, same))
        limit = self._limits.max_held_tokens
        _refuse(too_many_held(fence, growth, held=self.held_tokens, limit=limit))

        appended = np.where(judged.moves, asked.count - same, 0)
        removed = np.zeros_like(rows)
        if truncate:
            cut = np.maximum(fence.length - asked.position - same, 0)
            removed = np.where(judged.moves, cut, 0)
            self._move_epoch(rows[judged.moves])
        self._set_length(rows, fence, judged.length)
        self._ids.write_last(rows, asked.position, asked.count, ids, written=appended)
        return self._pushed(rows, appended, removed)

    def _append_all(
        self, rows: Ints, fence: Fence, asked: Asked, ids: NDArray[np.int32]
    ) -> Pushed | None:
        """Push what every session takes at its end, which is nearly all that is pushed: no look at
        what is held. None: it is not that, and nothing was changed."""
        position, count = asked.position, asked.count
        end = position + count
        if (
            not fence.known.all()
            or (position != fence.length).any()
            or (fence.resolve(asked.epoch) != fence.epoch).any()
            or end.max(initial=0) > MAX_POSITIONS
            or self.held_tokens + len(ids) > self._limits.max_held_tokens
            or len(set(rows.tolist())) < len(rows)
        ):
            return None
        before, after = page_end(fence.length), page_end(end)
        if (before != after).any():
            self._ids.resize(rows, before, after)
        self._fence[_LENGTH, rows] = end
        self._memory.held_tokens += len(ids)
        self._ids.write(np.repeat(rows, count), spread(position, count), ids)
        self._registry.touch(rows)
        return Pushed(rows, end, fence.base, fence.epoch, count, np.zeros_like(rows))

    def rewind(self, tenant: str, asked: Asked) -> Pushed:
        """Cut sessions back to `asked.position`, any length >= base; the epoch moves.

        A stale rewind to the present length is answered and changes nothing.

        Raises: StepRefused of UnknownSession, StaleEpoch, HistoryTruncated, Gap.
        """
        rows, fence = self._look_up(tenant, asked)
        judged = judge_rewind(fence, asked)
        _refuse(refusals(judged.verdict, fence, asked))
        self._set_length(rows, fence, judged.length)
        self._move_epoch(rows[judged.moves])
        return self._pushed(rows, np.zeros_like(rows), fence.length - judged.length)

    def read(self, tenant: str, asked: Asked) -> Found:
        """Judge reads of S segments; a session may be named by many of them."""
        rows, fence = self._look_up(tenant, asked)
        verdict = judge_read(fence, asked)
        if not verdict.any():
            self._registry.touch(rows)
        return Found(rows, fence, verdict)

    def renew(self, tenant: str, asked: Asked) -> None:
        """Renew sessions that somebody waits for."""
        rows = self._registry.rows(tenant, asked.session_id)
        self._registry.touch(rows[rows >= 0])

    def windows(self, rows: Ints, position: Ints, count: Ints) -> NDArray[np.int32]:
        """Look ids up by position, before blocking.

        rows, position, count: int64 [S]  held positions at or above each session's base
        Returns: int32 [T, max_ngram_size]  newest first; DEAD = dead, or before the start
        """
        return self._ids.look_back(rows, position, count, self._num_before)

    def close(self, tenant: str, session_id: int, epoch: int | None = None) -> None:
        """Close a session. epoch: None = not checked. Raises: UnknownSession, StaleEpoch."""
        row = self._registry.row(tenant, session_id)
        if row is None:
            raise unknown_session(session_id)
        if epoch is not None:
            asked = Asked.one(session_id, 0, 0, epoch)
            _, fence = self._look_up(tenant, asked)
            for _, error in refusals(judge_close(fence, asked), fence, asked):
                raise error
        self._release([row])

    def close_owner(self, tenant: str, owner: str) -> list[tuple[str, int]]:
        """Close every session opened with this owner; returns (tenant, id) of each."""
        return self._release(self._registry.of_owner(tenant, owner))

    def close_tenant(self, tenant: str) -> list[tuple[str, int]]:
        """Close every session of a tenant; returns (tenant, id) of each."""
        return self._release(self._registry.of_tenant(tenant))

    def sweep(self) -> list[tuple[str, int]]:
        """Close the sessions idle for longer than `session_ttl_s`; returns (tenant, id) of each."""
        return self._release(self._registry.idle(self._limits.session_ttl_s))

    # ---- looking up

    def _look_up(self, tenant: str, asked: Asked) -> tuple[Ints, Fence]:
        rows = self._registry.rows(tenant, asked.session_id)
        return rows, Fence(rows >= 0, *self._fence[:, rows])

    def _first(self, base: int) -> int:
        """The first position held: below a base lies its look-back."""
        return max(base - self._num_before, 0)

    def _state(self, row: int, *, created: bool = False) -> SessionState:
        length, base, epoch, _ = self._fence[:, row].tolist()
        last = np.arange(max(self._first(base), length - self._num_before), length)
        return SessionState(
            session_id=self._registry.session_id(row),
            length=length,
            base=base,
            epoch=epoch,
            owner=self._registry.opening(row).owner,
            compressed_lookback=tuple(self._ids.read(np.array([row]), last).tolist()),
            expires_in_s=self._limits.session_ttl_s,
            created=created,
        )

    def _pushed(self, rows: Ints, appended: Ints, removed: Ints) -> Pushed:
        self._registry.touch(rows)
        length, base, epoch, _ = self._fence[:, rows]
        return Pushed(rows, length, base, epoch, appended, removed)

    # ---- checks

    def _find_alike(self, row: int, opening: Opening) -> SessionState:
        if self._registry.opening(row) != opening:
            length, _, epoch, _ = self._fence[:, row].tolist()
            raise session_exists(self._registry.session_id(row), length, epoch)
        self._registry.touch(row)
        return self._state(row)

    def _check_fork(self, tenant: str, opening: Opening) -> tuple[int, int, int]:
        """Returns the parent's row, and position and base of the fork."""
        asked = Asked.one(opening.fork_of or 0, opening.position or 0, 0, opening.epoch)
        rows, fence = self._look_up(tenant, asked)
        if opening.position is None:
            asked.position[:] = fence.length
        for _, error in refusals(judge_fork(fence, asked), fence, asked):
            raise error
        return int(rows[0]), int(asked.position[0]), int(fence.base[0])

    def _check_room(self, position: int, held: int) -> None:
        if position > MAX_POSITIONS:
            raise TooManyPositions(
                f"position: expected at most {MAX_POSITIONS}, got {position}",
                expected=MAX_POSITIONS,
                got=position,
            )
        if self._registry.is_full:
            raise too_many_sessions(self._registry.num_rows)
        if self.held_tokens + held > self._limits.max_held_tokens:
            raise held_full(held, self.held_tokens, self._limits.max_held_tokens)

    # ---- changes

    def _set_length(self, rows: Ints, fence: Fence, length: Ints) -> None:
        self._ids.resize(rows, page_end(fence.length), page_end(length))
        self._fence[_LENGTH, rows] = length
        self._memory.held_tokens += int((length - fence.length).sum())

    def _move_epoch(self, rows: Ints) -> None:
        if len(rows):
            self._fence[_EPOCH, rows] += 1
            self._last_epoch = max(self._last_epoch, int(self._fence[_EPOCH, rows].max()))

    def _new_epoch(self) -> int:
        """A number that no session ever had as its epoch, by its opening or by a cut."""
        self._last_epoch = max(self._wall_clock_us(), self._last_epoch + 1)
        return self._last_epoch

    def _release(self, rows: list[int]) -> list[tuple[str, int]]:
        index = np.array(rows, dtype=np.int64)
        length, base, _, _ = self._fence[:, index]
        first = np.maximum(base - self._num_before, 0)
        self._ids.resize(index, page_end(length), page_start(first))
        self._memory.held_tokens -= int((length - first).sum())
        return self._registry.remove(rows)


def _refuse(failing: list[tuple[int, EngramError]]) -> None:
    """Refuse a step if a segment fails. Of one segment's errors the first in the list is told."""
    if failing:
        first = dict(reversed(failing))
        raise StepRefused(sorted(first.items()))
