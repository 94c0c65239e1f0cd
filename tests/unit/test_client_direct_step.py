"""Steps of one segment asked for at once: the protocol's bytes, its record, its way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engram_client import (
    BadAnswer,
    EngramProblem,
    EngramUnavailable,
    PushedMeanwhile,
    Segment,
    verbs,
)
from engram_client.direct_step import StepAsk, step_ask
from engram_client.protocol import StepOptions
from tests.unit.fake_service import Refusal
from tests.unit.raw_server import Peer, RawServer, answer
from tests.unit.speaking import Awaiting, Blocking, Speaking, never, plain, residual, talking


@pytest.fixture
def service() -> Speaking:
    return Speaking()


@pytest.fixture(params=[Blocking, Awaiting])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def told(result: Any) -> Any:
    return (
        *(array.tolist() for array in (result.length, result.epoch, result.dead)),
        *(array.dtype for array in (result.length, result.epoch, result.dead)),
        {layer: (type(each), plain(each)) for layer, each in result.tensors.items()},
    )


def held(service: Speaking, talk: Any) -> tuple[list[int], list[int]]:
    """The ids of the session as the service and as the client have them."""
    state = talk.session.state
    return service.fake.sessions[state.session_id].ids, state.history.read(0, state.length).tolist()


SEGMENTS = [
    {"position": 1, "count": 2},
    {"count": 2},
    {"token_ids": [9, 10]},
    {"token_ids": (9, 10), "position": 4},
    {"token_ids": np.array([9, 10])},
    {"token_ids": np.array([9, 10], np.int32)},
    {"token_ids": [6, 7], "position": 1},
]


@pytest.mark.parametrize("make", [np.float32, ml_dtypes.bfloat16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("options", [{}, {"truncate": True}, {"wait_ms": 5, "ahead": False}])
def test_it_is_the_protocols_request_and_answer(
    kind: Any,
    service: Speaking,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    segment: dict[str, Any],
    options: dict[str, Any],
) -> None:
    truncates = options.get("truncate") and "token_ids" in segment
    with talking(kind, service, api_key="k") as talk:
        found = []
        for is_direct in (False, True):
            talk.session = _again(talk)
            with monkeypatch.context() as patch:
                if is_direct:
                    never(patch)
                else:
                    patch.setattr(f"engram_client.{_module(kind)}.step_ask", lambda *_: None)
                source = residual(2, make)
                result = talk.step(
                    [Segment(talk.session, **segment)],
                    (14,),
                    residual=source,
                    out=source if is_direct else None,
                    **(options if truncates or "truncate" not in options else {}),
                )
            state = talk.session.state
            session_id, epoch = str(state.session_id).encode(), state.epoch
            length, epochs, *rest = told(result)
            assert state.unsettled is None
            assert not state.lock.locked()
            head = service.heads[-1].replace(session_id, b"ID")
            body = service.bodies[-1].replace(state.session_id.to_bytes(8, "little"), b"ID")
            for known in (epoch, epoch - 1):
                body = body.replace(known.to_bytes(8, "little"), b"EPOCH")
            found.append((length, epochs == [epoch], rest, head, body, *held(service, talk)))
        assert found[0] == found[1]
        assert result.tensors[14] is source


def _module(kind: Any) -> str:
    return "client" if kind is Blocking else "aio"


def _again(talk: Any) -> Any:
    """A new session of the same ids."""
    opened = talk.client.open_session()
    session = opened if isinstance(talk, Blocking) else talk._runner.run(opened)
    pushed = session.push([5, 6, 7, 8])
    if not isinstance(talk, Blocking):
        talk._runner.run(pushed)
    return session


def decode(talk: Any, token: int) -> Any:
    return talk.step([Segment(talk.session, token_ids=[token])], (1,), residual=residual(1))


def test_a_lost_answer_is_asked_for_again_and_pushes_once(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        decode(talk, 20)
        for cut in (0, 10, -3):
            left = [cut]

            def send(peer: Peer, data: bytes, left: list[int] = left) -> None:
                peer.send(data[: left[0]] if left else data)
                if left:
                    left.clear()
                    raise ConnectionResetError

            service.send = send
            decode(talk, 30)
            there, here = held(service, talk)
            assert there == here
        assert here == [5, 6, 7, 8, 20, 30, 30, 30]


def test_a_step_given_up_is_settled_before_the_next(kind: Any, service: Speaking) -> None:
    with talking(kind, service, reconnect_s=0, timeout_s=0.2) as talk:
        decode(talk, 20)
        service.send = lambda peer, data: peer.send(data[:-3])
        with pytest.raises(EngramUnavailable):
            decode(talk, 30)
        assert talk.session.state.unsettled == 5
        assert not talk.session.state.lock.locked()
        service.send = lambda peer, data: peer.send(data)
        decode(talk, 40)
        assert held(service, talk) == ([5, 6, 7, 8, 20, 40],) * 2


@pytest.mark.parametrize("delivered", [True, False])
def test_sessions_stay_locked_until_a_lost_step_is_settled(
    kind: Any, service: Speaking, monkeypatch: pytest.MonkeyPatch, delivered: bool
) -> None:
    """Another thread's push, or its opening again, waits for the whole of it."""
    with talking(kind, service) as talk:
        decode(talk, 20)
        state, step, seen = talk.session.state, verbs.step, []

        def watched(*args: Any, **options: Any) -> Any:
            seen.append(state.lock.locked())
            result = yield from step(*args, **options)
            seen.append(state.lock.locked())
            return result

        def lose(peer: Peer, data: bytes) -> None:
            service.send = lambda peer, data: peer.send(data)
            if not delivered:
                del service.fake.sessions[state.session_id].ids[5:]
            raise ConnectionResetError

        monkeypatch.setattr(verbs, "step", watched)
        service.send = lose
        decode(talk, 30)
        assert seen == [True, True]
        assert not state.lock.locked()
        assert held(service, talk) == ([5, 6, 7, 8, 20, 30],) * 2


