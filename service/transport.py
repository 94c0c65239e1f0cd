"""HTTP/1.1 connections: uvicorn's, with bounds on what a peer may hold open or make us hold.

One HTTP parser (llhttp) for everything. Added here: a limit on heads, a timer on every connection
without a request, refusals of malformed HTTP as problem documents, and a way to cut a connection
whose peer does not read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engram_core.errors import BadRequest
from service import problems
from service.door import ABORT

MAX_HEAD_BYTES = 64 << 10
IDLE_S = 75.0
"""How long a connection may stay without a request; longer than clients keep theirs."""


class Connection(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_idle()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a peer that has said all it will say, unless it left inside a body."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the head is longer than {MAX_HEAD_BYTES} bytes")
        elif self.cycle is None or self.cycle.response_complete:
            self._watch_idle()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        scope: Any = self.scope
        scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        self._count_head(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(name + value)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as a problem document."""
        _, headers, body = problems.encode(BadRequest(msg, expected="HTTP/1.1"))
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in headers)]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", body]))
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also one whose peer never took its last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _count_head(self, data: bytes) -> None:
        self._head_bytes += len(data)

    def _watch_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
