"""Strict reading of requests: names, integers, JSON. What is unknown is refused and named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from operator import methodcaller
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from engram_client import wire
from engram_core.errors import BadRequest, SchemaError

MAX_QUERY_FIELDS = 32
_PLAIN_QUERY = re.compile(r"(?:[a-z_]+=[A-Za-z0-9_.,-]*&){0,7}[a-z_]+=[A-Za-z0-9_.,-]*")
_PART = methodcaller("partition", "=")
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

Model = TypeVar("Model", bound=BaseModel)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, if any is like it at all."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(what: str, name: str, known: Sequence[str]) -> SchemaError:
    """Return the refusal of an unknown name."""
    close = nearest(name, known)
    if close is not None:
        hint = f"did you mean {close!r}?"
    else:
        hint = f"known: {', '.join(known)}" if known else "none is known here"
    return SchemaError(
        f"unknown {what} {name[:80]!r}; {hint}", expected=close or list(known), got=name[:80]
    )


def integer(text: str, name: str, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """Return the integer a text spells strictly. Raises SchemaError."""
    try:
        value = wire.parse_int(text, name)
    except wire.WireError as error:
        raise SchemaError(error.message, expected=error.expected, got=text[:40]) from None
    return in_range(value, name, low, high)


def in_range(value: int, name: str, low: int, high: int) -> int:
    """Return `value` if low <= value <= high. Raises SchemaError."""
    if not low <= value <= high:
        raise SchemaError(f"{name} is out of range", expected=f"{low}..{high}", got=value)
    return value


def choice(text: str, name: str, known: Sequence[str]) -> str:
    """Return `text` if it is one of `known`. Raises SchemaError."""
    if text not in known:
        raise SchemaError(f"{name}: unknown value", expected=list(known), got=text[:40])
    return text


def query(raw: bytes, known: Sequence[str], required: Sequence[str]) -> dict[str, str]:
    """Return the query's parameters, each known and given once. Raises SchemaError."""
    return _once("query parameter", _pairs(raw), known, required)


def _pairs(raw: bytes) -> list[tuple[str, str]]:
    try:
        text = raw.decode("ascii")
        if _PLAIN_QUERY.fullmatch(text):  # nothing in it is escaped: a tenth of what parsing takes
            return [(name, value) for name, _, value in map(_PART, text.split("&"))]
        return parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(raw),
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        raise SchemaError(f"the query cannot be read: {error}", expected="name=value&...") from None


def engram_headers(headers: Iterable[tuple[bytes, bytes]], known: Sequence[str]) -> dict[str, str]:
    """Return the X-Engram headers by lower-case name, each known and given once.

    known: in lower case. Raises SchemaError.
    """
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1").strip())
        for name, value in headers
        if name.startswith(b"x-engram-")
    ]
    return _once("header", pairs, known, ())


def _once(
    what: str, pairs: Sequence[tuple[str, str]], known: Sequence[str], required: Sequence[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise unknown(what, name, known)
        if name in found:
            raise SchemaError(f"{what} {name!r} is given twice", expected="once", got="twice")
        found[name] = value
    for name in required:
        if name not in found:
            raise SchemaError(f"{what} {name!r} is missing", expected=name)
    return found


def load_json(body: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON body. Raises BadRequest; SchemaError: integers beyond int64."""
    try:
        return wire.load_json(bytes(body))
    except wire.IntegerError as error:
        raise SchemaError(error.message, expected="an int64", got=str(error.got)[:40]) from None
    except wire.WireError as error:
        raise BadRequest(error.message, expected=error.expected, got=error.got) from None


def parse_model(model: type[Model], value: Any) -> Model:
    """Return a request document checked against its model. Raises SchemaError."""
    if not isinstance(value, dict):
        raise SchemaError(
            "the body is no JSON object", expected="an object", got=type(value).__name__
        )
    for name in value:
        if name not in model.model_fields:
            raise unknown("field", name, list(model.model_fields))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> SchemaError:
    """Return the first fault of a document; large inputs are not echoed."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    where = where.lstrip(".")
    if first["type"] == "missing":
        return SchemaError(f"field {where!r} is missing", expected=where)
    expected, got = wanted(first["msg"]), repr(first["input"])[:80]
    return SchemaError(f"{where}: expected {expected}, got {got}", expected=expected, got=got)


def wanted(message: str) -> str:
    """Return what a message of pydantic says that it expects, as part of a sentence."""
    message = re.sub(r"^String should match pattern", "text that matches", message)
    return re.sub(r"^(Value error, |(Input|List|String) should (be|have) )", "", message)