def test_refusals_are_the_protocols(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        decode(talk, 20)
        with pytest.raises(EngramProblem) as refused:
            talk.step(
                [Segment(talk.session, token_ids=[9], position=2)], (1,), residual=residual(1)
            )
        assert refused.value.code == "conflict"
        assert talk.session.state.unsettled is None
        service.fake.sessions.clear()
        decode(talk, 30)
        refusals = [Refusal(429, "overloaded", retry_after_ms=1)]
        service.fake.refuse = lambda _: refusals.pop() if refusals else None
        decode(talk, 40)
        assert held(service, talk) == ([5, 6, 7, 8, 20, 30, 40],) * 2


@pytest.mark.parametrize("ids", [[[9], [10, 11], (12,)], None])
@pytest.mark.parametrize("truncate", [True, False])
def test_several_sessions_are_the_protocols_request_and_answer(
    kind: Any,
    service: Speaking,
    monkeypatch: pytest.MonkeyPatch,
    ids: Any,
    truncate: bool,
) -> None:
    with talking(kind, service) as talk:
        found = []
        for is_direct in (False, True):
            sessions = [_again(talk) for _ in range(3)]
            segments = [
                Segment(session, token_ids=ids[i], position=4)
                if ids
                else Segment(session, position=i, count=(1, 2, 1)[i])
                for i, session in enumerate(sessions)
            ]
            with monkeypatch.context() as patch:
                if is_direct:
                    never(patch)
                else:
                    patch.setattr(f"engram_client.{_module(kind)}.step_ask", lambda *_: None)
                cuts = {"truncate": True} if truncate and ids else {}
                result = talk.step(segments, (1,), residual=residual(4), **cuts)
            states = [session.state for session in sessions]
            body = service.bodies[-1]
            for state in states:
                assert state.unsettled is None
                assert not state.lock.locked()
                for known in (state.session_id, state.epoch, state.epoch - 1):
                    body = body.replace(known.to_bytes(8, "little"), b"N")
            length, epochs, *rest = told(result)
            assert epochs == [state.epoch for state in states]
            kept = [state.history.read(0, state.length).tolist() for state in states]
            assert kept == [service.fake.sessions[state.session_id].ids for state in states]
            found.append((length, rest, body, kept))
        assert found[0] == found[1]


@pytest.mark.parametrize("ids", [[[9]], [[9], [10, 11, 12], (13,)]])
@pytest.mark.parametrize("options", [{}, {"truncate": True}, {"ahead": False, "layers": (14,)}])
def test_a_push_alone_is_the_protocols_request_and_answer(
    kind: Any,
    service: Speaking,
    monkeypatch: pytest.MonkeyPatch,
    ids: Any,
    options: dict[str, Any],
) -> None:
    with talking(kind, service) as talk:
        found = []
        for is_direct in (False, True):
            sessions = [_again(talk) for _ in ids]
            pairs = zip(sessions, ids, strict=True)
            segments = [Segment(session, token_ids=each) for session, each in pairs]
            with monkeypatch.context() as patch:
                if is_direct:
                    never(patch)
                else:
                    patch.setattr(f"engram_client.{_module(kind)}.step_ask", lambda *_: None)
                result = talk.step(segments, output="none", **options)
            states = [session.state for session in sessions]
            head, body = service.heads[-1], service.bodies[-1]
            for state in states:
                assert state.unsettled is None
                assert not state.lock.locked()
                for known in (state.session_id, state.epoch, state.epoch - 1):
                    body = body.replace(known.to_bytes(8, "little"), b"N")
            length, epochs, *rest = told(result)
            assert epochs == [state.epoch for state in states]
            kept = [state.history.read(0, state.length).tolist() for state in states]
            assert kept == [service.fake.sessions[state.session_id].ids for state in states]
            found.append((length, rest, head, body, kept))
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("segment", "options"),
    [
        ({"position": 0, "count": 1}, {}),
        ({"token_ids": []}, {}),
        ({"token_ids": [9]}, {"out": np.zeros(1, np.float32)}),
        ({"token_ids": [9] * 2000}, {}),
    ],
)
def test_other_steps_without_a_tensor_are_left_to_the_protocol(
    service: Speaking, segment: dict[str, Any], options: dict[str, Any]
) -> None:
    with talking(Blocking, service) as talk:
        decode(talk, 20)
        how = StepOptions((1,), "none")
        asked = step_ask(talk.client._direct, [Segment(talk.session, **segment)], how, None,
                         options.get("out"))  # fmt: skip
        assert asked is None
        assert not talk.session.state.lock.locked()


