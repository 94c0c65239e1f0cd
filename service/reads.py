"""The tensor routes as three steps: what the head says, what the body says, what is answered.

Nothing here waits or sends: the FastAPI route (`routes.py`) and the fast path (`fast_path.py`)
take the same steps, so they give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from engram_client import wire
from engram_client.wire import TensorSpec, TensorView
from engram_core.direct import Answer, Ask
from engram_core.engine import Engine
from engram_core.engine_types import EPOCH_OPENED, MAX_WAIT_MS, Output, StepAnswer, StepRequest
from engram_core.errors import BadTensor, EngramError, SchemaError, StepRefused, TooManyTokens
from service import operations, plain_steps, steps, strict
from service.bodies import Buffer
from service.calls import Call
from service.operations import Operation
from service.state import Model

PUSH_TOKENS = 64
"""Longer pushes are checked by arrays, which are quicker."""


Told = tuple[Mapping[str, str], list[Buffer]]
"""An answer's headers, and its buffers."""


class TensorRead(Protocol):
    """A tensor request whose head is checked."""

    @property
    def engine(self) -> Engine:
        """Which is asked."""

    def ask(self, body: memoryview) -> Ask | None:
        """Return how the engine is asked for what it may answer here and now; None: submit it.

        Raises as `submit` does, of the body.
        """

    def given(self, answer: Answer) -> Told:
        """Return the answer to what `ask` returned, as `answer` does."""

    def submit(self, body: memoryview) -> Future[StepAnswer]:
        """Check the body, admit the answer, ask the engine; a residual is updated in `body`."""

    def answer(self, answer: StepAnswer) -> Told:
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
        self._body = memoryview(b"")

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

    @property
    def engine(self) -> Engine:
        """Which is asked."""
        return self._model.engine

    def ask(self, body: memoryview) -> Ask | None:
        """Return how a residual's update is asked for (see `TensorRead.ask`)."""
        if self.output is not Output.RESIDUAL:
            return None
        self._body = body
        return one_ask(
            self._call.tenant,
            self._model,
            (self._dtype, self._shape),
            body,
            session_id=self._session_id,
            position=self._position,
            epoch=self._epoch,
            layer=self._layer,
        )

    def given(self, answer: Answer) -> Told:
        """Return the residual and its headers (see `TensorRead.given`)."""
        (spot,) = answer.sessions
        headers = described((self._dtype, self._shape), spot.length, spot.base, spot.epoch)
        where, buffers = self._call.leave([self._body])
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

    def answer(self, answer: StepAnswer) -> Told:
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
        self._plain: plain_steps.PlainStep | None = None

    @property
    def engine(self) -> Engine:
        """Which is asked."""
        return self.model.engine

    def ask(self, body: memoryview) -> Ask | None:
        """Return how a plain step is asked for (see `TensorRead.ask`)."""
        model, options = self.model, self.options
        geometry, most_tokens = model.checkpoint.geometry, model.limits.near_tokens
        if options.output is Output.NONE:
            most_tokens = min(PUSH_TOKENS, model.limits.max_tokens)
        self._plain = plain_steps.read(body, options, geometry, most_tokens)
        if self._plain is None:
            return None
        return plain_steps.ask_of(self._plain, options, geometry, self._call.tenant)

    def given(self, answer: Answer) -> Told:
        """Return a safetensors file (see `TensorRead.given`)."""
        plain = self._plain
        assert plain is not None
        return self._call.leave(plain_steps.encode(plain, plain.residual, self.options, answer))

    def submit(self, body: memoryview) -> Future[StepAnswer]:
        """Ask the engine (see `TensorRead.submit`)."""
        call, model = self._call, self.model
        is_shared = call.shared is not None and call.shared.body is not None
        views = steps.decode(body, is_shared=is_shared)
        self._request = steps.request_of(views, self.options, model)
        self._request = replace(self._request, memory=call.answer_memory)
        call.lease.add(steps.answer_bytes(self._request, model), "the answer")
        return model.engine.step(call.tenant, self._request)

    def answer(self, answer: StepAnswer) -> Told:
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


def one_ask(
    tenant: str,
    model: Model,
    spec: TensorSpec,
    residual: memoryview,
    *,
    session_id: int,
    position: int,
    epoch: int,
    layer: int,
) -> Ask | None:
    """Return how the engine is asked to update a residual of one session where it lies; None: it
    lies askew, or has no tokens.

    spec: BF16 or F32, [T, hc_mult, dim]; position: of the first token
    """
    num_tokens = spec[1][0]
    if not num_tokens or len(residual) != wire.num_bytes(spec):
        return None
    index = model.checkpoint.geometry.layer_index(layer)
    segments = [(session_id, position, num_tokens, epoch)]
    return plain_steps.update_of(tenant, segments, None, index, spec, residual)


def note(call: Call, answer: Answer, begun_s: float) -> None:
    """Note the stages of what the engine answered here and now."""
    call.stages["check"] = time.perf_counter() - begun_s - answer.gate_s
    if answer.gate_s:
        call.stages["gate"] = answer.gate_s
        call.state.metrics.observe_stage("gate", answer.gate_s)


def at_once(call: Call, read: TensorRead, body: memoryview) -> Told | None:
    """Answer here and now what the engine can answer so; None: submit it."""
    begun_s = time.perf_counter()
    ask = read.ask(body)
    answer = None if ask is None else read.engine.answer([ask])[0]
    if answer is None:
        return None
    note(call, answer, begun_s)
    return read.given(answer)


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
        model.checkpoint.geometry.layer_index(layer)  # refuses others
    if len(set(options.layers)) != len(options.layers):
        got = str(list(options.layers))[:80]
        raise SchemaError("layers: one is there twice", expected="each once", got=got)
