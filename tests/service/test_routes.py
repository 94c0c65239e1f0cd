"""Every route in this process: what it answers, and how it refuses."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engram_client import wire
from engram_core.engine_types import MAX_POSITIONS
from service.state import Model
from tests.service.conftest import MAX_SESSIONS, MAX_TOKENS
from tests.service.door import InProcess, i32, i64, refused, tensor_body

IDS = [0, 4, 6, 2, 8, 13]
KV = {"output": "kv", "layers": "1"}


@pytest.fixture
def session(door: InProcess) -> Any:
    made = door.open()
    door.push(made["session_id"], 0, IDS)
    yield made
    door.delete(f"/v1/sessions/{made['session_id']}")


def path(session: dict[str, Any], rest: str = "") -> str:
    return f"/v1/sessions/{session['session_id']}{rest}"


def tensors(answer: httpx.Response) -> dict[str, wire.TensorView]:
    assert answer.status_code == 200, answer.text
    return wire.decode_tensors(answer.content)


def test_info_tells_64_bit_constants_as_strings(door: InProcess, model: Model) -> None:
    told = door.get("/v1/info").json()
    tables = model.checkpoint.hash_tables
    assert told["hash"]["multipliers"] == [[str(m) for m in row] for row in tables.multipliers]
    assert told["table"]["identity"] == model.checkpoint.identity
    assert told["numerics"] == dict(model.backend.numerics)
    assert {"wkv", "gate"} <= told["numerics"].keys()
    assert told["limits"]["max_tokens"] == MAX_TOKENS
    assert told["limits"]["max_positions"] == MAX_POSITIONS
    assert {line["name"] for line in told["memory"]} >= {"tables", "wkv", "kv store", "in flight"}


def test_weights_are_served_once_per_table(door: InProcess, model: Model) -> None:
    answer = door.get("/v1/layers/1/weights")
    assert {name: view.spec for name, view in tensors(answer).items()} == {
        "qk": ("F32", (2, 64)),
        "wkv": ("BF16", (model.checkpoint.geometry.out_features, 6 * 64)),
    }
    etag = answer.headers["etag"]
    assert etag == f'"{model.checkpoint.identity}"'
    for told in ([f'"x", {etag}'], [etag, '"x"'], [f"W/{etag}"], ["*"]):
        again = door.get(
            "/v1/layers/1/weights", headers=[("if-none-match", value) for value in told]
        )
        assert (again.status_code, again.content) == (304, b""), told
        assert again.headers["etag"] == etag
    for told in ('"x"', f'"{etag}"', '"*"', ""):
        answer = door.get("/v1/layers/1/weights?names=qk", headers={"if-none-match": told})
        assert answer.status_code == 200, told


def test_session_is_opened_told_and_closed(door: InProcess) -> None:
    made = door.open(session_id="77", owner="r")
    assert made["session_id"] == "77"
    assert door.post("/v1/sessions", json={"session_id": "77", "owner": "r"}).status_code == 200
    told = door.get("/v1/sessions/77").json()
    assert (told["length"], told["base"], told["owner"]) == (0, 0, "r")
    assert door.delete(f"/v1/sessions/77?epoch={told['epoch']}").status_code == 204
    assert refused(door.get("/v1/sessions/77")) == (404, "unknown_session")


def test_owner_loses_all(door: InProcess) -> None:
    for _ in range(2):
        door.open(owner="gone")
    assert door.delete("/v1/sessions?owner=gone").json() == {"closed": 2}
    assert refused(door.delete("/v1/sessions?owner=a%20b")) == (422, "schema")


def test_push_and_rewind_tell_length_base_epoch(door: InProcess, session: Any) -> None:
    cut = door.post(path(session, "/rewind"), json={"position": 2}).json()
    assert (cut["length"], cut["base"], cut["removed"]) == (2, 0, 4)
    assert cut["epoch"] == session["epoch"] + 1
    pushed = door.push(session["session_id"], 2, [4], epoch=cut["epoch"], ahead=False)
    assert (pushed["length"], pushed["appended"]) == (3, 1)
    answer = door.post(path(session, "/rewind"), json={"position": 6, "epoch": cut["epoch"]})
    assert refused(answer) == (409, "gap")
    door.post(path(session, "/rewind"), json={"position": 3, "epoch": cut["epoch"]})


@pytest.mark.parametrize("output", ["kv", "rows", "hash_ids"])
def test_reads_tell_shape_dtype_and_state(door: InProcess, session: Any, output: str) -> None:
    answer = door.get(path(session, f"/layers/14/{output}?position=0&count={len(IDS)}"))
    assert answer.status_code == 200, answer.text
    shape = wire.parse_shape(answer.headers[wire.SHAPE])
    spec = (answer.headers[wire.DTYPE], shape)
    assert wire.num_bytes(spec) == len(answer.content)
    assert answer.headers[wire.LENGTH] == str(len(IDS))
    assert answer.headers[wire.BASE] == "0"
    assert answer.headers[wire.EPOCH] == str(session["epoch"])
    assert (wire.DEAD in answer.headers) == (output != "hash_ids")
    assert "queue;dur=" in answer.headers["server-timing"]


def test_stored_rows_tell_their_encoding(door: InProcess, session: Any, model: Model) -> None:
    answer = door.get(path(session, "/layers/1/rows?position=0&encoding=stored"))
    assert answer.headers[wire.ENCODING] == model.backend.encodings[0]
    assert answer.headers[wire.DTYPE] == "U8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_residual_single_and_step_are_the_same_bytes(
    door: InProcess, session: Any, dtype: torch.dtype
) -> None:
    residual = torch.randn(len(IDS), 2, 64).to(dtype)
    single = door.post(path(session, "/layers/1/residual?position=0"), **tensor_body(residual))
    assert single.status_code == 200, single.text
    step = door.step(
        {"output": "residual", "layers": "1"},
        residual=residual,
        count=i32(len(IDS)),
        position=i64(0),
        session_id=i64(int(session["session_id"])),
    )
    assert bytes(tensors(step)["residual.1"].data) == single.content
    assert single.content != bytes(wire.as_view(residual).data)


def test_residual_refused_by_its_headers_is_not_read(door: InProcess, session: Any) -> None:
    target = path(session, "/layers/1/residual?position=0")
    for name, value, told in (
        (wire.SHAPE, "6,2", (400, "bad_tensor")),
        (wire.DTYPE, "F16", (400, "bad_tensor")),
        ("content-type", "application/json", (415, "media_type")),
        ("content-encoding", "gzip", (415, "media_type")),
    ):
        request = tensor_body(torch.zeros(6, 2, 64))
        request["headers"][name] = value
        assert refused(door.post(target, **request)) == told
    request = tensor_body(torch.zeros(6, 2, 64))
    del request["headers"][wire.SHAPE]
    assert refused(door.post(target, **request)) == (422, "schema")


def test_unread_positions_and_stale_epochs_are_refused(door: InProcess, session: Any) -> None:
    for query, told in (
        ("position=6", (409, "not_pushed")),
        ("position=6&wait_ms=1", (409, "not_pushed")),
        ("position=0&epoch=3", (409, "stale_epoch")),
        (f"position=0&count={MAX_TOKENS + 1}", (413, "too_many_tokens")),
    ):
        answer = door.get(path(session, f"/layers/1/kv?{query}"))
        assert refused(answer) == told
        assert "segments" not in answer.json()


def test_position_below_the_base(door: InProcess) -> None:
    made = door.open(position=9, lookback=[0, None, 6])
    assert refused(door.get(path(made, "/layers/1/kv?position=8"))) == (409, "history_truncated")
    door.delete(path(made))


def test_step_pushes_and_reads_ragged_segments(door: InProcess) -> None:
    first, second = door.open(), door.open()
    answer = door.step(
        {"output": "hash_ids", "layers": "14,1"},
        count=i32(3, 0),
        position=i64(0, 0),
        session_id=i64(int(first["session_id"]), int(second["session_id"])),
        token_ids=i32(0, 4, 6),
        mask=np.array([True, False, True]),
    )
    told = tensors(answer)
    assert wire.to_numpy(told["length"]).tolist() == [3, 0]
    assert wire.to_numpy(told["dead"]).tolist() == [0, 1, 0]
    assert told["hash_ids.14"].spec == ("I64", (3, 6))
    for made in (first, second):
        door.delete(path(made))


def test_step_lists_every_refused_segment(door: InProcess, session: Any) -> None:
    answer = door.step(
        KV,
        count=i32(1, 1, 1),
        position=i64(9, 0, 0),
        session_id=i64(int(session["session_id"]), 123456, int(session["session_id"])),
    )
    assert refused(answer) == (409, "not_pushed")
    codes = {s["index"]: s["code"] for s in answer.json()["segments"]}
    assert codes == {0: "not_pushed", 1: "unknown_session"}


@pytest.mark.parametrize(
    ("params", "change", "told"),
    [
        ({"output": "rows", "layers": "1", "encoding": "gzip"}, {}, "schema"),
        ({"output": "kv", "layers": "1", "encoding": "stored"}, {}, "schema"),
        ({"output": "kv", "layers": "1,1"}, {}, "schema"),
        ({"output": "kv", "layers": "2"}, {}, "unknown_layer"),
        ({"layers": "1"}, {}, "schema"),
        ({"output": "kv", "ahead": "1"}, {}, "schema"),
        ({"output": "kv", "wait_ms": "1001"}, {}, "schema"),
        (KV, {"count": i64(1)}, "bad_tensor"),
        (KV, {"count": i32(-1)}, "schema"),
        (KV, {"count": i32(MAX_TOKENS + 1)}, "too_many_tokens"),
        (KV, {"count": i32(2**31 - 1)}, "too_many_tokens"),
        (KV, {"position": i64(-1)}, "schema"),
        (KV, {"session_id": i64(0)}, "schema"),
        (KV, {"epoch": i64(-2)}, "schema"),
        (KV, {"mask": np.array([True])}, "schema"),
        (KV, {"hash_ids": i64(1)}, "schema"),
        (KV, {"residual": np.zeros((1, 2, 64), np.float32)}, "schema"),
        (KV, {"token_id": i64(0)}, "schema"),
        ({"output": "residual", "layers": "1"}, {}, "schema"),
    ],
)
def test_step_that_contradicts_itself(
    door: InProcess, session: Any, params: dict[str, str], change: dict[str, Any], told: str
) -> None:
    good = {"count": i32(1), "position": i64(0), "session_id": i64(int(session["session_id"]))}
    assert door.step(params, **(good | change)).json()["code"] == told


def test_step_without_session_or_anything(door: InProcess) -> None:
    empty = door.step(KV, count=i32(), position=i64(), session_id=i64())
    assert tensors(empty)["kv.1"].spec == ("BF16", (0, 3, 64))
    candidates = door.step(
        {"output": "none"},
        count=i32(1),
        position=i64(1),
        lookback=i32([-1, -1, 4]),
        token_ids=i64(6),
    )
    assert wire.to_numpy(tensors(candidates)["length"]).tolist() == [-1]
    rows = door.step(KV, count=i32(1), position=i64(0), hash_ids=i64([[10**9] * 6]))
    assert refused(rows) == (400, "row_out_of_range")


def test_sessions_are_limited(door: InProcess) -> None:
    while (answer := door.post("/v1/sessions", json={"owner": "many"})).status_code == 201:
        assert answer.json()["session_id"]
    assert refused(answer) == (429, "too_many_sessions")
    assert door.delete("/v1/sessions?owner=many").json()["closed"] <= MAX_SESSIONS


def test_another_table_is_refused(door: InProcess, model: Model) -> None:
    same = {wire.TABLE: model.checkpoint.identity}
    assert door.get("/v1/info", headers=same).status_code == 200
    answer = door.get("/v1/info", headers={wire.TABLE: "other"})
    assert refused(answer) == (412, "wrong_table")
    assert answer.json()["expected"] == model.checkpoint.identity


def test_what_is_no_route_or_method(door: InProcess) -> None:
    assert refused(door.get("/v1/nothing")) == (404, "not_found")
    assert refused(door.get("/openapi.json")) == (404, "not_found")
    answer = door.call("PUT", "/v1/sessions/7")
    assert refused(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET"


def test_body_where_none_is_taken(door: InProcess) -> None:
    assert refused(door.call("GET", "/v1/info", content=b"x")) == (400, "bad_request")


def test_foreign_host_is_misdirected(door: InProcess) -> None:
    for route in ("/livez", "/v1/info"):
        assert refused(door.get(route, host="evil.example:8321")) == (421, "misdirected")
