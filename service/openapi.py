"""The OpenAPI document, written from the operations (`documents.py` keeps the file)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from starlette.responses import Response

from engram_client import wire
from service import schemas
from service.operations import OPERATIONS, Answer, Operation
from service.problems import PROBLEMS, Kind

if TYPE_CHECKING:
    from fastapi import FastAPI

_REF = "#/components/schemas/{model}"
_BINARY = {"type": "string", "format": "binary"}
_HEADERS = {
    wire.TABLE: "the table identity expected; another one served is 412",
    wire.OWNER: "the runner's incarnation, for affinity",
    wire.SHAPE: "dims separated by commas",
    wire.DTYPE: "BF16, F32, I64 or U8",
    wire.LENGTH: "the session's length",
    wire.BASE: "the session's base",
    wire.EPOCH: "the session's epoch",
    wire.DEAD: "dead positions as ranges of indices into the answer, such as 3,4,9-12",
    wire.ENCODING: "the format of stored rows",
    wire.SHARED_BODY: "offset,bytes of the body in the connection's shared memory",
    wire.SHARED_ANSWER: "offset,bytes of where the answer may be put in the connection's shared "
    "memory; in an answer offset,bytes,at: what of it lies there, and where it belongs",
    "ETag": "the table identity",
}


def describe_route(operation: Operation) -> dict[str, Any]:
    """Return what FastAPI is told of a route."""
    first = min(operation.answers, default=200)
    return {
        "operation_id": operation.name,
        "summary": operation.summary,
        "status_code": 201 if 201 in operation.answers else first,
        "response_class": Response,
        "response_model": None,
        "responses": _responses(operation),
        "openapi_extra": _request(operation),
    }


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            routes=app.routes,
            description="DeepSeek-V4.1 Engram: hash, gather, wkv and gate behind one interface.",
        )
        components = schema.setdefault("components", {})
        known = components.setdefault("schemas", {})
        for operation in OPERATIONS:
            if isinstance(operation.body, type):
                _add_model(known, operation.body, "validation")
            for answer in operation.answers.values():
                if answer.model is not None:
                    _add_model(known, answer.model, "serialization")
        _add_model(known, schemas.Problem, "serialization")
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema


def codes_of(operation: Operation) -> dict[int, list[str]]:
    """Return the codes a route refuses with, by status."""
    codes: defaultdict[int, set[str]] = defaultdict(set)
    for refusal in operation.refusals:
        codes[PROBLEMS[refusal].status].add(refusal.code)
    return {status: sorted(names) for status, names in sorted(codes.items())}


def _responses(operation: Operation) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {
        status: _answer(answer) for status, answer in operation.answers.items()
    }
    for status, codes in codes_of(operation).items():
        answers[status] = {
            "description": ", ".join(f"`{code}`" for code in codes),
            "content": {
                "application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}
            },
        } | _retry_header(status)
    return answers


def _retry_header(status: int) -> dict[str, Any]:
    kinds: list[Kind] = [kind for kind in PROBLEMS.values() if kind.status == status]
    if any(kind.retry_after_ms is None for kind in kinds):
        return {}
    return {"headers": {"Retry-After": _header("seconds until trying again makes sense")}}


def _answer(answer: Answer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.description}
    if answer.media is not None:
        described["content"] = {answer.media: {"schema": _schema(answer)}}
    if answer.headers:
        described["headers"] = {name: _header(_HEADERS[name]) for name in answer.headers}
    return described


def _schema(answer: Answer) -> dict[str, Any]:
    if answer.model is not None:
        return {"$ref": _REF.format(model=answer.model.__name__)}
    return _BINARY if answer.media == wire.TENSOR_MEDIA else {"type": "string"}


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}


def _request(operation: Operation) -> dict[str, Any]:
    """Return parameters, body and security of a route."""
    parameters: list[dict[str, Any]] = []
    if operation.has_session:
        parameters.append(
            _parameter("session_id", "path", {"type": "string", "pattern": "^[1-9][0-9]{0,18}$"})
        )
    if operation.has_layer:
        parameters.append(_parameter("layer", "path", {"type": "integer", "minimum": 0}))
    for query in operation.query:
        parameters.append(
            _parameter(
                query.name, "query", dict(query.schema), query.description, query.is_required
            )
        )
    for header in operation.headers:
        parameters.append(
            _parameter(
                header,
                "header",
                {"type": "string"},
                _HEADERS[header],
                header in operation.required_headers,
            )
        )
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if operation.body is not None:
        extra["requestBody"] = {"required": True, "content": _content(operation.body)}
    if operation.scopes:
        extra["security"] = [{"key": []}, {}]
    return extra


def _parameter(
    name: str, place: str, schema: dict[str, Any], text: str = "", is_required: bool = True
) -> dict[str, Any]:
    described = {"name": name, "in": place, "required": is_required, "schema": schema}
    return described | ({"description": text} if text else {})


def _content(body: type[BaseModel] | str) -> dict[str, Any]:
    if isinstance(body, str):
        return {wire.TENSOR_MEDIA: {"schema": {**_BINARY, "description": body}}}
    return {wire.JSON_MEDIA: {"schema": {"$ref": _REF.format(model=body.__name__)}}}


def _add_model(known: dict[str, Any], model: type[BaseModel], mode: JsonSchemaMode) -> None:
    schema = model.model_json_schema(ref_template=_REF, mode=mode)
    known.update(schema.pop("$defs", {}))
    known[model.__name__] = schema
