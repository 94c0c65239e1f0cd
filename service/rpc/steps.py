"""One step on its way through the gRPC door, unary or on a stream."""

from __future__ import annotations

import time
from concurrent.futures import Future

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.wire import TensorView
from engram_core.engine_types import StepAnswer
from service import steps
from service.calls import Call
from service.reads import note, one_ask
from service.rpc import messages
from service.rpc.plain import PlainStep, plain_of, plain_reply
from service.state import Model


class StepWork:
    """A step that the engine has begun. future: brings what is read; None: it is there already."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._request_id = 0
        self._residual: memoryview | None = None
        self._admitted = 0  # of the answer, beside the residual
        self._reply: bytes | None = None
        self.future: Future[StepAnswer] | None = None

    def begin(self, message: pb.StepRequest) -> PlainStep | None:
        """Check the step, admit its answer, ask the engine; return what was answered at once.

        Nothing of `message` is kept: a residual is updated in the one copy of its bytes, which lies
        where the backend wants it. Raises what a step is refused for.
        """
        self._request_id = message.request_id
        model = self._call.state.check_open()
        if self._residual is None:
            plain = plain_of(message, model.checkpoint.geometry, model.limits.near_tokens)
            if plain is not None and self.answer(plain, model):
                return plain
        self._begin(message, model)
        return None

    def answer(self, plain: PlainStep, model: Model) -> bool:
        """Update a residual that the engine can update here and now; False: nothing was changed,
        the message is to begin the step."""
        call, count = self._call, plain.num_tokens
        self._residual = copy = self._copy(plain.residual)
        self._admitted = 16 + count
        call.lease.add(self._admitted, "the answer")
        begun_s = time.perf_counter()
        ask = one_ask(
            call.tenant,
            model,
            (plain.dtype, plain.shape),
            copy,
            session_id=plain.session_id,
            position=plain.position,
            epoch=plain.epoch,
            layer=plain.layer,
        )
        answer = None if ask is None else model.engine.answer([ask])[0]
        if answer is None:
            return False
        note(call, answer, begun_s)
        (spot,) = answer.sessions
        self._reply = plain_reply(plain, spot.length, spot.epoch, answer.dead, copy)
        return True

    def _begin(self, message: pb.StepRequest, model: Model) -> None:
        call = self._call
        options = messages.options_of(message, call, model)
        views = messages.views_of(message)
        if (residual := views.get("residual")) is not None:
            copy = self._residual or self._copy(residual.data)
            views["residual"] = TensorView(residual.dtype, residual.shape, copy)
        self._request = steps.request_of(views, options, model)
        specs = steps.answer_specs(self._request, model)
        specs = {name: spec for name, spec in specs.items() if not name.startswith("residual")}
        call.lease.add(sum(map(wire.num_bytes, specs.values())) - self._admitted, "the answer")
        self.future = model.engine.step(call.tenant, self._request)

    def _copy(self, data: bytes | memoryview) -> memoryview:
        copy = self._call.lease.buffer(len(data), "the answer")
        copy[:] = data
        return copy

    def reply(self) -> bytes:
        """Return the message of the answer as it goes out. Raises what the step is refused for."""
        if self._reply is not None:
            return self._reply
        assert self.future is not None
        answer = self.future.result()
        self._call.stages.update(answer.stages)
        return messages.step_reply(self._request_id, steps.answer_views(self._request, answer))
