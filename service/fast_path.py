"""The way of tensors past FastAPI: from a parsed head to an answer in the tensor's own memory.

A request whose head is plain and accepted is an `Exchange`, its body received into one buffer; one
that is refused before a large body, too. Everything else (chunked bodies, unusual heads, refusals
before small bodies) takes the ordinary way and gets identical bytes. All calls come from the event
loop's thread.
"""

from __future__ import annotations

import re

from service import bodies, operations
from service.bodies import CONNECTION, Buffer, Inbox
from service.calls import Call, check
from service.desk import Desk, request_id
from service.exchange import Exchange, Exchanges, Head, Line, Refusal
from service.landing import Landing
from service.operations import Operation
from service.reads import READS, TensorRead
from service.recall import Recall
from service.state import ServiceState
from service.step_recall import StepRecall
from service.turn import Turn

_READ_PATH = re.compile(r"/v1/sessions/([0-9]+)/layers/([0-9]+)/(residual|kv|rows|hash_ids)")
_BY_OUTPUT = {
    operation.path.rpartition("/")[2]: operation for operation in READS if operation.has_session
}


class FastPath:
    """Decides which requests go this way; one for an app. landing: where what comes is received"""

    def __init__(self, state: ServiceState, desk: Desk) -> None:
        self._state = state
        self._desk = desk
        self._turn = Turn(state)
        self.landing = Landing(state)
        self._exchanges = Exchanges(state, desk, self._turn, self.landing)
        shared = state, desk, self._exchanges
        self._recall, self._step_recall = Recall(*shared), StepRecall(*shared)

    def recall(self, data: Buffer, line: Line) -> bool:
        """Answer or begin a request whose headers are remembered (see `Recall.answer`)."""
        if data[:13] == b"POST /v1/step":
            return self._step_recall.answer(data, line)
        return self._recall.answer(data, line)

    def end_turn(self) -> None:
        """Answer what waits for the end of this turn of the loop."""
        self._turn.run()

    def begin(self, head: Head, line: Line) -> Exchange | None:
        """Check a head and admit its body; None sends the request the ordinary way."""
        found = _route(head)
        if found is None:
            return None
        operation, path, query = found
        length = _body_bytes(head, operation)
        if length is None:
            return None
        scope = {
            "path": str(head.url.partition(b"?")[0], "ascii"),
            "path_params": path,
            "query_string": query,
            "headers": head.headers,
            "client": head.client,
            "server": head.server,
            "extensions": {CONNECTION: {"connection": line}},
        }
        call = Call(self._state, Inbox(scope), request_id(head.headers))
        read: TensorRead | Refusal
        try:
            call.key = self._desk.identify(scope)
            check(call, operation, scope)
            read = READS[operation](call)
            if length:
                buffer = call.lease.buffer(length, "the body")
            else:
                buffer = call.shared_body() or self._exchanges.scratch[:0]
            self._recall.keep(head, line, call, read)
            self._step_recall.keep(head, line, call, read)
        except Exception as error:
            if length <= bodies.SMALL_BODY_BYTES:
                call.close()
                return None  # told the ordinary way, which reads the body first
            read, buffer = self._exchanges.refusal(call, error), self._exchanges.scratch
        return self._exchanges.begin(
            line, call, read, buffer, head.headers, keep_alive=head.keep_alive
        )


def _route(head: Head) -> tuple[Operation, dict[str, str], bytes] | None:
    """Return operation, path parameters and query of a tensor route."""
    raw, _, query = head.url.partition(b"?")
    if b"#" in query:
        return None
    if raw == b"/v1/step":
        return (operations.STEP, {}, query) if head.method == "POST" else None
    found = _READ_PATH.fullmatch(raw.decode("latin-1"))
    if found is None:
        return None
    operation = _BY_OUTPUT[found[3]]
    if head.method != operation.method:
        return None
    return operation, {"session_id": found[1], "layer": found[2]}, query


def _body_bytes(head: Head, operation: Operation) -> int | None:
    """Return the bytes of the body; None: unusual."""
    length: int | None = None
    for name, value in head.headers:
        if name == b"content-length":
            if length is not None or not value.isdigit():
                return None
            length = int(value)
        elif name in (b"transfer-encoding", b"upgrade"):
            return None
    if not operation.has_tensor_body:
        return None if length else 0
    return length
