"""The front door: every ordinary request passes here, before any route is looked for.

Pure ASGI. Finds out who asks, counts the request in and out, and turns every refusal and every
fault into a problem document.
"""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import problems
from service.bodies import ClientGoneError, Inbox, send_refusal
from service.calls import CALL, Call
from service.desk import GONE, Desk, answer_headers, request_id
from service.shm import connection_of
from service.state import ServiceState


class Door:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, state: ServiceState, desk: Desk) -> None:
        self._app = app
        self._state = state
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(self._state, Inbox(scope, receive), request_id(scope["headers"]))
        scope[CALL] = call
        reply = _Reply(send, call)
        code = GONE
        self._state.enter()
        try:
            code = await self._answer(scope, receive, reply)
        except ClientGoneError:
            await _abort(scope, receive)
        finally:
            call.close()
            self._state.leave()
            # In the next turn: uvloop writes the answer at the end of this one.
            record = partial(self._desk.record, call, code, reply.status, scope["headers"])
            asyncio.get_running_loop().call_soon(record)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> str:
        """Answer by a route or by a refusal; return "ok" or the refusal's code."""
        call: Call = scope[CALL]
        try:
            call.key = self._desk.identify(scope)
            if (connection := connection_of(scope)) is not None:
                connection.tenant = call.key.name
            await self._app(scope, receive, reply.send)
            return "ok"
        except ClientGoneError:
            raise
        except Exception as error:
            code, refusal = self._desk.refusal(call, error)
        if reply.status:
            raise ClientGoneError
        await send_refusal(call.inbox, reply.send, *problems.encode(refusal))
        return code


class _Reply:
    """The way out: every answer carries its request id, tensor answers their timing."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *answer_headers(self._call)]
        else:
            self._call.sent_bytes += len(message.get("body", b""))
        await self._send(message)


async def _abort(scope: Scope, receive: Receive) -> None:
    """Cut the connection of a client that is gone or does not read, where the server lets us."""
    connection = connection_of(scope)
    if connection is not None:
        connection.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
