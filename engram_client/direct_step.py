"""Steps of one segment that update a residual, asked for as `direct.py` does: a decode step's push
and read in one head, one body, one answer.

A push holds its session's lock and marks what is in doubt until its answer is taken, as the
protocol does; where the answer is another than the ordinary one, the protocol makes the same call
and is given that answer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from engram_client import wire
from engram_client.direct import Ask, Direct, Staged
from engram_client.http1 import Request, format_head
from engram_client.problems import BadAnswer
from engram_client.protocol import EngramProtocol, StepOptions
from engram_client.segments import Segment, StepResult
from engram_client.shared import Region
from engram_client.state import SessionState

_ANSWER = re.compile(
    rb"HTTP/1\.1 200 OK\r\ndate: [ -~]{29}\r\ncontent-type: application/octet-stream\r\n"
    rb"content-length: ([0-9]{1,19})\r\nx-request-id: [!-~]{1,99}\r\n"
    rb"(?:server-timing: [ -~]{1,999}\r\n)?\r\n"
)
"""The head of our service's answer to a step and nothing but it."""


class StepAsk(Ask):
    """One request. options: of the step; token_ids: pushed first, None: nothing is; numbers: what
    was sent of the session; length, epoch, dead: what came of it"""

    __slots__ = (
        *("dead", "epoch", "is_locked", "length", "numbers", "options", "position", "state"),
        "token_ids",
    )
    dead: bytes
    epoch: int
    is_locked: bool
    length: int
    numbers: bytes
    options: StepOptions
    position: int
    state: SessionState
    token_ids: list[int] | None

    @property
    def key(self) -> object:
        """See `Ask`."""
        options = self.options
        how = options.layers, options.truncate, options.wait_ms, options.ahead
        return self.kind, self.token_ids is None, how

    def plan(self, identity: str, fixed: bytes, region: Region | None) -> StepPlan:
        """See `Ask`."""
        return StepPlan(self, identity, fixed)

    def buffers(self, plan: Any) -> Sequence[bytes | memoryview]:
        """See `Ask`."""
        values = [self.kind.shape[0], self.position, self.state.session_id, self.state.epoch]
        self.numbers = plan.pack(values, self.token_ids)
        return plan.head, self.sent(plan.staged), self.numbers

    def is_of(self, request: Request) -> bool:
        """See `Ask`; sessions, positions, epochs and ids are in the body, behind the residual."""
        return (
            request.replica == self.replica
            and request.target == self.options.target
            and b"".join(request.sent_body).endswith(self.numbers)
        )

    # ---- the session

    def begin(self, protocol: EngramProtocol) -> bool:
        """Lock and mark a session that is pushed to; False: it is busy, or to be settled first."""
        state, pushes = self.state, self.token_ids is not None
        if pushes and not state.lock.acquire(blocking=False):
            return False
        self.is_locked = pushes
        count = self.kind.shape[0]
        if not protocol.is_one_request(state, "step residual", count):
            self.leave()
            return False
        if pushes:
            state.unsettled = self.position if self.options.truncate else state.length
        return True

    def unmark(self) -> None:
        """Nothing is in doubt, or the protocol will see to it."""
        if self.is_locked:
            self.state.unsettled = None

    def leave(self) -> None:
        """Unlock the session."""
        if self.is_locked:
            self.is_locked = False
            self.state.lock.release()

    def answer(self) -> StepResult:
        """Take over what the service holds now. Raises BadAnswer: another length."""
        state, ids = self.state, self.token_ids
        if ids is not None:
            end = self.position + len(ids)
            expected = end if self.options.truncate else max(state.length, end)
            if self.length != expected:
                raise BadAnswer(
                    f"session {state.session_id}: expected length {expected}, got {self.length}"
                )
            state.history.write(self.position, ids)
            if self.options.truncate:
                state.history.cut(end)
            state.epoch = self.epoch
            self.unmark()
        return StepResult(
            np.array([self.length]),
            np.array([self.epoch]),
            np.frombuffer(self.dead, np.uint8).astype(np.bool_),
            {self.options.layers[0]: self.result},
        )


