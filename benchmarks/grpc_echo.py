"""A bare grpc.aio echo stream on uvloop, bytes as they come. Says `ready URL`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import uvloop

from engram_client.proto import message_options


async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Answer every message with itself."""
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def main() -> None:
    server = grpc.aio.server(options=message_options(-1))
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print(f"ready grpc://127.0.0.1:{port}", flush=True)
    await stopped.wait()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(main())
