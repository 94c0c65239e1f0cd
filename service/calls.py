"""One request on its way through: checked against its operation, then answered.

`Call` is made by the front door (`door.py`) and completed here once the route is known.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engram_client import wire
from engram_core.errors import BadRequest, SchemaError
from engram_core.host_memory import HostMemory
from service import strict
from service.access import Key, check_scope
from service.admission import Lease
from service.bodies import (
    Buffer,
    Headers,
    Inbox,
    receive_json,
    receive_tensor,
    send_answer,
)
from service.operations import Operation
from service.problems import MediaType, WrongTable
from service.shm import Connection, Shared, connection_of, shared_of
from service.state import Model, ServiceState

Document = TypeVar("Document", bound=BaseModel)

CALL = "engram.call"
"""Where a scope keeps its call."""


class Call:
    """One request. key: who asks; stages: seconds by name, for Server-Timing and metrics."""

    def __init__(self, state: ServiceState, inbox: Inbox, request_id: str) -> None:
        self.state = state
        self.inbox = inbox
        self.request_id = request_id
        self.started = time.perf_counter()
        self.key: Key | None = None
        self.operation: Operation | None = None
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.path: Mapping[str, str] = {}
        self.if_none_match = ""
        self.peer: Hashable = None
        self.connection: Connection | None = None
        self.shared: Shared | None = None
        self.stages: dict[str, float] = {}
        self.sent_bytes = 0
        self._lease: Lease | None = None

    @property
    def tenant(self) -> str:
        """The name of the key that asks. Raises Unauthenticated: it was removed meanwhile."""
        assert self.key is not None
        self.state.access.confirm(self.key)
        return self.key.name

    @property
    def client(self) -> Hashable:
        """Whose turn it is among clients: a key's runner, else its connection's other end."""
        peer = self.peer or id(self.connection)  # other ends of a Unix socket have no names
        return self.tenant, self.headers.get(wire.OWNER.lower()), peer

    @property
    def lease(self) -> Lease:
        """The request's bytes, given back when its answer is sent. Raises Loading."""
        if self._lease is None:
            self._lease = self.state.pool.lease(self.tenant)
        return self._lease

    @property
    def body_bytes(self) -> int | None:
        """Bytes of the body, wherever it comes from; None: not told."""
        body = self.shared.body if self.shared is not None else None
        return self.inbox.length if body is None else len(body)

    @property
    def answer_memory(self) -> HostMemory | None:
        """Where an answer is to be made; None: where the backend likes."""
        if self.shared is None:
            return None
        return self.shared.answer_memory(self.state.pool.memory)

    def shared_body(self) -> memoryview | None:
        """Admit and return a body that lies in shared memory; None: it comes over the socket.

        Raises BodyTooLarge, Overloaded: as for a body that is received.
        """
        body = self.shared.body if self.shared is not None else None
        if body is not None:
            self.lease.add(len(body), "the body")
        return body

    def leave(self, buffers: Sequence[Buffer]) -> tuple[Mapping[str, str], list[Buffer]]:
        """Return the header that says what of an answer lies in shared memory, and the rest."""
        if self.shared is None:
            return {}, list(buffers)
        place, sent = self.shared.leave(buffers)
        return ({wire.SHARED_ANSWER: place} if place else {}), sent

    @property
    def session_id(self) -> int:
        """The session of the path. Raises SchemaError."""
        return strict.integer(self.path["session_id"], "session id", 1)

    def layer(self, model: Model) -> int:
        """Return the layer id of the path. Raises SchemaError, UnknownLayer."""
        layer = strict.integer(self.path["layer"], "layer", 0)
        model.checkpoint.geometry.layer_index(layer)  # refuses others
        return layer

    def integer(self, name: str, default: int, low: int = 0, high: int = strict.INT64_MAX) -> int:
        """Return an integer of the query. Raises SchemaError."""
        text = self.query.get(name)
        return default if text is None else strict.integer(text, name, low, high)

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """Return a word of the query, one of `known`. Raises SchemaError."""
        text = self.query.get(name)
        return None if text is None else strict.choice(text, name, known)

    async def document(self, model: type[Document]) -> Document:
        """Receive and check a JSON body."""
        body = await receive_json(self.inbox, self.lease, self.state.max_json_bytes)
        return strict.parse_model(model, strict.load_json(body))

    async def tensor(self) -> memoryview:
        """Receive a tensor body."""
        if (shared := self.shared_body()) is not None:
            return shared
        begin = time.perf_counter()
        body = await receive_tensor(self.inbox, self.lease)
        self.stages["receive"] = time.perf_counter() - begin
        return body

    def close(self) -> None:
        """Give back what the request held."""
        self.shared = None
        if self._lease is not None:
            self._lease.close()


