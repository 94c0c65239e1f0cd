"""Remembered requests that come whole are answered at once: only they, and like all others."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvloop

from engram_client.http1 import Request, Response
from engram_core.backends import cpu
from engram_core.engine_types import OpenRequest
from engram_core.errors import Internal
from engram_core.host_memory import PooledMemory
from service import bodies, exchange, recall
from service.app import create_app
from service.desk import MAX_TALLIED
from service.fast_path import FastPath
from service.landing import LANDING_BYTES, Landing
from service.loading import load_model
from service.recall import Recall
from service.settings import Settings
from service.state import Model
from service.transport import Connection, Receiver
from tests.native.host_library import build_cpu_library
from tests.service.door import InProcess, tensor_body
from tests.service.shared_line import Line as SharedLine
from tests.service.talk import Talk, Wire, read_answer, talk_to

PIECES = [
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b",", b"\x00", b"\xff"),
    *(b"0", b"1", b"+", b"-", b"?", b"&", b"#", b"%31", b"HTTP/1.0", b"\r\n folded"),
    *(b"\r\nContent-Length: 2", b"\r\nTransfer-Encoding: chunked", b"\r\nHost: evil"),
    *(b"\r\nConnection: close", b"\r\nExpect: 100-continue", b"\r\nX-Engram-Table: x"),
]
"""What ends lines, names and values, and headers that change what a request is."""
LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def near(
    official_dir: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, asyncio.Runner]]:
    """An engine that this thread may read for itself, and the loop for it."""
    threads = torch.get_num_threads()
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_library", lambda: library)
        model = load_model(official_dir, settings, lambda *_: None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model.engine.attach(runner.get_loop().call_soon)
        yield model, runner
    model.close()
    torch.set_num_threads(threads)


@pytest.fixture
def attached(near: tuple[Model, asyncio.Runner], settings: Settings) -> InProcess:
    """An app that remembers nothing yet."""
    changed = settings.model_copy(update={"shared_memory_bytes": 1 << 20})
    return InProcess(create_app(changed, near[0]), near[1])


@pytest.fixture(params=["tcp", "unix"])
def wire(request: pytest.FixtureRequest, socket_folder: Path) -> Wire:
    return Wire(path=socket_folder / "recall.sock" if request.param == "unix" else None)


@pytest.fixture
def tell(attached: InProcess, wire: Wire) -> Callable[..., bytes]:
    """Runs a talk."""
    return lambda talk, **how: attached.runner.run(talk_to(attached, talk, wire, **how))


@pytest.fixture
def session_id(attached: InProcess) -> Iterator[str]:
    """A session whose kv of both layers is in the store."""
    made: str = attached.open()["session_id"]
    attached.push(made, 0, [3, 4, 5, 6, 7, 8, 9, 10])
    for layer in (1, 14):
        answer = attached.get(f"/v1/sessions/{made}/layers/{layer}/kv?position=0&count=8")
        assert answer.status_code == 200
    yield made
    attached.state.is_draining = False
    attached.delete(f"/v1/sessions/{made}")


class Seen:
    """Requests that were answered at once, and those that were remembered and begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_once = self.begun = 0
        answered, begin = Connection.answered, Connection.begin

        def count_answered(*arguments: Any) -> None:
            self.at_once += 1
            answered(*arguments)

        def count_begun(*arguments: Any, **options: Any) -> None:
            self.begun += 1
            begin(*arguments, **options)

        monkeypatch.setattr(Connection, "answered", count_answered)
        monkeypatch.setattr(Connection, "begin", count_begun)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def read(
    session_id: str, query: str = "position=3", count: int = 2, layer: int = 1, **more: str
) -> bytes:
    made = tensor_body(torch.full((count, 2, 64), 0.5, dtype=torch.bfloat16))
    headers = {"Host": "localhost", **made["headers"], **more}
    headers["content-length"] = str(len(made["content"]))
    target = f"/v1/sessions/{session_id}/layers/{layer}/residual?{query}"
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + made["content"]


