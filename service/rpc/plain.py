"""Steps of one segment that update a residual and push nothing, read without the general form.

A runner's messages differ in a few numbers and in the residual. What a first one spells beside them
is remembered by its very bytes (`PlainSteps`); another is read by protobuf (`plain_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_core.engine_types import EPOCH_OPENED, MAX_WAIT_MS
from engram_core.geometry import Geometry
from service.rpc import messages
from service.state import Model

MAX_FORMS = 64
"""Remembered by a stream; then all are forgotten."""

_NUMBERS = {
    "count": ("num_tokens", "I32", 4),
    "position": ("position", "I64", 8),
    "session_id": ("session_id", "I64", 8),
    "epoch": ("epoch", "I64", 8),
}
"""The tensors of one segment beside its residual: what they tell, dtype, bytes. The epoch may be
left out."""


class PlainStep(NamedTuple):
    """A step of one segment that updates a residual and pushes nothing."""

    request_id: int
    session_id: int
    position: int
    num_tokens: int
    epoch: int
    layer: int
    dtype: str
    shape: tuple[int, ...]
    residual: bytes | memoryview


def plain_of(message: pb.StepRequest, geometry: Geometry, most_tokens: int) -> PlainStep | None:
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
    for name, (told, dtype, width) in _NUMBERS.items():
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
    request_id, layer = message.request_id, layers[0]
    return PlainStep(
        request_id=request_id, **numbers, layer=layer, dtype=dtype, shape=shape, residual=data
    )


Range = tuple[int, int]


@dataclass(frozen=True)
class _Form:
    """How a client spells a plain step, from behind its request id.

    fixed: ranges and their bytes, all but those of session_id, position, epoch (None: left out)
    and residual
    """

    step: PlainStep
    fixed: tuple[tuple[int, int, bytes], ...]
    session_id: Range
    position: Range
    epoch: Range | None
    residual: Range


class PlainSteps:
    """The forms of the plain steps of one stream. model: what they were read for"""

    def __init__(self) -> None:
        self.model: Model | None = None
        self._forms: dict[int, _Form] = {}

    def find(self, raw: bytes) -> PlainStep | None:
        """Read a plain step that is spelled as one before; its residual stays where it is."""
        request_id, at = _request_id(raw)
        form = self._forms.get(len(raw) - at)
        if form is None:
            return None
        for begin, end, piece in form.fixed:
            if raw[at + begin : at + end] != piece:
                return None
        epoch = EPOCH_OPENED if form.epoch is None else _number(raw, at, form.epoch)
        if epoch < EPOCH_OPENED:
            return None
        step, (begin, end) = form.step, form.residual
        return PlainStep(
            request_id,
            _number(raw, at, form.session_id),
            _number(raw, at, form.position),
            step.num_tokens,
            epoch,
            step.layer,
            step.dtype,
            step.shape,
            memoryview(raw)[at + begin : at + end],
        )

    def learn(self, raw: bytes, step: PlainStep, model: Model) -> None:
        """Remember how a plain step is spelled, if it is spelled simply."""
        _, at = _request_id(raw)
        places = _places(raw[at:])
        if places is None or places.keys() - {"epoch"} != {"count", *_VARYING}:
            return
        varying = sorted(place for name, place in places.items() if name != "count")
        ends = [0, *(end for _, end in varying)]
        begins = [*(begin for begin, _ in varying), len(raw) - at]
        fixed = tuple(
            (begin, end, raw[at + begin : at + end])
            for begin, end in zip(ends, begins, strict=True)
        )
        found = {name: places.get(name) for name in (*_VARYING, "epoch")}
        if len(self._forms) >= MAX_FORMS or model is not self.model:
            self._forms.clear()
        self.model = model
        kept = step._replace(residual=b"")
        self._forms[len(raw) - at] = _Form(kept, fixed, **found)  # type: ignore[arg-type]


_VARYING = ("session_id", "position", "residual")


def _number(raw: bytes, at: int, place: Range) -> int:
    return int.from_bytes(raw[at + place[0] : at + place[1]], "little", signed=True)


def _request_id(raw: bytes) -> tuple[int, int]:
    """Return the request id that a message begins with, and where it goes on; 0, 0: none."""
    if raw[:1] != b"\x08":
        return 0, 0
    value = 0
    for index, byte in enumerate(raw[1:11]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value & (1 << 64) - 1, index + 2
    return 0, 0


def _places(raw: bytes) -> dict[str, Range] | None:
    """Return where in a message the bytes of each tensor are; None: it is not spelled simply."""
    places: dict[str, Range] = {}
    try:
        for number, begin, end in _fields(raw, 0, len(raw)):
            if number == 1:  # one more request id
                return None
            if number != 8:
                continue
            key, value = _fields(raw, begin, end)
            name = raw[key[1] : key[2]].decode()
            data = [field for field in _fields(raw, *value[1:]) if field[0] == 3]
            if (key[0], value[0], len(data)) != (1, 2, 1) or name in places:
                return None
            places[name] = data[0][1:]
    except (ValueError, IndexError):
        return None
    return places


def _fields(raw: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Return number and range of the fields between two places. Raises ValueError, IndexError."""
    fields = []
    while at < end:
        tag, at = _varint(raw, at)
        begin = at
        if tag & 7 == 0:
            _, at = _varint(raw, at)
        elif tag & 7 == 2:
            size, begin = _varint(raw, at)
            at = begin + size
        else:
            raise ValueError
        if at > end:
            raise ValueError
        fields.append((tag >> 3, begin, at))
    return fields


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return an integer, and where it ends. Raises IndexError, ValueError: it has no end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError


def plain_reply(
    step: PlainStep, length: int, epoch: int, dead: bytes, residual: memoryview
) -> bytes:
    """Return the `StepReply` of a plain step as it goes out; the residual is copied once."""
    heads = _heads(step.layer, step.dtype, step.shape)
    return b"".join(
        (
            messages.request_id_field(step.request_id),
            heads[0],
            length.to_bytes(8, "little", signed=True),
            heads[1],
            epoch.to_bytes(8, "little", signed=True),
            heads[2],
            dead,
            heads[3],
            residual,
        )
    )


@lru_cache(maxsize=256)
def _heads(layer: int, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, ...]:
    """Return what comes before the bytes of length, epoch, dead and the residual."""
    return (
        messages.head_of_tensor("length", "I64", (1,)),
        messages.head_of_tensor("epoch", "I64", (1,)),
        messages.head_of_tensor("dead", "U8", shape[:1]),
        messages.head_of_tensor(f"residual.{layer}", dtype, shape),
    )
