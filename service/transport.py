"""HTTP/1.1 connections: uvicorn's, with bounds on what a peer may hold open or make us hold.

One HTTP parser (llhttp) for everything. Added here: the hand-over of tensor bodies to a protocol
that receives into their buffer, a limit on heads, a timer on every connection without a request,
refusals of malformed HTTP as problem documents, and a way to cut a connection whose peer does not
read.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engram_client import wire
from engram_core.errors import BadRequest
from service import problems
from service.bodies import CONNECTION, ClientGoneError, Headers, read_on_s
from service.exchange import JOIN_BYTES, Exchange, Head
from service.fast_path import FastPath
from service.landing import Landing
from service.problems import NotFound
from service.shm import Region

MAX_HEAD_BYTES = 64 << 10
MAX_KNOWN_BYTES = 4 << 10
"""Of the headers of a head that is remembered (`recall.py`)."""
READ_BYTES = 256 << 10
"""What of a body is read in one turn of the loop. A read of a Unix socket goes on as long as the
peer fills it: of 335 MB up to 200 in one turn, which took 40 ms (docs/notes/gpu_host.md)."""
IDLE_S = 75.0
"""How long a connection may stay without a request; longer than clients keep theirs."""


_CONTINUE = b"HTTP/1.1 100"
_INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"


class _HeadHolder:
    """A transport for one answer that sends its head together with its body's first bytes.

    uvicorn writes them apart, which costs a packet and wakes the client twice.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._transport = connection, connection.transport
        self._head = b""
        self._is_held = False

    def write(self, data: bytes | memoryview) -> None:
        if self._is_held:
            self._is_held = False
            if len(data) <= JOIN_BYTES:
                data = b"".join((self._head, data))
            else:
                self._transport.write(self._head)
        elif not self._head and data[: len(_CONTINUE)] != _CONTINUE:
            self._head, self._is_held = bytes(data), True
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._is_held:
            self.write(b"")
        self._connection.linger()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Holder(asyncio.BufferedProtocol):
    """Has a connection's transport, and tells the connection what else happens to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class Receiver(_Holder):
    """Has a connection's transport between bodies: what comes lands in memory of the app's."""

    def __init__(self, connection: Connection, landing: Landing) -> None:
        super().__init__(connection)
        self._landing = landing

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes land."""
        return self._landing.space(self._connection.pad)

    def buffer_updated(self, nbytes: int) -> None:
        """Hand over what landed."""
        self._connection.came(self._landing.landed(self._connection.pad, nbytes))

    def eof_received(self) -> bool:
        """Tell the connection."""
        return self._connection.eof_received()