def after(known: bytes, *parts: bytes, answers: int = 1) -> Talk:
    """Have a request remembered, then send parts, each on its own; return what is answered."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(known)
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
        for part in parts:
            writer.write(part)
            await writer.drain()
            for _ in range(6):
                await asyncio.sleep(0)
        return b"".join([await read_answer(reader) for _ in range(answers)])

    return talk


def plain(answer: bytes) -> bytes:
    """An answer without the values that differ from time to time."""
    answer = re.sub(rb"dur=[0-9]+\.[0-9]{3}", b"dur", answer)
    return re.sub(rb"(date|x-request-id): [^\r]{16,}\r\n", rb"\1\r\n", answer)


@pytest.mark.parametrize(
    ("query", "layer"),
    [("position=3", 1), ("position=0", 14), ("position=6", 1), ("position=3&epoch=0", 1)],
)
def test_it_is_answered_at_once_with_the_bytes_of_the_ordinary_way(
    tell: Callable[..., bytes],
    attached: InProcess,
    session_id: str,
    seen: Seen,
    query: str,
    layer: int,
) -> None:
    epoch = attached.get(f"/v1/sessions/{session_id}").json()["epoch"]
    request = read(session_id, query.replace("epoch=0", f"epoch={epoch}"), layer=layer)
    at_once = tell(after(read(session_id), request))
    assert (seen.at_once, seen.begun) == (1, 0)
    ordinary = tell(after(read(session_id), request), is_fast=False)
    assert seen.at_once == 1
    assert plain(at_once) == plain(ordinary)


@pytest.mark.parametrize(
    "query", ["position=7", "position=3&epoch=5", "position=3&count=3", "position=03"]
)
def test_what_is_refused_is_refused_alike(
    tell: Callable[..., bytes], session_id: str, seen: Seen, query: str
) -> None:
    request = read(session_id, query)
    refused = tell(after(read(session_id), request))
    assert seen.at_once == 0
    ordinary = tell(after(read(session_id), request), is_fast=False)
    assert re.match(rb"HTTP/1.1 4", refused)
    assert plain(refused) == plain(ordinary)


def test_split_at_any_byte_it_is_answered_alike(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    request = read(session_id, count=1)
    whole = tell(after(request, request))
    head = request.index(b"\r\n\r\n") + 4
    for cut in [*range(1, head + 3), len(request) - 1]:
        at_once, begun = seen.at_once, seen.begun
        assert plain(tell(after(request, request[:cut], request[cut:]))) == plain(whole), cut
        assert seen.at_once == at_once + 1, cut  # the first of the connection
        assert (seen.begun > begun) == (cut >= head), cut


def test_two_in_one_packet_are_answered_in_order(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    one, other = read(session_id, "position=0"), read(session_id, "position=5", layer=14)
    both = tell(after(one, one + other, answers=2))
    assert seen.at_once == 0
    assert plain(both) == plain(tell(after(one, one))) + plain(tell(after(one, other)))


def test_what_follows_in_its_packet_is_the_next_request(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    request = read(session_id)
    assert tell(after(request, request + LIVE, answers=2)).endswith(b'{"status":"alive"}')
    both = tell(after(request, request + b"\x00" * 8, answers=2)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in both] == [b"200", b"400"]
    assert seen.at_once == 1  # the first of the second connection


def test_inside_another_head_it_is_part_of_that_head(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    request = read(session_id)
    answer = tell(after(request, LIVE[:-2] + b"X: ", request))
    assert re.match(rb"HTTP/1.1 42[12] ", answer)  # a second Host, a header of no probe's
    assert (seen.at_once, seen.begun) == (0, 0)


@pytest.mark.parametrize("target", ["/v1/sessions", "/v1/step?output=none", "/v1/nothing"])
def test_inside_a_body_it_is_part_of_that_body(
    tell: Callable[..., bytes], session_id: str, seen: Seen, target: str
) -> None:
    request = read(session_id)
    kind = "application/json" if target == "/v1/sessions" else "application/octet-stream"
    head = (
        f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(request) + 2}\r\n\r\n"
    ).encode()
    answer = tell(after(request, head + b" ", request, b" "))
    assert re.match(rb"HTTP/1.1 4[02]", answer), answer
    assert (seen.at_once, seen.begun) == (0, 0)


def test_behind_a_request_that_waits_it_is_answered_second(
    tell: Callable[..., bytes], attached: InProcess, session_id: str, seen: Seen
) -> None:
    request = read(session_id)
    waits = f"GET /v1/sessions/{session_id}/layers/1/kv?position=8&wait_ms=1000 HTTP/1.1\r\n"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        await read_answer(reader)
        writer.write(waits.encode() + b"Host: localhost\r\n\r\n")
        while not attached.state.model.engine.counters["waiting"]:
            await asyncio.sleep(0)
        writer.write(request)
        for _ in range(6):
            await asyncio.sleep(0)
        engine = attached.state.model.engine
        engine.push("", int(session_id), 8, np.array([5]))
        return await read_answer(reader) + await read_answer(reader)

    first, second = tell(talk).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert seen.at_once == 0
    assert b"x-engram-shape: 1,3,64" in first
    assert b"x-engram-shape: 2,2,64" in second


def changed(request: bytes, random: Random) -> bytes:
    """A request with a few bytes of its head changed, as a broken or a hostile client sends it."""
    end = request.index(b"\r\n\r\n") + 4
    for _ in range(random.randint(1, 3)):
        at = random.randrange(end)
        piece = random.choice(PIECES)
        match random.randrange(5):
            case 0:  # in place of what was there
                request = request[:at] + piece + request[at + len(piece) :]
            case 1:
                request = request[:at] + piece + request[at:]
            case 2:
                request = request[:at] + request[at + random.randint(1, 9) :]
            case 3:  # at the end of a line
                at = request.rfind(b"\r\n", 0, max(at, request.index(b"\r\n") + 2))
                request = request[:at] + piece + request[at:]
            case _:  # a line twice, or its case turned
                lines = request.split(b"\r\n")
                place = random.randrange(1, 7)
                lines[place] = lines[place].swapcase() if random.random() < 0.5 else lines[place]
                lines.insert(random.randrange(1, 7), lines[place])
                request = b"\r\n".join(lines)
    return request + random.choice([b"", b"", b"x", LIVE, request])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_bytes_come_they_are_answered_as_if_nothing_were_remembered(
    tell: Callable[..., bytes], session_id: str, seed: int
) -> None:
    random = Random(seed)
    known = read(session_id)

    def ask(packet: bytes) -> bytes:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(known)
            await read_answer(reader)
            writer.write(packet)
            writer.write_eof()
            return await reader.read()

        return tell(talk)

    for _ in range(40):
        packet = changed(known, random)
        with pytest.MonkeyPatch.context() as patch:
            answer = ask(packet)
            patch.setattr(FastPath, "recall", lambda *_: False)
            assert plain(answer) == plain(ask(packet)), packet


def test_headers_that_the_parser_saw_otherwise_are_not_remembered(
    tell: Callable[..., bytes], session_id: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Connection._header_block
    monkeypatch.setattr(
        Connection, "_header_block", lambda line: block(line).replace(b"localhost", b"127.0.0.1")
    )
    fresh = {"User-Agent": "headers-seen-otherwise"}
    request = read(session_id, **fresh)
    other = request.replace(b"localhost", b"127.0.0.1")
    assert tell(after(request, other)).startswith(b"HTTP/1.1 200 ")
    assert (seen.at_once, seen.begun) == (0, 0)


def test_a_connection_that_is_to_be_closed_is_not_remembered(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    request = read(session_id, Connection="close")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        return await reader.read()

    for _ in range(2):
        assert b"connection: close" in tell(talk)
    assert (seen.at_once, seen.begun) == (0, 0)


def test_without_room_it_is_refused(
    tell: Callable[..., bytes], attached: InProcess, session_id: str, seen: Seen
) -> None:
    pool = attached.state.pool
    request = read(session_id)
    tell(after(request, answers=0))
    pool.used_bytes += pool.total_bytes
    try:
        refused = tell(lambda reader, writer: _once(request, reader, writer))
    finally:
        pool.used_bytes -= pool.total_bytes
        pool._waiting.clear()
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert seen.at_once == 0


async def _once(
    request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    writer.write(request)
    return await read_answer(reader)


def test_while_answers_wait_to_be_taken_an_exchange_watches_the_reader(
    tell: Callable[..., bytes], session_id: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = read(session_id)
    answer = Recall.answer

    def with_more_to_send(recall: Recall, data: bytes, line: Any) -> bool:
        transport = line.transport
        line.transport = _Full(transport)
        try:
            return answer(recall, data, line)
        finally:
            line.transport = transport

    monkeypatch.setattr(Recall, "answer", with_more_to_send)
    assert tell(after(request, request)).startswith(b"HTTP/1.1 200 ")
    assert (seen.at_once, seen.begun) == (0, 1)


class _Full:
    """A transport that has bytes to send."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def get_write_buffer_size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_a_fault_is_told(
    tell: Callable[..., bytes],
    attached: InProcess,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = read(session_id)

    def fail(*_: Any) -> None:
        raise ValueError("secret")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        await read_answer(reader)
        monkeypatch.setattr(type(attached.state.model.engine), "answer", fail)
        writer.write(request)
        return await read_answer(reader)

    answer = tell(talk)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer


