"""The blocking client: sessions and steps over kept-alive connections, for any thread."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from numpy.typing import NDArray

from engram_client import verbs
from engram_client.arrays import Array
from engram_client.connection import Connection, ConnectionPool
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


def drive(
    effects: Effects[T], exchange: Callable[[Request], Response], sleep: Callable[[float], None]
) -> T:
    """Carry out the effects of one call."""
    try:
        effect = next(effects)
        while True:
            if isinstance(effect, Pause):
                sleep(effect.seconds)
                effect = effects.send(None)
                continue
            try:
                response = exchange(effect)
            except EngramClientError as error:
                effect = effects.throw(error)
            else:
                effect = effects.send(response)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        effects.close()


class EngramClient:
    """A service, or several replicas of it, reached over blocking connections.

    Safe in threads; one session is pushed by one thread at a time. What a call may raise besides
    its own: EngramProblem (a refusal, by class and `code`), EngramUnavailable (nothing answered
    within `reconnect_s`), PushedMeanwhile (by another thread), BadAnswer.
    """

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
        """Connect to nothing yet.

        urls: http://host:port, https://host:port or unix:/path, in the order to be tried
        owner: one incarnation of a runner; timeout_s: of one request
        transport: auto uses shared memory where a service on a Unix socket offers it
        Raises ValueError.
        """
        setup = set_up(urls, api_key, owner, reconnect_s, transport)
        self._protocol = setup.protocol
        self._direct = Direct(setup.protocol)
        self._pool = ConnectionPool(
            setup.addresses,
            setup.fixed,
            timeout_s=timeout_s,
            context=ssl_context,
            shares_memory=transport == "auto",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Sessions stay in the service until they expire."""
        self._pool.close()

    def info(self) -> dict[str, Any]:
        """Return what is served: geometry, table identity, limits, numerics."""
        return self._run(self._protocol.info())

    def weights(self, layer: int, names: Sequence[str] = ("qk", "wkv")) -> dict[str, NDArray[Any]]:
        """Return weights: qk float32 [hc, dim], wkv bfloat16 [(hc+1)*dim, cols*head_dim]."""
        return self._run(verbs.weights(self._protocol, layer, names))

    def open_session(
        self, position: int = 0, lookback: Sequence[int | None] | None = None
    ) -> Session:
        """Open a session.

        lookback: the min(position, max_ngram_size - 1) token ids before `position`, oldest first,
            None = dead
        """
        return Session(self, self._run(self._protocol.open_session(position, lookback)))

    def close_owner(self, owner: str) -> int:
        """Close all sessions of a former incarnation of a runner; return how many."""
        return self._run(self._protocol.close_owner(owner))

    def step(
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
        """Push and read any number of sequences and layers in one call.

        segments: in the order of the flat batch, T positions in all
        output: residual (with `residual`, one layer), kv, rows, hash_ids or none
        out: where the answer goes: an array, or arrays by layer
        residual: bfloat16 or float32 [T, hc_mult, dim]
        truncate: each session ends where its segment ends
        Above the service's limits the step is made in several calls, each of them whole.
        Raises EngramProblem: `segments` lists every refused one; nothing was changed.
        """
        options = StepOptions(tuple(layers), output, stored, truncate, wait_ms, ahead)
        ask = step_ask(self._direct, segments, options, residual, out)
        if ask is None:
            return self._run(verbs.step(self._protocol, segments, options, residual, out))
        try:
            begun = self._pool.ask(ask, self._protocol.identity)
            if ask.is_landed:
                return ask.answer()
            ask.unmark()
            given = tuple(ask.held)
            effects = verbs.step(self._protocol, segments, options, residual, out, given=given)
            if begun is None:
                return self._run(effects)
            return self._go_on(effects, ask, begun)
        finally:
            ask.leave()

    def _run(self, effects: Effects[T]) -> T:
        return drive(effects, self._pool.exchange, time.sleep)

    def _apply(
        self,
        state: SessionState,
        layer: int,
        residual: Array,
        position: int | None,
        out: Array | None,
    ) -> Array:
        ask = self._direct.ask(state, layer, residual, position, out)
        begun = None if ask is None else self._pool.ask(ask, self._protocol.identity)
        if ask is not None and ask.is_landed:
            return ask.result  # type: ignore[no-any-return]
        effects = verbs.apply(self._protocol, state, layer, residual, position, out)
        if ask is None or begun is None:
            return self._run(effects)
        return self._go_on(effects, ask, begun)

    def _go_on(self, effects: Effects[T], ask: Ask, connection: Connection) -> T:
        """Carry out the effects of a call whose request was made already."""
        begun = [connection]

        def exchange(request: Request) -> Response:
            if begun and ask.is_of(request):
                return self._pool.finish(begun.pop(), request)
            return self._pool.exchange(request)

        try:
            return drive(effects, exchange, time.sleep)
        finally:  # where a session was opened again meanwhile, the call is another
            for connection in begun:
                connection.close()


class Session(SessionView):
    """One sequence: its ids live in the service and in this client."""

    def __init__(self, client: EngramClient, state: SessionState) -> None:
        super().__init__(state)
        self._client = client
        self._protocol = client._protocol
        self._run = client._run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def push(
        self,
        ids: Any,
        mask: Any = None,
        truncate: bool = False,
        *,
        position: int | None = None,
        ahead: bool = True,
    ) -> None:
        """Push token ids at a position, by default at the end; kv of all layers starts there.

        ids: integers [T]; mask: bool [T]  False = dead
        truncate: the session ends behind these ids, whatever was there
        """
        self._run(
            self._protocol.push(
                self.state, ids, mask, position=position, truncate=truncate, ahead=ahead
            )
        )

    def apply(
        self, layer: int, residual: Array, position: int | None = None, *, out: Array | None = None
    ) -> Array:
        """Return the updated residual [T, hc_mult, dim], by default of the newest T positions."""
        return self._client._apply(self.state, layer, residual, position, out)

    def kv(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return keys and value, bfloat16 [count, hc_mult + 1, dim], by default of the newest."""
        return self._run(verbs.read(self._protocol, self.state, "kv", layer, position, count, out))

    def rows(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        stored: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Return rows, bfloat16 [count, cols, head_dim], or stored: uint8 [count, cols, bytes]."""
        return self._run(
            verbs.read(
                self._protocol, self.state, "rows", layer, position, count, out, stored=stored
            )
        )

    def hash_ids(
        self,
        layer: int,
        position: int | None = None,
        count: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return row ids, int64 [count, cols]."""
        return self._run(
            verbs.read(self._protocol, self.state, "hash_ids", layer, position, count, out)
        )

    def rewind(self, position: int) -> None:
        """Cut the session to a length not below `base`."""
        self._run(self._protocol.rewind(self.state, position))

    def fork(self, position: int | None = None) -> Session:
        """Open a second session with this one's history up to a position."""
        return Session(self._client, self._run(self._protocol.fork(self.state, position)))

    def close(self) -> None:
        """Close the session."""
        self._run(self._protocol.close(self.state))
