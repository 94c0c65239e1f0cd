"""HTTP/1.1 without I/O: a request's head as bytes, an answer read where its body shall lie.

`ResponseReader` says into which memory the next bytes are to be received, so that a tensor goes
from the socket into its array without a copy; the blocking and the asyncio connection share it.
Anything ambiguous (two lengths, length and chunks, folded lines) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from engram_client.far import FarBuffer, near
from engram_client.problems import BadAnswer, ConnectionLost
from engram_client.wire import WireError, parse_int

MAX_HEAD_BYTES = 128 << 10
MAX_HEADERS = 100
MAX_JSON_BYTES = 16 << 20
EXPECT_ABOVE_BYTES = 1 << 20
"""Larger bodies ask for leave first, so that a refusal costs no transfer."""

EXPECT_WAIT_S = 1.0
"""A server that does not know Expect says nothing: the body is sent after this long."""

_FIRST_READ_BYTES = 8 << 10
_HEADERS = re.compile(r"(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00\r\n]*)*")
_HEADER = re.compile(r"\r\n([^:]+):[ \t]*((?:[^\r]*[^\r \t])?)")
_STATUS = re.compile(r"HTTP/1\.1 ([1-5][0-9][0-9])(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[^\r\n]*)?\r\n")

Sink = Callable[[int], Iterator[memoryview | FarBuffer]]
"""Given the bytes of a 200 answer's body, yields the memory they go to, piece by piece; each
piece is filled when the next is asked for. May raise WireError."""


@dataclass(frozen=True)
class Address:
    """Where a service listens. host, port: TCP; path: Unix socket; tls: https."""

    url: str
    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False

    @property
    def authority(self) -> str:
        """The Host header."""
        if self.path:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Return the address of http://host:port, https://host:port or unix:/path.sock.

    Raises ValueError.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return Address(url, path=parts.path)
    plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme in ("http", "https") and parts.hostname and plain:
        tls = parts.scheme == "https"
        return Address(url, parts.hostname, parts.port or (443 if tls else 80), tls=tls)
    raise ValueError(
        f"url: expected http://host:port, https://host:port or unix:/path, got {url!r}"
    )


@dataclass
class Request:
    """One HTTP request. body: buffers sent in order; sink: where a 200 answer's body goes (else
    new memory); max_answer_bytes: of the answer's body; replica: index of the address."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]] = ()
    body: Sequence[bytes | memoryview | FarBuffer] = ()
    sink: Sink | None = None
    max_answer_bytes: int = MAX_JSON_BYTES
    replica: int = 0

    @property
    def body_bytes(self) -> int:
        """Bytes of the body."""
        return sum(len(buffer) for buffer in self.body)

    @property
    def sent_body(self) -> list[bytes | memoryview]:
        """The body as a socket can send it."""
        return [near(buffer) for buffer in self.body]


@dataclass
class Response:
    """One HTTP answer. headers: lower-case names; body: empty where a sink took it."""

    status: int
    headers: Mapping[str, str]
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    keep_alive: bool = True


def header_value(name: str, value: str) -> str:
    """Return `value` if it can be a header's value. Raises ValueError."""
    if value.isascii() and value.isprintable() and value.strip() == value:
        return value
    raise ValueError(f"{name}: expected printable ASCII without outer spaces")


