"""docs/api.md, written from the operations: what a reader needs beside the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from service import schemas
from service.openapi import codes_of
from service.operations import OPERATIONS, Answer, Operation, Parameter

_TOP = """\
# The interface over HTTP

Written from `service/operations.py` by `make openapi`; a test compares. Schemas are in
[openapi.json](../openapi/openapi.json), what to do about a code in
[troubleshooting.md](troubleshooting.md#errors-by-code), what sessions promise in
[sessions.md](sessions.md).

Integers are decimal and strict; session ids are decimal strings in JSON and paths, I64 in tensors.
Whatever is unknown (a field, a parameter, an `X-Engram` header, a tensor) is 422 and names the
nearest known one. Tensors are little-endian, in C order. `X-Engram-Table` on any request makes it
412 where another table is served.

| route | does | key of scope |
|---|---|---|
"""


def render_page() -> str:
    """Return the page as the file has it."""
    rows = [
        f"| `{op.method} {op.path}` | {op.summary} | {' or '.join(op.scopes) or 'none'} |"
        for op in OPERATIONS
    ]
    keyed = [op for op in OPERATIONS if op.scopes]
    common = set.intersection(*(_codes(op) for op in keyed))
    told = [f"\nEvery `/v1` route may refuse with {_listed(common)}.\n"]
    sections = ["\n".join([*_section(op, common), ""]) for op in keyed]
    documents = ["\n".join(["## Documents\n", *_documents(keyed), ""])]
    return _TOP + "\n".join([*rows, *told, *sections, *documents])


def _codes(operation: Operation) -> set[tuple[int, str]]:
    return {(status, code) for status, told in codes_of(operation).items() for code in told}


def _listed(codes: set[tuple[int, str]]) -> str:
    """Spell codes, each status once."""
    return "; ".join(
        f"{status} {', '.join(f'`{code}`' for s, code in sorted(codes) if s == status)}"
        for status in sorted({status for status, _ in codes})
    )


def _section(operation: Operation, common: set[tuple[int, str]]) -> Iterator[str]:
    yield f"## {operation.method} {operation.path}\n\n{operation.summary}.\n"
    for parameter in operation.query:
        need = ", needed" if parameter.is_required else ""
        yield f"- query `{parameter.name}`{need}: {_spelled(parameter)}{parameter.description}"
    for header in operation.required_headers:
        yield f"- header `{header}`, needed"
    if operation.body is not None:
        is_text = isinstance(operation.body, str)
        yield f"- body: {operation.body if is_text else _link(operation.body)}"
    for status, answer in operation.answers.items():
        yield f"- **{status}** {_answer(answer)}"
    own = _codes(operation) - common
    if own:
        yield f"- refused with {_listed(own)}"


def _spelled(parameter: Parameter) -> str:
    """Spell the values a parameter takes, and the one it has when left out."""
    schema = parameter.schema
    values = [f"`{value}`" for value in schema.get("enum", ())]
    default = [f"`{schema['default']}` if left out"] if "default" in schema else []
    told = ", ".join(values + default)
    return f"{told}; " if told else ""


def _answer(answer: Answer) -> str:
    model = "" if answer.model is None else f": {_link(answer.model)}"
    headers = ", ".join(f"`{header}`" for header in answer.headers)
    return f"{answer.description}{model}{f'; headers {headers}' if headers else ''}"


def _link(model: Any) -> str:
    return f"JSON, [{model.__name__}](#documents)"


def _documents(operations: list[Operation]) -> Iterator[str]:
    """Tell each JSON document once; fields with a question mark may be left out of a request."""
    models: list[type[BaseModel]] = []
    models += [op.body for op in operations if isinstance(op.body, type)]
    models += [a.model for op in operations for a in op.answers.values() if a.model is not None]
    models.append(schemas.Problem)
    for model in dict.fromkeys(models):
        yield f"- **{model.__name__}**: {_fields(model)}"


def _fields(model: type[BaseModel]) -> str:
    schema: dict[str, Any] = model.model_json_schema()
    needed = schema.get("required", ())
    return ", ".join(
        f"`{name}`{'' if name in needed else '?'}"
        + (f" ({told['description']})" if "description" in told else "")
        for name, told in schema["properties"].items()
    )
