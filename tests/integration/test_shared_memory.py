"""Shared memory of a service in a process of its own: the client finds it, and it is given back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_client import EngramClient, Segment, shared, wire
from engram_client.direct import Direct
from engram_client.exchange import Exchange
from tests.integration.server import Server, running

REGION_BYTES = 256 << 10


@pytest.fixture(scope="module")
def sharing(official_dir: Path, socket_folder: Path) -> Iterator[Server]:
    flags = ("--shared-memory-bytes", "1MiB", "--max-tokens", "512", "--in-flight-bytes", "16MiB")
    uds = socket_folder / "shm.sock"
    with running(official_dir, "--host", "127.0.0.1", *flags, uds=uds) as started:
        yield started


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the regions that clients were given."""
    given: list[int] = []
    init = shared.Region.__init__

    def noted(region: shared.Region, descriptor: int, num_bytes: int) -> None:
        given.append(num_bytes)
        init(region, descriptor, num_bytes)

    monkeypatch.setattr(shared.Region, "__init__", noted)
    return given


def residual(count: int) -> torch.Tensor:
    return torch.randn((count, 2, 64), generator=torch.Generator().manual_seed(1)).bfloat16()


def ask(client: EngramClient) -> list[bytes]:
    session = client.open_session()
    session.push([2, 3, 4] * 20)
    x = residual(60)
    got: list[Any] = [session.apply(1, x), session.apply(14, x[:1])]
    got += client.step([Segment(session, position=0, count=60)], (1, 14), "kv").tensors.values()
    session.close()
    return [bytes(wire.as_view(each).data) for each in got]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        os.sched_yield()


def test_the_client_finds_it_and_gets_what_the_socket_gives(
    sharing: Server, regions: list[int]
) -> None:
    url = f"unix:{sharing.uds}"
    with EngramClient(url, transport="socket") as client:
        told = client.info()["shared_memory"]
        expected = ask(client)
    assert (told, regions) == ({"total_bytes": 1 << 20, "mode": "in place"}, [])
    with EngramClient(url) as client:
        got = ask(client)
    assert regions == [REGION_BYTES]
    assert got == expected


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("transport", ["auto", "socket"])
def test_residuals_are_asked_for_without_the_protocol(
    sharing: Server, monkeypatch: pytest.MonkeyPatch, transport: Any, is_far: bool
) -> None:
    for module in ("arrays", "far"):
        monkeypatch.setattr(f"engram_client.{module}.is_far", lambda _: is_far)
    with EngramClient(f"unix:{sharing.uds}", transport=transport) as client:
        session = client.open_session()
        session.push([2, 3, 4] * 20)
        session.kv(1, 0, 60)
        for count in (1, 16, 60):
            x = residual(count)
            with monkeypatch.context() as without:
                without.setattr(Direct, "ask", lambda *_: None)
                want = session.apply(1, x)
            with monkeypatch.context() as alone:
                alone.setattr(Exchange, "call", lambda *_: pytest.fail("the protocol"))
                got = [session.apply(1, x), session.apply(1, x.clone(), 60 - count)]
                got += [session.apply(1, x, out=torch.empty_like(x))]
                got += [session.apply(1, (same := x.clone()), out=same)]
                step = [Segment(session, position=60 - count, count=count)]
                got += [client.step(step, (1,), residual=x).tensors[1]]
            assert all(torch.equal(each, want) for each in got)
        with monkeypatch.context() as alone:
            alone.setattr(Exchange, "call", lambda *_: pytest.fail("the protocol"))
            told = client.step([Segment(session, token_ids=[5])], (14,), residual=residual(1))
            pushed = client.step([Segment(session, token_ids=[6, 7])], output="none")
        assert (told.length.tolist(), told.dead.tolist()) == ([61], [False])
        assert (pushed.length.tolist(), session.length, pushed.tensors) == ([63], 63, {})
        session.rewind(61)
        assert torch.equal(told.tensors[14], session.apply(14, residual(1)))
        session.close()


def test_regions_of_clients_that_left_are_given_to_others(
    sharing: Server, regions: list[int]
) -> None:
    """Three times as many as there is room for, one after the other."""
    for turn in range(12):
        client = EngramClient(f"unix:{sharing.uds}")

        def is_given(client: EngramClient = client, turn: int = turn) -> bool:
            ask(client)
            if len(regions) > turn:
                return True
            client.close()  # the one before may not have ended yet: ask on a new connection
            return False

        until(is_given)
        client.close()
    assert regions == [REGION_BYTES] * 12


def test_tcp_clients_are_served_without(sharing: Server, regions: list[int]) -> None:
    with EngramClient(sharing.url) as client:
        ask(client)
    assert regions == []


def test_the_ledger_holds_it(sharing: Server) -> None:
    with EngramClient(sharing.url) as client:
        lines = {line["name"]: line["num_bytes"] for line in client.info()["memory"]}
    assert lines["shared memory"] == 1 << 20
