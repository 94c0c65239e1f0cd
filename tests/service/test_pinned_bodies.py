"""Bodies and answers lie where the backend wants them, and no longer than anybody uses them.

The trap: a request ends (its client left, it came too slowly) while the socket or the device still
writes into its memory. Given to the next request then, one client would get another's bytes.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import uvloop

from engram_core.host_memory import PAGE_BYTES
from service import bodies
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess, i32, i64, step_body
from tests.service.pooled import BLOCK_BYTES, PooledBackend
from tests.service.talk import Talk, Wire, read_answer, talk_to
from tests.service.test_fast_path import apply, code, once, post, request_of

EPOCH = re.compile(rb"(server-timing|date|x-engram-epoch): [^\r]*\r\n")
BODY_BYTES = MAX_TOKENS * 2 * 64 * 2


@pytest.fixture(scope="module")
def uv_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as made:
        yield made


@pytest.fixture
def session_id(pooled_door: InProcess) -> str:
    made: str = pooled_door.open()["session_id"]
    pooled_door.push(made, 0, [2] * MAX_TOKENS, ahead=False)
    return made


@pytest.fixture(params=["uvloop", "asyncio"])
def ask(
    request: pytest.FixtureRequest,
    pooled_door: InProcess,
    uv_runner: asyncio.Runner,
    runner: asyncio.Runner,
) -> Iterator[Callable[..., bytes]]:
    """Runs talks without a garbage collection: what waits for one would keep memory."""
    loop = uv_runner if request.param == "uvloop" else runner
    gc.collect()
    gc.disable()
    yield lambda talk, **how: loop.run(talk_to(pooled_door, talk, Wire(), **how))
    gc.enable()


def kv(session_id: str, output: str = "kv") -> bytes:
    path = f"/v1/sessions/{session_id}/layers/1/{output}"
    return request_of("GET", f"{path}?position=0&count={MAX_TOKENS}")


def step(session_id: str, output: str, **more: Any) -> bytes:
    tensors = {"count": i32(MAX_TOKENS), "position": i64(0), "session_id": i64(int(session_id))}
    target = f"/v1/step?output={output}" + ("&layers=1" if more else "")
    return post(target, step_body(**tensors, **more))


def without_epoch(answer: bytes, door: InProcess, session_id: str) -> bytes:
    epoch = int(door.get(f"/v1/sessions/{session_id}").json()["epoch"])
    return EPOCH.sub(b"", answer).replace(struct.pack("<q", epoch), b"")


@pytest.mark.parametrize("is_fast", [True, False])
def test_every_large_body_and_answer_lies_in_the_block(
    ask: Callable[..., bytes],
    pooled_backend: PooledBackend,
    session_id: str,
    pooled_door: InProcess,
    door: InProcess,
    uv_runner: asyncio.Runner,
    *,
    is_fast: bool,
) -> None:
    theirs = door.open(session_id=session_id)["session_id"]
    door.push(theirs, 0, [2] * MAX_TOKENS, ahead=False)
    own = torch.ones((MAX_TOKENS, 2, 64)).bfloat16()
    for request in (
        apply(session_id, MAX_TOKENS),
        kv(session_id),
        kv(session_id, "rows"),
        step(session_id, "residual", residual=own),
        step(session_id, "kv"),
        step(session_id, "rows"),
    ):
        answer = ask(once(request), is_fast=is_fast)
        other = uv_runner.run(talk_to(door, once(request), Wire()))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert without_epoch(answer, pooled_door, session_id) == without_epoch(
            other, door, session_id
        )
    assert pooled_backend.in_place
    assert all(pooled_backend.in_place)
    assert pooled_backend.used_bytes == 0


def test_a_body_without_room_in_one_piece_is_refused_and_changes_nothing(
    ask: Callable[..., bytes], pooled_backend: PooledBackend, session_id: str
) -> None:
    held = [pooled_backend.host_memory.buffer(PAGE_BYTES) for _ in range(BLOCK_BYTES // PAGE_BYTES)]
    del held[::2]
    assert code(ask(once(apply(session_id, MAX_TOKENS)))) == (429, "overloaded")
    assert code(ask(once(kv(session_id)))) == (429, "overloaded")
    del held
    assert ask(once(apply(session_id, MAX_TOKENS))).startswith(b"HTTP/1.1 200 ")
    assert pooled_backend.used_bytes == 0


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_refused_body_is_free_at_once(
    ask: Callable[..., bytes], pooled_backend: PooledBackend, session_id: str, is_fast: bool
) -> None:
    """The refusal, or what it was raised among, keeps no frame that has the body."""
    residual = torch.zeros((MAX_TOKENS, 2, 64))
    later = apply(session_id, MAX_TOKENS).replace(b"position=0", b"position=9")
    refused = {
        "stale_epoch": apply(session_id, MAX_TOKENS, epoch=1),
        "not_pushed": later,
        "unknown_session": step("1", "residual", residual=residual),
        "bad_tensor": step(session_id, "residual", residual=residual[1:]),
        "schema": step(session_id, "kv", nonsense=residual),
    }
    for name, request in refused.items():
        assert code(ask(once(request), is_fast=is_fast))[1] == name
        assert pooled_backend.used_bytes == 0, name


def vanish(writer: asyncio.StreamWriter) -> None:
    """Reset the connection: the service is told at once."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def leave_while_it_is_written(request: bytes, pooled_backend: PooledBackend) -> Talk:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        pooled_backend.go_on.clear()
        writer.write(request)
        await asyncio.to_thread(pooled_backend.is_writing.wait, 30)
        vanish(writer)
        return b""

    return talk


