"""Steps on sessions: pushes, reads, and the reads that wait for a push."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from engram_core.direct import Ask
from engram_core.dispatch import Dispatcher, State, Step
from engram_core.engine_types import EngineLimits, Output, StepAnswer
from engram_core.errors import EngramError, NotPushed, StepRefused
from engram_core.fence import Asked
from engram_core.geometry import EngramHashTables
from engram_core.hashing import DEAD
from engram_core.jobs import Read, settle
from engram_core.pages import Ints
from engram_core.reads import read_history
from engram_core.refusals import refusals
from engram_core.sessions import Pushed, SessionPool, Spot
from engram_core.waiting import Wait, WaitingReads


class Steps:
    """What pushes and reads do to the session pool, and what of it goes to the scheduler.

    The engine's lock guards everything but `tell`.
    """

    def __init__(
        self,
        pool: SessionPool,
        dispatch: Dispatcher,
        tables: EngramHashTables,
        limits: EngineLimits,
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.waiting = WaitingReads()
        self._pool = pool
        self._dispatch = dispatch
        self._tables = tables
        self._ahead_tokens = limits.ahead_tokens
        self._clock = clock
        self._outcomes: deque[tuple[Step, StepAnswer | EngramError]] = deque()

    def push(self, tenant: str, asked: Asked, ids: NDArray[np.int32], *, truncate: bool) -> Pushed:
        """Push to S sessions, then try the reads that wait for them. ids: int32 [T]."""
        pushed = self._pool.push(tenant, asked, ids, truncate=truncate)
        self.counts["tokens_pushed"] += int(pushed.appended.sum())
        self.counts["truncating_pushes"] += truncate
        self.counts["positions_cut"] += int(pushed.removed.sum())
        self.changed((tenant, session_id) for session_id in asked.session_id.tolist())
        return pushed

    def appended(self, ask: Ask, sessions: list[Spot]) -> None:
        """Note plain appends that were made directly: try the reads that wait for them, and work
        ahead."""
        assert ask.token_ids is not None
        self.counts["tokens_pushed"] += len(ask.token_ids)
        if len(self.waiting):
            self.changed([(ask.tenant, segment[0]) for segment in ask.segments])
        if not ask.ahead or len(ask.token_ids) > self._ahead_tokens:
            return
        _, position, count, _ = (
            np.array(part, dtype=np.int64) for part in zip(*ask.segments, strict=True)
        )
        rows = np.array([spot.row for spot in sessions], dtype=np.int64)
        windows = self._pool.windows(rows, position, count)
        read, longest = read_history(windows, self._tables), int(count.max())
        self._dispatch.work_ahead(ask.tenant, ask.client, ask.ahead, read, longest=longest)

    def work_ahead(
        self,
        tenant: str,
        client: Hashable,
        layers: tuple[int, ...],
        asked: Asked,
        pushed: Pushed,
    ) -> None:
        """Start the kv of what a push appended, if it is not too long to be worth it."""
        num_tokens = int(pushed.appended.sum())
        if 0 < num_tokens <= self._ahead_tokens:
            position = asked.position + asked.count - pushed.appended
            windows = self._pool.windows(pushed.rows, position, pushed.appended)
            read = read_history(windows, self._tables)
            longest = int(pushed.appended.max())
            self._dispatch.work_ahead(tenant, client, layers, read, longest=longest)

    def step_without_session(self, step: Step, read: Read) -> None:
        """Answer a step on look-back or hash_ids. Output none fills the store from look-back."""
        request = step.request
        if request.output is Output.NONE and read.windows is not None and len(read):
            longest = int(request.segments.count.max())
            self._dispatch.work_ahead(
                step.tenant, request.client, step.layers, read, longest=longest
            )
        none = np.full(len(request.segments.count), -1, dtype=np.int64)
        self._submit(step, read, State(none, none, none))

    def step_push(self, step: Step, ids: NDArray[np.int32]) -> None:
        """Push, then read what was pushed. ids: int32 [T]."""
        request, asked = step.request, step.asked
        pushed = self.push(step.tenant, asked, ids, truncate=request.truncate)
        if request.output is Output.NONE:
            read = Read(dead=ids == DEAD)
            if request.ahead:
                self.work_ahead(step.tenant, request.client, step.layers, asked, pushed)
        else:
            read = self._history(pushed.rows, asked)
        self._submit(step, read, State(pushed.length, pushed.base, pushed.epoch))

    def step_read(self, step: Step) -> None:
        """Read what is held, or wait for it if it may still come.

        Raises: StepRefused.
        """
        if not (failing := self._try_read(step)):
            return
        wait_ms = step.request.wait_ms
        if not wait_ms or not _may_come(failing):
            raise StepRefused(failing)
        self._pool.renew(step.tenant, step.asked)
        self.waiting.add(Wait(step, self._clock() + wait_ms / 1000))
        self.counts["waits"] += 1

    def changed(self, names: Iterable[tuple[str, int]]) -> None:
        """Try the waiting reads of changed sessions again: (tenant, session id) of each."""
        for wait in self.waiting.on(names):
            self._retry(wait)

    def end_waits(self) -> None:
        """Refuse the reads that have waited long enough."""
        for wait in self.waiting.due(self._clock()):
            self._retry(wait, is_over=True)

    def refuse_waits(self, error: EngramError) -> None:
        """Refuse every read that waits."""
        self._outcomes += ((wait.step, error) for wait in self.waiting.clear())

    def tell(self) -> None:
        """Resolve what needs no batch. Not under the lock: callbacks of futures run here."""
        while self._outcomes:
            try:
                step, outcome = self._outcomes.popleft()
            except IndexError:  # another thread tells the last one
                return
            settle(step.answer, outcome)

    def _retry(self, wait: Wait, *, is_over: bool = False) -> None:
        try:
            failing = [] if wait.step.answer.done() else self._try_read(wait.step)
            refused = is_over or not _may_come(failing)
            error: EngramError | None = StepRefused(failing) if failing and refused else None
        except EngramError as closed:
            failing, error = [], closed
        if error is not None:
            self._outcomes.append((wait.step, error))
        if error is not None or not failing:
            self.waiting.remove(wait)

    def _try_read(self, step: Step) -> list[tuple[int, EngramError]]:
        """Submit a read, or tell why it cannot be answered now."""
        asked = step.asked
        found = self._pool.read(step.tenant, asked)
        failing = refusals(found.verdict, found.fence, asked)
        if not failing:
            fence = found.fence
            state = State(fence.length, fence.base, fence.epoch)
            self._submit(step, self._history(found.rows, asked), state)
        return failing

    def _submit(self, step: Step, read: Read, state: State) -> None:
        answered = self._dispatch.submit(step, read, state)
        if answered is not None:
            self._outcomes.append((step, answered))

    def _history(self, rows: Ints, asked: Asked) -> Read:
        return read_history(self._pool.windows(rows, asked.position, asked.count), self._tables)


def _may_come(failing: list[tuple[int, EngramError]]) -> bool:
    """Whether all that is missing may still be pushed."""
    return all(isinstance(error, NotPushed) for _, error in failing)
