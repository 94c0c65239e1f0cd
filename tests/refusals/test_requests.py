"""One test per way a request is refused (API.md: Strictness, Codes), at a real server.

Every refusal is a problem document with its code; the session is as before after each.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import KEYS
from tests.integration.door import (
    body_of,
    open_session,
    push,
    raw_bytes,
    refusal,
    step_body,
    wait_until,
)
from tests.integration.server import Server, read_answer

VOCAB = 22
HC, DIM, COLS = 2, 64, 6
HELD = [0, 4, 6, 8, 13]
"""What the session `held` holds, base 0."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture
def held(client: httpx.Client) -> Iterator[str]:
    """A session with HELD, checked to be unchanged afterwards, and closed."""
    made = open_session(client)
    name = made["session_id"]
    push(client, name, 0, HELD)
    before = client.get(f"/v1/sessions/{name}").json()
    yield name
    after = client.get(f"/v1/sessions/{name}").json()
    assert {**before, "expires_in_s": 0} == {**after, "expires_in_s": 0}
    assert client.delete(f"/v1/sessions/{name}").status_code == 204


def post_tokens(client: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return client.post(f"/v1/sessions/{name}/tokens", json=fields)


def post_text(client: httpx.Client, path: str, text: str) -> httpx.Response:
    return client.post(path, content=text, headers={"Content-Type": "application/json"})


def read(client: httpx.Client, name: str, what: str = "kv", layer: int = 1, **q: Any) -> Any:
    return client.get(f"/v1/sessions/{name}/layers/{layer}/{what}", params=q)


def apply(client: httpx.Client, name: str, residual: torch.Tensor, **q: Any) -> httpx.Response:
    path = f"/v1/sessions/{name}/layers/1/residual"
    return client.post(path, params={"position": 0, **q}, **body_of(residual))


def post_step(client: httpx.Client, params: dict[str, Any], **tensors: Any) -> httpx.Response:
    return client.post("/v1/step", params=params, **step_body(**tensors))


KV = {"output": "kv", "layers": "1"}

# ---------------------------------------------------------------------- 400 bad_request


def test_body_that_is_not_json(client: httpx.Client, held: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/tokens", "{")
    assert refusal(answer) == (400, "bad_request")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_json_numbers_that_are_not_finite(client: httpx.Client, held: str, number: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", f'{{"position": {number}}}')
    assert refusal(answer) == (400, "bad_request")


def test_json_float_too_large(client: httpx.Client, held: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", '{"position": 1e400}')
    assert refusal(answer)[0] in (400, 422)


def test_json_with_duplicate_keys(client: httpx.Client, held: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", '{"position": 5, "position": 0}')
    assert refusal(answer) == (400, "bad_request")


def test_json_that_is_not_utf8(client: httpx.Client, held: str) -> None:
    answer = client.post(
        f"/v1/sessions/{held}/rewind",
        content=b'{"position": "\xff"}',
        headers={"Content-Type": "application/json"},
    )
    assert refusal(answer) == (400, "bad_request")


def test_json_nested_beyond_reason(client: httpx.Client, held: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", "[" * 100_000)
    assert refusal(answer)[0] in (400, 413)


# ---------------------------------------------------------------------- 400 bad_tensor


def residual(tokens: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(tokens, HC, DIM, dtype=dtype)


@pytest.mark.parametrize("change", [-1, 1, -4, 4])
def test_residual_with_another_byte_count(client: httpx.Client, held: str, change: int) -> None:
    request = body_of(residual())
    request["content"] = (request["content"] + b"\0" * 4)[: len(request["content"]) + change]
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer) == (400, "bad_tensor")
    assert {"expected", "got"} <= answer.json().keys()


@pytest.mark.parametrize("shape", ["5,3,64", "5,2,65", "5,128", "2,5,64", "640"])
def test_residual_of_another_shape(client: httpx.Client, held: str, shape: str) -> None:
    request = body_of(residual())
    request["headers"]["X-Engram-Shape"] = shape
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer) == (400, "bad_tensor")


@pytest.mark.parametrize("shape", ["18446744073709551617,2,64", "4611686018427387905,4,1"])
def test_shape_whose_product_overflows(client: httpx.Client, held: str, shape: str) -> None:
    request = body_of(residual())
    request["headers"]["X-Engram-Shape"] = shape
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer)[0] in (400, 413, 422)


@pytest.mark.parametrize("shape", ["", "5,,64", "-5,2,64", "5.0,2,64", "5,2,64,", "+5,2,64", "a"])
def test_malformed_shape_header(client: httpx.Client, held: str, shape: str) -> None:
    request = body_of(residual())
    request["headers"]["X-Engram-Shape"] = shape
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize("dtype", ["F16", "I64", "F64", "bfloat16", ""])
def test_residual_of_another_dtype(client: httpx.Client, held: str, dtype: str) -> None:
    request = body_of(residual())
    request["headers"]["X-Engram-Dtype"] = dtype
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer)[0] in (400, 422)


def test_float64_sent_as_bfloat16(client: httpx.Client, held: str) -> None:
    request = body_of(residual(dtype=torch.bfloat16))
    request["content"] = raw_bytes(residual().to(torch.float64))
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(path, params={"position": 0}, **request)
    assert refusal(answer) == (400, "bad_tensor")


def test_count_that_is_not_the_residuals(client: httpx.Client, held: str) -> None:
    assert refusal(apply(client, held, residual(4), count=5))[0] == 400


def raw_safetensors(head: Any, data: bytes = b"") -> dict[str, Any]:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return {
        "content": struct.pack("<Q", len(text)) + text + data,
        "headers": {"Content-Type": "application/octet-stream"},
    }


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"count": entry("I32", [0], 0, 0), "position": entry("I64", [0], 0, 0)}


@pytest.mark.parametrize(
    ("head", "data"),
    [
        pytest.param(b"", b"", id="empty-head"),
        pytest.param(b"{", b"", id="head-not-json"),
        pytest.param(b"[]", b"", id="head-no-object"),
        pytest.param({**GOOD, "__metadata__": {"a": "b"}}, b"", id="metadata"),
        pytest.param(
            b'{"count":{"dtype":"I32","shape":[0],"data_offsets":[0,0]},'
            b'"count":{"dtype":"I32","shape":[0],"data_offsets":[0,0]}}',
            b"",
            id="name-twice",
        ),
        pytest.param({**GOOD, "count": entry("I32", [1], 0, 8)}, b"\0" * 8, id="size-too-long"),
        pytest.param({**GOOD, "count": entry("I32", [1], 0, 4)}, b"", id="data-missing"),
        pytest.param({**GOOD, "count": entry("I32", [1], 4, 8)}, b"\0" * 8, id="hole"),
        pytest.param(
            {"count": entry("I32", [1], 0, 4), "position": entry("I64", [1], 0, 8)},
            b"\0" * 8,
            id="overlap",
        ),
        pytest.param(GOOD, b"\0", id="data-left-over"),
        pytest.param({**GOOD, "count": entry("I32", [2**62, 4], 0, 0)}, b"", id="overflow"),
        pytest.param({**GOOD, "count": entry("I32", [-1], 0, 0)}, b"", id="negative-shape"),
        pytest.param({**GOOD, "count": entry("F8", [0], 0, 0)}, b"", id="dtype-unknown"),
        pytest.param({**GOOD, "count": {"dtype": "I32"}}, b"", id="entry-without-shape"),
        pytest.param(json.dumps(GOOD).encode() + b" " * 65536, b"", id="head-over-64-KiB"),
    ],
)
def test_step_body_that_is_no_good_safetensors(
    client: httpx.Client, head: Any, data: bytes
) -> None:
    answer = client.post("/v1/step", params=KV, **raw_safetensors(head, data))
    assert refusal(answer) == (400, "bad_tensor")


def test_step_body_shorter_than_its_head_size(client: httpx.Client) -> None:
    request = raw_safetensors(GOOD)
    request["content"] = request["content"][:5]
    assert refusal(client.post("/v1/step", params=KV, **request)) == (400, "bad_tensor")


def test_step_body_whose_head_size_is_huge(client: httpx.Client) -> None:
    request = raw_safetensors(GOOD)
    request["content"] = struct.pack("<Q", 2**63) + request["content"][8:]
    assert refusal(client.post("/v1/step", params=KV, **request)) == (400, "bad_tensor")


@pytest.mark.parametrize(
    "tensors",
    [
        {"count": torch.ones(1, dtype=torch.int64)},
        {"count": torch.ones(1, 1, dtype=torch.int32)},
        {"position": torch.zeros(1, dtype=torch.int32)},
        {"position": torch.zeros(2, dtype=torch.int64)},
        {"session_id": torch.ones(1, dtype=torch.int32)},
        {"token_ids": torch.zeros(2, dtype=torch.int64)},
        {"token_ids": torch.zeros(1, dtype=torch.float32)},
        {"mask": torch.zeros(2, dtype=torch.uint8), "token_ids": [0]},
        {"epoch": torch.zeros(2, dtype=torch.int64)},
    ],
    ids=lambda t: "-".join(f"{k}" for k in t),
)
def test_step_tensor_of_another_shape_or_dtype(
    client: httpx.Client, held: str, tensors: dict[str, Any]
) -> None:
    good = {"count": [1], "position": [0], "session_id": [int(held)]}
    assert refusal(post_step(client, KV, **(good | tensors))) == (400, "bad_tensor")


def test_step_residual_of_another_shape(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        {"output": "residual", "layers": "1"},
        count=[5],
        position=[0],
        session_id=[int(held)],
        residual=residual(4),
    )
    assert refusal(answer) == (400, "bad_tensor")


def test_step_lookback_of_another_width(client: httpx.Client) -> None:
    answer = post_step(client, KV, count=[1], position=[5], lookback=[[1, 2]], token_ids=[0])
    assert refusal(answer) == (400, "bad_tensor")


@pytest.mark.parametrize("shape", [(1, 2, COLS), (1, 1, COLS - 1), (2, 1, COLS), (1, COLS)])
def test_step_hash_ids_of_another_shape(client: httpx.Client, shape: tuple[int, ...]) -> None:
    hash_ids = torch.zeros(shape, dtype=torch.int64)
    answer = post_step(client, KV, count=[1], position=[0], hash_ids=hash_ids)
    assert refusal(answer) == (400, "bad_tensor")


# ---------------------------------------------------------------------- 400 ids out of range


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63)])
def test_token_id_outside_the_token_map(client: httpx.Client, held: str, token_id: int) -> None:
    answer = post_tokens(client, held, position=5, token_ids=[4, token_id, 4])
    assert refusal(answer) == (400, "token_out_of_range")
    assert "1" in json.dumps(answer.json().get("index", answer.json()["detail"]))


def test_token_id_outside_the_token_map_in_a_step(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client, KV, count=[2], position=[5], session_id=[int(held)], token_ids=[4, -1]
    )
    assert refusal(answer) == (400, "token_out_of_range")


def test_lookback_id_outside_the_token_map(client: httpx.Client) -> None:
    answer = client.post("/v1/sessions", json={"position": 3, "lookback": [0, VOCAB, 0]})
    assert refusal(answer) == (400, "token_out_of_range")
    assert answer.json()["detail"] == f"lookback[1]: expected 0..{VOCAB - 1}, got {VOCAB}"


def test_minus_one_is_dead_only_in_a_steps_lookback(client: httpx.Client) -> None:
    answer = client.post("/v1/sessions", json={"position": 3, "lookback": [0, -1, 0]})
    assert refusal(answer) == (400, "token_out_of_range")


def test_step_lookback_id_outside_the_token_map(client: httpx.Client) -> None:
    answer = post_step(client, KV, count=[1], position=[5], lookback=[[1, VOCAB, 2]], token_ids=[0])
    assert refusal(answer) == (400, "token_out_of_range")


def test_step_lookback_before_the_start(client: httpx.Client) -> None:
    """At position 1 only one id lies before; a token two back is a contradiction."""
    answer = post_step(client, KV, count=[1], position=[1], lookback=[[0, 1, 2]], token_ids=[0])
    assert refusal(answer)[0] == 400


@pytest.mark.parametrize("row", [-1, 11, 10**6, 2**31, 2**62, -(2**63)])
def test_hash_id_outside_its_bucket(client: httpx.Client, row: int) -> None:
    """Layer 1's first bucket holds rows 0..10 (base 11): row 11 is the second column's."""
    ids = torch.tensor([[[row, 11, 24, 41, 60, 83]]])
    answer = post_step(client, KV, count=[1], position=[0], hash_ids=ids)
    assert refusal(answer) == (400, "row_out_of_range")


def test_session_pushed_twice_in_one_step(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        {"output": "none"},
        count=[1, 1],
        position=[5, 6],
        session_id=[int(held)] * 2,
        token_ids=[4, 6],
    )
    assert refusal(answer) == (400, "duplicate_session")


# ---------------------------------------------------------------------- 401, 403


def test_request_without_a_key(keyed_server: Server) -> None:
    with keyed_server.client() as client:
        answer = client.post("/v1/sessions", json={})
    assert refusal(answer) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "value", ["Bearer wrong", "Bearer", "Basic YTpi", "alice-key", "Bearer alice-key x", "Bearer x"]
)
def test_request_with_a_wrong_key(keyed_server: Server, value: str) -> None:
    with keyed_server.client() as client:
        answer = client.get("/v1/info", headers={"Authorization": value})
    assert refusal(answer) == (401, "unauthenticated")