def test_in_shared_memory_it_is_answered_at_once_too(
    attached: InProcess, session_id: str, seen: Seen, socket_folder: Path
) -> None:
    path = socket_folder / "shared.sock"
    made = tensor_body(torch.full((2, 2, 64), 0.5, dtype=torch.bfloat16))
    target = f"/v1/sessions/{session_id}/layers/1/residual?position="
    first, other = (
        Request(
            "POST",
            target + at,
            [*made["headers"].items()],
            [made["content"]],
            max_answer_bytes=1 << 16,
        )
        for at in ("3", "5&epoch=1")
    )

    def ask() -> tuple[list[Response], tuple[int, str], tuple[int, str]]:
        url = f"unix:{path}"
        with SharedLine(url) as line, SharedLine(url, asks=False) as without:
            answers = [line.share(first) for _ in range(3)]
            assert line.region is not None
            placed = line.region.place(first)
            assert placed is not None
            return answers, line.refused(line.region.place(other)), without.refused(placed)

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.close()
        found.append(await asyncio.to_thread(ask))
        return b""

    found: list[Any] = []
    attached.runner.run(talk_to(attached, talk, Wire(path=path)))
    (checked, *at_once), stale, foreign = found[0]
    assert (stale, foreign) == ((409, "stale_epoch"), (400, "bad_request"))
    assert (seen.at_once, seen.begun) == (2, 1)

    def plainly(response: Response) -> tuple[bytes, dict[str, str]]:
        told = {name: value for name, value in response.headers.items() if name != "date"}
        told["server-timing"] = re.sub(r"[0-9.]+", "", told["server-timing"])
        assert len(told.pop("x-request-id")) == 16
        return bytes(response.body), told

    assert [plainly(each) for each in at_once] == [plainly(checked)] * 2
    text = attached.state.metrics.exposition().decode()
    assert 'engram_stage_seconds_count{stage="check"}' in text
    receives = re.findall(r'^engram_stage_seconds_count{stage="receive"} (\S+)', text, re.M)
    assert receives in ([], ["0.0"])  # nothing came by the socket


