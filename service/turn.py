"""What is asked in one turn of the event loop, answered together: one wait for the device for all.

A request that nobody else's stands beside is answered in the call that brings it: the end of the
turn is some microseconds away, for which it would gain nothing. All calls come from the event
loop's thread.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import NamedTuple, Protocol

from engram_core.direct import BATCH_TOKENS, Answer, Ask
from engram_core.engine import Engine
from engram_core.errors import EngramError
from service.bodies import Buffer
from service.state import Model, ServiceState

AT_ONCE_BYTES = 240 << 10
"""Larger bodies do not come whole in one read of an event loop, nor are their answers copied behind
their head for less than an exchange costs."""

PLACE_BYTES = 3 << 20
"""A turn of 64 tokens of 41 KB; below what plain memory keeps warm (`host_memory.py`)."""

_ALIGNMENT = 64

Told = Answer | Exception | None
"""What the engine answered; None: it did nothing, or the client is gone; or a fault."""

Tell = Callable[[Told], None]


class Line(Protocol):
    """A connection. is_waiting: whether something is asked on it that is answered in this turn"""

    loop: AbstractEventLoop
    is_waiting: bool

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be sent on it any more."""

    def abort(self) -> None:
        """Cut it at once."""


class Place:
    """Where residuals of one turn lie, in the memory of the model that is served.

    One serves every connection: between a residual's copy into it and the answer's copy out of it,
    behind its head, nothing is awaited.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._model: Model | None = None
        self._bytes = memoryview(b"")
        self._address = self._end = 0

    def put(self, model: Model, data: Buffer) -> tuple[memoryview, int] | None:
        """Copy bytes behind what is there, and return where they are. None: there is no room."""
        begin = self._end
        end = begin + len(data)
        if end > PLACE_BYTES:
            return None
        if self._model is not model:
            try:
                self._bytes = self._state.pool.memory.buffer(PLACE_BYTES).data
            except EngramError:
                return None
            self._address = addressof(c_char.from_buffer(self._bytes))
            self._model = model
        place = self._bytes[begin:end]
        place[:] = data
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return place, self._address + begin

    def clear(self) -> None:
        """Forget what is there."""
        self._end = 0


class _Asked(NamedTuple):
    line: Line
    engine: Engine
    ask: Ask
    tell: Tell


class Turn:
    """One for an app."""

    def __init__(self, state: ServiceState) -> None:
        self._place = Place(state)
        self._asked: list[_Asked] = []
        self._num_tokens = 0
        self._last = 0  # who asked last: a line's identity

    def put(self, model: Model, data: Buffer) -> tuple[memoryview, int] | None:
        """Copy a residual to where it may lie until its ask, made next, is told."""
        there = self._place.put(model, data)
        if there is None and self._asked:
            self.run()
            return self._place.put(model, data)
        return there

    def take(self, line: Line, engine: Engine, ask: Ask, tell: Tell) -> None:
        """Have an ask answered: now, or at the end of this turn with those of other lines."""
        is_alone, self._last = id(line) == self._last, id(line)
        if not self._asked:
            if is_alone or not engine.gains_by_company:
                answer: Told
                try:
                    (answer,) = engine.answer((ask,))
                except Exception as fault:
                    answer = fault
                tell(answer)
                self._place.clear()
                return
            line.loop.call_soon(self.run)
        self._asked.append(_Asked(line, engine, ask, tell))
        line.is_waiting = True
        self._num_tokens += sum([segment[2] for segment in ask.segments])
        if self._num_tokens >= BATCH_TOKENS:
            self.run()

    def run(self) -> None:
        """Answer what is asked so far."""
        asked, self._asked, self._num_tokens = self._asked, [], 0
        for each in asked:
            each.line.is_waiting = False
        while asked:  # one round, but where another model came to be served in this turn
            engine = asked[0].engine
            self._answer([each for each in asked if each.engine is engine])
            asked = [each for each in asked if each.engine is not engine]

    def _answer(self, asked: list[_Asked]) -> None:
        """Answer asks of one engine."""
        gone = [each for each in asked if each.line.is_gone]
        wanted = [each for each in asked if not each.line.is_gone] if gone else asked
        answers: Sequence[Told]
        try:
            answers = asked[0].engine.answer([each.ask for each in wanted])
        except Exception as fault:
            answers = [fault] * len(wanted)
        for each, answer in zip(wanted, answers, strict=True):
            self._tell(each, answer)
        for each in gone:
            self._tell(each, None)
        if not self._asked:
            self._place.clear()

    def _tell(self, asked: _Asked, answer: Told) -> None:
        try:
            asked.tell(answer)
        except Exception as fault:  # its own: the others are told
            told = {"message": "an answer was not told", "exception": fault}
            asked.line.loop.call_exception_handler(told)
            asked.line.abort()
