"""Connections, blocking and asyncio: early refusals are heard, half answers are never taken."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client import http1
from engram_client.aio_connection import AsyncConnectionPool
from engram_client.connection import ConnectionPool, not_connected
from engram_client.http1 import Request, Response, ResponseReader, parse_address, parse_head
from engram_client.problems import BadAnswer, ConnectionLost, EngramClientError
from tests.unit.raw_server import Peer, RawServer, Script, answer

FIXED = b"Host: test\r\n"
BIG = bytes(20 << 20)

Exchange = Callable[..., Response]


def exchange_blocking(url: str, *requests: Request, timeout_s: float = 20.0) -> list[Response]:
    pool = ConnectionPool([parse_address(url)], [FIXED], timeout_s=timeout_s)
    try:
        return [pool.exchange(request) for request in requests]
    finally:
        pool.close()


def exchange_async(url: str, *requests: Request, timeout_s: float = 20.0) -> list[Response]:
    async def run() -> list[Response]:
        pool = AsyncConnectionPool([parse_address(url)], [FIXED], timeout_s=timeout_s)
        try:
            return [await pool.exchange(request) for request in requests]
        finally:
            pool.close()

    return asyncio.run(run())


@pytest.fixture(params=[exchange_blocking, exchange_async], ids=["blocking", "asyncio"])
def exchange(request: pytest.FixtureRequest) -> Any:
    return request.param


def get(**options: Any) -> Request:
    return Request("GET", "/x", **options)


def post(body: bytes, **options: Any) -> Request:
    return Request("POST", "/x", body=[body], **options)


def into(array: np.ndarray[Any, Any]) -> Callable[[int], Iterator[memoryview]]:
    def sink(length: int) -> Iterator[memoryview]:
        yield memoryview(array)

    return sink


def echo(peer: Peer) -> None:
    while head := peer.read_head():
        peer.send(answer(peer.read_body(head)))


def test_bodies_go_and_come_whole_over_one_connection(exchange: Exchange) -> None:
    bodies = [b"", b"x", bytes(range(256)) * 160, bytes(range(256)) * 8192 + b"end"]
    with RawServer([echo]) as server:
        got = exchange(server.url, *[post(b, max_answer_bytes=1 << 22) for b in bodies])
        assert [bytes(response.body) for response in got] == bodies
        assert server.num_connections == 1


def test_a_unix_socket_does_the_same(exchange: Exchange, tmp_path: Path) -> None:
    with RawServer([echo], tmp_path / "s") as server:
        (got,) = exchange(server.url, post(b"hello"))
        assert bytes(got.body) == b"hello"


def test_buffers_are_sent_in_order(exchange: Exchange) -> None:
    parts = [b"ab", memoryview(b"cd" * 300_000), b"", memoryview(b"ef")]
    with RawServer([echo]) as server:
        request = Request("POST", "/x", body=parts, max_answer_bytes=1 << 20)
        (got,) = exchange(server.url, request)
        assert bytes(got.body) == b"".join(parts)


def test_an_answer_lands_in_the_memory_given_for_it(exchange: Exchange) -> None:
    array = np.zeros(100_000, np.uint8)
    body = bytes(range(250)) * 400
    with RawServer([echo]) as server:
        (got,) = exchange(server.url, post(body, sink=into(array)))
    assert array.tobytes() == body
    assert len(got.body) == 0


@pytest.mark.parametrize("status", ["413 Too Large", "429 Too Many"])
@pytest.mark.parametrize("continues", [True, False], ids=["after 100", "at once"])
def test_a_refusal_is_heard_while_20_mb_are_being_sent(
    exchange: Exchange, status: str, continues: bool
) -> None:
    def refuse(peer: Peer) -> None:
        assert b"Expect: 100-continue" in peer.read_head()
        if continues:
            peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            peer.socket.recv(1000)
        # The kernel may have taken all of the body by now: then only this says that it is over.
        peer.send(answer(b"no", "Connection: close", status=status))
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.read_to_end() < len(BIG) + 1000

    with RawServer([refuse, echo]) as server:
        first, second = exchange(server.url, post(BIG), post(b"small"))
        assert (first.status, bytes(first.body)) == (int(status[:3]), b"no")
        assert bytes(second.body) == b"small"
        assert server.num_connections == 2


def test_a_body_is_sent_although_expect_is_not_known(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engram_client.connection", "engram_client.aio_connection"):
        monkeypatch.setattr(f"{module}.EXPECT_WAIT_S", 0.01)

    def deaf(peer: Peer) -> None:
        head = peer.read_head().replace(b"100-continue", b"")
        peer.send(answer(str(len(peer.read_body(head))).encode()))

    with RawServer([deaf]) as server:
        (got,) = exchange(server.url, post(BIG))
        assert int(bytes(got.body)) == len(BIG)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("at", ["before", "head", "body", "sending"])
def test_a_connection_that_ends_anywhere_is_lost(exchange: Exchange, how: str, at: str) -> None:
    whole = answer(bytes(1000))
    part = {"before": b"", "head": whole[:20], "body": whole[:700], "sending": b""}[at]

    def end(peer: Peer) -> None:
        peer.read_head()
        peer.send(part)
        if how == "reset":
            peer.reset()

    with RawServer([end]) as server, pytest.raises(ConnectionLost):
        exchange(server.url, post(BIG if at == "sending" else b"x"))


def test_nothing_listens(exchange: Exchange) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionLost) as caught:
        exchange(f"http://127.0.0.1:{port}", get())
    assert not caught.value.connected


def test_a_slow_answer_is_given_up_at_the_deadline(exchange: Exchange) -> None:
    done = threading.Event()

    def stall(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"12345")[:-2])
        done.wait(20)

    with RawServer([stall]) as server:
        with pytest.raises(ConnectionLost, match="in time"):
            exchange(server.url, get(), timeout_s=0.2)
        done.set()


def test_a_reader_that_never_reads_is_given_up_at_the_deadline(exchange: Exchange) -> None:
    done = threading.Event()

    def stall(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        done.wait(20)

    with RawServer([stall]) as server:
        with pytest.raises(ConnectionLost, match="in time"):
            exchange(server.url, post(BIG), timeout_s=0.3)
        done.set()


def test_a_connection_closed_between_requests_is_not_used_again() -> None:
    closed = threading.Event()

    def once(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"1"))
        peer.socket.shutdown(socket.SHUT_RDWR)
        peer.socket.close()
        closed.set()

    with RawServer([once, echo]) as server:
        pool = ConnectionPool([parse_address(server.url)], [FIXED], timeout_s=20)
        assert bytes(pool.exchange(get()).body) == b"1"
        assert closed.wait(20)
        assert bytes(pool.exchange(post(b"2")).body) == b"2"
        pool.close()


def test_an_answer_that_says_close_ends_the_connection(exchange: Exchange) -> None:
    def once(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"1", "Connection: close"))

    with RawServer([once]) as server:
        assert len(exchange(server.url, get(), get())) == 2
        assert server.num_connections == 2


def test_threads_have_connections_of_their_own() -> None:
    barrier = threading.Barrier(4, timeout=20)

    def meet(peer: Peer) -> None:
        head = peer.read_head()
        barrier.wait()
        peer.send(answer(peer.read_body(head)))

    results: list[bytes] = []
    with RawServer([meet]) as server:
        pool = ConnectionPool([parse_address(server.url)], [FIXED], timeout_s=20)
        send = lambda i: results.append(bytes(pool.exchange(post(b"%d" % i)).body))  # noqa: E731
        threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pool.close()
    assert sorted(results) == [b"0", b"1", b"2", b"3"]


def test_a_task_that_is_cancelled_takes_its_connection_along() -> None:
    async def run(url: str) -> None:
        pool = AsyncConnectionPool([parse_address(url)], [FIXED], timeout_s=20)
        task = asyncio.create_task(pool.exchange(get()))
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bytes((await pool.exchange(post(b"2"))).body) == b"2"
        pool.close()

    asked = threading.Event()

    def never(peer: Peer) -> None:
        peer.read_head()
        asked.set()
        peer.read_to_end()

    with RawServer([never, echo]) as server:
        asyncio.run(run(server.url))


def scripted(data: bytes) -> Script:
    def script(peer: Peer) -> None:
        peer.read_head()
        peer.send(data)
        peer.read_to_end()

    return script


MALFORMED = {
    "not HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "an older HTTP": b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no reason to believe": b"HTTP/1.1 200OK\r\nContent-Length: 0\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\nx",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "a header without colon": b"HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
    "a bare line feed": b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 0\r\n\r\n",
    "too long": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40_000,
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 101 + b"\r\n",
    "bytes behind": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
    "a wrong chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "a chunk too long": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n\r\n",
    "a chunk unended": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxyz\r\n",
    "a switch": b"HTTP/1.1 600 What\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_an_answer_that_is_not_plain_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(data)
    with RawServer([scripted(data)]) as server, pytest.raises(BadAnswer):
        exchange_blocking(server.url, get())


def test_chunked_json_is_taken(exchange: Exchange) -> None:
    data = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    )
    with RawServer([scripted(data)]) as server:
        (got,) = exchange(server.url, get())
        assert bytes(got.body) == b"abcde"


def test_an_answer_of_another_length_than_its_memory_is_refused(exchange: Exchange) -> None:
    for size in (9, 11):
        with RawServer([scripted(answer(bytes(10)))]) as server, pytest.raises(BadAnswer):
            exchange(server.url, get(sink=into(np.zeros(size, np.uint8))))


def test_a_refusal_does_not_land_in_the_memory_for_the_answer(exchange: Exchange) -> None:
    array = np.zeros(2, np.uint8)
    with RawServer([scripted(answer(b"no", status="404 -"))]) as server:
        (got,) = exchange(server.url, get(sink=into(array)))
    assert bytes(got.body) == b"no"
    assert not array.any()


def read(data: bytes, *sizes: int, request: Request | None = None) -> Response:
    """Feed bytes to a reader in pieces of these sizes, over and over."""
    reader, at, turn = ResponseReader(request or get()), 0, 0
    while reader.response is None:
        buffer = reader.buffer()
        size = min(len(buffer), sizes[turn % len(sizes)] if sizes else len(data))
        piece = data[at : at + size]
        buffer[: len(piece)] = piece
        reader.received(len(piece))
        at, turn = at + len(piece), turn + 1
    return reader.response


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())
def test_an_answer_is_the_same_however_it_is_cut(
    body: bytes, sizes: list[int], chunked: bool
) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + answer(body, "X: y")
    if chunked:
        parts = b"".join(b"%x\r\n%s\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
    got = read(data, *sizes)
    assert bytes(got.body) == body


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(1, 9))
def test_any_bytes_are_an_answer_or_a_refusal(noise: bytes, at: int, size: int) -> None:
    data = bytearray(answer(b"body", "A: b"))
    data[at % len(data) : at % len(data) + 1] = noise[:3]
    for candidate in (bytes(data), noise, b"HTTP/1.1 200 OK\r\n" + noise + b"\r\n\r\n"):
        try:
            read(candidate, size)
        except EngramClientError:
            continue


def test_heads_are_read_by_lower_case_names() -> None:
    status, headers = parse_head(b"HTTP/1.1 204 No Content\r\nX-Engram-Epoch:  5 \r\nA: 1\r\na: 2")
    assert status == 204
    assert headers == {"x-engram-epoch": "5", "a": "1, 2"}


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://127.0.0.1:8321", "127.0.0.1:8321"),
        ("http://engram", "engram:80"),
        ("https://engram/", "engram:443"),
        ("http://[::1]:5", "[::1]:5"),
        ("unix:/run/engram.sock", "localhost"),
        ("unix:///run/engram.sock", "localhost"),
    ],
)
def test_addresses_are_read(url: str, authority: str) -> None:
    assert parse_address(url).authority == authority


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engram:8321",
        "ftp://x",
        "http://",
        "http://x/path",
        "http://u:p@x",
        "http://x?q=1",
        "unix:relative",
        "unix://host/x",
        "http://x:99999",
        "http://x#f",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"url|[Pp]ort"):
        parse_address(url)


@pytest.mark.parametrize("value", ["a\r\nB: c", "a\n", " a", "é", "\0"])
def test_header_values_cannot_smuggle(value: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        http1.header_value("owner", value)


def test_a_reset_after_a_refusal_does_not_hide_it() -> None:
    def refuse(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"no", status="413 -"))
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))

    with RawServer([refuse]) as server:
        (got,) = exchange_blocking(server.url, post(BIG))
        assert got.status == 413


def test_a_certificate_that_is_not_known_says_how_it_would_be() -> None:
    address = parse_address("https://localhost:1")
    error = not_connected(address, ssl.SSLCertVerificationError("self-signed"))
    assert "https://localhost:1" in str(error)
    assert "ssl_context=" in str(error)
    assert "ssl_context" not in str(not_connected(address, OSError("refused")))


def test_a_port_that_answers_nothing_is_told_to_be_https_maybe(
    exchange: Exchange, tmp_path: Path
) -> None:
    def close(peer: Peer) -> None:
        peer.read_head()

    def close_later(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"1"))
        peer.read_head()

    with RawServer([close]) as server, pytest.raises(ConnectionLost, match="https://"):
        exchange(server.url, get())
    with RawServer([close], tmp_path / "s") as server:
        with pytest.raises(ConnectionLost) as told:
            exchange(server.url, get())
        assert "https" not in str(told.value)
    with RawServer([close_later]) as server:
        with pytest.raises(ConnectionLost) as told:
            exchange(server.url, get(), get())
        assert "https" not in str(told.value)
