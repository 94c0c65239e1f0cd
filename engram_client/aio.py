"""The asyncio twin: the same protocol behind `await`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from numpy.typing import NDArray

from engram_client import verbs
from engram_client.aio_connection import AsyncConnection, AsyncConnectionPool
from engram_client.arrays import Array
from engram_client.direct import Ask, Direct
from engram_client.direct_step import step_ask
from engram_client.exchange import Effects, Pause
from engram_client.http1 import Request, Response
from engram_client.problems import EngramClientError
from engram_client.protocol import StepOptions
from engram_client.segments import Segment, StepResult
from engram_client.setup import RECONNECT_S, TIMEOUT_S, SessionView, set_up
from engram_client.state import SessionState

T = TypeVar("T")


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
        setup = set_up(urls, api_key, owner, reconnect_s, transport)
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
        return await self._run(
            verbs.read(self._protocol, self.state, "kv", layer, position, count, out)
        )

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
        return await self._run(
            verbs.read(
                self._protocol, self.state, "rows", layer, position, count, out, stored=stored
            )
        )

    async def hash_ids(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return row ids, int64 [count, cols]."""
        return await self._run(
            verbs.read(self._protocol, self.state, "hash_ids", layer, position, count, out)
        )

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
