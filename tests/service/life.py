"""The life of a service in this process: a real server whose loading a test holds and ends."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import uvicorn

from engram_core.engine import Engine
from engram_core.errors import Internal
from service.app import create_app
from service.lifecycle import Server, _config
from service.listeners import bind
from service.loading import ProgressReport, load_model
from service.settings import Settings
from service.state import Model

SETTINGS = Settings(
    port=0,
    device="cpu",
    max_tokens=64,
    kv_store_bytes=1 << 20,
    in_flight_bytes=2 << 20,
    memory_reserve_bytes=0,
)


class Life:
    """A server that listens and loads. Signals are given by `signal`, from any thread."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._may_load = threading.Event()
        self._load_error: BaseException | None = None
        self._engine: Engine | None = None
        self.report: ProgressReport = lambda *_: None
        self.has_begun = threading.Event()
        app = create_app(SETTINGS)
        listeners = bind(SETTINGS)
        self.url = listeners[0].url
        self.address = listeners[0].sock.getsockname()
        self.server = _LastingServer(_config(app, SETTINGS), app, listeners, lambda _: None)
        self.state = app.state.service
        self.server.load(self._load, lambda: nullcontext(lambda *_: None))
        self._thread = threading.Thread(target=self.server.run, daemon=True)

    def _load(self, report: ProgressReport) -> Model:
        self.report = report
        self.has_begun.set()
        assert self._may_load.wait(120)
        if self._load_error is not None:
            raise self._load_error
        return load_model(self._checkpoint, SETTINGS, report)

    def start(self) -> None:
        self._thread.start()
        assert self.has_begun.wait(60)

    def finish_loading(self, error: BaseException | None = None) -> None:
        self._load_error = error
        self._may_load.set()

    def fail(self, message: str) -> None:
        """As if the backend had failed, but the process stays to say so."""
        self.server.lasts = True
        self._engine = self.state.model.engine
        self._engine._scheduler.failure = Internal(message)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    @contextmanager
    def half_a_body(self) -> Iterator[socket.socket]:
        """A request that stays in flight until the block ends."""
        with socket.create_connection(self.address, timeout=30) as sending:
            sending.sendall(
                b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/octet-stream\r\nContent-Length: 100000\r\n\r\n"
            )
            yield sending

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"
        assert self.server.close()
        return self.server.exit_status


class _LastingServer(Server):
    """Can be made to outlast a failure, which ends the process in 0.1 s otherwise."""

    lasts = False

    async def on_tick(self, counter: int) -> bool:
        if self.lasts:
            return bool(await uvicorn.Server.on_tick(self, counter))
        return await super().on_tick(counter)


@contextmanager
def life(checkpoint: Path) -> Iterator[Life]:
    """A service that is loading; ended at the end of the block if it was not before."""
    made = Life(checkpoint)
    made.start()
    try:
        yield made
    finally:
        made.finish_loading()
        made.server.should_exit = True
        made._thread.join(60)
        if made._engine is not None:
            made._engine._scheduler.failure = None  # else nobody would end its threads
        made.server.exit_status = 0
        made.server.close()
        for listener in made.server._listeners:
            listener.close()
