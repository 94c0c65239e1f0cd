"""Connections: bytes on a real socket, a server in this event loop, a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service import bodies, transport
from service.access import KEYLESS
from service.bodies import Inbox
from service.calls import Call
from service.transport import MAX_HEAD_BYTES, Connection
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess
from tests.service.talk import Ask, Talk, Wire, read_answer, talk_to

LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
OPEN = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def ask(door: InProcess) -> Ask:
    """Runs a talk on a fresh connection."""
    return lambda talk: door.runner.run(talk_to(door, talk, Wire()))


def say(*parts: bytes, eof: bool = False) -> Talk:
    """Write, then read until the server closes or, without `eof`, one whole small answer."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in parts:
            writer.write(piece)
            await writer.drain()
        if eof:
            writer.write_eof()
            return await reader.read()
        return await reader.read(1 << 16)

    return talk


def test_small_answer_is_one_packet(ask: Ask) -> None:
    answer = ask(say(LIVE))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"status":"alive"}')


def test_client_that_said_all_gets_its_answer(ask: Ask) -> None:
    answer = ask(say(LIVE, eof=True))
    assert answer.startswith(b"HTTP/1.1 200")


def test_client_that_said_all_is_waited_for_no_longer_than_its_answer_takes(
    door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "READ_ON_S", 1e6)
    target = f"/v1/sessions/{door.open()['session_id']}/layers/1/kv?position=0&wait_ms=20"
    talk = say(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), eof=True)
    answer = door.runner.run(talk_to(door, talk, Wire(), is_fast=False))
    assert answer.startswith(b"HTTP/1.1 409")


def test_pipelined_requests_are_answered_in_order(ask: Ask) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(LIVE + OPEN + b"Content-Length: 2\r\n\r\n{}" + LIVE)
        data = b""
        while data.count(b'{"status":"alive"}') < 2:
            data += await reader.read(1 << 16)
        return data

    answers = ask(talk).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"201", b"200"]


