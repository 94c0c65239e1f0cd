"""A client's connection with shared memory, without the protocol above it."""

from __future__ import annotations

from engram_client import shared, wire
from engram_client.connection import Connection
from engram_client.http1 import Request, Response, parse_address


class Line:
    """One connection of a client that sends what it likes."""

    def __init__(self, url: str, key: str = "", *, asks: bool = True) -> None:
        address = parse_address(url)
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        self.fixed = f"Host: localhost\r\n{bearer}".encode()
        self.connection = Connection(address, self.fixed, None)
        self.region: shared.Region | None = None
        if asks:
            self.region = self.ask()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        if self.region is not None:
            self.region.memory.release()

    @property
    def memory(self) -> memoryview:
        assert self.region is not None
        return self.region.memory

    def ask(self) -> shared.Region:
        """Ask for a region as the client does."""
        sock = self.connection._socket
        sock.settimeout(30)
        region, _ = shared.ask_for(sock, self.fixed, 256 << 10)
        sock.setblocking(False)
        assert region is not None
        return region

    def send(self, request: Request) -> Response:
        return self.connection.exchange(request, 30)

    def share(self, request: Request) -> Response:
        """Send a request through the region, as the client does."""
        assert self.region is not None
        placed = self.region.place(request)
        assert placed is not None
        return self.region.collect(request, self.send(placed))

    def refused(self, request: Request) -> tuple[int, str]:
        response = self.send(request)
        return response.status, wire.load_json(bytes(response.body))["code"]
