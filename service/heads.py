"""Heads that were checked before, remembered by their bytes: what `recall.py` does with those of
residual reads and `step_recall.py` with those of steps.

A parser that reads the same bytes finds the same, so it is not asked again. Keys, admission and the
state of the service are looked at every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import getrandbits
from time import perf_counter
from typing import Generic, TypeVar

from engram_core.errors import EngramError
from service.access import Key
from service.bodies import Headers, Inbox
from service.calls import Call
from service.desk import GONE, AtOnce, Desk
from service.exchange import Came, Exchanges, Head, Line, Refusal
from service.operations import Operation
from service.reads import TensorRead
from service.state import Model, ServiceState

HEAD_BYTES = 5 << 10
"""Of the longest head that is remembered (`transport.MAX_KNOWN_BYTES`), with its request line."""

MAX_KNOWN = 256
"""Heads remembered; then all are forgotten."""

END = b"\r\n\r\n"
PLAIN = frozenset(
    b"host content-type content-length authorization user-agent accept accept-encoding connection "
    b"expect x-engram-shape x-engram-dtype x-engram-table x-engram-owner "
    b"x-engram-shared-body x-engram-shared-answer".split()
)
"""Heads with other headers are not remembered: they may differ from request to request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a head decides.

    told: of its headers, what the body's reception depends on; num_bytes: of the body on the socket
    is_placed: whether it may be answered in the turn it came in
    """

    key: Key
    model: Model
    headers: dict[str, str]
    told: Headers
    num_bytes: int
    is_placed: bool


K = TypeVar("K", bound=Known)


class Memory(Generic[K]):
    """Remembered heads of one operation: what reads and steps do alike with them."""

    operation: Operation

    def __init__(self, state: ServiceState, desk: Desk, exchanges: Exchanges) -> None:
        self._state, self._desk, self._exchanges = state, desk, exchanges
        self._known: dict[tuple[bool, bytes], K] = {}

    def _remember(self, line: Line, block: bytes, known: K) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[line.is_unix, block] = known

    def _recall(self, line: Line, block: bytes) -> K | None:
        """Return what a head decides, if it is known and would be decided alike now."""
        known = self._known.get((line.is_unix, block))
        if known is None or not self._state.serves(known.model):
            return None
        try:
            self._state.access.confirm(known.key)
        except EngramError:
            return None
        return known

    def _admit(
        self,
        known: K,
        came: Came,
        line: Line,
        make: Callable[[Call], TensorRead],
        fault: Exception | None,
    ) -> bool:
        """Begin an exchange; False: it is refused, the ordinary way says how.

        make: the read of a call; fault: what became of it
        """
        call = Call(self._state, Inbox({"headers": known.told}), f"{getrandbits(64):016x}")
        call.key, call.headers = known.key, known.headers
        call.operation, call.peer, call.connection = self.operation, line.client, line
        if line.is_gone:
            self._desk.record(call, GONE, 0, known.told)
            return True
        read: TensorRead | Refusal
        try:
            read = make(call)
        except EngramError:
            return False
        if fault is not None:  # not asked again: in shared memory it may be updated
            read = self._exchanges.refusal(call, fault)
        return self._exchanges.admit(line, call, read, came, known.told)

    def _note(
        self, known: K, line: Line, num_bytes: int, gate_s: float, times: tuple[float, float, float]
    ) -> None:
        """Count an answer that is written. times: begun, received, checked and gated"""
        line.answered(known.key.name)
        begun_s, received_s, checked_s = times
        check_s, sent_s = checked_s - received_s - gate_s, perf_counter()
        seconds = sent_s - begun_s, received_s - begun_s, check_s, gate_s, sent_s - checked_s
        done = AtOnce(*seconds, known.num_bytes, num_bytes, self.operation.name)
        self._desk.tally(done, line.loop)


def is_plain(head: Head) -> bool:
    """Tell whether a head may be remembered: its headers are known ones, seen in these bytes."""
    if not head.keep_alive or not all(name in PLAIN for name, _ in head.headers):
        return False
    return headers_of(head.block) == head.headers  # else the parser saw something else in them


def told_of(head: Head) -> Headers:
    """Return what the reception of a body depends on."""
    return [pair for pair in head.headers if pair[0] in (b"content-length", b"expect")]


def headers_of(block: bytes) -> Headers:
    """Return the headers that plain lines between two line ends are."""
    lines = [line.partition(b":") for line in block[2 : -len(END)].split(b"\r\n")]
    return [(name.lower(), value.strip(b" \t")) for name, _, value in lines]
