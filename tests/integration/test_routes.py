"""Every route of API.md at a real server, over TCP and the Unix socket, against the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from engram_client.connection import connect
from engram_client.http1 import parse_address
from tests.conftest import KEYS
from tests.integration.door import (
    body_of,
    metric,
    open_session,
    push,
    raw_bytes,
    step,
    step_body,
    tensor_of,
)
from tests.integration.server import Server
from tests.oracle import Interval, Oracle, same_bits

TOKENS = [0, 4, 6, 2, 8, 13, 16, 21, 9, 10, 12, 4, 6, 8, 20, 1, 3, 17]
MASK = [True] * 7 + [False] + [True] * 10
LAYERS = (1, 14)


@pytest.fixture(scope="module", params=["tcp", "uds"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[httpx.Client]:
    with server.client() if request.param == "tcp" else server.uds_client() as made:
        yield made


@pytest.fixture(scope="module")
def session(client: httpx.Client) -> str:
    name: str = open_session(client)["session_id"]
    push(client, name, 0, TOKENS[:5], mask=MASK[:5])
    push(client, name, 5, TOKENS[5:], mask=MASK[5:])
    return name


def read(client: httpx.Client, name: str, layer: int, what: str, **query: Any) -> httpx.Response:
    params = {"position": 0, "count": len(TOKENS), **query}
    return client.get(f"/v1/sessions/{name}/layers/{layer}/{what}", params=params)


def expected_rows(oracle: Oracle, layer: int) -> torch.Tensor:
    return oracle.rows(layer, oracle.layer_hash_ids(layer, oracle.compress(TOKENS, MASK)))


def test_a_unix_socket_holds_more_than_linux_gives_it(server: Server) -> None:
    """Both ends ask for it: less would take large bodies several turns of both processes."""
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    with contextlib.closing(connect(parse_address(f"unix:{server.uds}"), None)) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > default
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(server.uds))
        line.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 64)
        held, deadline = bytearray(4), time.monotonic() + 20
        while int.from_bytes(held, sys.byteorder) <= default:  # nobody reads
            assert time.monotonic() < deadline, int.from_bytes(held, sys.byteorder)
            fcntl.ioctl(line, termios.FIONREAD, held)


def test_live_ready_health(client: httpx.Client) -> None:
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/readyz").json() == client.get("/health").json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
def test_probes_take_head_too(client: httpx.Client, path: str) -> None:
    got, asked = client.get(path), client.head(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]
    assert client.head("/v1/info").status_code == 405
    assert client.get(path).json() == got.json()


def test_metrics_are_prometheus_text(client: httpx.Client) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {line.split("{")[0].split(" ")[0] for line in answer.text.splitlines()}
    assert "engram_ready" in names
    assert len([n for n in answer.text.splitlines() if not n.startswith("#")]) <= 400


def test_info_tells_the_geometry_and_exact_constants(
    client: httpx.Client, official_oracle: Oracle
) -> None:
    info, files = client.get("/v1/info").json(), official_oracle.files
    geometry = info["geometry"]
    assert geometry["layer_ids"] == list(LAYERS)
    assert geometry["eps"] == 1e-20
    assert (geometry["dim"], geometry["hc_mult"]) == (64, 2)
    assert geometry["table_rows"] == [official_oracle.table(i).num_rows for i in LAYERS]
    constants = info["hash"]
    assert constants["pad_id"] == official_oracle.pad_id == 1
    assert [[int(m) for m in row] for row in constants["multipliers"]] == files.multipliers
    assert all(isinstance(m, str) for row in constants["multipliers"] for m in row)
    assert [[[int(p) for p in h] for h in row] for row in constants["primes"]] == files.primes
    assert info["table"]["image_token_id"] == 21
    assert info["limits"]["max_positions"] == 1_048_576
    assert info["limits"]["max_wait_ms"] == 1000


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_are_the_checkpoints(
    client: httpx.Client, official_oracle: Oracle, layer: int
) -> None:
    answer = client.get(f"/v1/layers/{layer}/weights")
    tensors = safetensors.torch.load(answer.content)
    assert same_bits(tensors["qk"], official_oracle.weight(layer))
    assert same_bits(tensors["wkv"], official_oracle.wkv(layer))
    only = client.get(f"/v1/layers/{layer}/weights", params={"names": "qk"})
    assert safetensors.torch.load(only.content).keys() == {"qk"}
    etag = answer.headers["etag"]
    again = client.get(f"/v1/layers/{layer}/weights", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")


def test_session_tells_what_it_holds(
    client: httpx.Client, session: str, official_oracle: Oracle
) -> None:
    document = client.get(f"/v1/sessions/{session}").json()
    assert (document["length"], document["base"]) == (len(TOKENS), 0)
    assert document["compressed_lookback"] == official_oracle.compress(TOKENS, MASK)[-3:]
    assert document["epoch"] > 0
    assert 0 < document["expires_in_s"] <= 600


@pytest.mark.parametrize("layer", LAYERS)
def test_hash_ids_and_rows_by_bits(
    client: httpx.Client, session: str, official_oracle: Oracle, layer: int
) -> None:
    ids = official_oracle.layer_hash_ids(layer, official_oracle.compress(TOKENS, MASK))
    assert torch.equal(tensor_of(read(client, session, layer, "hash_ids")), torch.from_numpy(ids))
    rows = read(client, session, layer, "rows")
    assert same_bits(tensor_of(rows), official_oracle.rows(layer, ids))
    stored = read(client, session, layer, "rows", encoding="stored")
    expected = torch.from_numpy(official_oracle.stored_rows(layer, ids))
    assert torch.equal(tensor_of(stored), expected)
    assert stored.headers["x-engram-encoding"]
    assert rows.headers["x-engram-dead"] == stored.headers["x-engram-dead"] == "7"


@pytest.mark.parametrize("layer", LAYERS)
def test_kv_within_its_bound_and_dead_as_nothing(
    client: httpx.Client, session: str, official_oracle: Oracle, layer: int
) -> None:
    answer = read(client, session, layer, "kv")
    kv, dead = tensor_of(answer), ~torch.tensor(MASK)
    bound = official_oracle.kv_interval(layer, expected_rows(official_oracle, layer), dead)
    assert not bound.outside(kv).any()
    assert torch.signbit(kv[7, -1]).all()
    assert not torch.signbit(kv[7, :-1]).any()
    assert answer.headers["x-engram-dead"] == "7"
    assert answer.headers["x-engram-length"] == str(len(TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer", LAYERS)
def test_residual_is_the_references(
    client: httpx.Client,
    session: str,
    official_oracle: Oracle,
    layer: int,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(len(TOKENS), 2, 64, generator=torch.Generator().manual_seed(layer)).to(dtype)
    x[7, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    path = f"/v1/sessions/{session}/layers/{layer}/residual"
    out = tensor_of(client.post(path, params={"position": 0}, **body_of(x)))
    kv, dead = tensor_of(read(client, session, layer, "kv")), ~torch.tensor(MASK)
    assert not (
        official_oracle.residual_interval(layer, x, Interval(kv, kv), dead).outside(out).any()
    )
    assert same_bits(out[7], x[7])


def test_epoch_and_base_travel_in_headers(client: httpx.Client, session: str) -> None:
    document = client.get(f"/v1/sessions/{session}").json()
    for what in ("kv", "rows", "hash_ids"):
        headers = read(client, session, 1, what, epoch=document["epoch"]).headers
        assert headers["x-engram-epoch"] == str(document["epoch"])
        assert headers["x-engram-base"] == "0"


def test_count_of_zero_and_default_of_one(client: httpx.Client, session: str) -> None:
    path = f"/v1/sessions/{session}/layers/1/kv"
    one = tensor_of(client.get(path, params={"position": 3}))
    none = tensor_of(client.get(path, params={"position": 3, "count": 0}))
    assert (one.shape[0], tuple(none.shape)) == (1, (0, 3, 64))
    assert same_bits(one, tensor_of(read(client, session, 1, "kv"))[3:4])


def test_push_of_nothing_and_retry(client: httpx.Client, session: str) -> None:
    before = client.get(f"/v1/sessions/{session}").json()
    assert push(client, session, len(TOKENS), [])["appended"] == 0
    assert push(client, session, 3, TOKENS[3:9], mask=MASK[3:9])["appended"] == 0
    after = client.get(f"/v1/sessions/{session}").json()
    assert (after["length"], after["epoch"]) == (before["length"], before["epoch"])


def test_truncate_rewind_and_their_epochs(client: httpx.Client, official_oracle: Oracle) -> None:
    made = open_session(client)
    name, epoch = made["session_id"], made["epoch"]
    push(client, name, 0, TOKENS)
    cut = push(client, name, 4, [20, 20], on_conflict="truncate", epoch=epoch)
    assert (cut["length"], cut["epoch"], cut["removed"]) == (6, epoch + 1, 14)
    body = {"position": 5, "epoch": epoch + 1}
    back = client.post(f"/v1/sessions/{name}/rewind", json=body).json()
    assert (back["length"], back["epoch"]) == (5, epoch + 2)
    again = client.post(f"/v1/sessions/{name}/rewind", json=body).json()
    assert (again["length"], again["epoch"]) == (5, epoch + 2)
    push(client, name, 5, TOKENS[5:8], epoch=epoch + 2)
    held = official_oracle.compress([*TOKENS[:4], 20, *TOKENS[5:8]])
    params = {"position": 0, "count": 8, "epoch": epoch + 2}
    ids = tensor_of(client.get(f"/v1/sessions/{name}/layers/14/hash_ids", params=params))
    assert torch.equal(ids, torch.from_numpy(official_oracle.layer_hash_ids(14, held)))
    assert client.delete(f"/v1/sessions/{name}", params={"epoch": epoch + 2}).status_code == 204


def test_lookback_and_fork_continue_the_sequence(
    client: httpx.Client, session: str, official_oracle: Oracle
) -> None:
    whole = official_oracle.layer_hash_ids(1, official_oracle.compress(TOKENS, MASK))
    lookback = [t if alive else None for t, alive in zip(TOKENS, MASK, strict=True)][6:9]
    made = open_session(client, position=9, lookback=lookback)
    assert (made["length"], made["base"]) == (9, 9)
    fork = open_session(client, fork_of=session, position=9)
    assert (fork["length"], fork["base"]) == (9, 0)
    for name in (made["session_id"], fork["session_id"]):
        push(client, name, 9, TOKENS[9:], mask=MASK[9:])
        answer = client.get(
            f"/v1/sessions/{name}/layers/1/hash_ids", params={"position": 9, "count": 9}
        )
        assert torch.equal(tensor_of(answer), torch.from_numpy(whole[9:]))
        assert client.delete(f"/v1/sessions/{name}").status_code == 204


def test_opened_alike_again_is_200(client: httpx.Client) -> None:
    fields = {"session_id": "77001", "position": 2, "lookback": [0, None]}
    made = open_session(client, **fields)
    again = client.post("/v1/sessions", json=fields)
    assert again.status_code == 200
    assert again.json()["epoch"] == made["epoch"]
    assert client.delete("/v1/sessions/77001").status_code == 204


def test_owner_closes_its_former_incarnation(client: httpx.Client) -> None:
    for _ in range(3):
        open_session(client, owner="runner-1")
    kept = open_session(client, owner="runner-2")["session_id"]
    assert client.delete("/v1/sessions", params={"owner": "runner-1"}).json() == {"closed": 3}
    assert client.get(f"/v1/sessions/{kept}").json()["owner"] == "runner-2"
    assert client.delete("/v1/sessions", params={"owner": "runner-2"}).json() == {"closed": 1}


@pytest.mark.parametrize("output", ["residual", "kv", "rows", "hash_ids"])
def test_step_of_a_session_equals_the_single_routes(
    client: httpx.Client, session: str, output: str
) -> None:
    x = torch.randn(len(TOKENS), 2, 64)
    layers = ("1",) if output == "residual" else ("1", "14")
    answer = step(
        client,
        {"output": output, "layers": ",".join(layers)},
        count=[len(TOKENS)],
        position=[0],
        session_id=[int(session)],
        residual=x if output == "residual" else None,
    )
    assert answer["length"].tolist() == [len(TOKENS)]
    assert answer["dead"].bool().tolist() == [not m for m in MASK]
    for layer in layers:
        path = f"/v1/sessions/{session}/layers/{layer}/{output}"
        if output == "residual":
            single = client.post(path, params={"position": 0}, **body_of(x))
        else:
            single = client.get(path, params={"position": 0, "count": len(TOKENS)})
        assert same_bits(answer[f"{output}.{layer}"], tensor_of(single))


def test_step_pushes_first_and_then_reads(client: httpx.Client, official_oracle: Oracle) -> None:
    made = open_session(client)
    answer = step(
        client,
        {"output": "hash_ids", "layers": "14,1"},
        count=[len(TOKENS)],
        position=[0],
        session_id=[int(made["session_id"])],
        epoch=[made["epoch"]],
        token_ids=TOKENS,
        mask=MASK,
    )
    compressed = official_oracle.compress(TOKENS, MASK)
    for layer in LAYERS:
        expected = torch.from_numpy(official_oracle.layer_hash_ids(layer, compressed))
        assert torch.equal(answer[f"hash_ids.{layer}"], expected)
    assert (answer["length"].tolist(), answer["epoch"].tolist()) == (
        [len(TOKENS)],
        [made["epoch"]],
    )
    client.delete(f"/v1/sessions/{made['session_id']}")


def test_step_by_lookback_and_by_hash_ids(
    client: httpx.Client, session: str, official_oracle: Oracle
) -> None:
    compressed = official_oracle.compress(TOKENS, MASK)
    kv = tensor_of(read(client, session, 14, "kv"))
    alive = torch.tensor(MASK)
    lookback = step(
        client,
        {"output": "kv", "layers": "14"},
        count=[4, 14],
        position=[0, 4],
        lookback=[[-1, -1, -1], TOKENS[1:4]],
        token_ids=TOKENS,
        mask=MASK,
    )
    assert same_bits(lookback["kv.14"], kv)
    assert lookback["length"].tolist() == lookback["epoch"].tolist() == [-1, -1]
    ids = official_oracle.hash_ids(compressed)[:, 1:]
    by_ids = step(
        client,
        {"output": "kv", "layers": "14"},
        count=[18],
        position=[0],
        hash_ids=np.ascontiguousarray(ids),
    )
    assert same_bits(by_ids["kv.14"][alive], kv[alive])


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_step_of_nothing_is_answered(client: httpx.Client, session: str, segments: int) -> None:
    answer = step(
        client,
        {"output": "kv", "layers": "1,14"},
        count=torch.zeros(segments, dtype=torch.int32),
        position=torch.zeros(segments, dtype=torch.int64),
        session_id=torch.full((segments,), int(session)),
    )
    assert answer["length"].tolist() == [len(TOKENS)] * segments
    assert tuple(answer["kv.1"].shape) == tuple(answer["kv.14"].shape) == (0, 3, 64)


def test_step_of_ragged_segments_with_an_empty_one(client: httpx.Client, session: str) -> None:
    whole = tensor_of(read(client, session, 1, "kv"))
    answer = step(
        client,
        {"output": "kv", "layers": "1"},
        count=[1, 0, 5],
        position=[3, 18, 9],
        session_id=[int(session)] * 3,
    )
    assert same_bits(answer["kv.1"], torch.cat([whole[3:4], whole[9:14]]))


def test_output_none_fills_the_store(client: httpx.Client) -> None:
    before = metric(client, "engram_store_hits_total")
    candidates = {
        "count": [1, 1],
        "position": [3, 3],
        "lookback": [[19, 19, 20], [19, 18, 20]],
        "token_ids": [19, 19],
    }
    nothing = step(client, {"output": "none", "layers": "1"}, **candidates)
    assert nothing.keys() == {"length", "epoch", "dead"}
    step(client, {"output": "kv", "layers": "1"}, **candidates)
    assert metric(client, "engram_store_hits_total") - before >= 2


def test_tensors_in_any_order_and_int32_ids(client: httpx.Client, session: str) -> None:
    request = step_body(
        token_ids=torch.tensor(TOKENS[:3], dtype=torch.int32),
        session_id=[int(session)],
        position=[0],
        mask=torch.tensor(MASK[:3]),
        count=[3],
    )
    answer = client.post("/v1/step", params={"output": "kv", "layers": "1"}, **request)
    assert answer.status_code == 200, answer.text


def test_answer_data_is_aligned(client: httpx.Client, session: str) -> None:
    request = step_body(count=[1], position=[0], session_id=[int(session)])
    answer = client.post("/v1/step", params={"output": "kv", "layers": "1"}, **request)
    head = int.from_bytes(answer.content[:8], "little")
    assert (8 + head) % 64 == 0
    assert b"__metadata__" not in answer.content[8 : 8 + head]


def test_gguf_checkpoint_with_keys(keyed_server: Server, gguf_oracle: Oracle) -> None:
    with keyed_server.client(KEYS["alice"]) as client:
        name = open_session(client)["session_id"]
        push(client, name, 0, TOKENS, mask=MASK)
        ids = gguf_oracle.layer_hash_ids(14, gguf_oracle.compress(TOKENS, MASK))
        rows = read(client, name, 14, "rows")
        assert same_bits(tensor_of(rows), gguf_oracle.rows(14, ids))
        kv, dead = tensor_of(read(client, name, 14, "kv")), ~torch.tensor(MASK)
        bound = gguf_oracle.kv_interval(14, gguf_oracle.rows(14, ids), dead)
        assert not bound.outside(kv).any()
        client.delete(f"/v1/sessions/{name}")


def test_keys_own_their_sessions_of_one_name(keyed_server: Server) -> None:
    """The same id under two keys is two sessions."""
    with (
        keyed_server.client(KEYS["alice"]) as alice,
        keyed_server.client(KEYS["bob"]) as bob,
    ):
        open_session(alice, session_id="55")
        open_session(bob, session_id="55")
        push(alice, "55", 0, [0, 4, 6])
        assert bob.get("/v1/sessions/55").json()["length"] == 0
        for owner in (alice, bob):
            assert owner.delete("/v1/sessions/55").status_code == 204


@pytest.mark.parametrize("uds", [False, True], ids=["tcp", "uds"])
def test_asynchronous_clients_share_a_session(
    server: Server, official_oracle: Oracle, *, uds: bool
) -> None:
    """24 sessions at once over one async client: each gets its own rows, by bits."""

    async def one(client: httpx.AsyncClient, seed: int) -> tuple[list[int], torch.Tensor]:
        tokens = np.random.default_rng(seed).integers(0, 22, 12).tolist()
        made = (await client.post("/v1/sessions", json={})).json()
        path = f"/v1/sessions/{made['session_id']}"
        for position in range(0, 12, 4):
            body = {"position": position, "token_ids": tokens[position : position + 4]}
            assert (await client.post(f"{path}/tokens", json=body)).status_code == 200
        params = {"position": 0, "count": 12}
        rows = tensor_of(await client.get(f"{path}/layers/14/rows", params=params))
        assert (await client.delete(path)).status_code == 204
        return tokens, rows

    async def everybody() -> list[tuple[list[int], torch.Tensor]]:
        async with server.async_client(uds=uds) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(24)))

    for tokens, rows in asyncio.run(everybody()):
        ids = official_oracle.layer_hash_ids(14, official_oracle.compress(tokens))
        assert same_bits(rows, official_oracle.rows(14, ids))


def test_tensor_body_over_many_writes(server: Server, client: httpx.Client, session: str) -> None:
    """A body that arrives byte by byte at first is the same body."""
    x = torch.randn(len(TOKENS), 2, 64)
    path = f"/v1/sessions/{session}/layers/1/residual?position=0"
    whole = tensor_of(client.post(path, **body_of(x)))
    request = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/octet-stream\r\nX-Engram-Dtype: F32\r\n"
        f"X-Engram-Shape: {len(TOKENS)},2,64\r\nContent-Length: {len(raw_bytes(x))}\r\n\r\n"
    ).encode() + raw_bytes(x)
    with server.socket() as connection:
        for i in range(600):
            connection.sendall(request[i : i + 1])
        connection.sendall(request[600:])
        data = b""
        while more := connection.recv(1 << 16):
            data += more
    assert data.startswith(b"HTTP/1.1 200")
    assert data.endswith(raw_bytes(whole))
