"""Ask the service of this container whether it is alive, or `ready`: exit 0, or 1 and the reason.

Alive is what a supervisor may act on: a service that loads for minutes is alive and not ready.
Where to ask is read from the service's own variables; a listener set by flags is not seen here.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing

TIMEOUT_S = 4.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def connection(environ: Mapping[str, str]) -> http.client.HTTPConnection:
    """Return a connection to where ENGRAM_UDS, or ENGRAM_HOST and ENGRAM_PORT, say."""
    if path := environ.get("ENGRAM_UDS"):
        return _UnixConnection(path)
    host = environ.get("ENGRAM_HOST", "127.0.0.1").strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    port = int(environ.get("ENGRAM_PORT", "8321"))
    if "ENGRAM_TLS_CERT" not in environ:
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    # The certificate names the service, not this address; nothing secret is sent or believed.
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def main(arguments: list[str]) -> int:
    """Print why not, if not. Returns the exit status."""
    if arguments not in ([], ["ready"]):
        print(f"expected nothing or ready, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    path = "/readyz" if arguments else "/livez"
    try:
        with closing(connection(os.environ)) as asked:
            asked.request("GET", path)
            answer = asked.getresponse()
            body = answer.read(400).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if answer.status != 200:
        print(f"{path}: {answer.status} {body}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
