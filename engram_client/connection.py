"""Blocking HTTP/1.1 connections for tensors: sendmsg out of arrays, recv_into into arrays.

While a large body is being sent the answer is watched for: a service that refuses early (413,
429) is heard, and its answer taken, before the rest is sent into a closed connection.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from engram_client.direct import MORE, Answering, Ask
from engram_client.http1 import (
    EXPECT_ABOVE_BYTES,
    EXPECT_WAIT_S,
    Address,
    Request,
    Response,
    ResponseReader,
    format_head,
)
from engram_client.problems import ConnectionLost
from engram_client.shared import IS_SUPPORTED, REGION_BYTES, Region, ask_for, can_share
from engram_client.wire import UNIX_SEND_BYTES

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE = 16
"""Idle connections kept open to one address."""

_SEND_BYTES = 1 << 20
"""At most this much is handed to TLS at once."""

_READ, _WRITE = select.POLLIN | select.POLLHUP | select.POLLERR, select.POLLOUT


class _Closes(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)


class Connection:
    """One connection, one request at a time."""

    def __init__(
        self,
        address: Address,
        fixed: bytes,
        context: ssl.SSLContext | None,
        *,
        timeout_s: float = 60.0,
        asks_memory: bool = False,
    ) -> None:
        """Connect. Raises ConnectionLost.

        fixed: header lines of every request; timeout_s: of a request
        asks_memory: ask for shared memory before the first request that could use it
        """
        self._timeout_s = timeout_s
        self._fixed = fixed
        self.asks_memory = asks_memory
        self.is_refused_memory = self.has_answered = False
        self._region: Region | None = None
        try:
            self._socket = connect(address, context)
        except (OSError, ValueError) as error:
            raise not_connected(address, error) from error
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._no_wait = 0 if self._is_tls else socket.MSG_DONTWAIT
        self._socket.setblocking(not self._is_tls)
        # `ask` waits in recv alone: one system call instead of three.
        wait = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._poll = select.poll()
        self._poll.register(self._socket, _READ)
        self._polled = _READ
        self._answering = Answering()
        self._unsent: list[memoryview] = []
        self._fault: ConnectionLost | None = None

    def is_usable(self) -> bool:
        """Tell whether the other end has left an idle connection open and silent."""
        return not self._wait(_READ, 0.0)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @property
    def can_ask(self) -> bool:
        """Tell whether requests can be made by `ask`: TLS does not wait in the kernel."""
        return not (self._is_tls or self.asks_memory)

    def ask(self, ask: Ask, identity: str) -> None:
        """Send one request and let its answer land; where it has not, `finish` goes on."""
        answering = self._answering
        plan = answering.begin(ask, identity, self._fixed, self._region)
        buffers = ask.buffers(plan)
        self._unsent, self._fault = [], None
        begun = time.monotonic()
        sock = self._socket
        try:
            sent = sock.sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except OSError:  # where that lasts, `finish` meets it too
            sent = 0
        if sent < sum(map(len, buffers)) and not self._send_rest(buffers, sent, begun):
            return
        try:
            while answering.received(sock.recv_into(answering.space), ask, plan) == MORE:
                if not self._wait(_READ, begun + self._timeout_s - time.monotonic()):
                    raise BlockingIOError
        except BlockingIOError:
            self._fault = _lost(TimeoutError("no whole answer in time"))
        except OSError as error:
            self._fault = _lost(error)
        except ConnectionLost as error:
            self._fault = error

    def _send_rest(self, buffers: Sequence[bytes | memoryview], sent: int, begun: float) -> bool:
        """Send what the kernel did not take at once; False: something came, or failed, before."""
        left = deque([memoryview(buffer) for buffer in buffers])
        _advance(left, sent)
        while left:
            ready = self._wait(_READ | _WRITE, begun + self._timeout_s - time.monotonic())
            try:
                if ready != _WRITE:
                    break
                _advance(left, self._socket.sendmsg(left, (), socket.MSG_DONTWAIT))
            except OSError:
                break
        self._unsent = [*left]
        return not left

    def finish(self, request: Request) -> Response:
        """Go on with the request that `ask` has begun. Raises ConnectionLost, BadAnswer."""
        if self._fault is not None:
            raise self._fault
        deadline = time.monotonic() + self._timeout_s
        region = self._region if can_share(request) else None
        reader = ResponseReader(request if region is None else region.bare(request))
        reader.take(self._answering.unread)
        try:
            is_sent = not self._unsent or self._send(self._unsent, reader, deadline)
            while reader.response is None:
                self._receive(reader, deadline)
        except OSError as error:
            raise _lost(error) from error
        if not is_sent:
            reader.response.keep_alive = False
        return reader.response if region is None else region.collect(request, reader.response)

    def exchange(self, request: Request, timeout_s: float) -> Response:
        """Send one request and return its answer. Raises ConnectionLost, BadAnswer."""
        deadline = time.monotonic() + timeout_s
        if can_share(request) and (self.asks_memory or self._region is not None):
            region = self._shared_memory(timeout_s)
            placed = None if region is None else region.place(request)
            if region is not None and placed is not None:
                return region.collect(request, self._exchange(placed, deadline))
        return self._exchange(request, deadline)

    def _shared_memory(self, timeout_s: float) -> Region | None:
        """Return the connection's shared memory, asked for once. Raises ConnectionLost."""
        if self.asks_memory:
            self.asks_memory = False
            try:
                self._socket.settimeout(timeout_s)
                self._region, may_ask_again = ask_for(self._socket, self._fixed, REGION_BYTES)
                self._socket.setblocking(True)
            except OSError as error:
                raise _lost(error) from error
            self.is_refused_memory = not may_ask_again
        return self._region

    def _exchange(self, request: Request, deadline: float) -> Response:
        reader = ResponseReader(request)
        try:
            self._send_all(request, reader, deadline)
            while reader.response is None:
                self._receive(reader, deadline)
        except OSError as error:
            raise _lost(error) from error
        return reader.response

    def _send_all(self, request: Request, reader: ResponseReader, deadline: float) -> None:
        """Send head and body; stop where an answer comes first (that ends the connection)."""
        head = memoryview(format_head(request, self._fixed))
        body = [memoryview(buffer).cast("B") for buffer in request.sent_body if len(buffer)]
        if request.body_bytes > EXPECT_ABOVE_BYTES:
            self._send([head], reader, deadline)
            self._await_leave(reader, deadline)
            head = memoryview(b"")
        if reader.response is None and not self._send([head, *body], reader, deadline):
            while reader.response is None:
                self._receive(reader, deadline)
        if reader.response is not None:
            reader.response.keep_alive = False  # the body, or a part of it, was never sent

    def _await_leave(self, reader: ResponseReader, deadline: float) -> None:
        """Wait for 100 Continue, a final answer, or as long as that may take."""
        until = min(deadline, time.monotonic() + EXPECT_WAIT_S)
        while not reader.may_send_body and reader.response is None:
            if not self._receive_once(reader, until):
                return

    def _send(self, buffers: Sequence[memoryview], reader: ResponseReader, deadline: float) -> bool:
        """Send buffers; return False where an answer has begun before all was sent."""
        queue = deque(buffer for buffer in buffers if len(buffer))
        while queue:
            try:
                _advance(queue, self._write(queue))
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                wanted = _READ | _WRITE
            except ssl.SSLWantReadError:
                wanted = _READ
            except (BrokenPipeError, ConnectionResetError):
                return False  # what was answered before lies in the receive buffer
            ready = self._wait(wanted, deadline - time.monotonic())
            if not ready:
                raise TimeoutError("the request could not be sent in time")
            if ready & _READ and self._receive_once(reader, 0.0) and reader.has_answer:
                return False
        return True

    def _write(self, queue: deque[memoryview]) -> int:
        if self._is_tls:
            return self._socket.send(queue[0][:_SEND_BYTES])
        return self._socket.sendmsg(queue, (), self._no_wait)

    def _receive(self, reader: ResponseReader, deadline: float) -> None:
        if not self._receive_once(reader, deadline):
            raise TimeoutError("no whole answer in time")

    def _receive_once(self, reader: ResponseReader, deadline: float) -> bool:
        """Receive what there is; False if nothing came until the deadline (0: now)."""
        while True:
            try:
                reader.received(self._socket.recv_into(reader.buffer(), 0, self._no_wait))
                return True
            except (BlockingIOError, ssl.SSLWantReadError):
                wanted = _READ
            except ssl.SSLWantWriteError:
                wanted = _WRITE
            if not self._wait(wanted, deadline - time.monotonic()):
                return False

    def _wait(self, events: int, seconds: float) -> int:
        if events != self._polled:
            self._poll.modify(self._socket, events)
            self._polled = events
        ready = self._poll.poll(max(0.0, seconds) * 1000)
        return ready[0][1] if ready else 0