@pytest.mark.parametrize("output", ["residual", "kv", "rows"])
def test_what_a_device_still_writes_is_given_to_nobody(
    ask: Callable[..., bytes], pooled_backend: PooledBackend, session_id: str, output: str
) -> None:
    request = apply(session_id, MAX_TOKENS) if output == "residual" else kv(session_id, output)
    ask(leave_while_it_is_written(request, pooled_backend))
    pieces = pooled_backend.host_memory.pieces
    held = pieces.used_bytes
    assert held >= BODY_BYTES
    rest = [pieces.take(PAGE_BYTES) for _ in range((BLOCK_BYTES - held) // PAGE_BYTES)]
    assert all(piece is not None for piece in rest)
    assert pieces.take(PAGE_BYTES) is None
    del rest
    pooled_backend.go_on.set()


def test_it_is_free_once_the_device_has_written_it(
    ask: Callable[..., bytes], pooled_backend: PooledBackend, session_id: str
) -> None:
    ask(leave_while_it_is_written(apply(session_id, MAX_TOKENS), pooled_backend))
    pooled_backend.go_on.set()
    assert ask(once(apply(session_id, MAX_TOKENS))).startswith(b"HTTP/1.1 200 ")
    assert pooled_backend.used_bytes == 0


def test_half_a_body_is_given_back_when_its_client_leaves(
    ask: Callable[..., bytes], pooled_backend: PooledBackend, session_id: str
) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(apply(session_id, MAX_TOKENS)[:-1])
        await writer.drain()
        while not pooled_backend.host_memory.pieces.used_bytes:
            await asyncio.sleep(0)
        vanish(writer)
        return b""

    ask(talk)
    assert pooled_backend.used_bytes == 0


def test_what_comes_behind_a_refusal_is_not_written_into_a_free_piece(
    ask: Callable[..., bytes],
    pooled_backend: PooledBackend,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.02)
    request = apply(session_id, MAX_TOKENS)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request[:-BODY_BYTES])
        answer = await read_answer(reader)
        assert pooled_backend.used_bytes == 0
        taken = pooled_backend.host_memory.buffer(BLOCK_BYTES)
        taken[:] = 7
        writer.write(b"\1" * BODY_BYTES)
        await reader.read()
        assert (taken == 7).all()
        return answer

    assert code(ask(talk)) == (408, "request_timeout")
