"""The document is the file, and the file is true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.api_page import render_page
from service.documents import PAGE_PATH, PATH, render
from service.openapi import codes_of
from service.operations import OPERATIONS, Operation
from service.routes import HANDLERS


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return document


def described(told: dict[str, Any], operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = told["paths"][operation.path][operation.method.lower()]
    return found


def test_file_is_current() -> None:
    assert PATH.read_text("utf-8") == render(), "run `make openapi`"
    assert PAGE_PATH.read_text("utf-8") == render_page(), "run `make openapi`"


def test_every_operation_is_routed_and_described(told: dict[str, Any]) -> None:
    assert set(HANDLERS) == set(OPERATIONS)
    methods = [(path, m) for path, item in told["paths"].items() for m in item]
    assert set(methods) == {(op.path, op.method.lower()) for op in OPERATIONS}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_status_is_described(told: dict[str, Any], operation: Operation) -> None:
    statuses = {int(status) for status in described(told, operation)["responses"]}
    assert statuses == set(operation.answers) | set(codes_of(operation))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_parameter_is_described(told: dict[str, Any], operation: Operation) -> None:
    parameters = described(told, operation).get("parameters", [])
    queries = {p["name"]: p["required"] for p in parameters if p["in"] == "query"}
    assert queries == {p.name: p.is_required for p in operation.query}
    assert {p["name"] for p in parameters if p["in"] == "header"} == set(operation.headers)


def test_every_reference_leads_somewhere(told: dict[str, Any]) -> None:
    known = told["components"]["schemas"]
    assert "HTTPValidationError" not in known
    for reference in set(_references(told)):
        assert reference.removeprefix("#/components/schemas/") in known


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [ref for item in value for ref in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [ref for item in value.values() for ref in _references(item)]
