"""The gRPC door: the same verbs, bits, codes and bounds as HTTP (`engram.v1.Engram`)."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from engram_client.proto import engram_pb2 as pb
from engram_core.errors import EngramError, StepRefused, UnknownSession
from service import operations
from service.problems import RequestTimeout, kind_of
from service.rpc import calls, streams
from service.rpc.calls import MAX_TRAILER_BYTES, fitting_text
from service.rpc.server import NAME
from service.rpc.steps import StepWork
from service.rpc.streams import MAX_PIPELINED
from service.rpc.unary import VERBS
from tests.service.door import i32, i64, step_body
from tests.service.rpc_client import (
    Rpc,
    refusal_of,
    step_message,
    tensors_of,
    tensors_of_http,
    until,
)

IDS = (3, 1, 4, 1, 5)


@pytest.fixture(scope="module")
def rpc(make_rpc: Callable[..., Rpc]) -> Rpc:
    return make_rpc()


@pytest.fixture
def session(rpc: Rpc) -> Iterator[int]:
    """A session that holds IDS."""
    session_id = rpc.open()
    rpc.push(session_id, 0, IDS)
    yield session_id
    rpc.close(session_id)


def residual(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn((num_tokens, 2, 64), generator=generator).to(dtype)


def segment(session_id: int, position: int = 0, count: int = len(IDS)) -> dict[str, Any]:
    return {"count": i32(count), "position": i64(position), "session_id": i64(session_id)}


# ---- verbs


def test_verbs_of_a_session(rpc: Rpc) -> None:
    opened = rpc.call("OpenSession", pb.OpenSessionRequest(owner="runner-1"))
    assert (opened.created, opened.length, opened.owner) == (True, 0, "runner-1")
    pushed = rpc.push(opened.session_id, 0, IDS)
    assert (pushed.length, pushed.appended, pushed.epoch) == (5, 5, opened.epoch)
    cut = rpc.call("Rewind", pb.RewindRequest(session_id=opened.session_id, position=2))
    assert (cut.length, cut.removed, cut.epoch) == (2, 3, opened.epoch + 1)
    told = rpc.call("GetSession", pb.GetSessionRequest(session_id=opened.session_id))
    assert (told.length, told.epoch, len(told.compressed_lookback)) == (2, cut.epoch, 2)
    closed = rpc.call("CloseSession", pb.CloseSessionRequest(owner="runner-1"))
    assert closed.sessions == 1
    gone = rpc.call("GetSession", pb.GetSessionRequest(session_id=opened.session_id))
    assert gone.code == "unknown_session"


def test_session_is_the_one_of_http(rpc: Rpc, session: int) -> None:
    told = rpc.call("GetSession", pb.GetSessionRequest(session_id=session))
    document = rpc.http.get(f"/v1/sessions/{session}").json()
    assert document["session_id"] == str(session)
    assert {name: document[name] for name in ("length", "base", "epoch")} == {
        "length": told.length,
        "base": told.base,
        "epoch": told.epoch,
    }
    assert document["compressed_lookback"] == list(told.compressed_lookback)


def test_session_at_a_position_with_dead_lookback(rpc: Rpc) -> None:
    request = pb.OpenSessionRequest(session_id=1 << 50, position=9, lookback=[-1, 3, 4])
    told = rpc.call("OpenSession", request)
    assert (told.length, told.base, told.compressed_lookback[0]) == (9, 9, -1)
    assert not rpc.call("OpenSession", request).created
    rpc.close(told.session_id)


def test_fork_and_truncating_push(rpc: Rpc, session: int) -> None:
    fork = rpc.call("OpenSession", pb.OpenSessionRequest(fork_of=session, position=3))
    pushed = rpc.push(fork.session_id, 1, [2], truncate=True)
    assert (pushed.length, pushed.removed, pushed.epoch) == (2, 2, fork.epoch + 1)
    rpc.close(fork.session_id)


def test_info_is_the_document_of_http(rpc: Rpc) -> None:
    assert json.loads(rpc.call("GetInfo").json) == rpc.http.get("/v1/info").json()


# ---- bits


@pytest.mark.parametrize("output", ["none", "residual", "kv", "rows", "stored", "hash_ids"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_answers_have_the_bytes_of_http(
    rpc: Rpc, session: int, output: str, dtype: torch.dtype
) -> None:
    tensors, stored = segment(session), output == "stored"
    output = "rows" if stored else output
    params: dict[str, Any] = {"output": output, **({"encoding": "stored"} if stored else {})}
    layers = [14] if output == "residual" else [14, 1]
    if output == "residual":
        tensors["residual"] = residual(len(IDS), dtype)
    message = step_message(output, tensors=tensors, layers=layers, stored=stored)
    told = tensors_of(rpc.call("Step", message))
    answer = rpc.http.step({**params, "layers": ",".join(map(str, layers))}, **tensors)
    assert told == tensors_of_http(answer.content)
    assert told == tensors_of(rpc.stream([message])[0])


@given(data=st.data())
def test_both_doors_agree_on_every_step(rpc: Rpc, data: st.DataObject) -> None:
    """Steps without a session, right and wrong: the same tensors, or the same code."""
    counts = data.draw(st.lists(st.integers(-1, 3), max_size=3))
    total = max(0, sum(counts)) + data.draw(st.sampled_from([0, 0, 0, 1]))
    small = st.integers(-1, 7)
    lists = {
        "count": np.array(counts, np.int32),
        "position": np.array([data.draw(st.integers(-1, 5)) for _ in counts], np.int64),
        "lookback": np.array([[data.draw(small)] * 3 for _ in counts], np.int32).reshape(-1, 3),
        "token_ids": np.array([data.draw(small) for _ in range(total)], np.int64),
        "residual": residual(total, torch.float32),
    }
    left_out = data.draw(st.sets(st.sampled_from([*lists]), max_size=1))
    output = data.draw(st.sampled_from(["none", "residual", "kv", "rows", "hash_ids"]))
    if output != "residual":
        left_out = {*left_out, "residual"}
    tensors = {name: value for name, value in lists.items() if name not in left_out}
    layers = data.draw(st.sampled_from([[1], [14], [1, 14], [1, 1], [2]]))
    answer = rpc.http.post(
        f"/v1/step?output={output}&layers={','.join(map(str, layers))}", **step_body(**tensors)
    )
    reply = rpc.call("Step", step_message(output, tensors=tensors, layers=layers))
    if answer.status_code == 200:
        assert tensors_of(reply) == tensors_of_http(answer.content)
    else:
        assert reply.document == answer.json()
    assert rpc.state.pool_bytes == 0


# ---- refusals


@pytest.mark.parametrize(
    ("verb", "message", "code"),
    [
        ("Push", pb.PushRequest(session_id=7, position=0, token_ids=[1]), "unknown_session"),
        ("Push", pb.PushRequest(session_id=7, token_ids=[1]), "schema"),
        ("Push", pb.PushRequest(session_id=7, position=0, mask=[True]), "schema"),
        ("Push", pb.PushRequest(session_id=-7, position=0), "schema"),
        ("Push", pb.PushRequest(session_id=7, position=0, token_ids=[1], epoch=-1), "schema"),
        ("Push", pb.PushRequest(session_id=7, position=0, token_ids=[1] * 65), "too_many_tokens"),
        ("Rewind", pb.RewindRequest(session_id=7), "schema"),
        ("GetSession", pb.GetSessionRequest(), "schema"),
        ("CloseSession", pb.CloseSessionRequest(), "schema"),
        ("CloseSession", pb.CloseSessionRequest(owner="a", epoch=1), "schema"),
        ("CloseSession", pb.CloseSessionRequest(owner="no name"), "schema"),
        ("OpenSession", pb.OpenSessionRequest(position=4), "schema"),
        ("OpenSession", pb.OpenSessionRequest(fork_of=9), "unknown_session"),
        ("Step", pb.StepRequest(), "schema"),
        ("Step", pb.StepRequest(output=77), "schema"),
        ("Step", pb.StepRequest(output=pb.OUTPUT_KV, layers=[3]), "unknown_layer"),
        ("Step", pb.StepRequest(output=pb.OUTPUT_KV, wait_ms=1001), "schema"),
        ("Step", pb.StepRequest(output=pb.OUTPUT_KV, stored=True), "schema"),
        ("Step", b"\xff\xff", "bad_request"),
        ("GetInfo", b"\x78\x01", "schema"),
        ("GetSession", b"\x08\x07\x78\x01", "schema"),
    ],
)  # fmt: skip
def test_refusal(rpc: Rpc, verb: str, message: Any, code: str) -> None:
    assert rpc.call(verb, message).code == code


@pytest.mark.parametrize(
    "tensor",
    [
        pb.Tensor(dtype="I32", shape=[1], data=bytes(3)),
        pb.Tensor(dtype="I32", shape=[-1], data=b""),
        pb.Tensor(dtype="I32", shape=[1 << 62, 4], data=b""),
        pb.Tensor(dtype="I32", shape=[1] * 9, data=bytes(4)),
        pb.Tensor(dtype="int32", shape=[1], data=bytes(4)),
    ],
)
def test_tensor_that_is_none_is_refused(rpc: Rpc, tensor: pb.Tensor) -> None:
    message = pb.StepRequest(output=pb.OUTPUT_NONE, tensors={"count": tensor})
    assert rpc.call("Step", message).code == "bad_tensor"


def test_unknown_tensor_names_the_nearest(rpc: Rpc, session: int) -> None:
    tensors = {**segment(session), "token_id": i64(1)}
    refused = rpc.call("Step", step_message("kv", tensors=tensors))
    assert (refused.code, refused.document["expected"]) == ("schema", "token_ids")


def test_unknown_metadata_is_refused(rpc: Rpc) -> None:
    refused = rpc.call("GetInfo", metadata=(("x-engram-tabel", "1"),))
    assert (refused.code, refused.document["expected"]) == ("schema", "x-engram-table")


def test_metadata_beyond_latin_1_is_read(rpc: Rpc) -> None:
    """grpcio sends no such metadata, but takes it in, from whoever does."""
    context = SimpleNamespace(
        invocation_metadata=lambda: (("x-engram-owner", "\u20ac"), ("x-engram-\u20ac", "")),
        peer=lambda: "peer",
    )
    _, headers = calls.begin(rpc.state, operations.INFO, cast(calls.Context, context))
    assert headers == [
        (b"x-engram-owner", b"\xe2\x82\xac"),
        (b"x-engram-\xe2\x82\xac", b""),
    ]


def test_other_table_is_refused(rpc: Rpc) -> None:
    metadata = (("x-engram-table", "another"),)
    refused = rpc.call("GetInfo", metadata=metadata)
    assert (refused.status, refused.code) == ("FAILED_PRECONDITION", "wrong_table")


def test_unknown_method_is_unimplemented(rpc: Rpc) -> None:
    async def ask() -> str:
        with pytest.raises(aio.AioRpcError) as told:
            await rpc.channel.unary_unary(f"/{NAME}/Nothing")(b"")
        return str(told.value.code().name)

    assert rpc.http.runner.run(ask()) == "UNIMPLEMENTED"


def test_refused_segments_fit_into_metadata(rpc: Rpc) -> None:
    size = 60
    tensors = {
        "count": np.ones(size, np.int32),
        "position": np.zeros(size, np.int64),
        "session_id": np.arange(1 << 60, (1 << 60) + size),
    }
    message = step_message("kv", tensors=tensors)
    refused = rpc.call("Step", message)
    kept, left_out = refused.document["segments"], refused.document["segments_left_out"]
    assert len(kept) + left_out == size
    assert kept
    whole = refusal_of(rpc.stream([message])[0].problem)
    assert len(whole.document["segments"]) == size


def test_any_refusal_fits_into_metadata() -> None:
    error = StepRefused([(0, UnknownSession("x" * 100_000))])
    assert len(fitting_text(error)) <= MAX_TRAILER_BYTES
    assert json.loads(fitting_text(error))["status"] == kind_of(error).status


@given(data=st.data())
def test_no_message_gets_an_undocumented_answer(rpc: Rpc, data: st.DataObject) -> None:
    """Every verb, any fields: a reply or a documented refusal (`rpc_client.check`)."""
    verb = data.draw(st.sampled_from([*VERBS]))
    message = data.draw(messages(VERBS[verb].request))
    raw = message.SerializeToString()
    if data.draw(st.sampled_from([False, False, True])) and raw:
        place = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:place] + bytes([data.draw(st.integers(0, 255))]) + raw[place + 1 :]
    reply = rpc.call(verb, raw)
    if isinstance(reply, pb.Session):
        rpc.close(reply.session_id)
    if verb == "Step":
        rpc.stream([raw, raw])
    assert rpc.state.pool_bytes == 0


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a kind; numbers that are often right, and small sessions that may exist."""
    numbers = st.one_of(st.integers(0, 9), st.integers(-(1 << 63), (1 << 63) - 1))

    def value_of(field: Any) -> st.SearchStrategy[Any]:
        if field.name == "tensors":
            names = st.sampled_from(["count", "position", "session_id", "token_ids", "mask"])
            return st.dictionaries(names, tensors(), max_size=5)
        one: st.SearchStrategy[Any] = {
            field.CPPTYPE_INT64: numbers,
            field.CPPTYPE_UINT64: st.integers(0, (1 << 64) - 1),
            field.CPPTYPE_BOOL: st.booleans(),
            field.CPPTYPE_STRING: st.sampled_from(["a", "", "runner 1", "é"]),
            field.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 4, 5, 6]),
        }[field.cpp_type]
        return st.lists(one, max_size=4) if field.is_repeated else one

    fields = {field.name: value_of(field) for field in kind.DESCRIPTOR.fields}
    if "owner" in fields and "fork_of" not in fields:
        del fields["owner"]  # of the oneof that closes: one of the two
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


