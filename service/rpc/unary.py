"""The unary verbs: one message in, one out; a refusal is the status of the call.

They are registered as streams, which look the same on the wire: so that who asks is known before
anything of a message is taken in, and its bytes are given back only when the answer is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from engram_client.proto import engram_pb2 as pb
from engram_core.engine_types import EPOCH_OPENED
from engram_core.errors import SchemaError
from service import operations, strict, verbs
from service.bodies import SMALL_BODY_BYTES, ClientGoneError
from service.calls import Call
from service.desk import GONE, Desk
from service.info import describe
from service.operations import Operation
from service.problems import BodyTooLarge, RequestTimeout, kind_of
from service.rpc import calls, messages
from service.rpc.calls import Context
from service.rpc.steps import StepWork
from service.state import ServiceState


@dataclass(frozen=True)
class Verb:
    """An RPC. operation: what it is over HTTP: its scopes, its refusals, its name in metrics;
    answer: its reply, or the reply's bytes."""

    operation: Operation
    request: type[Message]
    answer: Callable[[Call, Any], Awaitable[Message | bytes]]


async def get_info(call: Call, message: pb.GetInfoRequest) -> pb.Info:
    """Tell what is served."""
    return pb.Info(json=describe(call.state.model, call.state).model_dump_json())


async def open_session(call: Call, message: pb.OpenSessionRequest) -> pb.Session:
    """Open a session, or find it open alike."""
    model = call.state.check_open()
    opening = messages.opening_of(message).request()
    return messages.session_reply(model.engine.open(call.tenant, opening))


async def get_session(call: Call, message: pb.GetSessionRequest) -> pb.Session:
    """Tell a session's state."""
    model = call.state.check_open()
    session_id = messages.session_id_of(message)
    return messages.session_reply(model.engine.get(call.tenant, session_id))


async def close_session(call: Call, message: pb.CloseSessionRequest) -> pb.Closed:
    """Close one session, or those of an owner."""
    model = call.state.check_open()
    if message.WhichOneof("what") == "owner":
        if message.HasField("epoch"):
            raise SchemaError("an epoch is a session's", expected="session_id", got="owner")
        return pb.Closed(sessions=verbs.close_owner(model, call.tenant, message.owner))
    session_id, epoch = messages.session_id_of(message), EPOCH_OPENED
    if message.HasField("epoch"):
        epoch = strict.in_range(message.epoch, "epoch", 0, strict.INT64_MAX)
    model.engine.close_session(call.tenant, session_id, epoch)
    return pb.Closed(sessions=1)


async def rewind(call: Call, message: pb.RewindRequest) -> pb.Pushed:
    """Cut one session."""
    model, document = call.state.check_open(), messages.rewind_of(message)
    session_id = messages.session_id_of(message)
    result = verbs.rewind(model, call.tenant, session_id, document)
    return messages.pushed_reply(session_id, result)


async def push(call: Call, message: pb.PushRequest) -> pb.Pushed:
    """Push ids to one session."""
    model, document = call.state.check_open(), messages.push_of(message)
    session_id = messages.session_id_of(message)
    result = verbs.push(model, call.tenant, session_id, document)
    return messages.pushed_reply(session_id, result)


async def step(call: Call, message: pb.StepRequest) -> bytes:
    """Make one step."""
    work = StepWork(call)
    work.begin(message)
    del message
    if work.future is not None:
        await asyncio.wrap_future(work.future)
    return work.reply()


VERBS: Mapping[str, Verb] = {
    "GetInfo": Verb(operations.INFO, pb.GetInfoRequest, get_info),
    "OpenSession": Verb(operations.OPEN, pb.OpenSessionRequest, open_session),
    "GetSession": Verb(operations.GET_SESSION, pb.GetSessionRequest, get_session),
    "CloseSession": Verb(operations.CLOSE, pb.CloseSessionRequest, close_session),
    "Rewind": Verb(operations.REWIND, pb.RewindRequest, rewind),
    "Push": Verb(operations.PUSH, pb.PushRequest, push),
    "Step": Verb(operations.STEP, pb.StepRequest, step),
}


class UnaryDoor:
    """Answers the unary RPCs of one service."""

    def __init__(self, state: ServiceState, desk: Desk) -> None:
        self._state = state
        self._desk = desk

    async def serve(self, verb: Verb, context: Context) -> None:
        """Answer one call."""
        call, headers = calls.begin(self._state, verb.operation, context)
        code, status, refusal = GONE, 0, None
        self._state.enter()
        try:
            await self._answer(call, headers, verb, context)
            code, status = "ok", 200
        except (ClientGoneError, aio.AbortError):
            raise asyncio.CancelledError from None  # all is said that can be
        except Exception as error:
            code, refusal = self._desk.refusal(call, error)
            status = kind_of(refusal).status
        finally:
            call.close()
            self._state.leave()
            self._desk.record(call, code, status, headers)
        if refusal is not None:
            await calls.refuse(context, refusal)

    async def _answer(self, call: Call, headers: Any, verb: Verb, context: Context) -> None:
        calls.check(call, headers)
        reply = await verb.answer(call, await _receive(call, verb, context))
        raw = reply if isinstance(reply, bytes) else reply.SerializeToString()
        call.sent_bytes = len(raw)
        begun = time.perf_counter()
        try:
            if len(raw) <= SMALL_BODY_BYTES:
                await context.write(raw)
            else:
                await context.send_initial_metadata(())
                await calls.write(context, raw)
            if call.stages:
                call.stages["send"] = time.perf_counter() - begun
        except RequestTimeout as late:
            # gRPC cannot cut a call: it holds its bytes until they are taken or the peer is gone.
            await calls.refuse(context, late)


async def _receive(call: Call, verb: Verb, context: Context) -> Message:
    """Return the one message of a call; its bytes are kept only in it."""
    raw = await calls.read(context)
    if raw is None:
        raise ClientGoneError  # or it was more than the server takes, which gRPC has told
    call.inbox.num_bytes = len(raw)
    most = call.state.max_json_bytes
    if not verb.operation.has_tensor_body and len(raw) > most:
        raise BodyTooLarge("a message without tensors", expected=f"<= {most} bytes", got=len(raw))
    call.lease.add(len(raw), "the message")
    return messages.parse(verb.request, raw)
