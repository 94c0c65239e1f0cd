"""Several processes as the ranks of one runner (API.md, Ranks): one pushes, any of them reads."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.integration.door import (
    metric,
    open_session,
    push,
    refusal,
    step,
    step_body,
    tensor_of,
    wait_until,
)
from tests.integration.rank import Rank
from tests.integration.server import Server
from tests.oracle import Oracle, same_bits

PROMPT = np.random.default_rng(5).integers(0, 22, 41).tolist()
ALIVE = [i not in (11, 12, 29) for i in range(len(PROMPT))]


@pytest.fixture(scope="module")
def ranks(server: Server) -> Iterator[list[Rank]]:
    started = [Rank(server.url) for _ in range(4)]
    yield started
    for rank in started:
        rank.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture
def made(client: httpx.Client) -> Iterator[dict[str, Any]]:
    document = open_session(client)
    yield document
    client.delete(f"/v1/sessions/{document['session_id']}")


def kv_path(name: str, layer: int = 14) -> str:
    return f"/v1/sessions/{name}/layers/{layer}/kv"


WAITS = "engram_waits_total"


@contextlib.contextmanager
def somebody_waits(client: httpx.Client) -> Iterator[None]:
    """What the block sends is a read that waits: go on when the server says that it does."""
    before = metric(client, WAITS)
    yield
    wait_until(client, WAITS, lambda waits: waits > before)


def kv_within_bound(oracle: Oracle, layer: int, kv: torch.Tensor, tokens: list[int]) -> bool:
    compressed = oracle.compress(tokens)
    rows = oracle.rows(layer, oracle.layer_hash_ids(layer, compressed)[-len(kv) :])
    return not bool(oracle.kv_interval(layer, rows).outside(kv).any())


def test_stage_reads_before_the_push_arrives(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any], official_oracle: Oracle
) -> None:
    pusher, stage = ranks[:2]
    name = made["session_id"]
    params = {"position": 0, "count": 6, "epoch": made["epoch"], "wait_ms": 1000}
    with somebody_waits(client):
        stage.send("GET", kv_path(name), params=params)
    body = {"position": 0, "token_ids": PROMPT[:6]}
    assert pusher.call("POST", f"/v1/sessions/{name}/tokens", json=body).status_code == 200
    kv = tensor_of(stage.receive())
    assert kv_within_bound(official_oracle, 14, kv, PROMPT[:6])
    assert same_bits(kv, tensor_of(client.get(kv_path(name), params=params)))


def test_read_waits_through_a_push_that_is_too_short(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    name = made["session_id"]
    with somebody_waits(client):
        ranks[1].send("GET", kv_path(name), params={"position": 3, "count": 2, "wait_ms": 1000})
    push(client, name, 0, PROMPT[:4])
    push(client, name, 4, PROMPT[4:5])
    assert ranks[1].receive().status_code == 200


def test_step_of_a_stage_waits_too(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    name, x = made["session_id"], torch.randn(6, 2, 64)
    request = step_body(
        count=[6], position=[0], session_id=[int(name)], epoch=[made["epoch"]], residual=x
    )
    params = {"output": "residual", "layers": "1", "wait_ms": 1000}
    with somebody_waits(client):
        ranks[1].send("POST", "/v1/step", params=params, **request)
    push(client, name, 0, PROMPT[:6])
    answer = ranks[1].receive()
    assert answer.status_code == 200, answer.text
    out = safetensors.torch.load(answer.content)["residual.1"]
    again = client.post("/v1/step", params=params, **request)
    assert same_bits(out, safetensors.torch.load(again.content)["residual.1"])


def test_rank_with_an_old_epoch_is_refused(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    name, epoch = made["session_id"], made["epoch"]
    push(client, name, 0, PROMPT[:6])
    push(client, name, 4, [3, 3, 3], on_conflict="truncate", epoch=epoch)
    old = {"position": 0, "count": 4, "epoch": epoch, "wait_ms": 1000}
    assert refusal(ranks[2].call("GET", kv_path(name), params=old)) == (409, "stale_epoch")
    new = {**old, "count": 7, "epoch": epoch + 1}
    assert ranks[2].call("GET", kv_path(name), params=new).status_code == 200


def test_waiting_read_whose_epoch_becomes_stale(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    name = made["session_id"]
    push(client, name, 0, PROMPT[:3])
    params = {"position": 2, "count": 4, "epoch": made["epoch"], "wait_ms": 1000}
    with somebody_waits(client):
        ranks[3].send("GET", kv_path(name), params=params)
    rewound = client.post(f"/v1/sessions/{name}/rewind", json={"position": 1})
    assert rewound.status_code == 200
    assert refusal(ranks[3].receive()) == (409, "stale_epoch")


def test_read_waits_for_a_greater_epoch(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any], official_oracle: Oracle
) -> None:
    """The verify block of the next step: the stage must not get the rejected draft's kv."""
    name, epoch = made["session_id"], made["epoch"]
    push(client, name, 0, PROMPT[:6])
    params = {"position": 3, "count": 2, "epoch": epoch + 1, "wait_ms": 1000}
    with somebody_waits(client):
        ranks[1].send("GET", kv_path(name), params=params)
    push(client, name, 4, [19], on_conflict="truncate", epoch=epoch)
    kv = tensor_of(ranks[1].receive())
    assert kv_within_bound(official_oracle, 14, kv, [*PROMPT[:4], 19])


