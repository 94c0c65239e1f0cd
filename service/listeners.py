"""The sockets of the service, bound by us: errors in words, Unix sockets with mode 0600."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from service.settings import Settings

BACKLOG = 2048


class ListenError(Exception):
    """An address that cannot be listened on: one line for the operator."""


@dataclass
class Listener:
    """A bound socket and its URL. path: of a Unix socket."""

    sock: socket.socket
    url: str
    path: Path | None = None

    def close(self) -> None:
        """Close it, and remove a Unix socket's file."""
        self.sock.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def bind(settings: Settings) -> list[Listener]:
    """Bind what the settings ask for. Raises ListenError."""
    listeners: list[Listener] = []
    try:
        if settings.has_tcp:
            scheme = "https" if settings.tls_cert else "http"
            listeners.append(bind_tcp(settings.host, settings.port, scheme))
        if settings.uds is not None:
            listeners.append(bind_unix(settings.uds))
    except ListenError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def bind_tcp(host: str, port: int, scheme: str = "http", flag: str = "--port") -> Listener:
    """Bind a TCP port; 0 takes a free one. flag: what chooses another. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"host {host}: {error.strerror or error}") from None
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(_why(host, port, flag, error)) from None
    name = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else host
    return Listener(sock, f"{scheme}://{name}:{sock.getsockname()[1]}")


def _why(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what listens there, or choose another {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be taken by this user; choose one above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def bind_unix(path: Path) -> Listener:
    """Bind a Unix socket that only this user can open; a stale one is replaced.

    Raises ListenError: something else is there, or somebody listens on it.
    """
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    sock.listen(BACKLOG)
    return Listener(sock, f"unix:{path}", path)


def _remove_stale(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # nothing there, or bind will say what is wrong
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} is there and is no socket; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ListenError(f"somebody listens on {path}; stop it, or choose another --uds")