def test_of_several_sessions_the_lost_one_is_opened_again(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        decode(talk, 20)
        sessions = [_again(talk) for _ in range(3)]
        del service.fake.sessions[sessions[1].state.session_id]
        segments = [Segment(session, token_ids=[9]) for session in sessions]
        told = talk.step(segments, (1,), residual=residual(3))
        assert told.length.tolist() == [5, 5, 5]
        assert [service.fake.sessions[s.state.session_id].ids for s in sessions] == [
            [5, 6, 7, 8, 9]
        ] * 3


def test_a_session_twice_is_left_to_the_protocol(
    service: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(Blocking, service) as talk:
        decode(talk, 20)
        never(monkeypatch)
        with pytest.raises(AssertionError, match="the protocol was asked"):
            talk.step([Segment(talk.session, token_ids=[9])] * 2, (1,), residual=residual(2))
        assert not talk.session.state.lock.locked()


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_a_step_that_the_kernel_takes_in_parts_goes_whole(
    where: str, service: Speaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 10_000
    service.fake.max_tokens = count
    ids, given = [i % 90 for i in range(count)], residual(count, np.float32)
    assert given.nbytes > 300_000
    with RawServer([service], tmp_path / "s" if where == "unix" else None) as server:
        talk = Blocking(server.url)
        decode(talk, 20)
        with monkeypatch.context() as patch:
            never(patch)
            result = talk.step([Segment(talk.session, token_ids=ids)], (1,), residual=given)
        again = talk.apply(1, given)
        talk.close()
    assert np.array_equal(result.tensors[1], again)


def test_a_session_that_another_thread_pushes_to_is_waited_for(
    service: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(Blocking, service) as talk:
        state = talk.session.state
        assert state.lock.acquire(blocking=False)
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            state.lock.release()

        monkeypatch.setattr("time.sleep", pause)
        decode(talk, 20)
        assert len(pauses) == 1


@pytest.mark.parametrize(
    "push",
    [
        lambda talk: decode(talk, 20),
        lambda talk: talk.session.push([20]),
        lambda talk: talk.session.push([20] * 100),
    ],
)
def test_a_push_to_an_end_that_moves_meanwhile_is_not_made(
    service: Speaking, monkeypatch: pytest.MonkeyPatch, push: Callable[[Any], None]
) -> None:
    """Two threads append the same id: the second must not be taken for the first, repeated."""
    with talking(Blocking, service) as talk:
        state = talk.session.state
        assert state.lock.acquire(blocking=False)

        def other(seconds: float) -> None:
            state.lock.release()
            monkeypatch.undo()
            talk.session.push([20])

        monkeypatch.setattr("time.sleep", other)
        with pytest.raises(PushedMeanwhile, match=r"expected the length 4 .* got 5"):
            push(talk)
        assert held(service, talk) == ([5, 6, 7, 8, 20], [5, 6, 7, 8, 20])
        talk.session.push([20])  # nothing is left in doubt, or locked
        assert held(service, talk) == ([5, 6, 7, 8, 20, 20], [5, 6, 7, 8, 20, 20])


def test_an_end_that_moves_before_the_lock_is_asked_for_again(
    service: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(Blocking, service) as talk:
        lock = StepAsk._lock

        def late(ask: StepAsk) -> bool:
            monkeypatch.undo()
            talk.session.push([20])
            return lock(ask)

        monkeypatch.setattr(StepAsk, "_lock", late)
        decode(talk, 20)
        assert held(service, talk) == ([5, 6, 7, 8, 20, 20], [5, 6, 7, 8, 20, 20])


def test_an_answer_of_another_length_is_a_bad_one(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        decode(talk, 20)
        six = (6).to_bytes(8, "little")
        service.send = lambda peer, data: peer.send(data.replace(six, bytes(8)))
        with pytest.raises(BadAnswer, match="expected length 6, got 0"):
            decode(talk, 30)
        assert talk.session.state.unsettled == 5
        service.send = lambda peer, data: peer.send(data)
        decode(talk, 30)
        assert held(service, talk) == ([5, 6, 7, 8, 20, 30],) * 2


def test_an_answer_in_another_form_is_the_same(kind: Any, service: Speaking) -> None:
    """Other headers, or another head of the file, are for the protocol to read."""
    with talking(kind, service) as talk:
        want = told(decode(talk, 20))[-1]
        one, other = b'"dtype":"I64","shape":[1]', b'"shape":[1],"dtype":"I64"'
        for old, new in ((b"date: ", b"x-of-a-proxy: yes\r\ndate: "), (one, other)):
            service.send = lambda peer, data, o=old, n=new: peer.send(data.replace(o, n, 1))
            talk.session = _again(talk)
            assert told(decode(talk, 20))[-1] == want


def test_a_session_opened_again_meanwhile_is_asked_again(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        decode(talk, 20)
        state = talk.session.state

        def reopened(peer: Peer, data: bytes) -> None:
            """Refuse, while a reader of another thread gives the session a new epoch."""
            fake = service.fake.sessions[state.session_id]
            del fake.ids[5:]
            fake.epoch += 1
            state.epoch = fake.epoch
            service.send = lambda peer, data: peer.send(data)
            body = b'{"code": "stale_epoch", "epoch": 1}'
            peer.send(answer(body, "content-type: application/problem+json", status="409 -"))

        service.send = reopened
        decode(talk, 30)
        assert held(service, talk) == ([5, 6, 7, 8, 20, 30],) * 2


@pytest.mark.parametrize(
    "segment",
    [
        {"token_ids": torch.tensor([9])},
        {"token_ids": np.array([-1])},
        {"token_ids": [-1]},
        {"token_ids": [9], "mask": [True]},
        {"token_ids": [9], "position": 9},
        {"position": 4},
    ],
)
def test_other_steps_are_left_to_the_protocol(
    service: Speaking, monkeypatch: pytest.MonkeyPatch, segment: dict[str, Any]
) -> None:
    with talking(Blocking, service) as talk:
        decode(talk, 20)
        never(monkeypatch)
        with pytest.raises(AssertionError, match="the protocol was asked"):
            talk.step([Segment(talk.session, **segment)], (1,), residual=residual(1))
        assert not talk.session.state.lock.locked()
