"""The gRPC door in this process, on a free port, asked with grpcio; every refusal is checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.proto import message_options
from service import operations
from service.operations import Operation
from service.problems import PROBLEMS
from service.rpc.server import NAME, RpcServer
from service.rpc.unary import VERBS
from tests.service.door import InProcess

REPLIES: Mapping[str, Any] = {
    "GetInfo": pb.Info,
    "OpenSession": pb.Session,
    "GetSession": pb.Session,
    "CloseSession": pb.Closed,
    "Rewind": pb.Pushed,
    "Push": pb.Pushed,
    "Step": pb.StepReply,
}


@dataclass(frozen=True)
class Refused:
    """A refusal: what gRPC tells of it, and the problem document."""

    status: str
    code: str
    document: Mapping[str, Any]


class Rpc:
    """A door and a channel to it. `http` is the other door of the same app."""

    def __init__(self, http: InProcess) -> None:
        self.http, self.state = http, http.state
        self._run = http.runner.run

    def start(self) -> Rpc:
        """Listen and connect."""

        async def begin() -> tuple[RpcServer, aio.Channel]:
            server = RpcServer(self.state, self.http.app.state.desk)
            url = await server.start()
            target = url.removeprefix("grpc://")
            return server, aio.insecure_channel(target, options=message_options(-1))

        self.server, self.channel = self._run(begin())
        return self

    def stop(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.server.stop()

        self._run(end())

    def call(self, verb: str, message: Any = None, **options: Any) -> Any:
        """Ask a unary verb; its reply, or `Refused`. message: a message, or its bytes."""
        return self._run(self.ask(verb, message, **options))

    async def ask(self, verb: str, message: Any = None, **options: Any) -> Any:
        message = VERBS[verb].request() if message is None else message
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        method = self.channel.unary_unary(f"/{NAME}/{verb}", None, REPLIES[verb].FromString)
        try:
            return await method(raw, timeout=30, **options)
        except aio.AioRpcError as error:
            return checked(VERBS[verb].operation, error)

    def stream(self, messages: Iterable[Any]) -> list[pb.StepReply]:
        """Send steps on one stream; all answers in the order they came."""

        async def talk() -> list[pb.StepReply]:
            method = self.channel.stream_stream(f"/{NAME}/Stream", None, pb.StepReply.FromString)
            raw = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
            return [reply async for reply in method(iter(raw), timeout=30)]

        replies = self._run(talk())
        for reply in replies:
            if reply.HasField("problem"):
                check(operations.STEP, refusal_of(reply.problem))
        return replies

    def open(self, **fields: Any) -> int:
        """Open a session; its id."""
        session_id: int = self.call("OpenSession", pb.OpenSessionRequest(**fields)).session_id
        return session_id

    def push(self, session_id: int, position: int, ids: Sequence[int], **fields: Any) -> Any:
        request = pb.PushRequest(session_id=session_id, position=position, token_ids=ids, **fields)
        return self.call("Push", request)

    def close(self, session_id: int) -> None:
        self.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))


def checked(operation: Operation, error: aio.AioRpcError) -> Refused:
    """The refusal of a call that failed, checked to be documented."""
    trailer = dict(error.trailing_metadata() or ())
    document = json.loads(trailer.get("engram-problem-bin", b"{}"))
    refused = Refused(error.code().name, str(trailer.get("engram-code", "")), document)
    check(operation, refused)
    return refused


def refusal_of(problem: pb.Problem) -> Refused:
    """The refusal that an answer of a stream tells."""
    return Refused(problem.grpc_status, problem.code, json.loads(problem.json))


def check(operation: Operation, refused: Refused) -> None:
    """A refusal is one of its operation's, complete, and no fault."""
    documented = {(PROBLEMS[kind].grpc, kind.code) for kind in operation.refusals}
    assert (refused.status, refused.code) in documented, refused
    assert refused.document["code"] == refused.code != "internal"
    assert ("retry_after_ms" in refused.document) == (refused.document["status"] in (429, 503))


def step_message(
    output: str, *, request_id: int = 1, tensors: Mapping[str, Any], **fields: Any
) -> pb.StepRequest:
    """A step; tensors as arrays of their exact dtype."""
    views = {name: wire.as_view(value) for name, value in tensors.items()}
    return pb.StepRequest(
        request_id=request_id,
        output=pb.Output.Value(f"OUTPUT_{output.upper()}"),
        tensors={
            name: pb.Tensor(dtype=view.dtype, shape=view.shape, data=bytes(view.data))
            for name, view in views.items()
        },
        **fields,
    )


def tensors_of(reply: pb.StepReply) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor of an answer."""
    assert not reply.HasField("problem"), reply.problem
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.data)
        for name, tensor in reply.tensors.items()
    }


def tensors_of_http(body: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The same of a step's answer over HTTP."""
    return {
        name: (view.dtype, view.shape, bytes(view.data))
        for name, view in wire.decode_tensors(body).items()
    }


async def until(is_so: Any) -> None:
    """Let the loop turn until something is so; fails after half a minute."""
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)
