"""The client's protocol over a network that loses, delays and repeats: no token is ever lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engram_client import problems, wire
from engram_client.arrays import sent
from engram_client.exchange import Pause
from engram_client.http1 import Request, Response
from engram_client.problems import ConnectionLost, EngramUnavailable
from engram_client.protocol import EngramProtocol, StepOptions
from engram_client.segments import Segment, batch_of
from engram_client.state import KEEP_TAIL, KEEP_WHOLE, SessionState
from tests.unit.fake_service import DEAD, DIM, HC, FakeService, Refusal, tensor

Network = Callable[[Request], Response]


@dataclass
class Harness:
    """Drives a protocol over fake services; time passes only in pauses."""

    services: list[FakeService]
    network: Network | None = None
    now_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    owner: str | None = None

    def __post_init__(self) -> None:
        self.protocol = EngramProtocol(
            len(self.services), owner=self.owner, reconnect_s=60.0, clock=lambda: self.now_s
        )

    def deliver(self, request: Request) -> Response:
        return self.services[request.replica].handle(request)

    def run(self, effects: Generator[Any, Any, Any]) -> Any:
        try:
            effect = next(effects)
            while True:
                if isinstance(effect, Pause):
                    self.now_s += effect.seconds
                    self.pauses.append(effect.seconds)
                    effect = effects.send(None)
                    continue
                try:
                    response = (self.network or self.deliver)(effect)
                except ConnectionLost as lost:
                    effect = effects.throw(lost)
                else:
                    effect = effects.send(response)
        except StopIteration as stop:
            return stop.value
        finally:
            effects.close()

    def open(self, *args: Any) -> SessionState:
        state: SessionState = self.run(self.protocol.open_session(*(args or (0, None))))
        return state

    def push(self, state: SessionState, ids: Any, *args: Any, **options: Any) -> None:
        self.run(self.protocol.push(state, ids, *args, **options))

    def kv(self, state: SessionState, position: int | None = None, count: Any = None) -> Any:
        view = self.run(self.protocol.read(state, "kv", 1, position=position, count=count))
        return wire.to_numpy(view)[:, 0, 0].astype(int).tolist()

    def step(
        self, segments: list[Segment], *layers: int, residual: Any = None, **options: Any
    ) -> Any:
        batch = batch_of(segments, 4)
        source = None if residual is None else sent(residual)
        chosen = StepOptions(layers or (1,), **{"output": "kv", **options})
        return self.run(self.protocol.step(batch, chosen, source, {}))


def expected(ids: list[int], begin: int, end: int, layer: int = 1) -> list[int]:
    windows = [ids[max(at - 3, 0) : at + 1] for at in range(begin, end)]
    return wire.to_numpy(tensor("kv", layer, windows))[:, 0, 0].astype(int).tolist()


def handle(state: SessionState) -> Any:
    return type("Handle", (), {"state": state})()


def lost_once(harness: Harness, *, delivered: bool, method: str = "POST") -> None:
    """Lose the next request of a kind, before or after it is carried out."""
    done: list[int] = []

    def network(request: Request) -> Response:
        if request.method == method and not done:
            done.append(1)
            if delivered:
                harness.deliver(request)
            raise ConnectionLost("lost")
        return harness.deliver(request)

    harness.network = network


def refuse_once(service: FakeService, refusal: Refusal, part: str = "") -> None:
    refusals = [refusal]
    service.refuse = lambda request: refusals.pop() if refusals and part in request.target else None


def held_ids(service: FakeService, state: SessionState) -> list[int]:
    return service.sessions[state.session_id].ids


@pytest.fixture
def harness() -> Harness:
    return Harness([FakeService()])


@pytest.fixture
def pair() -> Harness:
    return Harness([FakeService(), FakeService(first_epoch=500_000)])


@pytest.mark.parametrize("delivered", [True, False])
def test_a_push_with_a_lost_answer_is_repeated_and_not_doubled(
    harness: Harness, delivered: bool
) -> None:
    state = harness.open()
    lost_once(harness, delivered=delivered)
    harness.push(state, [5, 6, 7])
    assert held_ids(harness.services[0], state) == [5, 6, 7]
    assert state.length == 3
    assert state.unsettled is None


@pytest.mark.parametrize("delivered", [True, False])
def test_a_truncating_push_and_a_rewind_survive_lost_answers(
    harness: Harness, delivered: bool
) -> None:
    state = harness.open()
    harness.push(state, [5, 6, 7])
    lost_once(harness, delivered=delivered)
    harness.push(state, [8, 9], position=1, truncate=True)
    lost_once(harness, delivered=delivered)
    harness.run(harness.protocol.rewind(state, 2))
    assert held_ids(harness.services[0], state) == [5, 8]
    assert state.epoch == harness.services[0].sessions[state.session_id].epoch


@pytest.mark.parametrize("delivered", [True, False])
def test_opening_and_forking_survive_lost_answers(harness: Harness, delivered: bool) -> None:
    lost_once(harness, delivered=delivered)
    state = harness.open()
    harness.push(state, [5, 6])
    lost_once(harness, delivered=delivered)
    child = harness.run(harness.protocol.fork(state, None))
    harness.push(child, [7])
    assert harness.kv(child) == expected([5, 6, 7], 2, 3)
    assert state.length == 2


def test_an_expired_session_is_opened_again_from_the_clients_ids(harness: Harness) -> None:
    state = harness.open()
    ids = list(range(20, 50))
    harness.push(state, ids)
    harness.services[0].sessions.clear()
    assert harness.kv(state, 0, 30) == expected(ids, 0, 30)
    harness.services[0].sessions.clear()
    harness.push(state, [3])
    assert held_ids(harness.services[0], state) == [*ids, 3]


def test_a_reopened_session_is_not_worked_ahead(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [1, 2, 3])
    harness.services[0].sessions.clear()
    harness.kv(state)
    pushes = [r for r in harness.services[0].requests if r.target.endswith("/tokens")]
    assert b'"ahead":false' in bytes(pushes[-1].body[0])
    assert b"ahead" not in bytes(pushes[0].body[0])


def test_a_long_session_is_reopened_with_a_lookback_and_deeper_when_needed() -> None:
    harness = Harness([FakeService(max_tokens=512)])
    state = harness.open()
    ids = [(7 * at) % 113 for at in range(KEEP_WHOLE + 2000)]
    harness.push(state, ids, [at % 11 != 0 for at in range(len(ids))])
    ids = [DEAD if at % 11 == 0 else token for at, token in enumerate(ids)]
    harness.services[0].sessions.clear()
    assert harness.kv(state) == expected(ids, len(ids) - 1, len(ids))
    assert harness.services[0].sessions[state.session_id].base == len(ids) - 1 - KEEP_TAIL
    assert harness.kv(state, 1500, 9) == expected(ids, 1500, 1509)
    assert harness.kv(state, 3, 2) == expected(ids, 3, 5)


def test_a_rewind_below_the_base_of_a_reopened_session_is_done() -> None:
    harness = Harness([FakeService(max_tokens=512)])
    state = harness.open()
    ids = [at % 90 for at in range(3000)]
    harness.push(state, ids)
    harness.services[0].sessions.clear()
    harness.kv(state)
    harness.run(harness.protocol.rewind(state, 2000))
    harness.push(state, [4])
    assert harness.kv(state, 1999, 2) == expected([*ids[:2000], 4], 1999, 2001)


def test_a_session_opened_at_a_position_keeps_its_base(harness: Harness) -> None:
    state = harness.open(100, [7, None, 9])
    harness.push(state, [11, 12])
    harness.services[0].sessions.clear()
    whole = [0] * 97 + [7, DEAD, 9, 11, 12]
    assert harness.kv(state, 100, 2) == expected(whole, 100, 102)
    with pytest.raises(problems.HistoryTruncated):
        harness.run(harness.protocol.rewind(state, 99))


def test_sessions_move_to_the_next_address_and_back(pair: Harness) -> None:
    state = pair.open()
    pair.push(state, [5, 6, 7])
    down = {0}

    def network(request: Request) -> Response:
        if request.replica in down:
            raise ConnectionLost("refused", connected=False)
        return pair.deliver(request)

    pair.network = network
    pair.push(state, [8], position=1, truncate=True)
    assert held_ids(pair.services[1], state) == [5, 8]
    down = {1}
    assert pair.kv(state) == expected([5, 8], 1, 2)
    assert held_ids(pair.services[0], state) == [5, 8]


def test_an_old_copy_on_a_former_address_is_closed_whatever_its_epoch(pair: Harness) -> None:
    state = pair.open()
    pair.push(state, [5, 6, 7])
    pair.run(pair.protocol.rewind(state, 2))
    pair.protocol.replica = 1
    pair.push(state, [9])
    pair.protocol.replica = 0
    assert pair.kv(state, 0, 3) == expected([5, 6, 9], 0, 3)


def test_a_replica_with_another_table_is_passed_over(pair: Harness) -> None:
    state = pair.open()
    pair.push(state, [5])
    pair.services[1].identity = "another"
    failures = iter([True, True])

    def network(request: Request) -> Response:
        if request.replica == 0 and next(failures, False):
            raise ConnectionLost("refused", connected=False)
        return pair.deliver(request)

    pair.network = network
    assert pair.kv(state) == expected([5], 0, 1)
    assert pair.protocol.replica == 0


def test_another_table_behind_the_only_address_is_told(harness: Harness) -> None:
    state = harness.open()
    harness.services[0].identity = "another"
    with pytest.raises(problems.WrongTable):
        harness.push(state, [1])


def test_nothing_answers_and_the_client_says_so_after_reconnect_s(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    state = harness.open()

    def network(request: Request) -> Response:
        raise ConnectionLost("refused", connected=False)

    harness.network = network
    with pytest.raises(EngramUnavailable) as caught:
        harness.push(state, [1])
    assert isinstance(caught.value.reason, ConnectionLost)
    assert 55 < harness.now_s <= 60
    (told,) = caplog.messages  # one line a call, after a second
    assert told.startswith("no answer for 1.")
    assert told.endswith("s, trying for 60 s; last: refused")
    harness.network = None
    harness.push(state, [2])
    assert held_ids(harness.services[0], state) == [2]


@pytest.mark.parametrize("code", ["overloaded", "too_many_sessions", "held_tokens_full"])
def test_a_429_is_waited_out_as_long_as_it_asks(harness: Harness, code: str) -> None:
    state = harness.open()
    refuse_once(harness.services[0], Refusal(429, code, retry_after_ms=700))
    harness.push(state, [1])
    assert harness.pauses == [0.7]


def test_a_fault_of_the_service_is_told_after_one_repetition(harness: Harness) -> None:
    state = harness.open()
    asked = []

    def refuse(request: Request) -> Refusal:
        asked.append(request.target)
        return Refusal(500, "internal", detail="request 7 failed")

    harness.services[0].refuse = refuse
    with pytest.raises(problems.ServiceFault, match="500 internal: request 7 failed"):
        harness.push(state, [1])
    assert len(asked) == 2
    assert harness.now_s < 1
    harness.services[0].refuse = lambda _: None
    harness.push(state, [2])
    assert held_ids(harness.services[0], state) == [2]


def test_a_fault_of_the_service_that_passes_is_not_told(harness: Harness) -> None:
    state = harness.open()
    refuse_once(harness.services[0], Refusal(500, "internal"))
    harness.push(state, [1])
    assert held_ids(harness.services[0], state) == [1]


def test_a_503_moves_on_at_once_where_there_is_another_address(pair: Harness) -> None:
    state = pair.open()
    pair.services[0].refuse = lambda _: Refusal(503, "draining", retry_after_ms=5000)
    pair.push(state, [1])
    assert pair.pauses == []
    assert held_ids(pair.services[1], state) == [1]


def test_a_429_longer_than_reconnect_s_is_told_at_once(harness: Harness) -> None:
    state = harness.open()
    refuse_once(harness.services[0], Refusal(429, "overloaded", retry_after_ms=61_000))
    with pytest.raises(EngramUnavailable, match="overloaded"):
        harness.push(state, [1])
    assert harness.pauses == []


def test_retry_after_in_seconds_is_honoured_without_a_document() -> None:
    from engram_client.exchange import _refusal

    problem = _refusal(Response(503, {"retry-after": "3"}))
    assert problem.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("conflict", 409, problems.Conflict),
        ("token_out_of_range", 400, problems.TokenOutOfRange),
        ("stale_epoch", 409, problems.StaleEpoch),
        ("schema", 422, problems.SchemaProblem),
        ("unauthenticated", 401, problems.Unauthenticated),
        ("new_code", 418, problems.EngramProblem),
    ],
)
def test_a_refusal_is_told_by_its_class_and_changes_nothing(
    harness: Harness, code: str, status: int, kind: type
) -> None:
    state = harness.open()
    harness.push(state, [5])
    refusal = Refusal(status, code, expected=1, got=2, length=9, epoch=8)
    refuse_once(harness.services[0], refusal)
    with pytest.raises(kind) as caught:
        harness.push(state, [6])
    told = caught.value
    assert (told.code, told.status, told.expected, told.got) == (code, status, 1, 2)
    assert (told.length, told.epoch) == (9, 8)
    assert (state.length, state.unsettled) == (1, None)


def test_a_gap_of_the_callers_is_told_and_one_of_the_services_is_closed(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [5, 6])
    with pytest.raises(problems.Gap):
        harness.push(state, [7], position=4)
    del held_ids(harness.services[0], state)[1:]
    harness.push(state, [7])
    assert held_ids(harness.services[0], state) == [5, 6, 7]


def test_a_stale_epoch_of_somebody_elses_making_is_told(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [5, 6])
    harness.services[0].sessions[state.session_id].epoch += 1
    with pytest.raises(problems.StaleEpoch):
        harness.kv(state)


def abandon(harness: Harness, effects: Generator[Any, Any, Any], *, delivered: bool) -> Request:
    """Give a call up while its answer is awaited."""
    effect = next(effects)
    assert isinstance(effect, Request)
    if delivered:
        harness.deliver(effect)
    effects.close()
    return effect


@pytest.mark.parametrize("delivered", [True, False])
@pytest.mark.parametrize("verb", ["push", "truncate", "same length", "rewind"])
def test_a_call_given_up_is_undone_and_cannot_come_late(
    harness: Harness, verb: str, delivered: bool
) -> None:
    state, protocol = harness.open(), harness.protocol
    harness.push(state, [5, 6, 7])
    calls = {
        "push": lambda: protocol.push(state, [8]),
        "truncate": lambda: protocol.push(state, [9], position=1, truncate=True),
        "same length": lambda: protocol.push(state, [8, 9], position=1, truncate=True),
        "rewind": lambda: protocol.rewind(state, 1),
    }
    late = abandon(harness, calls[verb](), delivered=delivered)
    assert harness.kv(state, 0, 3) == expected([5, 6, 7], 0, 3)
    harness.deliver(late)
    harness.push(state, [4])
    assert held_ids(harness.services[0], state) == [5, 6, 7, 4]
    assert not state.lock.locked()


def test_pushes_and_reads_are_split_at_the_limit_in_order(harness: Harness) -> None:
    state = harness.open()
    ids = list(range(30))
    harness.push(state, ids)
    assert held_ids(harness.services[0], state) == ids
    assert harness.kv(state, 2, 25) == expected(ids, 2, 27)
    residual = np.zeros((30, HC, DIM), np.float32)
    answer = harness.run(harness.protocol.apply(state, 1, sent(residual)))
    assert wire.to_numpy(answer)[:, 0, 0].tolist() == expected(ids, 0, 30)


def test_a_413_halves_the_pieces_until_one_fits(harness: Harness) -> None:
    state = harness.open()
    harness.run(harness.protocol.facts())
    harness.services[0].max_tokens = 3
    harness.push(state, list(range(16)))
    assert held_ids(harness.services[0], state) == list(range(16))
    assert harness.protocol._piece["push"] == 2


def test_a_413_for_a_single_token_is_told(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [1])
    harness.services[0].refuse = lambda _: Refusal(413, "body_too_large")
    with pytest.raises(problems.BodyTooLarge):
        harness.kv(state)


def test_nothing_at_all_is_pushed_and_read(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [])
    harness.push(state, [5])
    assert harness.kv(state, 1, 0) == []
    assert harness.step([]).length.tolist() == []
    empty = harness.run(harness.protocol.apply(state, 1, sent(np.zeros((0, HC, DIM), np.float32))))
    assert empty.shape == (0, HC, DIM)


def test_a_step_pushes_and_reads_every_segment(harness: Harness) -> None:
    states = [harness.open() for _ in range(3)]
    histories: list[list[int]] = [[], [], []]
    for ids in ([[1, 2], [3], []], [[4], [], [5, 6]]):
        segments = [Segment(handle(s), token_ids=i) for s, i in zip(states, ids, strict=True)]
        answer = harness.step(segments, 1, 14)
        for history, more in zip(histories, ids, strict=True):
            history += more
        for layer in (1, 14):
            got = wire.to_numpy(answer.outputs[layer])[:, 0, 0].astype(int).tolist()
            assert got == [
                number
                for history, more in zip(histories, ids, strict=True)
                for number in expected(history, len(history) - len(more), len(history), layer)
            ]
        assert answer.length.tolist() == [len(history) for history in histories]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_a_step_is_split_anywhere_with_the_same_result(max_tokens: int) -> None:
    harness = Harness([FakeService(max_tokens=max_tokens)])
    states = [harness.open() for _ in range(3)]
    for state in states:
        harness.push(state, [1, 2, 3])
    draft = [Segment(handle(s), token_ids=[7, 8, s.length, 9], position=2) for s in states]
    answer = harness.step(draft, truncate=True)
    ids = [1, 2, 7, 8, 3, 9]
    assert wire.to_numpy(answer.outputs[1])[:, 0, 0].astype(int).tolist() == 3 * expected(ids, 2, 6)
    assert all(held_ids(harness.services[0], state) == ids for state in states)
    assert answer.epoch.tolist() == [state.epoch for state in states]
    residual = np.ones((18, HC, DIM), np.float32)
    reads = [Segment(handle(state), position=0) for state in states]
    answer = harness.step(reads, output="residual", residual=residual)
    got = (wire.to_numpy(answer.outputs[1])[:, 1, 3] - 1).astype(int).tolist()
    assert got == 3 * expected(ids, 0, 6)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 99])
def test_lookback_segments_are_split_with_the_right_lookback(max_tokens: int) -> None:
    harness = Harness([FakeService(max_tokens=max_tokens)])
    segments = [
        Segment(
            token_ids=[1, 2, 3, 4], position=9, lookback=[5, None, 6], mask=[True] * 3 + [False]
        ),
        Segment(token_ids=[8, 9], position=0, lookback=[]),
    ]
    answer = harness.step(segments)
    first = [5, DEAD, 6, 1, 2, 3, DEAD]
    second = [DEAD, DEAD, DEAD, 8, 9]
    got = wire.to_numpy(answer.outputs[1])[:, 0, 0].astype(int).tolist()
    assert got == expected(first, 3, 7) + expected(second, 3, 5)
    assert answer.dead.tolist() == [False, False, False, True, False, False]
    assert answer.epoch.tolist() == [-1, -1]


def test_one_expired_session_of_a_step_is_opened_again(harness: Harness) -> None:
    states = [harness.open() for _ in range(4)]
    for state in states:
        harness.push(state, [1, 2])
    del harness.services[0].sessions[states[2].session_id]
    harness.step([Segment(handle(state), token_ids=[3]) for state in states])
    assert all(held_ids(harness.services[0], state) == [1, 2, 3] for state in states)


def test_a_step_refused_for_two_reasons_is_told_with_every_segment(harness: Harness) -> None:
    states = [harness.open() for _ in range(3)]
    del harness.services[0].sessions[states[0].session_id]
    segments = [
        Segment(handle(states[0]), token_ids=[1]),
        Segment(handle(states[1]), token_ids=[1]),
    ]
    segments.append(Segment(handle(states[2]), token_ids=[1], position=5))
    with pytest.raises(problems.UnknownSession) as caught:
        harness.step(segments)
    assert [(s["index"], s["code"]) for s in caught.value.segments] == [
        (0, "unknown_session"),
        (2, "gap"),
    ]
    assert all(state.length == 0 and state.unsettled is None for state in states)


def test_another_rank_reads_by_session_id_position_and_epoch(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [4, 5, 6])
    reader = Harness(harness.services)
    segment = Segment(state.session_id, position=1, count=2, epoch=state.epoch)
    answer = reader.step([segment])
    assert wire.to_numpy(answer.outputs[1])[:, 0, 0].astype(int).tolist() == expected(
        [4, 5, 6], 1, 3
    )
    with pytest.raises(problems.StaleEpoch):
        reader.step([Segment(state.session_id, position=1, count=2, epoch=state.epoch + 1)])
    with pytest.raises(problems.NotPushed):
        reader.step([Segment(state.session_id, position=3, count=1, epoch=state.epoch)])


def test_a_mask_that_the_service_does_not_hold_is_noticed(harness: Harness) -> None:
    state = harness.open()
    harness.push(state, [4, 5], [True, False])
    assert harness.kv(state, 0, 2) == expected([4, DEAD], 0, 2)
    held_ids(harness.services[0], state)[1] = 5
    with pytest.raises(problems.BadAnswer, match="dead"):
        harness.kv(state, 0, 2)


def test_an_answer_with_another_length_leaves_the_session_in_doubt(harness: Harness) -> None:
    state = harness.open()

    def network(request: Request) -> Response:
        response = harness.deliver(request)
        body = bytes(response.body).replace(b'"length": 1', b'"length": 2')
        return Response(response.status, response.headers, memoryview(body))

    harness.network = network
    with pytest.raises(problems.BadAnswer, match="length"):
        harness.push(state, [5])
    harness.network = None
    harness.push(state, [6])
    assert held_ids(harness.services[0], state) == [6]


def test_a_closed_session_is_not_used_again(harness: Harness) -> None:
    state = harness.open()
    harness.run(harness.protocol.close(state))
    harness.run(harness.protocol.close(state))
    assert harness.services[0].sessions == {}
    with pytest.raises(problems.SessionClosed):
        harness.push(state, [1])


def test_closing_a_session_that_expired_or_was_cut_is_no_error(harness: Harness) -> None:
    gone, cut = harness.open(), harness.open()
    del harness.services[0].sessions[gone.session_id]
    harness.services[0].sessions[cut.session_id].epoch += 1
    for state in (gone, cut):
        harness.run(harness.protocol.close(state))
    assert harness.services[0].sessions == {}


def test_the_owner_is_told_at_every_open() -> None:
    harness = Harness([FakeService()], owner="runner-1")
    state = harness.open()
    harness.run(harness.protocol.fork(state, None))
    bodies = [bytes(r.body[0]) for r in harness.services[0].requests if r.method == "POST"]
    assert all(b'"owner":"runner-1"' in body for body in bodies)
    assert harness.run(harness.protocol.close_owner("runner-0")) == 2


def test_a_lookback_without_a_position_is_not_dropped(harness: Harness) -> None:
    harness.services[0].refuse = lambda request: (
        Refusal(422, "schema") if b'"lookback":[7]' in b"".join(map(bytes, request.body)) else None
    )
    with pytest.raises(problems.SchemaProblem):
        harness.open(0, [7])


def test_a_problem_says_each_value_once() -> None:
    told = {"code": "gap", "detail": "expected at most 4, got 9", "expected": 4, "got": 9}
    assert str(problems.problem_of(409, told)) == "409 gap: expected at most 4, got 9"
    told["detail"] = "behind the end"
    assert str(problems.problem_of(409, told)) == "409 gap: behind the end, expected 4, got 9"


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(5, count=1, position=0), Segment(token_ids=[1], lookback=[])],
        [Segment(token_ids=[1])],
        [Segment(lookback=[], position=0, count=1)],
        [Segment(5, token_ids=[1], position=0), Segment(6, position=0, count=1)],
        [Segment(5, token_ids=[1])],
        [Segment(5, position=3)],
        [Segment(5, token_ids=[1], position=0, count=2)],
        [Segment(5, token_ids=[1.5], position=0)],
        [Segment(5, token_ids=[1], position=0, mask=[1])],
        [Segment(5, token_ids=[[1]], position=0)],
        [Segment(token_ids=[1], lookback=[1, 2, 3, 4], position=5)],
    ],
)
def test_segments_that_say_too_little_or_two_things_are_refused(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match=r"expected|needs"):
        batch_of(segments, 4)


class Storm:
    """A network that loses, delays and repeats, in front of services that forget and refuse."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness, self.dice = harness, random.Random(seed)
        self.late: list[Request] = []
        self.is_calm = False

    def __call__(self, request: Request) -> Response:
        dice, chance = self.dice, self.dice.random()
        if self.is_calm:
            return self.harness.deliver(request)
        if self.late and dice.random() < 0.3:
            self.deliver_late(self.late.pop(dice.randrange(len(self.late))))
        if chance < 0.03:
            raise ConnectionLost("refused", connected=False)
        if chance < 0.07:
            self.late.append(request)
            raise ConnectionLost("lost on the way there")
        if chance < 0.11:
            self.harness.deliver(request)
            raise ConnectionLost("lost on the way back")
        if chance < 0.14:
            self.late.append(request)
        if chance < 0.16:
            return _problem(429, "overloaded")
        if chance < 0.18:
            return _problem(503, "loading")
        if chance < 0.20 and (sessions := self.harness.services[request.replica].sessions):
            del sessions[dice.choice(list(sessions))]
        return self.harness.deliver(request)

    def deliver_late(self, request: Request) -> None:
        stale = Request(request.method, request.target, request.headers, request.body)
        self.harness.services[request.replica].handle(stale)


