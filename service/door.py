"""The front door: every request passes here, before any route is looked for.

Pure ASGI. Finds out who asks, counts the request in and out, turns every refusal and every fault
into a problem document, and writes one log line. Token ids never reach a log.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram_core.errors import EngramError
from service import problems
from service.access import KEYLESS, Key
from service.bodies import ClientGoneError, Inbox, send_refusal
from service.calls import CALL, Call
from service.operations import OPERATIONS, PUBLIC_PATHS
from service.state import ServiceState

log = structlog.get_logger("engram.request")

CONNECTION = "engram.connection"
"""The scope extension that names the connection (see `transport.py`)."""


class Named(Protocol):
    """A connection. tenant: the key that asked last; abort: cut it at once."""

    tenant: str | None

    def abort(self) -> None: ...


def _connection(scope: Scope) -> Named | None:
    found: Named | None = scope.get("extensions", {}).get(CONNECTION, {}).get("connection")
    return found


QUIET = frozenset(
    operation.name
    for operation in OPERATIONS
    if not operation.scopes or operation.has_session or operation.has_tensor_body
)
"""Operations whose success is counted, not logged: probes, and what runners do every step."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_LOG_EVERY_S = 1.0
_GONE = "client_gone"


class Door:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, state: ServiceState) -> None:
        self._app = app
        self._state = state
        self._faults = _FaultLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(self._state, Inbox(scope, receive), _request_id(scope))
        scope[CALL] = call
        reply = _Reply(send, call)
        code = _GONE
        self._state.enter()
        try:
            code = await self._answer(scope, receive, reply)
        except ClientGoneError:
            await _abort(scope, receive)
        finally:
            call.close()
            self._state.leave()
            self._record(call, code, reply.status)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> str:
        """Answer by a route or by a refusal; return "ok" or the refusal's code."""
        call: Call = scope[CALL]
        try:
            call.key = self._identify(scope)
            if (connection := _connection(scope)) is not None:
                connection.tenant = call.key.name
            await self._app(scope, receive, reply.send)
            return "ok"
        except EngramError as error:
            refusal = error
        except ClientGoneError:
            raise
        except Exception as error:
            self._faults.write(call, error)
            refusal = problems.SECRET_FAULT
        code = problems.code_of(refusal)
        if code == "internal" and refusal is not problems.SECRET_FAULT:
            self._faults.write(call, refusal)
        if reply.status:
            raise ClientGoneError
        await send_refusal(call.inbox, reply.send, *problems.encode(refusal))
        return code

    def _identify(self, scope: Scope) -> Key:
        """Return who asks. Raises Misdirected, Unauthenticated."""
        access, server = self._state.access, scope.get("server")
        over_unix_socket = server is not None and server[1] is None
        if access.keyring is not None and scope["path"] in PUBLIC_PATHS:
            return KEYLESS
        return access.identify(scope["headers"], over_unix_socket=over_unix_socket)

    def _record(self, call: Call, code: str, status: int) -> None:
        """Count the request, and log it unless it is one of thousands a second."""
        metrics, seconds = self._state.metrics, time.perf_counter() - call.started
        name = call.operation.name if call.operation else "none"
        metrics.requests.labels(name, code).inc()
        metrics.request_seconds.observe(seconds)
        if call.inbox.num_bytes:
            metrics.received_bytes.inc(call.inbox.num_bytes)
            metrics.body_bytes.observe(call.inbox.num_bytes)
        if call.sent_bytes:
            metrics.sent_bytes.inc(call.sent_bytes)
        for stage, stage_seconds in call.stages.items():
            metrics.stage_seconds.labels(stage).observe(stage_seconds)
        if code == "ok" and name in QUIET:
            return
        log.info(
            "request",
            request_id=call.request_id,
            operation=name,
            code=code,
            status=status,
            received_bytes=call.inbox.num_bytes,
            sent_bytes=call.sent_bytes,
            ms=round(seconds * 1000, 3),
        )


class _Reply:
    """The way out: every answer carries its request id, tensor answers their timing."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers()]
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self._call.request_id.encode())]
        if self._call.stages:
            timing = ", ".join(
                f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in self._call.stages.items()
            )
            headers.append((b"server-timing", timing.encode()))
        return headers


class _FaultLog:
    """Writes faults with their stack, one a second at most."""

    def __init__(self) -> None:
        self._next = 0.0
        self._num_held_back = 0

    def write(self, call: Call, error: BaseException) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_held_back += 1
            return
        log.error(
            "fault", request_id=call.request_id, held_back=self._num_held_back, exc_info=error
        )
        self._next, self._num_held_back = now + _LOG_EVERY_S, 0


def _request_id(scope: Scope) -> str:
    """Return the client's X-Request-Id if it is a plain word, else a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


async def _abort(scope: Scope, receive: Receive) -> None:
    """Cut the connection of a client that is gone or does not read, where the server lets us."""
    connection = _connection(scope)
    if connection is not None:
        connection.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
