"""A plain residual step on a stream is answered in integers: with the bytes of the general way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc import aio

from engram_client.proto import engram_pb2 as pb
from engram_core.backends import cpu
from service.app import create_app
from service.loading import load_model
from service.problems import ShardDown
from service.rpc import calls, messages
from service.rpc.plain import PlainSteps, plain_of
from service.rpc.server import NAME
from service.rpc.streams import MAX_PIPELINED
from service.settings import Settings
from tests.native.host_library import build_cpu_library
from tests.service.door import InProcess
from tests.service.rpc_client import Rpc, refusal_of, step_message, tensors_of, until


@pytest.fixture(scope="module")
def attached(
    official_dir: Path,
    settings: Settings,
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Rpc, Any]]:
    """A door over an engine of its own, which the loop's thread may read for itself."""
    threads = torch.get_num_threads()
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_library", lambda: library)
        model = load_model(official_dir, settings, lambda *_: None)
    app = create_app(settings.model_copy(update={"grpc_port": 0}), model)
    rpc = Rpc(InProcess(app, runner)).start()

    async def attach() -> None:
        model.engine.attach(asyncio.get_running_loop().call_soon)

    runner.run(attach())
    yield rpc, model.engine
    rpc.stop()
    model.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def session(attached: tuple[Rpc, Any]) -> int:
    """Twelve positions, two of them dead; the kv of the first eight is in the store."""
    rpc, engine = attached
    session_id = rpc.open()
    mask = [True] * 12
    mask[2] = mask[3] = False
    rpc.push(session_id, 0, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], mask=mask, ahead=False)
    rpc.stream([message(session_id, 0, 8)])
    assert engine.drain(30)
    return session_id


def message(
    session_id: int, position: int, count: int, dtype: Any = torch.bfloat16, **more: Any
) -> pb.StepRequest:
    generator = torch.Generator().manual_seed(position)
    residual = torch.randn((count, 2, 64), generator=generator).to(dtype)
    tensors = {
        "count": np.array([count], np.int32),
        "position": np.array([position]),
        "session_id": np.array([session_id]),
        "residual": residual,
        **more.pop("tensors", {}),
    }
    return step_message("residual", tensors=tensors, layers=[1], **more)