@pytest.mark.parametrize("output", ["residual", "kv", "rows", "hash_ids"])
def test_sequence_parallel_slices_cut_anywhere(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any], output: str
) -> None:
    """Four ranks take 41 tokens in slices, each as segments cut anywhere: the same bits."""
    name = made["session_id"]
    push(client, name, 0, PROMPT, mask=ALIVE)
    x = torch.randn(41, 2, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    params = {"output": output, "layers": "14"}

    def request(cuts: list[int]) -> dict[str, Any]:
        spans = list(itertools.pairwise(cuts))
        return step_body(
            count=[b - a for a, b in spans],
            position=[a for a, _ in spans],
            session_id=[int(name)] * len(spans),
            epoch=[made["epoch"]] * len(spans),
            residual=x[cuts[0] : cuts[-1]] if output == "residual" else None,
        )

    cuts_of = ([0, 1, 2, 9], [9, 20], [20, 21, 30, 31, 32], [32, 41])
    for rank, cuts in zip(ranks, cuts_of, strict=True):
        rank.send("POST", "/v1/step", params=params, **request(cuts))
    parts = [safetensors.torch.load(rank.receive().content) for rank in ranks]
    whole = client.post("/v1/step", params=params, **request([0, 41]))
    expected = safetensors.torch.load(whole.content)
    assert same_bits(torch.cat([p[f"{output}.14"] for p in parts]), expected[f"{output}.14"])
    assert torch.cat([p["dead"] for p in parts]).bool().tolist() == [not a for a in ALIVE]


def test_micro_batches_of_two_sequences(client: httpx.Client, ranks: list[Rank]) -> None:
    """A step cut into micro-batches on two ranks equals the whole step, by bits."""
    names = [open_session(client)["session_id"] for _ in range(3)]
    for i, name in enumerate(names):
        push(client, name, 0, PROMPT[i : 20 + i])
    params = {"output": "kv", "layers": "1,14"}
    segments = [(names[0], 5, 7), (names[1], 0, 20), (names[2], 19, 1), (names[0], 12, 8)]

    def request(some: list[tuple[str, int, int]]) -> dict[str, Any]:
        return step_body(
            count=[n for _, _, n in some],
            position=[p for _, p, _ in some],
            session_id=[int(s) for s, _, _ in some],
        )

    ranks[0].send("POST", "/v1/step", params=params, **request(segments[:2]))
    ranks[1].send("POST", "/v1/step", params=params, **request(segments[2:]))
    parts = [safetensors.torch.load(rank.receive().content) for rank in ranks[:2]]
    whole = safetensors.torch.load(
        client.post("/v1/step", params=params, **request(segments)).content
    )
    for layer in ("kv.1", "kv.14"):
        assert same_bits(torch.cat([p[layer] for p in parts]), whole[layer])
    for name in names:
        client.delete(f"/v1/sessions/{name}")


def test_replicated_ranks_read_the_same_bits(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    push(client, made["session_id"], 0, PROMPT)
    params = {"position": 0, "count": 41}
    for rank in ranks:
        rank.send("GET", kv_path(made["session_id"]), params=params)
    first, *others = [tensor_of(rank.receive()) for rank in ranks]
    assert all(same_bits(first, other) for other in others)


def test_one_lost_session_among_256_is_listed(client: httpx.Client) -> None:
    names = [
        open_session(client, owner="fleet", session_id=str(10_000 + i))["session_id"]
        for i in range(256)
    ]
    assert client.delete(f"/v1/sessions/{names[97]}").status_code == 204
    tensors = {
        "count": [1] * 256,
        "position": [0] * 256,
        "session_id": [int(n) for n in names],
        "token_ids": [4] * 256,
    }
    params = {"output": "hash_ids", "layers": "1"}
    answer = client.post("/v1/step", params=params, **step_body(**tensors))
    assert refusal(answer) == (404, "unknown_session")
    assert [(s["index"], s["code"]) for s in answer.json()["segments"]] == [(97, "unknown_session")]
    assert client.get(f"/v1/sessions/{names[96]}").json()["length"] == 0
    without = {name: value[:97] + value[98:] for name, value in tensors.items()}
    assert step(client, params, **without)["length"].tolist() == [1] * 255
    assert client.delete("/v1/sessions", params={"owner": "fleet"}).json() == {"closed": 255}


def test_restarted_runner_closes_what_it_left(server: Server, client: httpx.Client) -> None:
    first = Rank(server.url)
    names = [
        first.call("POST", "/v1/sessions", json={"owner": "incarnation-1"}).json()["session_id"]
        for _ in range(4)
    ]
    first.process.kill()
    first.stop()
    second = Rank(server.url)
    params = {"owner": "incarnation-1"}
    assert second.call("DELETE", "/v1/sessions", params=params).json() == {"closed": 4}
    second.stop()
    for name in names:
        assert refusal(client.get(f"/v1/sessions/{name}")) == (404, "unknown_session")


def test_repeated_and_late_calls_of_a_pusher(
    client: httpx.Client, ranks: list[Rank], made: dict[str, Any]
) -> None:
    """A push repeated by another connection is answered; one that comes after a cut is refused."""
    path, epoch = f"/v1/sessions/{made['session_id']}/tokens", made["epoch"]
    late = {"position": 4, "token_ids": PROMPT[4:8], "epoch": epoch}
    push(client, made["session_id"], 0, PROMPT[:4])
    for rank in ranks[:3]:
        rank.send("POST", path, json=late)
    assert [rank.receive().json()["length"] for rank in ranks[:3]] == [8] * 3
    body = {"position": 6, "epoch": epoch}
    assert client.post(f"/v1/sessions/{made['session_id']}/rewind", json=body).status_code == 200
    assert refusal(ranks[0].call("POST", path, json=late)) == (409, "stale_epoch")
