"""Tell the service manager how the service is: systemd's notification protocol (Type=notify).

Source: sd_notify(3). Without a manager that asks for it, nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

READY, STOPPING = b"READY=1", b"STOPPING=1"


def notify(state: bytes) -> None:
    """Send a state to the socket that NOTIFY_SOCKET names; a manager that is gone is no error."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # Linux's abstract names begin with a zero byte
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto(state, address)
