"""Bodies in and out over ASGI: received into one buffer, sent from tensors' own memory.

Slow peers do not hold memory: a sender or reader must keep up 1 MB/s after its first second.
A refusal reaches also a client that writes its whole body first (it is read on for a while).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from starlette.types import Message, Receive, Scope, Send

from engram_core.errors import BadRequest
from service.admission import Lease
from service.problems import BodyTooLarge, LengthRequired, RequestTimeout

MIN_BYTES_PER_S = 1_000_000
GRACE_S = 1.0
READ_ON_S = 2.0
SMALL_BODY_BYTES = 64 << 10
"""An unread body up to this size is read before its refusal is sent; the connection lives on."""
SEND_BYTES = 256 << 10
"""A piece of an answer: what of it may lie in the transport when its bytes are given back."""

CONNECTION = "engram.connection"
"""The scope extension that names the connection (see `transport.py`)."""

Buffer = bytes | memoryview
Headers = list[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The client left before its body was complete, or before it took its answer."""


class Peer(Protocol):
    """What a connection tells of its other end."""

    @property
    def has_body(self) -> bool:
        """Whether the body of the request that came last is there."""

    @property
    def is_stalled(self) -> bool:
        """Whether what is sent would have to wait."""

    @property
    def unsent_bytes(self) -> int:
        """Of what was written, how much its host has not taken yet."""


def read_on_s(peer: Peer | None) -> float:
    """Return how long what comes behind a refusal is read on: until the peer may have taken it, and
    what was sent before it."""
    return READ_ON_S + (0 if peer is None else peer.unsent_bytes / MIN_BYTES_PER_S)


async def received_elsewhere() -> Message:
    """Stand for ASGI's receive where a body comes another way: nobody asks here."""
    raise AssertionError("this body does not come over ASGI")


class Inbox:
    """The body of one request, as it arrives."""

    def __init__(self, scope: Scope, receive: Receive = received_elsewhere) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        self.length = None if length is None else int(length) if length.isdigit() else -1
        self.is_chunked = b"transfer-encoding" in headers
        self.expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self.num_bytes = 0
        self.is_complete = not self.is_chunked and not self.length
        self._receive = receive
        self.peer: Peer | None = (
            (scope.get("extensions") or {}).get(CONNECTION, {}).get("connection")
        )

    @property
    def is_here(self) -> bool:
        """Whether all of it has arrived: nothing is waited for."""
        return self.peer is not None and self.peer.has_body

    async def next(self) -> bytes:
        """Return the next bytes. Raises ClientGoneError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_complete = True
            raise ClientGoneError
        self.is_complete = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        self.num_bytes += len(body)
        return body

    async def left(self) -> None:
        """Wait until the client has left; its whole body is here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def read_on(self, seconds: float) -> None:
        """Throw away what still comes, for so long at most."""
        try:
            async with asyncio.timeout(seconds):
                while not self.is_complete:
                    await self.next()
        except (TimeoutError, ClientGoneError):
            return


async def receive_tensor(inbox: Inbox, lease: Lease) -> memoryview:
    """Receive a body with Content-Length into one buffer, admitted before it is read.

    Raises LengthRequired, BodyTooLarge, Overloaded, RequestTimeout, BadRequest, ClientGoneError.
    """
    if inbox.length is None:
        raise LengthRequired("a tensor body needs its size first", expected="Content-Length")
    num_bytes = _checked_length(inbox.length)
    return await _receive(inbox, lease.buffer(num_bytes, "the body"))


async def receive_json(inbox: Inbox, lease: Lease, max_bytes: int) -> memoryview:
    """Receive a JSON body, with or without Content-Length, up to `max_bytes`.

    Raises BodyTooLarge, Overloaded, RequestTimeout, BadRequest, ClientGoneError.
    """
    num_bytes = max_bytes if inbox.length is None else _checked_length(inbox.length)
    if num_bytes > max_bytes:
        raise BodyTooLarge(
            "a JSON body; large tensors travel as application/octet-stream",
            expected=f"<= {max_bytes} bytes",
            got=num_bytes,
        )
    lease.add(num_bytes, "the body")
    return await _receive(inbox, np.empty(num_bytes, np.uint8).data)


def _checked_length(length: int) -> int:
    if length < 0:
        raise BadRequest("Content-Length is no number", expected="digits")
    return length