def tensors() -> st.SearchStrategy[pb.Tensor]:
    def make(dtype: str, values: list[int], is_short: bool) -> pb.Tensor:
        data = np.array(values, {"I32": np.int32, "I64": np.int64}.get(dtype, np.uint8)).tobytes()
        return pb.Tensor(dtype=dtype, shape=[len(values)], data=data[:-1] if is_short else data)

    dtypes = st.sampled_from(["I32", "I64", "U8", "BOOL", "F64"])
    values = st.lists(st.integers(0, 6), max_size=4)
    return st.builds(make, dtypes, values, st.sampled_from([False] * 7 + [True]))


# ---- streams


def test_stream_applies_in_order_and_answers_by_id(rpc: Rpc) -> None:
    """Each step pushes one id behind the last: any other order would be a gap."""
    session_id = rpc.open()
    replies = rpc.stream(
        step_message(
            "hash_ids",
            request_id=1000 + i,
            tensors={**segment(session_id, i, 1), "token_ids": i64(i % 5)},
        )
        for i in range(3 * MAX_PIPELINED)
    )
    lengths = {
        r.request_id: int(np.frombuffer(r.tensors["length"].data, "<i8")[0]) for r in replies
    }
    assert lengths == {1000 + i: i + 1 for i in range(3 * MAX_PIPELINED)}
    rpc.close(session_id)


