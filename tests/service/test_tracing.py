"""Spans for sampled callers only; log lines of one kind have a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace

from service.logs import LineLimit
from service.tracing import sampled_parent
from tests.service.door import InProcess

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Recorder(trace.NoOpTracer):
    """A tracer that keeps what it is asked to record."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def start_span(self, name: str, context: Any = None, **told: Any) -> trace.Span:  # type: ignore[override]
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append({"name": name, "parent": parent, **told})
        return trace.INVALID_SPAN


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(trace, "get_tracer", lambda *_: made)
    return made


def test_sampled_caller_gets_a_span_with_sizes_and_times(
    door: InProcess, recorder: Recorder
) -> None:
    session = door.open()["session_id"]
    door.push(session, 0, [3, 4, 5])
    path = f"/v1/sessions/{session}/layers/1/kv?position=0&count=3"
    answer = door.get(path, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (span,) = recorder.spans
    assert span["name"] == "read_kv"
    assert f"{span['parent'].trace_id:032x}" == TRACE
    assert f"{span['parent'].span_id:016x}" == PARENT
    told = span["attributes"]
    assert (told["engram.code"], told["http.response.body.size"]) == ("ok", len(answer.content))
    assert told["engram.queue_ms"] >= 0
    assert session not in str(told), "ids stay out of traces"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [f"00-{TRACE}-{PARENT}-00"],
        [f"00-{TRACE}-{PARENT}-02"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01-x"],
        [f"00-{TRACE}-{PARENT}-1"],
        [f"cc-{TRACE}-{PARENT}-01-\xff"],
        ["nonsense"],
        [f"00-{TRACE}-{PARENT}-01"] * 2,
    ],
)
def test_everything_else_is_not_traced(values: list[str]) -> None:
    assert sampled_parent([(b"traceparent", value.encode("latin-1")) for value in values]) is None


def test_trace_state_goes_along() -> None:
    headers = [
        (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
    ]
    parent = sampled_parent(headers)
    assert parent is not None
    state = trace.get_current_span(parent).get_span_context().trace_state
    assert dict(state) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("state", [b"a=\xff", b"=", b"a=1,B=2", b"a=1,", b"a=" + b"x" * 600])
def test_state_that_is_none_is_left_behind_without_a_word(
    state: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    parent = f"00-{TRACE}-{PARENT}-01".encode()
    found = sampled_parent([(b"traceparent", parent), (b"tracestate", state)])
    assert found is not None
    assert not trace.get_current_span(found).get_span_context().trace_state
    assert not caplog.records


# ---- logs


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as kept:
        yield kept


def test_refusals_of_one_code_do_not_flood_the_log(door: InProcess, lines: list[Any]) -> None:
    for _ in range(40):
        door.get("/v1/sessions/1")
    door.get("/none")
    told = [line["code"] for line in lines]
    assert told.count("unknown_session") <= 20, "ten a second; the loop may meet two seconds"
    assert told.count("not_found") == 1, "another code's line is not held back"


def test_held_back_lines_are_counted() -> None:
    now = 0.0
    limit = LineLimit(2, clock=lambda: now)
    assert [limit.admit("a") for _ in range(5)] == [0, 0, None, None, None]
    assert limit.admit("b") == 0
    now = 1.0
    assert [limit.admit("a"), limit.admit("a")] == [3, 0]
