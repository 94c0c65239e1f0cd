"""Remembered heads of steps: what is decided of them once is decided alike again."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from engram_client import wire
from engram_core.backends import cpu
from engram_core.errors import Internal
from service.app import create_app
from service.loading import load_model
from service.settings import Settings
from service.state import Model
from service.step_recall import StepRecall
from tests.native.host_library import build_cpu_library
from tests.projecting import ProjectingNear, let_it_project
from tests.service.door import InProcess, i32, i64, step_body
from tests.service.talk import Wire, read_answer, talk_to

Ask = Callable[..., list[bytes]]
RESIDUAL = "/v1/step?output=residual&layers=1"


class Served:
    """An engine that belongs to a loop, whose asking thread makes what is missing.

    found, at_once: requests whose heads were remembered, and those of them answered in that call
    """

    def __init__(self, model: Model, near: ProjectingNear, runner: asyncio.Runner) -> None:
        self.model, self.near, self.runner = model, near, runner
        self.found = self.at_once = 0

    def ask(
        self, door: InProcess, *requests: bytes, between: Callable[[], object] = lambda: None
    ) -> list[bytes]:
        """Send requests over one connection, each after the answer to the one before."""
        answers: list[bytes] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            for request in requests:
                writer.write(request)
                answers.append(await read_answer(reader))
                between()
            return b""

        self.runner.run(talk_to(door, talk, Wire()))
        return [re.sub(rb"(server-timing|date|x-request-id): [^\r]*\r\n", b"", a) for a in answers]


def counted(of: Callable[..., bool], served: Served, name: str) -> Callable[..., bool]:
    def call(*arguments: Any) -> bool:
        is_so = of(*arguments)
        setattr(served, name, getattr(served, name) + is_so)
        return is_so

    return call


@pytest.fixture(scope="module")
def served(
    official_dir: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    threads = torch.get_num_threads()
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        patch.setattr(cpu, "find_library", lambda: library)
        model = load_model(official_dir, settings, lambda *_: None)
        made = Served(model, let_it_project(model.backend), runner)

        async def attach() -> None:
            model.engine.attach(asyncio.get_running_loop().call_soon)

        runner.run(attach())
        for name, count in (("answer", "found"), ("_answer_at_once", "at_once")):
            patch.setattr(StepRecall, name, counted(getattr(StepRecall, name), made, count))
        yield made
        model.close()
    torch.set_num_threads(threads)


@pytest.fixture
def door(served: Served, settings: Settings) -> Iterator[InProcess]:
    served.found = served.at_once = 0
    yield InProcess(create_app(settings, served.model), served.runner)
    served.near.is_busy = False
    served.model.engine.close_tenant("")


def post(body: dict[str, Any], target: str = RESIDUAL, **headers: str) -> bytes:
    told = {
        "Host": "localhost",
        "Content-Type": wire.TENSOR_MEDIA,
        **{name.replace("_", "-"): value for name, value in headers.items()},
        "Content-Length": str(len(body["content"])),
    }
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body["content"]


def step(session_id: int, position: int, count: int = 1, **tensors: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    residual = torch.randn((count, 2, 64), generator=generator).bfloat16()
    return step_body(
        count=i32(count),
        position=i64(position),
        session_id=i64(session_id),
        residual=residual,
        **tensors,
    )


def opened(door: InProcess) -> int:
    session_id = int(door.open()["session_id"])
    door.push(session_id, 0, [3, 4, 5, 6, 7, 8], ahead=False)
    return session_id


def plainly(served: Served, door: InProcess, request: bytes) -> bytes:
    """The answer of an app that has nothing to remember."""
    fresh = InProcess(create_app(door.state.settings, served.model), served.runner)
    return served.ask(fresh, request)[0]


def told(answer: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Head and tensors of an answer, but for the epoch, which is the session's own."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    views = wire.decode_tensors(body)
    return head, {name: bytes(view.data) for name, view in views.items() if name != "epoch"}


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_a_remembered_step_pushes_and_reads_as_any_other(
    served: Served, door: InProcess, is_busy: bool, count: int
) -> None:
    served.near.is_busy = is_busy
    first, second = opened(door), opened(door)
    ids = [i64(*range(i, i + count)) for i in range(4)]
    asked = [post(step(first, 6 + i * count, count, token_ids=ids[i])) for i in range(4)]
    again = [post(step(second, 6 + i * count, count, token_ids=ids[i])) for i in range(4)]
    answers = served.ask(door, *asked)
    assert (served.found, served.at_once) == (3, 0 if is_busy else 3)
    assert [told(a) for a in answers] == [told(plainly(served, door, each)) for each in again]
    assert door.state.pool_bytes == 0


@pytest.mark.parametrize("target", [RESIDUAL, RESIDUAL + "&wait_ms=5", "/v1/step?output=kv"])
def test_a_read_of_held_tokens_whatever_is_asked_for(
    served: Served, door: InProcess, target: str
) -> None:
    session_id = opened(door)
    body = step(session_id, 2, 3)
    if "kv" in target:
        body = step_body(count=i32(3), position=i64(2), session_id=i64(session_id))
    request = post(body, target)
    first, second, third = served.ask(door, request, request, request)
    assert served.found == 2
    assert served.at_once == (0 if "kv" in target else 2)
    assert first == second == third == plainly(served, door, request)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": i64(9)},
        {"position": i64(-1)},
        {"session_id": i64(1)},
        {"count": i32(2)},
        {"token_ids": i64(10**9)},
        {"residual": torch.ones((1, 2, 64), dtype=torch.float16)},
        {"position": i64(5), "token_ids": i64(1)},
    ],
)
def test_a_body_that_is_wrong_behind_a_remembered_head_is_refused_as_ever(
    served: Served, door: InProcess, changes: dict[str, Any]
) -> None:
    session_id = opened(door)
    good = step(session_id, 6, token_ids=i64(4))
    fields = {"count": i32(1), "position": i64(7), "session_id": i64(session_id)}
    fields |= {"residual": torch.ones((1, 2, 64)).bfloat16(), "token_ids": i64(4), **changes}
    bad = step_body(**fields)
    padded = len(good["content"]) == len(bad["content"])
    answer = served.ask(door, post(good), post(bad))[1]
    assert served.found == padded
    assert served.at_once == 0
    assert answer == plainly(served, door, post(bad))
    assert not answer.startswith(b"HTTP/1.1 200 ")


def test_a_body_in_pieces_is_received_like_any(served: Served, door: InProcess) -> None:
    session_id = opened(door)
    whole = post(step(session_id, 1, 2))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answers = []
        for cut in (len(whole), len(whole) - 1, whole.index(b"\r\n\r\n") + 4, 40):
            writer.write(whole[:cut])
            await asyncio.sleep(0.01)
            writer.write(whole[cut:])
            answers.append(told(await read_answer(reader))[1])
        assert all(answer == answers[0] for answer in answers)
        return b""

    served.runner.run(talk_to(door, talk, Wire()))
    assert served.found == 2  # in the last, not even the head came at once
    assert served.at_once == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("X_Request_Id", "mine"), ("Traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
     ("Connection", "close"), ("X_Unknown", "1")],
)  # fmt: skip
def test_other_headers_are_not_remembered(
    served: Served, door: InProcess, name: str, value: str
) -> None:
    request = post(step(opened(door), 1), **{name: value})
    for _ in range(2):
        served.ask(door, request)
    assert served.found == 0


def test_a_draining_service_refuses_what_it_remembers(served: Served, door: InProcess) -> None:
    request = post(step(opened(door), 1))

    def drain() -> None:
        door.state.is_draining = True

    try:
        answers = served.ask(door, request, request, between=drain)
    finally:
        door.state.is_draining = False
    assert b"draining" in answers[1]
    assert served.at_once == 0


def test_a_removed_key_is_refused(served: Served, settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice use {hashlib.sha256(b'secret').hexdigest()}\n")
    changed = settings.model_copy(update={"keys_file": keys})
    door = InProcess(create_app(changed, served.model), served.runner)
    empty = step_body(count=i32(), position=i64(), session_id=i64())
    request = post(empty, "/v1/step?output=none", Authorization="Bearer secret")
    served.found = 0

    def remove() -> None:
        keyring = door.state.access.keyring
        assert keyring is not None
        if served.found:
            keyring._keys = ()

    answers = served.ask(door, request, request, request, between=remove)
    assert answers[1].startswith(b"HTTP/1.1 200 ")
    assert answers[2].startswith(b"HTTP/1.1 401 ")


def test_steps_answered_at_once_are_counted_like_others(served: Served, door: InProcess) -> None:
    request = post(step(opened(door), 1))
    served.ask(door, *[request] * 5)
    assert served.at_once == 4
    text = door.state.metrics.exposition().decode()
    found = re.search(r'engram_requests_total\{.*code="ok".*operation="step".*\} (\S+)', text)
    found = found or re.search(
        r'engram_requests_total\{.*operation="step".*code="ok".*\} (\S+)', text
    )
    assert found is not None
    assert float(found[1]) == 5
    sent = re.search(r"^engram_sent_bytes_total (\S+)", text, re.M)
    received = re.search(r"^engram_received_bytes_total (\S+)", text, re.M)
    assert sent is not None
    assert received is not None
    body = len(step(1, 1)["content"])
    assert float(received[1]) >= 5 * body
    assert float(sent[1]) >= 5 * 256


def test_a_failed_device_is_told_behind_a_remembered_head(
    served: Served, door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = post(step(opened(door), 1))

    def fail() -> None:
        failure = Internal("the device is gone")
        monkeypatch.setattr(served.model.engine._scheduler, "failure", failure)

    first, second = served.ask(door, request, request, between=fail)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 503 ")
    assert b"shard_down" in second
    monkeypatch.undo()


def test_a_head_that_is_too_long_is_refused_each_time(served: Served, door: InProcess) -> None:
    request = post(step(opened(door), 1), Accept="a" * 70_000)
    answers = [served.ask(door, request)[0] for _ in range(2)]
    assert all(b" 400 " in answer[:20] for answer in answers)
    assert served.found == 0
