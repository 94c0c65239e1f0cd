"""The answer of a step, written by hand, is what protobuf writes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engram_client import wire
from engram_client.proto import engram_pb2 as pb
from engram_client.wire import TensorView
from service.rpc.messages import step_reply

SHAPES = st.lists(st.integers(0, 200), max_size=3).filter(lambda shape: math.prod(shape) < 2000)


@st.composite
def views(draw: st.DrawFn) -> dict[str, TensorView]:
    named = {}
    for name in draw(st.lists(st.sampled_from(["length", "dead", "residual.1", "kv.14"]))):
        dtype, shape = draw(st.sampled_from(sorted(wire.ITEMSIZE))), tuple(draw(SHAPES))
        size = wire.num_bytes((dtype, shape))
        named[name] = TensorView(dtype, shape, memoryview(draw(st.randoms()).randbytes(size)))
    return named


@given(st.one_of(st.just(0), st.integers(1, 2**64 - 1)), views())
def test_bytes_are_those_of_the_message(request_id: int, named: dict[str, TensorView]) -> None:
    made = pb.StepReply(request_id=request_id)
    for name, view in named.items():
        tensor = made.tensors[name]
        tensor.dtype, tensor.data = view.dtype, bytes(view.data)
        tensor.shape.extend(view.shape)
    written = step_reply(request_id, named)
    assert pb.StepReply.FromString(written) == made
    assert len(written) == made.ByteSize(), "and no byte more"
