"""Bodies that are slow, short, long, left, or refused before they are read."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from service import bodies
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess, RawRequest, part, refused, tensor_body

OCTETS = "application/octet-stream"


def ask(door: InProcess, request: RawRequest) -> None:
    door.runner.run(door.app(request.scope, request.receive, request.send))


def step(length: int, *messages: bytes, then_wait: bool = True) -> RawRequest:
    """A step whose body comes in these parts, and then nothing or the client's leave."""
    headers = {"content-type": OCTETS, "content-length": str(length)}
    parts = [part(body, more=True) for body in messages]
    return RawRequest("POST", "/v1/step?output=none", headers, parts, then_wait=then_wait)


def code(request: RawRequest) -> tuple[int, str]:
    return request.status, json.loads(request.body)["code"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.02)
    monkeypatch.setattr(bodies, "READ_ON_S", 0.02)


@pytest.mark.usefixtures("impatient")
def test_body_that_stalls_is_a_request_timeout_and_gives_its_room_back(door: InProcess) -> None:
    request = step(1000, b"\0" * 10)
    ask(door, request)
    assert code(request) == (408, "request_timeout")
    assert request.headers["connection"] == "close"
    assert door.state.pool_bytes == 0
    assert door.state.num_active == 0


def test_client_that_leaves_inside_its_body_gets_nothing_and_holds_nothing(
    door: InProcess,
) -> None:
    request = step(1000, b"\0" * 10, then_wait=False)
    ask(door, request)
    assert request.status == 0
    assert door.state.pool_bytes == 0
    assert 'code="client_gone"' in door.get("/metrics").text


def test_body_shorter_than_announced_is_a_bad_request(door: InProcess) -> None:
    headers = {"content-type": OCTETS, "content-length": "1000"}
    request = RawRequest("POST", "/v1/step?output=none", headers, [part(b"abc", more=False)])
    ask(door, request)
    assert code(request) == (400, "bad_request")


@pytest.mark.usefixtures("impatient")
def test_body_longer_than_announced_is_too_large(door: InProcess) -> None:
    request = step(4, b"abcdef")
    ask(door, request)
    assert code(request) == (413, "body_too_large")


@pytest.mark.usefixtures("impatient")
def test_refusal_is_sent_before_the_body_is_read_and_then_it_is_read_on(door: InProcess) -> None:
    request = step(100 << 20, *[b"\0" * 65536] * 20)
    ask(door, request)
    assert code(request) == (413, "body_too_large")
    assert request.headers["connection"] == "close"
    assert next(request._messages, None) is None  # all that came was taken
    assert request.sent[-1] == {"type": "http.response.body", "body": b""}


def test_small_unread_body_is_read_first_and_the_connection_lives_on(door: InProcess) -> None:
    headers = {"content-type": "text/plain", "content-length": "3"}
    request = RawRequest("POST", "/v1/sessions", headers, [part(b"abc", more=False)])
    ask(door, request)
    assert code(request) == (415, "media_type")
    assert "connection" not in request.headers


@pytest.mark.usefixtures("impatient")
def test_refused_expectation_never_asks_for_the_body(door: InProcess) -> None:
    headers = {"content-type": "text/plain", "content-length": "3", "expect": "100-continue"}
    request = RawRequest("POST", "/v1/sessions", headers, [])
    ask(door, request)
    assert code(request) == (415, "media_type")
    assert request.headers["connection"] == "close"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("taken", [0, 1, 2], ids=["nothing", "the-head", "all-but-the-last-piece"])
def test_reader_that_stops_taking_is_cut_off(door: InProcess, taken: int) -> None:
    made = door.open()
    door.push(made["session_id"], 0, [0] * MAX_TOKENS)
    path = f"/v1/sessions/{made['session_id']}/layers/1/rows?position=0&count={MAX_TOKENS}"
    request = RawRequest("GET", path, {}, [part(b"", more=False)])
    send = request.send

    async def stuck(message: object) -> None:
        if len(request.sent) >= taken:
            await asyncio.Event().wait()
        await send(message)  # type: ignore[arg-type]

    bodies_small = pytest.MonkeyPatch()
    bodies_small.setattr(bodies, "SMALL_BODY_BYTES", 100)
    bodies_small.setattr(bodies, "MIN_BYTES_PER_S", 1 << 30)
    try:
        door.runner.run(door.app(request.scope, request.receive, stuck))
    finally:
        bodies_small.undo()
    assert request.aborted
    assert door.state.pool_bytes == 0


def test_answer_is_admitted_before_anything_is_changed(door: InProcess) -> None:
    made = door.open()
    pool = door.state.pool
    lease = pool.lease("other")
    lease.add(pool.max_request_bytes, "x")
    lease.add(pool.max_request_bytes - 4096, "x")
    answer = door.post(
        f"/v1/sessions/{made['session_id']}/layers/1/residual?position=0",
        **tensor_body(torch.zeros(MAX_TOKENS, 2, 64)),
    )
    assert refused(answer) == (429, "overloaded")
    assert answer.json()["retry_after_ms"] > 0
    lease.close()
    assert door.get(f"/v1/sessions/{made['session_id']}").json()["length"] == 0


def test_chunked_json_is_taken_and_bounded(door: InProcess) -> None:
    headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
    parts = [part(b'{"own', more=True), part(b'er":"r"}', more=False)]
    request = RawRequest("POST", "/v1/sessions", headers, parts)
    ask(door, request)
    assert request.status == 201
    big = [part(b" " * 65536, more=True)] * 20 + [part(b"{}", more=False)]
    request = RawRequest("POST", "/v1/sessions", headers, big)
    ask(door, request)
    assert code(request) == (413, "body_too_large")


def test_chunked_tensor_needs_a_length(door: InProcess) -> None:
    headers = {"content-type": OCTETS, "transfer-encoding": "chunked"}
    request = RawRequest("POST", "/v1/step?output=none", headers, [part(b"", more=False)])
    ask(door, request)
    assert code(request) == (411, "length_required")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_read_that_waits_ends_with_its_client(door: InProcess, is_there: bool) -> None:
    session = door.open()["session_id"]
    path = f"/v1/sessions/{session}/layers/1/kv?position=0&wait_ms={1 if is_there else 1000}"
    request = RawRequest("GET", path, {}, [part(b"", more=False)], then_wait=is_there)
    ask(door, request)
    counts = door.state.metrics.exposition().decode()
    if is_there:
        assert code(request) == (409, "not_pushed")
    else:
        assert (request.sent, request.aborted) == ([], True)
        assert '"client_gone"' in counts
    assert (door.state.num_active, door.state.pool_bytes) == (0, 0)
