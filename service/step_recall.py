"""Steps whose whole head was checked before: a runner's are the same from step to step.

As `recall.py` for residual reads, with the request line remembered too: sessions and positions of a
step are in its body. A step of a few segments that the engine can make here and now is answered in
the turn that brings it; any other begins as it would behind its parsed head. Keys, admission and
the state of the service are looked at every time, and so is the body.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from random import getrandbits
from time import perf_counter

from engram_core.direct import Answer, Ask
from engram_core.engine_types import Output
from engram_core.errors import EngramError
from service import operations, steps
from service.access import Key
from service.bodies import Buffer, Headers, Inbox
from service.calls import Call
from service.desk import ANSWER_HEADERS, GONE, AtOnce, Desk
from service.exchange import Came, Exchanges, Head, Line, Refusal, answer_block
from service.landing import LANDING_BYTES
from service.reads import StepRead, TensorRead
from service.recall import END, HEAD_BYTES, MAX_KNOWN, PLAIN, headers_of
from service.state import Model, ServiceState
from service.turn import AT_ONCE_BYTES, Told

_LINE = re.compile(rb"POST /v1/step\?[!-~]{1,200} HTTP/1\.1(?=\r\n)")


@dataclass(frozen=True, slots=True)
class _Known:
    """What a head decides.

    told: of its headers, what the body's reception depends on; num_bytes: of the body on the socket
    is_placed: whether it may be answered in the turn it came in
    """

    key: Key
    headers: dict[str, str]
    query: dict[str, str]
    model: Model
    options: steps.StepOptions
    told: Headers
    num_bytes: int
    is_placed: bool


class StepRecall:
    """Remembered heads of steps; one for an app."""

    def __init__(self, state: ServiceState, desk: Desk, exchanges: Exchanges) -> None:
        self._state, self._desk, self._exchanges = state, desk, exchanges
        self._known: dict[tuple[bool, bytes], _Known] = {}

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
        known = self._known.get((line.is_unix, head[:begin]))
        if known is None or not self._state.serves(known.model):
            return False
        try:
            self._state.access.confirm(known.key)
        except EngramError:
            return False
        num_bytes = len(data) - begin
        if num_bytes == known.num_bytes and self._take(known, data, begin, line, begun_s):
            return True
        return num_bytes <= known.num_bytes and self._begin(known, data, begin, line)

    def keep(self, head: Head, line: Line, call: Call, read: object) -> None:
        """Remember a head that was checked in full."""
        if not (isinstance(read, StepRead) and call.key and head.keep_alive):
            return
        block, first = head.block, b"POST " + head.url + b" HTTP/1.1"
        if not all(name in PLAIN for name, _ in head.headers) or not _LINE.match(first + block):
            return
        if headers_of(block) != head.headers:
            return  # the parser saw something else in these bytes: they are not looked up
        num_bytes = call.inbox.length or 0
        is_placed = read.options.output is Output.RESIDUAL and call.shared is None
        is_placed &= 0 < num_bytes <= LANDING_BYTES
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[line.is_unix, first + block] = _Known(
            key=call.key,
            headers=call.headers,
            query=call.query,
            model=read.model,
            options=read.options,
            told=[pair for pair in head.headers if pair[0] in (b"content-length", b"expect")],
            num_bytes=num_bytes,
            is_placed=is_placed,
        )

    def _take(self, known: _Known, data: Buffer, begin: int, line: Line, begun_s: float) -> bool:
        """Have the engine asked in this turn; False: nothing was done."""
        model, options = known.model, known.options
        geometry, exchanges = model.checkpoint.geometry, self._exchanges
        if not known.is_placed or line.transport.get_write_buffer_size():
            return False
        body = memoryview(data)[begin:]
        step = steps.plain_step_of(body, options, geometry, model.limits.near_tokens)
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
                told = steps.encode_plain(step, residual, options, answer)
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
        line.answered(known.key.name)
        sent_s = perf_counter()
        seconds = sent_s - begun_s, receive_s, check_s, gate_s, sent_s - checked_s
        done = AtOnce(*seconds, known.num_bytes, num_bytes, operations.STEP.name)
        self._desk.tally(done, line.loop)

    def _begin(
        self, known: _Known, data: Buffer, begin: int, line: Line, fault: Exception | None = None
    ) -> bool:
        """Begin an exchange; False: it is refused, the ordinary way says how.

        fault: what became of it
        """
        call = Call(self._state, Inbox({"headers": known.told}), f"{getrandbits(64):016x}")
        call.key, call.headers, call.query = known.key, known.headers, known.query
        call.operation, call.peer, call.connection = operations.STEP, line.client, line
        if line.is_gone:
            self._desk.record(call, GONE, 0, known.told)
            return True
        read: TensorRead | Refusal
        try:
            read = StepRead(call, replace(known.options, client=call.client))
        except EngramError:
            return False
        if fault is not None:  # not asked again
            read = self._exchanges.refusal(call, fault)
        came = Came(data, begin, known.num_bytes)
        return self._exchanges.admit(line, call, read, came, known.told)


@lru_cache(256)
def _answer_lines(num_bytes: int) -> bytes:
    return answer_block({}, num_bytes)
