"""Residuals asked for at once: the protocol's bytes, its answers, and its way out of trouble."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engram_client import BadAnswer, EngramUnavailable
from engram_client.direct import DONE, MORE, OTHER, Answering, Ask, Direct
from engram_client.exchange import Facts
from engram_client.history import History
from engram_client.http1 import Request, Response, ResponseReader, format_head
from engram_client.problems import NotPushed, SessionClosed
from engram_client.protocol import EngramProtocol
from engram_client.state import SessionState
from engram_client.wire import as_view
from tests.unit.fake_service import DIM, HC, Refusal
from tests.unit.raw_server import Peer, answer
from tests.unit.speaking import (
    Awaiting,
    Blocking,
    Speaking,
    never,
    ordinary,
    plain,
    residual,
    talking,
)


@pytest.fixture
def service() -> Speaking:
    return Speaking()


@pytest.fixture(params=[Blocking, Awaiting])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


MAKES = [np.float32, ml_dtypes.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("where", ["new", "given", "sent"])
def test_it_is_the_protocols_request_and_answer(
    kind: Any, service: Speaking, make: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = residual(3, make)
    with talking(kind, service, api_key="k", owner="o") as talk:
        want = plain(talk.apply(1, given, 1))
        expected = format_head(*_built(talk, given)).removesuffix(b"\r\n\r\n")
        never(monkeypatch)
        for position in (1, None):
            source = residual(3, make)
            out = {"new": None, "given": residual(3, make) * 0, "sent": source}[where]
            got = talk.apply(1, source, position, out=out)
            assert out is None or got is out
            assert (type(got), got.dtype) == (type(given), given.dtype)
            assert plain(got) == want
            assert service.heads[-1] == expected


def _built(talk: Any, given: Any) -> tuple[Request, bytes]:
    """What the protocol asks for, with the client's own header lines."""
    effects = talk.client._protocol.apply(talk.session.state, 1, as_view(given), position=1)
    request = next(effects)
    effects.close()
    return request, talk.client._pool._fixed[0]


def test_an_answer_in_any_two_pieces_is_the_same(service: Speaking) -> None:
    protocol = EngramProtocol(1, owner=None, reconnect_s=1.0, clock=lambda: 0.0)
    given, answering = residual(2), Answering()
    data = answer_to(given)
    body = data[-given.nbytes :]
    for cut in range(1, len(data)):
        ask = asked(protocol, given)
        plan = answering.begin(ask, "table", b"Host: x\r\n", None)
        answering.space[:cut] = data[:cut]
        came = answering.received(cut, ask, plan)
        if came == MORE:
            assert not ask.is_landed
            answering.space[:] = data[cut:]
            assert answering.received(len(data) - cut, ask, plan) == DONE
            assert ask.result.tobytes() == body
        else:
            assert came == OTHER
            reader = ResponseReader(Request("POST", "/", max_answer_bytes=len(body)))
            reader.take(answering.unread)
            reader.take(memoryview(data[cut:]))
            assert reader.response is not None
            assert bytes(reader.response.body) == body


def asked(protocol: EngramProtocol, given: Any) -> Ask:
    protocol._facts[0], protocol._identity = Facts("table", 64, 4, HC, DIM, 6, 2), "table"
    state = SessionState(7, History(0, range(9)), replica=0)
    ask = Direct(protocol).ask(state, 1, given, None, None)
    assert ask is not None
    return ask


def answer_to(given: Any) -> bytes:
    view = as_view(given)
    shape = ",".join(map(str, view.shape))
    return ordinary(
        Response(200, {"x-engram-shape": shape, "x-engram-dtype": view.dtype}, view.data)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"x-engram-shape: 2,", b"x-engram-shape: 1,"),
        (b"dtype: BF16", b"dtype: F32"),
        (b"200 OK", b"200 Yes"),
        (b"\r\nx-request", b"\r\ntransfer-encoding: chunked\r\nx-request"),
        (b"\r\nx-request", b"\r\ncontent-length: 1\r\nx-request"),
        (b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        (b"\r\ndate", b"\r\n date"),
    ],
)
def test_another_head_is_not_the_ordinary_one(old: bytes, new: bytes) -> None:
    protocol = EngramProtocol(1, owner=None, reconnect_s=1.0, clock=lambda: 0.0)
    given, answering = residual(2), Answering()
    data = answer_to(given).replace(old, new, 1)
    ask = asked(protocol, given)
    plan = answering.begin(ask, "table", b"", None)
    answering.space[: len(data)] = data
    assert answering.received(len(data), ask, plan) == OTHER
    assert not ask.is_landed


