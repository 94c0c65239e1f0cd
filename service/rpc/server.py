"""The gRPC server in the service's event loop: its port, its limits, health and reflection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engram_client.proto import engram_pb2 as pb
from engram_client.proto import message_options
from service.desk import Desk
from service.listeners import ListenError, bind_tcp
from service.rpc.calls import Context
from service.rpc.streams import StreamDoor
from service.rpc.unary import VERBS, UnaryDoor
from service.settings import GIB, Settings
from service.state import ServiceState

NAME: str = pb.DESCRIPTOR.services_by_name["Engram"].full_name
FRAMING_BYTES = 64 << 10
"""Of a message beside its tensors; what is let through beyond the limit is refused in words."""
GOODBYE_S = 0.5
"""For refusals that are on their way when the server stops."""

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity only
    ("grpc.keepalive_time_ms", 30_000),  # a peer that vanished holds nothing for longer
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


class RpcServer:
    """The door as a whole. Made and used in the event loop."""

    def __init__(self, state: ServiceState, desk: Desk) -> None:
        settings = state.settings
        self._settings = settings
        self._unary, self._streams = UnaryDoor(state, desk), StreamDoor(state, desk)
        self._health = health.aio.HealthServicer()
        self._is_ready: bool | None = None
        limit = max_message_bytes(settings) + FRAMING_BYTES
        self._server = aio.server(options=[*_OPTIONS, *message_options(limit)])
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _handlers(self) -> Any:
        table = {name: _handler(partial(self._unary.serve, verb)) for name, verb in VERBS.items()}
        table["Stream"] = _handler(self._streams.serve)
        return grpc.method_handlers_generic_handler(NAME, table)

    async def start(self) -> str:
        """Listen; return the URL. Raises ListenError."""
        settings = self._settings
        assert settings.grpc_port is not None
        # Ours says in words why an address cannot be had, and which one a name stands for.
        probe = bind_tcp(settings.host, settings.grpc_port, flag="--grpc-port")
        address = probe.sock.getsockname()[0]
        probe.close()
        address = f"[{address}]" if ":" in address else address
        port = self._add_port(f"{address}:{settings.grpc_port}")
        await self._server.start()
        scheme = "grpcs" if settings.tls_cert else "grpc"
        return f"{scheme}://{address}:{port}"

    def _add_port(self, address: str) -> int:
        settings = self._settings
        try:
            if settings.tls_cert is None or settings.tls_key is None:
                port: int = self._server.add_insecure_port(address)
            else:
                pair = settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()
                credentials = grpc.ssl_server_credentials([pair])
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from None
        return port

    async def tell(self, *, is_ready: bool) -> None:
        """Let the health service say whether requests are answered."""
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_ready else statuses.NOT_SERVING
        for name in ("", NAME):
            await self._health.set(name, status)

    def revoke(self, tenant: str) -> None:
        """End the streams of a key that is gone."""
        self._streams.revoke(tenant)

    async def stop(self) -> None:
        """End what is left, and stop listening."""
        self._streams.close()
        await self._server.stop(GOODBYE_S)


def max_message_bytes(settings: Settings) -> int:
    """Return the limit of a message: that of a body, as far as it is known before loading.

    Default sizes depend on the device; what they allow at most. Admission holds the true limit.
    """
    return (settings.in_flight_bytes or GIB) // 2


def _handler(serve: Callable[[Context], Awaitable[None]]) -> grpc.RpcMethodHandler:
    """Return a method handler that gives and takes messages as bytes."""

    async def handle(_: object, context: Context) -> None:
        await serve(context)

    return grpc.stream_stream_rpc_method_handler(handle)