def both_ways(
    attached: tuple[Rpc, Any], asked: pb.StepRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[pb.StepReply, pb.StepReply, int]:
    """The plain way's answer and the general one's; how many direct reads there were."""
    rpc, engine = attached
    before = engine.counters["near_batches"]
    (plain,) = rpc.stream([asked])
    num_direct = engine.counters["near_batches"] - before
    with monkeypatch.context() as patch:
        patch.setattr("service.rpc.steps.plain_of", lambda *_: None)
        (general,) = rpc.stream([asked])
    return plain, general, int(num_direct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("position", "count"), [(0, 1), (0, 8), (1, 4), (7, 1)])
@pytest.mark.parametrize("epoch", [{}, {"epoch": np.array([-1])}])
def test_both_ways_give_the_same_message(
    attached: tuple[Rpc, Any],
    session: int,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    position: int,
    count: int,
    epoch: dict[str, Any],
) -> None:
    asked = message(session, position, count, dtype, tensors=epoch)
    monkeypatch.setattr(type(attached[1]), "step", lambda *_: pytest.fail("the general way"))
    (plain,) = attached[0].stream([asked])
    monkeypatch.undo()
    _, general, num_direct = both_ways(attached, asked, monkeypatch)
    assert num_direct == 1
    assert tensors_of(plain) == tensors_of(general)
    assert set(tensors_of(plain)) == {"length", "epoch", "dead", "residual.1"}


def test_kv_that_is_not_in_the_store_takes_the_general_way(
    attached: tuple[Rpc, Any], session: int
) -> None:
    rpc, engine = attached
    misses = engine.counters["kv_misses"]
    (reply,) = rpc.stream([message(session, 10, 2)])
    assert set(tensors_of(reply)) == {"length", "epoch", "dead", "residual.1"}
    assert engine.counters["kv_misses"] == misses + 2
    assert rpc.state.pool_bytes == 0, "what the plain way had admitted is given back"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tensors": {"epoch": np.array([77])}}, "stale_epoch"),
        ({"tensors": {"epoch": np.array([-2])}}, "schema"),
        ({"tensors": {"session_id": np.array([1])}}, "unknown_session"),
        ({"tensors": {"position": np.array([11])}}, "not_pushed"),
        ({"tensors": {"position": np.array([-1])}}, "schema"),
        ({"tensors": {"count": np.array([3], np.int32)}}, "bad_tensor"),
        ({"tensors": {"count": np.array([2])}}, "bad_tensor"),
        ({"tensors": {"position": np.array([0, 0])}}, "bad_tensor"),
        ({"tensors": {"residual": torch.ones((2, 2, 32))}}, "bad_tensor"),
        ({"tensors": {"residual": torch.ones((2, 2, 64), dtype=torch.float16)}}, "bad_tensor"),
        ({"tensors": {"mask": np.array([1, 1], np.uint8)}}, "schema"),
        ({"stored": True}, "schema"),
        ({"wait_ms": 1001}, "schema"),
    ],
)
def test_what_is_wrong_is_refused_as_the_general_way_does(
    attached: tuple[Rpc, Any],
    session: int,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    code: str,
) -> None:
    asked = message(session, 0, 2, **changes)
    plain, general, num_direct = both_ways(attached, asked, monkeypatch)
    assert refusal_of(plain.problem) == refusal_of(general.problem)
    assert plain.problem.code == code
    assert num_direct == 0


def test_unknown_field_of_a_tensor_is_refused(attached: tuple[Rpc, Any], session: int) -> None:
    asked = message(session, 0, 2)
    asked.tensors["count"].MergeFromString(b"\x78\x01")
    (reply,) = attached[0].stream([asked])
    assert reply.problem.code == "schema"


def test_unary_step_takes_the_same_way(attached: tuple[Rpc, Any], session: int) -> None:
    rpc, _ = attached
    asked = message(session, 0, 2)
    (streamed,) = rpc.stream([asked])
    assert tensors_of(rpc.call("Step", asked)) == tensors_of(streamed)


@pytest.mark.parametrize("method", ["Step", "Stream"])
def test_sending_is_timed(attached: tuple[Rpc, Any], session: int, method: str) -> None:
    rpc, _ = attached
    asked = message(session, 0, 2)

    def times() -> float:
        text = rpc.state.metrics.exposition().decode()
        found = re.search(r'engram_stage_seconds_count\{stage="send"\} (\S+)', text)
        return float(found[1]) if found else 0.0

    before = times()
    if method == "Step":
        rpc.call("Step", asked)
    else:
        rpc.stream([asked])
    rpc.http.runner.run(until(lambda: not rpc.state.num_active))
    assert times() == before + 1


