"""Steps of a few segments that update a residual, or only push: read and answered in integers.

Where the tensors of such a body lie its head says, and a runner's heads are the same from step to
step; `steps.py` reads every other step, and says what is wrong with one (docs/notes/gpu_host.md).
"""

from __future__ import annotations

import struct
from ctypes import addressof, c_char
from functools import lru_cache
from typing import NamedTuple

from engram_client import wire
from engram_client.wire import TensorSpec
from engram_core.direct import Answer, Ask
from engram_core.engine_types import EPOCH_OPENED, Output
from engram_core.geometry import Geometry
from service.steps import StepOptions


class PlainStep(NamedTuple):
    """A step of a few segments that updates a residual, or only pushes.

    segments: session id, position, number of tokens, epoch of each
    token_ids: to be pushed first; None: none are
    spec, residual: BF16 or F32 [T, hc_mult, dim]; "" and () and nothing of a step that only pushes
    begin: of the residual in the body
    """

    segments: list[tuple[int, int, int, int]]
    token_ids: list[int] | None
    spec: TensorSpec
    residual: memoryview
    begin: int


MAX_FEW = 32
"""Segments that are read without arrays, which are as quick from some sixty on."""

_HEAD_BYTES = 1024
"""Of the longest head that a plain step has."""

_COLUMNS = (("session_id", "I64"), ("position", "I64"), ("count", "I32"), ("epoch", "I64"))
_LETTERS = {"I32": "i", "I64": "q"}


class _Form(NamedTuple):
    """Where the tensors of a plain step's body lie: all that its head says.

    columns: of `_COLUMNS`, how each is read, and where
    epochs: of all segments, where the body has none; ids: None = there are none
    """

    columns: tuple[tuple[struct.Struct, int], ...]
    epochs: tuple[int, ...]
    ids: tuple[struct.Struct, int] | None
    num_tokens: int
    spec: TensorSpec
    residual: tuple[int, int]


@lru_cache(256)
def _form_of(head: bytes, data_bytes: int) -> _Form | None:
    """Read a head; None: it is no plain step's. A runner's heads are the same from step to step."""
    try:
        found = wire.decode_head(head, data_bytes)
    except wire.WireError:
        return None
    specs = {name: spec for name, (spec, _, _) in found.items()}
    counts, spec = specs.get("count", ("", ()))[1], specs.pop("residual", ("", ()))
    size, ids = counts[0] if len(counts) == 1 else 0, specs.pop("token_ids", None)
    if spec[0] not in ("", "BF16", "F32") or not (ids or spec[0]) or not 1 <= size <= MAX_FEW:
        return None
    num_tokens = spec[1][0] if spec[1] else 0
    if ids is not None:
        if ids[0] not in _LETTERS or len(ids[1]) != 1 or (spec[1] and ids[1][0] != num_tokens):
            return None
        num_tokens = ids[1][0]
    columns = _COLUMNS if "epoch" in specs else _COLUMNS[:-1]
    if not num_tokens or specs != {name: (dtype, (size,)) for name, dtype in columns}:
        return None
    data = 8 + len(head)

    def place(name: str, dtype: str, length: int) -> tuple[struct.Struct, int]:
        return struct.Struct(f"<{length}{_LETTERS[dtype]}"), data + found[name][1]

    _, begin, end = found.get("residual", (spec, 0, 0))
    return _Form(
        tuple(place(name, dtype, size) for name, dtype in columns),
        () if "epoch" in specs else (EPOCH_OPENED,) * size,
        None if ids is None else place("token_ids", ids[0], num_tokens),
        num_tokens,
        spec,
        (data + begin, data + end),
    )


def read(
    body: memoryview, options: StepOptions, geometry: Geometry, most_tokens: int
) -> PlainStep | None:
    """Read a plain step of 1..MAX_FEW segments in integers (docs/notes/gpu_host.md).

    None: it is another or larger, or something is wrong with it, which `steps.request_of` says.
    Numbers that fit no session, such as a position below 0, are for whoever judges it.

    body: may be memory that its client can change: what is checked is read once
    """
    is_residual = options.output is Output.RESIDUAL
    if options.truncate or not (is_residual or options.output is Output.NONE):
        return None
    head_bytes = int.from_bytes(body[:8], "little")
    if not 2 <= head_bytes <= min(_HEAD_BYTES, len(body) - 8):
        return None
    form = _form_of(bytes(body[8 : 8 + head_bytes]), len(body) - 8 - head_bytes)
    if form is None or form.num_tokens > most_tokens:
        return None
    if is_residual:
        wanted = form.num_tokens, geometry.hc_mult, geometry.dim
        if form.spec[1] != wanted or len(options.layers) != 1:
            return None
    elif form.spec[0]:
        return None
    columns = [reader.unpack_from(body, at) for reader, at in form.columns]
    if form.epochs:
        columns.append(form.epochs)
    counts = columns[2]
    if sum(counts) != form.num_tokens:
        return None
    ids = None if form.ids is None else list(form.ids[0].unpack_from(body, form.ids[1]))
    begin, end = form.residual
    return PlainStep(list(zip(*columns, strict=True)), ids, form.spec, body[begin:end], begin)


def ask_of(step: PlainStep, options: StepOptions, geometry: Geometry, tenant: str) -> Ask | None:
    """Return the engine's form of a plain step; None: its residual lies askew."""
    if step.spec[0]:
        index = geometry.layer_index(options.layers[0])
        return update_of(tenant, step.segments, step.token_ids, index, step.spec, step.residual)
    ahead = tuple(map(geometry.layer_index, options.layers)) if options.ahead else ()
    return Ask(tenant, step.segments, step.token_ids, ahead=ahead, client=options.client)


def update_of(
    tenant: str,
    segments: list[tuple[int, int, int, int]],
    token_ids: list[int] | None,
    layer_index: int,
    spec: TensorSpec,
    residual: memoryview,
) -> Ask | None:
    """Return how the engine is asked to update a residual where it lies; None: it lies askew.

    segments, token_ids, spec: as in `PlainStep`
    """
    address = addressof(c_char.from_buffer(residual))
    if address % 4:
        return None
    return Ask(tenant, segments, token_ids, layer_index, address, spec[0] == "F32")


@lru_cache(256)
def _answer_form(
    size: int, num_tokens: int, name: str, spec: TensorSpec
) -> tuple[bytes, list[str], struct.Struct]:
    numbers = "I64", (size,)
    specs = {"length": numbers, "epoch": numbers, "dead": ("U8", (num_tokens,))}
    return *wire.encode_head(specs | ({name: spec} if name else {})), struct.Struct(f"<{size}q")


def encode(
    step: PlainStep, residual: memoryview, options: StepOptions, answer: Answer
) -> list[bytes | memoryview]:
    """Return the answer to a plain step as `encode` does. residual: as it was updated"""
    name = f"{Output.RESIDUAL}.{options.layers[0]}" if step.spec[0] else ""
    head, order, numbers = _answer_form(len(step.segments), len(answer.dead), name, step.spec)
    parts: dict[str, bytes | memoryview] = {
        "length": numbers.pack(*[spot.length for spot in answer.sessions]),
        "epoch": numbers.pack(*[spot.epoch for spot in answer.sessions]),
        "dead": answer.dead,
        name: residual,
    }
    return [head, *[parts[each] for each in order]]
