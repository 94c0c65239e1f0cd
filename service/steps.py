"""Tensors on the wire <-> segments of the engine; the same for every door.

What is checked here is what a tensor is: names, dtypes, shapes, and what cannot be without what.
Whether ids, positions and epochs fit the sessions is the engine's business.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_client import wire
from engram_client.wire import TensorSpec, TensorView
from engram_core.dispatch import answer_form
from engram_core.engine_types import EPOCH_OPENED, Output, Segments, StepAnswer, StepRequest
from engram_core.errors import BadTensor, SchemaError, TooManyTokens
from engram_core.geometry import Geometry
from service import strict
from service.state import Model

NAMES = (
    "count",
    "position",
    "session_id",
    "epoch",
    "lookback",
    "hash_ids",
    "token_ids",
    "mask",
    "residual",
)
SOURCES = ("session_id", "lookback", "hash_ids")

Views = Mapping[str, TensorView]


@dataclass(frozen=True)
class StepOptions:
    """The parameters of a step beside its tensors, as in `StepRequest`."""

    output: Output
    layers: tuple[int, ...]
    stored: bool = False
    truncate: bool = False
    wait_ms: int = 0
    ahead: bool = True
    client: Hashable = ""


def decode(body: memoryview, *, is_shared: bool = False) -> dict[str, TensorView]:
    """Return the tensors of a step's body. Raises BadTensor, SchemaError.

    is_shared: the client can change it at any time; what is checked and then used as an index or a
        length, all but a residual, is copied first
    """
    try:
        views = wire.decode_tensors(body)
    except wire.WireError as error:
        raise BadTensor(error.message, expected=error.expected, got=error.got) from None
    check_names(views)
    if not is_shared:
        return views
    return {
        name: view if name == "residual" else replace(view, data=memoryview(bytearray(view.data)))
        for name, view in views.items()
    }


def check_names(views: Views) -> None:
    """Raises SchemaError: a tensor that no step has."""
    for name in views:
        if name not in NAMES:
            raise strict.unknown("tensor", name, NAMES)


def request_of(views: Views, options: StepOptions, model: Model) -> StepRequest:
    """Return the engine's form of a step. Raises BadTensor, SchemaError, TooManyTokens.

    The residual is not copied: it is updated where it was received.
    """
    geometry, limits = model.checkpoint.geometry, model.limits
    _check_company(views, options)
    num_segments = views["count"].shape[0] if len(views["count"].shape) == 1 else -1
    count = _need_array(views, "count", ("I32",), (num_segments,), "[S]")
    if count.size and count.min() < 0:
        raise SchemaError("count is below 0", expected=">= 0", got=int(count.min()))
    num_tokens = int(count.sum(dtype=np.int64))
    if num_tokens > limits.max_tokens:
        raise TooManyTokens(
            f"{num_tokens} tokens in one request; split it",
            expected=f"<= {limits.max_tokens}",
            got=num_tokens,
        )
    segments = _segments(views, count, num_tokens, len(options.layers), geometry)
    return StepRequest(
        segments=segments,
        output=options.output,
        layers=options.layers,
        residual=_residual(views.get("residual"), num_tokens, geometry),
        stored=options.stored,
        truncate=options.truncate,
        wait_ms=options.wait_ms,
        ahead=options.ahead,
        client=options.client,
    )


def _check_company(views: Views, options: StepOptions) -> None:
    """Raises SchemaError: a tensor is missing, or there beside one that excludes it."""
    for name in ("count", "position"):
        _need(views, name, "every step")
    sources = [name for name in SOURCES if name in views]
    if len(sources) != 1:
        raise SchemaError(
            "a step has exactly one source of its windows",
            expected=f"one of {', '.join(SOURCES)}",
            got=", ".join(sources) or "none",
        )
    source = sources[0]
    if source == "lookback":
        _need(views, "token_ids", "look-back")
    if source == "hash_ids" and "token_ids" in views:
        raise SchemaError("hash_ids leave nothing to push", expected="no token_ids")
    if "epoch" in views and source != "session_id":
        raise SchemaError("an epoch is a session's", expected="session_id", got=source)
    if "mask" in views and source == "session_id":
        _need(views, "token_ids", "a mask")
    if options.output is Output.RESIDUAL:
        _need(views, "residual", "output=residual")
        if len(options.layers) != 1:
            raise SchemaError(
                "a residual belongs to one layer", expected="layers=L", got=list(options.layers)
            )
    elif "residual" in views:
        raise SchemaError(f"output={options.output} takes no residual", expected="output=residual")


def _need(views: Views, name: str, by: str) -> None:
    if name not in views:
        raise SchemaError(f"tensor {name!r} is missing: {by} needs it", expected=name)


def _segments(
    views: Views, count: NDArray[np.int32], num_tokens: int, num_layers: int, geometry: Geometry
) -> Segments:
    size, look = len(count), geometry.max_ngram_size - 1
    ids, wide = ("I32", "I64"), ("I64",)
    hash_shape = (num_tokens, num_layers, geometry.n_hash_cols)
    mask = _array(views, "mask", ("U8", "BOOL"), (num_tokens,), "[T]")
    if mask is not None and mask.dtype == np.uint8 and mask.size and mask.max() > 1:
        raise BadTensor("mask: a byte that is no flag", expected="0 or 1", got=int(mask.max()))
    segments = Segments(
        count=count,
        position=_need_array(views, "position", wide, (size,), "[S]"),
        session_id=_array(views, "session_id", wide, (size,), "[S]"),
        epoch=_array(views, "epoch", wide, (size,), "[S]"),
        lookback=_array(views, "lookback", ("I32",), (size, look), "[S, max_ngram_size-1]"),
        hash_ids=_int64(_array(views, "hash_ids", ids, hash_shape, "[T, layers, cols]")),
        token_ids=_int64(_array(views, "token_ids", ids, (num_tokens,), "[T]")),
        mask=None if mask is None else mask.astype(np.bool_, copy=False),
    )
    _check_low("position", segments.position, 0)
    _check_low("session_id", segments.session_id, 1)
    _check_low("epoch", segments.epoch, EPOCH_OPENED)
    return segments


def _check_low(name: str, values: NDArray[np.int64] | None, low: int) -> None:
    if values is not None and values.size and values.min() < low:
        index = int(values.argmin())
        raise SchemaError(
            f"{name}[{index}] is out of range",
            expected=f">= {low}",
            got=int(values[index]),
            index=index,
        )


def _need_array(
    views: Views, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], text: str
) -> NDArray[Any]:
    array = _array(views, name, dtypes, shape, text)
    assert array is not None
    return array


def _array(
    views: Views, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], text: str
) -> NDArray[Any] | None:
    """Return a control tensor, or None if it is not there. text: the shape in words."""
    view = views.get(name)
    if view is None:
        return None
    if view.dtype not in dtypes:
        raise BadTensor(f"{name}: dtype", expected=" or ".join(dtypes), got=view.dtype)
    if view.shape != shape:
        raise BadTensor(f"{name}: shape {text}", expected=list(shape), got=list(view.shape))
    try:
        return wire.to_numpy(view)
    except wire.WireError as error:
        raise BadTensor(f"{name}: {error.message}", expected=error.expected) from None


def _int64(array: NDArray[Any] | None) -> NDArray[np.int64] | None:
    return None if array is None else array.astype(np.int64, copy=False)


def _residual(view: TensorView | None, num_tokens: int, geometry: Geometry) -> torch.Tensor | None:
    if view is None:
        return None
    shape = (num_tokens, geometry.hc_mult, geometry.dim)
    if view.dtype not in ("BF16", "F32"):
        raise BadTensor("residual: dtype", expected="BF16 or F32", got=view.dtype)
    if view.shape != shape:
        raise BadTensor(
            "residual: shape [T, hc_mult, dim]", expected=list(shape), got=list(view.shape)
        )
    return wire.to_torch(view)


def answer_specs(request: StepRequest, model: Model) -> dict[str, TensorSpec]:
    """Return dtype and shape of every tensor of a step's answer, known before it is made."""
    size, num_tokens = len(request.segments.count), int(request.segments.count.sum())
    specs: dict[str, TensorSpec] = {
        "length": ("I64", (size,)),
        "epoch": ("I64", (size,)),
        "dead": ("U8", (num_tokens,)),
    }
    if request.output is not Output.NONE:
        for layer in request.layers:
            specs[f"{request.output}.{layer}"] = output_spec(request, layer, num_tokens, model)
    return specs