def test_messages_spelled_as_one_before_are_read_by_their_bytes(
    attached: tuple[Rpc, Any], session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc, _ = attached
    asked = [
        message(session, position, 4, request_id=request_id)
        for position, request_id in [(0, 1), (1, 2), (3, 300), (4, 0), (2, 2**64 - 1)]
    ]
    alone = [rpc.stream([each])[0] for each in asked]
    parsed: list[bytes] = []
    parse = messages.parse

    def noted(kind: Any, raw: bytes) -> Any:
        parsed.append(raw)
        return parse(kind, raw)

    monkeypatch.setattr(messages, "parse", noted)
    assert rpc.stream(asked) == alone
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tensors": {"epoch": np.array([77])}}, "stale_epoch"),
        ({"tensors": {"epoch": np.array([-2])}}, "schema"),
        ({"tensors": {"session_id": np.array([1])}}, "unknown_session"),
        ({"tensors": {"position": np.array([11])}}, "not_pushed"),
        ({"tensors": {"count": np.array([3], np.int32)}}, "bad_tensor"),
        ({"layers": [2]}, "unknown_layer"),
        ({"wait_ms": 1001}, "schema"),
    ],
)
def test_what_is_wrong_behind_a_plain_step_is_refused_alike(
    attached: tuple[Rpc, Any], session: int, changes: dict[str, Any], code: str
) -> None:
    rpc, _ = attached
    layers = changes.pop("layers", [1])
    epoch = "epoch" in changes.get("tensors", {})
    first = message(session, 0, 2, tensors={"epoch": np.array([-1])} if epoch else {})
    wrong = message(session, 0, 2, request_id=7, **changes)
    del wrong.layers[:]
    wrong.layers.extend(layers)
    (alone,) = rpc.stream([wrong])
    _, again, right = rpc.stream([first, wrong, first])
    assert again == alone
    assert (again.request_id, again.problem.code) == (7, code)
    assert right.problem.code == ""


def test_any_change_of_a_remembered_message_is_parsed(
    attached: tuple[Rpc, Any], session: int
) -> None:
    """Every byte outside the numbers and the residual counts."""
    model = attached[0].state.model
    asked = message(session, 0, 2, request_id=9)
    raw = asked.SerializeToString()
    step = plain_of(asked, model.checkpoint.geometry, 16)
    assert step is not None
    known = PlainSteps()
    known.learn(raw, step, model)
    found = known.find(raw)
    assert found is not None
    assert (*found[:-1], bytes(found.residual)) == step
    free = sum(len(asked.tensors[name].data) for name in ("session_id", "position", "residual"))
    changed = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(len(raw))]
    assert sum(known.find(each) is not None for each in changed) == free + 1  # and the request id
    for cut in range(len(raw)):
        assert known.find(raw[:cut]) is None


def plain_bytes(session: int, count: int, num_messages: int) -> list[bytes]:
    """Messages that differ in their request id, 1, 2, ... on."""
    made = [message(session, 0, count, request_id=i + 1) for i in range(num_messages)]
    return [each.SerializeToString() for each in made]


def test_a_client_that_sends_all_before_it_reads_is_answered(
    attached: tuple[Rpc, Any], session: int
) -> None:
    """Answers fill what is on its way; the stream is read on, as far as it may be."""
    rpc, _ = attached

    async def ask() -> list[int]:
        call = rpc.channel.stream_stream(f"/{NAME}/Stream")()
        for raw in plain_bytes(session, 8, MAX_PIPELINED):
            await call.write(raw)
        await call.done_writing()
        replies = [pb.StepReply.FromString(await call.read()) for _ in range(MAX_PIPELINED)]
        assert await call.read() is aio.EOF
        assert not any(reply.HasField("problem") for reply in replies)
        return [reply.request_id for reply in replies]

    assert rpc.http.runner.run(ask()) == [*range(1, MAX_PIPELINED + 1)]
    assert (rpc.state.pool_bytes, rpc.state.num_active) == (0, 0)


