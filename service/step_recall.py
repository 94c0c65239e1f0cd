"""Steps whose whole head was checked before: a runner's are the same from step to step.

As `recall.py` for residual reads, with the request line remembered too: sessions and positions of a
step are in its body. A step of a few segments that the engine can make here and now is answered in
the turn that brings it; any other begins as it would behind its parsed head. The body is looked at
every time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from random import getrandbits
from time import perf_counter

from engram_core.direct import Answer, Ask
from engram_core.engine_types import Output
from service import operations, plain_steps, steps
from service.bodies import Buffer
from service.calls import Call
from service.desk import ANSWER_HEADERS
from service.exchange import Came, Head, Line, answer_block
from service.heads import END, HEAD_BYTES, Known, Memory, is_plain, told_of
from service.landing import LANDING_BYTES
from service.reads import StepRead, TensorRead
from service.turn import AT_ONCE_BYTES, Told

_LINE = re.compile(rb"POST /v1/step\?[!-~]{1,200} HTTP/1\.1(?=\r\n)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known(Known):
    query: dict[str, str]
    options: steps.StepOptions


class StepRecall(Memory[_Known]):
    """Remembered heads of steps; one for an app."""

    operation = operations.STEP

    def answer(self, data: Buffer, line: Line) -> bool:
        """Have a request that came whole answered, or begin it; False: nothing was done, parse it.

        data: what came on a connection with nothing before it; what is looked at later is copied
        """
        begun_s = perf_counter()
        head = bytes(data[:HEAD_BYTES])
        found = _LINE.match(head)
        if found is None:
            return False
        begin = head.find(END, found.end()) + len(END)
        known = self._recall(line, head[:begin])
        if known is None:
            return False
        num_bytes = len(data) - begin
        if num_bytes == known.num_bytes and self._take(known, data, begin, line, begun_s):
            return True
        return num_bytes <= known.num_bytes and self._begin(known, data, begin, line)

    def keep(self, head: Head, line: Line, call: Call, read: object) -> None:
        """Remember a head that was checked in full."""
        if not (isinstance(read, StepRead) and call.key):
            return
        block = b"POST " + head.url + b" HTTP/1.1" + head.block
        if not (is_plain(head) and _LINE.match(block)):
            return
        num_bytes = call.inbox.length or 0
        is_placed = read.options.output is Output.RESIDUAL and call.shared is None
        is_placed &= 0 < num_bytes <= LANDING_BYTES
        known = _Known(
            key=call.key,
            model=read.model,
            headers=call.headers,
            told=told_of(head),
            num_bytes=num_bytes,
            is_placed=is_placed,
            query=call.query,
            options=read.options,
        )
        self._remember(line, block, known)

    def _take(self, known: _Known, data: Buffer, begin: int, line: Line, begun_s: float) -> bool:
        """Have the engine asked in this turn; False: nothing was done."""
        model, options = known.model, known.options
        geometry, exchanges = model.checkpoint.geometry, self._exchanges
        if not known.is_placed or line.transport.get_write_buffer_size():
            return False
        body = memoryview(data)[begin:]
        step = plain_steps.read(body, options, geometry, model.limits.near_tokens)
        if step is None or not self._state.pool.has_room(known.num_bytes):
            return False
        at, end = begin + step.begin, begin + step.begin + len(step.residual)
        placed = exchanges.place(line, model, Came(data, begin, known.num_bytes), at, end)
        if placed is None:
            return False
        residual, address = placed
        before, after = bytes(data[:at]), bytes(data[end:])
        received_s = perf_counter()
        ask = Ask(
            known.key.name,
            step.segments,
            step.token_ids,
            geometry.layer_index(options.layers[0]),
            address,
            step.spec[0] == "F32",
        )

        def tell(answer: Told) -> None:
            if isinstance(answer, Answer):
                told = plain_steps.encode(step, residual, options, answer)
                self._tell(known, told, line, answer.gate_s, (begun_s, received_s))
                return
            again = b"".join((before, residual, after))
            if not self._begin(known, again, begin, line, answer):
                line.parse(again)

        exchanges.turn.take(line, model.engine, ask, tell)
        return True

    def _tell(
        self,
        known: _Known,
        buffers: list[Buffer],
        line: Line,
        gate_s: float,
        times: tuple[float, float],
    ) -> None:
        """Write an answer that the engine gave here and now."""
        transport, (begun_s, received_s) = line.transport, times
        checked_s = perf_counter()
        receive_s = received_s - begun_s
        check_s = checked_s - received_s - gate_s
        num_bytes = sum(map(len, buffers))
        timing = ANSWER_HEADERS % (
            getrandbits(64), receive_s * 1e3, check_s * 1e3, gate_s * 1e3,
        )  # fmt: skip
        beginning = self._exchanges.begin_answer(200, line)
        head = beginning, _answer_lines(num_bytes), timing
        # What was placed is of this turn, and an answer may be a little longer than its request.
        if min(num_bytes, known.num_bytes) <= AT_ONCE_BYTES:
            transport.write(b"".join((*head, *buffers)))
        else:
            transport.writelines([b"".join(head), *buffers])
        self._note(known, line, num_bytes, gate_s, (*times, checked_s))

    def _begin(
        self, known: _Known, data: Buffer, begin: int, line: Line, fault: Exception | None = None
    ) -> bool:
        """Begin an exchange (see `Memory._admit`)."""

        def make(call: Call) -> TensorRead:
            call.query = known.query
            return StepRead(call, replace(known.options, client=call.client))

        return self._admit(known, Came(data, begin, known.num_bytes), line, make, fault)


@lru_cache(256)
def _answer_lines(num_bytes: int) -> bytes:
    return answer_block({}, num_bytes)