Handler = Callable[[Call], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint(operation: Operation, handler: Handler) -> Endpoint:
    """Return the route's function: checks what is common to all, then hands over."""

    async def answer(request: Request) -> Response:
        call: Call = request.scope[CALL]
        check(call, operation, request.scope)
        return await handler(call)

    answer.__name__ = operation.name
    answer.__doc__ = operation.summary
    return answer


def check(call: Call, operation: Operation, scope: Scope) -> None:
    """Check what is common to all operations, and keep it in the call.

    Raises Forbidden, SchemaError, MediaType, WrongTable, Loading, ShardDown."""
    call.operation = operation
    call.path = scope["path_params"]
    if operation.scopes:
        assert call.key is not None
        check_scope(call.key, operation.scopes)
    call.query = strict.query(
        scope["query_string"], operation.query_names, operation.required_names
    )
    call.headers = strict.engram_headers(scope["headers"], operation.header_names)
    for name in operation.required_headers:
        if name.lower() not in call.headers:
            raise SchemaError(f"header {name} is missing", expected=name)
    client = scope.get("client")
    call.peer = tuple(client) if client else None
    plain = dict(scope["headers"])
    if b"if-none-match" in plain:
        tags = [value for name, value in scope["headers"] if name == b"if-none-match"]
        call.if_none_match = b",".join(tags).decode("latin-1")
    _check_media(operation, plain, has_body=not call.inbox.is_complete)
    check_table(call)
    call.connection = connection_of(scope)
    find_shared(call)


def find_shared(call: Call) -> None:
    """Keep what of its connection's shared memory a request names.

    Raises BadRequest, SchemaError.
    """
    body = call.headers.get(wire.SHARED_BODY.lower())
    answer = call.headers.get(wire.SHARED_ANSWER.lower())
    if body is None and answer is None:
        return
    if body is not None and not call.inbox.is_complete:
        raise BadRequest(f"a body and {wire.SHARED_BODY}", expected="one of them")
    region = None if call.connection is None else call.connection.region
    call.shared = shared_of(region, call.tenant, body, answer)


def check_table(call: Call) -> None:
    """Raises WrongTable, Loading, ShardDown."""
    table = call.headers.get(wire.TABLE.lower())
    if table is not None and table != (identity := call.state.model.checkpoint.identity):
        raise WrongTable("another table is served here", expected=identity, got=table[:80])


def _check_media(operation: Operation, headers: Mapping[bytes, bytes], *, has_body: bool) -> None:
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.strip().lower() != "identity":
        raise MediaType("compressed bodies are not taken", expected="identity", got=encoding[:40])
    if operation.body is None:
        if has_body:
            raise BadRequest(f"{operation.name} takes no body", expected="no body")
        return
    media = wire.TENSOR_MEDIA if operation.has_tensor_body else wire.JSON_MEDIA
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind, _, parameters = given.partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != media or charset not in ("", "charset=utf-8"):
        raise MediaType("the content type is not taken", expected=media, got=given[:80] or "none")


class BufferAnswer(Response):
    """An answer sent from its buffers, which may be a tensor's memory."""

    def __init__(
        self, call: Call, buffers: Sequence[Buffer], media: str, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers: Headers = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in {"content-type": media, **headers}.items()
        ]
        self._call = call
        self._buffers = buffers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        begin = time.perf_counter()
        call.sent_bytes = await send_answer(send, self.raw_headers, self._buffers, call.connection)
        call.stages["send"] = time.perf_counter() - begin
