"""One step on its way through the gRPC door, unary or on a stream."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.wire import TensorView
from engram_core.engine_types import EPOCH_OPENED, MAX_WAIT_MS, StepAnswer
from engram_core.geometry import Geometry
from service import steps
from service.calls import Call
from service.reads import update_at_once
from service.rpc import messages
from service.state import Model

_PLAIN = {
    "count": ("num_tokens", "I32", 4),
    "position": ("position", "I64", 8),
    "session_id": ("session_id", "I64", 8),
    "epoch": ("epoch", "I64", 8),
}
"""The tensors of one segment beside its residual: what they tell, dtype, bytes. The epoch may be
left out."""


class StepWork:
    """A step that the engine has begun. future: brings what is read; None: it is there already."""

    def __init__(self, call: Call, message: pb.StepRequest) -> None:
        """Check the step, admit its answer, ask the engine. Raises what a step is refused for.

        Nothing of `message` is kept: a residual is updated in the one copy of its bytes, which lies
        where the backend wants it.
        """
        self._call = call
        self._request_id: int = message.request_id
        self._views: Mapping[str, TensorView] | None = None
        self._residual: memoryview | None = None
        self._admitted = 0  # of the answer, beside the residual
        self.future: Future[StepAnswer] | None = None
        model = call.state.check_open()
        plain = _plain_of(message, model.checkpoint.geometry, model.limits.near_tokens)
        if plain is None or not self._read_at_once(plain, model):
            self._begin(message, model)

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

    def _read_at_once(self, plain: _Plain, model: Model) -> bool:
        """Update a residual that the engine can update here and now; False: nothing was changed."""
        call, count = self._call, plain.num_tokens
        self._residual = copy = self._copy(plain.residual)
        self._admitted = 16 + count
        call.lease.add(self._admitted, "the answer")
        answer = update_at_once(
            call,
            model,
            (plain.dtype, plain.shape),
            copy,
            session_id=plain.session_id,
            position=plain.position,
            epoch=plain.epoch,
            layer=plain.layer,
        )
        if answer is None:
            return False
        self._views = {
            "length": _number(answer.length),
            "epoch": _number(answer.epoch),
            "dead": TensorView("U8", (count,), memoryview(answer.dead)),
            f"residual.{plain.layer}": TensorView(plain.dtype, plain.shape, copy),
        }
        return True

    def reply(self) -> bytes:
        """Return the message of the answer as it goes out. Raises what the step is refused for."""
        views = self._views
        if views is None:
            assert self.future is not None
            answer = self.future.result()
            self._call.stages.update(answer.stages)
            views = steps.answer_views(self._request, answer)
        return messages.step_reply(self._request_id, views)


class _Plain(NamedTuple):
    """A step of one segment that updates a residual and pushes nothing."""

    session_id: int
    position: int
    num_tokens: int
    epoch: int
    layer: int
    dtype: str
    shape: tuple[int, ...]
    residual: bytes


def _plain_of(message: pb.StepRequest, geometry: Geometry, most_tokens: int) -> _Plain | None:
    """Read a plain step without the tensors' general form (docs/notes/grpc.md).

    None: it is another or larger, or something is wrong with it, which the general way says.
    """
    tensors, layers = message.tensors, message.layers
    if message.output != pb.OUTPUT_RESIDUAL or message.stored or message.truncate:
        return None
    if len(layers) != 1 or layers[0] not in geometry.layer_ids or message.wait_ms > MAX_WAIT_MS:
        return None
    if "residual" not in tensors or len(tensors) != 4 + ("epoch" in tensors):
        return None
    numbers = {"epoch": EPOCH_OPENED}
    for name, (told, dtype, width) in _PLAIN.items():
        if name in tensors:
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.shape != [1] or len(tensor.data) != width:
                return None
            if len(UnknownFieldSet(tensor)):
                return None
            numbers[told] = int.from_bytes(tensor.data, "little", signed=True)
    if len(numbers) != 4 or numbers["epoch"] < EPOCH_OPENED:
        return None
    tensor, count = tensors["residual"], numbers["num_tokens"]
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if dtype not in ("BF16", "F32") or len(UnknownFieldSet(tensor)):
        return None
    if not 0 < count <= most_tokens or shape != (count, geometry.hc_mult, geometry.dim):
        return None
    data = tensor.data
    if len(data) != wire.num_bytes((dtype, shape)):
        return None
    return _Plain(**numbers, layer=layers[0], dtype=dtype, shape=shape, residual=data)


def _number(value: int) -> TensorView:
    return TensorView("I64", (1,), memoryview(value.to_bytes(8, "little", signed=True)))