@pytest.mark.parametrize("times", [1, MAX_TALLIED - 1, MAX_TALLIED + 1])
def test_each_is_counted_when_metrics_are_asked_for(
    tell: Callable[..., bytes], attached: InProcess, session_id: str, seen: Seen, times: int
) -> None:
    request = read(session_id)
    tell(after(request, answers=0))
    stages = ("receive", "check", "gate", "send")
    names = [
        'requests_total{code="ok",operation="apply_residual"}', "request_seconds_count",
        "body_bytes_count", "received_bytes_total", "sent_bytes_total",
        *(f'stage_seconds_count{{stage="{stage}"}}' for stage in stages),
    ]  # fmt: skip

    def count() -> list[float]:
        text = attached.state.metrics.exposition().decode()
        return [
            sum(map(float, re.findall(rf"^engram_{re.escape(name)} (\S+)$", text, re.M)))
            for name in names
        ]

    before, at_once = count(), seen.at_once
    tell(after(request, *[request] * times, answers=times))
    added = [one - two for one, two in zip(count(), before, strict=True)]
    num_bytes = len(request) - request.index(b"\r\n\r\n") - 4
    assert seen.at_once - at_once == times + 1
    assert added == [(times + 1) * (num_bytes if "bytes_total" in name else 1) for name in names]


def test_an_answer_at_once_renews_the_connection(
    tell: Callable[..., bytes], session_id: str
) -> None:
    """The timer that runs is not set anew; when it ends it waits for the rest."""
    request = read(session_id)
    lines: list[Connection] = []
    made = Connection.connection_made

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(request)
            await read_answer(reader)
        (line,) = lines
        timer = line.timeout_keep_alive_task
        line.timeout_keep_alive_handler()
        assert not line.transport.is_closing()
        assert line.timeout_keep_alive_task is not timer
        line._answered_s -= 1000.0
        line.timeout_keep_alive_handler()
        assert line.transport.is_closing()
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Connection,
            "connection_made",
            lambda line, transport: (lines.append(line), made(line, transport)),
        )
        tell(talk)