class BodyReceiver(_Holder):
    """Has a connection's transport while the rest of one body is received into its buffer."""

    def __init__(self, connection: Connection, exchange: Exchange) -> None:
        super().__init__(connection)
        self._exchange = exchange

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the body's next bytes go, at most READ_BYTES."""
        return self._exchange.space()[:READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Note them; give the transport back behind the last."""
        self._exchange.received(nbytes)
        if not (self._exchange.more_body or self._exchange.is_told):
            self._connection.take_back()
        elif nbytes == READ_BYTES:  # there is more: in the next turn
            transport = self._connection.transport
            transport.pause_reading()
            self._connection.loop.call_soon(transport.resume_reading)


class Connection(HttpToolsProtocol):
    """One connection. tenant: the name of the key that asked last; fast_path: None without one;
    region: its shared memory; is_unix: it came by the Unix socket; is_waiting: it has asked
    something that is answered at the end of this turn of the loop; pad: bytes left out before what
    comes, so that the body of a large request like the last one is aligned."""

    cycle: Any  # uvicorn's, or the exchange: of the request that was parsed last
    tenant: str | None = None
    fast_path: FastPath | None = None
    region: Region | None = None
    is_unix = False
    is_waiting = False
    pad = 0
    _receiver: Receiver | None = None
    _answered_s = float("-inf")  # when a request was answered that no exchange was made of
    _exchange: Exchange | None = None
    _running: Any = None  # uvicorn's cycle of the request that is answered now
    _is_asked = True
    _is_between = True  # the parser has not begun a request that it has not ended
    _is_head_whole = False  # of the request that the parser has begun last
    _head_bytes = 0
    _first = b""  # a packet that begins with the head that is parsed now
    _packet = b""  # what is parsed now
    _behind_upgrade = b""  # what of it the parser has left
    _refusal = b""  # of what is no HTTP, told when what was asked before it is answered
    _has_said_all = False  # the peer has
    _is_ending = False  # nothing more is sent, and what comes is dropped

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer."""
        return self.server_state.default_headers

    @property
    def is_idle_tls(self) -> bool:
        """Whether this is TLS, and nothing is being asked, answered or sent."""
        is_idle = self.cycle is None or self.cycle.response_complete
        is_idle &= not (self.is_waiting or self.transport.get_write_buffer_size())
        return self.scheme == "https" and is_idle

    @property
    def is_gone(self) -> bool:
        """Whether it is closed, by either side: what is sent is dropped."""
        return bool(self.transport.is_closing())

    @property
    def has_body(self) -> bool:
        """Whether the body of the request that came last is there."""
        return self.cycle is not None and not self.cycle.more_body

    @property
    def is_stalled(self) -> bool:
        """Whether what is sent would have to wait until the peer takes what was sent."""
        return bool(self.flow.write_paused)

    @property
    def unsent_bytes(self) -> int:
        """Of what was written, how much the peer's host has not taken yet."""
        left: int = self.transport.get_write_buffer_size()
        if self.is_gone:
            return left  # its descriptor may be another's by now
        with suppress(OSError):  # of a kernel that does not tell
            descriptor = self.transport.get_extra_info("socket").fileno()
            told = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
            left += int.from_bytes(told, sys.byteorder)
        return left

    def abort(self) -> None:
        """Cut the connection, whatever is still to be sent."""
        self.transport.abort()

    def check_sharing(self) -> None:
        """See that a region can be given. Raises ClientGoneError; NotFound: this is no Unix socket;
        BadRequest: it has one, or does not read its answers."""
        if self.transport.is_closing():
            raise ClientGoneError
        family = self.transport.get_extra_info("socket").family
        if self.scheme == "https" or family != socket.AF_UNIX:
            raise NotFound("shared memory is for the Unix socket", expected="one without TLS")
        if self.region is not None:
            raise BadRequest("this connection has shared memory", expected="one region")
        if self.transport.get_write_buffer_size():
            raise BadRequest("answers are on their way", expected="them to be taken first")

    def share(self, region: Region) -> None:
        """Give the peer a region: its descriptor comes with an interim answer.

        Raises as `check_sharing`; ClientGoneError.
        """
        try:
            self.check_sharing()
            found = self.transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(found.fileno())) as line:
                socket.send_fds(line, [_INTERIM], [region.descriptor])
        except OSError:
            raise ClientGoneError from None
        finally:
            os.close(region.descriptor)
        self.region = region

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; what comes lands in the fast path's memory, if there is one."""
        super().connection_made(transport)
        self.is_unix = self.server is not None and self.server[1] is None
        if self.is_unix:
            line = transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wire.UNIX_SEND_BYTES)
        if self.fast_path is not None:
            self._receiver = Receiver(self, self.fast_path.landing)
            transport.set_protocol(self._receiver)
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's; whoever is being answered is told."""
        super().connection_lost(exc)
        self.region = None
        if self._exchange is not None:
            self._exchange.gone()
        if self._running is not None:  # uvicorn tells the last one only
            self._running.disconnected = True
            self._running.message_event.set()

    def resume_writing(self) -> None:
        """As uvicorn's; an exchange goes on."""
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.taken()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a peer that has said all it will say, unless it left inside a body."""
        self._end_turn()
        if self._is_ending:
            return False
        if self._refusal and self.scheme != "https":
            self._has_said_all = True
            return True
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False
        self._has_said_all = True
        return True

    def came(self, data: memoryview) -> None:
        """Take what landed: nothing of it may be looked at later, but what is kept."""
        self._end_turn()
        if self._refusal or self._is_ending:
            return  # nobody knows where the next request would begin, or answers it
        is_first = self._is_between and (self.cycle is None or self.cycle.response_complete)
        if not (is_first and self.fast_path is not None and self.fast_path.recall(data, self)):
            self.parse(bytes(data))

    def data_received(self, data: bytes) -> None:
        """Take what came, where there is no fast path."""
        if not (self._refusal or self._is_ending):
            self.parse(data)

    def parse(self, data: bytes) -> None:
        """Take what came as llhttp reads it."""
        if self._is_between and (self.cycle is None or self.cycle.response_complete):
            self._first = data
        self._packet = data
        super().data_received(data)
        while self._behind_upgrade and not self.transport.is_closing():
            self._packet, self._behind_upgrade = self._behind_upgrade, b""
            super().data_received(self._packet)
        self._packet = self._first = b""
        if self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self._refusal:
            self._refuse_head()
        elif self._exchange is not None and not self._is_asked:
            self._ask(self._exchange)
        elif (
            not self._refusal
            and self.timeout_keep_alive_task is None
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._watch_idle()

    def shutdown(self) -> None:
        """Close it once what is asked is answered."""
        self._end_turn()
        super().shutdown()

    def _end_turn(self) -> None:
        """Have what is asked answered, if that waits for the end of this turn."""
        if self.is_waiting and self.fast_path is not None:
            self.fast_path.end_turn()

    def _unsupported_upgrade_warning(self) -> None:
        """Stay with HTTP/1.1: what the packet holds behind the wish is the next request."""
        wish = sys.exception()
        assert isinstance(wish, httptools.HttpParserUpgrade)
        self._behind_upgrade = self._packet[wish.args[0] :]

    def on_message_begin(self) -> None:
        """As uvicorn's; the scope knows its connection."""
        super().on_message_begin()
        self._is_between = self._is_head_whole = False
        self._head_bytes = 0
        scope: Any = self.scope
        scope["extensions"] = {CONNECTION: {"connection": self}}

    def on_headers_complete(self) -> None:
        """Begin an exchange if the request can take the fast path, else as uvicorn does."""
        self._is_head_whole = True
        if self.parser.should_upgrade() and self._has_body():
            # The parser would skip the body, and take what comes of it for the next request.
            raise BadRequest("a request with a body cannot ask for another protocol")
        if (exchange := self._begin()) is not None:
            self._first = b""
            self.cycle = self._exchange = exchange
            self._is_asked = False
            return
        self._first = b""
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            transport: Any = _HeadHolder(self)
            self.cycle.transport = transport
        if not self.pipeline:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        """As uvicorn's; what is no HTTP is refused behind the last answer."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        if self._is_ending:
            self.server_state.total_requests += 1
            return
        if self._refusal and not _is_owed(self._running):
            self.pipeline.clear()
            self.server_state.total_requests += 1
            self._tell_refusal()
            return
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Feed the exchange, if the body is its own."""
        if self.cycle is self._exchange and self._exchange is not None:
            self._exchange.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """As uvicorn's, but for an exchange."""
        self._is_between = True
        if self.cycle is not self._exchange:
            super().on_message_complete()

    def begin(self, exchange: Exchange, body: memoryview, *, is_there: bool = False) -> None:
        """Begin an exchange whose head nobody parsed; some of its body came with it.

        is_there: it landed where it belongs
        """
        self._unset_keepalive_if_required()
        self.cycle = self._exchange = exchange
        if is_there:
            exchange.received(len(body))
        else:
            exchange.feed(body)
        self._ask(exchange)

    def answered(self, tenant: str) -> None:
        """Note a request that was answered at once."""
        self.tenant = tenant
        self.server_state.total_requests += 1
        self._answered_s = self.loop.time()

    def finished(self, exchange: Exchange) -> None:
        """Go on after an exchange."""
        if exchange.more_body:
            return  # its refusal is written; the connection ends once the peer has heard it
        self._exchange = None
        if self.cycle is exchange:
            self.cycle = None  # its buffer is not kept while the connection is idle
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def take_back(self) -> None:
        """Have the transport again: a body is complete."""
        self.transport.set_protocol(self._receiver or self)
        if not self._is_between:
            # The old one still waits for the body. Nothing behind it was read.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._is_between = True
        if self._exchange is not None:
            self._exchange.work()

    def _begin(self) -> Exchange | None:
        """Return an exchange if this request can take the fast path: nothing is before it."""
        if self.fast_path is None or not self.url.startswith(b"/v1/s"):
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        if self.parser.get_http_version() != "1.1":
            return None
        head = Head(
            method=self.parser.get_method().decode("ascii"),
            url=self.url,
            headers=self.headers,
            client=self.client,
            server=self.server,
            keep_alive=self.parser.should_keep_alive(),
            block=self._header_block(),
        )
        return self.fast_path.begin(head, self)

    def _header_block(self) -> bytes:
        """Return the bytes of the headers that were just parsed, if they came whole; nothing of
        longer ones than are remembered, maybe longer than is allowed."""
        line_end = self._first.find(b"\r\n")
        end = self._first.find(b"\r\n\r\n", 0, line_end + MAX_KNOWN_BYTES)
        return b"" if end < 0 else self._first[line_end : end + 4]

    def _ask(self, exchange: Exchange) -> None:
        """Begin an exchange whose head, and maybe some of its body, is there."""
        self._is_asked = True
        if not exchange.more_body:
            exchange.work()
            return
        receiver = BodyReceiver(self, exchange)
        self.transport.set_protocol(receiver)
        exchange.await_body()

    def on_url(self, url: bytes) -> None:
        """As uvicorn's, counted."""
        self._head_bytes += len(url)
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, counted."""
        self._head_bytes += len(name) + len(value)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as a problem document, behind what is still to be answered: a 400
        in the place of an earlier request's answer would say that it has changed nothing."""
        self._refuse(msg, waits=_is_owed(self._running) or _is_owed(self._exchange))

    def _refuse_head(self) -> None:
        """Refuse a head that is too long, also where it is whole: its request is not begun."""
        waits = _is_owed(self._running) or _is_owed(self._exchange)
        if self._is_head_whole and self.pipeline:
            self.pipeline.popleft()
        elif self._is_head_whole:
            waits = False
        self._refuse(f"the head is longer than {MAX_HEAD_BYTES} bytes", waits=waits)

    def _refuse(self, msg: str, *, waits: bool) -> None:
        _, headers, body = problems.encode(BadRequest(msg, expected="HTTP/1.1"))
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in headers)]
        self._refusal = b"\r\n".join([*lines, b"connection: close", b"", body])
        if not waits:
            self._tell_refusal()

    def _tell_refusal(self) -> None:
        """End with a refusal."""
        if self._running is not None:  # whose body will not come
            self._running.disconnected = True
            self._running.message_event.set()
        self.transport.write(self._refusal)
        self.linger()

    def linger(self) -> None:
        """Say that nothing more is sent, and drop what still comes until the peer has heard it.

        Closed at once, bytes that nobody read would take our answers with them.
        """
        if self._is_ending or self.transport.is_closing():
            return
        self._is_ending = True
        self.pipeline.clear()
        if self._has_said_all or not self.transport.can_write_eof():
            self.transport.close()
            return
        if self._receiver is not None:
            self.transport.set_protocol(self._receiver)
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(read_on_s(self), self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also one whose peer never took its last answer."""
        self._end_turn()
        if self.cycle is not None and not self.cycle.response_complete:
            return  # what has come in this turn is still to be answered
        left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._watch_idle(left_s)
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _has_body(self) -> bool:
        names = dict(self.headers)
        return (
            b"transfer-encoding" in names or names.get(b"content-length", b"0").strip(b"0") != b""
        )

    def _watch_idle(self, seconds: float | None = None) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive if seconds is None else seconds,
            self.timeout_keep_alive_handler,
        )


def _is_owed(cycle: Any) -> bool:
    """Whether a request has come whole and is not answered yet."""
    return cycle is not None and not (cycle.more_body or cycle.response_complete)
