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
from service import exchange, step_recall, turn
from service.app import create_app
from service.loading import load_model
from service.settings import Settings
from service.state import Model
from service.step_recall import StepRecall
from service.transport import Connection
from service.turn import Turn
from tests.native.host_library import build_cpu_library
from tests.projecting import ProjectingNear, let_it_project
from tests.service.door import InProcess, i32, i64, step_body
from tests.service.talk import Wire, ask, read_answer, talk_to, timeless

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
        return ask(self.runner, door, *requests, between=between)


def counted(of: Callable[..., bool], served: Served, name: str) -> Callable[..., bool]:
    def call(*arguments: Any) -> bool:
        is_so = of(*arguments)
        setattr(served, name, getattr(served, name) + is_so)
        return is_so

    return call


def told_by(tell: Callable[..., None], served: Served) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        served.at_once += 1
        tell(*arguments)

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
        patch.setattr(StepRecall, "answer", counted(StepRecall.answer, made, "found"))
        patch.setattr(StepRecall, "_tell", told_by(StepRecall._tell, made))
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


def test_a_long_head_is_not_remembered(
    served: Served, door: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would find it, and it would be kept for as long as the process lives, 256 times."""
    kept: list[int] = []
    keep = StepRecall.keep

    def keep_one(recall: StepRecall, *rest: Any) -> None:
        keep(recall, *rest)
        kept.append(len(recall._known))

    monkeypatch.setattr(StepRecall, "keep", keep_one)
    session = opened(door)
    for size in (5_000, 50):
        request = post(step(session, 1), Accept="a" * size)
        assert b" 200 " in served.ask(door, request)[0][:20]
    assert kept == [0, 1]


class Together:
    """Requests that come in one turn of the loop, each over a connection of its own.

    taken: called by the service with a connection whose request waits for the end of the turn
    """

    def __init__(self, served: Served, door: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self._served, self._door = served, door
        self.turns: list[int] = []
        self.taken: Callable[[Connection], object] = lambda line: None
        take, answer = Turn.take, Turn._answer

        def take_one(turn: Turn, line: Any, *rest: Any) -> None:
            take(turn, line, *rest)
            if line.is_waiting:
                self.taken(line)

        def answer_all(turn: Turn, asked: list[Any]) -> None:
            self.turns.append(len(asked))
            answer(turn, asked)

        monkeypatch.setattr(Turn, "take", take_one)
        monkeypatch.setattr(Turn, "_answer", answer_all)

    def ask(self, known: bytes, *requests: bytes, cut: int = 0) -> list[bytes]:
        """Answers, b"" where the connection was closed. cut: all but the end of each comes before;
        known: is answered before, so that its head is remembered"""
        answers: list[bytes] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(known)
            await read_answer(reader)
            host, port = writer.get_extra_info("peername")
            lines = [await asyncio.open_connection(host, port) for _ in requests]
            self.turns.clear()
            if cut:
                for (_, each), request in zip(lines, requests, strict=True):
                    each.write(request[:cut])
                await asyncio.sleep(0.02)
            for (_, each), request in zip(lines, requests, strict=True):
                each.write(request[cut:])
            for each, _ in lines:
                try:
                    answers.append(await read_answer(each))
                except (asyncio.IncompleteReadError, ConnectionError):
                    answers.append(b"")
            for _, each in lines:
                each.close()
            return b""

        self._served.runner.run(talk_to(self._door, talk, Wire()))
        return [*map(timeless, answers)]


@pytest.fixture
def together(served: Served, door: InProcess, monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(served, door, monkeypatch)


def push(session_id: int, token: int, position: int = 6) -> bytes:
    return post(step(session_id, position, token_ids=i64(token)))


def lengths(served: Served, sessions: list[int]) -> list[int]:
    return [served.model.engine.get("", session_id).length for session_id in sessions]


@pytest.mark.parametrize("cut", [0, 400])
def test_what_came_in_one_turn_is_one_batch(
    served: Served, door: InProcess, together: Together, cut: int
) -> None:
    sessions, twins = [opened(door) for _ in range(5)], [opened(door) for _ in range(5)]
    engine, known = served.model.engine, push(opened(door), 1)
    before = engine.counters
    answers = together.ask(known, *[push(each, i) for i, each in enumerate(sessions)], cut=cut)
    after = engine.counters
    assert together.turns == [5]
    assert served.at_once == (0 if cut else 5)
    assert after["near_batches"] == before["near_batches"] + 2  # and of what was asked before
    assert after["tokens_pushed"] == before["tokens_pushed"] + 6
    want = [plainly(served, door, push(each, i)) for i, each in enumerate(twins)]
    assert [told(answer) for answer in answers] == [told(answer) for answer in want]
    assert lengths(served, sessions) == lengths(served, twins) == [7] * 5
    assert door.state.pool_bytes == 0


def test_one_that_is_refused_or_unusual_in_a_turn_is_told_as_ever(
    served: Served, door: InProcess, together: Together
) -> None:
    sessions = [opened(door) for _ in range(3)]
    requests = [
        push(sessions[0], 3),
        push(sessions[1], 4, position=9),
        push(sessions[0], 5),
        push(sessions[2], 10**9),
        push(sessions[2], 6),
        push(1, 6),
    ]
    answers = together.ask(push(opened(door), 1), *requests)
    assert [int(answer[9:12]) for answer in answers] == [200, 409, 409, 400, 200, 404]
    assert lengths(served, sessions) == [7, 6, 7]
    again = [plainly(served, door, request) for request in requests]
    refused = [i for i, answer in enumerate(answers) if not answer.startswith(b"HTTP/1.1 200")]
    assert [answers[i] for i in refused] == [again[i] for i in refused]
    assert told(answers[0]) == told(again[0])  # the same push again is answered alike


def test_a_turn_that_the_device_cannot_take_now_goes_to_the_lane(
    served: Served, door: InProcess, together: Together
) -> None:
    sessions = [opened(door) for _ in range(3)]
    served.near.is_busy = True
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers] == [b"200"] * 3
    assert served.at_once == 0
    assert lengths(served, sessions) == [7] * 3


def test_a_connection_that_waits_for_the_end_of_the_turn_is_not_idle(
    served: Served, door: InProcess, together: Together
) -> None:
    """The end of the service cuts TLS connections that are: what is asked would be lost."""
    sessions, idle = [opened(door) for _ in range(3)], []

    def look(line: Connection) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line, "scheme", "https")
            idle.append(line.is_idle_tls)

    together.taken = look
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert idle == [False] * 4  # and of what was asked before
    assert [answer[9:12] for answer in answers] == [b"200"] * 3


def test_whoever_leaves_before_the_end_of_the_turn_has_asked_nothing(
    served: Served, door: InProcess, together: Together
) -> None:
    sessions = [opened(door) for _ in range(3)]
    seen: list[Connection] = []

    def leave(line: Connection) -> None:
        seen.append(line)
        if len(seen) == 2:
            line.transport.abort()

    together.taken = leave
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers].count(b"200") == 2
    assert sorted(lengths(served, sessions)) == [6, 7, 7]
    text = door.state.metrics.exposition().decode()
    assert re.search(r'engram_requests_total\{[^}]*code="client_gone"[^}]*\} 1.0', text)
    assert door.state.pool_bytes == 0


@pytest.mark.parametrize("what", ["next", "eof", "shutdown", "idle"])
def test_what_is_asked_is_answered_before_anything_else_happens_on_its_connection(
    served: Served, door: InProcess, together: Together, what: str
) -> None:
    sessions = [opened(door) for _ in range(2)]
    live = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    does: dict[str, Callable[[Connection], object]] = {
        "next": lambda line: line.came(memoryview(live)),
        "eof": lambda line: line.eof_received() or line.transport.close(),
        "shutdown": lambda line: line.shutdown(),
        "idle": lambda line: line.timeout_keep_alive_handler(),
    }
    together.taken = does[what]
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers] == [b"200"] * 2
    assert together.turns == [1, 1]
    assert lengths(served, sessions) == [7, 7]


def test_an_idle_connection_is_not_closed_before_the_lane_has_answered(
    served: Served, door: InProcess, together: Together
) -> None:
    """Its time is over in the turn in which it asks what is not answered in that turn."""
    sessions = [opened(door) for _ in range(2)]
    served.near.is_busy = True
    together.taken = lambda line: line.timeout_keep_alive_handler()
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers] == [b"200"] * 2
    assert lengths(served, sessions) == [7, 7]


class Holding:
    """A transport that keeps what is written until the next turn, as one whose peer is slow."""

    def __init__(self, line: Connection) -> None:
        self._line, self._transport = line, line.transport

    def writelines(self, buffers: list[Any]) -> None:
        self._line.loop.call_soon(self._transport.writelines, buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_an_answer_longer_than_its_request_is_not_kept_where_the_next_is_placed(
    served: Served, door: InProcess, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [opened(door) for _ in range(4)]
    for each in sessions:
        door.push(str(each), 6, [4, 9], ahead=False)
    requests = [
        post(
            step_body(
                count=i32(8),
                position=i64(0),
                session_id=i64(each),
                residual=torch.full((8, 2, 64), 0.5 + i).bfloat16(),
            )
        )
        for i, each in enumerate(sessions)
    ]
    want = [plainly(served, door, each) for each in requests]
    num_bytes = len(requests[0].partition(b"\r\n\r\n")[2])
    assert num_bytes < len(want[0].partition(b"\r\n\r\n")[2])
    for module in (exchange, step_recall):
        monkeypatch.setattr(module, "AT_ONCE_BYTES", num_bytes)
    monkeypatch.setattr(turn, "PLACE_BYTES", 8 * 2 * 64 * 2)
    together.taken = lambda line: setattr(line, "transport", Holding(line))
    answers = together.ask(requests[0], *requests)
    assert together.turns == [1] * 4
    assert [told(answer) for answer in answers] == [told(answer) for answer in want]


def test_a_fault_in_a_turn_is_told_to_everybody(
    served: Served, door: InProcess, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [opened(door) for _ in range(3)]
    known = push(opened(door), 1)
    answer = served.model.engine.answer

    failing = [True]

    def fail(asks: list[Any]) -> list[Any]:
        if asks[0].segments[0][0] in sessions and failing:
            failing.clear()  # asked again it would be answered
            raise ValueError("secret")
        return answer(asks)

    monkeypatch.setattr(served.model.engine, "answer", fail)
    answers = together.ask(known, *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers] == [b"500"] * 3
    assert not any(b"secret" in each for each in answers)
    assert lengths(served, sessions) == [6] * 3


def test_an_answer_that_cannot_be_written_is_its_own_connection_s_end(
    served: Served, door: InProcess, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, written = [opened(door) for _ in range(3)], StepRecall._tell
    known = push(opened(door), 1)

    def tell(*arguments: Any) -> None:
        if b"tell" in failing:
            failing.clear()
            raise ValueError("a fault of this one")
        written(*arguments)

    failing: set[bytes] = set()
    together.taken = lambda line: failing.add(b"tell")
    monkeypatch.setattr(StepRecall, "_tell", tell)
    answers = together.ask(known, *[push(each, 4) for each in sessions])
    assert sorted(answer[9:12] for answer in answers) == [b"", b"200", b"200"]


@pytest.mark.parametrize(
    ("limit", "most", "turns"), [("PLACE_BYTES", 512, [2, 2, 1]), ("BATCH_TOKENS", 3, [3, 2])]
)
def test_a_turn_that_is_full_is_answered_early(
    served: Served,
    door: InProcess,
    together: Together,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    most: int,
    turns: list[int],
) -> None:
    sessions = [opened(door) for _ in range(5)]
    monkeypatch.setattr(turn, limit, most)
    answers = together.ask(push(opened(door), 1), *[push(each, 4) for each in sessions])
    assert [answer[9:12] for answer in answers] == [b"200"] * 5
    assert together.turns == turns
    assert lengths(served, sessions) == [7] * 5


def test_who_is_alone_does_not_wait_for_the_end_of_the_turn(
    served: Served, door: InProcess, together: Together
) -> None:
    session_id = opened(door)
    served.ask(door, *[push(session_id, 4, 6 + i) for i in range(4)])
    assert together.turns in ([], [1])  # the first, if another connection had asked before
    assert served.at_once == 3
