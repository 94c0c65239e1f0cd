"""What each route does: read the request, call the engine, write the answer.

Control calls run on the event loop (array operations below a millisecond); whatever touches a
tensor's values goes through `engine.step`, which works elsewhere.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from engram_client import wire
from engram_client.wire import TensorView
from engram_core.engine_types import (
    EPOCH_OPENED,
    MAX_WAIT_MS,
    Output,
    PushResult,
    SessionState,
    StepAnswer,
    StepRequest,
)
from engram_core.errors import BadTensor, SchemaError, StepRefused, TooManyTokens
from service import operations, schemas, status_page, steps, strict
from service.calls import BufferAnswer, Call, Handler, check_layer
from service.info import describe
from service.metrics import CONTENT_TYPE
from service.operations import Operation
from service.state import Model
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
    owner = call.query["owner"]
    if not re.fullmatch(schemas.OWNER_PATTERN, owner):
        raise SchemaError(
            "owner is no name", expected="1 to 128 visible ASCII characters", got=owner[:80]
        )
    return _json(schemas.Closed(closed=model.engine.close_owner(call.tenant, owner)))


async def push_tokens(call: Call) -> Response:
    """Push ids to one session."""
    model = call.state.check_open()
    session_id = call.session_id
    document = await call.document(schemas.PushTokens)
    if document.mask is not None and len(document.mask) != len(document.token_ids):
        raise SchemaError(
            "mask and token_ids differ in length",
            expected=len(document.token_ids),
            got=len(document.mask),
        )
    result = model.engine.push(
        call.tenant,
        session_id,
        document.position,
        np.array(document.token_ids, np.int64),
        None if document.mask is None else np.array(document.mask, np.bool_),
        epoch=_epoch(document.epoch),
        truncate=document.on_conflict is not None,
        ahead=document.ahead,
    )
    return _json(_pushed(session_id, result))


async def rewind(call: Call) -> Response:
    """Cut one session."""
    model = call.state.check_open()
    session_id = call.session_id
    document = await call.document(schemas.RewindSession)
    result = model.engine.rewind(call.tenant, session_id, document.position, _epoch(document.epoch))
    return _json(_pushed(session_id, result))


async def apply_residual(call: Call) -> Response:
    """Apply a layer to a residual, in the buffer it was received into."""
    model = call.state.check_open()
    dtype, shape = _residual_spec(call, model)
    request = _read_request(call, model, Output.RESIDUAL, shape[0])
    _check_body_bytes(call.inbox.length, dtype, shape)
    residual = wire.to_torch(TensorView(dtype, shape, await call.tensor()))
    return await _read(call, model, replace(request, residual=residual))


async def read_kv(call: Call) -> Response:
    """Read keys and value."""
    return await _read_output(call, Output.KV)


async def read_rows(call: Call) -> Response:
    """Read rows."""
    return await _read_output(call, Output.ROWS)


async def read_hash_ids(call: Call) -> Response:
    """Read row ids."""
    return await _read_output(call, Output.HASH_IDS)


async def step(call: Call) -> Response:
    """Push and read for many sequences at once."""
    model = call.state.check_open()
    options = _step_options(call, model)
    request = steps.request_of(steps.decode(await call.tensor()), options, model)
    call.lease.add(steps.answer_bytes(request, model), "the answer")
    answer = await _run(call, model, request)
    return BufferAnswer(call, steps.encode(request, answer), wire.TENSOR_MEDIA, {})


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
    operations.OPEN: open_session,
    operations.GET_SESSION: get_session,
    operations.CLOSE: close_session,
    operations.CLOSE_OWNER: close_owner,
    operations.PUSH: push_tokens,
    operations.REWIND: rewind,
    operations.RESIDUAL: apply_residual,
    operations.KV: read_kv,
    operations.ROWS: read_rows,
    operations.HASH_IDS: read_hash_ids,
    operations.STEP: step,
}


async def _read_output(call: Call, output: Output) -> Response:
    model = call.state.check_open()
    count = call.integer("count", 1)
    return await _read(call, model, _read_request(call, model, output, count))


def _read_request(call: Call, model: Model, output: Output, count: int) -> StepRequest:
    """Return the step that one read of the path and query is. Raises BadTensor, TooManyTokens."""
    if call.integer("count", count) != count:
        raise BadTensor(
            "count is not the residual's first dim", expected=count, got=call.query["count"]
        )
    if count > model.limits.max_tokens:
        raise TooManyTokens(
            f"{count} positions in one request; split it",
            expected=f"<= {model.limits.max_tokens}",
            got=count,
        )
    return StepRequest(
        segments=steps.one_segment(
            call.session_id, call.integer("position", 0), count, call.integer("epoch", EPOCH_OPENED)
        ),
        output=output,
        layers=(call.layer(model),),
        stored=call.choice("encoding", ("stored",)) is not None,
        wait_ms=call.integer("wait_ms", 0, high=MAX_WAIT_MS),
        client=call.client,
    )


async def _read(call: Call, model: Model, request: StepRequest) -> Response:
    """Answer one read with its tensor's own memory."""
    layer, count = request.layers[0], int(request.segments.count[0])
    spec = steps.output_spec(request, layer, count, model)
    if request.residual is None:
        call.lease.add(wire.num_bytes(spec), "the answer")
    try:
        answer = await _run(call, model, request)
    except StepRefused as refused:
        raise refused.first from None
    view = wire.as_view(answer.tensors[layer])
    headers = {
        wire.SHAPE: wire.format_shape(view.shape),
        wire.DTYPE: view.dtype,
        wire.LENGTH: str(answer.length[0]),
        wire.BASE: str(answer.base[0]),
        wire.EPOCH: str(answer.epoch[0]),
    }
    if request.output in (Output.KV, Output.ROWS):
        headers[wire.DEAD] = wire.format_ranges(np.flatnonzero(answer.dead))
    if request.stored:
        index = model.checkpoint.geometry.layer_index(layer)
        headers[wire.ENCODING] = model.backend.encodings[index]
    return BufferAnswer(call, [view.data], wire.TENSOR_MEDIA, headers)


