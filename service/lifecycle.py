"""The life of the process: bind, load while answering, serve, drain, stop.

Loading runs in a thread; everything periodic runs in the server's tick on the event loop. A first
SIGTERM or SIGINT drains, a second one ends the process at once. A failed engine ends it too: it
never serves on a guess.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn
from fastapi import FastAPI

from engram_core.errors import EngramError, Internal, SelfCheckFailed
from service.app import create_app
from service.desk import Desk
from service.fast_path import FastPath
from service.heap import bound_heap, settle
from service.listeners import Listener, bind
from service.loading import ProgressReport, load_model
from service.notify import READY, STOPPING, notify
from service.settings import Settings, SettingsError
from service.shm import later_on
from service.state import Model, Progress, ServiceState
from service.transport import IDLE_S, Connection

if TYPE_CHECKING:
    from service.rpc.server import RpcServer

log = structlog.get_logger("engram.life")

EXIT_START, EXIT_FAILED = 1, 70
CLOSE_S = 1.5
"""Kept of the shutdown timeout, after the drain, for closing connections and for the engine."""
STUCK_S = 30.0
"""No batch runs this long on a device that works."""
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter from another. Python's 5 ms is what an answer waits
when a lane gathers rows: p95 beside a prefill 16 ms instead of 7 (docs/notes/fast_path.md)."""
CUDA_SWITCH_S = 0.0001
"""The same on a GPU, where lanes look up and launch, and cores are many: beside prefills of 8,192
tokens a read's p99 was 0.69 ms instead of 1.34 (docs/notes/gpu_host.md)."""
_TICKS_PER_S = 10

Say = Callable[[str], None]
Load = Callable[[ProgressReport], Model]
Bars = Callable[[], AbstractContextManager[ProgressReport]]


class StartError(Exception):
    """Why the service did not start: one line for the operator."""


def serve(
    path: Path,
    settings: Settings,
    *,
    say: Say = print,
    bars: Bars = lambda: nullcontext(lambda *_: None),
) -> int:
    """Serve a checkpoint until a signal; return the exit status.

    say: takes the lines `listening URL` and `ready URL`; bars: shows loading's progress
    Raises StartError, SettingsError, ListenError.
    """
    sys.setswitchinterval(SWITCH_S)
    bound_heap()
    app = create_app(settings)
    config = _config(app, settings)
    listeners = bind(settings)
    server = Server(config, app, listeners, say)
    try:
        server.load(lambda report: _load(path, settings, report), bars)
        server.run()
    finally:
        for listener in listeners:
            listener.close()
    if not server.close():
        os._exit(server.exit_status)  # a thread of ours still runs: the interpreter cannot end
    if server.start_error is not None:
        raise _start_error(server.start_error) from server.start_error
    return server.exit_status


def _start_error(error: BaseException) -> StartError:
    """Return the line for an error of loading; one that nobody expected is logged whole."""
    if isinstance(error, EngramError):
        return StartError(error.message)
    if isinstance(error, SettingsError | OSError):
        return StartError(str(error))
    log.critical("start", exc_info=error)
    return StartError(f"loading failed: {type(error).__name__}: {error}")


