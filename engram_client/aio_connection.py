"""The connections of the asyncio client: the loop receives into the reader's memory."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Sequence
from typing import Any

from engram_client.connection import (
    CONNECT_TIMEOUT_S,
    IdleConnections,
    connect,
    never_answered,
    not_connected,
)
from engram_client.direct import MORE, OTHER, Answering, Ask, Plan
from engram_client.http1 import (
    EXPECT_ABOVE_BYTES,
    EXPECT_WAIT_S,
    Address,
    Request,
    Response,
    ResponseReader,
    format_head,
)
from engram_client.problems import ConnectionLost, EngramClientError
from engram_client.shared import REGION_BYTES, Region, ask_for, can_share
from engram_client.wire import UNIX_SEND_BYTES

_SLICE_BYTES = 256 << 10
"""A transport may copy what the socket does not take at once: at most this much."""


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection, one request at a time; the loop receives into the reader's memory."""

    def __init__(self) -> None:
        self.has_answered = False
        self.has_asked = False  # for shared memory
        self.region: Region | None = None
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._failure: EngramClientError | None = None
        self._is_paused = False
        self._changed = asyncio.Event()
        self._answering = Answering()
        self._asked: tuple[Ask, Plan] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the answer's next bytes go."""
        if self._asked is not None:
            return self._answering.space
        if self._is_idle():
            return memoryview(bytearray(1))  # for a byte that nobody asked for
        assert self._reader is not None
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of them; bytes that nobody asked for end the connection."""
        if self._asked is not None:
            self._answered(nbytes, *self._asked)
            return
        try:
            if self._is_idle():
                raise ConnectionLost("bytes that nobody asked for")
            assert self._reader is not None
            self._reader.received(nbytes)
        except EngramClientError as error:
            self._fail(error)
        self._changed.set()

    def _answered(self, nbytes: int, ask: Ask, plan: Plan) -> None:
        came = self._answering.received(nbytes, ask, plan)
        if came == MORE:
            return
        self._asked = None
        if came == OTHER:  # `finish` wants the rest
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def eof_received(self) -> None:
        """Reuse nothing that the service has half-closed; the transport closes once it has sent."""
        self._fail(ConnectionLost("the connection was closed: by the service"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whoever waits here."""
        self._fail(ConnectionLost(f"the connection was closed: {exc or 'by the service'}"))

    def pause_writing(self) -> None:
        """Send no more for now: the transport holds what the kernel did not take."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Go on sending."""
        self._is_paused = False
        self._changed.set()

    def is_usable(self) -> bool:
        """Tell whether an idle connection is still open."""
        return self._failure is None

    def close(self) -> None:
        """Close at once."""
        self._fail(ConnectionLost("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, ask: Ask, identity: str, fixed: bytes, timeout_s: float) -> None:
        """Send one request and let its answer land; where it has not, `finish` goes on."""
        plan = self._answering.begin(ask, identity, fixed, self.region)
        data = b"".join(ask.buffers(plan))
        loop = asyncio.get_running_loop()
        self._asked, self._waiter = (ask, plan), loop.create_future()
        self._write(data)
        late = loop.call_later(timeout_s, self._fail, ConnectionLost("no whole answer in time"))
        try:
            if self._failure is None:
                await self._waiter
        finally:
            late.cancel()
            self._asked = self._waiter = None

    async def finish(self, request: Request) -> Response:
        """Go on with the request that `ask` has begun. Raises ConnectionLost, BadAnswer."""
        if self._failure is not None:
            raise self._failure
        region = self.region if can_share(request) else None
        self._reader = reader = ResponseReader(request if region is None else region.bare(request))
        reader.take(self._answering.unread)
        assert self._transport is not None
        self._transport.resume_reading()
        while reader.response is None:
            await self._change()
        return reader.response if region is None else region.collect(request, reader.response)

    async def exchange(self, request: Request, fixed: bytes) -> Response:
        """Send one request and return its answer. Raises ConnectionLost, BadAnswer."""
        if self.region is not None and can_share(request):
            placed = self.region.place(request)
            if placed is not None:
                return self.region.collect(request, await self._exchange(placed, fixed))
        return await self._exchange(request, fixed)

    async def _exchange(self, request: Request, fixed: bytes) -> Response:
        self._reader = reader = ResponseReader(request)
        head = format_head(request, fixed)
        if request.body_bytes > EXPECT_ABOVE_BYTES:
            self._write(head)
            await self._await_leave(reader)
            is_sent = await self._send(request.sent_body, reader)
        elif request.body_bytes <= _SLICE_BYTES:
            self._write(b"".join((head, *request.sent_body)))
            is_sent = True
        else:
            is_sent = await self._send([head, *request.sent_body], reader)
        while reader.response is None:
            await self._change()
        if not is_sent:
            reader.response.keep_alive = False
        return reader.response

    async def _send(self, buffers: Sequence[bytes | memoryview], reader: ResponseReader) -> bool:
        """Send in slices; return False where an answer has begun before all was sent."""
        for buffer in buffers:
            for begin in range(0, len(buffer), _SLICE_BYTES):
                while self._is_paused and not reader.has_answer:
                    await self._change()
                if reader.has_answer or self._failure is not None:
                    return False
                self._write(memoryview(buffer)[begin : begin + _SLICE_BYTES])
        return True

    async def _await_leave(self, reader: ResponseReader) -> None:
        """Wait for 100 Continue, a final answer, or as long as that may take."""
        try:
            async with asyncio.timeout(EXPECT_WAIT_S):
                while not reader.may_send_body and not reader.has_answer:
                    await self._change()
        except TimeoutError:
            return

    def _write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def _change(self) -> None:
        """Wait until bytes came or may be sent. Raises what has failed."""
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()

    def _is_idle(self) -> bool:
        return self._reader is None or self._reader.response is not None

    def _fail(self, error: EngramClientError) -> None:
        self._failure = self._failure or error
        self._changed.set()
        self._wake()


class AsyncConnectionPool(IdleConnections[AsyncConnection]):
    """Connections to several addresses, kept alive between requests, on one event loop."""

    async def exchange(self, request: Request) -> Response:
        """Send one request to its address. Raises ConnectionLost, BadAnswer."""
        wants_memory = self._shares_memory[request.replica] and can_share(request)
        connection = await self._take(request.replica, wants_memory=wants_memory)
        coming = connection.exchange(request, self._fixed[request.replica])
        return await self._take_answer(connection, request.replica, coming)

    async def ask(self, ask: Ask, identity: str) -> AsyncConnection | None:
        """Make a request at once, if a connection is ready for it. Where the answer has not landed
        then, `finish` goes on with the connection returned."""
        replica = ask.replica
        connection = self._pop(replica, wants_memory=self._shares_memory[replica])
        if connection is None:
            return None
        try:
            await connection.ask(ask, identity, self._fixed[replica], self._timeout_s)
        except BaseException:
            connection.close()
            raise
        if not ask.is_landed:
            return connection
        self._give(replica, connection)
        return None

    async def finish(self, connection: AsyncConnection, request: Request) -> Response:
        """Go on with a request that `ask` has begun. Raises ConnectionLost, BadAnswer."""
        coming = connection.finish(request)
        return await self._take_answer(connection, request.replica, coming)

    async def _take_answer(
        self, connection: AsyncConnection, replica: int, coming: Coroutine[Any, Any, Response]
    ) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await coming
        except TimeoutError as error:
            connection.close()
            raise ConnectionLost("no whole answer in time") from error
        except ConnectionLost as error:
            connection.close()
            if connection.has_answered:
                raise
            raise never_answered(self._addresses[replica], error) from error
        except BaseException:
            connection.close()
            raise
        connection.has_answered = True
        self._keep(replica, connection, response)
        return response

    async def _take(self, replica: int, *, wants_memory: bool) -> AsyncConnection:
        connection = self._pop(replica, wants_memory=wants_memory)
        if connection is not None:
            return connection
        if wants_memory:
            return await self._connect_sharing(replica)
        return await self._connect(self._addresses[replica])

    def _pop(self, replica: int, *, wants_memory: bool) -> AsyncConnection | None:
        """Return an idle connection that is still open."""
        idle = self._idle[replica]
        while idle:
            connection = idle.pop()
            if connection.is_usable() and (connection.has_asked or not wants_memory):
                return connection
            connection.close()
        return None

    async def _connect_sharing(self, replica: int) -> AsyncConnection:
        """Connect to a Unix socket, and ask for shared memory before a loop has the connection."""
        address = self._addresses[replica]
        try:
            sock, region, may_ask_again = await asyncio.to_thread(
                _ask, address, self._fixed[replica]
            )
            self._shares_memory[replica] = may_ask_again
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_unix_connection(AsyncConnection, sock=sock)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise ConnectionLost(f"{address.url}: {error}", connected=False) from error
        connection.has_asked, connection.region = True, region
        return connection

    async def _connect(self, address: Address) -> AsyncConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if address.path:
                    transport, connection = await loop.create_unix_connection(
                        AsyncConnection, address.path
                    )
                    line = transport.get_extra_info("socket")
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
                else:
                    context = self._context or (address.tls and ssl.create_default_context())
                    _, connection = await loop.create_connection(
                        AsyncConnection,
                        address.host,
                        address.port,
                        ssl=context if address.tls else None,
                    )
        except (OSError, ValueError) as error:
            raise not_connected(address, error) from error
        return connection


def _ask(address: Address, fixed: bytes) -> tuple[socket.socket, Region | None, bool]:
    """Return a new connection, its shared memory, and whether to ask on others."""
    sock = connect(address, None)
    try:
        region, may_ask_again = ask_for(sock, fixed, REGION_BYTES)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, region, may_ask_again
