"""The shipped client against a real server, every answer against the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engram_client import AsyncEngramClient, EngramClient, Segment, torch_of
from engram_client.local import LocalLayer
from engram_client.remote import RemoteEngram
from tests.integration.server import Server
from tests.laws.truth import lookback_of
from tests.oracle import Interval, Oracle, same_bits

TOKENS = np.random.default_rng(21).integers(0, 22, 60).tolist()
ALIVE = [i not in (8, 9, 10, 40) for i in range(60)]
DEAD = ~torch.tensor(ALIVE)


@pytest.fixture(scope="module", params=["tcp", "uds"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[EngramClient]:
    url = server.url if request.param == "tcp" else f"unix:{server.uds}"
    with EngramClient(url, owner="test-client", reconnect_s=20) as made:
        yield made
        made.close_owner("test-client")


class Expected:
    """What the oracle says of TOKENS in one layer."""

    def __init__(self, oracle: Oracle, layer: int) -> None:
        self.oracle, self.layer = oracle, layer
        self.compressed = oracle.compress(TOKENS, ALIVE)
        self.ids = oracle.layer_hash_ids(layer, self.compressed)
        self.rows = oracle.rows(layer, self.ids)
        self.kv = oracle.kv_interval(layer, self.rows, DEAD)

    def holds(self, x: torch.Tensor, out: torch.Tensor, kv: torch.Tensor, first: int = 0) -> bool:
        """Whether a residual of positions first.. came out right, given the served kv bits."""
        dead = DEAD[first : first + len(x)]
        exact = Interval(kv, kv)
        bound = self.oracle.residual_interval(self.layer, x, exact, dead)
        return not bool(bound.outside(out).any()) and same_bits(out[dead], x[dead])


@pytest.fixture(scope="module", params=[1, 14])
def expected(request: pytest.FixtureRequest, official_oracle: Oracle) -> Expected:
    return Expected(official_oracle, request.param)


def residual(count: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 2, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefill_decode_and_draft_go_the_whole_way(
    client: EngramClient, expected: Expected, dtype: torch.dtype
) -> None:
    layer = expected.layer
    with client.open_session() as session:
        session.push(TOKENS[:33], ALIVE[:33])
        for i in range(33, 40):
            session.push(TOKENS[i : i + 1], ALIVE[i : i + 1])
            x = residual(1, dtype, i)
            out = torch_of(session.apply(layer, x))
            kv = torch_of(session.kv(layer, i, 1))
            assert expected.holds(x, out, kv, i)
        session.push([3, 3, 3])  # a draft that is rejected
        session.push(TOKENS[40:], ALIVE[40:], truncate=True, position=40)
        kv = torch_of(session.kv(layer, 0, 60))
        assert not expected.kv.outside(kv).any()
        assert same_bits(torch_of(session.rows(layer, 0, 60)), expected.rows)
        ids = torch_of(session.hash_ids(layer, 0, 60))
        assert torch.equal(ids, torch.from_numpy(expected.ids))
        x = residual(60, dtype)
        assert expected.holds(x, torch_of(session.apply(layer, x, position=0)), kv)
        fork = session.fork(20)
        fork.push(TOKENS[20:], ALIVE[20:])
        session.rewind(5)
        assert same_bits(torch_of(fork.kv(layer, 0, 60)), kv)
        fork.close()


def test_gated_and_projected_at_the_client(client: EngramClient, expected: Expected) -> None:
    """From kv, and from rows: the same bits as the service's residual."""
    local = LocalLayer.fetch(client, expected.layer, projects=True)
    with client.open_session() as session:
        session.push(TOKENS, ALIVE)
        x = residual(60, torch.bfloat16)
        served = torch_of(session.apply(expected.layer, x, position=0))
        kv = torch_of(session.kv(expected.layer, 0, 60))
        projected = local.project(torch_of(session.rows(expected.layer, 0, 60)))
    assert same_bits(local.gate(x, kv, DEAD), served)
    assert same_bits(projected[~DEAD], kv[~DEAD])
    assert expected.holds(x, served, kv)


def test_a_lost_session_is_opened_again(
    client: EngramClient, server: Server, expected: Expected
) -> None:
    """Somebody closes it (or it expires): the client's own ids bring it back."""
    with client.open_session() as session:
        session.push(TOKENS[:30], ALIVE[:30])
        with server.client() as other:
            assert other.delete(f"/v1/sessions/{session.session_id}").status_code == 204
        session.push(TOKENS[30:], ALIVE[30:])
        assert not expected.kv.outside(torch_of(session.kv(expected.layer, 0, 60))).any()


def test_a_step_over_ragged_sequences(client: EngramClient, expected: Expected) -> None:
    cuts = [0, 7, 8, 30, 60]
    sessions = [client.open_session() for _ in cuts[1:]]
    segments = []
    for session, first, last in zip(sessions, cuts, cuts[1:], strict=False):
        session.push(TOKENS[:first], ALIVE[:first])
        segments.append(Segment(session, TOKENS[first:last], mask=ALIVE[first:last]))
    answer = client.step(segments, layers=(expected.layer,), output="kv")
    assert not expected.kv.outside(torch_of(answer.tensors[expected.layer])).any()
    assert answer.dead.tolist() == DEAD.tolist()
    assert answer.length.tolist() == cuts[1:]
    for session in sessions:
        session.close()


def test_a_torch_module_over_the_service(client: EngramClient, expected: Expected) -> None:
    """The reference module's forward, by hash_ids, and one by segments: equal bits."""
    remote = RemoteEngram(client, expected.layer)
    x = residual(60, torch.float32)
    with torch.no_grad(), client.open_session() as session:
        ids = torch.from_numpy(expected.ids)[None]
        by_ids = remote(x[None], ids, torch.tensor(ALIVE)[None])[0]
        session.push(TOKENS, ALIVE)
        by_session = remote.forward_segments(x, [Segment(session, position=0, count=60)])
        kv = torch_of(session.kv(expected.layer, 0, 60))
    assert same_bits(by_ids, by_session)
    assert expected.holds(x, by_session, kv)


def test_candidates_by_lookback(client: EngramClient, expected: Expected) -> None:
    truth = _Raw(expected.oracle)
    row = lookback_of(truth, expected.compressed, 50)  # type: ignore[arg-type]
    segment = Segment(lookback=row, token_ids=TOKENS[50:], position=50, mask=ALIVE[50:])
    answer = client.step([segment], layers=(expected.layer,), output="rows")
    assert same_bits(torch_of(answer.tensors[expected.layer]), expected.rows[50:])


class _Raw:
    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.raw_of = {c: t for t, c in enumerate(oracle.files.token_map)}


def test_asyncio_client(server: Server, expected: Expected) -> None:
    async def go() -> torch.Tensor:
        async with AsyncEngramClient(server.url, owner="async") as client:
            session = await client.open_session()
            for first in range(0, 60, 13):
                await session.push(TOKENS[first : first + 13], ALIVE[first : first + 13])
            kv = torch_of(await session.kv(expected.layer, 0, 60))
            await session.close()
            return kv

    assert not expected.kv.outside(asyncio.run(go())).any()
