"""The tensor routes as three steps: what the head says, what the body says, what is answered.

Nothing here waits or sends: the FastAPI route (`routes.py`) and the fast path (`fast_path.py`)
take the same steps, so they give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ctypes import addressof, c_char
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from engram_client import wire
from engram_client.wire import TensorSpec, TensorView
from engram_core.direct import Few, FewAnswer, OneAnswer, OneRead
from engram_core.engine_types import EPOCH_OPENED, MAX_WAIT_MS, Output, StepAnswer, StepRequest
from engram_core.errors import BadTensor, EngramError, SchemaError, StepRefused, TooManyTokens
from service import operations, steps, strict
from service.bodies import Buffer
from service.calls import Call, check_layer
from service.operations import Operation
from service.state import Model

PUSH_TOKENS = 64
"""Longer pushes are checked by arrays, which are quicker."""


class TensorRead(Protocol):
    """A tensor request whose head is checked."""

    def at_once(self, body: memoryview) -> tuple[Mapping[str, str], list[Buffer]] | None:
        """Answer here and now what can be, as `answer` does; None: submit it."""

    def submit(self, body: memoryview) -> Future[StepAnswer]:
        """Check the body, admit the answer, ask the engine; a residual is updated in `body`."""

    def answer(self, answer: StepAnswer) -> tuple[Mapping[str, str], list[Buffer]]:
        """Return an answer's headers and its buffers, which may be tensors' memory."""

    def refusal(self, refused: StepRefused) -> EngramError:
        """Return how refused segments are told."""


class ReadForm(NamedTuple):
    """Of which model, and how much.

    dtype, shape: of a residual [T, hc_mult, dim]; "" and (T,) of what has no body
    """

    model: Model
    dtype: str
    shape: tuple[int, ...]


class SingleRead:
    """A residual, kv, rows or hash_ids of one layer and session, as path and query name them.

    Every part is known to be right (see `checked`).
    """

    def __init__(
        self,
        call: Call,
        output: Output,
        form: ReadForm,
        *,
        session_id: int,
        layer: int,
        position: int,
        epoch: int,
        stored: bool = False,
        wait_ms: int = 0,
    ) -> None:
        self.output, self.form = output, form
        self._call = call
        self._model, self._dtype, self._shape = form
        self._session_id, self._layer = session_id, layer
        self._position, self._epoch = position, epoch
        self._stored, self._wait_ms = stored, wait_ms

    @classmethod
    def checked(cls, call: Call, output: Output) -> SingleRead:
        """Check path, query and headers.

        Raises BadTensor, SchemaError, UnknownLayer, TooManyTokens, Draining, Loading.
        """
        model = call.state.check_open()
        form = ReadForm(model, "", (call.integer("count", 1),))
        if output is Output.RESIDUAL:
            form = ReadForm(model, *_residual_spec(call, model))
        session_id = call.session_id
        position = call.integer("position", 0)
        _check_count(call, form.shape[0], model)
        read = cls(
            call,
            output,
            form,
            session_id=session_id,
            position=position,
            epoch=call.integer("epoch", EPOCH_OPENED),
            layer=call.layer(model),
            stored=call.choice("encoding", ("stored",)) is not None,
            wait_ms=call.integer("wait_ms", 0, high=MAX_WAIT_MS),
        )
        if output is Output.RESIDUAL:
            _check_body_bytes(call.body_bytes, form.dtype, form.shape)
        return read

    def at_once(self, body: memoryview) -> tuple[Mapping[str, str], list[Buffer]] | None:
        """Update a residual that the engine can update now (see `TensorRead.at_once`)."""
        if self.output is not Output.RESIDUAL or not self._shape[0]:
            return None
        spec = self._dtype, self._shape
        answer = update_at_once(
            self._call,
            self._model,
            spec,
            body,
            session_id=self._session_id,
            position=self._position,
            epoch=self._epoch,
            layer=self._layer,
        )
        if answer is None:
            return None
        headers = described(spec, answer.length, answer.base, answer.epoch)
        where, buffers = self._call.leave([body])
        return {**headers, **where}, buffers

    def submit(self, body: memoryview) -> Future[StepAnswer]:
        """Ask the engine (see `TensorRead.submit`)."""
        call, residual = self._call, None
        if self.output is Output.RESIDUAL:
            residual = wire.to_torch(TensorView(self._dtype, self._shape, body))
        request = StepRequest(
            segments=steps.one_segment(
                self._session_id, self._position, self._shape[0], self._epoch
            ),
            output=self.output,
            layers=(self._layer,),
            residual=residual,
            stored=self._stored,
            wait_ms=self._wait_ms,
            client=call.client,
            memory=call.answer_memory,
        )
        if residual is None:
            spec = steps.output_spec(request, self._layer, self._shape[0], self._model)
            call.lease.add(wire.num_bytes(spec), "the answer")
        return self._model.engine.step(call.tenant, request)

    def answer(self, answer: StepAnswer) -> tuple[Mapping[str, str], list[Buffer]]:
        """Return a tensor's memory, and headers that describe it and its session."""
        view = wire.as_view(answer.tensors[self._layer])
        spec = view.dtype, view.shape
        headers = described(spec, answer.length[0], answer.base[0], answer.epoch[0])
        if self.output in (Output.KV, Output.ROWS):
            headers[wire.DEAD] = wire.format_ranges(np.flatnonzero(answer.dead))
        if self._stored:
            index = self._model.checkpoint.geometry.layer_index(self._layer)
            headers[wire.ENCODING] = self._model.backend.encodings[index]
        where, buffers = self._call.leave([view.data])
        return {**headers, **where}, buffers

    def refusal(self, refused: StepRefused) -> EngramError:
        """Return the refusal of the one segment."""
        return refused.first