def test_request_with_two_authorization_headers(keyed_server: Server) -> None:
    key = KEYS["alice"].encode()
    status, _ = keyed_server.raw(
        b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + key
        + b"\r\nAuthorization: Bearer " + key + b"\r\nConnection: close\r\n\r\n"
    )  # fmt: skip
    assert status == 401


def test_admin_key_opens_no_session(keyed_server: Server) -> None:
    with keyed_server.client(KEYS["root"]) as client:
        assert refusal(client.post("/v1/sessions", json={})) == (403, "forbidden")


# ---------------------------------------------------------------------- 404, 405


@pytest.mark.parametrize("name", ["1", "9223372036854775807"])
def test_session_never_opened(client: httpx.Client, name: str) -> None:
    assert refusal(client.get(f"/v1/sessions/{name}")) == (404, "unknown_session")


def test_session_that_was_closed(client: httpx.Client) -> None:
    name = open_session(client)["session_id"]
    assert client.delete(f"/v1/sessions/{name}").status_code == 204
    assert refusal(client.delete(f"/v1/sessions/{name}")) == (404, "unknown_session")
    answer = post_tokens(client, name, position=0, token_ids=[0])
    assert refusal(answer) == (404, "unknown_session")


def test_session_of_another_key(keyed_server: Server) -> None:
    with (
        keyed_server.client(KEYS["alice"]) as alice,
        keyed_server.client(KEYS["bob"]) as bob,
    ):
        name = open_session(alice)["session_id"]
        for answer in (
            bob.get(f"/v1/sessions/{name}"),
            bob.delete(f"/v1/sessions/{name}"),
            post_tokens(bob, name, position=0, token_ids=[0]),
            read(bob, name, position=0),
            bob.post(f"/v1/sessions/{name}/rewind", json={"position": 0}),
            bob.post("/v1/sessions", json={"fork_of": name}),
        ):
            assert refusal(answer) == (404, "unknown_session")
        assert alice.delete(f"/v1/sessions/{name}").status_code == 204


