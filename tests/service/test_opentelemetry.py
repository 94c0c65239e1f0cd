"""OpenTelemetry's SDK and an exporter in memory: what leaves the service, by each door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.service.door import InProcess
from tests.service.rpc_client import Rpc
from tests.service.talk import Wire, read_answer, talk_to

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[ReadableSpan, ...]]]:
    """An SDK as `opentelemetry-instrument` would set it up, for the time of a test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


@pytest.fixture
def path(door: InProcess) -> str:
    """A read whose body has a tensor."""
    session = door.open()["session_id"]
    door.push(session, 0, [3, 4, 5])
    return f"/v1/sessions/{session}/layers/1/kv?position=0&count=3"


def by_asgi(door: InProcess, path: str, traceparent: str | None) -> int:
    headers = {"traceparent": traceparent} if traceparent else {}
    return door.get(path, headers=headers).status_code


def by_socket(door: InProcess, path: str, traceparent: str | None) -> int:
    line = f"traceparent: {traceparent}\r\n" if traceparent else ""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{line}\r\n".encode())
        return await read_answer(reader)

    return int(door.runner.run(talk_to(door, talk, Wire())).split(b" ")[1])


Ask = Callable[[InProcess, str, str | None], int]


@pytest.mark.parametrize("ask", [by_asgi, by_socket])
def test_sampled_request_leaves_one_span_of_its_callers_trace(
    door: InProcess, exported: Callable[[], tuple[ReadableSpan, ...]], path: str, ask: Ask
) -> None:
    assert ask(door, path, SAMPLED) == 200
    (span,) = exported()
    assert (span.name, span.kind) == ("read_kv", trace.SpanKind.SERVER)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET
    told = dict(span.attributes or {})
    assert told["engram.code"] == "ok"
    assert {"engram.check_ms", "engram.queue_ms", "engram.store_ms"} <= set(told)
    assert span.end_time is not None
    assert span.start_time is not None
    assert 0 < (span.end_time - span.start_time) / 1e9 < 60


@pytest.mark.parametrize("ask", [by_asgi, by_socket])
@pytest.mark.parametrize("traceparent", [UNSAMPLED, "nonsense", None])
def test_other_requests_leave_none(
    door: InProcess,
    exported: Callable[[], tuple[ReadableSpan, ...]],
    path: str,
    ask: Ask,
    traceparent: str | None,
) -> None:
    assert ask(door, path, traceparent) == 200
    assert exported() == ()


def test_refusal_is_told_and_a_fault_is_an_error(
    door: InProcess,
    exported: Callable[[], tuple[ReadableSpan, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_asgi(door, "/v1/sessions/1", SAMPLED)
    monkeypatch.setattr(door.state.model.engine, "get", lambda *_: 1 / 0)
    by_asgi(door, "/v1/sessions/1", SAMPLED)
    refused, fault = exported()
    assert (refused.attributes or {})["engram.code"] == "unknown_session"
    assert refused.status.status_code is trace.StatusCode.UNSET
    assert (fault.attributes or {})["http.response.status_code"] == 500
    assert fault.status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize(("traceparent", "count"), [(SAMPLED, 1), (UNSAMPLED, 0)])
def test_grpc_call_is_traced_by_its_metadata(
    make_rpc: Callable[..., Rpc],
    exported: Callable[[], tuple[ReadableSpan, ...]],
    traceparent: str,
    count: int,
) -> None:
    make_rpc().call("GetInfo", metadata=[("traceparent", traceparent)])
    assert [span.name for span in exported()] == ["info"] * count


def test_request_without_a_trace_makes_no_tracer_and_no_span(
    door: InProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs then is one look through the headers (docs/operating.md)."""
    asked: list[str] = []  # and no failure: the loop makes the record, behind the answer

    def get_tracer(name: str) -> trace.Tracer:
        asked.append(name)
        return trace.NoOpTracer()

    monkeypatch.setattr(trace, "get_tracer", get_tracer)
    for ask in (by_asgi, by_socket):
        for traceparent in (None, UNSAMPLED):
            assert ask(door, path, traceparent) == 200
            door.runner.run(asyncio.sleep(0))
    assert not asked
    assert by_asgi(door, path, SAMPLED) == 200
    door.runner.run(asyncio.sleep(0))
    assert asked == ["engram"]
