"""Steps of sessions that update a residual, or push alone, asked for as `direct.py` does: a decode
step's pushes and reads in one head, one body, one answer.

A push holds its sessions' locks and marks what is in doubt until its answer is taken, as the
protocol does; where the answer is another than the ordinary one, the protocol makes the same call
and is given that answer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_client import wire
from engram_client.direct import MAX_BYTES, Ask, Direct, Kind, Staged
from engram_client.http1 import Request, format_head
from engram_client.problems import BadAnswer
from engram_client.protocol import EngramProtocol, StepOptions
from engram_client.segments import Segment, StepResult
from engram_client.shared import Region
from engram_client.state import SessionState

MAX_PUSHED = 1024
"""Tokens that are pushed alone; beside more of them the protocol's work is nothing."""

_EMPTY = np.empty((0, 0, 0), np.float32)
NOTHING = Kind(_EMPTY, is_torch=False)
"""The tensor of a step that reads none."""

_ANSWER = re.compile(
    rb"HTTP/1\.1 200 OK\r\ndate: [ -~]{29}\r\ncontent-type: application/octet-stream\r\n"
    rb"content-length: ([0-9]{1,19})\r\nx-request-id: [!-~]{1,99}\r\n"
    rb"(?:server-timing: [ -~]{1,999}\r\n)?\r\n"
)
"""The head of our service's answer to a step and nothing but it."""


class StepAsk(Ask):
    """One request of S segments. options: of the step; counts: of tokens; token_ids: [T], pushed
    first, None: nothing is; numbers: what was sent of the sessions; length, epoch, dead: what came
    of it, int64 [S], int64 [S], uint8 [T]"""

    __slots__ = (
        *("counts", "dead", "epoch", "held", "length", "numbers", "options", "positions"),
        *("states", "token_ids"),
    )
    counts: list[int]
    dead: bytes
    epoch: NDArray[np.int64]
    held: list[SessionState]
    length: NDArray[np.int64]
    numbers: bytes
    options: StepOptions
    positions: list[int]
    states: list[SessionState]
    token_ids: list[int] | None

    @property
    def key(self) -> object:
        """See `Ask`."""
        options = self.options
        how = options.layers, options.truncate, options.wait_ms, options.ahead
        return self.kind, len(self.states), self.token_ids and len(self.token_ids), how

    def plan(self, identity: str, fixed: bytes, region: Region | None) -> StepPlan:
        """See `Ask`."""
        return StepPlan(self, identity, fixed)

    def buffers(self, plan: Any) -> Sequence[bytes | memoryview]:
        """See `Ask`."""
        self.numbers = plan.pack(self)
        if self.kind is NOTHING:
            return plan.head, self.numbers
        return plan.head, self.sent(plan.staged), self.numbers

    def is_of(self, request: Request) -> bool:
        """See `Ask`; sessions, positions, epochs and ids are in the body, behind the residual."""
        return (
            request.replica == self.replica
            and request.target == self.options.target
            and b"".join(request.sent_body).endswith(self.numbers)
        )

    # ---- the sessions

    def begin(self, protocol: EngramProtocol, options: StepOptions, columns: Columns) -> bool:
        """Lock and mark sessions that are pushed to; False: one is busy, or to be settled first."""
        self.states, self.positions, self.counts, self.token_ids, lengths = columns
        self.options, self.held = options, []
        if self.token_ids is not None and not self._lock():
            return False
        kind, count = f"step {self.options.output}", sum(self.counts)
        if not all(protocol.is_one_request(each, kind, count) for each in self.states):
            self.leave()
            return False
        if self.token_ids is not None:
            if [state.length for state in self.states] != lengths:
                self.leave()  # another thread has moved an end that these positions are of
                return False
            for state, position in zip(self.states, self.positions, strict=True):
                state.unsettled = position if self.options.truncate else state.length
        return True

    def _lock(self) -> bool:
        """Lock every session; False: none is. One that is there twice is busy."""
        for state in self.states:
            if not state.lock.acquire(blocking=False):
                self.leave()
                return False
            self.held.append(state)
        return True

    def unmark(self) -> None:
        """Nothing is in doubt, or the protocol will see to it."""
        for state in self.held:
            state.unsettled = None

    def leave(self) -> None:
        """Unlock the sessions."""
        while self.held:
            self.held.pop().lock.release()

    def answer(self) -> StepResult:
        """Take over what the service holds now. Raises BadAnswer: another length."""
        if self.token_ids is not None:
            self._record(self.token_ids)
            self.unmark()
        dead = np.frombuffer(self.dead, np.uint8).astype(np.bool_)
        tensors = {} if self.kind is NOTHING else {self.options.layers[0]: self.result}
        return StepResult(self.length, self.epoch, dead, tensors)

    def _record(self, token_ids: list[int]) -> None:
        truncates, begin = self.options.truncate, 0
        rows = zip(
            *(self.states, self.positions, self.counts),
            *(self.length.tolist(), self.epoch.tolist()),
            strict=True,
        )
        for state, position, count, length, epoch in rows:
            end = position + count
            expected = end if truncates else max(state.length, end)
            if length != expected:
                raise BadAnswer(
                    f"session {state.session_id}: expected length {expected}, got {length}"
                )
            state.history.write(position, token_ids[begin : begin + count])
            if truncates:
                state.history.cut(end)
            state.epoch, begin = epoch, begin + count


