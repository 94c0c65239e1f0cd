"""What each route does: read the request, call the engine, write the answer.

Control calls run on the event loop (array operations below a millisecond); whatever touches a
tensor's values goes through `engine.step` (see `reads.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from engram_client import wire
from engram_core.engine_types import (
    EPOCH_OPENED,
    PushResult,
    SessionState,
    StepAnswer,
)
from engram_core.errors import SchemaError, StepRefused
from service import operations, schemas, status_page, strict, verbs
from service.bodies import ClientGoneError
from service.calls import BufferAnswer, Call, Handler
from service.info import describe
from service.metrics import CONTENT_TYPE
from service.operations import Operation
from service.problems import NotFound
from service.reads import READS, at_once
from service.weights import answer_weights


async def live(call: Call) -> Response:
    """Say that the process answers."""
    return JSONResponse({"status": "alive"})


async def ready(call: Call) -> Response:
    """Say that requests are answered; refused with the reason otherwise."""
    call.state.check_open()
    return JSONResponse({"status": "ready"})


async def metrics(call: Call) -> Response:
    """Tell all metrics."""
    return Response(call.state.metrics.exposition(), media_type=CONTENT_TYPE)


async def info(call: Call) -> Response:
    """Tell what is served."""
    return _json(describe(call.state.model, call.state))


async def open_memory(call: Call) -> Response:
    """Make shared memory for a connection, and pass its descriptor."""
    state = call.state
    state.check_open()
    document = await call.document(schemas.OpenMemory)
    connection = call.connection
    if connection is None:
        raise NotFound("shared memory is for the Unix socket", expected="a connection to it")
    connection.check_sharing()
    region = await asyncio.to_thread(state.regions.open, call.tenant, document.num_bytes)
    connection.share(region)
    return _json(schemas.Memory(num_bytes=region.num_bytes), 201)


async def open_session(call: Call) -> Response:
    """Open a session, or find it open alike."""
    model = call.state.check_open()
    document = await call.document(schemas.OpenSession)
    state = model.engine.open(call.tenant, document.request())
    return _session(state, 201 if state.created else 200)


async def get_session(call: Call) -> Response:
    """Tell a session's state."""
    model = call.state.check_open()
    return _session(model.engine.get(call.tenant, call.session_id))


async def close_session(call: Call) -> Response:
    """Close one session."""
    model = call.state.check_open()
    model.engine.close_session(call.tenant, call.session_id, call.integer("epoch", EPOCH_OPENED))
    return Response(status_code=204)


async def close_owner(call: Call) -> Response:
    """Close what a former incarnation of a runner left open."""
    model = call.state.check_open()
    closed = verbs.close_owner(model, call.tenant, call.query["owner"])
    return _json(schemas.Closed(closed=closed))


async def push_tokens(call: Call) -> Response:
    """Push ids to one session."""
    model = call.state.check_open()
    session_id = call.session_id
    document = await call.document(schemas.PushTokens)
    result = verbs.push(model, call.tenant, session_id, document)
    return _json(_pushed(session_id, result))


async def rewind(call: Call) -> Response:
    """Cut one session."""
    model = call.state.check_open()
    session_id = call.session_id
    document = await call.document(schemas.RewindSession)
    result = verbs.rewind(model, call.tenant, session_id, document)
    return _json(_pushed(session_id, result))


async def read_tensors(call: Call) -> Response:
    """Answer a tensor route: its head is checked, its body received, the engine asked."""
    assert call.operation is not None
    read = READS[call.operation](call)
    body = await call.tensor() if call.operation.has_tensor_body else memoryview(b"")
    if (told := at_once(call, read, body)) is not None:
        return BufferAnswer(call, told[1], wire.TENSOR_MEDIA, told[0])
    try:
        future = read.submit(body)
        # What is answered already (output none) costs no turn of the loop.
        answer = future.result() if future.done() else await _answer_of(call, future)
    except StepRefused as refused:
        raise read.refusal(refused) from None
    call.stages.update(answer.stages)
    headers, buffers = read.answer(answer)
    return BufferAnswer(call, buffers, wire.TENSOR_MEDIA, headers)


async def _answer_of(call: Call, future: Future[StepAnswer]) -> StepAnswer:
    """Wait for an answer; one that waits for ids (`wait_ms`) only as long as its client is there.

    Raises ClientGoneError, what the step is refused for.
    """
    answer = asyncio.wrap_future(future)
    if "wait_ms" not in call.query:
        return await answer
    left = asyncio.ensure_future(call.inbox.left())
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGoneError
        return answer.result()
    finally:
        left.cancel()
        future.cancel()


async def weights(call: Call) -> Response:
    """Send a layer's weights, read from the checkpoint piece by piece."""
    model = call.state.check_open()
    names = call.query.get("names", "qk,wkv").split(",")
    for name in names:
        strict.choice(name, "names", ("qk", "wkv"))
    if len(set(names)) != len(names):
        raise SchemaError("names: one is there twice", expected="each once", got=names)
    return answer_weights(call, model, call.layer(model), names)


HANDLERS: Mapping[Operation, Handler] = {
    operations.LIVE: live,
    operations.READY: ready,
    operations.HEALTH: ready,
    operations.METRICS: metrics,
    operations.PAGE: status_page.page,
    operations.PAGE_SCRIPT: status_page.script,
    operations.PAGE_STYLE: status_page.style,
    operations.INFO: info,
    operations.WEIGHTS: weights,
    operations.MEMORY: open_memory,
    operations.OPEN: open_session,
    operations.GET_SESSION: get_session,
    operations.CLOSE: close_session,
    operations.CLOSE_OWNER: close_owner,
    operations.PUSH: push_tokens,
    operations.REWIND: rewind,
    **dict.fromkeys(READS, read_tensors),
}


def _session(state: SessionState, status: int = 200) -> Response:
    return _json(schemas.Session.of(state), status)


def _pushed(session_id: int, result: PushResult) -> schemas.Pushed:
    return schemas.Pushed.model_construct(session_id=session_id, **vars(result))


def _json(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(), status, media_type=wire.JSON_MEDIA)
