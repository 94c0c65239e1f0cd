"""What goes on beside a request that takes long: field reports G19 and G20."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from service.transport import Connection
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess
from tests.service.pooled import PooledBackend
from tests.service.talk import Wire, read_answer, talk_to
from tests.service.test_fast_path import apply


@pytest.fixture
def request_(pooled_door: InProcess) -> bytes:
    """A read that ends when the backend may go on."""
    session_id = pooled_door.open()["session_id"]
    pooled_door.push(session_id, 0, [2] * MAX_TOKENS, ahead=False)
    return apply(session_id, MAX_TOKENS)


@pytest.fixture
def ask(pooled_door: InProcess, runner: asyncio.Runner) -> Callable[..., bytes]:
    return lambda talk, **how: runner.run(talk_to(pooled_door, talk, Wire(), **how))


def test_health_is_answered_while_a_batch_takes_long(
    ask: Callable[..., bytes],
    pooled_door: InProcess,
    pooled_backend: PooledBackend,
    request_: bytes,
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        pooled_backend.go_on.clear()
        writer.write(request_)
        assert await asyncio.to_thread(pooled_backend.is_writing.wait, 30)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(pooled_door.app)) as client:
            for path in ("/livez", "/readyz", "/metrics", "/v1/info"):
                assert (await client.get(f"http://localhost{path}")).status_code == 200
        assert not pooled_backend.go_on.is_set()
        pooled_backend.go_on.set()
        return await read_answer(reader)

    assert ask(talk).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("is_fast", [True, False])
def test_no_idle_timer_runs_beside_a_request(
    ask: Callable[..., bytes],
    pooled_door: InProcess,
    pooled_backend: PooledBackend,
    request_: bytes,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_fast: bool,
) -> None:
    """Neither while its body comes nor while it is worked on; it runs again once it is answered."""
    lines: list[Connection] = []
    made = Connection.connection_made

    def keep(line: Connection, transport: Any) -> None:
        made(line, transport)
        lines.append(line)

    monkeypatch.setattr(Connection, "connection_made", keep)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answer = b""
        for _ in range(2):
            while not lines or lines[0].timeout_keep_alive_task is None:
                await asyncio.sleep(0)
            pooled_backend.go_on.clear()
            pooled_backend.is_writing.clear()
            writer.write(request_[:-9])
            while not pooled_door.state.pool_bytes:
                await asyncio.sleep(0)
            assert lines[0].timeout_keep_alive_task is None
            writer.write(request_[-9:])
            assert await asyncio.to_thread(pooled_backend.is_writing.wait, 30)
            assert lines[0].timeout_keep_alive_task is None
            pooled_backend.go_on.set()
            answer = await read_answer(reader)
            assert answer.startswith(b"HTTP/1.1 200 ")
        return answer

    ask(talk, is_fast=is_fast)
    assert len(lines) == 1