class StepRead:
    """`/v1/step`: any number of segments, pushed and read."""

    def __init__(self, call: Call, options: steps.StepOptions | None = None) -> None:
        """options: as they were read of a head like this one; None: they are read now

        Raises SchemaError, UnknownLayer, Draining, Loading.
        """
        self._call = call
        self.model = model = call.state.check_open()
        self.options = options or _step_options(call, model)
        self._request: StepRequest | None = None
        self._views: steps.Views | None = None

    def at_once(self, body: memoryview) -> tuple[Mapping[str, str], list[Buffer]] | None:
        """Push to one session and update a residual, if the engine can now (see `TensorRead`)."""
        call, model = self._call, self.model
        views = self._decoded(body)
        geometry, most_tokens = model.checkpoint.geometry, model.limits.near_tokens
        step = steps.one_step_of(views, self.options, geometry, most_tokens)
        if step is None:
            if self.options.output is Output.NONE:
                most_tokens = min(PUSH_TOKENS, model.limits.max_tokens)
                few = steps.pushes_of(views, self.options, most_tokens)
                given = None if few is None else push_at_once(call, model, few, self.options)
            else:
                few = steps.few_steps_of(views, self.options, geometry, most_tokens)
                given = None if few is None else read_few_at_once(call, model, few)
            if few is None or given is None:
                return None
            return call.leave(wire.encode_tensors(steps.few_answer_views(few, given)))
        answer = update_at_once(
            call,
            model,
            step.spec,
            step.residual,
            session_id=step.session_id,
            position=step.position,
            epoch=step.epoch,
            layer=step.layer,
            token_ids=step.token_ids,
        )
        if answer is None:
            return None
        return call.leave(wire.encode_tensors(steps.one_answer_views(step, answer)))

    def submit(self, body: memoryview) -> Future[StepAnswer]:
        """Ask the engine (see `TensorRead.submit`)."""
        call, model = self._call, self.model
        self._request = steps.request_of(self._decoded(body), self.options, model)
        self._request = replace(self._request, memory=call.answer_memory)
        call.lease.add(steps.answer_bytes(self._request, model), "the answer")
        return model.engine.step(call.tenant, self._request)

    def _decoded(self, body: memoryview) -> steps.Views:
        """Return the body's tensors, read once. Raises BadTensor, SchemaError."""
        if self._views is None:
            shared = self._call.shared
            is_shared = shared is not None and shared.body is not None
            self._views = steps.decode(body, is_shared=is_shared)
        return self._views

    def answer(self, answer: StepAnswer) -> tuple[Mapping[str, str], list[Buffer]]:
        """Return a safetensors file."""
        assert self._request is not None
        return self._call.leave(steps.encode(self._request, answer))

    def refusal(self, refused: StepRefused) -> EngramError:
        """Return the refusal with the list of segments."""
        return refused


def _single(output: Output) -> Callable[[Call], TensorRead]:
    return lambda call: SingleRead.checked(call, output)


READS: Mapping[Operation, Callable[[Call], TensorRead]] = {
    operations.RESIDUAL: _single(Output.RESIDUAL),
    operations.KV: _single(Output.KV),
    operations.ROWS: _single(Output.ROWS),
    operations.HASH_IDS: _single(Output.HASH_IDS),
    operations.STEP: StepRead,
}
"""The tensor routes: what checks the head of each."""


