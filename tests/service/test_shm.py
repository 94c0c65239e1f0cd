"""Shared memory: the same bytes as the socket's, and nothing that a hostile client can do to it."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import uvloop

from engram_client import AsyncEngramClient, EngramClient, Segment, wire
from engram_client import shared as client_shared
from engram_client.http1 import Request, Response
from engram_core.errors import Overloaded
from service import shm, steps
from service.access import add_key
from service.app import create_app
from service.settings import Settings
from service.shm import Regions
from service.state import Model
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess, i32, i64, step_body, tensor_body
from tests.service.pooled import pooled
from tests.service.shared_line import Line
from tests.service.talk import Wire, talk_to

Result = TypeVar("Result")
TOTAL_BYTES = 1 << 20


@pytest.fixture(scope="module")
def uv_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as made:
        yield made


@pytest.fixture
def shared_door(settings: Settings, model: Model, runner: asyncio.Runner) -> InProcess:
    changed = settings.model_copy(update={"shared_memory_bytes": TOTAL_BYTES})
    return InProcess(create_app(changed, model), runner)


@pytest.fixture
def session_id(shared_door: InProcess) -> str:
    made: str = shared_door.open()["session_id"]
    shared_door.push(made, 0, [2] * MAX_TOKENS)
    return made


@pytest.fixture
def serve(
    uv_runner: asyncio.Runner, socket_folder: Path
) -> Callable[[InProcess, Callable[[str], Any]], Any]:
    """Runs a blocking function against an app on a Unix socket; gives it the URL."""
    path = socket_folder / "shared.sock"

    def run(door: InProcess, ask: Callable[[str], Any]) -> Any:
        found: list[Any] = []

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.close()
            found.append(await asyncio.to_thread(ask, f"unix:{path}"))
            return b""

        path.unlink(missing_ok=True)
        uv_runner.run(talk_to(door, talk, Wire(path=path)))
        return found[0]

    return run


def post(target: str, made: dict[str, Any], *more: tuple[str, str]) -> Request:
    headers = [*made["headers"].items(), *more]
    return Request("POST", target, headers, [made["content"]], max_answer_bytes=1 << 20)


def empty(request: Request, *more: tuple[str, str]) -> Request:
    """A request without its body, with other headers."""
    return Request(request.method, request.target, [*request.headers, *more])


def get(target: str) -> Request:
    return Request("GET", target, max_answer_bytes=1 << 20)


def residual(count: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return tensor_body(torch.randn((count, 2, 64), generator=generator).to(dtype))


def every_request(session_id: str) -> Iterator[Request]:
    """One request of every tensor route and form of answer, refusals included."""
    path = f"/v1/sessions/{session_id}/layers/1"
    yield post(f"{path}/residual?position=0", residual(MAX_TOKENS))
    yield post(f"{path}/residual?position=1", residual(2, torch.float32))
    for output in ("kv", "rows", "hash_ids"):
        yield get(f"{path}/{output}?position=0&count={MAX_TOKENS}")
        yield get(f"{path}/{output}?position={MAX_TOKENS}")  # not pushed
        yield get(f"{path}/{output}?position=0&count=0")
    yield get(f"{path}/rows?position=0&encoding=stored")
    one = {"count": i32(2), "position": i64(3), "session_id": i64(int(session_id))}
    for output in ("none", "kv", "rows", "hash_ids", "rows&encoding=stored"):
        yield post(f"/v1/step?output={output}", step_body(**one))
    tensors = one | {"residual": torch.ones((2, 2, 64)).bfloat16()}
    yield post("/v1/step?output=residual&layers=14", step_body(**tensors))
    yield post("/v1/step?output=kv", step_body(**one, nonsense=i32(1)))
    yield post("/v1/step?output=kv", step_body(**(one | {"position": i64(60)})))
    yield post(f"{path}/residual?position=x", residual(2))


def told(response: Response) -> dict[str, str]:
    """The headers that do not differ from time to time, or by the way."""
    other = ["date", "server-timing", "content-length", "x-request-id", "x-engram-shared-answer"]
    return {name: value for name, value in response.headers.items() if name not in other}


def test_every_answer_has_the_bytes_of_the_socket(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    def ask(url: str) -> None:
        with Line(url) as line, Line(url, asks=False) as other:
            for request in every_request(session_id):
                ours, theirs = line.share(request), other.send(request)
                assert (ours.status, bytes(ours.body)) == (theirs.status, bytes(theirs.body))
                assert told(ours) == told(theirs)

    serve(shared_door, ask)
    assert shared_door.state.pool_bytes == 0


def test_large_answers_do_not_cross_the_socket(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    path = f"/v1/sessions/{session_id}/layers/1"

    def ask(url: str) -> None:
        with Line(url) as line:
            assert line.region is not None
            for request in (
                post(f"{path}/residual?position=0", residual(MAX_TOKENS)),
                get(f"{path}/kv?position=0&count={MAX_TOKENS}"),
            ):
                placed = line.region.place(request)
                assert placed is not None
                answer = line.send(placed)
                assert (answer.status, len(answer.body)) == (200, 0)
                offset, num_bytes, at = answer.headers["x-engram-shared-answer"].split(",")
                assert (int(offset), at) == (0, "0")
                assert int(num_bytes) >= 2 * MAX_TOKENS * 64 * 2

    serve(shared_door, ask)


@pytest.mark.parametrize(
    "place",
    [
        "-64,64", "64,-64", "1,64", "0,99999999", "262144,1", "9223372036854775744,64", "0",
        "0,1,2", "0,18446744073709551616", "9223372036854775807,9223372036854775807", "a,b", "",
        "0, 64", "+0,64", "00,64",
    ],
)  # fmt: skip
def test_a_place_outside_the_region_is_refused(
    serve: Any, shared_door: InProcess, session_id: str, place: str
) -> None:
    apply = post(f"/v1/sessions/{session_id}/layers/1/residual?position=0", residual(2))

    def ask(url: str) -> list[tuple[int, str]]:
        with Line(url) as line:
            for name in (wire.SHARED_BODY, wire.SHARED_ANSWER):
                assert line.refused(empty(apply, (name, place))) == (422, "schema")
            return [line.refused(empty(apply, (wire.SHARED_BODY, "0,64")))]

    assert serve(shared_door, ask) == [(400, "bad_tensor")]


def test_a_body_and_its_answer_may_overlap(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    one = {"count": i32(2), "position": i64(3), "session_id": i64(int(session_id))}
    request = post("/v1/step?output=kv&layers=1", step_body(**one))

    def ask(url: str) -> None:
        with Line(url) as line, Line(url, asks=False) as other:
            body = request.body[0]
            line.memory[: len(body)] = body
            places = ((wire.SHARED_BODY, f"0,{len(body)}"), (wire.SHARED_ANSWER, "64,4096"))
            answer = line.send(empty(request, *places))
            assert line.region is not None
            got = line.region.collect(request, answer)
            assert bytes(got.body) == bytes(other.send(request).body)

    serve(shared_door, ask)


def scribble(line: Line, num_bytes: int) -> None:
    """Change every table: counts, positions, ids, offsets."""
    memory = np.frombuffer(line.memory, np.uint8)
    memory[:num_bytes] = 0xFF


@pytest.mark.parametrize("after", ["the head", "the tensors", "the checks"])
def test_what_was_checked_is_what_is_used(
    serve: Any,
    shared_door: InProcess,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
) -> None:
    """Double fetch: the client changes its tables between our check and our use."""
    one = {"count": i32(2), "position": i64(3), "session_id": i64(int(session_id))}
    pushed = {"token_ids": i64(2, 2), "mask": np.array([1, 1], np.uint8)}
    request = post("/v1/step?output=kv&layers=1", step_body(**one, **pushed))
    lines: list[Line] = []

    def changed(function: Callable[..., Result], *, first: bool) -> Callable[..., Result]:
        def call(*arguments: Any, **more: Any) -> Result:
            if first and lines:
                scribble(lines[0], len(request.body[0]))
            result = function(*arguments, **more)
            if lines:
                scribble(lines[0], len(request.body[0]))
            return result

        return call

    if after == "the head":
        # The data is checked after this: what the client wrote over it is refused, not used.
        monkeypatch.setattr(wire, "decode_head", changed(wire.decode_head, first=True))
    elif after == "the tensors":
        monkeypatch.setattr(steps, "request_of", changed(steps.request_of, first=True))
    else:
        monkeypatch.setattr(steps, "request_of", changed(steps.request_of, first=False))

    def ask(url: str) -> None:
        with Line(url, asks=False) as other:
            expected = bytes(other.send(request).body)
        with Line(url) as line:
            lines.append(line)
            answer = line.share(request)
            if after == "the head":
                assert (answer.status, wire.load_json(bytes(answer.body))["code"]) == (
                    422,
                    "schema",
                )
            else:
                assert bytes(answer.body) == expected

    serve(shared_door, ask)


def test_nobody_can_change_a_region_s_size(
    serve: Any, shared_door: InProcess, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    init = client_shared.Region.__init__

    def keep(region: client_shared.Region, descriptor: int, num_bytes: int) -> None:
        kept.append(os.dup(descriptor))
        init(region, descriptor, num_bytes)

    monkeypatch.setattr(client_shared.Region, "__init__", keep)
    apply = post(f"/v1/sessions/{session_id}/layers/1/residual?position=0", residual(4))

    def ask(url: str) -> None:
        with Line(url) as line, Line(url, asks=False) as other:
            (descriptor,) = kept
            for size in (0, 4096, 1 << 21):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            # Holes are zeros, not faults.
            mmap.mmap(descriptor, 0).madvise(mmap.MADV_REMOVE)
            assert bytes(line.share(apply).body) == bytes(other.send(apply).body)

    serve(shared_door, ask)
    os.close(kept[0])


def test_a_region_ends_with_its_connection_and_takes_its_pages_along(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    path = f"/v1/sessions/{session_id}/layers/1"
    gc.collect()
    gc.disable()

    def ask(url: str) -> bytes:
        line = Line(url)
        for request in every_request(session_id):
            line.share(request)
        line.memory[:5] = b"still"
        with Line(url, asks=False) as other:
            line.connection.close()
            for _ in range(1000):
                if not shared_door.state.regions.used_bytes:
                    break
                other.send(get(f"{path}/hash_ids?position=0"))
        return bytes(line.memory[:5])

    try:
        assert serve(shared_door, ask) == bytes(5)
    finally:
        gc.enable()
    assert shared_door.state.regions.used_bytes == 0


def test_a_region_that_is_written_outlives_its_client(
    serve: Any, settings: Settings, model: Model, runner: asyncio.Runner
) -> None:
    changed, backend = pooled(model)
    asked = settings.model_copy(update={"shared_memory_bytes": TOTAL_BYTES})
    door = InProcess(create_app(asked, changed), runner)
    made = door.open()["session_id"]
    door.push(made, 0, [2] * MAX_TOKENS, ahead=False)
    apply = post(f"/v1/sessions/{made}/layers/1/residual?position=0", residual(MAX_TOKENS))
    held: list[int] = []

    def ask(url: str) -> None:
        with Line(url) as line:
            backend.go_on.clear()
            assert line.region is not None
            placed = line.region.place(apply)
            assert placed is not None
            with pytest.raises(Exception, match="no whole answer"):
                line.connection.exchange(placed, 0.05)
            assert backend.is_writing.wait(30)
        # The client is gone, and its request with it once something is sent there.
        held.append(door.state.regions.used_bytes)
        backend.go_on.set()

    serve(door, ask)
    assert held == [256 << 10]
    assert backend.engine.drain(30)
    gc.collect()
    assert (door.state.regions.used_bytes, backend.used_bytes) == (0, 0)
    changed.engine.close()


def test_no_room_for_more_regions_is_told_and_given_back(
    serve: Any, shared_door: InProcess
) -> None:
    regions = shared_door.state.regions

    def ask(url: str) -> None:
        lines = [Line(url) for _ in range(shm.MIN_CONNECTIONS)]
        assert regions.used_bytes == TOTAL_BYTES
        with Line(url, asks=False) as late:
            body = b'{"num_bytes": 1}'
            more = Request("POST", "/v1/memory", [("Content-Type", wire.JSON_MEDIA)], [body])
            assert late.refused(more) == (429, "overloaded")
            for line in lines:
                line.connection.close()
            for _ in range(1000):
                if not regions.used_bytes:
                    break
                late.send(get("/livez"))
            assert late.ask().memory.nbytes == 256 << 10

    serve(shared_door, ask)


def test_a_second_region_is_refused_and_the_first_goes_on(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    body = b'{"num_bytes": 1}'
    more = Request("POST", "/v1/memory", [("Content-Type", wire.JSON_MEDIA)], [body])
    path = f"/v1/sessions/{session_id}/layers/1"

    def ask(url: str) -> int:
        with Line(url) as line:
            assert line.refused(more) == (400, "bad_request")
            assert shared_door.state.regions.used_bytes == 256 << 10
            return line.share(get(f"{path}/kv?position=0")).status

    assert serve(shared_door, ask) == 200


def test_a_region_is_its_key_s_alone(
    serve: Any, settings: Settings, model: Model, runner: asyncio.Runner, tmp_path: Path
) -> None:
    keys = {name: add_key(tmp_path / "keys", name, "use") for name in ("alice", "bob")}
    asked = {"shared_memory_bytes": TOTAL_BYTES, "keys_file": tmp_path / "keys"}
    door = InProcess(create_app(settings.model_copy(update=asked), model), runner)
    bearer = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
    made = door.post("/v1/sessions", json={}, headers=bearer["bob"]).json()["session_id"]
    ids = {"position": 0, "token_ids": [2, 2]}
    door.post(f"/v1/sessions/{made}/tokens", json=ids, headers=bearer["bob"])
    kv = get(f"/v1/sessions/{made}/layers/1/kv?position=0")

    def ask(url: str) -> None:
        with Line(url, keys["alice"]) as line:
            place = (wire.SHARED_ANSWER, "0,65536")
            assert line.refused(empty(kv, place)) == (404, "unknown_session")
            line.connection._fixed = line.fixed.replace(
                keys["alice"].encode(), keys["bob"].encode()
            )
            assert line.refused(empty(kv, place)) == (400, "bad_request")
            assert line.send(kv).status == 200
            assert bytes(line.memory[:65536]) == bytes(65536)

    serve(door, ask)
    model.engine.close_tenant("bob")


def test_without_a_region_places_are_refused(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    apply = post(f"/v1/sessions/{session_id}/layers/1/residual?position=0", residual(2))

    def ask(url: str) -> tuple[int, str]:
        with Line(url, asks=False) as line:
            return line.refused(empty(apply, (wire.SHARED_BODY, "0,512")))

    assert serve(shared_door, ask) == (400, "bad_request")


def test_a_head_that_is_remembered_lends_nobody_a_region(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    apply = post(f"/v1/sessions/{session_id}/layers/1/residual?position=0", residual(4))

    def ask(url: str) -> None:
        with Line(url) as line, Line(url) as second, Line(url, asks=False) as other:
            first = bytes(line.share(apply).body)
            assert [bytes(each.share(apply).body) for each in (line, second)] == [first, first]
            assert line.region is not None
            placed = line.region.place(apply)
            assert placed is not None
            assert other.refused(placed) == (400, "bad_request")

    serve(shared_door, ask)


def test_a_body_in_both_places_is_refused(
    serve: Any, shared_door: InProcess, session_id: str
) -> None:
    apply = post(f"/v1/sessions/{session_id}/layers/1/residual?position=0", residual(2))
    both = post(apply.target, residual(2), (wire.SHARED_BODY, "0,512"))

    def ask(url: str) -> tuple[int, str]:
        with Line(url) as line:
            return line.refused(both)

    assert serve(shared_door, ask) == (400, "bad_request")


def test_it_is_off_by_default_and_never_over_tcp(door: InProcess, shared_door: InProcess) -> None:
    for each in (door, shared_door):
        answer = each.post("/v1/memory", json={"num_bytes": 1})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert door.get("/v1/info").json()["shared_memory"] == {"total_bytes": 0, "mode": "off"}
    told = shared_door.get("/v1/info").json()["shared_memory"]
    assert told == {"total_bytes": TOTAL_BYTES, "mode": "in place"}


def test_a_backend_that_refuses_the_memory_copies_it(model: Model) -> None:
    changed, backend = pooled(model)
    assert Regions(TOTAL_BYTES, backend.host_memory).mode == "copied once"
    changed.engine.close()


def test_pages_that_cannot_be_had_are_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = Regions(TOTAL_BYTES, model.backend.host_memory)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Overloaded):
        regions.open("", 4096)
    assert (regions.used_bytes, len(os.listdir("/proc/self/fd"))) == (0, before)


class Counting:
    """Counts the answers' bytes that crossed the socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = 0
        collect = client_shared.Region.collect

        def counted(region: Any, request: Request, response: Response) -> Response:
            self.shared += 1
            return collect(region, request, response)

        monkeypatch.setattr(client_shared.Region, "collect", counted)


