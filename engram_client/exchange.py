"""One call, until it is answered: re-opening, settling, waiting, moving on. Without I/O.

Everything here is a generator of effects: it yields a `Request` and is sent the `Response` (or
thrown `ConnectionLost`), or yields a `Pause`. The blocking and the asyncio client drive the same
generators, and so do tests.

What makes it safe (docs/sessions.md): a call of unknown outcome is repeated unchanged; every call
carries the epoch it is meant for; what was given up half-way is settled before the next call, by
a rewind with the epoch we know (that fences the lost call off), or else by opening the session
again from our own copy of its ids, under an epoch never used before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from engram_client import wire
from engram_client.http1 import Request, Response
from engram_client.messages import (
    close_request,
    json_of,
    note_session,
    open_request,
    push_request,
    rewind_request,
)
from engram_client.problems import (
    BadAnswer,
    BodyTooLarge,
    ConnectionLost,
    EngramProblem,
    PushedMeanwhile,
    SessionClosed,
    StaleEpoch,
    TooManyTokens,
    Transient,
    UnknownSession,
    WrongTable,
    problem_of,
)
from engram_client.retry import Patience
from engram_client.state import NOWHERE, SessionState
from engram_client.wire import TensorView

T = TypeVar("T")


@dataclass(frozen=True)
class Pause:
    """An effect: go on after this many seconds."""

    seconds: float


Effects = Generator[Request | Pause, Any, T]

LOCK_POLL_S = 0.001


@dataclass(frozen=True)
class Facts:
    """What the client needs of /v1/info."""

    identity: str
    max_tokens: int
    max_ngram_size: int
    hc_mult: int
    dim: int
    n_hash_cols: int
    head_dim: int

    def answer_bytes(self, num_tokens: int, num_layers: int) -> int:
        """Return a bound for any answer about this many tokens and layers."""
        kv = (self.hc_mult + 1) * self.dim * 4
        rows = self.n_hash_cols * max(self.head_dim * 4 + 64, 8)
        return wire.MAX_HEAD_BYTES + 64 + num_tokens * (num_layers * max(kv, rows) + 32)

    def check_out(self, output: str, out: TensorView, *, stored: bool) -> None:
        """Refuse memory that no answer of this kind fits, before anything is sent.

        output: kv, rows or hash_ids. Raises ValueError.
        """
        tail: tuple[int | str, ...]
        match output:
            case "kv":
                dtype, tail = "BF16", (self.hc_mult + 1, self.dim)
            case "rows":
                dtype = "U8" if stored else "BF16"
                tail = (self.n_hash_cols, "row_bytes" if stored else self.head_dim)
            case _:
                dtype, tail = "I64", (self.n_hash_cols,)
        got = out.shape[1:]
        fits = len(got) == len(tail) and all(
            want in (size, "row_bytes") for size, want in zip(got, tail, strict=True)
        )
        if out.dtype != dtype or not fits:
            want = ", ".join(map(str, ("T", *tail)))
            raise ValueError(
                f"out: expected {dtype} [{want}] for {output}, got {out.dtype} {list(out.shape)}"
            )

    @property
    def weights_bytes(self) -> int:
        """A bound for the weights of one layer."""
        wkv = (self.hc_mult + 1) * self.dim * self.n_hash_cols * self.head_dim * 2
        return wkv + self.hc_mult * self.dim * 4 + wire.MAX_HEAD_BYTES + 64


class Need(NamedTuple):
    """What a call needs of one session.

    position .. end: what it reads, or position = end where a push or a cut begins
    fence: lowest position the call may change, None for a read
    length: of the session, where a push goes to its end; None: its place was given
    """

    state: SessionState
    position: int
    end: int
    fence: int | None = None
    length: int | None = None


class Exchange:
    """The addresses of one service and the way calls reach it. replica: index of the address in
    use; sessions are opened again where it moves to."""

    def __init__(
        self,
        num_replicas: int,
        *,
        owner: str | None,
        reconnect_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.replica = 0
        self._num_replicas = num_replicas
        self._owner = owner
        self._reconnect_s = reconnect_s
        self._clock = clock
        self._facts: dict[int, Facts] = {}
        self._identity: str | None = None
        self._piece: dict[str, int] = {}
        self._num_reopened = 0

    def _once(self, replica: int, request: Request) -> Effects[Response]:
        """Send one request, made for this, to one address. Raises ConnectionLost, EngramProblem."""
        headers = list(request.headers)
        if self._identity is not None:
            headers.append((wire.TABLE, self._identity))
        request.headers, request.replica = headers, replica
        response: Response = yield request
        if 200 <= response.status < 300:
            return response
        raise _refusal(response)

    def call(
        self,
        needs: Sequence[Need | None],
        build: Callable[[], Request],
        take: Callable[[Response, int], T],
        *,
        learns: bool = True,
        given: Sequence[SessionState] = (),
    ) -> Effects[T]:
        """Make one call on sessions that are open and settled, until it is answered.

        given: sessions that the caller has locked, and unlocks

        needs: by segment, None where the session is not ours; build: the request as of now;
        take: reads the answer (and the replica it came from) while writes are locked
        Raises EngramProblem (a refusal that no repetition changes), EngramUnavailable, BadAnswer.
        """
        patience = Patience(self._reconnect_s, self._clock, self._num_replicas)
        writes = [need for need in needs if need is not None and need.fence is not None]
        held: list[SessionState] = [*given]
        lost: dict[int, tuple[int, int]] = {}  # where and under which epoch this call was lost
        try:
            yield from self._lock(writes, held)
            _check_ends(writes)
            while True:
                replica, was_sent, reopened = self.replica, False, self._num_reopened
                concerned = needs
                try:
                    if learns:
                        yield from self._learn(replica)
                    for need in needs:
                        if need is not None and not _is_ready(need.state, replica, lost):
                            concerned = [need]
                            yield from self._ready(need, replica, held, lost)
                    concerned, was_sent = needs, True
                    _mark(writes)
                    response = yield from self._once(replica, build())
                except (ConnectionLost, EngramProblem) as error:
                    overtaken = was_sent and not writes and reopened != self._num_reopened
                    if overtaken and isinstance(error, StaleEpoch):
                        continue  # another thread has opened a session again meanwhile
                    if was_sent and _is_unknown(error):
                        lost = {need.state.session_id: _place(need.state) for need in writes}
                    elif was_sent and not lost:
                        _unmark(writes)
                    yield from self._recover(error, concerned, patience, replica)
                else:
                    result = take(response, replica)
                    _unmark(writes)
                    return result
        finally:
            for state in held[len(given) :]:
                state.lock.release()

    def _recover(
        self,
        error: ConnectionLost | EngramProblem,
        needs: Sequence[Need | None],
        patience: Patience,
        replica: int,
    ) -> Effects[None]:
        """Prepare the next try after a failure, or raise it."""
        lost = _lost_sessions(error, needs)
        passes = isinstance(error, ConnectionLost | Transient) or (
            isinstance(error, WrongTable) and self._num_replicas > 1
        )
        if not lost and not passes:
            raise error
        moves = not lost and patience.should_move(error)
        pause_s = patience.pause_s(error)
        for state in lost:
            state.replica = NOWHERE
        if moves and self.replica == replica:
            self.replica = (replica + 1) % self._num_replicas
        if pause_s > 0:
            yield Pause(pause_s)

    def info(self) -> Effects[dict[str, Any]]:
        """Ask what is served."""
        build = partial(Request, "GET", "/v1/info")
        info, _ = yield from self.call([], build, self._note_info, learns=False)
        return info

    def facts(self) -> Effects[Facts]:
        """Return what is known of the service in use, asking it at first."""
        if (known := self._facts.get(self.replica)) is not None:
            return known
        build = partial(Request, "GET", "/v1/info")
        _, facts = yield from self.call([], build, self._note_info, learns=False)
        return facts

    @property
    def identity(self) -> str:
        """The table's, as every request names it; facts are known."""
        assert self._identity is not None
        return self._identity

    def is_one_request(self, state: SessionState, kind: str, count: int) -> bool:
        """Tell whether a read of `count` positions is one request, with nothing to do before it."""
        facts = self._facts.get(self.replica)
        return (
            facts is not None
            and state.replica == self.replica
            and state.unsettled is None
            and not state.is_closed
            and 0 < count <= self._piece.get(kind, facts.max_tokens)
        )

    def _learn(self, replica: int) -> Effects[None]:
        if replica not in self._facts:
            response = yield from self._once(replica, Request("GET", "/v1/info"))
            self._note_info(response, replica)

    def _note_info(self, response: Response, replica: int) -> tuple[dict[str, Any], Facts]:
        info = json_of(response)
        try:
            geometry, limits = info["geometry"], info["limits"]
            sizes = ("max_ngram_size", "hc_mult", "dim", "n_hash_cols", "head_dim")
            facts = Facts(
                info["table"]["identity"],
                limits["max_tokens"],
                *(int(geometry[name]) for name in sizes),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"/v1/info: {error!r} is missing or of another type") from error
        self._facts[replica] = facts
        self._identity = self._identity or facts.identity
        return info, facts

    def _lock(self, writes: Sequence[Need], held: list[SessionState]) -> Effects[None]:
        """Lock the sessions that are written, in the order of their ids."""
        states = {need.state.session_id: need.state for need in writes}
        for session_id in sorted(states):
            state = states[session_id]
            if any(state is other for other in held):
                continue
            while not state.lock.acquire(blocking=False):
                yield Pause(LOCK_POLL_S)
            held.append(state)

    def _ready(
        self,
        need: Need,
        replica: int,
        held: Sequence[SessionState],
        lost: Mapping[int, tuple[int, int]],
    ) -> Effects[None]:
        """Open a session here, or settle what is in doubt about it."""
        state = need.state
        if state.is_closed:
            raise SessionClosed(f"session {state.session_id} was closed: open another")
        taken: list[SessionState] = []
        if all(state is not other for other in held):
            yield from self._lock([need], taken)
        try:
            if state.replica != replica:
                yield from self._reopen(state, replica, need.position)
            elif not _is_ready(state, replica, lost):
                yield from self._settle(state, replica, need.position)
        finally:
            for state in taken:
                state.lock.release()

    def _settle(self, state: SessionState, replica: int, needed: int) -> Effects[None]:
        """Undo what a call of unknown outcome may have done, and keep it from being done later."""
        assert state.unsettled is not None
        fence = state.unsettled
        try:
            response = yield from self._once(replica, rewind_request(state, fence))
        except EngramProblem as problem:
            if isinstance(problem, Transient):
                raise
            yield from self._reopen(state, replica, needed)
            return
        note_session(state, json_of(response), expected_length=fence)
        yield from self._restore(state, replica)

    def _reopen(self, state: SessionState, replica: int, needed: int) -> Effects[None]:
        """Open a session anew from our own ids, so that positions from `needed` on are held."""
        state.replica = NOWHERE
        yield from self._forget(state, replica)
        start = state.reopen_position(min(needed, state.length))
        width = self._facts[replica].max_ngram_size - 1
        request = open_request(state, start, state.lookback(start, width), self._owner)
        document = json_of((yield from self._once(replica, request)))
        note_session(state, document, expected_length=start)
        self._num_reopened += 1
        state.replica, state.unsettled = replica, start
        yield from self._restore(state, replica)

    def _forget(self, state: SessionState, replica: int) -> Effects[None]:
        """Close what an address may still hold under this id from earlier."""
        try:
            yield from self._once(replica, close_request(state, state.epoch))
        except UnknownSession:
            return
        except StaleEpoch as stale:
            if stale.epoch is None:
                raise BadAnswer("stale_epoch without the present epoch") from stale
            yield from self._once(replica, close_request(state, stale.epoch))

    def _restore(self, state: SessionState, replica: int) -> Effects[None]:
        """Push our own ids from `unsettled` to the end; none of them is worked ahead.

        What is confirmed is settled: where this fails, it goes on from there.
        """
        begin = state.unsettled
        while begin is not None and begin < state.length:
            end = min(begin + self._facts[replica].max_tokens, state.length)
            ids = state.history.read(begin, end)
            mask = None if (ids >= 0).all() else (ids >= 0).tolist()
            request = push_request(state, begin, ids.clip(0).tolist(), mask, ahead=False)
            response = yield from self._once(replica, request)
            note_session(state, json_of(response), expected_length=end)
            begin = state.unsettled = end
        state.unsettled = None

    def split(
        self, kind: str, total: int, call: Callable[[int, int], Effects[T]]
    ) -> Effects[list[T]]:
        """Make a call over `total` tokens in pieces that the service takes, in order.

        kind: what the size of a piece is remembered for; call: over tokens begin .. end - 1
        """
        facts = yield from self.facts()
        parts: list[T] = []
        begin = 0
        while True:
            piece = max(1, min(self._piece.get(kind, facts.max_tokens), total - begin))
            end = min(begin + piece, total)
            try:
                parts.append((yield from call(begin, end)))
            except (TooManyTokens, BodyTooLarge):
                if end - begin <= 1:
                    raise
                self._piece[kind] = (end - begin) // 2
                continue
            begin = end
            if begin >= total:
                return parts


