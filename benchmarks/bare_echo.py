"""The floor of a request: a bare echo on asyncio's BufferedProtocol, as little HTTP as can be.

Receives a body into a buffer it keeps, answers with the same bytes. Checks nothing: not a server,
a yardstick. Says `ready URL` for a free TCP port and the Unix socket named.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import uvloop

from service.listeners import bind_tcp, bind_unix

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Echo(asyncio.BufferedProtocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(64 << 20))
        self._end = self._body = self._length = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if not self._body:
            head, found, _ = bytes(self._buffer[: min(self._end, 4096)]).partition(b"\r\n\r\n")
            if not found:
                return
            length = _LENGTH.search(head)
            self._body, self._length = len(head) + 4, int(length[1]) if length else 0
            if b"100-continue" in head:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._end == self._body + self._length:
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self._length
            body = self._buffer[self._body : self._end]
            if self._length <= 64 << 10:
                self._transport.write(head + body)
            else:
                self._transport.writelines([head, body])
            self._end = self._body = 0


async def main() -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    for listener in (bind_tcp("127.0.0.1", 0), bind_unix(Path(sys.argv[1]))):
        create = loop.create_server if listener.path is None else loop.create_unix_server
        await create(Echo, sock=listener.sock)
        print(f"ready {listener.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
