"""The fast path: the same bytes as the ordinary way, however a body comes and a client behaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from engram_client import wire
from engram_core.errors import Internal
from service import bodies, exchange, transport
from service.desk import GONE
from service.exchange import Exchange, Exchanges, Refusal
from service.fast_path import FastPath
from service.transport import BodyReceiver
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess, i32, i64, step_body, tensor_body
from tests.service.talk import Talk, Wire, read_answer, talk_to


@pytest.fixture(scope="module")
def uv_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as made:
        yield made


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 1 -keyout {key}"
        f" -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(cert, key)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


@pytest.fixture(params=["tcp", "unix", "tls", "selector"])
def ask(
    request: pytest.FixtureRequest, door: InProcess, uv_runner: asyncio.Runner, socket_folder: Path
) -> Callable[..., bytes]:
    """Runs a talk over each kind of socket, and once on asyncio's own loop."""
    kind = request.param
    on = Wire(
        path=socket_folder / "fast.sock" if kind == "unix" else None,
        contexts=request.getfixturevalue("contexts") if kind == "tls" else None,
    )
    runner = door.runner if kind == "selector" else uv_runner
    return lambda talk, **how: runner.run(talk_to(door, talk, on, **how))


@pytest.fixture
def tell(door: InProcess, uv_runner: asyncio.Runner) -> Callable[..., bytes]:
    """Runs a talk over TCP."""
    return lambda talk, **how: uv_runner.run(talk_to(door, talk, Wire(), **how))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.02)
    monkeypatch.setattr(bodies, "READ_ON_S", 0.02)


@pytest.fixture
def session_id(door: InProcess) -> Iterator[str]:
    """A session of MAX_TOKENS tokens; closed at the end, since all tests share one engine."""
    made: str = door.open()["session_id"]
    door.push(made, 0, [2] * MAX_TOKENS)
    yield made
    door.state.is_draining = False
    assert door.delete(f"/v1/sessions/{made}").status_code == 204


