"""What both clients begin with: addresses, header lines, a protocol; and what a session tells."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engram_client import wire
from engram_client.http1 import Address, header_value, parse_address
from engram_client.protocol import EngramProtocol
from engram_client.state import SessionState

RECONNECT_S = 60.0
TIMEOUT_S = 60.0
_OWNER = re.compile("[!-~]{1,128}")
"""As every service takes it."""


@dataclass(frozen=True)
class Setup:
    """What both clients are made of. fixed: header lines of every request, by address."""

    addresses: list[Address]
    fixed: list[bytes]
    protocol: EngramProtocol


def set_up(
    urls: str | Sequence[str],
    api_key: str | None,
    owner: str | None,
    reconnect_s: float,
    transport: str,
) -> Setup:
    """Check what a client is given. Raises ValueError."""
    if transport not in ("auto", "socket"):
        raise ValueError(f"transport: expected auto or socket, got {transport!r}")
    addresses = [parse_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not addresses:
        raise ValueError("urls: expected at least one, got none")
    common = "Accept-Encoding: identity\r\n"
    if api_key is not None:
        common += f"Authorization: Bearer {header_value('api_key', api_key)}\r\n"
    if owner is not None:
        if not _OWNER.fullmatch(owner):
            raise ValueError(
                f"owner: expected 1 to 128 visible ASCII characters without spaces, got {owner!r}"
            )
        common += f"{wire.OWNER}: {owner}\r\n"
    fixed = [f"Host: {address.authority}\r\n{common}".encode("ascii") for address in addresses]
    protocol = EngramProtocol(
        len(addresses), owner=owner, reconnect_s=reconnect_s, clock=time.monotonic
    )
    return Setup(addresses, fixed, protocol)


class SessionView:
    """What is known of a session without asking: its numbers as of the last answer."""

    def __init__(self, state: SessionState) -> None:
        self.state = state

    @property
    def session_id(self) -> int:
        """What other ranks name it by."""
        return self.state.session_id

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return self.state.length

    @property
    def base(self) -> int:
        """The lowest length it can be rewound to."""
        return self.state.floor

    @property
    def epoch(self) -> int:
        """Its fence; other ranks name it with the session id."""
        return self.state.epoch

    def __repr__(self) -> str:
        numbers = f"length={self.length}, base={self.base}, epoch={self.epoch}"
        return f"{type(self).__name__}({self.session_id}, {numbers})"
