"""One tensor request on its connection: its body received, its answer written. Without ASGI.

All calls come from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from engram_client import wire
from engram_core.engine_types import StepAnswer
from engram_core.errors import EngramError, StepRefused
from service import bodies, problems
from service.bodies import Buffer, Headers
from service.calls import Call, find_shared
from service.desk import GONE, Desk, answer_headers
from service.landing import ALIGNMENT, LANDING_BYTES, Landing
from service.reads import TensorRead, note
from service.shm import Connection
from service.state import Model, ServiceState
from service.turn import AT_ONCE_BYTES, Told, Turn

JOIN_BYTES = 64 << 10
"""What of an answer is copied behind its head, up to this size: cheaper than a second buffer."""

PIECE_BYTES = 256 << 10
"""What of a larger answer is written in one turn of the loop."""

LANDED_BYTES = 64 << 10
"""Larger bodies are received where they landed, if they can be: smaller ones are copied sooner."""

WHOLE_PIECES = 4
"""An answer of so many pieces is written in one turn: a second turn costs more than it saves."""

_lower = cache(str.lower)
_SCRATCH_BYTES = 64 << 10


class Line(Connection, Protocol):
    """A connection, for an exchange.

    is_waiting: whether something is asked on it that is answered in this turn
    pad: see `Connection`
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    is_unix: bool
    is_waiting: bool
    pad: int

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer."""

    def begin(self, exchange: Exchange, body: memoryview, *, is_there: bool = False) -> None:
        """Receive an exchange's body, of which this much came with its head.

        is_there: it landed where it belongs
        """

    def parse(self, data: bytes) -> None:
        """Take what came as llhttp reads it."""

    def answered(self, tenant: str) -> None:
        """Note a request of one read that was answered at once, without an exchange."""

    def finished(self, exchange: Exchange) -> None:
        """Pass on what comes next: an answer is written."""

    def linger(self) -> None:
        """End, once the peer has heard what was sent."""


@dataclass(frozen=True)
class Head:
    """A request's head as llhttp parsed it: what an ASGI scope is made of.

    block: the bytes that the headers were in, if they came whole with their request line: from
    the end of it to the end of the blank line; else nothing
    """

    method: str
    url: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    keep_alive: bool
    block: bytes


@dataclass(frozen=True)
class Refusal:
    """How an error is told. Not the error: its traceback would keep the bytes that came with it."""

    code: str
    status: int
    headers: Headers
    body: bytes


class Came(NamedTuple):
    """What came of a request whose head is known. begin: of its body in data; num_bytes: of all of
    its body"""

    data: Buffer
    begin: int
    num_bytes: int


class Exchanges:
    """What the exchanges of an app share. scratch: for bodies that nobody reads"""

    def __init__(self, state: ServiceState, desk: Desk, turn: Turn, landing: Landing) -> None:
        self.turn, self.landing = turn, landing
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._state = state
        self._desk = desk
        self._default_headers: Headers = []
        self._beginnings: dict[int, bytes] = {}  # of answers, by status

    def begin(
        self,
        line: Line,
        call: Call,
        read: TensorRead | Refusal,
        buffer: memoryview,
        headers: Headers,
        *,
        keep_alive: bool = True,
    ) -> Exchange:
        """Count a request in. headers: those that its record may need"""
        line.tenant = call.key.name if call.key else line.tenant
        self._state.enter()
        return Exchange(self, line, call, read, buffer, headers, keep_alive=keep_alive)

    def admit(
        self, line: Line, call: Call, read: TensorRead | Refusal, came: Came, headers: Headers
    ) -> bool:
        """Admit the body of a request whose head is known, and begin it: maybe with a refusal.

        False: it is to be refused behind its body, the ordinary way.
        """
        found, landed, num_bytes = read, None, came.num_bytes
        try:
            find_shared(call)
            buffer = call.shared_body()
            is_large = buffer is None and num_bytes > LANDED_BYTES
            if is_large and self._state.pool.has_room(LANDING_BYTES):
                landed = buffer = self._land(line, came)
            if landed is not None:
                call.lease.add(LANDING_BYTES, "the body")  # all of its piece is kept
            if buffer is None:
                buffer = call.lease.buffer(num_bytes, "the body")
        except EngramError as error:
            if num_bytes <= bodies.SMALL_BODY_BYTES:
                call.close()
                return False
            found, buffer, landed = self.refusal(call, error), self.scratch, None
        exchange = self.begin(line, call, found, buffer, headers)
        body = memoryview(came.data)[came.begin :]
        line.begin(exchange, body, is_there=landed is not None)
        return True

    def place(
        self, line: Line, model: Model, came: Came, begin: int, end: int
    ) -> tuple[memoryview, int] | None:
        """Return where the residual of a body that is all there is updated at once, its bytes
        there, and the address; None: nowhere now. begin, end: of it in what came"""
        if came.num_bytes <= AT_ONCE_BYTES:
            return self.turn.put(model, memoryview(came.data)[begin:end])
        body = self._land(line, came)
        if body is None:
            return None
        residual = body[begin - came.begin : end - came.begin]
        return residual, addressof(c_char.from_buffer(residual))

    def _land(self, line: Line, came: Came) -> memoryview | None:
        """Leave a body where it landed, if it can be; the next one like it can."""
        line.pad = -came.begin % ALIGNMENT
        return self.landing.keep(came.data, came.begin, came.num_bytes)

    def end(self, call: Call, code: str, status: int, headers: Headers, line: Line) -> None:
        """Count a request out. Its record is made in the next turn: uvloop writes before that."""
        call.close()
        self._state.leave()
        line.loop.call_soon(self._desk.record, call, code, status, headers)

    def begin_answer(self, status: int, line: Line) -> bytes:
        """Return how an answer begins: its status line, and the headers that all have."""
        if line.default_headers is not self._default_headers:  # another second, another date
            self._default_headers = line.default_headers
            self._beginnings.clear()
        beginning = self._beginnings.get(status)
        if beginning is None:
            beginning = STATUS_LINE[status] + _lines(line.default_headers)
            self._beginnings[status] = beginning
        return beginning

    def refusal(self, call: Call, error: BaseException) -> Refusal:
        """Return what the client is told."""
        code, refusal = self._desk.refusal(call, error)
        return Refusal(code, *problems.encode(refusal))


def answer_block(told: Mapping[str, str], num_bytes: int) -> bytes:
    """Return the headers of an answer of tensors, as lines."""
    headers = "".join([f"{_lower(name)}: {value}\r\n" for name, value in told.items()])
    block = f"content-type: {wire.TENSOR_MEDIA}\r\n{headers}content-length: {num_bytes}\r\n"
    return block.encode()


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


class Exchange:
    """One request on its connection, from its head to the last byte of its answer.

    uvicorn sees it where it keeps its own cycle, so the names it reads there are its names.

    read: how it is answered, or why it is refused before its body
    buffer: for its body, or scratch for what is refused
    """

    message_event = asyncio.Event()  # nobody waits for it; set by uvicorn at the end
    disconnected = False

    def __init__(
        self,
        shared: Exchanges,
        line: Line,
        call: Call,
        read: TensorRead | Refusal,
        buffer: memoryview,
        headers: Headers,
        *,
        keep_alive: bool,
    ) -> None:
        self.keep_alive = keep_alive
        self.response_complete = False
        self._shared, self._line, self._call, self._read = shared, line, call, read
        self._headers = headers
        self._expects_continue = call.inbox.expects_continue
        self._length, self._end = call.inbox.length or 0, 0
        self._buffer = buffer
        self._begun = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        self._future: Future[StepAnswer] | None = None
        self._thread = threading.get_ident()
        self._status, self._code = 0, GONE
        self._unsent: deque[memoryview] = deque()

    # ---- the body

    @property
    def more_body(self) -> bool:
        """Whether some of the body is still to come."""
        return self._end < self._length

    @property
    def is_told(self) -> bool:
        """Whether its answer is written, or on its way; a body still coming is not looked at."""
        return self._status != 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes of the body that came with the head."""
        end = self._end + len(data)
        if not isinstance(self._read, Refusal):
            self._buffer[self._end : end] = data
        self._end = end

    def await_body(self) -> None:
        """Ask for the rest of the body, if the client waits to be asked, and watch its pace."""
        if isinstance(self._read, Refusal):
            self._tell(self._read)
            return
        if self._expects_continue:
            self._line.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._watch(bodies.GRACE_S, self._check_pace)

    def space(self) -> memoryview:
        """Return where the next bytes of the body go, no further than its end."""
        if self.is_told:  # refused, and read on for a moment
            return self._buffer[: self._length - self._end]
        return self._buffer[self._end :]

    def received(self, num_bytes: int) -> None:
        """Note bytes received into `space()`."""
        self._end += num_bytes
        if self.is_told and not self.more_body:
            self._line.linger()

    def _check_pace(self) -> None:
        earned = bodies.GRACE_S + self._end / bodies.MIN_BYTES_PER_S
        left = self._begun + earned - time.perf_counter()
        if left > 0:
            self._watch(left, self._check_pace)
            return
        self._refuse(bodies.too_slow(self._end))

    # ---- the answer

    def work(self) -> None:
        """Ask the engine: the body is there."""
        self._unwatch()
        if isinstance(self._read, Refusal):
            self._tell(self._read)
            return
        call = self._call
        call.inbox.num_bytes = self._end
        if self._end:
            call.stages["receive"] = time.perf_counter() - self._begun
        self._begun = time.perf_counter()
        try:
            ask = self._read.ask(self._buffer)
        except Exception as error:
            self._refuse(error)
            return
        if ask is None:
            self._submit()
        else:
            self._shared.turn.take(self._line, self._read.engine, ask, self._answered)

    def _answered(self, answer: Told) -> None:
        """Tell what the engine answered in this turn; None: it takes the general way."""
        if self.response_complete or self._line.is_gone:
            return
        assert not isinstance(self._read, Refusal)
        if answer is None:
            self._submit()
            return
        if isinstance(answer, Exception):  # not asked again: the residual may be updated
            self._refuse(answer)
            return
        try:
            note(self._call, answer, self._begun)
            told = self._read.given(answer)
        except Exception as fault:
            self._refuse(fault)
            return
        self._give(*told)

    def _submit(self) -> None:
        """Have the general way answer."""
        assert not isinstance(self._read, Refusal)
        try:
            self._future = future = self._read.submit(self._buffer)
        except Exception as error:
            self._refuse(error)
            return
        if future.done():
            self._finish(future)
        else:
            future.add_done_callback(self._completed)

    def _completed(self, future: Future[StepAnswer]) -> None:
        """Come back to the loop's thread."""
        if threading.get_ident() == self._thread:
            self._finish(future)
        elif not self._line.loop.is_closed():
            self._line.loop.call_soon_threadsafe(self._finish, future)

    def _finish(self, future: Future[StepAnswer]) -> None:
        if self.response_complete:
            return
        assert not isinstance(self._read, Refusal)
        # Asked for, not raised: a traceback through here would keep the body until a collection.
        if (error := future.exception()) is not None:
            self._refuse(error)
            return
        try:
            answer = future.result()
            self._call.stages.update(answer.stages)
            told, buffers = self._read.answer(answer)
        except Exception as fault:
            self._refuse(fault)
            return
        self._give(told, buffers)

    def _give(self, told: Mapping[str, str], buffers: list[Buffer]) -> None:
        self._call.sent_bytes = num_bytes = sum(map(len, buffers))
        self._send(200, answer_block(told, num_bytes), buffers, "ok")

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, StepRefused) and not isinstance(self._read, Refusal):
            error = self._read.refusal(error)
        self._tell(self._shared.refusal(self._call, error))

    def _tell(self, refusal: Refusal) -> None:
        headers, unread = [*refusal.headers], self.more_body
        self._call.sent_bytes = len(refusal.body)
        if unread:
            self.keep_alive = False
            headers.append((b"connection", b"close"))
        self._send(refusal.status, _lines(headers), [refusal.body], refusal.code)
        if unread:
            # Read on for a moment: a client that writes its whole body first hears us.
            self._buffer = self._shared.scratch
            if self.response_complete:  # else it is watched that the answer is taken
                self._watch(bodies.read_on_s(self._line), self._line.transport.close)

    def _send(self, status: int, block: bytes, buffers: list[Buffer], code: str) -> None:
        """Write an answer, and end with it or once the client has taken it."""
        line, transport = self._line, self._line.transport
        self._status, self._code = status, code
        head = [self._shared.begin_answer(status, line), block, _lines(answer_headers(self._call))]
        if not self.keep_alive and not self.more_body:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
        self._begun = time.perf_counter()
        num_bytes = sum(map(len, buffers))
        if num_bytes <= JOIN_BYTES:
            transport.write(b"".join((*head, *buffers)))
        elif num_bytes <= WHOLE_PIECES * PIECE_BYTES:
            transport.writelines([b"".join(head), *buffers])
        else:
            transport.write(b"".join(head))
            self._unsent += map(memoryview, buffers)
            self._watch(bodies.GRACE_S + num_bytes / bodies.MIN_BYTES_PER_S, transport.abort)
            self._send_on()
            return
        self._end_sent(code)

    def _send_on(self) -> None:
        """Hand over the next piece of a large answer; the one after it in the next turn.

        In one go the loop would write as long as the client takes it, and answer nobody else: 16 ms
        of 200 MB (docs/notes/gpu_host.md).
        """
        unsent, line = self._unsent, self._line
        if not unsent:
            return  # the client has left
        line.transport.write(unsent[0][:PIECE_BYTES])
        unsent[0] = unsent[0][PIECE_BYTES:]
        if not len(unsent[0]):
            unsent.popleft()
        if unsent:
            if not line.is_stalled:  # else `taken` goes on
                line.loop.call_soon(self._send_on)
        else:
            self._unwatch()
            self._end_sent(self._code)

    def _end_sent(self, code: str) -> None:
        """End with an answer that was handed over, now or once the client has taken it."""
        transport = self._line.transport
        left = transport.get_write_buffer_size()
        if left <= bodies.SEND_BYTES or not self._line.is_stalled:  # else `taken` is called
            self._done(code)
        else:
            self._watch(bodies.GRACE_S + left / bodies.MIN_BYTES_PER_S, transport.abort)

    def taken(self) -> None:
        """The client has taken what was handed over."""
        if self._unsent:
            self._send_on()
        elif self._status and not (self.response_complete or self.more_body):
            self._done(self._code)

    def gone(self) -> None:
        """The connection is no more."""
        self._unwatch()
        if self.response_complete:
            return
        future = self._future
        self._done(GONE)
        if future is not None:
            future.cancel()

    def _done(self, code: str) -> None:
        self._unwatch()
        self.response_complete = True
        self._future, self._buffer = None, self._shared.scratch
        self._unsent.clear()
        self._line.finished(self)
        if code == "ok":
            self._call.stages["send"] = time.perf_counter() - self._begun
        self._shared.end(self._call, code, self._status, self._headers, self._line)

    def _watch(self, seconds: float, late: Any) -> None:
        self._timer = self._line.loop.call_later(seconds, late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
