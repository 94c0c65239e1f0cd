"""Bytes on a real socket against the app in this process: any loop, TCP, TLS or a Unix socket."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from uvicorn.server import ServerState

from service.transport import Connection
from tests.service.door import InProcess

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]
Ask = Callable[[Talk], bytes]


@dataclass(frozen=True)
class Wire:
    """What a server listens on. path: a Unix socket; contexts: of server and client, for TLS."""

    path: Path | None = None
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None


async def talk_to(door: InProcess, talk: Talk, wire: Wire, *, is_fast: bool = True) -> bytes:
    """Serve one connection with a talk; every talk ends with the connection closed."""
    config = uvicorn.Config(door.app, http=Connection, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()

    def connect() -> Connection:
        connection = Connection(config, state, {})
        connection.fast_path = door.app.state.fast_path if is_fast else None
        return connection

    loop = asyncio.get_running_loop()
    server_context, client_context = wire.contexts or (None, None)
    if wire.path is not None:
        server = await loop.create_unix_server(connect, str(wire.path))
        reader, writer = await asyncio.open_unix_connection(str(wire.path))
    else:
        server = await loop.create_server(connect, "127.0.0.1", 0, ssl=server_context)
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=client_context)
    try:
        return await asyncio.wait_for(talk(reader, writer), 30)
    finally:
        writer.close()
        server.close()
        async with asyncio.timeout(30):
            while state.connections:
                await asyncio.sleep(0)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Read one answer, whole."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


def ask(
    runner: asyncio.Runner,
    door: InProcess,
    *requests: bytes,
    between: Callable[[], object] = lambda: None,
) -> list[bytes]:
    """Send requests over one connection, each after the answer to the one before."""
    answers: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for request in requests:
            writer.write(request)
            answers.append(await read_answer(reader))
            between()
        return b""

    runner.run(talk_to(door, talk, Wire()))
    return [*map(timeless, answers)]


def timeless(answer: bytes) -> bytes:
    """An answer without the headers that differ from request to request."""
    return re.sub(rb"(server-timing|date|x-request-id): [^\r]*\r\n", b"", answer)