class StepPlan:
    """The plan of a step. head: of request and file; staged: for far tensors"""

    def __init__(self, ask: StepAsk, identity: str, fixed: bytes) -> None:
        kind, options = ask.kind, ask.options
        count = kind.shape[0]
        one: tuple[int, ...] = (1,)
        specs: dict[str, wire.TensorSpec] = {"count": ("I32", one)}
        specs |= dict.fromkeys(("position", "session_id", "epoch"), ("I64", one))
        if ask.token_ids is not None:
            specs["token_ids"] = ("I64", (count,))
        residual = kind.dtype_name, kind.shape
        head, order = wire.encode_head({**specs, "residual": residual})
        self._order = order[1:]
        self._form = struct.Struct(
            "<" + "".join(f"{specs[name][1][0]}{_LETTERS[specs[name][0]]}" for name in order[1:])
        )
        body = [head, bytes(kind.num_bytes + self._form.size)]
        headers = [("Content-Type", wire.TENSOR_MEDIA), (wire.TABLE, identity)]
        self.head = format_head(Request("POST", options.target, headers, body), fixed) + head
        self.staged = Staged(kind, ask.source) if kind.is_far else None
        told: dict[str, wire.TensorSpec] = {
            "length": ("I64", one),
            "epoch": ("I64", one),
            "dead": ("U8", (count,)),
            f"residual.{options.layers[0]}": residual,
        }
        self._answer, names = wire.encode_head(told)
        self._num_bytes = wire.encoded_size(told)
        self._places: dict[str, slice] = {}
        at = len(self._answer)
        for name in names:
            end = at + wire.num_bytes(told[name])
            self._places[name.partition(".")[0]] = slice(at, end)
            at = end

    def pack(self, numbers: Sequence[int], token_ids: list[int] | None) -> bytes:
        """Return the tensors behind the residual. numbers: count, position, session_id, epoch"""
        values = dict(zip(("count", "position", "session_id", "epoch"), numbers, strict=True))
        flat: list[int] = []
        for name in self._order:
            if name == "token_ids":
                flat += token_ids or ()
            else:
                flat.append(values[name])
        return self._form.pack(*flat)

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
        ask.length = int.from_bytes(body[places["length"]], "little", signed=True)
        ask.epoch = int.from_bytes(body[places["epoch"]], "little", signed=True)
        ask.dead = bytes(body[places["dead"]])
        ask.land(body[places["residual"]], self.staged)
        return True


_LETTERS = {"I32": "i", "I64": "q"}


def step_ask(
    direct: Direct,
    segments: Sequence[Segment],
    options: StepOptions,
    residual: Any,
    out: Any,
) -> StepAsk | None:
    """Return the request of a step, its session locked and marked if it is pushed to.

    None: it is for the protocol to make.
    """
    if len(segments) != 1 or options.output != "residual" or len(options.layers) != 1:
        return None
    segment = segments[0]
    state = getattr(segment.session, "state", None)
    kind = direct.kind_of(residual)
    if kind is None or state is None or options.stored:
        return None
    if segment[4:] != (None, None, None, None):  # mask, lookback, hash_ids, epoch
        return None
    count, ids = kind.shape[0], segment.token_ids
    if ids is not None:
        if type(ids) not in (list, tuple) or len(ids) != count or {*map(type, ids)} != {int}:
            return None
        if not all(0 <= token < 1 << 31 for token in ids):  # for the service to refuse
            return None
    if segment.count not in (None, count) or (ids is None and segment.count is None):
        return None
    position = segment.position
    if position is None:
        position = state.length if ids is not None else state.length - count
    if type(position) is not int or not state.history.origin <= position <= state.length:
        return None
    ask = direct.of(residual, out, kind, state.replica, StepAsk)
    if not isinstance(ask, StepAsk):
        return None
    ask.state, ask.options, ask.position = state, options, position
    ask.token_ids = None if ids is None else list(ids)
    return ask if ask.begin(direct.protocol) else None