def test_a_large_body_is_begun_and_received_where_it_belongs(
    tell: Callable[..., bytes], attached: InProcess, session_id: str, seen: Seen
) -> None:
    attached.state.model.engine.push("", int(session_id), 8, np.full(56, 3))
    request = read(session_id, "position=0", count=64)
    cut = request.index(b"\r\n\r\n") + 4 + 100
    split = tell(after(request, request[:cut], request[cut:]))
    assert (seen.at_once, seen.begun) == (0, 1)
    ordinary = tell(after(request, request), is_fast=False)
    assert split[split.index(b"\r\n\r\n") :] == ordinary[ordinary.index(b"\r\n\r\n") :]


def test_a_head_in_the_middle_of_a_packet_is_not_the_one_that_is_remembered(
    tell: Callable[..., bytes], session_id: str, seen: Seen
) -> None:
    """The bytes at the packet's beginning are another request's."""
    request = read(session_id, **{"User-Agent": "second-in-its-packet"})
    both = LIVE + request

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(both)
        await read_answer(reader)
        await read_answer(reader)
        writer.write(request)
        return await read_answer(reader)

    assert tell(talk).startswith(b"HTTP/1.1 200 ")
    assert (seen.at_once, seen.begun) == (0, 0)


def test_a_removed_key_is_refused(
    near: tuple[Model, asyncio.Runner], settings: Settings, tmp_path: Path, seen: Seen
) -> None:
    model, runner = near
    keys = tmp_path / "keys"
    keys.write_text(f"alice use {hashlib.sha256(b'secret').hexdigest()}\n")
    door = InProcess(create_app(settings.model_copy(update={"keys_file": keys}), model), runner)
    opened = model.engine.open("alice", OpenRequest()).session_id
    model.engine.push("alice", opened, 0, np.full(8, 3))
    assert model.engine.drain(30)
    request = read(str(opened), Authorization="Bearer secret")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(request)
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
        keyring = door.state.access.keyring
        assert keyring is not None
        keyring._keys = ()
        writer.write(request)
        return await read_answer(reader)

    assert runner.run(talk_to(door, talk, Wire())).startswith(b"HTTP/1.1 401 ")
    assert seen.at_once == 1
    model.engine.close_tenant("alice")


def test_another_model_forgets_where_bodies_were(
    attached: InProcess, session_id: str, tell: Callable[..., bytes], seen: Seen
) -> None:
    request = read(session_id)
    tell(after(request, request))
    state = attached.state
    served = state.model
    state._model = replace(served)
    try:
        assert not attached.app.state.fast_path.recall(request, _Line())
    finally:
        state._model = served


class _Line:
    is_unix = False


def test_a_large_body_without_room_is_refused_before_it_is_received(
    tell: Callable[..., bytes],
    attached: InProcess,
    session_id: str,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 100)
    pool = attached.state.pool
    request = read(session_id)
    head = request[: request.index(b"\r\n\r\n") + 4]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        await read_answer(reader)
        pool.used_bytes += pool.total_bytes
        try:
            writer.write(head + b"x")
            return await read_answer(reader)
        finally:
            pool.used_bytes -= pool.total_bytes
            pool._waiting.clear()

    known = tell(talk)
    assert known.startswith(b"HTTP/1.1 429 ")
    assert b"connection: close" in known
    assert (seen.at_once, seen.begun) == (0, 1)
    monkeypatch.setattr(FastPath, "recall", lambda *_: False)
    assert plain(known) == plain(tell(talk))