def converse(url: str, transport: Any) -> list[bytes]:
    """What a client gets for every verb, as bytes."""
    with EngramClient(url, transport=transport) as client:
        session = client.open_session()
        session.push([2, 3, 4, 5] * 8)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn((32, 2, 64), generator=generator).bfloat16()
        out = torch.empty_like(x)
        got: list[Any] = [
            session.apply(1, x),
            session.apply(1, x, out=out),
            session.apply(1, x, out=x.clone()),
            session.kv(1, 0, 32),
            session.rows(1, 0, 32, stored=True),
            session.hash_ids(14, 0, 32),
            client.step([Segment(session, position=0, count=32)], (1,), residual=x).tensors[1],
            client.step(
                [Segment(session, position=0, count=32)], (1,), residual=x, out=out
            ).tensors[1],
            *client.step([Segment(session, position=0, count=32)], (1, 14), "kv").tensors.values(),
            *client.step(
                [Segment(session, position=0, count=32)], (1, 14), "rows", stored=True
            ).tensors.values(),
        ]
        session.close()
        return [bytes(wire.as_view(each).data) for each in got]


def test_auto_picks_shared_memory_and_gets_the_same(
    serve: Any, shared_door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    socket = serve(shared_door, lambda url: converse(url, "socket"))
    assert counting.shared == 0
    assert serve(shared_door, lambda url: converse(url, "auto")) == socket
    assert counting.shared >= 10


@pytest.mark.parametrize("transport", ["auto", "socket"])
def test_tensors_on_a_device_give_the_same(
    serve: Any, shared_door: InProcess, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    expected = serve(shared_door, lambda url: converse(url, "socket"))
    for module in ("arrays", "far"):
        monkeypatch.setattr(f"engram_client.{module}.is_far", lambda _: True)
    assert serve(shared_door, lambda url: converse(url, transport)) == expected


def test_auto_falls_back_where_it_is_not_offered(serve: Any, door: InProcess) -> None:
    assert serve(door, lambda url: converse(url, "auto")) == serve(
        door, lambda url: converse(url, "socket")
    )


def test_what_does_not_fit_the_region_crosses_the_socket(
    serve: Any, shared_door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = serve(shared_door, lambda url: converse(url, "socket"))
    monkeypatch.setattr("engram_client.connection.REGION_BYTES", 4096)
    assert serve(shared_door, lambda url: converse(url, "auto")) == socket


@pytest.mark.parametrize("kind", [EngramClient, AsyncEngramClient])
def test_an_unknown_transport_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="transport"):
        kind("unix:/nowhere", transport="pigeon")


async def converse_async(url: str, transport: Any) -> list[bytes]:
    async with AsyncEngramClient(url, transport=transport) as client:
        session = await client.open_session()
        await session.push([2, 3, 4, 5] * 8)
        x = torch.randn((32, 2, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
        segment = Segment(session, position=0, count=32)
        step = await client.step([segment], (1, 14), "kv")
        got: list[Any] = [
            await session.apply(1, x),
            await session.kv(1, 0, 32),
            (await client.step([segment], (1,), residual=x)).tensors[1],
            *step.tensors.values(),
        ]
        many = await asyncio.gather(*(session.apply(14, x) for _ in range(3)))
        await session.close()
        return [bytes(wire.as_view(each).data) for each in (*got, *many)]


def test_the_async_client_shares_memory_too(
    serve: Any, shared_door: InProcess, door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    socket = serve(shared_door, lambda url: asyncio.run(converse_async(url, "socket")))
    assert counting.shared == 0
    assert serve(shared_door, lambda url: asyncio.run(converse_async(url, "auto"))) == socket
    assert counting.shared == 7
    assert serve(door, lambda url: asyncio.run(converse_async(url, "auto"))) == socket
    assert counting.shared == 7