class StepPlan:
    """The plan of a step. head: of request and file; staged: for far tensors"""

    def __init__(self, ask: StepAsk, identity: str, fixed: bytes) -> None:
        kind, options = ask.kind, ask.options
        count = sum(ask.counts)
        each: tuple[int, ...] = (len(ask.states),)
        specs: dict[str, wire.TensorSpec] = {"count": ("I32", each)}
        specs |= dict.fromkeys(("position", "session_id", "epoch"), ("I64", each))
        if ask.token_ids is not None:
            specs["token_ids"] = ("I64", (count,))
        told: dict[str, wire.TensorSpec] = {
            "length": ("I64", each),
            "epoch": ("I64", each),
            "dead": ("U8", (count,)),
        }
        residual: dict[str, wire.TensorSpec] = {}
        if kind is not NOTHING:
            residual["residual"] = kind.dtype_name, kind.shape
            told[f"residual.{options.layers[0]}"] = residual["residual"]
        head, order = wire.encode_head({**specs, **residual})
        self._order = order[len(residual) :]  # a residual is the largest
        self._form = struct.Struct(
            "<" + "".join(f"{specs[name][1][0]}{_LETTERS[specs[name][0]]}" for name in self._order)
        )
        body = [head, bytes(kind.num_bytes + self._form.size)]
        headers = [("Content-Type", wire.TENSOR_MEDIA), (wire.TABLE, identity)]
        self.head = format_head(Request("POST", options.target, headers, body), fixed) + head
        self.staged = Staged(kind, ask.source) if kind.is_far else None
        self._answer, names = wire.encode_head(told)
        self._num_bytes = wire.encoded_size(told)
        self._places: dict[str, slice] = {}
        at = len(self._answer)
        for name in names:
            end = at + wire.num_bytes(told[name])
            self._places[name.partition(".")[0]] = slice(at, end)
            at = end

    def pack(self, ask: StepAsk) -> bytes:
        """Return the tensors behind the residual."""
        values: dict[str, list[int]] = {
            "count": ask.counts,
            "position": ask.positions,
            "session_id": [state.session_id for state in ask.states],
            "epoch": [state.epoch for state in ask.states],
            "token_ids": ask.token_ids or [],
        }
        return self._form.pack(*chain.from_iterable([values[name] for name in self._order]))

    def find(self, answer: bytearray, end: int) -> tuple[int, int]:
        """See `Plan`."""
        found = _ANSWER.match(answer, 0, end)
        if found is None or int(found[1]) != self._num_bytes:
            return 0, 0
        return found.end(), self._num_bytes

    def land(self, ask: StepAsk, body: memoryview) -> bool:
        """See `Plan`."""
        places = self._places
        if body[: len(self._answer)] != self._answer:
            return False
        ask.length = np.frombuffer(bytes(body[places["length"]]), np.int64)
        ask.epoch = np.frombuffer(bytes(body[places["epoch"]]), np.int64)
        ask.dead = bytes(body[places["dead"]])
        if ask.kind is NOTHING:
            ask.is_landed = True
        else:
            ask.land(body[places["residual"]], self.staged)
        return True


_TOKEN_BYTES = 48
"""More than all that is said of a token beside its residual, asked or answered."""

_LETTERS = {"I32": "i", "I64": "q"}


def step_ask(
    direct: Direct,
    segments: Sequence[Segment],
    options: StepOptions,
    residual: Any,
    out: Any,
) -> StepAsk | None:
    """Return the request of a step, its sessions locked and marked if they are pushed to.

    None: it is for the protocol to make.
    """
    if options.output == "none":
        return _push_ask(direct, segments, options) if residual is None and out is None else None
    if options.output != "residual" or len(options.layers) != 1 or options.stored:
        return None
    kind = direct.kind_of(residual)
    if kind is None or not 0 < len(segments) <= kind.shape[0]:
        return None
    if kind.num_bytes + kind.shape[0] * _TOKEN_BYTES > MAX_BYTES:
        return None
    taken = _columns(segments)
    if taken is None or sum(taken[2]) != kind.shape[0]:
        return None
    ask = direct.of(residual, out, kind, taken[0][0].replica, StepAsk)
    if not isinstance(ask, StepAsk):
        return None
    return ask if ask.begin(direct.protocol, options, taken) else None


def _push_ask(direct: Direct, segments: Sequence[Segment], options: StepOptions) -> StepAsk | None:
    taken = _columns(segments) if 0 < len(segments) <= MAX_PUSHED else None
    if taken is None or not 0 < len(taken[3] or ()) <= MAX_PUSHED or options.stored:
        return None
    ask = StepAsk(NOTHING, _EMPTY, _EMPTY, taken[0][0].replica)
    return ask if ask.begin(direct.protocol, options, taken) else None


Columns = tuple[list[SessionState], list[int], list[int], list[int] | None, list[int]]


def _columns(segments: Sequence[Segment]) -> Columns | None:
    """Return states, positions, counts, ids and lengths; None: a segment is unusual."""
    states, positions, counts = list[SessionState](), list[int](), list[int]()
    flat, lengths = list[int](), list[int]()
    for segment in segments:
        session, ids, position, count = segment[:4]
        state: SessionState | None = getattr(session, "state", None)
        if state is None or segment[4:] != _PLAIN:
            return None
        if ids is not None:
            if type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu":
                ids = ids.tolist()
            if type(ids) is not list and type(ids) is not tuple:
                return None
            if count is not None and count != len(ids):
                return None
            count = len(ids)
            flat += ids
        if type(count) is not int or count < 1:
            return None
        length = state.length
        if position is None:
            position = length if ids is not None else length - count
        if type(position) is not int or not state.history.origin <= position <= length:
            return None
        lengths.append(length)
        states.append(state)
        positions.append(position)
        counts.append(count)
    if flat:
        if len(flat) != sum(counts) or {*map(type, flat)} != {int}:
            return None
        if min(flat) < 0 or max(flat) >= 1 << 31:  # for the service to refuse
            return None
    return states, positions, counts, flat or None, lengths


_PLAIN = (None, None, None, None)
"""mask, lookback, hash_ids and epoch of a segment that has none."""
