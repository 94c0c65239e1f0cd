"""DESIGN 6 by its sentences: what the interface does not have, what nothing at run time does."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import structlog

from engram_client import wire
from service.metrics import ENGINE, Metrics
from service.operations import OPERATIONS
from tests.integration.server import ROOT
from tests.service.door import InProcess

PRODUCT = ("service", "engram_core", "engram_client")
STARTS_OR_FETCHES = {
    *("subprocess", "multiprocessing", "urllib", "requests", "httpx", "ftplib", "http"),
    *("huggingface_hub", "pip", "cffi", "numba", "triton"),
}


def imported() -> Iterator[tuple[Path, str]]:
    """Every module that the product's files import, whole."""
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield path, node.module


def test_nothing_at_run_time_starts_a_process_or_fetches() -> None:
    """So nothing compiles or downloads; the client alone opens connections, by sockets."""
    found = {
        (path.name, name)
        for path, name in imported()
        if name != "urllib.parse" and name.partition(".")[0] in STARTS_OR_FETCHES
    }
    assert found == {("demo.py", "subprocess")}, "`engram demo` starts the server it asks"
    text = " ".join(p.read_text() for f in PRODUCT for p in (ROOT / f).rglob("*.py"))
    assert not re.search(r"torch\.compile|cpp_extension|os\.system|os\.exec|os\.spawn|eval\(", text)


def test_metrics_are_made_in_one_file() -> None:
    files = {path.name for path, name in imported() if name.startswith("prometheus_client")}
    assert files == {"metrics.py", "histogram.py"}  # the latter is a kind of metric


def test_every_metric_has_help_and_every_histogram_buckets() -> None:
    families = list(Metrics().registry.collect())
    assert all(family.documentation.endswith(".") for family in families)
    assert all(told.text.endswith(".") for told in ENGINE.values())
    for family in families:
        if family.type == "histogram" and family.samples:
            assert sum(sample.name.endswith("_bucket") for sample in family.samples) > 5


def test_no_route_takes_a_path_a_url_or_code() -> None:
    """Whatever a parameter may say is a number, a word of a list, or a name for its own sake."""
    names = {wire.TABLE, wire.OWNER}
    for operation in OPERATIONS:
        for parameter in operation.query:
            schema: Any = parameter.schema
            bound = schema["type"] in ("integer", "boolean") or "enum" in schema
            bound = bound or "pattern" in schema or parameter.name in ("owner", "tensors", "layers")
            assert bound, (operation.name, parameter.name)
        free = set(operation.headers) - names
        assert all(header.startswith("X-Engram-") for header in free), operation.name
        assert set(re.findall(r"{(\w+)}", operation.path)) <= {"session_id", "layer"}


def test_other_origins_get_no_permission(door: InProcess) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for answer in (
        door.get("/v1/info", headers=asked),
        door.call("OPTIONS", "/v1/sessions", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.status_code == 405


def test_metrics_and_probes_name_no_key_and_no_session(
    make_door: Callable[..., InProcess], tmp_path: Path
) -> None:
    digest = "8f0e2f76e22b43e2855189877e7dc1e1e7d98c226c95db247cd1d547928334a9"  # of "passw0rd"
    keys = tmp_path / "keys"
    keys.write_text(f"alice-and-her-name use {digest}\n")
    door = make_door(keys_file=keys)
    bearer = {"authorization": "Bearer passw0rd"}
    opened = door.post("/v1/sessions", json={"owner": "her-runner"}, headers=bearer)
    session = opened.json()["session_id"]
    for path in ("/metrics", "/livez", "/readyz", "/health"):
        text = door.get(path).text
        assert not re.search(rf"alice|her-runner|\b{session}\b", text), path
    door.delete(f"/v1/sessions/{session}", headers=bearer)


def test_a_line_of_the_log_says_who_what_and_how_long(door: InProcess) -> None:
    with structlog.testing.capture_logs() as lines:
        answer: httpx.Response = door.get("/v1/sessions/1", headers={"x-request-id": "r-1"})
    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["request_id"] == answer.headers["x-request-id"] == "r-1"
    assert (line["operation"], line["code"], line["status"]) == (
        "get_session", "unknown_session", 404
    )  # fmt: skip
    assert line["sent_bytes"] == len(answer.content)
    assert line["received_bytes"] == 0
    assert line["ms"] > 0
    assert json.dumps(line)


def test_token_ids_are_in_no_url() -> None:
    """They are in bodies alone: URLs end up in logs of proxies."""
    for operation in OPERATIONS:
        named = {parameter.name for parameter in operation.query}
        assert not named & {"token_ids", "lookback", "ids", "tokens"}, operation.name