def _is_ready(state: SessionState, replica: int, lost: Mapping[int, tuple[int, int]]) -> bool:
    """Tell whether a session is open here, and no call in doubt but the one that was `lost` and
    is about to be repeated unchanged."""
    if state.replica != replica or state.is_closed:
        return False
    return state.unsettled is None or lost.get(state.session_id) == _place(state)


def _check_ends(writes: Sequence[Need]) -> None:
    """Refuse a push to an end that another thread's push has moved while this one waited for it:
    the same ids, sent for the old end, would count as a repetition and be stored once."""
    for state, _, _, _, length in writes:
        if length is not None and state.length != length:
            raise PushedMeanwhile(
                f"session {state.session_id}: expected the length {length} at which this push "
                f"began, got {state.length}: another thread has pushed meanwhile; push to one "
                "session from one thread at a time, or give the position. Nothing of this call "
                "was sent, but for earlier parts of one above the service's limits"
            )


def _mark(writes: Sequence[Need]) -> None:
    """Note what is in doubt from now until an answer comes."""
    for need in writes:
        assert need.fence is not None
        known = need.state.unsettled
        need.state.unsettled = need.fence if known is None else min(known, need.fence)


def _place(state: SessionState) -> tuple[int, int]:
    return state.replica, state.epoch


