"""Checks of a request that need no session: shapes, dtypes, ranges, what goes with what."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.engine_types import (
    EPOCH_OPENED,
    MAX_WAIT_MS,
    EngineLimits,
    OpenRequest,
    Output,
    Segments,
    StepRequest,
)
from engram_core.errors import BadRequest, BadTensor, SchemaError, TooManyTokens
from engram_core.geometry import EngramHashTables, Geometry
from engram_core.hashing import compress
from engram_core.registry import Opening

_INT64_MAX = 2**63 - 1


def check_open(request: OpenRequest, tables: EngramHashTables) -> Opening:
    """Check how a session is to be made, and compress its look-back.

    Raises: SchemaError (a number out of range, look-back of another length), BadRequest (fields
        that exclude each other), TokenOutOfRange.
    """
    for name in ("session_id", "fork_of"):
        value = getattr(request, name)
        if value is not None and not 0 < value <= _INT64_MAX:
            raise SchemaError(f"{name}: expected 1..2^63-1, got {value}", got=value)
    if not 0 <= (request.position or 0) <= _INT64_MAX:
        raise SchemaError(f"position: expected 0..2^63-1, got {request.position}")
    if not -1 <= request.epoch <= _INT64_MAX:
        raise SchemaError(f"epoch: expected 0..2^63-1, got {request.epoch}")
    if request.fork_of is not None:
        if request.lookback is not None:
            raise BadRequest("lookback: a fork takes it from its parent; leave it out")
        return Opening(
            request.session_id,
            request.position,
            fork_of=request.fork_of,
            epoch=request.epoch,
            owner=request.owner,
        )
    if request.epoch != EPOCH_OPENED:
        raise BadRequest("epoch: it speaks of fork_of, and there is none; leave it out")
    position, given = request.position or 0, request.lookback or ()
    expected = min(position, tables.max_ngram_size - 1)
    if len(given) != expected:
        raise SchemaError(
            f"lookback: expected exactly {expected} token ids before position {position}, oldest"
            f" first, null = dead; got {len(given)}",
            expected=expected,
            got=len(given),
        )
    mask = np.array([token is not None for token in given], dtype=np.bool_)
    token_ids = np.array([0 if token is None else token for token in given], dtype=np.int64)
    lookback = tuple(compress(token_ids, mask, tables, name="lookback").tolist())
    return Opening(request.session_id, position, lookback, owner=request.owner)


def check_tokens(
    token_ids: NDArray[np.int64], mask: NDArray[np.bool_] | None, limits: EngineLimits
) -> None:
    """Check the ids of one push. Raises: BadTensor, TooManyTokens."""
    if token_ids.ndim != 1:
        raise BadTensor(f"token_ids: expected int64 [T], got shape {list(token_ids.shape)}")
    if mask is not None:
        _check("mask", mask, "bool", token_ids.shape)
    _check_size(len(token_ids), "tokens", limits)


def check_step(request: StepRequest, geometry: Geometry, limits: EngineLimits) -> tuple[int, ...]:
    """Check everything about a step but the state of its sessions.

    Returns: layer indices of the layers named; of all layers where output none names none.

    Raises: BadTensor, BadRequest, SchemaError, TooManyTokens, UnknownLayer.
    """
    segments = request.segments
    layers = _check_layers(request, geometry)
    num_tokens = _check_counts(segments, limits)
    _check_source(segments)
    _check_shapes(segments, num_tokens, len(layers), geometry)
    if not 0 <= request.wait_ms <= MAX_WAIT_MS:
        raise SchemaError(f"wait_ms: expected 0..{MAX_WAIT_MS}, got {request.wait_ms}")
    if request.stored and request.output is not Output.ROWS:
        raise BadRequest(f"encoding: only rows come as stored, not {request.output}")
    if request.truncate and (segments.session_id is None or segments.token_ids is None):
        raise BadRequest("truncate (over HTTP: on_conflict): only token_ids pushed to sessions can")
    _check_residual(request, num_tokens, geometry)
    return layers


def _check_layers(request: StepRequest, geometry: Geometry) -> tuple[int, ...]:
    layers = tuple(geometry.layer_index(layer) for layer in request.layers)
    if len(set(layers)) != len(layers):
        raise SchemaError(f"layers: expected each once, got {list(request.layers)}")
    if not layers and request.output is Output.NONE:
        return tuple(range(geometry.num_layers))
    if not layers or (request.output is Output.RESIDUAL and len(layers) != 1):
        expected = "exactly one" if request.output is Output.RESIDUAL else "at least one"
        raise BadRequest(f"layers: {request.output} needs {expected}, got {list(request.layers)}")
    return layers


def _check_counts(segments: Segments, limits: EngineLimits) -> int:
    """Check count and position; returns T."""
    count, position = segments.count, segments.position
    num_segments = len(count) if count.ndim == 1 else -1
    _check("count", count, "int32", (num_segments,))
    _check("position", position, "int64", (num_segments,))
    _check_size(num_segments, "segments", limits)
    for name, array in (("count", count), ("position", position)):
        for i in np.flatnonzero(array < 0)[:1].tolist():
            raise BadTensor(f"{name}[{i}]: expected at least 0, got {array[i]}", got=int(array[i]))
    num_tokens = int(count.sum(dtype=np.int64))
    _check_size(num_tokens, "tokens", limits)
    return num_tokens


def _check_source(segments: Segments) -> None:
    """Exactly one source, and nothing beside it that contradicts it."""
    given = [
        name
        for name in ("session_id", "lookback", "hash_ids")
        if getattr(segments, name) is not None
    ]
    if len(given) != 1:
        raise BadRequest(
            f"expected exactly one of session_id, lookback and hash_ids, got {given or 'none'}"
        )
    source = given[0]
    has_ids = segments.token_ids is not None
    if source == "lookback" and not has_ids:
        raise BadRequest("lookback: expected token_ids beside it, got none")
    if source == "hash_ids" and has_ids:
        raise BadRequest("hash_ids: expected no token_ids beside it; rows are read as they are")
    if segments.epoch is not None and source != "session_id":
        raise BadRequest(f"epoch: it fences sessions, and {source} has none")
    if segments.mask is not None and source != "hash_ids" and not has_ids:
        raise BadRequest("mask: expected token_ids beside it; held positions have their own")


def _check_shapes(segments: Segments, num_tokens: int, num_layers: int, geometry: Geometry) -> None:
    num_segments = len(segments.count)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "session_id": ("int64", (num_segments,)),
        "epoch": ("int64", (num_segments,)),
        "lookback": ("int32", (num_segments, geometry.max_ngram_size - 1)),
        "hash_ids": ("int64", (num_tokens, num_layers, geometry.n_hash_cols)),
        "token_ids": ("int64", (num_tokens,)),
        "mask": ("bool", (num_tokens,)),
    }
    for name, (dtype, shape) in shapes.items():
        array = getattr(segments, name)
        if array is not None:
            _check(name, array, dtype, shape)


def _check_residual(request: StepRequest, num_tokens: int, geometry: Geometry) -> None:
    residual = request.residual
    if (residual is not None) != (request.output is Output.RESIDUAL):
        given = "a residual" if residual is not None else "none"
        raise BadRequest(f"residual: output {request.output}, got {given}")
    if residual is None:
        return
    shape = (num_tokens, geometry.hc_mult, geometry.dim)
    dtypes = (torch.bfloat16, torch.float32)
    if (
        residual.dtype not in dtypes
        or tuple(residual.shape) != shape
        or not residual.is_contiguous()
        or residual.device.type != "cpu"
    ):
        raise BadTensor(
            f"residual: expected bfloat16 or float32 {list(shape)}, contiguous, on the CPU; got"
            f" {str(residual.dtype).removeprefix('torch.')} {list(residual.shape)} on"
            f" {residual.device}",
            expected=list(shape),
            got=list(residual.shape),
        )


def _check(name: str, array: NDArray[np.generic], dtype: str, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise BadTensor(
            f"{name}: expected {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}",
            expected=list(shape),
            got=list(array.shape),
        )


def _check_size(count: int, what: str, limits: EngineLimits) -> None:
    if count > limits.max_tokens:
        raise TooManyTokens(
            f"expected at most {limits.max_tokens} {what} in one request, got {count}; split it",
            expected=limits.max_tokens,
            got=count,
        )
