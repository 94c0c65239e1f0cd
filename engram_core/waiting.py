"""Reads that wait for ids, or for an epoch, that another rank is about to push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engram_core.dispatch import Step


@dataclass(eq=False)
class Wait:
    """A read that none of its refusals so far is final for. deadline_s: on the engine's clock."""

    step: Step
    deadline_s: float

    @property
    def names(self) -> set[tuple[str, int]]:
        """(tenant, session id) of every session it reads."""
        return {(self.step.tenant, i) for i in self.step.asked.session_id.tolist()}


class WaitingReads:
    """Waits by the sessions they name. Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._by_session: dict[tuple[str, int], set[Wait]] = {}
        self._waits: set[Wait] = set()

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, wait: Wait) -> None:
        """Let a read wait."""
        self._waits.add(wait)
        for name in wait.names:
            self._by_session.setdefault(name, set()).add(wait)

    def remove(self, wait: Wait) -> None:
        """Forget a wait; its step is not answered by this."""
        self._waits.discard(wait)
        for name in wait.names:
            waits = self._by_session[name]
            waits.discard(wait)
            if not waits:
                del self._by_session[name]

    def on(self, names: Iterable[tuple[str, int]]) -> set[Wait]:
        """The waits that name one of these sessions."""
        if not self._waits:
            return set()
        return {wait for name in names for wait in self._by_session.get(name, ())}

    def due(self, now_s: float) -> list[Wait]:
        """The waits whose deadline has come, and those that were cancelled."""
        return [w for w in self._waits if w.deadline_s <= now_s or w.step.answer.done()]

    def next_deadline_s(self) -> float | None:
        """The earliest deadline, None if nothing waits."""
        return min((wait.deadline_s for wait in self._waits), default=None)

    def clear(self) -> list[Wait]:
        """Forget every wait; returns them."""
        waits = list(self._waits)
        self._waits.clear()
        self._by_session.clear()
        return waits


class DeadlineTimer:
    """Calls `fire` on a thread of its own when a deadline has come; sleeps until then.

    clock: seconds, monotonic
    """

    def __init__(self, clock: Callable[[], float], fire: Callable[[], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._changed = threading.Condition()
        self._deadline_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="engram-waits", daemon=True)
        self._thread.start()

    def set(self, deadline_s: float | None) -> None:
        """Fire once at a deadline instead of the one set before; None = not at all."""
        if deadline_s == self._deadline_s:
            return
        with self._changed:
            before, self._deadline_s = self._deadline_s, deadline_s
            # Waking the thread costs the caller the interpreter, up to a millisecond: only if it
            # would sleep too long. When it wakes too early it looks, and sleeps on.
            if deadline_s is not None and (before is None or deadline_s < before):
                self._changed.notify()

    def close(self) -> None:
        """End the thread, and wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while self._wait():
            self._fire()

    def _wait(self) -> bool:
        """Wait for the deadline; False once closed."""
        with self._changed:
            while not self._is_closed:
                if self._deadline_s is None:
                    self._changed.wait()
                    continue
                left = self._deadline_s - self._clock()
                if left <= 0:
                    self._deadline_s = None
                    return True
                self._changed.wait(left)
            return False
