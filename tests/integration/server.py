"""A real server process for tests: started on a free port, stopped by whoever started it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 90, 60


class Server:
    """`python -m service serve CKPT --port 0 ...`. Its output is kept, line by line."""

    def __init__(self, checkpoint: Path, *flags: str, uds: Path | None = None) -> None:
        command = [sys.executable, "-m", "service", "serve", str(checkpoint), *flags]
        command += ["--port", "0"] + (["--uds", str(uds)] if uds else [])
        env = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        self.uds = uds
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=env,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line, from now on, that matches; fails when the process ends before."""
        deadline = time.monotonic() + START_S
        while True:
            line = self._queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, "the server ended:\n" + "".join(self.lines[-40:])
            if found := re.search(pattern, line):
                return found

    def wait_until_ready(self) -> None:
        """Read on until it says `ready URL`."""
        self.port = int(self.wait_for(r"^ready http://127\.0\.0\.1:(\d+)")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None) -> httpx.Client:
        """A client over TCP."""
        return httpx.Client(base_url=self.url, timeout=30, headers=bearer(key), trust_env=False)

    def uds_client(self, key: str | None = None) -> httpx.Client:
        """A client over the Unix socket."""
        transport = httpx.HTTPTransport(uds=str(self.uds))
        return httpx.Client(
            base_url="http://localhost", timeout=30, transport=transport, headers=bearer(key)
        )

    def async_client(self, key: str | None = None, *, uds: bool = False) -> httpx.AsyncClient:
        """An asynchronous client over TCP or the Unix socket."""
        if uds:
            transport = httpx.AsyncHTTPTransport(uds=str(self.uds))
            return httpx.AsyncClient(
                base_url="http://localhost", timeout=30, transport=transport, headers=bearer(key)
            )
        return httpx.AsyncClient(
            base_url=self.url, timeout=30, headers=bearer(key), trust_env=False
        )

    def socket(self) -> socket.socket:
        """A plain connection, for bytes no client library would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def raw(self, request: bytes) -> tuple[int, bytes]:
        """Send bytes as they are, read until the server closes: status and everything after."""
        with self.socket() as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return read_answer(connection)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.end()

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(10)
            if self.process.stdout is not None:
                self.process.stdout.close()


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer; the connection may close or stay open after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        assert more, f"closed before an answer: {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while length is not None and len(body) < int(length[1]):
        more = connection.recv(65536)
        assert more, f"closed inside an answer: {head!r}"
        body += more
    return int(head.split(b" ", 2)[1]), body


@contextlib.contextmanager
def running(checkpoint: Path, *flags: str, uds: Path | None = None) -> Iterator[Server]:
    """A server that is ready, and that ends with status 0 at the end of the block."""
    server = Server(checkpoint, *flags, uds=uds)
    try:
        server.wait_until_ready()
        yield server
    except BaseException:
        server.process.kill()
        server.stop()
        raise
    status = server.stop()
    assert status == 0, f"exit status {status}:\n" + "".join(server.lines[-40:])
