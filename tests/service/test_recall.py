"""Remembered heads: what is decided of them once is decided alike again, and nothing else is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvloop

from engram_core.engine_types import OpenRequest
from service import heads
from service.recall import Recall
from tests.service.conftest import MAX_TOKENS
from tests.service.door import InProcess, tensor_body
from tests.service.talk import ask

BODY = tensor_body(torch.ones((2, 2, 64), dtype=torch.bfloat16))["content"]
TARGET = "/v1/sessions/{}/layers/{}/residual?{}"


@pytest.fixture(scope="module")
def uv_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as made:
        yield made


@pytest.fixture
def sessions(door: InProcess) -> Iterator[list[str]]:
    """Two sessions of MAX_TOKENS tokens."""
    made = [door.open()["session_id"] for _ in range(2)]
    for session_id in made:
        door.push(session_id, 0, [2] * MAX_TOKENS)
    yield made
    door.state.is_draining = False
    for session_id in made:
        door.delete(f"/v1/sessions/{session_id}")


class Found:
    """How many heads were found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        answer = Recall.answer

        def counted(*arguments: Any) -> bool:
            is_found = answer(*arguments)
            self.count += is_found
            return is_found

        monkeypatch.setattr(Recall, "answer", counted)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    return Found(monkeypatch)


def read(target: str, **headers: str) -> bytes:
    told = {
        "Host": "localhost",
        "Content-Type": "application/octet-stream",
        "X-Engram-Shape": "2,2,64",
        "X-Engram-Dtype": "BF16",
        **{name.replace("_", "-"): value for name, value in headers.items()},
        "Content-Length": str(len(BODY)),
    }
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join([*lines, "", ""]).encode() + BODY


def test_a_remembered_head_gives_the_same_bytes(
    uv_runner: asyncio.Runner, door: InProcess, sessions: list[str], found: Found
) -> None:
    request = read(TARGET.format(sessions[0], 1, "position=3"))
    first, second = ask(uv_runner, door, request, request)
    assert found.count == 1
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first == second


@pytest.mark.parametrize(
    "query",
    ["position=0", f"position={MAX_TOKENS - 1}", "position=0&epoch=1", "position=01", "position=-1",
     "position=0&position=0", "position=0&count=2", "position=0&count=1", "", "position=0&speed=1",
     "position=9223372036854775808", "position=0&wait_ms=1"],
)  # fmt: skip
@pytest.mark.parametrize("layer", [1, 14, 2, "01", "99999999999"])
def test_another_path_or_query_is_answered_as_if_nothing_were_remembered(
    uv_runner: asyncio.Runner, door: InProcess, sessions: list[str], query: str, layer: object
) -> None:
    known = read(TARGET.format(sessions[0], 1, "position=3"))
    for session_id in (sessions[1], "9223372036854775808", "7", "0", "07"):
        request = read(TARGET.format(session_id, layer, query))
        assert ask(uv_runner, door, known, request)[1] == ask(uv_runner, door, request)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("X_Request_Id", "mine"), ("Traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
     ("If_None_Match", "x"), ("X_Unknown", "1")],
)  # fmt: skip
def test_other_headers_are_not_remembered(
    uv_runner: asyncio.Runner,
    door: InProcess,
    sessions: list[str],
    found: Found,
    name: str,
    value: str,
) -> None:
    request = read(TARGET.format(sessions[0], 1, "position=3"), **{name: value})
    ask(uv_runner, door, request, request)
    assert found.count == 0


def test_a_draining_service_refuses_what_it_remembers(
    uv_runner: asyncio.Runner, door: InProcess, sessions: list[str]
) -> None:
    def drain() -> None:
        door.state.is_draining = True

    request = read(TARGET.format(sessions[0], 1, "position=3"))
    answers = ask(uv_runner, door, request, request, between=drain)
    assert answers[1].startswith(b"HTTP/1.1 503 ")


def test_a_removed_key_is_refused(
    uv_runner: asyncio.Runner, make_door: Callable[..., InProcess], tmp_path: Path, found: Found
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice use {hashlib.sha256(b'secret').hexdigest()}\n")
    door = make_door(keys_file=keys)
    engine = door.state.model.engine
    opened = engine.open("alice", OpenRequest()).session_id
    engine.push("alice", opened, 0, np.array([2, 2]))
    request = read(TARGET.format(opened, 1, "position=0"), Authorization="Bearer secret")
    others = read(TARGET.format(opened, 1, "position=0"), Authorization="Bearer other")

    def remove() -> None:
        keyring = door.state.access.keyring
        assert keyring is not None
        if found.count == 1:
            keyring._keys = ()

    answers = ask(uv_runner, door, request, request, others, request, between=remove)
    statuses = [int(answer.split(b" ")[1]) for answer in answers]
    assert (statuses, found.count) == ([200, 200, 401, 401], 1)
    engine.close_tenant("alice")


def test_only_so_many_are_remembered(
    uv_runner: asyncio.Runner,
    door: InProcess,
    sessions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "MAX_KNOWN", 3)
    target = TARGET.format(sessions[0], 1, "position=3")
    ask(uv_runner, door, *(read(target, User_Agent=f"a{i}") for i in range(8)))
    assert len(door.app.state.fast_path._recall._known) <= 3