def _unmark(writes: Sequence[Need]) -> None:
    for need in writes:
        need.state.unsettled = None


def _is_unknown(error: ConnectionLost | EngramProblem) -> bool:
    """Tell whether the request may have been carried out."""
    if isinstance(error, ConnectionLost):
        return error.connected
    return error.status in (500, 502, 504)


def _lost_sessions(
    error: ConnectionLost | EngramProblem, needs: Sequence[Need | None]
) -> list[SessionState]:
    """Return the sessions to open again; none if anything else was refused too."""
    if isinstance(error, ConnectionLost | Transient):
        return []
    if not error.segments:
        need = needs[0] if len(needs) == 1 else None
        return [need.state] if need is not None and _is_lost(error.code, need) else []
    lost = []
    for segment in error.segments:
        index = segment.get("index")
        need = needs[index] if type(index) is int and 0 <= index < len(needs) else None
        if need is None or not _is_lost(str(segment.get("code")), need):
            return []
        lost.append(need.state)
    return lost


def _is_lost(code: str, need: Need) -> bool:
    """Tell whether a refusal means that the service does not hold what we have pushed."""
    state = need.state
    match code:
        case "unknown_session" | "session_exists":  # exists: an open given up earlier came late
            return True
        case "gap":
            return need.position <= state.length
        case "not_pushed":
            return need.end <= state.length
        case "history_truncated":
            return need.position >= state.floor
        case "stale_epoch":
            return state.unsettled is not None or state.replica == NOWHERE
    return False


def _refusal(response: Response) -> EngramProblem:
    """Return the exception of a refused request."""
    fields: dict[str, Any] = {}
    if response.headers.get("content-type", "").startswith(wire.PROBLEM_MEDIA):
        fields = json_of(response)
    if type(asked_ms := fields.get("retry_after_ms")) is int:
        return problem_of(response.status, fields, asked_ms / 1000)
    asked = response.headers.get("retry-after", "")
    return problem_of(response.status, fields, float(asked) if asked.isdecimal() else 0.0)