def output_spec(request: StepRequest, layer: int, num_tokens: int, model: Model) -> TensorSpec:
    """Return dtype and shape of what a step reads of a layer."""
    geometry = model.checkpoint.geometry
    row_bytes = model.backend.row_bytes[geometry.layer_index(layer)]
    shape, dtype = answer_form(request, num_tokens, geometry, row_bytes)
    return wire.dtype_name(dtype), shape


def answer_bytes(request: StepRequest, model: Model) -> int:
    """Return the bytes of a step's answer beside a residual, which lies in the body's buffer."""
    specs = answer_specs(request, model)
    residual = request.residual
    return wire.encoded_size(specs) - (0 if residual is None else residual.nbytes)


def answer_views(request: StepRequest, answer: StepAnswer) -> dict[str, TensorView]:
    """Return the tensors of a step's answer."""
    views = {
        "length": wire.as_view(answer.length),
        "epoch": wire.as_view(answer.epoch),
        "dead": wire.as_view(answer.dead.view(np.uint8)),
    }
    if request.output is not Output.NONE:
        for layer in request.layers:
            views[f"{request.output}.{layer}"] = wire.as_view(answer.tensors[layer])
    return views


def encode(request: StepRequest, answer: StepAnswer) -> list[bytes | memoryview]:
    """Return a step's answer as buffers to be sent in order."""
    return wire.encode_tensors(answer_views(request, answer))


def one_segment(session_id: int, position: int, count: int, epoch: int) -> Segments:
    """Return the segment of a read of one session."""
    return Segments(
        count=np.array([count], np.int32),
        position=np.array([position], np.int64),
        session_id=np.array([session_id], np.int64),
        epoch=np.array([epoch], np.int64),
    )
