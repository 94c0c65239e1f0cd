"""A plain step of one segment is answered in integers: with the bytes of the general way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engram_client import wire
from engram_core.backends import cpu
from engram_core.engine import Engine
from service.app import create_app
from service.loading import load_model
from service.settings import Settings
from tests.native.host_library import build_cpu_library
from tests.projecting import ProjectingNear, let_it_project
from tests.service.door import InProcess, i32, i64, step_body


class Attached:
    """A door over an engine whose loop makes what is missing itself, as beside a GPU.

    num_at_once: steps that were answered at once
    """

    def __init__(self, door: InProcess, engine: Engine, near: ProjectingNear) -> None:
        self.door, self.engine, self.near = door, engine, near
        self.num_at_once = 0
        engine.answer = partial(self._count, engine.answer)  # type: ignore[method-assign]

    def _count(self, answer: Callable[..., list[Any]], asks: list[Any]) -> list[Any]:
        answers = answer(asks)
        self.num_at_once += sum(each is not None for each in answers)
        return answers

    def ask(self, query: str = "output=residual&layers=1", **tensors: Any) -> httpx.Response:
        return self.door.post(f"/v1/step?{query}", **step_body(**tensors))


@pytest.fixture(scope="module")
def attached(
    official_dir: Path,
    settings: Settings,
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Attached]:
    threads = torch.get_num_threads()
    library = build_cpu_library(tmp_path_factory.mktemp("cpu"), "-O3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "find_library", lambda: library)
        model = load_model(official_dir, settings, lambda *_: None)
    near = let_it_project(model.backend)

    async def attach() -> None:
        model.engine.attach(asyncio.get_running_loop().call_soon)

    runner.run(attach())
    yield Attached(InProcess(create_app(settings, model), runner), model.engine, near)
    model.close()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _close_sessions(attached: Attached) -> Iterator[None]:
    yield
    attached.engine.close_tenant("")
    attached.near.is_busy = False


def residual(count: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn((count, 2, 64), generator=generator).to(dtype)


def tensors(session: int, position: int, count: int, **more: Any) -> dict[str, Any]:
    return {
        "count": i32(count),
        "position": i64(position),
        "session_id": i64(session),
        "residual": residual(count, more.pop("dtype", torch.bfloat16)),
        **more,
    }


def plain(answer: httpx.Response) -> tuple[int, dict[str, Any], bytes]:
    """What does not differ from one request to the next."""
    own = ("x-request-id", "server-timing", "date")
    return (
        answer.status_code,
        {k: v for k, v in answer.headers.items() if k not in own},
        answer.content,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("with_epoch", [False, True])
def test_a_step_that_appends_gives_the_bytes_of_the_general_way(
    attached: Attached, dtype: Any, ids_dtype: Any, count: int, with_epoch: bool
) -> None:
    ids = (np.arange(count) * 5 % 11).astype(ids_dtype)
    answers = []
    for is_busy in (False, True):
        attached.near.is_busy = is_busy
        session, epoch = open_at_four(attached)
        more = {"epoch": i64(epoch)} if with_epoch else {}
        before = attached.num_at_once
        answer = attached.ask(**tensors(session, 4, count, token_ids=ids, dtype=dtype, **more))
        assert answer.status_code == 200, answer.text
        assert attached.num_at_once - before == (not is_busy)
        found = wire.decode_tensors(answer.content)
        assert wire.to_numpy(found["length"]).tolist() == [4 + count]
        assert wire.to_numpy(found["epoch"]).tolist() == [epoch]
        at = answer.content.index(wire.to_numpy(found["epoch"]).tobytes())
        answers.append(answer.content[:at] + answer.content[at + 8 :])  # an opening's own epoch
        attached.near.is_busy = False  # both leave the session as it is to be
        again = attached.ask(**tensors(session, 3, count + 1, dtype=dtype))
        answers[-1] += wire.decode_tensors(again.content)["residual.1"].data.tobytes()
        attached.engine.close_tenant("")
    assert answers[0] == answers[1]


def open_at_four(attached: Attached) -> tuple[int, int]:
    """A session of four ids, one of them dead, whose kv nobody has asked for."""
    opened = attached.door.open()
    mask = [True, True, False, True]
    attached.door.push(opened["session_id"], 0, [3, 4, 5, 6], mask=mask, ahead=False)
    return int(opened["session_id"]), int(opened["epoch"])


def test_a_read_of_what_is_held_is_answered_at_once_too(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = open_at_four(attached)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda *_: pytest.fail("the general way"))
        first = attached.ask(**tensors(session, 1, 3))
    with monkeypatch.context() as patch:
        patch.setattr("service.plain_steps.read", lambda *_: None)
        second = attached.ask(**tensors(session, 1, 3))
    assert plain(first) == plain(second)
    assert bytes(wire.decode_tensors(first.content)["dead"].data) == b"\0\1\0"


@pytest.mark.parametrize(
    ("query", "changes"),
    [
        ("output=residual&layers=1", {"epoch": i64(77)}),
        ("output=residual&layers=1", {"epoch": i64(-2)}),
        ("output=residual&layers=1", {"session_id": i64(1)}),
        ("output=residual&layers=1", {"session_id": i64(0)}),
        ("output=residual&layers=1", {"position": i64(5)}),
        ("output=residual&layers=1", {"position": i64(-1)}),
        ("output=residual&layers=1", {"position": i64(3)}),
        ("output=residual&layers=1", {"count": i32(2)}),
        ("output=residual&layers=1", {"count": i64(1)}),
        ("output=residual&layers=1", {"count": i32(-1)}),
        ("output=residual&layers=1", {"position": i64(4, 4)}),
        ("output=residual&layers=1", {"token_ids": i64(10**9)}),
        ("output=residual&layers=1", {"token_ids": i64(-1)}),
        ("output=residual&layers=1", {"token_ids": i64(1, 2)}),
        ("output=residual&layers=1", {"token_ids": np.array([1.0], np.float32)}),
        ("output=residual&layers=1", {"mask": np.array([1], np.uint8)}),
        ("output=residual&layers=1", {"mask": np.array([0], np.uint8)}),
        ("output=residual&layers=1", {"mask": np.array([2], np.uint8)}),
        ("output=residual&layers=1", {"lookback": i32(1, 2, 3).reshape(1, 3)}),
        ("output=residual&layers=1", {"residual": torch.ones((1, 2, 32))}),
        ("output=residual&layers=1", {"residual": torch.ones((1, 2, 64), dtype=torch.float16)}),
        ("output=residual&layers=1&on_conflict=truncate", {}),
        ("output=residual&layers=1&on_conflict=truncate", {"position": i64(2)}),
        ("output=residual&layers=1,2", {}),
        ("output=residual&layers=9", {}),
        ("output=none&layers=1", {}),
    ],
)
def test_what_is_unusual_is_answered_or_refused_as_ever(
    attached: Attached, monkeypatch: pytest.MonkeyPatch, query: str, changes: dict[str, Any]
) -> None:
    answers = []
    for is_plain in (True, False):
        session, _ = open_at_four(attached)
        asked = {**tensors(session, 4, 1, token_ids=i64(7)), **changes}
        before = attached.num_at_once
        with monkeypatch.context() as patch:
            if not is_plain:
                patch.setattr("service.plain_steps.read", lambda *_: None)
            answer = attached.ask(query, **asked)
        assert attached.num_at_once == before
        length = attached.door.get(f"/v1/sessions/{session}").json()["length"]
        text = answer.text if answer.status_code >= 400 else "fine"
        answers.append((answer.status_code, text.replace(str(session), "S"), length))
    (status, one, length), other = answers[0], answers[1]
    assert (status, length) == (other[0], other[2])
    assert masked(one) == masked(other[1])


def masked(text: str) -> str:
    """Without the numbers that an opening draws."""
    return "".join("#" if c.isdigit() else c for c in text).replace("#", "")


def test_a_page_or_the_room_that_is_full_takes_the_general_way(attached: Attached) -> None:
    session = int(attached.door.open()["session_id"])
    for position, is_at_once in ((0, 0), (1, 1), (2, 1)):
        before = attached.num_at_once
        answer = attached.ask(**tensors(session, position, 1, token_ids=i64(3)))
        assert answer.status_code == 200
        assert attached.num_at_once - before == is_at_once
    for start in range(3, 254, 50):
        attached.door.push(session, start, [5] * min(50, 254 - start), ahead=False)
    for position, is_at_once in ((254, 1), (255, 1), (256, 0), (257, 1)):
        before = attached.num_at_once
        assert attached.ask(**tensors(session, position, 1, token_ids=i64(3))).status_code == 200
        assert attached.num_at_once - before == is_at_once


def few(
    attached: Attached, sessions: list[int], position: int, counts: list[int], **more: Any
) -> dict[str, Any]:
    return {
        "count": i32(*counts),
        "position": i64(*[position] * len(counts)),
        "session_id": i64(*sessions),
        "residual": residual(sum(counts), more.pop("dtype", torch.bfloat16)),
        **more,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[1, 1], [1, 3, 2], [1] * 16])
def test_a_few_segments_give_the_bytes_of_the_general_way(
    attached: Attached, dtype: Any, counts: list[int]
) -> None:
    answers = []
    for is_plain in (True, False):
        sessions = [open_at_four(attached)[0] for _ in counts]
        ids = (np.arange(sum(counts)) * 5 % 11).astype(np.int32)
        before = attached.num_at_once
        with pytest.MonkeyPatch.context() as patch:
            if not is_plain:
                patch.setattr("service.plain_steps.read", lambda *_: None)
            pushed = attached.ask(**few(attached, sessions, 4, counts, token_ids=ids, dtype=dtype))
            read = attached.ask(**few(attached, sessions, 3, counts, dtype=dtype))
        assert attached.num_at_once - before == 2 * is_plain
        assert pushed.status_code == read.status_code == 200, pushed.text
        views = [wire.decode_tensors(each.content) for each in (pushed, read)]
        assert wire.to_numpy(views[0]["length"]).tolist() == [4 + count for count in counts]
        answers.append(
            [{name: bytes(v.data) for name, v in each.items() if name != "epoch"} for each in views]
        )
        attached.engine.close_tenant("")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"count": i32(1, 0)},
        {"count": i32(1, -1)},
        {"count": i32(2, 1)},
        {"position": i64(4, -1)},
        {"position": i64(4)},
        {"session_id": i64(0, 0)},
        {"epoch": i64(-2, -1)},
        {"epoch": i64(77, -1)},
        {"token_ids": i64(3)},
        {"token_ids": i64(3, 10**9)},
        {"mask": np.array([1, 1], np.uint8)},
        {"residual": torch.ones((2, 2, 32))},
        {"position": i64(4, 3)},
        {"same": True},
    ],
)
def test_a_few_segments_that_are_unusual_are_answered_as_ever(
    attached: Attached, changes: dict[str, Any]
) -> None:
    answers = []
    for is_plain in (True, False):
        sessions = [open_at_four(attached)[0] for _ in range(2)]
        if changes.get("same"):
            sessions[1] = sessions[0]
        asked = {**few(attached, sessions, 4, [1, 1], token_ids=i64(7, 8)), **changes}
        asked.pop("same", None)
        before = attached.num_at_once
        with pytest.MonkeyPatch.context() as patch:
            if not is_plain:
                patch.setattr("service.plain_steps.read", lambda *_: None)
            answer = attached.ask(**asked)
        assert attached.num_at_once == before
        lengths = [attached.engine.get("", session).length for session in sessions]
        text = masked(answer.text) if answer.status_code >= 400 else "fine"
        answers.append((answer.status_code, text, lengths))
    assert answers[0] == answers[1]


PUSHES = [[1], [3], [1, 1], [2, 1, 3], [1] * 32]


@pytest.mark.parametrize("query", ["output=none", "output=none&layers=14&ahead=false"])
@pytest.mark.parametrize("counts", PUSHES)
def test_pushes_alone_give_the_bytes_of_the_general_way(
    attached: Attached, query: str, counts: list[int]
) -> None:
    answers = []
    for is_plain in (True, False):
        sessions = [open_at_four(attached)[0] for _ in counts]
        ids = (np.arange(sum(counts)) * 5 % 11).astype(np.int64)
        asked = few(attached, sessions, 4, counts, token_ids=ids)
        del asked["residual"]
        before = attached.num_at_once
        with pytest.MonkeyPatch.context() as patch:
            if not is_plain:
                patch.setattr("service.plain_steps.read", lambda *_: None)
            answer = attached.ask(query, **asked)
        assert attached.num_at_once - before == is_plain
        assert answer.status_code == 200, answer.text
        views = wire.decode_tensors(answer.content)
        assert list(views) == ["length", "epoch", "dead"]
        answers.append({name: bytes(v.data) for name, v in views.items() if name != "epoch"})
        lengths = [attached.engine.get("", session).length for session in sessions]
        assert lengths == [4 + count for count in counts]
        attached.engine.close_tenant("")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("query", "changes"),
    [
        ("output=none", {"count": i32(1, 0)}),
        ("output=none", {"position": i64(4, 3)}),
        ("output=none", {"epoch": i64(77, -1)}),
        ("output=none", {"token_ids": i64(3, 10**9)}),
        ("output=none", {"mask": np.array([1, 0], np.uint8)}),
        ("output=none", {"lookback": i32(1, 2, 3).reshape(1, 3)}),
        ("output=none&on_conflict=truncate", {}),
        ("output=none&layers=9", {}),
        ("output=none", {"same": True}),
    ],
)
def test_pushes_that_are_unusual_are_answered_as_ever(
    attached: Attached, query: str, changes: dict[str, Any]
) -> None:
    answers = []
    for is_plain in (True, False):
        sessions = [open_at_four(attached)[0] for _ in range(2)]
        if changes.get("same"):
            sessions[1] = sessions[0]
        asked = {**few(attached, sessions, 4, [1, 1], token_ids=i64(7, 8)), **changes}
        asked.pop("same", None)
        del asked["residual"]
        before = attached.num_at_once
        with pytest.MonkeyPatch.context() as patch:
            if not is_plain:
                patch.setattr("service.plain_steps.read", lambda *_: None)
            answer = attached.ask(query, **asked)
        assert attached.num_at_once == before
        lengths = [attached.engine.get("", session).length for session in sessions]
        text = masked(answer.text) if answer.status_code >= 400 else "fine"
        answers.append((answer.status_code, text, lengths))
    assert answers[0] == answers[1]