def test_after_a_failure_it_is_refused(
    tell: Callable[..., bytes],
    attached: InProcess,
    session_id: str,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = read(session_id)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        await read_answer(reader)
        failed = property(lambda _: Internal("the device is gone"))
        monkeypatch.setattr(type(attached.state.model.engine), "failure", failed)
        writer.write(request)
        return await read_answer(reader)

    answer = tell(talk)
    monkeypatch.undo()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code": "shard_down"' in answer
    assert (seen.at_once, seen.begun) == (0, 0)


def test_no_tokens_in_shared_memory_are_answered_every_time(
    attached: InProcess, session_id: str, socket_folder: Path
) -> None:
    path = socket_folder / "none.sock"
    headers = [
        ("Content-Type", "application/octet-stream"),
        ("X-Engram-Shape", "0,2,64"),
        ("X-Engram-Dtype", "BF16"),
        ("X-Engram-Shared-Body", "0,0"),
        ("X-Engram-Shared-Answer", "0,0"),
    ]
    none = Request("POST", f"/v1/sessions/{session_id}/layers/1/residual?position=0", headers)

    def ask() -> list[int]:
        with SharedLine(f"unix:{path}") as line:
            return [line.send(none).status for _ in range(3)]

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.close()
        found.extend(await asyncio.to_thread(ask))
        return b""

    found: list[int] = []
    attached.runner.run(talk_to(attached, talk, Wire(path=path)))
    assert found == [200, 200, 200]


def test_a_connection_that_read_nothing_holds_no_memory(
    attached: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at its end, or where TLS has no whole record: it was asked where bytes may land."""
    memory = PooledMemory(np.zeros(2 * LANDING_BYTES, np.uint8))
    monkeypatch.setattr(attached.state.pool, "memory", memory)
    landing = attached.app.state.fast_path.landing

    def receiver(came: Callable[[memoryview], object]) -> Receiver:
        return Receiver(SimpleNamespace(pad=0, came=came), landing)  # type: ignore[arg-type]

    idle = [receiver(len) for _ in range(8)]
    busy = receiver(lambda data: landing.keep(data, 0, 64))
    for each in idle:
        for one in (each, busy):
            one.get_buffer(-1)
        busy.buffer_updated(64)
    assert memory.pieces.used_bytes == 0


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Large are bodies of more than 100 bytes: whether each was received where it landed."""
    monkeypatch.setattr(exchange, "LANDED_BYTES", 100)
    for module in (exchange, recall):
        monkeypatch.setattr(module, "AT_ONCE_BYTES", 100)
    found: list[bool] = []
    keep = Landing.keep

    def kept(*arguments: Any) -> memoryview | None:
        body = keep(*arguments)
        found.append(body is not None)
        return body

    monkeypatch.setattr(Landing, "keep", kept)
    return found


def test_a_large_body_like_the_last_one_is_received_where_it_landed(
    tell: Callable[..., bytes], session_id: str, landed: list[bool], seen: Seen
) -> None:
    one, other = read(session_id, "position=0"), read(session_id, "position=5")
    head = one.index(b"\r\n\r\n") + 4
    want = [plain(tell(after(each, each), is_fast=False)) for each in (one, other)]
    for cut in (head, head + 1, head + 100, len(one) - 1, len(one)):

        async def talk(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: int = cut
        ) -> bytes:
            answers = []
            for request in (one, one, other, one, other):
                writer.write(request[:cut])
                await writer.drain()
                for _ in range(6):
                    await asyncio.sleep(0)
                writer.write(request[cut:])
                answers.append(plain(await read_answer(reader)))
            assert answers == [want[0], want[0], want[1], want[0], want[1]]
            return b""

        landed.clear()
        seen.at_once = 0
        tell(talk)
        assert landed[-3:] == [True] * 3
        assert seen.at_once >= 3 if cut == len(one) else not seen.at_once


def test_bodies_that_landed_are_each_other_s_neighbours_not_their_heirs(
    tell: Callable[..., bytes], attached: InProcess, session_id: str, landed: list[bool]
) -> None:
    """While one is being received, what comes on other connections lands elsewhere."""
    requests = [read(session_id, f"position={i}") for i in range(4)]
    want = [plain(tell(after(each, each), is_fast=False)) for each in requests]
    held: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(requests[0])
            await read_answer(reader)
        address = writer.get_extra_info("peername")
        if isinstance(address, str):
            lines = [await asyncio.open_unix_connection(address) for _ in requests]
        else:
            lines = [await asyncio.open_connection(*address) for _ in requests]
        for _ in range(2):
            for cut in (slice(None, -40), slice(-40, -3), slice(-3, None)):
                for (_, each), request in zip(lines, requests, strict=True):
                    each.write(request[cut])
                await asyncio.sleep(0.01)
                held.append(attached.state.pool_bytes)
            answers = [plain(await read_answer(each)) for each, _ in lines]
            assert answers == want
        for _, each in lines:
            each.close()
        return b""

    tell(talk)
    assert landed[-4:] == [True] * 4
    assert max(held) == 4 * LANDING_BYTES  # a slow sender is counted with all that it holds
    assert attached.state.pool_bytes == 0