async def _receive(inbox: Inbox, buffer: memoryview) -> memoryview:
    """Receive into a buffer; exactly its bytes if the length was given."""
    if inbox.is_here:
        await _fill(inbox, buffer, None)
    else:
        try:
            async with asyncio.timeout(GRACE_S) as deadline:
                await _fill(inbox, buffer, deadline)
        except TimeoutError:
            raise too_slow(inbox.num_bytes) from None
    end = inbox.num_bytes
    if inbox.length is not None and end != len(buffer):
        raise BadRequest("the body is shorter than announced", expected=len(buffer), got=end)
    return buffer[:end]


def too_slow(num_bytes: int) -> RequestTimeout:
    """Return the refusal of a body of which so much came in time."""
    return RequestTimeout(
        "the body came too slowly",
        expected=f">= {MIN_BYTES_PER_S} bytes/s after {GRACE_S:g} s",
        got=f"{num_bytes} bytes",
    )


async def _fill(inbox: Inbox, buffer: memoryview, deadline: asyncio.Timeout | None) -> None:
    while not inbox.is_complete:
        begin, piece = inbox.num_bytes, await inbox.next()
        if inbox.num_bytes > len(buffer):
            raise BodyTooLarge(
                "the body is longer than announced or allowed",
                expected=f"<= {len(buffer)} bytes",
            )
        buffer[begin : inbox.num_bytes] = piece
        if deadline is not None and not inbox.is_complete:
            _extend(deadline, len(piece))


def _extend(deadline: asyncio.Timeout, num_bytes: int) -> None:
    """Move a deadline by what moved."""
    when = deadline.when()
    assert when is not None
    deadline.reschedule(when + num_bytes / MIN_BYTES_PER_S)


async def send_answer(
    send: Send, headers: Headers, buffers: Sequence[Buffer], peer: Peer | None
) -> int:
    """Send a 200 from its buffers without joining them; return its bytes.

    Raises ClientGoneError: they are not taken at MIN_BYTES_PER_S; the connection is to be cut.
    """
    num_bytes = sum(map(len, buffers))
    if num_bytes <= SMALL_BODY_BYTES:
        in_time = _send_in_time if peer is None or peer.is_stalled else _send_now
        await in_time(send, _head(headers, num_bytes))
        await in_time(send, {"type": "http.response.body", "body": b"".join(buffers)})
        return num_bytes
    await _send_in_time(send, _head(headers, num_bytes))
    for buffer in buffers:
        await _send_paced(send, buffer)
    await _send_in_time(send, {"type": "http.response.body", "body": b""})
    return num_bytes


async def send_stream(
    send: Send,
    headers: Headers,
    num_bytes: int,
    pieces: Iterator[Buffer],
    is_gone: Callable[[], bool],
) -> int:
    """Send a 200 whose pieces are made in a thread, one at a time.

    is_gone: whether the client has left: what is sent then is dropped, and nothing more is made
    Raises ClientGoneError.
    """
    await _send_in_time(send, _head(headers, num_bytes))
    num_sent = 0
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        await _send_paced(send, piece)
        num_sent += len(piece)
        if num_sent < num_bytes and is_gone():
            raise ClientGoneError
    await _send_in_time(send, {"type": "http.response.body", "body": b""})
    return num_bytes


def _head(headers: Headers, num_bytes: int) -> Message:
    headers = [*headers, (b"content-length", b"%d" % num_bytes)]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_now(send: Send, message: Message) -> None:
    """Send where nothing is waited for: a timer costs as much as a small answer's head."""
    await send(message)


async def _send_in_time(send: Send, message: Message) -> None:
    """Send what waits until the piece before it is taken. Raises ClientGoneError."""
    try:
        async with asyncio.timeout(GRACE_S + SEND_BYTES / MIN_BYTES_PER_S):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None


async def _send_paced(send: Send, buffer: Buffer) -> None:
    """Send a buffer in pieces, each when the transport has room. Raises ClientGoneError."""
    try:
        async with asyncio.timeout(GRACE_S + len(buffer) / MIN_BYTES_PER_S):
            for begin in range(0, len(buffer), SEND_BYTES):
                piece = buffer[begin : begin + SEND_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    except TimeoutError:
        raise ClientGoneError from None


async def send_refusal(
    inbox: Inbox, send: Send, status: int, headers: Headers, body: bytes
) -> None:
    """Send a refusal so that it arrives, whatever of the request's body is still on its way."""
    if not inbox.is_complete and _is_small(inbox):
        await inbox.read_on(READ_ON_S)
    unread = not inbox.is_complete
    if unread:
        headers = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread:
        await inbox.read_on(read_on_s(inbox.peer))
        await send({"type": "http.response.body", "body": b""})


def _is_small(inbox: Inbox) -> bool:
    return (
        inbox.length is not None
        and 0 <= inbox.length <= SMALL_BODY_BYTES
        and not inbox.expects_continue
    )
