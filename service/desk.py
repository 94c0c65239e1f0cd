"""What is done for every request, whichever way it came in: who asks, refusals, the record.

The front door (`door.py`) and the fast path (`fast_path.py`) share one desk. Token ids never reach
a log.
"""

from __future__ import annotations

import re
import secrets
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import structlog
from starlette.types import Scope

from engram_core.errors import EngramError
from service import problems
from service.access import KEYLESS, Key
from service.bodies import Headers
from service.calls import Call
from service.logs import LineLimit
from service.metrics import REQUEST_STAGES
from service.operations import OPERATIONS, PUBLIC_PATHS
from service.state import ServiceState
from service.tracing import record_span, sampled_parent

log = structlog.get_logger("engram.request")

QUIET = frozenset(
    operation.name
    for operation in OPERATIONS
    if not operation.scopes or operation.has_session or operation.has_tensor_body
)
"""Operations whose success is counted, not logged: probes, and what runners do every step."""

GONE = "client_gone"
"""The code of a request whose client left."""

MAX_TALLIED = 16
"""Requests answered at once that are counted together."""

SHARED_ANSWER_HEADERS = (
    b"x-request-id: %016x\r\nserver-timing: check;dur=%.3f, gate;dur=%.3f\r\n\r\n"
)
ANSWER_HEADERS = SHARED_ANSWER_HEADERS.replace(b" check", b" receive;dur=%.3f, check")
"""`answer_headers` of a residual answered at once, and the end of its head."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_FAULTS_PER_S, _LINES_PER_S = 1, 10
"""Log lines: faults with their stack, and answers of each code."""


class AtOnce(NamedTuple):
    """A request answered at once: seconds in all and of its stages; bytes that body and answer had
    on the socket, 0 in shared memory; the operation's name.

    receive_s: None = not known
    """

    seconds: float
    receive_s: float | None
    check_s: float
    gate_s: float
    send_s: float
    num_bytes: int
    sent_bytes: int
    name: str


class Desk:
    """One for an app."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._faults = LineLimit(_FAULTS_PER_S)
        self._lines = LineLimit(_LINES_PER_S)
        # Looked up once: prometheus_client takes a lock and builds a key at every `labels`.
        self._request_counts = cache(state.metrics.requests.labels)
        self._tallied: list[AtOnce] = []
        state.metrics.count_before_telling(self._count_tallied)

    def identify(self, scope: Scope) -> Key:
        """Return who asks. Raises Misdirected, Unauthenticated."""
        access, server = self._state.access, scope.get("server")
        over_unix_socket = server is not None and server[1] is None
        if access.keyring is not None and scope["path"] in PUBLIC_PATHS:
            return KEYLESS
        return access.identify(scope["headers"], over_unix_socket=over_unix_socket)

    def refusal(self, call: Call, error: BaseException) -> tuple[str, EngramError]:
        """Return the code and what the client is told; a fault is logged and told as such.

        A refusal forgets where it was raised: those frames hold the body, maybe in pinned memory,
        and whoever keeps the refusal in a frame of the same call keeps them until a collection.
        """
        refusal = error if isinstance(error, EngramError) else problems.SECRET_FAULT
        code = problems.code_of(refusal)
        if code == "internal":
            held_back = self._faults.admit("fault")
            if held_back is not None:
                log.error("fault", request_id=call.request_id, held_back=held_back, exc_info=error)
        _forget_frames(refusal)
        # What a backend failed with may name files of this machine: that is for the log.
        return code, problems.SECRET_FAULT if code == "internal" else refusal

    def record(self, call: Call, code: str, status: int, headers: Headers) -> None:
        """Count the request; trace it if its caller does; log it if it is worth a line."""
        seconds = time.perf_counter() - call.started
        name = call.operation.name if call.operation else "none"
        self._count(call, name, code, seconds)
        if (parent := sampled_parent(headers)) is not None:
            record_span(parent, name, seconds, _told(call, code, status), is_fault=status >= 500)
        if code == "ok" and name in QUIET:
            return
        held_back = self._lines.admit(code)
        if held_back is None:
            return
        log.info(
            "request",
            request_id=call.request_id,
            operation=name,
            code=code,
            status=status,
            received_bytes=call.inbox.num_bytes,
            sent_bytes=call.sent_bytes,
            ms=round(seconds * 1000, 3),
            **({"held_back": held_back} if held_back else {}),
        )

    def tally(self, done: AtOnce, loop: AbstractEventLoop) -> None:
        """Count a request that was answered at once: with others, or when metrics are asked for.

        Its headers are plain, so nobody traces it, and its success is not logged.
        """
        self._tallied.append(done)
        if len(self._tallied) == MAX_TALLIED:  # in the next turn: uvloop writes before that
            loop.call_soon(self._count_tallied)

    def _count_tallied(self) -> None:
        tallied, self._tallied = self._tallied, []
        if not tallied:
            return
        metrics = self._state.metrics
        for name, count in Counter(done.name for done in tallied).items():
            self._request_counts(name, "ok").inc(count)
        metrics.received_bytes.inc(sum(done.num_bytes for done in tallied))
        metrics.sent_bytes.inc(sum(done.sent_bytes for done in tallied))
        stages = [metrics.stage_seconds.series(name) for name in ("check", "gate", "send")]
        receive = metrics.stage_seconds.series("receive")
        for done in tallied:
            metrics.request_seconds.observe(done.seconds)
            for stage, seconds in zip(stages, done[2:5], strict=True):
                stage.observe(seconds)
            if done.num_bytes:
                metrics.body_bytes.observe(done.num_bytes)
            if done.num_bytes and done.receive_s is not None:
                receive.observe(done.receive_s)

    def _count(self, call: Call, name: str, code: str, seconds: float) -> None:
        metrics = self._state.metrics
        self._request_counts(name, code).inc()
        metrics.request_seconds.observe(seconds)
        if call.inbox.num_bytes:
            metrics.received_bytes.inc(call.inbox.num_bytes)
            metrics.body_bytes.observe(call.inbox.num_bytes)
        if call.sent_bytes:
            metrics.sent_bytes.inc(call.sent_bytes)
        for stage in REQUEST_STAGES:
            if stage in call.stages:
                metrics.observe_stage(stage, call.stages[stage])


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of those it was raised among; causes stay for the log."""
    among: BaseException | None = error
    while among is not None:
        among.__traceback__, before = None, among.__context__
        among.__context__ = None
        among = before


def answer_headers(call: Call) -> Headers:
    """Return what every answer carries: its request id, and tensor answers their timing."""
    headers = [(b"x-request-id", call.request_id.encode())]
    if call.stages:
        timing = ", ".join(
            f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in call.stages.items()
        )
        headers.append((b"server-timing", timing.encode()))
    return headers


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's X-Request-Id if it is a plain word, else a fresh one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _told(call: Call, code: str, status: int) -> dict[str, str | int | float]:
    """Return a span's attributes: sizes and times, no ids and no names."""
    return {
        "http.response.status_code": status,
        "engram.code": code,
        "engram.request_id": call.request_id,
        "http.request.body.size": call.inbox.num_bytes,
        "http.response.body.size": call.sent_bytes,
        **{f"engram.{stage}_ms": seconds * 1e3 for stage, seconds in call.stages.items()},
    }