def format_head(request: Request, fixed: bytes) -> bytes:
    """Return a request's head. fixed: header lines of every request (Host, keys)."""
    lines = [f"{request.method} {request.target} HTTP/1.1\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in request.headers]
    if request.method in ("POST", "PUT") or request.body:
        lines.append(f"Content-Length: {request.body_bytes}\r\n")
    if request.body_bytes > EXPECT_ABOVE_BYTES:
        lines.append("Expect: 100-continue\r\n")
    return "".join(lines).encode("ascii") + fixed + b"\r\n"


class ResponseReader:
    """Reads one answer: receive into `buffer()`, tell `received(n)`, until `response` is there."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head = bytearray(_FIRST_READ_BYTES)
        self._filled = 0
        self._space: memoryview | None = None
        self._left = 0
        self._pieces: Iterator[memoryview | FarBuffer] = iter(())
        self._pending: Response | None = None
        self._chunks: bytearray | None = None
        self.may_send_body = False
        self.response: Response | None = None

    @property
    def has_answer(self) -> bool:
        """Whether the head of the answer has come (100 Continue is none)."""
        return self._pending is not None

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes, never empty."""
        if self._space is not None:
            return self._space
        if self._filled == len(self._head):
            if self._filled >= MAX_HEAD_BYTES:
                raise BadAnswer(f"an answer's head above {MAX_HEAD_BYTES} bytes")
            self._head = self._head + bytes(self._filled)  # a view of the old may be alive
        return memoryview(self._head)[self._filled :]

    def received(self, count: int) -> None:
        """Take note of `count` bytes in `buffer()`. Raises BadAnswer; ConnectionLost at the end."""
        if count == 0:
            raise ConnectionLost("the connection was closed before a whole answer came")
        try:
            if self._chunks is not None:
                self._chunks += self.buffer()[:count]
                self._read_chunks()
            elif self._space is not None:
                self._fill(count)
            else:
                self._filled += count
                self._read_head()
        except WireError as error:
            raise BadAnswer(str(error)) from error

    def take(self, data: memoryview) -> None:
        """Take bytes that were received elsewhere. Raises as `received`."""
        while data:
            if self.response is not None:
                raise BadAnswer(f"{len(data)} bytes behind the answer")
            space = self.buffer()
            count = min(len(space), len(data))
            space[:count] = data[:count]
            self.received(count)
            data = data[count:]

    def _read_head(self) -> None:
        while (end := self._head.find(b"\r\n\r\n", 0, self._filled)) >= 0:
            status, headers = parse_head(bytes(self._head[:end]))
            rest = bytes(self._head[end + 4 : self._filled])
            if status >= 200:
                self._begin_body(status, headers, rest)
                return
            self.may_send_body = self.may_send_body or status == 100
            self._head[: len(rest)] = rest
            self._filled = len(rest)

    def _begin_body(self, status: int, headers: dict[str, str], rest: bytes) -> None:
        keep = headers.get("connection", "").lower() != "close"
        self._pending = Response(status, headers, keep_alive=keep)
        if (coding := headers.get("transfer-encoding")) is not None:
            if coding.lower() != "chunked" or "content-length" in headers:
                raise BadAnswer(f"an answer coded {coding!r}, or with a length beside chunks")
            self._chunks = bytearray(rest)
            self._space = memoryview(bytearray(_FIRST_READ_BYTES))
            self._read_chunks()
            return
        length = content_length(status, headers)
        limit = self._request.max_answer_bytes if status == 200 else MAX_JSON_BYTES
        if length > limit:
            raise BadAnswer(f"an answer of {length} bytes, expected at most {limit}")
        if len(rest) > length:
            raise BadAnswer(f"{len(rest) - length} bytes behind the answer")
        self._left = length
        if self._request.sink is not None and status == 200:
            self._pieces = self._request.sink(length)
        else:
            body = np.empty(length, np.uint8).data
            self._pending.body = body
            self._pieces = iter((body,))
        self._next_piece()
        self._copy_in(memoryview(rest))

    def _copy_in(self, rest: memoryview) -> None:
        """Put what came with the head where it belongs."""
        while rest and self._space is not None:
            count = min(len(rest), len(self._space))
            self._space[:count] = rest[:count]
            rest = rest[count:]
            self._fill(count)

    def _fill(self, count: int) -> None:
        assert self._space is not None
        self._left -= count
        self._space = self._space[count:]
        if not self._space:
            self._next_piece()

    def _next_piece(self) -> None:
        """Go on to the next piece of memory that is not empty, or finish."""
        for piece in self._pieces:
            if isinstance(piece, FarBuffer):
                piece = piece.landing()
            if len(piece) > self._left:
                raise BadAnswer(f"an answer's body ends {len(piece) - self._left} bytes early")
            if len(piece):
                self._space = piece
                return
        if self._left:
            raise BadAnswer(f"an answer's body is {self._left} bytes too long")
        self._space = None
        self.response = self._pending

    def _read_chunks(self) -> None:
        assert self._chunks is not None
        assert self._pending is not None
        if len(self._chunks) > MAX_JSON_BYTES:
            raise BadAnswer("a chunked answer above the bytes of a JSON answer")
        body = _join_chunks(bytes(self._chunks))
        if body is not None:
            self._pending.body = memoryview(body)
            self._pending.keep_alive = False  # chunks are rare: a new connection costs less
            self.response = self._pending


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers (lower-case names) of a head without its empty line.

    Raises BadAnswer: a malformed or folded line, a repeated header, too many of them.
    """
    text = head.decode("latin-1")
    first = text.partition("\r\n")[0]
    matched = _STATUS.fullmatch(first)
    if matched is None or not _HEADERS.fullmatch(text, len(first)):
        raise BadAnswer(f"not an HTTP/1.1 answer: {text[:80]!r}")
    pairs = _HEADER.findall(text, len(first))
    if len(pairs) > MAX_HEADERS:
        raise BadAnswer(f"an answer of {len(pairs)} headers, expected at most {MAX_HEADERS}")
    headers = dict(pairs)
    if len(headers) == len(pairs) and "".join(headers).islower():
        return int(matched[1]), headers  # as our service sends them: each once, in lower case
    return int(matched[1]), _merged(pairs)


def _merged(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in pairs:
        name = name.lower()
        if name not in headers:
            headers[name] = value
        elif name in ("content-length", "transfer-encoding"):
            raise BadAnswer(f"{name} twice")
        else:
            headers[name] += f", {value}"
    return headers


def content_length(status: int, headers: Mapping[str, str]) -> int:
    """Return the bytes of the body. Raises BadAnswer: not told, or told twice."""
    if status in (204, 304):
        return 0
    try:
        length = parse_int(headers["content-length"], "Content-Length")
    except (KeyError, WireError):
        got = headers.get("content-length")
        raise BadAnswer(f"an answer without a valid Content-Length, got {got!r}") from None
    if length < 0:
        raise BadAnswer(f"a Content-Length below 0: {length}")
    return length


def _join_chunks(data: bytes) -> bytes | None:
    """Return the body of chunks, None while incomplete. Raises BadAnswer (trailers too)."""
    parts: list[bytes] = []
    at = 0
    while True:
        if data.find(b"\r\n", at) < 0:
            return None
        matched = _CHUNK.match(data, at)
        if matched is None:
            raise BadAnswer("a malformed chunk")
        size = int(matched[1], 16)
        begin = matched.end()
        at = begin + size + 2
        if size > MAX_JSON_BYTES:
            raise BadAnswer("a chunk above the bytes of a JSON answer")
        if len(data) < at:
            return None
        if data[at - 2 : at] != b"\r\n" or (size == 0 and len(data) > at):
            raise BadAnswer("a malformed chunk")
        if size == 0:
            return b"".join(parts)
        parts.append(data[begin : begin + size])
