"""Messages of `proto/engram.proto` <-> documents and tensors. What is unknown is refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.wire import TensorView
from engram_core.engine_types import MAX_WAIT_MS, Output, PushResult, SessionState
from engram_core.errors import BadRequest, BadTensor, EngramError, SchemaError
from service import problems, schemas, steps, strict
from service.calls import Call
from service.reads import check_options
from service.state import Model

Kind = TypeVar("Kind", bound=Message)

OUTPUTS: Mapping[int, Output] = {
    pb.OUTPUT_NONE: Output.NONE,
    pb.OUTPUT_RESIDUAL: Output.RESIDUAL,
    pb.OUTPUT_KV: Output.KV,
    pb.OUTPUT_ROWS: Output.ROWS,
    pb.OUTPUT_HASH_IDS: Output.HASH_IDS,
}


def parse(kind: type[Kind], raw: bytes) -> Kind:
    """Return a message of all the bytes. Raises BadRequest, SchemaError."""
    try:
        message: Kind = kind.FromString(raw)
    except DecodeError:
        raise BadRequest(f"the message is no {kind.DESCRIPTOR.name}", expected="protobuf") from None
    check_known(message)
    return message


def check_known(message: Message) -> None:
    """Raises SchemaError: the message has fields that its contract does not name."""
    for field in UnknownFieldSet(message):
        name = message.DESCRIPTOR.name
        raise SchemaError(
            f"{name} has an unknown field {field.field_number}",
            expected=[known.name for known in message.DESCRIPTOR.fields],
            got=field.field_number,
        )


# ---- sessions


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields that are there; session ids as JSON spells them."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in ("session_id", "fork_of"):
            value = str(value)
        fields[field.name] = list(value) if field.is_repeated else value
    return fields


def opening_of(message: pb.OpenSessionRequest) -> schemas.OpenSession:
    """Raises SchemaError."""
    fields = fields_of(message)
    if "lookback" in fields:
        fields["lookback"] = [None if token == -1 else token for token in fields["lookback"]]
    return strict.parse_model(schemas.OpenSession, fields)


def push_of(message: pb.PushRequest) -> schemas.PushTokens:
    """Raises SchemaError."""
    fields = {"token_ids": [], **fields_of(message)}
    fields.pop("session_id", None)
    if fields.pop("truncate", False):
        fields["on_conflict"] = "truncate"
    return strict.parse_model(schemas.PushTokens, fields)


def rewind_of(message: pb.RewindRequest) -> schemas.RewindSession:
    """Raises SchemaError."""
    fields = fields_of(message)
    fields.pop("session_id", None)
    return strict.parse_model(schemas.RewindSession, fields)


def session_id_of(message: Message) -> int:
    """Raises SchemaError."""
    return strict.in_range(message.session_id, "session_id", 1, strict.INT64_MAX)


def session_reply(state: SessionState) -> pb.Session:
    """Return the message of a session."""
    document = schemas.Session.of(state).model_dump(exclude={"session_id"}, exclude_none=True)
    return pb.Session(session_id=state.session_id, created=state.created, **document)


def pushed_reply(session_id: int, result: PushResult) -> pb.Pushed:
    """Return the message of a push or rewind."""
    return pb.Pushed(session_id=session_id, **vars(result))


# ---- steps


def options_of(message: pb.StepRequest, call: Call, model: Model) -> steps.StepOptions:
    """Return a step's parameters. Raises SchemaError, UnknownLayer."""
    output = OUTPUTS.get(message.output)
    if output is None:
        raise SchemaError("output: unknown value", expected=[*OUTPUTS], got=message.output)
    options = steps.StepOptions(
        output=output,
        layers=tuple(message.layers) or model.checkpoint.geometry.layer_ids,
        stored=message.stored,
        truncate=message.truncate,
        wait_ms=strict.in_range(message.wait_ms, "wait_ms", 0, MAX_WAIT_MS),
        ahead=message.ahead if message.HasField("ahead") else True,
        client=call.client,
    )
    check_options(options, model)
    return options


def views_of(message: pb.StepRequest) -> dict[str, TensorView]:
    """Return a step's tensors. Raises BadTensor, SchemaError."""
    views = {}
    for name, tensor in message.tensors.items():
        check_known(tensor)
        try:
            views[name] = wire.view_of(name, tensor.dtype, tuple(tensor.shape), tensor.data)
        except wire.WireError as error:
            raise BadTensor(error.message, expected=error.expected, got=error.got) from None
    steps.check_names(views)
    return views


def step_reply(request_id: int, views: Mapping[str, TensorView]) -> bytes:
    """Return the `StepReply` of a step as it goes out; the tensors are copied once.

    By hand: protobuf's own way copies them three times (docs/notes/grpc.md).
    """
    parts: list[bytes | memoryview] = [request_id_field(request_id)]
    for name, view in views.items():
        parts += (head_of_tensor(name, view.dtype, view.shape), view.data)
    return b"".join(parts)


def request_id_field(request_id: int) -> bytes:
    """Return the field of `StepReply.request_id`; 0 is not told."""
    return b"\x08" + _varint(request_id) if request_id else b""


@lru_cache(maxsize=256)
def head_of_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return all of an entry of `StepReply.tensors` that comes before the tensor's bytes."""
    size = wire.num_bytes((dtype, shape))
    head = _field(1, dtype.encode())
    if shape:
        head += _field(2, b"".join(map(_varint, shape)))
    if size:
        head += b"\x1a" + _varint(size)
    entry = _field(1, name.encode()) + b"\x12" + _varint(len(head) + size) + head
    return b"\x1a" + _varint(len(entry) + size) + entry


def _field(number: int, content: bytes) -> bytes:
    """Return a field of wire type 2."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Return an integer >= 0 in groups of seven bits, the lowest first."""
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def refused_reply(request_id: int, error: EngramError) -> pb.StepReply:
    """Return the answer of a refused step on a stream."""
    kind = problems.kind_of(error)
    problem = pb.Problem(
        code=problems.code_of(error),
        grpc_status=kind.grpc,
        detail=error.message,
        retry_after_ms=kind.retry_after_ms,
        json=problems.text(problems.document(error)),
    )
    return pb.StepReply(request_id=request_id, problem=problem)
