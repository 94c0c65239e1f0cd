"""A bare echo on the service's own connections: what a step costs before anything is done for it.

uvicorn with our `Connection`, and an ASGI application that reads a body and answers with as many
bytes as the query says; with `fastapi` as second argument a FastAPI application that answers the
body. Says `ready URL` for a free TCP port and the Unix socket named.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from service.listeners import Listener, bind_tcp, bind_unix
from service.transport import IDLE_S, Connection


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Take a body, answer ?NUMBER bytes."""
    while (await receive()).get("more_body"):
        pass
    body = bytes(int(scope["query_string"]))
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


plain = FastAPI(openapi_url=None)


@plain.post("/echo")
async def answer(request: Request) -> Response:
    """Answer a body as FastAPI does it."""
    return Response(await request.body(), media_type="application/octet-stream")


class EchoServer(uvicorn.Server):
    """uvicorn's server on our sockets."""

    def __init__(self, config: uvicorn.Config, listeners: list[Listener]) -> None:
        super().__init__(config)
        self._listeners = listeners

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in self._listeners:
            create = loop.create_server if listener.path is None else loop.create_unix_server
            self.servers.append(await create(self._connection, sock=listener.sock))
            print(f"ready {listener.url}", flush=True)
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        return Connection(config=self.config, server_state=self.server_state, app_state={})


def main() -> None:
    config = uvicorn.Config(
        plain if sys.argv[2:] == ["fastapi"] else echo,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE_S),
    )
    config.load()
    EchoServer(config, [bind_tcp("127.0.0.1", 0), bind_unix(Path(sys.argv[1]))]).run()


if __name__ == "__main__":
    main()
