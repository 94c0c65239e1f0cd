"""Every refusal of the service: exception class -> HTTP status, gRPC status, title.

One table for both doors. The refusals that only a door can make (no key, no length, wrong media
type ...) are classes of the same tree as the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram_core import errors
from engram_core.errors import EngramError


class Unauthenticated(EngramError):
    """No API key, or one that is not known."""

    code = "unauthenticated"


class Forbidden(EngramError):
    """A key whose scope does not cover the route."""

    code = "forbidden"


class NotFound(EngramError):
    """A path that is no route."""

    code = "not_found"


class MethodNotAllowed(EngramError):
    """A route without this method."""

    code = "method_not_allowed"


class RequestTimeout(EngramError):
    """A body that came too slowly."""

    code = "request_timeout"


class LengthRequired(EngramError):
    """A tensor body without Content-Length."""

    code = "length_required"


class WrongTable(EngramError):
    """A request for another table than the one served."""

    code = "wrong_table"


class BodyTooLarge(EngramError):
    """A body or an answer larger than one request may hold."""

    code = "body_too_large"


class MediaType(EngramError):
    """A content type or content encoding that is not taken."""

    code = "media_type"


class Misdirected(EngramError):
    """A Host that this service does not answer for."""

    code = "misdirected"


class Loading(EngramError):
    """The tables are not resident yet."""

    code = "loading"


class ShardDown(EngramError):
    """The device, or a part of it, has failed: the process is about to end."""

    code = "shard_down"


@dataclass(frozen=True)
class Kind:
    """How a class is told at the doors. retry_after_ms: when trying again makes sense."""

    status: int
    grpc: str
    title: str
    retry_after_ms: int | None = None


_INVALID, _FAILED, _EXHAUSTED, _UNAVAILABLE = (
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
)

PROBLEMS: Mapping[type[EngramError], Kind] = {
    errors.BadRequest: Kind(400, _INVALID, "The request contradicts itself or is not JSON"),
    errors.BadTensor: Kind(400, _INVALID, "A tensor's shape, dtype or byte count is wrong"),
    errors.TokenOutOfRange: Kind(400, _INVALID, "A token id is outside the token map"),
    errors.RowOutOfRange: Kind(400, _INVALID, "A row id is outside its bucket"),
    errors.DuplicateSession: Kind(400, _INVALID, "One session is pushed twice in one step"),
    Unauthenticated: Kind(401, "UNAUTHENTICATED", "An API key is needed"),
    Forbidden: Kind(403, "PERMISSION_DENIED", "The key's scope does not cover this"),
    errors.UnknownSession: Kind(404, "NOT_FOUND", "No such session"),
    errors.UnknownLayer: Kind(404, "NOT_FOUND", "No such layer"),
    NotFound: Kind(404, "NOT_FOUND", "No such route"),
    MethodNotAllowed: Kind(405, "UNIMPLEMENTED", "The route has other methods"),
    RequestTimeout: Kind(408, "DEADLINE_EXCEEDED", "The body came too slowly"),
    errors.Gap: Kind(409, _FAILED, "The position is behind the end of the session"),
    errors.Conflict: Kind(409, _FAILED, "The session holds other ids"),
    errors.StaleEpoch: Kind(409, _FAILED, "The epoch is not the present one"),
    errors.NotPushed: Kind(409, _FAILED, "The positions are not pushed yet"),
    errors.HistoryTruncated: Kind(409, _FAILED, "The position is below the session's base"),
    errors.SessionExists: Kind(409, "ALREADY_EXISTS", "The session is open in another way"),
    LengthRequired: Kind(411, _INVALID, "A Content-Length is needed"),
    WrongTable: Kind(412, _FAILED, "Another table is served"),
    BodyTooLarge: Kind(413, _EXHAUSTED, "More bytes than one request may hold"),
    errors.TooManyTokens: Kind(413, _EXHAUSTED, "More tokens than one request may name"),
    errors.TooManyPositions: Kind(413, _EXHAUSTED, "Above the longest position"),
    MediaType: Kind(415, _INVALID, "The media type or encoding is not taken"),
    Misdirected: Kind(421, "PERMISSION_DENIED", "Not the host that answers for this name"),
    errors.SchemaError: Kind(422, _INVALID, "A field is unknown, missing or of the wrong type"),
    errors.TooManySessions: Kind(429, _EXHAUSTED, "No free session", 1000),
    errors.HeldTokensFull: Kind(429, _EXHAUSTED, "No room for more token ids", 1000),
    errors.Overloaded: Kind(429, _EXHAUSTED, "No room for the request's bytes now", 50),
    errors.Internal: Kind(500, "INTERNAL", "A fault of the service"),
    errors.CheckpointError: Kind(500, "INTERNAL", "A fault of the service"),
    errors.MemoryShort: Kind(500, "INTERNAL", "A fault of the service"),
    errors.SelfCheckFailed: Kind(500, "INTERNAL", "A fault of the service"),
    Loading: Kind(503, _UNAVAILABLE, "The tables are being loaded", 1000),
    errors.Draining: Kind(503, _UNAVAILABLE, "The service is about to stop", 1000),
    ShardDown: Kind(503, _UNAVAILABLE, "The device has failed", 5000),
}

SECRET_FAULT = errors.Internal("a fault of the service; its log has the request id")
"""What a client is told of an exception that nobody expected."""


def kind_of(error: EngramError) -> Kind:
    """Return how an error is told; a refused step is told like its first refused segment.

    A class that is not in the table belongs to a start (say, a build without CUDA): internal.
    """
    return PROBLEMS.get(type(_first(error)), PROBLEMS[errors.Internal])


def code_of(error: EngramError) -> str:
    """Return the stable code; faults at run time are all `internal`."""
    return "internal" if kind_of(error).status == 500 else _first(error).code


def document(error: EngramError) -> dict[str, Any]:
    """Return the problem document (RFC 9457) of an error, with expected and got if it has them."""
    kind, code = kind_of(error), code_of(error)
    known = {
        "type": f"urn:engram:problem:{code}",
        "title": kind.title,
        "status": kind.status,
        "code": code,
        "detail": error.message,
    }
    told: dict[str, Any] = {
        name: value
        for name, value in (("expected", error.expected), ("got", error.got))
        if value is not None
    }
    if isinstance(error, errors.StepRefused):
        told["segments"] = [_spell(segment) for segment in error.segments]
    if kind.retry_after_ms is not None:
        told["retry_after_ms"] = kind.retry_after_ms
    return _spell(error.details) | told | known


def text(told: Mapping[str, Any]) -> str:
    """Return a problem document as JSON."""
    return json.dumps(told, default=_plain)


def encode(error: EngramError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error's answer."""
    kind = kind_of(error)
    body = text(document(error)).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if kind.retry_after_ms is not None:
        headers.append((b"retry-after", str(-(-kind.retry_after_ms // 1000)).encode()))
    if kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", str(error.expected).encode()))
    return kind.status, headers, body


def _first(error: EngramError) -> EngramError:
    return error.first if isinstance(error, errors.StepRefused) else error


def _spell(details: Mapping[str, Any]) -> dict[str, Any]:
    """Spell session ids as the interface does in JSON: decimal strings."""
    return {
        name: str(value) if name in ("session_id", "fork_of") else value
        for name, value in details.items()
    }


def _plain(value: object) -> object:
    """Return a JSON-ready form of what a refusal carries."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | range | set | frozenset | tuple):
        return list(value)
    return str(value)