def request_of(method: str, target: str, content: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "X-Request-Id: same"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if method == "POST" and "Transfer_Encoding" not in headers:
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def post(target: str, made: dict[str, Any], **headers: str) -> bytes:
    """A request of what `tensor_body` and `step_body` make."""
    named = {name.replace("-", "_"): value for name, value in made["headers"].items()}
    return request_of("POST", target, made["content"], **named, **headers)


def residual(count: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return tensor_body(torch.randn((count, 2, 64), generator=generator).to(dtype))


def apply(session_id: str, count: int, **query: Any) -> bytes:
    more = "".join(f"&{name}={value}" for name, value in query.items())
    target = f"/v1/sessions/{session_id}/layers/1/residual?position=0{more}"
    return post(target, residual(count))


def once(*parts: bytes, eof: bool = False) -> Talk:
    """Send a request in parts, each on its own; read one answer."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in parts:
            writer.write(part)
            await writer.drain()
            for _ in range(4):
                await asyncio.sleep(0)
        if eof:
            writer.write_eof()
        return await read_answer(reader)

    return talk


def plain(answer: bytes) -> bytes:
    """An answer without what differs from time to time."""
    return re.sub(rb"(server-timing|date): [^\r]*\r\n", b"", answer)


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["code"]


class Counted:
    """How many requests took the fast path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        begin = FastPath.begin

        def counted(path: FastPath, head: Any, line: Any) -> Any:
            made = begin(path, head, line)
            self.count += made is not None
            return made

        monkeypatch.setattr(FastPath, "begin", counted)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def every_request(session_id: str) -> Iterator[bytes]:
    """One request of every tensor route and form of answer, refusals included."""
    path = f"/v1/sessions/{session_id}/layers/1"
    yield apply(session_id, 3)
    yield post(f"{path}/residual?position=1", residual(2, dtype=torch.float32))
    for output in ("kv", "rows", "hash_ids"):
        yield request_of("GET", f"{path}/{output}?position=0&count=2")
        yield request_of("GET", f"{path}/{output}?position={MAX_TOKENS}")  # not pushed
    yield request_of("GET", f"{path}/rows?position=0&encoding=stored")
    one = {"count": i32(2), "position": i64(3), "session_id": i64(int(session_id))}
    for output in ("none", "kv", "rows", "hash_ids"):
        yield post(f"/v1/step?output={output}", step_body(**one))
    tensors = one | {"residual": torch.ones((2, 2, 64)).bfloat16()}
    yield post("/v1/step?output=residual&layers=14", step_body(**tensors))
    yield post("/v1/step?output=kv", step_body(**one, nonsense=i32(1)))
    yield post("/v1/step?output=kv", step_body(**(one | {"position": i64(60)})))
    yield post("/v1/step?output=kv", {"content": b"", "headers": step_body(**one)["headers"]})


def test_every_answer_has_the_bytes_of_the_ordinary_way(
    ask: Callable[..., bytes], session_id: str, fast: Counted
) -> None:
    requests = list(every_request(session_id))
    for request in requests:
        quick, ordinary = ask(once(request)), ask(once(request), is_fast=False)
        assert plain(quick) == plain(ordinary)
    assert fast.count == len(requests)


def test_refusals_are_counted_by_their_bytes_whichever_way_they_are_told(
    tell: Callable[..., bytes], door: InProcess, session_id: str, fast: Counted
) -> None:
    request = apply(session_id, 1, epoch=5)
    told = []
    for is_fast in (True, False):
        before = door.app.state.service.metrics.sent_bytes._value.get()
        answer = tell(once(request), is_fast=is_fast)
        assert code(answer) == (409, "stale_epoch")
        after = door.app.state.service.metrics.sent_bytes._value.get()
        told.append(after - before - len(answer.partition(b"\r\n\r\n")[2]))
    assert told == [0, 0]
    assert fast.count == 1


def test_a_body_split_at_every_byte_gives_the_same_answer(
    ask: Callable[..., bytes], session_id: str, fast: Counted
) -> None:
    request = post(
        "/v1/step?output=kv&layers=1",
        step_body(count=i32(1), position=i64(0), session_id=i64(int(session_id))),
    )
    whole = plain(ask(once(request)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for cut in range(1, len(request)):
            writer.write(request[:cut])
            await writer.drain()
            for _ in range(4):
                await asyncio.sleep(0)
            writer.write(request[cut:])
            assert plain(await read_answer(reader)) == whole
        return b""

    ask(talk)
    assert fast.count == len(request)


def test_a_body_byte_by_byte_is_received_in_place(
    ask: Callable[..., bytes], session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = apply(session_id, 1)
    received: list[int] = []
    updated = BodyReceiver.buffer_updated

    def counted(receiver: BodyReceiver, nbytes: int) -> None:
        received.append(nbytes)
        updated(receiver, nbytes)

    monkeypatch.setattr(BodyReceiver, "buffer_updated", counted)
    split = ask(once(*[request[i : i + 1] for i in range(len(request))]))
    assert plain(split) == plain(ask(once(request)))
    assert received


def test_a_large_body_leaves_the_loop_to_others_between_its_pieces(
    ask: Callable[..., bytes], session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "READ_BYTES", 300)
    request = apply(session_id, MAX_TOKENS)
    head = request.index(b"\r\n\r\n") + 4
    pieces: list[tuple[int, bool]] = []
    updated = BodyReceiver.buffer_updated

    def counted(receiver: BodyReceiver, nbytes: int) -> None:
        line: Any = receiver._connection
        updated(receiver, nbytes)
        pieces.append((nbytes, line.transport.is_reading()))

    monkeypatch.setattr(BodyReceiver, "buffer_updated", counted)
    answer = ask(once(request[:head], request[head:]))
    assert sum(nbytes for nbytes, _ in pieces) == len(request) - head
    assert max(nbytes for nbytes, _ in pieces) == 300
    # A whole piece is the last one of its turn, but for the one that the body ends with.
    assert all(is_reading == (nbytes < 300) for nbytes, is_reading in pieces[:-1])
    assert pieces[-1][1]
    monkeypatch.undo()
    assert plain(answer) == plain(ask(once(request)))


def test_a_client_that_leaves_between_two_pieces_holds_nothing(
    ask: Callable[..., bytes], door: InProcess, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "READ_BYTES", 300)
    request = apply(session_id, MAX_TOKENS)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request[:-200])
        while not door.state.pool_bytes:
            await asyncio.sleep(0)
        writer.transport.abort()
        return b""

    ask(talk)
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)


def test_pipelined_requests_are_answered_in_order(
    ask: Callable[..., bytes], session_id: str
) -> None:
    asked = [
        apply(session_id, 1),
        request_of("GET", "/livez"),
        apply(session_id, 2),
        request_of("GET", f"/v1/sessions/{session_id}/layers/1/hash_ids?position=0"),
        apply(session_id, MAX_TOKENS),
    ]
    alone = [plain(ask(once(request))) for request in asked]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"".join(asked))
        assert [plain(await read_answer(reader)) for _ in asked] == alone
        return b""

    ask(talk)


def test_an_expected_body_is_asked_for_once_it_is_admitted(
    ask: Callable[..., bytes], session_id: str
) -> None:
    head, _, body = apply(session_id, 2).partition(b"\r\n\r\n")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        return await read_answer(reader)

    assert ask(talk).startswith(b"HTTP/1.1 200 ")


def test_a_refused_expectation_is_not_asked_for(ask: Callable[..., bytes], session_id: str) -> None:
    head = apply(session_id, 2).replace(b"position=0", b"position=x").partition(b"\r\n\r\n")[0]
    assert code(ask(once(head + b"\r\nExpect: 100-continue\r\n\r\n"))) == (422, "schema")


def test_a_tensor_without_a_length_is_refused(ask: Callable[..., bytes], session_id: str) -> None:
    chunked = request_of(
        "POST",
        "/v1/step?output=none",
        Content_Type=wire.TENSOR_MEDIA,
        Transfer_Encoding="chunked",
    )
    assert code(ask(once(chunked + b"0\r\n\r\n"))) == (411, "length_required")


def test_too_large_and_no_room_reach_a_client_that_writes_20_mb_first(
    ask: Callable[..., bytes], door: InProcess
) -> None:
    head = (
        b"POST /v1/step?output=none HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: 20000000\r\n\r\n"
    )
    parts = [b"\0" * 1_000_000] * 20
    assert code(ask(once(head, *parts))) == (413, "body_too_large")
    door.state.pool.total_bytes, was = 40_000_000, door.state.pool.total_bytes
    try:
        with door.state.pool.lease("") as lease:
            lease.add(20_000_000, "another's")
            lease.add(10_000_000, "another's")
            assert code(ask(once(head, *parts))) == (429, "overloaded")
    finally:
        door.state.pool.total_bytes = was
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)


@pytest.mark.usefixtures("impatient")
def test_a_slow_body_is_refused_and_gives_its_room_back(
    ask: Callable[..., bytes], door: InProcess, session_id: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(apply(session_id, 2)[:-1])
        answer = await read_answer(reader)
        assert await reader.read() == b""
        return answer

    answer = ask(talk)
    assert code(answer) == (408, "request_timeout")
    assert b"connection: close\r\n" in answer
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)


@pytest.mark.usefixtures("impatient")
def test_a_body_that_comes_after_its_refusal_does_nothing(
    ask: Callable[..., bytes], door: InProcess, session_id: str
) -> None:
    """A push that was refused as too slow is not done, nor counted out twice."""
    tensors = {
        "count": i32(1),
        "position": i64(MAX_TOKENS),
        "session_id": i64(int(session_id)),
        "token_ids": i32(2),
    }
    request = post("/v1/step?output=none", step_body(**tensors))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        answer = await read_answer(reader)
        writer.write(body)
        assert await reader.read() == b""
        return answer

    assert code(ask(talk)) == (408, "request_timeout")
    assert door.get(f"/v1/sessions/{session_id}").json()["length"] == MAX_TOKENS
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)