async def _run(call: Call, model: Model, request: StepRequest) -> StepAnswer:
    """Let the engine work, off the event loop."""
    future = model.engine.step(call.tenant, request)
    # What is answered already (output none) costs no turn of the loop.
    answer = future.result() if future.done() else await asyncio.wrap_future(future)
    call.stages.update(answer.stages)
    return answer


def _residual_spec(call: Call, model: Model) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as the headers tell them. Raises BadTensor."""
    geometry = model.checkpoint.geometry
    dtype, text = call.headers[wire.DTYPE.lower()], call.headers[wire.SHAPE.lower()]
    if dtype not in ("BF16", "F32"):
        raise BadTensor(f"{wire.DTYPE} of a residual", expected="BF16 or F32", got=dtype[:40])
    try:
        shape = wire.parse_shape(text)
    except wire.WireError as error:
        raise BadTensor(
            f"{wire.SHAPE}: {error.message}", expected="T,hc,dim", got=text[:80]
        ) from None
    if len(shape) != 3 or shape[1:] != (geometry.hc_mult, geometry.dim):
        raise BadTensor(
            f"{wire.SHAPE} of a residual",
            expected=f"T,{geometry.hc_mult},{geometry.dim}",
            got=text[:80],
        )
    return dtype, shape


def _check_body_bytes(length: int | None, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises BadTensor: before it is read, a body that cannot be what its headers say."""
    num_bytes = wire.num_bytes((dtype, shape))
    if length is not None and length != num_bytes:
        raise BadTensor(
            f"the body is no {dtype} {list(shape)}", expected=f"{num_bytes} bytes", got=length
        )


def _step_options(call: Call, model: Model) -> steps.StepOptions:
    """Raises SchemaError, UnknownLayer."""
    output = Output(strict.choice(call.query["output"], "output", [str(o) for o in Output]))
    stored = call.choice("encoding", ("stored",)) is not None
    if stored and output is not Output.ROWS:
        raise SchemaError("encoding=stored is for rows", expected="output=rows", got=str(output))
    return steps.StepOptions(
        output=output,
        layers=_layers(call.query.get("layers"), model),
        stored=stored,
        truncate=call.choice("on_conflict", ("truncate",)) is not None,
        wait_ms=call.integer("wait_ms", 0, high=MAX_WAIT_MS),
        ahead=call.choice("ahead", ("true", "false")) != "false",
        client=call.client,
    )


def _layers(text: str | None, model: Model) -> tuple[int, ...]:
    if text is None:
        return model.checkpoint.geometry.layer_ids
    layers = tuple(strict.integer(part, "layers", 0) for part in text.split(","))
    for layer in layers:
        check_layer(layer, model)
    if len(set(layers)) != len(layers):
        raise SchemaError("layers: one is there twice", expected="each once", got=text[:80])
    return layers


def _epoch(epoch: int | None) -> int:
    return EPOCH_OPENED if epoch is None else epoch


def _session(state: SessionState, status: int = 200) -> Response:
    return _json(schemas.Session.of(state), status)


def _pushed(session_id: int, result: PushResult) -> schemas.Pushed:
    return schemas.Pushed.model_construct(
        session_id=session_id,
        length=result.length,
        base=result.base,
        epoch=result.epoch,
        appended=result.appended,
        removed=result.removed,
    )


def _json(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(), status, media_type=wire.JSON_MEDIA)
