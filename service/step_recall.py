"""Steps whose whole head was checked before: a runner's are the same from step to step.

As `recall.py` for residual reads, with the request line remembered too: sessions and positions of a
step are in its body. A step of a few segments that the engine can make here and now is answered in
the call that brings it; any other begins as it would behind its parsed head. Keys, admission and
the state of the service are looked at every time, and so is the body.
"""

from __future__ import annotations

import re
from ctypes import addressof, c_char
from dataclasses import dataclass, replace
from random import getrandbits
from time import perf_counter

from engram_client import wire
from engram_core.direct import OneRead
from engram_core.engine_types import Output
from engram_core.errors import EngramError
from service import operations, steps
from service.access import Key
from service.bodies import Headers, Inbox
from service.calls import Call
from service.desk import ANSWER_HEADERS, AtOnce, Desk
from service.exchange import Exchanges, Head, Line, answer_block
from service.reads import StepRead, few_of
from service.recall import END, MAX_KNOWN, PLAIN, Place, headers_of
from service.state import Model, ServiceState

_LINE = re.compile(rb"POST /v1/step\?[!-~]{1,200} HTTP/1\.1(?=\r\n)")


@dataclass(frozen=True, slots=True)
class _Known:
    """What a head decides.

    told: of its headers, what the body's reception depends on; num_bytes: of the body on the socket
    place: where its body is worked on at once; None: it never is
    """

    key: Key
    headers: dict[str, str]
    query: dict[str, str]
    model: Model
    options: steps.StepOptions
    told: Headers
    num_bytes: int
    place: memoryview | None


class StepRecall:
    """Remembered heads of steps; one for an app."""

    def __init__(self, state: ServiceState, desk: Desk, exchanges: Exchanges, place: Place) -> None:
        self._state, self._desk, self._exchanges = state, desk, exchanges
        self._place = place
        self._known: dict[tuple[bool, bytes], _Known] = {}

    def answer(self, data: bytes, line: Line) -> bool:
        """Answer a request that came whole, or begin it; False: nothing was done, parse it.

        data: what came on a connection with nothing before it
        """
        begun_s = perf_counter()
        found = _LINE.match(data)
        if found is None:
            return False
        begin = data.find(END, found.end()) + len(END)
        known = self._known.get((line.is_unix, data[:begin]))
        if known is None or not self._state.serves(known.model):
            return False
        try:
            self._state.access.confirm(known.key)
        except EngramError:
            return False
        num_bytes = len(data) - begin
        if num_bytes == known.num_bytes and known.place is not None:
            known.place[:] = memoryview(data)[begin:]
            if self._answer_at_once(known, known.place, line, begun_s):
                return True
        return num_bytes <= known.num_bytes and self._begin(known, data[begin:], line)

    def keep(self, head: Head, line: Line, call: Call, read: object) -> None:
        """Remember a head that was checked in full."""
        if not (isinstance(read, StepRead) and call.key and head.keep_alive):
            return
        block, first = head.block, b"POST " + head.url + b" HTTP/1.1"
        if not all(name in PLAIN for name, _ in head.headers) or not _LINE.match(first + block):
            return
        if headers_of(block) != head.headers:
            return  # the parser saw something else in these bytes: they are not looked up
        num_bytes, place = call.inbox.length or 0, None
        is_one = read.options.output is Output.RESIDUAL and call.shared is None
        if is_one and num_bytes:
            place = self._place.of(read.model, num_bytes)
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
            place=place,
        )

    def _answer_at_once(self, known: _Known, body: memoryview, line: Line, begun_s: float) -> bool:
        """Answer what the engine answers here and now; False: nothing was done."""
        transport = line.transport
        try:
            if transport.get_write_buffer_size() or not self._state.pool.has_room(len(body)):
                return False
            received_s = perf_counter()
            answered = _ask(steps.decode(body), known)
        except Exception:  # an exchange asks again, and tells it
            return False
        if answered is None:
            return False
        gate_s, views = answered
        checked_s = perf_counter()
        receive_s = received_s - begun_s
        check_s = checked_s - received_s - gate_s
        buffers = wire.encode_tensors(views)
        num_bytes = sum(map(len, buffers))
        timing = ANSWER_HEADERS % (
            getrandbits(64), receive_s * 1e3, check_s * 1e3, gate_s * 1e3,
        )  # fmt: skip
        beginning = self._exchanges.begin_answer(200, line)
        transport.write(b"".join((beginning, answer_block({}, num_bytes), timing, *buffers)))
        line.answered(known.key.name)
        sent_s = perf_counter()
        seconds = sent_s - begun_s, receive_s, check_s, gate_s, sent_s - checked_s
        done = AtOnce(*seconds, known.num_bytes, num_bytes, operations.STEP.name)
        self._desk.tally(done, line.loop)
        return True

    def _begin(self, known: _Known, body: bytes, line: Line) -> bool:
        """Begin an exchange; False: it is refused, the ordinary way says how."""
        call = Call(self._state, Inbox({"headers": known.told}), f"{getrandbits(64):016x}")
        call.key, call.headers, call.query = known.key, known.headers, known.query
        call.operation, call.peer, call.connection = operations.STEP, line.client, line
        try:
            read = StepRead(call, replace(known.options, client=call.client))
        except EngramError:
            return False
        exchange = self._exchanges.admit(line, call, read, known.num_bytes, known.told)
        if exchange is not None:
            line.begin(exchange, body)
        return exchange is not None


def _ask(views: steps.Views, known: _Known) -> tuple[float, steps.Views] | None:
    """Ask the engine for a plain step; None: it is none now, nothing was changed.

    Returns the seconds of the gate, and the answer.
    """
    model, tenant = known.model, known.key.name
    plain = views, known.options, model.checkpoint.geometry, model.limits.near_tokens
    step = steps.one_step_of(*plain)
    if step is None:
        few = steps.few_steps_of(*plain)
        asked = None if few is None else few_of(few, model)
        if few is None or asked is None:
            return None
        given = model.engine.read_few(tenant, asked, few.token_ids)
        return None if given is None else (given.gate_s, steps.few_answer_views(few, given))
    dtype, shape = step.spec
    read = OneRead(
        session_id=step.session_id,
        position=step.position,
        num_tokens=shape[0],
        epoch=step.epoch,
        layer_index=model.checkpoint.geometry.layer_index(step.layer),
        residual=addressof(c_char.from_buffer(step.residual)),
        is_f32=dtype == "F32",
    )
    if read.residual % 4:
        return None
    if step.token_ids is None:
        answer = model.engine.read_residual(tenant, read)
    else:
        answer = model.engine.push_residual(tenant, read, step.token_ids)
    return None if answer is None else (answer.gate_s, steps.one_answer_views(step, answer))
