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
from service.logs import LineLimit
from service.operations import OPERATIONS, PUBLIC_PATHS
from service.state import ServiceState
from service.tracing import record_span, sampled_parent

log = structlog.get_logger("engram.request")

CONNECTION = "engram.connection"
"""The scope extension that names the connection (see `transport.py`)."""

QUIET = frozenset(
    operation.name
    for operation in OPERATIONS
    if not operation.scopes or operation.has_session or operation.has_tensor_body
)
"""Operations whose success is counted, not logged: probes, and what runners do every step."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_FAULTS_PER_S, _LINES_PER_S = 1, 10
"""Log lines: faults with their stack, and answers of each code."""
_GONE = "client_gone"


class Peer(Protocol):
    """A connection. tenant: the name of the key that asked last; abort: cut it at once."""

    tenant: str | None

    def abort(self) -> None: ...


class Door:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, state: ServiceState) -> None:
        self._app = app
        self._state = state
        self._faults = LineLimit(_FAULTS_PER_S)
        self._lines = LineLimit(_LINES_PER_S)

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
            self._record(call, code, reply.status, scope)

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
            self._log_fault(call, error)
            refusal = problems.SECRET_FAULT
        code = problems.code_of(refusal)
        if code == "internal" and refusal is not problems.SECRET_FAULT:
            self._log_fault(call, refusal)
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

    def _log_fault(self, call: Call, error: BaseException) -> None:
        held_back = self._faults.admit("fault")
        if held_back is not None:
            log.error("fault", request_id=call.request_id, held_back=held_back, exc_info=error)

    def _record(self, call: Call, code: str, status: int, scope: Scope) -> None:
        """Count the request; trace it if its caller does; log it if it is worth a line."""
        seconds = time.perf_counter() - call.started
        name = call.operation.name if call.operation else "none"
        self._count(call, name, code, seconds)
        if (parent := sampled_parent(scope["headers"])) is not None:
            record_span(parent, name, seconds, _told(call, code, status), is_fault=status >= 500)
        if code == "ok" and name in QUIET:
            return
        held_back = self._lines.admit(code)
        if held_back is None:
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
            **({"held_back": held_back} if held_back else {}),
        )

    def _count(self, call: Call, name: str, code: str, seconds: float) -> None:
        metrics = self._state.metrics
        metrics.requests.labels(name, code).inc()
        metrics.request_seconds.observe(seconds)
        if call.inbox.num_bytes:
            metrics.received_bytes.inc(call.inbox.num_bytes)
            metrics.body_bytes.observe(call.inbox.num_bytes)
        if call.sent_bytes:
            metrics.sent_bytes.inc(call.sent_bytes)
        for stage, stage_seconds in call.stages.items():
            metrics.stage_seconds.labels(stage).observe(stage_seconds)


def _told(call: Call, code: str, status: int) -> dict[str, str | int | float]:
    """Return a span's attributes: sizes and times, no ids and no names."""
    return {
        "http.response.status_code": status,
        "engram.code": code,
        "engram.request_id": call.request_id,
        "http.request.body.size": call.inbox.num_bytes,
        "http.response.body.size": call.sent_bytes,
        **{f"engram.{stage}_ms": seconds * 1e3 for stage, seconds in call.stages.items()},
    }


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


def _request_id(scope: Scope) -> str:
    """Return the client's X-Request-Id if it is a plain word, else a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _connection(scope: Scope) -> Peer | None:
    found: Peer | None = scope.get("extensions", {}).get(CONNECTION, {}).get("connection")
    return found


async def _abort(scope: Scope, receive: Receive) -> None:
    """Cut the connection of a client that is gone or does not read, where the server lets us."""
    connection = _connection(scope)
    if connection is not None:
        connection.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
