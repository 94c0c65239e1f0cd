"""The asyncio twin: the same protocol, connections that receive into arrays as well."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from numpy.typing import NDArray

from engram_client import verbs
from engram_client.arrays import Array
from engram_client.connection import (
    CONNECT_TIMEOUT_S,
    MAX_IDLE,
    never_answered,
    not_connected,
)
from engram_client.direct import MORE, OTHER, Answering, Ask, Direct, Plan
from engram_client.direct_step import step_ask
from engram_client.exchange import Effects, Pause
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
from engram_client.protocol import StepOptions
from engram_client.segments import Segment, StepResult
from engram_client.setup import RECONNECT_S, TIMEOUT_S, SessionView, check_transport, set_up
from engram_client.shared import IS_SUPPORTED, REGION_BYTES, Region, ask_for, can_share
from engram_client.state import SessionState
from engram_client.wire import UNIX_SEND_BYTES

T = TypeVar("T")

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


class AsyncConnectionPool:
    """Connections to several addresses, kept alive between requests, on one event loop."""

    def __init__(
        self,
        addresses: Sequence[Address],
        fixed: Sequence[bytes],
        *,
        timeout_s: float,
        context: ssl.SSLContext | None = None,
        shares_memory: bool = False,
    ) -> None:
        self._addresses = addresses
        self._shares_memory = [
            shares_memory and IS_SUPPORTED and bool(address.path) for address in addresses
        ]
        self._fixed = fixed
        self._timeout_s = timeout_s
        self._context = context
        self._idle: list[list[AsyncConnection]] = [[] for _ in addresses]

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
        if response.keep_alive:
            self._give(replica, connection)
        else:
            connection.close()
        return response

    def _give(self, replica: int, connection: AsyncConnection) -> None:
        idle = self._idle[replica]
        if len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connections in self._idle:
            while connections:
                connections.pop().close()

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
                _ask, address.path, self._fixed[replica]
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


def _ask(path: str, fixed: bytes) -> tuple[socket.socket, Region | None, bool]:
    """Return a new connection, its shared memory, and whether to ask on others."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
        sock.connect(path)
        region, may_ask_again = ask_for(sock, fixed, REGION_BYTES)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, region, may_ask_again


async def drive(effects: Effects[T], exchange: Callable[[Request], Awaitable[Response]]) -> T:
    """Carry out the effects of one call."""
    try:
        effect = next(effects)
        while True:
            if isinstance(effect, Pause):
                await asyncio.sleep(effect.seconds)
                effect = effects.send(None)
                continue
            try:
                response = await exchange(effect)
            except EngramClientError as error:
                effect = effects.throw(error)
            else:
                effect = effects.send(response)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        effects.close()


