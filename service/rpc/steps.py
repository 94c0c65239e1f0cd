"""One step on its way through the gRPC door, unary or on a stream."""

from __future__ import annotations

from concurrent.futures import Future

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.wire import TensorView
from engram_core.engine_types import StepAnswer
from service import steps
from service.calls import Call
from service.rpc import messages


class StepWork:
    """A step that the engine has begun. future: brings what is read."""

    def __init__(self, call: Call, message: pb.StepRequest) -> None:
        """Check the step, admit its answer, ask the engine. Raises what a step is refused for.

        Nothing of `message` is kept: a residual is updated in the one copy of its bytes, which lies
        where the backend wants it.
        """
        model = call.state.check_open()
        options = messages.options_of(message, call, model)
        self._call = call
        self._request_id: int = message.request_id
        views = messages.views_of(message)
        if (residual := views.get("residual")) is not None:
            copy = call.lease.buffer(residual.data.nbytes, "the answer")
            copy[:] = residual.data
            views["residual"] = TensorView(residual.dtype, residual.shape, copy)
        self._request = steps.request_of(views, options, model)
        specs = steps.answer_specs(self._request, model)
        specs = {name: spec for name, spec in specs.items() if not name.startswith("residual")}
        call.lease.add(sum(map(wire.num_bytes, specs.values())), "the answer")
        self.future: Future[StepAnswer] = model.engine.step(call.tenant, self._request)

    def reply(self, answer: StepAnswer) -> pb.StepReply:
        """Return the message of an answer."""
        self._call.stages.update(answer.stages)
        return messages.step_reply(self._request_id, steps.answer_views(self._request, answer))
