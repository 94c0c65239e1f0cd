"""A scripted HTTP server on a free loopback port or a Unix socket, in a thread, for client tests.

Each accepted connection is handed to the next script; what a script read is kept, and what it
raises fails the test that closes the server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from engram_client.http1 import Request
from tests.unit.fake_service import FakeService

PATIENCE_S = 20.0


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""

    def read_head(self) -> bytes:
        """Read up to the empty line; b"" at the end."""
        while b"\r\n\r\n" not in self._buffer:
            if not (data := self.socket.recv(65536)):
                return b""
            self._buffer += data
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return head

    def read_body(self, head: bytes) -> bytes:
        """Read the body that a head announces; answers Expect first."""
        length = content_length(head)
        if b"100-continue" in head:
            self.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._buffer) < length:
            data = self.socket.recv(1 << 20)
            assert data, "the client closed in the middle of a body"
            self._buffer += data
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return body

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_to_end(self) -> int:
        """Read until the client closes; return how much came."""
        total = len(self._buffer)
        try:
            while data := self.socket.recv(1 << 20):
                total += len(data)
        except ConnectionResetError:
            pass
        return total

    def reset(self) -> None:
        """Close with a reset rather than an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


Script = Callable[[Peer], None]


def content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def answer(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    """The bytes of an answer with Content-Length."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class RawServer:
    """Plays scripts, one a connection; the last one is played for all further connections."""

    def __init__(self, scripts: Iterable[Script], path: Path | None = None) -> None:
        self._scripts = list(scripts)
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(path))
            self._listener.listen()
            self.url = f"unix:{path}"
        self.num_connections = 0
        self.faults: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is None and self.faults:
            raise self.faults[0]

    def stop(self) -> None:
        """Stop listening and end every connection."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(PATIENCE_S)
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts[min(self.num_connections, len(self._scripts) - 1)]
            self.num_connections += 1
            connection.settimeout(PATIENCE_S)
            self._sockets.append(connection)
            thread = threading.Thread(target=self._play, args=(script, connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _play(self, script: Script, connection: socket.socket) -> None:
        with connection:
            try:
                script(Peer(connection))
            except (ConnectionError, TimeoutError, OSError):
                return
            except BaseException as fault:
                self.faults.append(fault)


def serving(service: FakeService, lock: threading.Lock) -> Script:
    """A script that answers any number of requests from a fake service."""

    def script(peer: Peer) -> None:
        while head := peer.read_head():
            first, *lines = head.decode().split("\r\n")
            method, target, _ = first.split(" ")
            headers = [(n, v) for n, _, v in (line.partition(": ") for line in lines)]
            body = peer.read_body(head)
            with lock:
                response = service.handle(Request(method, target, headers, [body]))
            told = [f"{name}: {value}" for name, value in response.headers.items()]
            status = f"{response.status} -"
            if response.status == 204:
                peer.send(b"HTTP/1.1 204 -\r\n\r\n")
            else:
                peer.send(answer(bytes(response.body), *told, status=status))

    return script