def test_a_client_that_said_all_gets_its_answer(
    tell: Callable[..., bytes], session_id: str
) -> None:
    assert tell(once(apply(session_id, 2), eof=True)).startswith(b"HTTP/1.1 200 ")


def test_a_connection_to_be_closed_is_closed_after_its_answer(
    ask: Callable[..., bytes], session_id: str
) -> None:
    request = apply(session_id, 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        return await reader.read()

    assert b"connection: close\r\n" in ask(talk)


@pytest.mark.parametrize("with_eof", [True, False])
def test_a_client_that_leaves_inside_its_body_holds_nothing(
    ask: Callable[..., bytes], door: InProcess, session_id: str, with_eof: bool
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(apply(session_id, 2)[:-1])
        while not door.state.pool_bytes:
            await asyncio.sleep(0)
        if with_eof and writer.can_write_eof():
            writer.write_eof()
            return await reader.read()
        writer.transport.abort()
        return b""

    assert ask(talk) == b""
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)
    assert 'code="client_gone"' in door.get("/metrics").text


def test_a_client_that_leaves_while_its_read_waits_holds_nothing(
    ask: Callable[..., bytes], door: InProcess, session_id: str
) -> None:
    target = f"/v1/sessions/{session_id}/layers/1/kv?position={MAX_TOKENS}&wait_ms=1000"
    engine = door.state.model.engine

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request_of("GET", target))
        while not engine.counters["waiting"]:
            await asyncio.sleep(0)
        writer.transport.abort()
        return b""

    ask(talk)
    assert (door.state.pool_bytes, door.state.num_active) == (0, 0)