def _problem(status: int, code: str) -> Response:
    return Response(
        status,
        {"content-type": wire.PROBLEM_MEDIA},
        memoryview(f'{{"code": "{code}"}}'.encode()),
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_token_is_lost_or_doubled_in_a_storm(seed: int) -> None:
    services = [FakeService(max_tokens=16, first_epoch=10**6 * n) for n in range(1 + seed % 3)]
    harness = Harness(services)
    storm = harness.network = Storm(harness, seed)
    dice = random.Random(seed + 1000)
    models: list[tuple[SessionState, list[int]]] = []
    for _ in range(60):
        if not models or (len(models) < 4 and dice.random() < 0.1):
            models.append((harness.open(), []))
        weather(harness, dice, models)
        storm.is_calm = True
        for state, ids in models:
            assert state.length == len(ids)
            assert harness.kv(state, 0, len(ids)) == expected(ids, 0, len(ids))
        storm.is_calm = False


def weather(harness: Harness, dice: random.Random, models: list[tuple[Any, list[int]]]) -> None:
    """Do one thing to sessions and their models alike, or give it up half-way."""
    state, ids = dice.choice(models)
    protocol = harness.protocol
    more = [dice.choice([1, 2, 3, 50, DEAD]) for _ in range(dice.randrange(9))]
    live = [token != DEAD for token in more]
    position = dice.randrange(len(ids) + 1)
    match dice.randrange(8):
        case 0:
            harness.push(state, [abs(token) for token in more], live)
            ids += more
        case 1:
            harness.run(protocol.push(state, more, live, position=position, truncate=True))
            ids[position:] = more
        case 2:
            harness.run(protocol.rewind(state, position))
            del ids[position:]
        case 3:
            child = harness.run(protocol.fork(state, position))
            models.append((child, ids[:position]))
            del models[: len(models) - 4]
        case 4:
            segments = [Segment(handle(s), token_ids=[abs(t) for t in more]) for s, _ in models]
            harness.step(segments)
            for _, history in models:
                history += [abs(token) for token in more]
        case 5:
            if give_up(harness, dice, protocol.push(state, more[:5], live[:5])):
                ids += more[:5]
        case 6:
            cut = protocol.push(state, more[:5], live[:5], position=position, truncate=True)
            if give_up(harness, dice, cut):
                ids[position:] = more[:5]
        case 7:
            if give_up(harness, dice, protocol.rewind(state, position)):
                del ids[position:]


def give_up(harness: Harness, dice: random.Random, effects: Generator[Any, Any, Any]) -> bool:
    """Abandon a call at one of its requests, which may arrive, arrive late, or never.

    Return True if it was done before.
    """
    effect = next(effects)
    for _ in range(dice.randrange(3)):
        try:
            effect = effects.send(harness.deliver(effect))
        except StopIteration:
            return True
    if dice.random() < 0.3:
        harness.deliver(effect)
    elif dice.random() < 0.5:
        harness.network.late.append(effect)  # type: ignore[union-attr]
    effects.close()
    return False
