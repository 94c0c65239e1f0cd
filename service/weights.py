"""`/v1/layers/{layer}/weights`: read from the checkpoint and sent in pieces, never held whole.

What is sent is what every kernel multiplies with: the bf16-rounded, dequantised values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engram_client import wire
from engram_core.checkpoint import LayerSource
from engram_core.checkpoint.dense import CHUNK_VALUES, read_matrix, read_matrix_chunks
from engram_core.quant import to_bf16
from service.bodies import send_stream
from service.calls import Call
from service.shm import connection_of
from service.state import Model

PIECE_BYTES = CHUNK_VALUES * (4 + 2)
"""What one answer holds at a time: a decoded piece as float32 and as bf16."""


def answer_weights(call: Call, model: Model, layer: int, names: Sequence[str]) -> Response:
    """Return the answer: 304 if the client has this table's, else a safetensors file."""
    etag = f'"{model.checkpoint.identity}"'
    if _is_named(etag, call.if_none_match):
        return Response(status_code=304, headers={"etag": etag})
    geometry = model.checkpoint.geometry
    source = model.checkpoint.layers[geometry.layer_index(layer)]
    specs: dict[str, wire.TensorSpec] = {
        "qk": ("F32", (geometry.hc_mult, geometry.dim)),
        "wkv": ("BF16", (geometry.out_features, geometry.in_features)),
    }
    asked = {name: specs[name] for name in names}
    call.lease.add(min(PIECE_BYTES, 3 * wire.encoded_size(asked)), "the answer")
    return _WeightsAnswer(call, source, asked, etag)


def _is_named(etag: str, asked: str) -> bool:
    """Whether If-None-Match names a tag, weakly compared, or `*`. Source: RFC 9110, 13.1.2"""
    tags = [tag.strip() for tag in asked.split(",")]
    return tags == ["*"] or etag in [tag.removeprefix("W/") for tag in tags]


class _WeightsAnswer(Response):
    """A safetensors file whose pieces are decoded in a thread while others are sent."""

    def __init__(
        self, call: Call, source: LayerSource, specs: dict[str, wire.TensorSpec], etag: str
    ) -> None:
        super().__init__(headers={"etag": etag}, media_type=wire.TENSOR_MEDIA)
        self._call = call
        self._source = source
        self._specs = specs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [item for item in self.raw_headers if item[0] != b"content-length"]
        size = wire.encoded_size(self._specs)
        pieces = _pieces(self._source, self._specs)
        connection = connection_of(scope)
        self._call.sent_bytes = await send_stream(
            send, headers, size, pieces, lambda: connection is not None and connection.is_gone
        )


def _pieces(source: LayerSource, specs: dict[str, wire.TensorSpec]) -> Iterator[bytes | memoryview]:
    """Yield the file piece by piece."""
    head, order = wire.encode_head(specs)
    yield head
    for name in order:
        if name == "qk":
            q, k = read_matrix(source.q), read_matrix(source.k)
            yield wire.as_view(q * k).data
        else:
            for _, rows in read_matrix_chunks(source.wkv):
                yield wire.as_view(to_bf16(rows)).data
