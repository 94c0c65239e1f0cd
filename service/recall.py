"""Residual reads whose headers llhttp parsed before, byte for byte: a runner's heads differ in path
and query.

What headers alone decide (who asks, the tensor's form, the length of the body) is remembered by all
their bytes, from the end of the request line to the blank line: one expression reads the request
line, one look-up the rest. Whatever is unusual is not found here, and is checked in full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ctypes import addressof, c_char
from dataclasses import dataclass
from random import getrandbits
from time import perf_counter
from typing import NamedTuple

from engram_client import wire
from engram_core.direct import Answer, Ask
from engram_core.engine_types import EPOCH_OPENED, Output
from engram_core.errors import EngramError
from service import operations
from service.admission import InFlightPool
from service.bodies import Buffer
from service.calls import Call
from service.desk import ANSWER_HEADERS, SHARED_ANSWER_HEADERS
from service.exchange import Came, Head, Line, answer_block
from service.heads import END, HEAD_BYTES, Known, Memory, is_plain, told_of
from service.landing import LANDING_BYTES
from service.reads import ReadForm, SingleRead, TensorRead, described
from service.shm import shared_of
from service.strict import INT64_MAX
from service.turn import AT_ONCE_BYTES, Told

_LINE = re.compile(
    rb"POST /v1/sessions/([1-9][0-9]{0,18})/layers/(0|[1-9][0-9]{0,8})/residual"
    rb"\?position=(0|[1-9][0-9]{0,17})(?:&epoch=(0|[1-9][0-9]{0,17}))? HTTP/1\.1(?=\r\n)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known(Known):
    """layers: id as a path has it -> index; answer: of one that is given at once, all but what
    differs; shared: how headers name body and answer of such a one in shared memory"""

    form: ReadForm
    pool: InFlightPool
    layers: Mapping[bytes, int]
    answer: bytes
    shared: tuple[str, str] | None


class _Asked(NamedTuple):
    """A request whose headers are known. begin: of its body, in what came."""

    known: _Known
    session_id: int
    layer: bytes
    position: int
    epoch: int
    begin: int


class Recall(Memory[_Known]):
    """Remembered heads of residual reads; one for an app."""

    operation = operations.RESIDUAL

    def answer(self, data: Buffer, line: Line) -> bool:
        """Have a request that came whole answered, or begin it; False: nothing was done, parse it.

        data: what came on a connection with nothing before it; what is looked at later is copied
        """
        begun_s = perf_counter()
        head = bytes(data[:HEAD_BYTES])
        asked = self._find(head, line)
        if asked is None:
            return False
        num_bytes = len(data) - asked.begin
        if num_bytes == asked.known.num_bytes and self._take(asked, data, line, begun_s):
            return True
        return num_bytes <= asked.known.num_bytes and self._begin(asked, data, line)

    def keep(self, head: Head, line: Line, call: Call, read: object) -> None:
        """Remember a head that was checked in full."""
        if not (isinstance(read, SingleRead) and read.output is Output.RESIDUAL and call.key):
            return
        if not is_plain(head):
            return
        model, spec = read.form.model, (read.form.dtype, read.form.shape)
        where, num_bytes = described(spec, "%d", "%d", "%d"), call.inbox.length or 0
        is_placed, shared = False, _shared_in(call) if spec[1][0] else None
        if shared is not None and call.shared is not None and call.shared.body is not None:
            where |= call.leave([call.shared.body])[0]
        elif call.shared is None:
            is_placed = 0 < num_bytes <= LANDING_BYTES
        timing = ANSWER_HEADERS if shared is None else SHARED_ANSWER_HEADERS
        layer_ids = model.checkpoint.geometry.layer_ids
        known = _Known(
            key=call.key,
            model=model,
            headers=call.headers,
            told=told_of(head),
            num_bytes=num_bytes,
            is_placed=is_placed,
            form=read.form,
            pool=self._state.pool,
            layers={b"%d" % layer: index for index, layer in enumerate(layer_ids)},
            answer=answer_block(where, num_bytes) + timing,
            shared=shared,
        )
        self._remember(line, head.block, known)

    def _find(self, head: bytes, line: Line) -> _Asked | None:
        """Return what is asked, if its head is known."""
        found = _LINE.match(head)
        if found is None:
            return None
        begin = head.find(END, found.end()) + len(END)
        known = self._recall(line, head[found.end() : begin])
        if known is None:
            return None
        session_id, layer, position, epoch = found.groups()
        if layer not in known.layers or int(session_id) > INT64_MAX:
            return None
        return _Asked(
            known,
            int(session_id),
            layer,
            int(position),
            EPOCH_OPENED if epoch is None else int(epoch),
            begin,
        )

    def _take(self, asked: _Asked, data: Buffer, line: Line, begun_s: float) -> bool:
        """Have the engine asked in this turn; False: nothing was done."""
        known, model = asked.known, asked.known.model
        if line.transport.get_write_buffer_size():
            return False
        if known.shared is not None:
            placed = _shared_body(known, known.shared, line)
        elif known.is_placed and known.pool.has_room(known.num_bytes):
            came = Came(data, asked.begin, known.num_bytes)
            placed = self._exchanges.place(line, model, came, asked.begin, len(data))
        else:
            return False
        if placed is None:
            return False
        (body, address), head = placed, bytes(data[: asked.begin])
        received_s = perf_counter()
        num_tokens = known.form.shape[0]
        ask = Ask(
            known.key.name,
            [(asked.session_id, asked.position, num_tokens, asked.epoch)],
            None,
            known.layers[asked.layer],
            address,
            known.form.dtype == "F32",
        )

        def tell(answer: Told) -> None:
            if isinstance(answer, Answer):
                self._tell(asked, body, line, answer, (begun_s, received_s))
                return
            again = head if known.shared is not None else head + body
            if not self._begin(asked, again, line, answer):
                line.parse(again)

        self._exchanges.turn.take(line, model.engine, ask, tell)
        return True

    def _tell(
        self, asked: _Asked, body: memoryview, line: Line, given: Answer, times: tuple[float, float]
    ) -> None:
        """Write an answer that the engine gave here and now."""
        known, transport, (begun_s, received_s) = asked.known, line.transport, times
        checked_s = perf_counter()
        receive_s, gate_s = received_s - begun_s, given.gate_s
        check_s = checked_s - received_s - gate_s
        (spot,) = given.sessions
        numbers = spot.length, spot.base, spot.epoch, getrandbits(64)
        beginning = self._exchanges.begin_answer(200, line)
        if known.shared is None:
            head = known.answer % (*numbers, receive_s * 1e3, check_s * 1e3, gate_s * 1e3)
            if len(body) <= AT_ONCE_BYTES:
                transport.write(b"".join((beginning, head, body)))
            else:
                transport.writelines([beginning + head, body])
        else:
            transport.write(beginning + known.answer % (*numbers, check_s * 1e3, gate_s * 1e3))
        self._note(known, line, known.num_bytes, gate_s, (*times, checked_s))

    def _begin(
        self, asked: _Asked, data: Buffer, line: Line, fault: Exception | None = None
    ) -> bool:
        """Begin an exchange (see `Memory._admit`)."""
        known = asked.known

        def make(call: Call) -> TensorRead:
            return SingleRead(
                call,
                Output.RESIDUAL,
                known.form,
                session_id=asked.session_id,
                layer=int(asked.layer),
                position=asked.position,
                epoch=asked.epoch,
            )

        return self._admit(known, Came(data, asked.begin, known.num_bytes), line, make, fault)


def _shared_body(
    known: _Known, shared: tuple[str, str], line: Line
) -> tuple[memoryview, int] | None:
    """Return a body in shared memory, and its address; None: it cannot be gated now."""
    try:
        there = shared_of(line.region, known.key.name, *shared).body
    except EngramError:
        return None
    if there is None or not known.pool.has_room(len(there)):
        return None
    return there, addressof(c_char.from_buffer(there))


def _shared_in(call: Call) -> tuple[str, str] | None:
    """Return how a head names body and answer in shared memory, if it names both."""
    body = call.headers.get(wire.SHARED_BODY.lower())
    answer = call.headers.get(wire.SHARED_ANSWER.lower())
    return None if body is None or answer is None else (body, answer)