def test_a_wrong_answer_is_told_as_the_protocol_does(kind: Any, service: Speaking) -> None:
    with talking(kind, service, reconnect_s=0) as talk:
        talk.apply(1, residual())
        for old, new in ((b"shape: 2,", b"shape: 1,"), (b"\r\n\r\n", b"\r\n\r\nmore")):
            service.send = lambda peer, data, o=old, n=new: peer.send(data.replace(o, n, 1))
            with pytest.raises(BadAnswer):
                talk.apply(1, residual())
        service.send = lambda peer, data: peer.send(data)
        assert plain(talk.apply(1, residual())) != plain(residual())


def test_a_lost_answer_is_asked_for_again(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        want = plain(talk.apply(1, residual()))
        for cut in (0, 10, -3):
            left = [cut]

            def send(peer: Peer, data: bytes, left: list[int] = left) -> None:
                peer.send(data[: left[0]] if left else data)
                if left:
                    left.clear()
                    raise ConnectionResetError

            service.send = send
            source = residual()
            assert plain(talk.apply(1, source, out=source)) == want


def test_an_answer_that_never_comes_is_given_up_at_the_deadline(
    kind: Any, service: Speaking
) -> None:
    with talking(kind, service, reconnect_s=0, timeout_s=0.2) as talk:
        talk.apply(1, residual())
        for piece in (0, -3):
            service.send = lambda peer, data, piece=piece: peer.send(data[:piece])
            with pytest.raises(EngramUnavailable, match="no whole answer in time"):
                talk.apply(1, residual())


def test_refusals_are_the_protocols(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        want = plain(talk.apply(1, residual()))
        with pytest.raises(NotPushed):
            talk.apply(1, residual(), 99)
        service.fake.sessions.clear()  # it is opened again from the client's ids
        assert plain(talk.apply(1, residual())) == want
        refusals = [Refusal(429, "overloaded", retry_after_ms=1)]
        service.fake.refuse = lambda _: refusals.pop() if refusals else None
        assert plain(talk.apply(1, residual())) == want
        talk.session.state.is_closed = True
        with pytest.raises(SessionClosed):
            talk.apply(1, residual())


def test_a_session_that_is_in_doubt_is_settled_first(kind: Any, service: Speaking) -> None:
    with talking(kind, service) as talk:
        want = plain(talk.apply(1, residual()))
        talk.session.state.unsettled = 2
        assert plain(talk.apply(1, residual())) == want
        assert any(b"/rewind " in head for head in service.heads)


def test_a_session_opened_again_meanwhile_is_asked_again(
    kind: Any, service: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(kind, service) as talk:
        want = plain(talk.apply(1, residual()))
        state = talk.session.state

        def reopened(peer: Peer, data: bytes) -> None:
            """Answer with a refusal, while another thread gives the session a new epoch."""
            held = service.fake.sessions[state.session_id]
            held.epoch += 1
            state.epoch = held.epoch
            service.send = lambda peer, data: peer.send(data)
            body = b'{"code": "stale_epoch", "epoch": 1}'
            peer.send(answer(body, "content-type: application/problem+json", status="409 -"))

        service.send = reopened
        assert plain(talk.apply(1, residual())) == want


def test_a_body_that_the_kernel_takes_in_parts_arrives_whole(
    service: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = residual(60)
    with talking(Blocking, service) as talk:
        talk.session.push(list(range(60)))
        want = plain(talk.apply(1, given))
        connection = talk.client._pool._idle[0][0]
        for first in (0, 5, 400):
            connection._socket = Taking(connection._socket, first)
            assert plain(talk.apply(1, given)) == want
            connection._socket = connection._socket.whole


class Taking:
    """A socket that takes so many bytes at first, 0: none, as one whose buffer is full."""

    def __init__(self, whole: Any, first: int) -> None:
        self.whole, self._first = whole, first
        self._is_first = True

    def sendmsg(self, buffers: Any, *args: Any) -> int:
        if not self._is_first:
            return self.whole.sendmsg(buffers, *args)  # type: ignore[no-any-return]
        self._is_first = False
        if not self._first:
            raise BlockingIOError
        return self.whole.send(b"".join(buffers)[: self._first])  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


@pytest.mark.parametrize(
    ("given", "out"),
    [
        (residual()[::-1], None),
        (residual(), residual(4)[::2]),
        (residual()[..., ::2], None),
    ],
)
def test_what_is_not_plain_is_left_to_the_protocol(
    service: Speaking, given: Any, out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(Blocking, service) as talk:
        talk.session.push(list(range(64)))
        talk.apply(1, residual())
        never(monkeypatch)
        with pytest.raises(AssertionError, match="the protocol was asked"):
            talk.apply(1, given, 0, out=out)