class IdleConnections(Generic[C]):
    """What a pool is made of: addresses, and the connections that wait there for a request."""

    def __init__(
        self,
        addresses: Sequence[Address],
        fixed: Sequence[bytes],
        *,
        timeout_s: float,
        context: ssl.SSLContext | None = None,
        shares_memory: bool = False,
    ) -> None:
        """Connect to nothing yet.

        fixed: header lines of every request, by address; timeout_s: of a request
        """
        self._addresses = addresses
        self._shares_memory = [
            shares_memory and IS_SUPPORTED and bool(address.path) for address in addresses
        ]
        self._fixed = fixed
        self._timeout_s = timeout_s
        self._context = context
        self._idle: list[deque[C]] = [deque() for _ in addresses]

    def close(self) -> None:
        """Close what is idle."""
        for idle in self._idle:
            while idle:
                idle.pop().close()

    def _keep(self, replica: int, connection: C, response: Response) -> None:
        if response.keep_alive:
            self._give(replica, connection)
        else:
            connection.close()

    def _give(self, replica: int, connection: C) -> None:
        idle = self._idle[replica]
        if len(idle) < MAX_IDLE:  # threads at the same time may make it a few more
            idle.append(connection)
        else:
            connection.close()


class ConnectionPool(IdleConnections[Connection]):
    """Connections to several addresses, kept alive between requests; for any number of threads."""

    def exchange(self, request: Request) -> Response:
        """Send one request to its address. Raises ConnectionLost, BadAnswer."""
        connection = self._take(request.replica)
        try:
            response = connection.exchange(request, self._timeout_s)
        except ConnectionLost as error:
            connection.close()
            if connection.has_answered:
                raise
            raise never_answered(self._addresses[request.replica], error) from error
        except BaseException:
            connection.close()
            raise
        connection.has_answered = True
        if connection.is_refused_memory:
            self._shares_memory[request.replica] = False  # it is not offered there
        self._keep(request.replica, connection, response)
        return response

    def ask(self, ask: Ask, identity: str) -> Connection | None:
        """Make a request at once, if a connection is ready for it. Where the answer has not landed
        then, `finish` goes on with the connection returned."""
        connection = self._pop(ask.replica)
        if connection is None:
            return None
        if connection.can_ask:
            try:
                connection.ask(ask, identity)
            except BaseException:
                connection.close()
                raise
            if not ask.is_landed:
                return connection
        self._give(ask.replica, connection)
        return None

    def finish(self, connection: Connection, request: Request) -> Response:
        """Go on with a request that `ask` has begun. Raises ConnectionLost, BadAnswer."""
        try:
            response = connection.finish(request)
        except BaseException:
            connection.close()
            raise
        self._keep(request.replica, connection, response)
        return response

    def _take(self, replica: int) -> Connection:
        return self._pop(replica) or Connection(
            self._addresses[replica],
            self._fixed[replica],
            self._context,
            timeout_s=self._timeout_s,
            asks_memory=self._shares_memory[replica],
        )

    def _pop(self, replica: int) -> Connection | None:
        """Return an idle connection that is still open."""
        idle = self._idle[replica]
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.is_usable():
                return connection
            connection.close()
        return None