class Server(uvicorn.Server):
    """uvicorn's server with our sockets, our drain and our ends."""

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, listeners: Sequence[Listener], say: Say
    ) -> None:
        super().__init__(config)
        self.exit_status = 0
        self.start_error: BaseException | None = None
        self._state: ServiceState = app.state.service
        self._fast_path: FastPath = app.state.fast_path
        self._listeners = listeners
        self._say = say
        self._loaded: Model | BaseException | None = None
        self._drain_until = 0.0
        self._is_drain_told = False
        self._loader = threading.Thread(name="loader", daemon=True)
        self._desk: Desk = app.state.desk
        self._rpc: RpcServer | None = None

    def load(self, load: Load, bars: Bars) -> None:
        """Say what is loaded, in a thread of its own, once every address is listened on."""
        state = self._state

        def run() -> None:
            with bars() as show:

                def report(stage: str, done: int, total: int) -> None:
                    state.progress = Progress(stage, done, total)
                    state.metrics.load_stage.set(done / total if total else 0.0)
                    show(stage, done, total)

                try:
                    loaded: Model | BaseException = load(report)
                except BaseException as error:
                    loaded = error
            self._loaded = loaded

        self._loader = threading.Thread(target=run, name="loader", daemon=True)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen on our sockets."""
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in self._listeners:
            create = loop.create_server if listener.path is None else loop.create_unix_server
            self.servers.append(
                await create(self._connection, sock=listener.sock, ssl=self.config.ssl)
            )
            self._say(f"listening {listener.url}")
        if self._state.settings.grpc_port is not None:
            await self._start_rpc()
        self.started = True
        self._loader.start()  # not before: a process that refuses to start can end

    async def _start_rpc(self) -> None:
        """Open the gRPC door. Raises ListenError."""
        from service.rpc.server import RpcServer  # 20 MB that only this door needs

        self._rpc = RpcServer(self._state, self._desk)
        self._rpc_url = await self._rpc.start()
        self._say(f"listening {self._rpc_url}")

    def _connection(self) -> asyncio.Protocol:
        connection = Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connection.fast_path = self._fast_path
        return connection

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second: cleanly, if nothing was in flight."""
        if self._state.is_draining:
            for listener in self._listeners:
                listener.close()
            os._exit(128 + sig if self._state.num_active else 0)
        self._state.is_draining = True
        notify(STOPPING)
        timeout = self._state.settings.shutdown_timeout_s
        self._drain_until = time.monotonic() + max(0.0, timeout - 2 * CLOSE_S)

    async def on_tick(self, counter: int) -> bool:
        """Do what is due every 0.1 s; return whether to stop."""
        if await super().on_tick(counter):
            return True
        state = self._state
        if self._rpc is not None:
            await self._rpc.tell(is_ready=state.is_ready)
        if self._loaded is not None and not state.is_loaded:
            return await self._take_over(self._loaded)
        failure = state.failure or self._stuck()
        if failure is not None:
            self._fail(failure)
            return True
        if state.is_draining:
            self._tell_draining()
            return not state.num_active or time.monotonic() >= self._drain_until
        if counter % _TICKS_PER_S == 0:
            self._tidy()
        return False

    def _tell_draining(self) -> None:
        """Log once that the drain began: here, since a signal may come amid another line."""
        if not self._is_drain_told:
            self._is_drain_told = True
            timeout_s = self._state.settings.shutdown_timeout_s
            log.info("draining", active=self._state.num_active, timeout_s=timeout_s)

    async def _take_over(self, loaded: Model | BaseException) -> bool:
        """Begin to serve what was loaded; return whether to stop because nothing was, or wrong."""
        if isinstance(loaded, SelfCheckFailed):
            self._fail(loaded)
            return True
        if isinstance(loaded, BaseException):
            self.start_error, self.exit_status = loaded, EXIT_START
            return True
        self._state.serve(loaded)
        self._state.regions.later = later_on(asyncio.get_running_loop())
        if loaded.backend.name == "cuda":
            sys.setswitchinterval(CUDA_SWITCH_S)
        loaded.engine.attach(asyncio.get_running_loop().call_soon)
        for line in loaded.ledger.table():
            log.info("memory", line=line)
        for listener in self._listeners:
            self._say(f"ready {listener.url}")
        if self._rpc is not None:
            await self._rpc.tell(is_ready=self._state.is_ready)
            self._say(f"ready {self._rpc_url}")
        notify(READY)
        return False

    def _tidy(self) -> None:
        """Sweep idle sessions, give idle memory back; read the keys file again if it changed."""
        state = self._state
        if not state.is_loaded:
            return
        state.model.engine.sweep()
        state.rest()
        keyring = state.access.keyring
        if keyring is None:
            return
        try:
            gone = keyring.refresh()
        except SettingsError as error:
            log.error("keys_file", problem=str(error))
            return
        for name in gone:
            state.model.engine.close_tenant(name)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.tenant == name:
                    connection.shutdown()
            if self._rpc is not None:
                self._rpc.revoke(name)
            log.info("key_removed", key=name)

    def _stuck(self) -> BaseException | None:
        """Return a failure if a batch has run for longer than any may."""
        if not self._state.is_loaded or self._state.model.engine.running_s < STUCK_S:
            return None
        return Internal(f"a batch has not ended within {STUCK_S:g} s")

    def _fail(self, failure: BaseException) -> None:
        log.critical("failed", exc_info=failure)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        self.exit_status = EXIT_FAILED

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close listeners and connections."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.is_idle_tls:
                connection.abort()  # else its peer's close_notify would be waited for
        if self._rpc is not None:
            await self._rpc.stop()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.abort()  # the drain is over, and so is what was in flight
        await asyncio.sleep(0)  # each is told, before the loop ends

    def close(self) -> bool:
        """Close the model; return whether all threads have ended. A failed one is not touched."""
        if self._loader.is_alive() or self.exit_status == EXIT_FAILED:
            return False
        if not self._state.is_loaded:
            return True
        closer = threading.Thread(target=self._state.model.close, name="closer", daemon=True)
        closer.start()
        closer.join(CLOSE_S)
        return not closer.is_alive()


def _load(path: Path, settings: Settings, report: ProgressReport) -> Model:
    """Load a model, as `load_model`, and settle: nothing large is made after it."""
    model = load_model(path, settings, report)
    settle()
    return model


def _config(app: object, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration. Raises SettingsError: a certificate that cannot be read."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, ssl.SSLError):  # "[SSL] PEM lib" tells nobody anything
            why = f"expected a certificate chain and its key without a passphrase, PEM; got {why}"
        raise SettingsError(
            f"tls_cert {settings.tls_cert}, tls_key {settings.tls_key}: {why}"
        ) from None
    return config
