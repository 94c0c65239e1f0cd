"""The engine: sessions, what is read of them, and who computes it. It computes nothing itself.

Control (open, push, rewind, the checks of a step) is array work on the caller's thread, under one
lock. A read that passed its checks is a pure function of what it took along, so nothing that
happens to a session later can change its answer; the scheduler's threads compute it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from engram_core.backends.base import Backend
from engram_core.direct import Answer, Ask, DirectReads
from engram_core.dispatch import Dispatcher
from engram_core.engine_types import (
    EPOCH_OPENED,
    EngineLimits,
    OpenRequest,
    PushResult,
    SessionState,
    StepAnswer,
    StepRequest,
)
from engram_core.errors import Conflict, EngramError, SchemaError, StepRefused
from engram_core.fence import Asked
from engram_core.hashing import compress
from engram_core.near import CallSoon
from engram_core.reads import read_hash_ids, read_lookback
from engram_core.requests import check_open, check_tokens
from engram_core.scheduler import Scheduler
from engram_core.sessions import Pushed, SessionPool
from engram_core.stages import Watcher
from engram_core.steps import Steps
from engram_core.waiting import DeadlineTimer

_COUNTS = (
    "sessions_opened",
    "sessions_closed",
    "sessions_expired",
    "tokens_pushed",
    "truncating_pushes",
    "rewinds",
    "positions_cut",
    "waits",
)


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


def _claim(backend: Backend) -> None:
    if not backend.serving.acquire(blocking=False):
        raise Conflict(
            "this backend serves an engine already, and two would write each other's kv slots; "
            "close that engine first, or load another backend",
            expected="a backend that serves no engine",
            got="one that does",
        )


class Engine:
    """Sessions and steps over one backend, for any number of tenants; thread-safe.

    Every method is atomic: refused, it has changed nothing. The backend stays the caller's to
    close, after the engine, and serves no other engine meanwhile: which kv slot holds what is
    known to one.

    gains_by_company: whether asks answered together take less time than one by one: where they wait
        for a device
    clock: seconds, monotonic (idle times, waits); wall_clock_us: microseconds (epochs at open)

    Raises: Conflict: the backend serves an engine that is not closed.
    """

    def __init__(
        self,
        backend: Backend,
        limits: EngineLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_us: Callable[[], int] = _wall_clock_us,
    ) -> None:
        _claim(backend)
        self.backend = backend
        self.geometry = backend.geometry
        self.hash_tables = backend.hash_tables
        self.limits = limits or EngineLimits()
        self._lock = threading.Lock()
        self._is_closed = False
        self.gains_by_company = False
        self._pool = SessionPool(
            self.limits, self.geometry.max_ngram_size, clock=clock, wall_clock_us=wall_clock_us
        )
        self._scheduler = Scheduler(backend, self.limits)
        self._dispatch = Dispatcher(backend, self.limits, self._scheduler)
        self._steps = Steps(self._pool, self._dispatch, self.hash_tables, self.limits, clock)
        self._direct = DirectReads(
            self._pool,
            self._scheduler.store,
            backend,
            self._scheduler.near,
            self._scheduler.near_counts,
        )
        self._timer = DeadlineTimer(clock, self._end_waits)

    # ---- sessions

    def open(self, tenant: str, request: OpenRequest) -> SessionState:
        """Make a session: empty, at a position with look-back, or as a fork.

        An own id opened alike again is found: `created` is False then.

        Raises: SchemaError, BadRequest, TokenOutOfRange, SessionExists, TooManySessions,
            HeldTokensFull, TooManyPositions; for a fork UnknownSession, StaleEpoch,
            HistoryTruncated, NotPushed of its parent.
        """
        opening = check_open(request, self.hash_tables)
        with self._control():
            state = self._pool.open(tenant, opening)
            self._steps.counts["sessions_opened"] += state.created
            return state

    def get(self, tenant: str, session_id: int) -> SessionState:
        """Tell a session's state, and renew it. Raises: UnknownSession."""
        with self._control():
            return self._pool.get(tenant, session_id)

    def push(
        self,
        tenant: str,
        session_id: int,
        position: int,
        token_ids: NDArray[np.int64],
        mask: NDArray[np.bool_] | None = None,
        *,
        epoch: int = EPOCH_OPENED,
        truncate: bool = False,
        ahead: bool = True,
    ) -> PushResult:
        """Push token ids to one session (see `SessionPool.push`).

        ahead: start the kv of what is appended, for all layers, behind every read

        Raises: BadTensor, SchemaError, TooManyTokens, TokenOutOfRange, UnknownSession, StaleEpoch,
            TooManyPositions, HistoryTruncated, Gap, Conflict, HeldTokensFull.
        """
        check_tokens(token_ids, mask, self.limits)
        asked = _ask(session_id, position, len(token_ids), epoch)
        ids = compress(token_ids, mask, self.hash_tables)
        with self._control(), _alone():
            pushed = self._steps.push(tenant, asked, ids, truncate=truncate)
            if ahead:
                layers = tuple(range(self.geometry.num_layers))
                self._steps.work_ahead(tenant, tenant, layers, asked, pushed)
        return _push_result(pushed)

    def rewind(
        self, tenant: str, session_id: int, position: int, epoch: int = EPOCH_OPENED
    ) -> PushResult:
        """Cut a session back to any length >= base (see `SessionPool.rewind`).

        Raises: SchemaError, UnknownSession, StaleEpoch, HistoryTruncated, Gap.
        """
        asked = _ask(session_id, position, 0, epoch)
        with self._control(), _alone():
            pushed = self._pool.rewind(tenant, asked)
            self._steps.counts["rewinds"] += 1
            self._steps.counts["positions_cut"] += int(pushed.removed[0])
            self._steps.changed([(tenant, session_id)])
        return _push_result(pushed)

    def close_session(self, tenant: str, session_id: int, epoch: int | None = None) -> None:
        """Close a session. epoch: None = not checked. Raises: UnknownSession, StaleEpoch."""
        with self._control():
            self._pool.close(tenant, session_id, epoch)
            self._forgotten("sessions_closed", [(tenant, session_id)])

    def close_owner(self, tenant: str, owner: str) -> int:
        """Close every session of one incarnation of a runner; returns how many."""
        with self._control():
            return self._forgotten("sessions_closed", self._pool.close_owner(tenant, owner))

    def close_tenant(self, tenant: str) -> int:
        """Close everything of a revoked key, its kv included; returns how many sessions."""
        with self._control():
            self._dispatch.forget(tenant)
            return self._forgotten("sessions_closed", self._pool.close_tenant(tenant))

    def sweep(self) -> int:
        """Close the sessions idle for too long, and end the waits that are over.

        Returns how many sessions expired.
        """
        with self._control():
            expired = self._forgotten("sessions_expired", self._pool.sweep())
        self._end_waits()
        return expired

    # ---- steps

    def step(self, tenant: str, request: StepRequest) -> Future[StepAnswer]:
        """Push, if there are token_ids, and read: all segments, or none.

        Checks and pushes are done when this returns; the future brings what is read. A residual is
        updated in place, and may still be written while a cancelled step's last piece runs. With
        `wait_ms` a read that nobody has pushed yet waits, and is refused through its future.

        Raises: BadTensor, BadRequest, SchemaError, TooManyTokens, TokenOutOfRange, RowOutOfRange,
            UnknownLayer; StepRefused of what `SessionPool.push` refuses, or of UnknownSession,
            StaleEpoch, TooManyPositions, HistoryTruncated, NotPushed.
        """
        step = self._dispatch.prepare(tenant, request)
        segments = request.segments
        if segments.hash_ids is not None:
            read = read_hash_ids(segments, step.layers, self.hash_tables)
            with self._control():
                self._steps.step_without_session(step, read)
        elif segments.lookback is not None:
            read = read_lookback(segments, self.hash_tables)
            with self._control():
                self._steps.step_without_session(step, read)
        elif segments.token_ids is not None:
            ids = compress(segments.token_ids, segments.mask, self.hash_tables)
            with self._control():
                self._steps.step_push(step, ids)
        else:
            with self._control():
                self._steps.step_read(step)
                self._timer.set(self._steps.waiting.next_deadline_s())
        return step.answer

    def answer(self, asks: Sequence[Ask]) -> list[Answer | None]:
        """Append and answer here and now what is plain of several steps. None: nothing of that one
        was done, and `step` does it, or says what is wrong.

        They are as if they had come one after the other in some order.
        """
        try:
            with self._lock:
                if self._is_closed or self._scheduler.failure is not None:
                    return [None] * len(asks)
                answers = self._direct.answer(asks, self._dispatch.number)
                for ask, answer in zip(asks, answers, strict=True):
                    if answer is not None and ask.token_ids is not None:
                        self._steps.appended(ask, answer.sessions)
        finally:
            self._steps.tell()
        return answers

    # ---- life

    def attach(self, call_soon: CallSoon) -> None:
        """Let the calling thread, an event loop's, run reads of up to `near_tokens` itself.

        call_soon: calls a function on this thread after its present turn
        """
        self._scheduler.attach(call_soon)
        self.gains_by_company = any(read.can_project for read in self.backend.near_reads)

    def watch_stages(self, watcher: Watcher) -> None:
        """Tell the stages of every batch, work ahead included (see `StageClock.watch`)."""
        self._scheduler.clock.watch(watcher)

    @property
    def failure(self) -> EngramError | None:
        """What the backend failed with; nothing is computed any more then."""
        return self._scheduler.failure

    @property
    def running_s(self) -> float:
        """How long the oldest batch in progress has run."""
        return max(lane.running_s for lane in self._scheduler.lanes)

    @property
    def counters(self) -> dict[str, float]:
        """Plain numbers: totals since the start, and what is open, held and waiting now."""
        return {
            **dict.fromkeys(_COUNTS, 0),
            **self._steps.counts,
            "sessions_open": len(self._pool),
            "held_tokens": self._pool.held_tokens,
            "waiting": len(self._steps.waiting),
            **self._scheduler.counters,
        }

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no batch waits or runs, work ahead included. False: not within the timeout."""
        return self._scheduler.drain(timeout_s)

    def close(self) -> None:
        """Refuse new calls and what waits with Draining, end the threads. Twice is once."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            self._steps.refuse_waits(self._scheduler.refusal())
        self._steps.tell()
        self._timer.close()
        self._scheduler.close()
        if not was_closed:
            self.backend.serving.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _control(self) -> Iterator[None]:
        """Hold the lock of an engine that is open, then tell what was answered meanwhile."""
        try:
            with self._lock:
                if self._is_closed or self._scheduler.failure is not None:
                    raise self._scheduler.refusal()
                yield
        finally:
            self._steps.tell()

    def _end_waits(self) -> None:
        with self._lock:
            if self._scheduler.failure is None:
                self._steps.end_waits()
            else:  # not "not pushed": pushes are refused now
                self._steps.refuse_waits(self._scheduler.refusal())
            self._timer.set(self._steps.waiting.next_deadline_s())
        self._steps.tell()

    def _forgotten(self, count: str, names: list[tuple[str, int]]) -> int:
        """Count closed sessions, and refuse the reads that wait for them."""
        self._steps.counts[count] += len(names)
        self._steps.changed(names)
        return len(names)


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse a single segment without the list."""
    try:
        yield
    except StepRefused as refused:
        raise refused.first from None


def _ask(session_id: int, position: int, count: int, epoch: int) -> Asked:
    """One segment of integers that fit. Raises: SchemaError."""
    for name, value in (("session_id", session_id), ("epoch", epoch)):
        if not -(2**63) <= value < 2**63:
            raise SchemaError(f"{name}: expected an int64, got {value}", got=value)
    if not 0 <= position < 2**63:
        raise SchemaError(f"position: expected 0..2^63-1, got {position}", got=position)
    return Asked.one(session_id, position, count, epoch)


def _push_result(pushed: Pushed) -> PushResult:
    return PushResult(
        length=int(pushed.length[0]),
        base=int(pushed.base[0]),
        epoch=int(pushed.epoch[0]),
        appended=int(pushed.appended[0]),
        removed=int(pushed.removed[0]),
    )
