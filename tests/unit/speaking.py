"""A fake service that writes as the service does, and both clients behind one face."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engram_client import AsyncEngramClient, EngramClient
from engram_client.exchange import Exchange
from engram_client.http1 import Request, Response
from engram_client.wire import as_view, to_numpy
from tests.unit.fake_service import DIM, HC, FakeService
from tests.unit.raw_server import Peer, RawServer, serving

Send = Callable[[Peer, bytes], None]


def ordinary(response: Response) -> bytes:
    """An answer as the service writes it."""
    told = response.headers
    session = [
        *(f"{name}: {told[name]}" for name in ("x-engram-shape", "x-engram-dtype") if name in told),
        *("x-engram-length: 64", "x-engram-base: 0", "x-engram-epoch: 1795997082160419"),
    ]
    lines = [
        "HTTP/1.1 200 OK",
        "date: Mon, 30 Nov 2026 00:04:41 GMT",
        "content-type: application/octet-stream",
        *(session if "x-engram-shape" in told else ()),
        f"content-length: {len(response.body)}",
        "x-request-id: 9465b1c20237b0c8",
        "server-timing: receive;dur=0.016, check;dur=0.298",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + bytes(response.body)


class Speaking:
    """A fake service whose residuals and steps come as the service writes them.

    send: how an answer goes out; heads, bodies: of what was asked
    """

    def __init__(self) -> None:
        self.fake = FakeService(max_tokens=64)
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.send: Send = lambda peer, data: peer.send(data)
        self._plain = serving(self.fake, threading.Lock())

    def __call__(self, peer: Peer) -> None:
        read, send = peer.read_head, peer.send
        residuals: list[Response] = []
        handle = self.fake.handle

        def read_head() -> bytes:
            if head := read():
                self.heads.append(head)
            return head

        def handled(request: Request) -> Response:
            response = handle(request)
            is_tensor = "/residual" in request.target or "/v1/step" in request.target
            residuals[:] = [response] if is_tensor else []
            self.bodies.append(b"".join(map(bytes, request.body)))
            return response

        def answer(data: bytes) -> None:
            if residuals and residuals[0].status == 200:
                peer.send = send  # type: ignore[method-assign]
                self.send(peer, ordinary(residuals[0]))
                peer.send = answer  # type: ignore[method-assign]
            else:
                send(data)

        peer.read_head, peer.send = read_head, answer  # type: ignore[method-assign]
        self.fake.handle = handled  # type: ignore[method-assign]
        self._plain(peer)


class Blocking:
    """A session of a client, blocking."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client: Any = EngramClient(url, **options)
        self.session: Any = self.client.open_session()
        self.session.push([5, 6, 7, 8])

    def apply(self, *args: Any, **options: Any) -> Any:
        return self.session.apply(*args, **options)

    def step(self, *args: Any, **options: Any) -> Any:
        return self.client.step(*args, **options)

    def close(self) -> None:
        self.client.close()


class Awaiting:
    """The same with asyncio."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.client: Any = AsyncEngramClient(url, **options)
        self.session: Any = self._runner.run(self.client.open_session())
        self._runner.run(self.session.push([5, 6, 7, 8]))

    def apply(self, *args: Any, **options: Any) -> Any:
        return self._runner.run(self.session.apply(*args, **options))

    def step(self, *args: Any, **options: Any) -> Any:
        return self._runner.run(self.client.step(*args, **options))

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


@contextmanager
def talking(kind: Any, service: Any, **options: Any) -> Iterator[Any]:
    with RawServer([service]) as server, closing(kind(server.url, **options)) as talk:
        yield talk


def residual(count: int = 2, make: Any = ml_dtypes.bfloat16) -> Any:
    values = (np.arange(count * HC * DIM).reshape(count, HC, DIM) % 50).astype(np.float32)
    if isinstance(make, torch.dtype):
        return torch.from_numpy(values).to(make)
    return values.astype(make)


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing goes through the protocol."""

    def call(*_: Any, **__: Any) -> Any:
        raise AssertionError("the protocol was asked")

    monkeypatch.setattr(Exchange, "call", call)


def plain(value: Any) -> list[Any]:
    return to_numpy(as_view(value)).astype(np.float32).tolist()  # type: ignore[no-any-return]