def test_stream_outlives_refusals(rpc: Rpc, session: int) -> None:
    good = step_message("kv", request_id=1, tensors=segment(session))
    gap = step_message("kv", request_id=2, tensors=segment(session, 9, 1))
    replies = {r.request_id: r for r in rpc.stream([good, gap, b"\xff", good])}
    assert refusal_of(replies[2].problem).code == "not_pushed"
    assert refusal_of(replies[0].problem).code == "bad_request"
    assert tensors_of(replies[1]) == tensors_of(rpc.call("Step", good))


def test_steps_of_a_stream_are_free_when_they_are_answered(
    rpc: Rpc, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection, which their bodies would wait for in pinned memory."""
    made: list[weakref.ref[StepWork]] = []

    class Watched(StepWork):
        def __init__(self, *arguments: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*arguments)

    monkeypatch.setattr(streams, "StepWork", Watched)
    good, gap = segment(session), segment(session, 9, 1)
    gc.collect()
    gc.disable()
    try:
        rpc.stream([step_message("kv", tensors=tensors) for tensors in (good, gap, good)])
        assert [each() for each in made] == [None] * 3
    finally:
        gc.enable()


def test_stream_pushes_what_its_own_read_waits_for(rpc: Rpc) -> None:
    session_id = rpc.open()
    waiting = step_message("kv", request_id=1, tensors=segment(session_id, 0, 1), wait_ms=1000)
    tensors = {**segment(session_id, 0, 1), "token_ids": i64(3)}
    replies = rpc.stream([waiting, step_message("none", request_id=2, tensors=tensors)])
    assert {reply.request_id for reply in replies} == {1, 2}
    assert not any(reply.HasField("problem") for reply in replies)
    rpc.close(session_id)


# ---- what is held


def waiting_step(session_id: int) -> pb.StepRequest:
    tensors = {**segment(session_id, len(IDS), 1), "residual": residual(1, torch.float32)}
    return step_message("residual", layers=[1], tensors=tensors, wait_ms=1000)


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("method", ["Step", "Stream"])
def test_client_that_leaves_frees_what_it_held(
    make_rpc: Callable[..., Rpc], method: str, how: str
) -> None:
    rpc = make_rpc()
    session_id = rpc.open()
    rpc.push(session_id, 0, IDS)

    async def leave() -> None:
        kind = rpc.channel.stream_stream if method == "Stream" else rpc.channel.unary_unary
        message = waiting_step(session_id).SerializeToString()
        timeout = 0.3 if how == "deadline" else None
        if method == "Stream":
            call = kind(f"/{NAME}/{method}")(timeout=timeout)
            await call.write(message)
        else:
            call = kind(f"/{NAME}/{method}")(message, timeout=timeout)
        engine = rpc.state.model.engine
        await until(lambda: engine.counters["waiting"] == 1)
        assert rpc.state.pool_bytes > 0
        if how == "cancel":
            call.cancel()
        if how == "disconnect":
            await rpc.channel.close()
        await until(lambda: not rpc.state.pool_bytes and not rpc.state.num_active)
        await until(lambda: engine.counters["waiting"] == 0)

    rpc.http.runner.run(leave())
    rpc.state.model.engine.close_session("", session_id)


def leave_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is sent from now on nothing is taken in time."""
    monkeypatch.setattr("service.rpc.unary.SMALL_BODY_BYTES", 0)
    monkeypatch.setattr("service.rpc.calls.GRACE_S", 0.0)
    monkeypatch.setattr("service.rpc.calls.MIN_BYTES_PER_S", 1e15)


def test_stream_whose_answers_are_not_taken_is_ended(
    make_rpc: Callable[..., Rpc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends steps and reads no answer, until what is on its way holds no more."""
    rpc = make_rpc()
    session_id = rpc.open()
    rpc.push(session_id, 0, [1] * 64)
    message = step_message("kv", tensors=segment(session_id, 0, 64)).SerializeToString()
    open_streams, told = rpc.server._streams._streams, list[Exception]()
    leave_no_time(monkeypatch)
    refuse = calls.refuse

    async def told_to(context: calls.Context, error: EngramError) -> None:
        told.append(error)
        await refuse(context, error)

    monkeypatch.setattr(calls, "refuse", told_to)

    async def ask() -> str:
        call = rpc.channel.stream_stream(f"/{NAME}/Stream")(iter([message] * 640))
        await call.initial_metadata()  # it has begun, and may have ended
        await until(lambda: not open_streams)
        with pytest.raises(aio.AioRpcError) as heard:
            assert len([answer async for answer in call]) < 640
        await until(lambda: not rpc.state.pool_bytes and not rpc.state.num_active)
        return str(heard.value.code().name)

    # gRPC's client says INTERNAL, whatever it is told, if it was sending when the stream ended.
    assert rpc.http.runner.run(ask()) in ("DEADLINE_EXCEEDED", "INTERNAL")
    assert [type(error) for error in told] == [RequestTimeout]
    rpc.state.model.engine.close_session("", session_id)


def test_answer_that_is_not_taken_ends_the_call(
    make_rpc: Callable[..., Rpc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time at all to take it, no client takes it in time."""
    rpc = make_rpc()
    session_id = rpc.open()
    rpc.push(session_id, 0, [1] * 64)
    message = step_message("kv", tensors=segment(session_id, 0, 64)).SerializeToString()
    leave_no_time(monkeypatch)

    async def ask() -> str:
        call = rpc.channel.stream_stream(f"/{NAME}/Step")(iter([message]))
        with pytest.raises(aio.AioRpcError) as told:
            assert not [answer async for answer in call]
        await until(lambda: not rpc.state.pool_bytes and not rpc.state.num_active)
        return str(told.value.code().name)

    assert rpc.http.runner.run(ask()) == "DEADLINE_EXCEEDED"
    rpc.state.model.engine.close_session("", session_id)


def test_message_beyond_the_limit_is_refused(make_rpc: Callable[..., Rpc]) -> None:
    """Just beyond by the service, in words; far beyond by gRPC."""
    rpc = make_rpc()
    limit = rpc.call("GetInfo").json
    limit = json.loads(limit)["limits"]["max_body_bytes"]
    for extra, code in ((1, "body_too_large"), (1 << 20, "")):
        data = bytes(limit + extra)
        message = pb.StepRequest(
            output=pb.OUTPUT_NONE, tensors={"count": pb.Tensor(data=data)}
        ).SerializeToString()
        refused = asyncio_refusal(rpc, message)
        assert refused == ("RESOURCE_EXHAUSTED", code)
        assert rpc.state.pool_bytes == 0


def asyncio_refusal(rpc: Rpc, message: bytes) -> tuple[str, str]:
    async def ask() -> tuple[str, str]:
        with pytest.raises(aio.AioRpcError) as told:
            await rpc.channel.unary_unary(f"/{NAME}/Step")(message)
        trailer = dict(told.value.trailing_metadata() or ())
        return told.value.code().name, str(trailer.get("engram-code", ""))

    return rpc.http.runner.run(ask())


def test_no_room_is_overloaded_and_the_stream_lives_on(rpc: Rpc, session: int) -> None:
    message = step_message("kv", request_id=5, tensors=segment(session))
    with rpc.state.pool.lease("") as lease:
        lease.add(rpc.state.pool.max_request_bytes, "all of it")
        lease.add(rpc.state.pool.max_request_bytes, "all of it")
        refused = rpc.call("Step", message)
        assert (refused.status, refused.code) == ("RESOURCE_EXHAUSTED", "overloaded")
        assert rpc.stream([message])[0].problem.retry_after_ms > 0
    assert tensors_of(rpc.stream([message])[0])


# ---- who asks, and when


def test_loading_and_draining_are_unavailable(make_rpc: Callable[..., Rpc]) -> None:
    loading = make_rpc(loaded=False)
    assert loading.call("OpenSession").code == "loading"
    draining = make_rpc()
    session_id = draining.open()
    draining.state.is_draining = True
    message = step_message("kv", tensors=segment(session_id))
    assert draining.call("OpenSession").code == "draining"
    assert draining.stream([message])[0].problem.code == "draining"
    assert draining.call("GetInfo").json


def test_requests_are_counted_by_code(make_rpc: Callable[..., Rpc]) -> None:
    rpc = make_rpc()
    rpc.call("GetSession", pb.GetSessionRequest(session_id=1))
    rpc.stream([pb.StepRequest(), pb.StepRequest()])
    text = rpc.http.get("/metrics").text
    assert 'engram_requests_total{code="unknown_session",operation="get_session"} 1.0' in text
    assert 'engram_requests_total{code="schema",operation="step"} 2.0' in text


def test_stored_size_of_an_answer_is_admitted(rpc: Rpc, session: int) -> None:
    """What is held while a step waits is its message and its answer."""
    message = waiting_step(session)

    async def look() -> int:
        call = rpc.channel.unary_unary(f"/{NAME}/Step")(message.SerializeToString())
        await until(lambda: rpc.state.pool_bytes)
        held = rpc.state.pool_bytes
        call.cancel()
        await until(lambda: not rpc.state.pool_bytes)
        return held

    answer = math.prod((1, 2, 64)) * 4 + 8 + 8 + 1
    assert rpc.http.runner.run(look()) == message.ByteSize() + answer