@pytest.mark.parametrize("what", ["kv", "rows", "hash_ids"])
@pytest.mark.parametrize("layer", [0, 2, 13, 15])
def test_layer_without_an_engram(client: httpx.Client, held: str, what: str, layer: int) -> None:
    answer = read(client, held, what, layer, position=0)
    assert refusal(answer) == (404, "unknown_layer")


def test_layer_without_an_engram_in_a_step(client: httpx.Client, held: str) -> None:
    params = {"output": "kv", "layers": "1,2"}
    answer = post_step(client, params, count=[1], position=[0], session_id=[int(held)])
    assert refusal(answer) == (404, "unknown_layer")


def test_weights_of_a_layer_without_an_engram(client: httpx.Client) -> None:
    assert refusal(client.get("/v1/layers/2/weights")) == (404, "unknown_layer")


@pytest.mark.parametrize("path", ["/v1", "/v2/info", "/docs", "/redoc", "/v1/sessions/"])
def test_path_that_is_no_route(client: httpx.Client, path: str) -> None:
    assert refusal(client.get(path)) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/v1/sessions"), ("GET", "/v1/step"), ("POST", "/v1/info"), ("PATCH", "/livez")],
)
def test_method_that_a_route_has_not(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert refusal(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"]


# ---------------------------------------------------------------------- 408, 411, 413, 429


def head(path: str, length: int, *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/octet-stream",
        f"Content-Length: {length}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_body_that_comes_too_slowly(server: Server) -> None:
    with server.socket() as connection:
        connection.sendall(head("/v1/step?output=none", 7 << 20) + b"\0" * 100)
        status, body = read_answer(connection)
    assert (status, json.loads(body)["code"]) == (408, "request_timeout")


def test_tensor_body_without_a_length(client: httpx.Client, held: str) -> None:
    request = body_of(residual())
    path = f"/v1/sessions/{held}/layers/1/residual"
    answer = client.post(
        path,
        params={"position": 0},
        content=iter([request["content"]]),
        headers=request["headers"],
    )
    assert refusal(answer) == (411, "length_required")


def test_step_without_a_length(client: httpx.Client) -> None:
    request = step_body(count=[], position=[])
    answer = client.post(
        "/v1/step", params=KV, content=iter([request["content"]]), headers=request["headers"]
    )
    assert refusal(answer) == (411, "length_required")


def test_body_above_half_of_the_pool_after_all_was_written(server: Server) -> None:
    """20 MB are written before anything is read; the refusal still arrives."""
    with server.socket() as connection:
        connection.sendall(head("/v1/step?output=none", 20_000_000))
        connection.sendall(b"\0" * 20_000_000)
        status, body = read_answer(connection)
    assert (status, json.loads(body)["code"]) == (413, "body_too_large")


def test_json_body_beyond_its_bound(client: httpx.Client, held: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/tokens", " " * 9_000_000)
    assert refusal(answer) == (413, "body_too_large")


def test_more_tokens_than_one_request_may_push(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=5, token_ids=[4] * 513)
    assert refusal(answer) == (413, "too_many_tokens")


def test_more_tokens_than_one_read_may_name(client: httpx.Client, held: str) -> None:
    answer = read(client, held, "hash_ids", position=0, count=513)
    assert refusal(answer) == (413, "too_many_tokens")


def test_more_tokens_than_one_step_may_name(client: httpx.Client) -> None:
    ids = torch.zeros(513, dtype=torch.int64)
    answer = post_step(
        client, KV, count=[513], position=[0], lookback=[[-1, -1, -1]], token_ids=ids
    )
    assert refusal(answer) == (413, "too_many_tokens")


def test_position_above_the_longest(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=1_048_576, token_ids=[4])
    assert refusal(answer) == (413, "too_many_positions")
    answer = client.post("/v1/sessions", json={"position": 1_048_577, "lookback": [0, 0, 0]})
    assert refusal(answer) == (413, "too_many_positions")
    answer = read(client, held, position=1_048_576)
    assert refusal(answer)[0] in (409, 413)


def test_no_room_for_another_body(server: Server, client: httpx.Client) -> None:
    """Two bodies of 7 MiB wait in a pool of 16: the third is told to come again."""
    request = head("/v1/step?output=none", 7 << 20)
    with server.socket() as first, server.socket() as second, server.socket() as third:
        first.sendall(request)
        second.sendall(request)
        wait_until(client, "engram_in_flight_bytes", lambda held: held >= 14 << 20)
        third.sendall(request + b"\0" * (7 << 20))  # all is written before the answer is read
        status, body = read_answer(third)
        assert (status, json.loads(body)["code"]) == (429, "overloaded")
        assert [read_answer(slow)[0] for slow in (first, second)] == [408, 408]
    wait_until(client, "engram_in_flight_bytes", lambda held: held == 0)


def test_no_free_session(keyed_server: Server) -> None:
    with keyed_server.client(KEYS["alice"]) as client:
        names = [open_session(client, owner="full")["session_id"] for _ in range(8)]
        answer = client.post("/v1/sessions", json={})
        assert refusal(answer) == (429, "too_many_sessions")
        assert len(set(names)) == 8
        assert client.delete("/v1/sessions", params={"owner": "full"}).json() == {"closed": 8}


def test_no_room_for_more_token_ids(keyed_server: Server) -> None:
    """4,096 ids may be held in all; a push of 512 into a full store changes nothing."""
    with keyed_server.client(KEYS["bob"]) as client:
        name, pushed, answer = open_session(client)["session_id"], 0, None
        while answer is None or answer.status_code == 200:
            assert pushed <= 4096
            answer = post_tokens(client, name, position=pushed, token_ids=[4] * 512, ahead=False)
            pushed += 512
        assert refusal(answer) == (429, "held_tokens_full")
        assert client.get(f"/v1/sessions/{name}").json()["length"] == pushed - 512
        assert client.delete(f"/v1/sessions/{name}").status_code == 204


# ---------------------------------------------------------------------- 409


def test_push_behind_the_end(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=6, token_ids=[4])
    assert refusal(answer) == (409, "gap")
    assert answer.json()["length"] == 5


def test_push_of_other_ids(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=2, token_ids=[6, 9, 13, 4])
    assert refusal(answer) == (409, "conflict")
    assert answer.json()["index"] == 1


def test_push_that_makes_a_held_position_dead(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=2, token_ids=[6, 8], mask=[True, False])
    assert refusal(answer) == (409, "conflict")
    assert answer.json()["index"] == 1


def test_tokens_of_one_compressed_id_do_not_conflict(client: httpx.Client, held: str) -> None:
    """4 and 5 are `cat` and `Cat`: one compressed id."""
    assert post_tokens(client, held, position=1, token_ids=[5]).status_code == 200


@pytest.mark.parametrize("epoch", [0, 1, 2**62])
def test_push_with_another_epoch(client: httpx.Client, held: str, epoch: int) -> None:
    answer = post_tokens(client, held, position=5, token_ids=[4], epoch=epoch)
    assert refusal(answer) == (409, "stale_epoch")
    answer = client.post(f"/v1/sessions/{held}/rewind", json={"position": 1, "epoch": epoch})
    assert refusal(answer) == (409, "stale_epoch")


def test_read_with_an_old_epoch(client: httpx.Client, held: str) -> None:
    for what in ("kv", "rows", "hash_ids"):
        answer = read(client, held, what, position=0, epoch=1)
        assert refusal(answer) == (409, "stale_epoch")
    assert refusal(apply(client, held, residual(), epoch=1)) == (409, "stale_epoch")


def test_left_out_epoch_after_a_cut(client: httpx.Client) -> None:
    name = open_session(client)["session_id"]
    push(client, name, 0, [0, 4, 6])
    assert client.post(f"/v1/sessions/{name}/rewind", json={"position": 2}).status_code == 200
    assert refusal(read(client, name, position=0)) == (409, "stale_epoch")
    answer = post_tokens(client, name, position=2, token_ids=[8])
    assert refusal(answer) == (409, "stale_epoch")
    client.delete(f"/v1/sessions/{name}")


@pytest.mark.parametrize("wait_ms", [0, 20])
def test_read_of_what_nobody_pushed(client: httpx.Client, held: str, wait_ms: int) -> None:
    for what in ("kv", "rows", "hash_ids"):
        answer = read(client, held, what, position=4, count=2, wait_ms=wait_ms)
        assert refusal(answer) == (409, "not_pushed")
    answer = apply(client, held, residual(2), position=4, wait_ms=wait_ms)
    assert refusal(answer) == (409, "not_pushed")


def test_read_of_an_epoch_that_is_still_to_come(client: httpx.Client, held: str) -> None:
    epoch = client.get(f"/v1/sessions/{held}").json()["epoch"] + 1
    answer = read(client, held, position=0, epoch=epoch, wait_ms=20)
    assert refusal(answer) == (409, "not_pushed")


def test_position_below_the_base(client: httpx.Client) -> None:
    made = open_session(client, position=9, lookback=[0, 4, 6])
    name = made["session_id"]
    push(client, name, 9, [8, 13])
    for answer in (
        read(client, name, position=8),
        post_tokens(client, name, position=8, token_ids=[6]),
        client.post(f"/v1/sessions/{name}/rewind", json={"position": 8}),
        client.post("/v1/sessions", json={"fork_of": name, "position": 8}),
    ):
        assert refusal(answer) == (409, "history_truncated")
    client.delete(f"/v1/sessions/{name}")


def test_own_id_opened_in_another_way(client: httpx.Client, held: str) -> None:
    for fields in (
        {"position": 3, "lookback": [0, 4, 6]},
        {"fork_of": held},
        {"owner": "another"},
    ):
        answer = client.post("/v1/sessions", json={"session_id": held, **fields})
        assert refusal(answer) == (409, "session_exists")


# ---------------------------------------------------------------------- 412, 415, 421


def test_another_table(client: httpx.Client, held: str) -> None:
    headers = {"X-Engram-Table": "some-other-table"}
    for answer in (
        client.post(f"/v1/sessions/{held}/rewind", json={"position": 0}, headers=headers),
        client.get(f"/v1/sessions/{held}", headers=headers),
        client.get("/v1/layers/1/weights", headers=headers),
    ):
        assert refusal(answer) == (412, "wrong_table")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "identity, gzip"])
def test_body_with_a_content_encoding(client: httpx.Client, held: str, encoding: str) -> None:
    answer = client.post(
        f"/v1/sessions/{held}/rewind",
        json={"position": 0},
        headers={"Content-Encoding": encoding},
    )
    assert refusal(answer) == (415, "media_type")


@pytest.mark.parametrize("media", ["text/plain", "application/octet-stream", "multipart/form-data"])
def test_json_route_with_another_media_type(client: httpx.Client, held: str, media: str) -> None:
    answer = client.post(
        f"/v1/sessions/{held}/rewind", content='{"position":0}', headers={"Content-Type": media}
    )
    assert refusal(answer) == (415, "media_type")


def test_tensor_route_with_json(client: httpx.Client, held: str) -> None:
    path = f"/v1/sessions/{held}/layers/1/residual"
    shape = {"X-Engram-Shape": f"1,{HC},{DIM}", "X-Engram-Dtype": "F32"}
    answer = client.post(path, params={"position": 0}, json=[[1.0]], headers=shape)
    assert refusal(answer) == (415, "media_type")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_host_of_somebody_else(server: Server, host: str) -> None:
    request = f"GET /v1/info HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    status, body = server.raw(request.encode())
    assert (status, json.loads(body)["code"]) == (421, "misdirected")


# ---------------------------------------------------------------------- 422 schema

BAD_INTEGERS = [
    "5.0", "5e0", "true", "false", "null", '"5"', '"-1"', "[5]", "{}",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616",
]  # fmt: skip


@pytest.mark.parametrize("spelled", BAD_INTEGERS)
def test_integer_spelled_otherwise_in_json(client: httpx.Client, held: str, spelled: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", f'{{"position": {spelled}}}')
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize("spelled", [s for s in BAD_INTEGERS if s != "null"])
def test_token_id_spelled_otherwise(client: httpx.Client, held: str, spelled: str) -> None:
    body = f'{{"position": 5, "token_ids": [4, {spelled}]}}'
    answer = post_text(client, f"/v1/sessions/{held}/tokens", body)
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize("spelled", ["+5", "05", "5_0", "0x5", "-", "--5", "٣"])
def test_number_that_json_does_not_know(client: httpx.Client, held: str, spelled: str) -> None:
    answer = post_text(client, f"/v1/sessions/{held}/rewind", f'{{"position": {spelled}}}')
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize(
    "spelled", ["5.0", "%2B5", "5_0", "05", "", "true", "0x5", "%205", "5%20", "1e3", "٣",
                "9223372036854775808", "-1", "-0"],
)  # fmt: skip
def test_query_integer_spelled_otherwise(client: httpx.Client, held: str, spelled: str) -> None:
    answer = client.get(f"/v1/sessions/{held}/layers/1/kv?position={spelled}")
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize(
    "name", ["0", "-1", "05", "+5", "1_0", "abc", "9223372036854775808", "1.0"]
)
def test_session_id_spelled_otherwise(client: httpx.Client, name: str) -> None:
    assert refusal(client.get(f"/v1/sessions/{name}")) == (422, "schema")
    answer = client.post("/v1/sessions", json={"session_id": name})
    assert refusal(answer) == (422, "schema")


def test_session_id_as_a_json_number(client: httpx.Client) -> None:
    assert refusal(client.post("/v1/sessions", json={"session_id": 7})) == (422, "schema")


def test_unknown_field_names_the_nearest(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=5, tokenids=[4])
    assert refusal(answer) == (422, "schema")
    assert "token_ids" in answer.json()["detail"]


def test_unknown_query_parameter_names_the_nearest(client: httpx.Client, held: str) -> None:
    answer = read(client, held, positon=0)
    assert refusal(answer) == (422, "schema")
    assert "position" in answer.json()["detail"]


def test_unknown_header_names_the_nearest(client: httpx.Client) -> None:
    answer = client.get("/v1/info", headers={"X-Engram-Tabel": "a"})
    assert refusal(answer) == (422, "schema")
    assert "x-engram-table" in answer.json()["detail"].lower()


def test_unknown_tensor_names_the_nearest(client: httpx.Client, held: str) -> None:
    answer = post_step(client, KV, count=[1], position=[0], session_id=[int(held)], tokens_ids=[0])
    assert refusal(answer) == (422, "schema")
    assert "token_ids" in answer.json()["detail"]


@pytest.mark.parametrize("missing", ["count", "position"])
def test_missing_tensor(client: httpx.Client, held: str, missing: str) -> None:
    tensors = {"count": [1], "position": [0], "session_id": [int(held)]}
    answer = post_step(client, KV, **{**tensors, missing: None})
    assert refusal(answer) == (422, "schema")


def test_step_without_a_source(client: httpx.Client) -> None:
    assert refusal(post_step(client, KV, count=[1], position=[0]))[0] in (400, 422)


def test_step_with_two_sources(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        KV,
        count=[1],
        position=[0],
        session_id=[int(held)],
        lookback=[[-1, -1, -1]],
        token_ids=[0],
    )
    assert refusal(answer)[0] in (400, 422)


def test_lookback_without_token_ids(client: httpx.Client) -> None:
    answer = post_step(client, KV, count=[1], position=[0], lookback=[[-1, -1, -1]])
    assert refusal(answer)[0] in (400, 422)


def test_hash_ids_with_token_ids(client: httpx.Client) -> None:
    ids = torch.tensor([[[0, 11, 24, 41, 60, 83]]])
    answer = post_step(client, KV, count=[1], position=[0], hash_ids=ids, token_ids=[0])
    assert refusal(answer)[0] in (400, 422)


def test_mask_without_token_ids(client: httpx.Client, held: str) -> None:
    answer = post_step(client, KV, count=[1], position=[0], session_id=[int(held)], mask=[True])
    assert refusal(answer)[0] in (400, 422)


def test_residual_output_without_a_residual(client: httpx.Client, held: str) -> None:
    params = {"output": "residual", "layers": "1"}
    answer = post_step(client, params, count=[1], position=[0], session_id=[int(held)])
    assert refusal(answer)[0] in (400, 422)


def test_residual_for_two_layers(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        {"output": "residual", "layers": "1,14"},
        count=[1],
        position=[0],
        session_id=[int(held)],
        residual=residual(1),
    )
    assert refusal(answer)[0] in (400, 422)


def test_residual_for_another_output(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client, KV, count=[1], position=[0], session_id=[int(held)], residual=residual(1)
    )
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize("count", [-1, -(2**31)])
def test_negative_count(client: httpx.Client, held: str, count: int) -> None:
    answer = post_step(client, KV, count=[count], position=[0], session_id=[int(held)])
    assert refusal(answer)[0] in (400, 422)


def test_negative_position_in_a_step(client: httpx.Client, held: str) -> None:
    answer = post_step(client, KV, count=[1], position=[-1], session_id=[int(held)])
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize("layers", ["", "1,", ",1", "1,1", "one", "1 14", "01"])
def test_malformed_layers(client: httpx.Client, held: str, layers: str) -> None:
    params = {"output": "kv", "layers": layers}
    answer = post_step(client, params, count=[1], position=[0], session_id=[int(held)])
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize("output", ["keys", "KV", ""])
def test_unknown_output(client: httpx.Client, held: str, output: str) -> None:
    params = {"output": output, "layers": "1"}
    answer = post_step(client, params, count=[1], position=[0], session_id=[int(held)])
    assert refusal(answer) == (422, "schema")


def test_query_parameter_given_twice(client: httpx.Client, held: str) -> None:
    answer = client.get(f"/v1/sessions/{held}/layers/1/kv?position=0&position=1")
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize("wait_ms", [1001, -1])
def test_wait_beyond_its_bound(client: httpx.Client, held: str, wait_ms: int) -> None:
    assert refusal(read(client, held, position=0, wait_ms=wait_ms)) == (422, "schema")


def test_encoding_other_than_stored(client: httpx.Client, held: str) -> None:
    answer = read(client, held, "rows", position=0, encoding="gzip")
    assert refusal(answer) == (422, "schema")


def test_encoding_on_kv(client: httpx.Client, held: str) -> None:
    answer = read(client, held, "kv", position=0, encoding="stored")
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize("fields", [{}, {"position": 5}, {"token_ids": [4]}, {"token_ids": None}])
def test_missing_field(client: httpx.Client, held: str, fields: dict[str, Any]) -> None:
    assert refusal(post_tokens(client, held, **fields)) == (422, "schema")


def test_json_body_that_is_no_object(client: httpx.Client, held: str) -> None:
    answer = client.post(f"/v1/sessions/{held}/tokens", json=[1, 2])
    assert refusal(answer) == (422, "schema")


@pytest.mark.parametrize("mask", [[True], [True] * 3, [1, 0], "11", [True, None]])
def test_mask_that_does_not_fit(client: httpx.Client, held: str, mask: Any) -> None:
    answer = post_tokens(client, held, position=5, token_ids=[4, 6], mask=mask)
    assert refusal(answer)[0] in (400, 422)


@pytest.mark.parametrize(
    "fields",
    [
        {"position": 5},
        {"position": 5, "lookback": [0, 4]},
        {"position": 5, "lookback": [0, 4, 6, 8]},
        {"position": 2, "lookback": [0, 4, 6]},
        {"lookback": [0, 4, 6]},
        {"fork_of": "7", "position": 1, "lookback": [0]},
    ],
)
def test_lookback_that_does_not_fit_its_position(
    client: httpx.Client, fields: dict[str, Any]
) -> None:
    """Exactly min(position, 3) ids before the position: nothing is guessed."""
    answer = client.post("/v1/sessions", json=fields)
    assert refusal(answer)[0] in (400, 422)


def test_unknown_on_conflict(client: httpx.Client, held: str) -> None:
    answer = post_tokens(client, held, position=5, token_ids=[4], on_conflict="replace")
    assert refusal(answer) == (422, "schema")


def test_closing_all_sessions_without_an_owner(client: httpx.Client) -> None:
    assert refusal(client.delete("/v1/sessions")) == (422, "schema")


@pytest.mark.parametrize("names", ["", "qk,", "q", "wkv,wkv", "qk wkv"])
def test_unknown_weight_names(client: httpx.Client, names: str) -> None:
    answer = client.get("/v1/layers/1/weights", params={"names": names})
    assert refusal(answer) == (422, "schema")


# ---------------------------------------------------------------------- steps: all or nothing


def test_refused_step_lists_every_failing_segment(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        {"output": "none"},
        count=[1, 1, 1],
        position=[9, 5, 0],
        session_id=[int(held), int(held), 12345],
        token_ids=[4, 4, 4],
    )
    assert refusal(answer) == (409, "gap")
    segments = {s["index"]: s["code"] for s in answer.json()["segments"]}
    assert segments == {0: "gap", 1: "duplicate_session", 2: "unknown_session"}


def test_good_segment_beside_a_bad_one_is_not_pushed(client: httpx.Client, held: str) -> None:
    answer = post_step(
        client,
        {"output": "none"},
        count=[1, 1],
        position=[5, 0],
        session_id=[int(held), 12345],
        token_ids=[4, 4],
    )
    assert refusal(answer) == (404, "unknown_session")
    assert [s["index"] for s in answer.json()["segments"]] == [1]


def test_service_is_well_after_all_this(client: httpx.Client) -> None:
    assert client.get("/readyz").status_code == 200
    assert 'code="internal"' not in client.get("/metrics").text
