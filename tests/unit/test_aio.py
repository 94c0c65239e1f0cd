"""The asyncio client: the same answers, many at once, and calls that are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from engram_client import AsyncEngramClient, EngramClient, Segment
from engram_client.problems import Gap, SessionClosed
from tests.unit.fake_service import DIM, HC, FakeService
from tests.unit.raw_server import Peer, RawServer, serving

LOCK = threading.Lock()

Story = Callable[[AsyncEngramClient], Awaitable[None]]


def play(service: FakeService, story: Story) -> None:
    async def run(url: str) -> None:
        async with AsyncEngramClient(url, owner="runner-1") as client:
            await story(client)

    with RawServer([serving(service, LOCK)]) as server:
        asyncio.run(run(server.url))


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_tokens=64)


def test_both_clients_have_the_same_verbs() -> None:
    def verbs(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(AsyncEngramClient) == verbs(EngramClient)


def test_a_session_goes_the_whole_way(service: FakeService) -> None:
    async def story(client: AsyncEngramClient) -> None:
        assert (await client.info())["geometry"]["dim"] == DIM
        assert set(await client.weights(1)) == {"qk"}
        async with await client.open_session(10, [1, 2, None]) as session:
            await session.push([4, 5, 6])
            await session.push([7, 8], truncate=True, position=12)
            await session.rewind(13)
            async with await session.fork(12) as fork:
                await fork.push([9])
                assert service.sessions[fork.session_id].ids == [1, 2, -1, 4, 5, 9]
            given = torch.zeros(2, HC, DIM)
            got = await session.apply(1, given)
            kv = await session.kv(1, 11)
            assert got[:, 0, 0].tolist() == kv[:, 0, 0].astype(float).tolist()
            rows = await session.rows(1, 11, 2)
            ids = await session.hash_ids(1, 11, 2)
            assert rows[:, 0, 0].astype(int).tolist() == ids[:, 0].tolist()
            out = torch.ones(2, HC, DIM)
            assert await session.apply(1, given, out=out) is out
            with pytest.raises(Gap):
                await session.push([1], position=99)
        with pytest.raises(SessionClosed):
            await session.push([1])
        assert await client.close_owner("runner-0") == 0

    play(service, story)


def test_many_sessions_at_once(service: FakeService) -> None:
    async def one(client: AsyncEngramClient, seed: int) -> None:
        session = await client.open_session()
        for token in range(10):
            await session.push([seed, token])
        assert service.sessions[session.session_id].ids == [
            token for pair in range(10) for token in (seed, pair)
        ]

    async def story(client: AsyncEngramClient) -> None:
        await asyncio.gather(*(one(client, seed) for seed in range(12)))

    play(service, story)


def test_a_step_over_many_sessions(service: FakeService) -> None:
    async def story(client: AsyncEngramClient) -> None:
        sessions = [await client.open_session() for _ in range(3)]
        got = await client.step([Segment(s, token_ids=[1, 2]) for s in sessions], output="kv")
        assert got.length.tolist() == [2, 2, 2]
        given = np.zeros((3, HC, DIM), np.float32)
        back = await client.step([Segment(s, count=1) for s in sessions], (1,), residual=given)
        assert np.array_equal(back.tensors[1][:, 0, 0], got.tensors[1][1::2, 0, 0].astype("f4"))

    play(service, story)


def test_tasks_that_read_one_expired_session_all_get_their_rows(service: FakeService) -> None:
    async def story(client: AsyncEngramClient) -> None:
        session = await client.open_session()
        await session.push(list(range(60)))
        expected = await session.hash_ids(1, 0)
        service.sessions.clear()
        results = await asyncio.gather(*(session.hash_ids(1, 0) for _ in range(6)))
        assert all(np.array_equal(result, expected) for result in results)

    play(service, story)


def test_a_cancelled_push_is_undone_before_the_next_call(service: FakeService) -> None:
    pushed = threading.Event()
    plain_script = serving(service, LOCK)
    silent: list[bool] = []

    def script(peer: Peer) -> None:
        send = peer.send

        def maybe(data: bytes) -> None:
            if silent:
                silent.clear()
                pushed.set()
                raise ConnectionResetError
            send(data)

        peer.send = maybe  # type: ignore[method-assign]
        plain_script(peer)

    async def run(url: str) -> None:
        client = AsyncEngramClient(url)
        session = await client.open_session()
        await session.push([5, 6])
        silent.append(True)
        task = asyncio.create_task(session.push([7], position=1, truncate=True))
        await asyncio.to_thread(pushed.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.push([8])
        assert service.sessions[session.session_id].ids == [5, 6, 8]
        await client.close()

    with RawServer([script]) as server:
        asyncio.run(run(server.url))
