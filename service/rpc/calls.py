"""One request of the gRPC door: who asks, what is common to all, and how a refusal ends it.

There is no Host check here: what it keeps out, a browser that was led astray, cannot speak gRPC.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from grpc import aio

from engram_client import wire
from engram_core.errors import EngramError
from service import problems, strict
from service.access import KEYLESS, Key, check_scope
from service.bodies import GRACE_S, MIN_BYTES_PER_S, ClientGoneError, Headers, Inbox
from service.calls import Call, check_table
from service.desk import request_id
from service.operations import Operation
from service.problems import RequestTimeout
from service.state import ServiceState

_HEADERS = wire.TABLE.lower(), wire.OWNER.lower()

MAX_TRAILER_BYTES = 6 << 10
"""Of a problem document in trailing metadata: clients take 8 KB of metadata in all."""


class Context(Protocol):
    """What is used of gRPC's context of an RPC."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the client's metadata."""

    def peer(self) -> str:
        """Return who asks, as gRPC names it."""

    async def read(self) -> Any:
        """Return the next message of a stream, EOF behind the last."""

    async def write(self, message: bytes) -> None:
        """Send a message."""

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Send metadata before the first message."""

    async def abort(
        self, code: Any, details: str, trailing_metadata: Sequence[tuple[str, str | bytes]]
    ) -> NoReturn:
        """End with a status; raises."""


def begin(state: ServiceState, operation: Operation, context: Context) -> tuple[Call, Headers]:
    """Return the call of an RPC that begins, and its metadata as headers."""
    headers = [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in context.invocation_metadata()
    ]
    call = Call(state, no_inbox(), request_id(headers))
    call.operation = operation
    peer = context.peer()
    call.peer = (peer, id(context)) if peer.startswith("unix:") else peer  # they all have one name
    return call, headers


def check(call: Call, headers: Headers) -> None:
    """Find out who asks, before a message is read.

    Raises Unauthenticated, Forbidden, SchemaError, WrongTable, Loading, ShardDown.
    """
    assert call.operation is not None
    call.key = identify(call.state, headers)
    check_scope(call.key, call.operation.scopes)
    call.headers = strict.engram_headers(headers, _HEADERS)
    check_table(call)


def identify(state: ServiceState, headers: Headers) -> Key:
    """Return the key that asks. Raises Unauthenticated."""
    if state.access.keyring is None:
        return KEYLESS
    return state.access.identify(headers, over_unix_socket=False)


async def read(context: Context) -> bytes | None:
    """Return the next message as it came; None: there is none any more."""
    raw = await context.read()
    return None if raw is aio.EOF else raw


async def write(context: Context, raw: bytes) -> None:
    """Send a message. Raises ClientGoneError; RequestTimeout: not taken at MIN_BYTES_PER_S.

    Initial metadata must be sent: a first message that took it along could not be given up.
    """
    try:
        async with asyncio.timeout(GRACE_S + len(raw) / MIN_BYTES_PER_S):
            await context.write(raw)
    except TimeoutError:
        raise _too_slow() from None
    except (aio.InternalError, aio.UsageError):
        raise ClientGoneError from None


class Pace:
    """Watches a stream's writes, one at a time, as `write` does a single one.

    There is one timer for all of them, at most: one for each costs 9 us (docs/notes/grpc.md).
    late: told of a write that is not taken in time
    """

    def __init__(self, late: Callable[[RequestTimeout], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._late = late
        self._end_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, context: Context, raw: bytes) -> None:
        """Send a message. Raises ClientGoneError."""
        end_s = self._loop.time() + GRACE_S + len(raw) / MIN_BYTES_PER_S
        self._end_s = end_s
        if self._timer is None or self._timer.when() > end_s:
            self._set(end_s)
        try:
            await context.write(raw)
        except (aio.InternalError, aio.UsageError):
            raise ClientGoneError from None
        finally:
            self._end_s = None

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, end_s: float) -> None:
        self.close()
        self._timer = self._loop.call_at(end_s, self._look)

    def _look(self) -> None:
        """See whether the write of now is late; the one that set the timer may be long over."""
        self._timer = None
        if self._end_s is None:
            return
        if self._loop.time() >= self._end_s:
            self._late(_too_slow())
        else:
            self._set(self._end_s)


class Begun:
    """A coroutine that is begun in this turn of the loop and goes on by itself; a task would begin
    it in the next one, behind whatever else is ready (docs/notes/grpc.md).

    done: told how it ended, None: well
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        done: Callable[[Exception | asyncio.CancelledError | None], None],
    ) -> None:
        self._coroutine, self._done = coroutine, done
        self._awaited: asyncio.Future[Any] | None = None
        self._go_on()

    def cancel(self) -> None:
        """Cancel what it waits for."""
        if self._awaited is not None:
            self._awaited.cancel()

    def _go_on(self, _: object = None) -> None:
        try:
            self._awaited = self._coroutine.send(None)
        except StopIteration:
            self._end(None)
        except (Exception, asyncio.CancelledError) as error:
            self._end(error)
        else:
            if self._awaited is None:  # it lets others go first
                asyncio.get_running_loop().call_soon(self._go_on)
                return
            # As a task does: it is awaited by whoever called `send`.
            self._awaited._asyncio_future_blocking = False
            self._awaited.add_done_callback(self._go_on)

    def _end(self, error: Exception | asyncio.CancelledError | None) -> None:
        self._awaited = None
        self._done(error)


def _too_slow() -> RequestTimeout:
    return RequestTimeout(
        "the answer was taken too slowly",
        expected=f">= {MIN_BYTES_PER_S} bytes/s after {GRACE_S:g} s",
    )


async def refuse(context: Context, error: EngramError) -> NoReturn:
    """End an RPC with a refusal: its status, and the problem document in trailing metadata."""
    kind = problems.kind_of(error)
    trailer = (
        ("engram-code", problems.code_of(error)),
        ("engram-problem-bin", fitting_text(error).encode()),
    )
    await context.abort(grpc.StatusCode[kind.grpc], error.message[:1024], trailer)


def fitting_text(error: EngramError) -> str:
    """Return the problem document, with as many of its segments as metadata takes.

    `segments_left_out` tells how many are missing; on a stream none is.
    """
    document = problems.document(error)
    text = problems.text(document)
    segments: list[Any] = document.get("segments", [])
    kept = len(segments)
    while len(text) > MAX_TRAILER_BYTES and kept:
        kept //= 2
        short = {"segments": segments[:kept], "segments_left_out": len(segments) - kept}
        text = problems.text(document | short)
    if len(text) <= MAX_TRAILER_BYTES:
        return text
    known = ("type", "title", "status", "code", "retry_after_ms")
    return json.dumps({name: document[name] for name in known if name in document})


def no_inbox() -> Inbox:
    """Return the inbox of a call whose bytes do not come over HTTP."""
    return Inbox({"headers": ()})