def test_expected_body_is_asked_for(ask: Ask) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(OPEN + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        return await reader.read(1 << 16)

    assert ask(talk).startswith(b"HTTP/1.1 201")


@pytest.mark.parametrize(
    "request_",
    [
        b"BLAH\r\n\r\n",
        OPEN + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        OPEN + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        OPEN + b"Content-Length: +2\r\n\r\n{}",
        OPEN + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
        OPEN + b"Upgrade: h2c\r\nConnection: Upgrade\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"GET /" + b"a" * (MAX_HEAD_BYTES + 1),
    ],
    ids=[
        *("no-http", "two-lengths", "length-and-chunks", "signed-length", "upgrade-with-a-body"),
        *("upgrade-with-chunks", "long-head", "long-url"),
    ],
)
def test_what_is_no_good_http_is_a_problem_document(ask: Ask, request_: bytes) -> None:
    answer = ask(say(request_))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer
    assert b"connection: close" in answer


@pytest.mark.parametrize("eof", [False, True])
@pytest.mark.parametrize("behind", [b"", LIVE], ids=["alone", "pipelined"])
@pytest.mark.parametrize(
    "broken",
    [
        b"BLAH\r\n\r\n",
        OPEN + b"Transfer-Encoding: chunked\r\n\r\nx\r\n",
        b"GET /" + b"a" * (MAX_HEAD_BYTES + 1),
        b"GET /livez HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
    ],
    ids=["no-http", "no-chunk", "long-url", "long-head"],
)
def test_what_was_asked_before_is_answered_before_what_is_no_http(
    ask: Ask, broken: bytes, behind: bytes, eof: bool
) -> None:
    """A 400 in the place of its answer would say that it changed nothing."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(OPEN + b"Content-Length: 2\r\n\r\n{}" + behind + broken)
        if eof:
            writer.write_eof()
        return await reader.read()

    answers = ask(talk).split(b"HTTP/1.1 ")[1:]
    expected = [b"201", *([b"200"] if behind else []), b"400"]
    assert [answer[:3] for answer in answers] == expected


def test_nothing_behind_what_is_no_http_is_taken_for_a_request(ask: Ask) -> None:
    """What still comes is read on, so that the peer hears the refusal, and dropped."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(LIVE)
        await read_answer(reader)
        writer.write(b"BLAH\r\n\r\n")
        refusal = await read_answer(reader)
        writer.write(LIVE + bytes(1 << 20))
        await writer.drain()
        return refusal + await reader.read()

    answer = ask(talk)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 2  # the document's `expected` is one of them


def test_request_whose_body_is_no_http_is_told_that_its_peer_is_gone(
    ask: Ask, door: InProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own refusal, sent behind the end of what the connection writes, would be a fault."""
    monkeypatch.setattr(bodies, "GRACE_S", 0.02)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(OPEN + b"Transfer-Encoding: chunked\r\n\r\n")
        while not door.state.num_active:
            await asyncio.sleep(0)
        writer.write(b"no size\r\n")
        refusal = await read_answer(reader)
        while door.state.num_active:
            await asyncio.sleep(0)
        return refusal + await reader.read()

    answer = ask(talk)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 2  # the document's `expected` is one of them
    assert not caplog.records[1:]  # that it is no HTTP is said


def test_refusal_takes_no_earlier_answer_from_a_slow_pipelining_peer(
    ask: Ask, door: InProcess
) -> None:
    """Whose next bytes come when the connection has ended: unread, they would reset it."""
    session_id = door.open()["session_id"]
    door.push(session_id, 0, [0] * MAX_TOKENS)
    target = f"/v1/sessions/{session_id}/layers/1/rows?position=0&count={MAX_TOKENS}"
    rows = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    step = b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
    step += b"Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    ended = door.state.metrics.requests.labels("step", "length_required")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = ended._value.get()
        writer.write(rows * 20 + step)
        await writer.drain()
        while not door.state.num_active:
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        while ended._value.get() == before:
            await asyncio.sleep(0)
        for _ in range(20):
            writer.write(LIVE)
            await asyncio.sleep(0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        return await reader.read()

    answer = ask(talk)
    assert answer.count(b"HTTP/1.1 200 OK") == 20
    assert answer.count(b"HTTP/1.1 411 ") == 1
    assert b'"alive"' not in answer


def test_connection_without_a_request_is_closed(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.Connection, "_watch_idle", _at_once)
    assert ask(say(b"GET /livez HT")) == b""


def _at_once(connection: Connection) -> None:
    connection.loop.call_soon(connection.timeout_keep_alive_handler)


def test_upgrade_without_a_body_is_not_done_and_the_request_is_answered(ask: Ask) -> None:
    upgrade = LIVE[:-2] + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    assert ask(say(upgrade)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("times", [1, 3, 2000])
def test_requests_behind_an_upgrade_in_one_packet_are_answered(ask: Ask, times: int) -> None:
    upgrade = LIVE[:-2] + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(upgrade * times + LIVE)
        return b"".join([await read_answer(reader) for _ in range(times + 1)])

    assert ask(talk).count(b"HTTP/1.1 200") == times + 1


def test_half_a_request_behind_an_upgrade_is_completed_by_the_next_packet(ask: Ask) -> None:
    upgrade = LIVE[:-2] + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(upgrade + LIVE[:9])
        first = await read_answer(reader)
        writer.write(LIVE[9:])
        return first + await read_answer(reader)

    assert ask(talk).count(b"HTTP/1.1 200") == 2


def test_request_before_the_last_one_of_a_pipeline_is_told_when_the_peer_is_gone(
    door: InProcess, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hold its bytes for ever."""
    monkeypatch.setattr(bodies, "GRACE_S", 0.02)
    monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    cut = asyncio.Event()

    def abort(connection: Connection) -> None:
        connection.transport.abort()
        cut.set()

    monkeypatch.setattr(Connection, "abort", abort)
    session_id = door.open()["session_id"]
    door.push(session_id, 0, [0] * MAX_TOKENS)
    target = f"/v1/sessions/{session_id}/layers/1/rows?position=0&count={MAX_TOKENS}"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(head.encode() * 200)
        await cut.wait()
        while door.state.num_active:
            await asyncio.sleep(0)
        return b""

    door.runner.run(talk_to(door, talk, Wire(path=socket_folder / "pipe.sock")))
    assert door.state.pool_bytes == 0


def test_weights_are_decoded_for_nobody_who_has_left(
    door: InProcess, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece is 16 MiB and some ten ms of a core: once it cannot be sent no other is made."""
    lost, made = threading.Event(), []
    was_lost = Connection.connection_lost

    def connection_lost(connection: Connection, error: Exception | None) -> None:
        was_lost(connection, error)
        lost.set()

    def pieces(*_: object) -> Iterator[bytes]:
        yield b"head"
        assert lost.wait(30)
        for _ in range(8):
            made.append(bytes(1000))
            yield made[-1]

    monkeypatch.setattr(Connection, "connection_lost", connection_lost)
    monkeypatch.setattr("service.weights._pieces", pieces)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /v1/layers/1/weights HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for connection in connections:
            connection.abort()
        while door.state.num_active:
            await asyncio.sleep(0)
        return b""

    connections: list[Connection] = []
    was_made = Connection.connection_made

    def connection_made(connection: Connection, line: asyncio.Transport) -> None:
        was_made(connection, line)
        connections.append(connection)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    door.runner.run(talk_to(door, talk, Wire(path=socket_folder / "weights.sock")))
    assert len(made) == 1
    assert door.state.pool_bytes == 0
    assert 'code="client_gone"' in door.get("/metrics").text


def test_refusal_reaches_a_client_that_writes_first(ask: Ask) -> None:
    head = (
        b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: 20000000\r\n\r\n"
    )
    answer = ask(say(head, *[b"\0" * 1_000_000] * 20))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


@pytest.mark.parametrize("peer", [None, ("127.0.0.1", 4)])
def test_connections_of_a_unix_socket_take_turns_like_others(door: InProcess, peer: Any) -> None:
    """They have no address: one that prefills would have the others wait behind all of it."""
    calls = []
    for connection in (object(), object()):
        call = Call(door.state, Inbox({"headers": []}), "id")
        call.key, call.peer, call.connection = KEYLESS, peer, connection  # type: ignore[assignment]
        calls.append(call)
    assert (calls[0].client == calls[1].client) == (peer is not None)
    assert calls[0].client == calls[0].client