class AsyncEngramClient:
    """`EngramClient` behind `await`, for one event loop."""

    def __init__(
        self,
        urls: str | Sequence[str],
        api_key: str | None = None,
        owner: str | None = None,
        *,
        reconnect_s: float = RECONNECT_S,
        timeout_s: float = TIMEOUT_S,
        ssl_context: ssl.SSLContext | None = None,
        transport: Literal["auto", "socket"] = "auto",
    ) -> None:
        """Connect to nothing yet; see `EngramClient`."""
        check_transport(transport)
        setup = set_up(urls, api_key, owner, reconnect_s)
        self._protocol = setup.protocol
        self._direct = Direct(setup.protocol)
        self._pool = AsyncConnectionPool(
            setup.addresses,
            setup.fixed,
            timeout_s=timeout_s,
            context=ssl_context,
            shares_memory=transport == "auto",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Sessions stay in the service until they expire."""
        self._pool.close()

    async def info(self) -> dict[str, Any]:
        """Return what is served: geometry, table identity, limits, numerics."""
        return await self._run(self._protocol.info())

    async def weights(
        self, layer: int, names: Sequence[str] = ("qk", "wkv")
    ) -> dict[str, NDArray[Any]]:
        """Return a layer's weights; see `EngramClient.weights`."""
        return await self._run(verbs.weights(self._protocol, layer, names))

    async def open_session(
        self, position: int = 0, lookback: Sequence[int | None] | None = None
    ) -> AsyncSession:
        """Open a session; see `EngramClient.open_session`."""
        state = await self._run(self._protocol.open_session(position, lookback))
        return AsyncSession(self, state)

    async def close_owner(self, owner: str) -> int:
        """Close all sessions of a former incarnation of a runner; return how many."""
        return await self._run(self._protocol.close_owner(owner))

    async def step(
        self,
        segments: Sequence[Segment],
        layers: Sequence[int] = (1, 14),
        output: str = "residual",
        out: Array | Mapping[int, Array] | None = None,
        *,
        residual: Array | None = None,
        truncate: bool = False,
        stored: bool = False,
        wait_ms: int = 0,
        ahead: bool = True,
    ) -> StepResult:
        """Push and read any number of sequences and layers; see `EngramClient.step`."""
        options = StepOptions(tuple(layers), output, stored, truncate, wait_ms, ahead)
        ask = step_ask(self._direct, segments, options, residual, out)
        if ask is None:
            return await self._run(verbs.step(self._protocol, segments, options, residual, out))
        try:
            begun = await self._pool.ask(ask, self._protocol.identity)
            if ask.is_landed:
                return ask.answer()
            ask.unmark()
            given = tuple(ask.held)
            effects = verbs.step(self._protocol, segments, options, residual, out, given=given)
            if begun is None:
                return await self._run(effects)
            return await self._go_on(effects, ask, begun)
        finally:
            ask.leave()

    async def _apply(
        self,
        state: SessionState,
        layer: int,
        residual: Array,
        position: int | None,
        out: Array | None,
    ) -> Array:
        ask = self._direct.ask(state, layer, residual, position, out)
        begun = None if ask is None else await self._pool.ask(ask, self._protocol.identity)
        if ask is not None and ask.is_landed:
            return ask.result  # type: ignore[no-any-return]
        effects = verbs.apply(self._protocol, state, layer, residual, position, out)
        if ask is None or begun is None:
            return await self._run(effects)
        return await self._go_on(effects, ask, begun)

    async def _go_on(self, effects: Effects[T], ask: Ask, connection: AsyncConnection) -> T:
        """Carry out the effects of a call whose request was made already."""
        begun = [connection]

        async def exchange(request: Request) -> Response:
            if begun and ask.is_of(request):
                return await self._pool.finish(begun.pop(), request)
            return await self._pool.exchange(request)

        try:
            return await drive(effects, exchange)
        finally:  # where a session was opened again meanwhile, the call is another
            for left in begun:
                left.close()

    async def _run(self, effects: Effects[T]) -> T:
        return await drive(effects, self._pool.exchange)


class AsyncSession(SessionView):
    """`Session` behind `await`."""

    def __init__(self, client: AsyncEngramClient, state: SessionState) -> None:
        super().__init__(state)
        self._client = client
        self._protocol = client._protocol
        self._run = client._run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def push(
        self,
        ids: Any,
        mask: Any = None,
        truncate: bool = False,
        *,
        position: int | None = None,
        ahead: bool = True,
    ) -> None:
        """Push token ids; see `Session.push`."""
        await self._run(
            self._protocol.push(
                self.state, ids, mask, position=position, truncate=truncate, ahead=ahead
            )
        )

    async def apply(
        self, layer: int, residual: Array, position: int | None = None, *, out: Array | None = None
    ) -> Array:
        """Return the updated residual; see `Session.apply`."""
        return await self._client._apply(self.state, layer, residual, position, out)

    async def kv(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return keys and value; see `Session.kv`."""
        return await self._read("kv", layer, position, count, out=out)

    async def rows(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        stored: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Return rows; see `Session.rows`."""
        return await self._read("rows", layer, position, count, stored=stored, out=out)

    async def hash_ids(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return row ids, int64 [count, cols]."""
        return await self._read("hash_ids", layer, position, count, out=out)

    async def rewind(self, position: int) -> None:
        """Cut the session to a length not below `base`."""
        await self._run(self._protocol.rewind(self.state, position))

    async def fork(self, position: int | None = None) -> AsyncSession:
        """Open a second session with this one's history up to a position."""
        return AsyncSession(
            self._client, await self._run(self._protocol.fork(self.state, position))
        )

    async def close(self) -> None:
        """Close the session."""
        await self._run(self._protocol.close(self.state))

    async def _read(
        self,
        output: str,
        layer: int,
        position: int | None,
        count: int | None,
        *,
        stored: bool = False,
        out: Array | None = None,
    ) -> Array:
        return await self._run(
            verbs.read(
                self._protocol,
                self.state,
                output,
                layer,
                position=position,
                count=count,
                stored=stored,
                out=out,
            )
        )
