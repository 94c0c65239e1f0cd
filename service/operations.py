"""The routes as data: what each one takes, gives and refuses.

The same records check requests (`calls.py`) and write the OpenAPI document (`openapi.py`), so the
two cannot tell different stories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from engram_client import wire
from engram_core import errors
from engram_core.engine_types import MAX_WAIT_MS, Output
from engram_core.errors import EngramError
from service import problems, schemas

Refusals = tuple[type[EngramError], ...]


@dataclass(frozen=True)
class Parameter:
    """A query parameter. schema: its JSON schema."""

    name: str
    description: str
    schema: Mapping[str, Any]
    is_required: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer that is no refusal. media: None for no body; model: of a JSON body."""

    description: str
    media: str | None = wire.JSON_MEDIA
    model: type[BaseModel] | None = None
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Operation:
    """One method of one route.

    body: the model of a JSON body, or the description of a tensor body
    headers: X-Engram headers taken; required_headers: those that must be there
    scopes: of the keys that may call it; none: no key is needed
    query_names, required_names, header_names: of all, of what must be there, in lower case
    """

    name: str
    method: str
    path: str
    summary: str
    answers: Mapping[int, Answer]
    refusals: Refusals
    query: tuple[Parameter, ...] = ()
    headers: tuple[str, ...] = (wire.TABLE, wire.OWNER)
    required_headers: tuple[str, ...] = ()
    body: type[BaseModel] | str | None = None
    scopes: tuple[str, ...] = ("use",)
    has_layer: bool = field(init=False)
    has_session: bool = field(init=False)
    query_names: tuple[str, ...] = field(init=False)
    required_names: tuple[str, ...] = field(init=False)
    header_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        required = tuple(parameter.name for parameter in self.query if parameter.is_required)
        made = {
            "has_layer": "{layer}" in self.path,
            "has_session": "{session_id}" in self.path,
            "query_names": tuple(parameter.name for parameter in self.query),
            "required_names": required,
            "header_names": tuple(name.lower() for name in self.headers),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def has_tensor_body(self) -> bool:
        """Whether the body is a tensor, or a safetensors file."""
        return isinstance(self.body, str)


_FRONT: Refusals = (
    problems.Misdirected,
    problems.MediaType,
    errors.BadRequest,
    errors.SchemaError,
    errors.Internal,
)
_V1: Refusals = (
    problems.Unauthenticated,
    problems.Forbidden,
    problems.WrongTable,
    problems.Loading,
    problems.ShardDown,
    *_FRONT,
)
_WORK: Refusals = (*_V1, errors.Draining)
_BODY: Refusals = (
    problems.RequestTimeout,
    problems.BodyTooLarge,
    errors.Overloaded,
)
_PUSH: Refusals = (
    errors.TokenOutOfRange,
    errors.UnknownSession,
    errors.Gap,
    errors.Conflict,
    errors.StaleEpoch,
    errors.HistoryTruncated,
    errors.TooManyTokens,
    errors.TooManyPositions,
    errors.HeldTokensFull,
)
_READ: Refusals = (
    *_WORK,
    errors.UnknownSession,
    errors.UnknownLayer,
    errors.StaleEpoch,
    errors.NotPushed,
    errors.HistoryTruncated,
    errors.TooManyTokens,
    errors.TooManyPositions,
    errors.Overloaded,
    problems.BodyTooLarge,
)


def _integer(low: int, high: int = schemas.INT64_MAX) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_POSITION = Parameter("position", "first position", _integer(0), is_required=True)
_COUNT = Parameter("count", "how many positions", {**_integer(0), "default": 1})
_EPOCH = Parameter("epoch", "the session's epoch; left out: the one at open", _integer(0))
_WAIT = Parameter(
    "wait_ms",
    "how long to wait for ids, or for the epoch, that another rank pushes",
    {**_integer(0, MAX_WAIT_MS), "default": 0},
)
_STORED = Parameter(
    "encoding",
    "`stored`: rows as the checkpoint stores them",
    {"type": "string", "enum": ["stored"]},
)
_SHARED = (wire.SHARED_BODY, wire.SHARED_ANSWER)
_STATE_HEADERS = (wire.LENGTH, wire.BASE, wire.EPOCH)
_TENSOR_HEADERS = (wire.SHAPE, wire.DTYPE, *_STATE_HEADERS, wire.SHARED_ANSWER)


def _session_answer(description: str) -> Answer:
    return Answer(description, model=schemas.Session)


def _tensor_answer(description: str, *headers: str) -> Answer:
    return Answer(description, wire.TENSOR_MEDIA, headers=(*_TENSOR_HEADERS, *headers))


def _read(output: Output, summary: str, answer: Answer, *query: Parameter) -> Operation:
    return Operation(
        name=f"read_{output}",
        method="GET",
        path=f"/v1/sessions/{{session_id}}/layers/{{layer}}/{output}",
        summary=summary,
        answers={200: answer},
        refusals=_READ,
        query=(_POSITION, _COUNT, _EPOCH, _WAIT, *query),
        headers=(wire.TABLE, wire.OWNER, wire.SHARED_ANSWER),
    )


def _open(
    name: str, path: str, summary: str, answer: Answer, refusals: Refusals = _FRONT
) -> Operation:
    """Return a GET that needs no key and takes nothing."""
    return Operation(name, "GET", path, summary, {200: answer}, refusals, headers=(), scopes=())


def _page(name: str, path: str, summary: str, media: str) -> Operation:
    return _open(name, path, summary, Answer("a static file", media))


LIVE = _open("live", "/livez", "The process answers", Answer("alive", model=schemas.Alive))
READY = _open(
    "ready",
    "/readyz",
    "Tables are resident and the self-check has passed",
    Answer("ready", model=schemas.Ready),
    (*_FRONT, problems.Loading, errors.Draining, problems.ShardDown),
)
HEALTH = _open("health", "/health", "The same as /readyz", READY.answers[200], READY.refusals)
METRICS = _open(
    "metrics",
    "/metrics",
    "Prometheus metrics, aggregates only",
    Answer("text exposition format", "text/plain"),
)
PAGE = _page("page", "/", "The status page; what it shows it asks for itself", "text/html")
PAGE_SCRIPT = _page("page_script", "/status_page.js", "Its script", "text/javascript")
PAGE_STYLE = _page("page_style", "/status_page.css", "Its style sheet", "text/css")
INFO = Operation(
    name="info",
    method="GET",
    path="/v1/info",
    summary="What is served, where it lives, and what it promises",
    answers={200: Answer("the service", model=schemas.Info)},
    refusals=_V1,
    scopes=("use", "admin"),
)
WEIGHTS = Operation(
    name="weights",
    method="GET",
    path="/v1/layers/{layer}/weights",
    summary="A layer's weights: all a client needs to gate or project itself",
    answers={
        200: Answer(
            "safetensors: qk F32 [hc, dim], wkv BF16 [(hc+1)*dim, cols*head_dim]",
            wire.TENSOR_MEDIA,
            headers=("ETag",),
        ),
        304: Answer("the table identity in If-None-Match is the one served", None),
    },
    refusals=(*_WORK, errors.UnknownLayer, errors.Overloaded, problems.BodyTooLarge),
    query=(
        Parameter(
            "names",
            "which, separated by commas",
            {"type": "string", "enum": ["qk", "wkv", "qk,wkv", "wkv,qk"], "default": "qk,wkv"},
        ),
    ),
)
MEMORY = Operation(
    name="open_memory",
    method="POST",
    path="/v1/memory",
    summary="Shared memory for this connection of the Unix socket; its descriptor comes with a 103",
    answers={201: Answer("made: as large as asked for, or as one may be", model=schemas.Memory)},
    refusals=(*_WORK, *_BODY, problems.NotFound),
    body=schemas.OpenMemory,
)
OPEN = Operation(
    name="open_session",
    method="POST",
    path="/v1/sessions",
    summary="Make a session: empty, at a position with look-back, or as a fork",
    answers={
        201: _session_answer("made"),
        200: _session_answer("an own id that is open alike"),
    },
    refusals=(
        *_WORK,
        *_BODY,
        errors.TokenOutOfRange,
        errors.UnknownSession,
        errors.StaleEpoch,
        errors.HistoryTruncated,
        errors.NotPushed,
        errors.SessionExists,
        errors.TooManySessions,
        errors.TooManyPositions,
        errors.HeldTokensFull,
    ),
    body=schemas.OpenSession,
)
GET_SESSION = Operation(
    name="get_session",
    method="GET",
    path="/v1/sessions/{session_id}",
    summary="A session's length, base, epoch, compressed look-back and expiry",
    answers={200: _session_answer("the session")},
    refusals=(*_WORK, errors.UnknownSession),
)
CLOSE = Operation(
    name="close_session",
    method="DELETE",
    path="/v1/sessions/{session_id}",
    summary="Close a session",
    answers={204: Answer("closed", None)},
    refusals=(*_WORK, errors.UnknownSession, errors.StaleEpoch),
    query=(_EPOCH,),
)
CLOSE_OWNER = Operation(
    name="close_owner",
    method="DELETE",
    path="/v1/sessions",
    summary="Close all sessions of a former incarnation of a runner",
    answers={200: Answer("how many were closed", model=schemas.Closed)},
    refusals=_WORK,
    query=(
        Parameter(
            "owner",
            "as given at open",
            {"type": "string", "pattern": schemas.OWNER_PATTERN},
            is_required=True,
        ),
    ),
)
PUSH = Operation(
    name="push_tokens",
    method="POST",
    path="/v1/sessions/{session_id}/tokens",
    summary="Push token ids; what is there already must be equal",
    answers={200: Answer("pushed", model=schemas.Pushed)},
    refusals=(*_WORK, *_BODY, *_PUSH),
    body=schemas.PushTokens,
)
REWIND = Operation(
    name="rewind",
    method="POST",
    path="/v1/sessions/{session_id}/rewind",
    summary="Cut a session to a length not below its base; moves its epoch",
    answers={200: Answer("cut", model=schemas.Pushed)},
    refusals=(
        *_WORK,
        *_BODY,
        errors.UnknownSession,
        errors.StaleEpoch,
        errors.Gap,
        errors.HistoryTruncated,
        errors.TooManyPositions,
    ),
    body=schemas.RewindSession,
)
RESIDUAL = Operation(
    name="apply_residual",
    method="POST",
    path="/v1/sessions/{session_id}/layers/{layer}/residual",
    summary="Apply the layer to a residual [T, hc, dim]",
    answers={200: _tensor_answer("the updated residual, shape and dtype as sent")},
    refusals=(*_READ, *_BODY, errors.BadTensor, problems.LengthRequired),
    query=(_POSITION, _COUNT, _EPOCH, _WAIT),
    headers=(wire.TABLE, wire.OWNER, wire.SHAPE, wire.DTYPE, *_SHARED),
    required_headers=(wire.SHAPE, wire.DTYPE),
    body="the residual, BF16 or F32 [T, hc, dim], little-endian, C order",
)
KV = _read(
    Output.KV,
    "Keys of stream 0..hc-1, then the value",
    _tensor_answer("BF16 [N, hc+1, dim]", wire.DEAD),
)
ROWS = _read(
    Output.ROWS,
    "Gathered rows",
    _tensor_answer(
        "BF16 [N, cols, head_dim], or stored: U8 [N, cols, row_bytes]", wire.DEAD, wire.ENCODING
    ),
    _STORED,
)
HASH_IDS = _read(Output.HASH_IDS, "Row ids", _tensor_answer("I64 [N, cols]"))
STEP = Operation(
    name="step",
    method="POST",
    path="/v1/step",
    summary="One call a step: any number of sequences and layers",
    answers={
        200: Answer(
            "safetensors: length, epoch I64 [S], dead U8 [T], then OUTPUT.LAYER of each layer",
            wire.TENSOR_MEDIA,
            headers=(wire.SHARED_ANSWER,),
        )
    },
    refusals=(
        *_READ,
        *_BODY,
        *_PUSH,
        errors.BadTensor,
        errors.RowOutOfRange,
        errors.DuplicateSession,
        problems.LengthRequired,
    ),
    query=(
        Parameter(
            "output",
            "what the step reads",
            {"type": "string", "enum": [str(output) for output in Output]},
            is_required=True,
        ),
        Parameter(
            "layers",
            "layer ids separated by commas; left out: all of them",
            {"type": "string", "pattern": "^[0-9]+(,[0-9]+)*$"},
        ),
        _STORED,
        Parameter(
            "on_conflict",
            "`truncate`: sessions end where their push ends",
            {"type": "string", "enum": ["truncate"]},
        ),
        _WAIT,
        Parameter(
            "ahead",
            "whether a push alone starts kv ahead",
            {"type": "string", "enum": ["true", "false"], "default": "true"},
        ),
    ),
    headers=(wire.TABLE, wire.OWNER, *_SHARED),
    body="a safetensors file: count I32 [S], position I64 [S]; one source: session_id I64 [S] "
    "(epoch I64 [S]), lookback I32 [S, max_ngram_size-1], or hash_ids I32|I64 [T, layers, cols]; "
    "optional token_ids I32|I64 [T], mask U8|BOOL [T], residual BF16|F32 [T, hc, dim]",
)

OPERATIONS: tuple[Operation, ...] = (
    STEP,  # the router tries them in this order: 17 us less for what runners do every step
    LIVE,
    READY,
    HEALTH,
    METRICS,
    PAGE,
    PAGE_SCRIPT,
    PAGE_STYLE,
    INFO,
    WEIGHTS,
    MEMORY,
    OPEN,
    GET_SESSION,
    CLOSE,
    CLOSE_OWNER,
    PUSH,
    REWIND,
    RESIDUAL,
    KV,
    ROWS,
    HASH_IDS,
)

PUBLIC_PATHS = frozenset(operation.path for operation in OPERATIONS if not operation.scopes)
"""Answered without a key."""