@pytest.mark.usefixtures("impatient")
def test_a_reader_that_takes_nothing_is_cut_off(
    tell: Callable[..., bytes], door: InProcess, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SEND_BYTES", 0)

    ended = [door.state.metrics.requests.labels("read_rows", how) for how in ("ok", GONE)]
    target = f"/v1/sessions/{session_id}/layers/1/rows?position=0&count={MAX_TOKENS}"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        asked = 0
        while not ended[1]._value.get():
            writer.write(request_of("GET", target))
            asked += 1
            while sum(count._value.get() for count in ended) < asked:
                await asyncio.sleep(0)
        return b""

    tell(talk)
    assert door.state.pool_bytes == 0


def test_a_long_refusal_ends_when_it_is_taken(
    ask: Callable[..., bytes], session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the list of thousands of refused segments is, where the socket takes less at once."""
    plain = Exchanges.refusal

    def long(shared: Exchanges, call: Any, error: BaseException) -> Refusal:
        told = plain(shared, call, error)
        body = told.body + b" " * (16 << 20)
        size = (b"content-length", str(len(body)).encode())
        rest = [header for header in told.headers if header[0] != size[0]]
        return replace(told, headers=[*rest, size], body=body)

    monkeypatch.setattr(Exchanges, "refusal", long)
    not_pushed = f"/v1/sessions/{session_id}/layers/1/kv?position={MAX_TOKENS}"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request_of("GET", not_pushed))
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 409 ")
        writer.write(request_of("GET", "/livez"))
        return await read_answer(reader)

    assert ask(talk).startswith(b"HTTP/1.1 200 ")


def test_a_large_answer_leaves_the_loop_to_others_between_its_pieces(
    tell: Callable[..., bytes], door: InProcess, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the client takes meanwhile: a turn writes one piece."""
    monkeypatch.setattr(exchange, "JOIN_BYTES", 512)
    monkeypatch.setattr(exchange, "PIECE_BYTES", 1000)
    turns = 0
    sent_in: list[int] = []
    plain = Exchange._send_on

    def counted(self: Exchange) -> None:
        sent_in.append(turns)
        plain(self)

    monkeypatch.setattr(Exchange, "_send_on", counted)

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(sent_in) < 5:
            asyncio.get_running_loop().call_soon(turn)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        turn()
        writer.write(apply(session_id, 16))
        return await read_answer(reader)

    answer = tell(talk)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(sent_in) == 5  # 4,096 bytes
    assert len(set(sent_in)) == 5
    assert door.state.pool_bytes == 0


def test_a_draining_service_refuses_on_every_connection(
    ask: Callable[..., bytes], door: InProcess, session_id: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(apply(session_id, 1))
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
        door.state.is_draining = True
        writer.write(apply(session_id, 1))
        return await read_answer(reader)

    assert code(ask(talk)) == (503, "draining")


def test_a_foreign_host_is_misdirected(
    tell: Callable[..., bytes], session_id: str, fast: Counted
) -> None:
    request = apply(session_id, 1).replace(b"Host: localhost", b"Host: evil.example")
    assert code(tell(once(request))) == (421, "misdirected")
    assert not fast.count


def test_a_key_is_asked_for_and_names_the_connection(
    make_door: Callable[..., InProcess], tmp_path: Path, uv_runner: asyncio.Runner, fast: Counted
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice use {hashlib.sha256(b'secret').hexdigest()}\n")
    door = make_door(keys_file=keys)
    body = step_body(count=i32(), position=i64(), session_id=i64())
    request = post("/v1/step?output=none", body)
    keyed = post("/v1/step?output=none", body, Authorization="Bearer secret")

    def tell(request: bytes) -> bytes:
        return uv_runner.run(talk_to(door, once(request), Wire()))

    assert code(tell(request)) == (401, "unauthenticated")
    assert fast.count == 0
    assert tell(keyed).startswith(b"HTTP/1.1 200 ")
    assert fast.count == 1


@pytest.mark.parametrize("kind", [ValueError, Internal])
def test_a_fault_is_told_without_its_words(
    ask: Callable[..., bytes],
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    """Not those of a backend that failed, either: they may name files."""

    def fail(*_: Any, **__: Any) -> None:
        raise kind("secret")

    monkeypatch.setattr("service.steps.decode", fail)
    body = step_body(count=i32(), position=i64(), session_id=i64())
    answer = ask(once(post("/v1/step?output=none", body)))
    assert code(answer) == (500, "internal")
    assert b"secret" not in answer