def _lost(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"{type(error).__name__}: {error}")


def not_connected(address: Address, error: Exception) -> ConnectionLost:
    """Return what a connection that did not come about is told as."""
    advice = ""
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "; ssl_context=ssl.create_default_context(cafile=FILE) trusts another certificate"
    return ConnectionLost(f"{address.url}: {error}{advice}", connected=False)


def never_answered(address: Address, error: ConnectionLost) -> ConnectionLost:
    """Return what the end of a connection without any answer is told as."""
    if address.tls or address.path or isinstance(error.__cause__, TimeoutError):
        return error
    return ConnectionLost(f"{error}; a port that speaks https:// ends connections like this")


def connect(address: Address, context: ssl.SSLContext | None) -> socket.socket:
    """Return a connected socket, with CONNECT_TIMEOUT_S as its timeout. Raises OSError."""
    if address.path:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.settimeout(CONNECT_TIMEOUT_S)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
            plain.connect(address.path)
        except BaseException:
            plain.close()
            raise
        return plain
    plain = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return plain
        context = context or ssl.create_default_context()
        return context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _advance(queue: deque[memoryview], sent: int) -> None:
    """Drop what was sent from the front."""
    while queue and sent >= len(queue[0]):
        sent -= len(queue.popleft())
    if queue and sent:
        queue[0] = queue[0][sent:]