@pytest.mark.parametrize("how", ["cancel", "no time"])
def test_a_stream_that_ends_frees_what_was_answered_at_once(
    attached: tuple[Rpc, Any], session: int, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rpc, _ = attached
    streams = rpc.server._streams._streams
    raws = plain_bytes(session, 8, 640)

    async def ask() -> None:
        call = rpc.channel.stream_stream(f"/{NAME}/Stream")(iter(raws))
        await until(lambda: rpc.state.pool_bytes)
        if how == "no time":
            monkeypatch.setattr("service.rpc.calls.GRACE_S", 0.0)
            monkeypatch.setattr("service.rpc.calls.MIN_BYTES_PER_S", 1e15)
            with pytest.raises(aio.AioRpcError):  # its writer may find out before its reader
                assert len([answer async for answer in call]) < 640
        else:
            call.cancel()
        await until(lambda: not streams and not rpc.state.pool_bytes and not rpc.state.num_active)

    rpc.http.runner.run(ask())


def test_answers_of_both_ways_cross_on_one_stream(attached: tuple[Rpc, Any]) -> None:
    rpc, engine = attached
    session = rpc.open()
    rpc.push(session, 0, [3, 4, 5, 6], ahead=False)
    rpc.stream([message(session, 0, 4)])
    assert engine.drain(30)
    plain = [message(session, 0, 4, request_id=i) for i in range(1, 31)]
    late = message(session, 4, 1, request_id=99, wait_ms=1000)
    tensors = {
        "count": np.array([1], np.int32),
        "position": np.array([4]),
        "session_id": np.array([session]),
        "token_ids": np.array([7]),
    }
    push = step_message("none", tensors=tensors, request_id=98)
    replies = rpc.stream([plain[0], late, *plain[1:], push, *plain[:5]])
    assert sorted(r.request_id for r in replies) == sorted([*range(1, 31), 98, 99, *range(1, 6)])
    assert not any(reply.HasField("problem") for reply in replies)
    rpc.close(session)


def test_a_stream_that_ends_while_an_answer_is_on_its_way_tells_why(
    attached: tuple[Rpc, Any], session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc, _ = attached
    stopping = rpc.server._streams
    num_begun: list[int] = []

    async def ask() -> str:
        call = rpc.channel.stream_stream(f"/{NAME}/Stream")()
        first, *rest = plain_bytes(session, 8, 4)
        await call.write(first)
        await call.read()

        async def write(*_: Any) -> None:
            num_begun.append(1)
            await asyncio.Event().wait()

        monkeypatch.setattr(calls.Pace, "write", write)
        for raw in rest:
            await call.write(raw)
        (stream,) = stopping._streams
        await until(lambda: len(stream._open) == 3)
        assert len(num_begun) == 1, "one write at a time"
        stopping.close()
        with pytest.raises(aio.AioRpcError) as told:
            await call.read()
        await until(lambda: not stopping._streams and not rpc.state.pool_bytes)
        return str(told.value.code().name)

    assert rpc.http.runner.run(ask()) == "UNAVAILABLE"


def test_a_remembered_step_after_a_failure_is_refused_like_another(
    attached: tuple[Rpc, Any], session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc, _ = attached

    def fail(_: object) -> Any:
        raise ShardDown("the device has failed")

    async def ask() -> list[str]:
        call = rpc.channel.stream_stream(f"/{NAME}/Stream")()
        codes = []
        for raw in plain_bytes(session, 8, 2):
            await call.write(raw)
            codes.append(pb.StepReply.FromString(await call.read()).problem.code)
            monkeypatch.setattr(type(rpc.state), "pool", property(fail))
        monkeypatch.undo()
        await call.done_writing()
        assert await call.read() is aio.EOF
        return codes

    assert rpc.http.runner.run(ask()) == ["", "shard_down"]


def test_what_is_begun_runs_at_once_and_tells_how_it_ends(runner: asyncio.Runner) -> None:
    async def begin() -> list[Any]:
        told: list[Any] = []
        awaited = [asyncio.get_running_loop().create_future() for _ in range(3)]

        async def wait(index: int) -> None:
            told.append(index)
            await asyncio.sleep(0)
            await awaited[index]

        begun = [calls.Begun(wait(index), told.append) for index in range(3)]
        assert told == [0, 1, 2]
        await asyncio.sleep(0)
        awaited[0].set_result(None)
        awaited[1].set_exception(fault := ValueError("no"))
        await asyncio.sleep(0)
        begun[2].cancel()
        await asyncio.sleep(0)
        assert told[3:5] == [None, fault]
        return told

    assert isinstance(runner.run(begin())[5], asyncio.CancelledError)