def update_at_once(
    call: Call,
    model: Model,
    spec: TensorSpec,
    residual: memoryview,
    *,
    session_id: int,
    position: int,
    epoch: int,
    layer: int,
    token_ids: list[int] | None = None,
) -> OneAnswer | None:
    """Update the residual of one session that the engine can update here and now, in its memory.

    None: nothing was changed; a step answers it.

    spec: BF16 or F32, [T, hc_mult, dim], T >= 1; position: of the first token; token_ids: [T],
    pushed first
    """
    dtype, shape = spec
    if len(residual) != wire.num_bytes(spec):
        return None
    begun_s = time.perf_counter()
    read = OneRead(
        session_id=session_id,
        position=position,
        num_tokens=shape[0],
        epoch=epoch,
        layer_index=model.checkpoint.geometry.layer_index(layer),
        residual=addressof(c_char.from_buffer(residual)),
        is_f32=dtype == "F32",
    )
    if read.residual % 4:
        return None
    engine, tenant = model.engine, call.tenant
    if token_ids is None:
        answer = engine.read_residual(tenant, read)
    else:
        answer = engine.push_residual(tenant, read, token_ids)
    if answer is not None:
        call.stages["check"] = time.perf_counter() - begun_s - answer.gate_s
        call.stages["gate"] = answer.gate_s
        call.state.metrics.observe_stage("gate", answer.gate_s)
    return answer


def few_of(step: steps.FewSteps, model: Model) -> Few | None:
    """Return the engine's form of a few segments; None: their residual lies askew."""
    address = addressof(c_char.from_buffer(step.residual))
    if address % 4:
        return None
    layer_index = model.checkpoint.geometry.layer_index(step.layer)
    return Few(step.segments, layer_index, address, step.spec[0] == "F32")


def push_few(
    tenant: str, model: Model, step: steps.FewSteps, options: steps.StepOptions
) -> FewAnswer | None:
    """Push a few segments here and now; None: nothing was changed, a step does it."""
    assert step.token_ids is not None
    index = model.checkpoint.geometry.layer_index
    layers = tuple(index(layer) for layer in options.layers) if options.ahead else ()
    return model.engine.append_few(
        tenant, step.segments, step.token_ids, client=options.client, layer_indices=layers
    )


def push_at_once(
    call: Call, model: Model, step: steps.FewSteps, options: steps.StepOptions
) -> FewAnswer | None:
    """As `read_few_at_once`, of pushes."""
    begun_s = time.perf_counter()
    answer = push_few(call.tenant, model, step, options)
    if answer is not None:
        call.stages["check"] = time.perf_counter() - begun_s
    return answer


def read_few_at_once(call: Call, model: Model, step: steps.FewSteps) -> FewAnswer | None:
    """As `update_at_once`, of a few segments."""
    begun_s = time.perf_counter()
    few = few_of(step, model)
    answer = few and model.engine.read_few(call.tenant, few, step.token_ids)
    if answer is not None:
        call.stages["check"] = time.perf_counter() - begun_s - answer.gate_s
        call.stages["gate"] = answer.gate_s
        call.state.metrics.observe_stage("gate", answer.gate_s)
    return answer


def described(spec: TensorSpec, length: object, base: object, epoch: object) -> dict[str, str]:
    """Return the headers of a tensor and of its session, whose numbers are spelled by `str`."""
    dtype, shape = spec
    return {
        wire.SHAPE: wire.format_shape(shape),
        wire.DTYPE: dtype,
        wire.LENGTH: str(length),
        wire.BASE: str(base),
        wire.EPOCH: str(epoch),
    }


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


def _check_count(call: Call, count: int, model: Model) -> None:
    """Raises BadTensor: the query has another count than the residual; TooManyTokens."""
    if call.integer("count", count) != count:
        raise BadTensor(
            "count is not the residual's first dim", expected=count, got=call.query["count"]
        )
    if count > (limit := model.limits.max_tokens):
        raise TooManyTokens(
            f"{count} positions in one request; split it", expected=f"<= {limit}", got=count
        )


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
    options = steps.StepOptions(
        output=output,
        layers=_layers(call.query.get("layers"), model),
        stored=call.choice("encoding", ("stored",)) is not None,
        truncate=call.choice("on_conflict", ("truncate",)) is not None,
        wait_ms=call.integer("wait_ms", 0, high=MAX_WAIT_MS),
        ahead=call.choice("ahead", ("true", "false")) != "false",
        client=call.client,
    )
    check_options(options, model)
    return options


def _layers(text: str | None, model: Model) -> tuple[int, ...]:
    if text is None:
        return model.checkpoint.geometry.layer_ids
    return tuple(strict.integer(part, "layers", 0) for part in text.split(","))


def check_options(options: steps.StepOptions, model: Model) -> None:
    """Raises SchemaError, UnknownLayer: parameters that are not the service's."""
    if options.stored and options.output is not Output.ROWS:
        got = str(options.output)
        raise SchemaError("encoding=stored is for rows", expected="output=rows", got=got)
    for layer in options.layers:
        check_layer(layer, model)
    if len(set(options.layers)) != len(options.layers):
        got = str(list(options.layers))[:80]
        raise SchemaError("layers: one is there twice", expected="each once", got=got)
