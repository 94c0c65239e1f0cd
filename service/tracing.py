"""Spans, by hand: one for each request whose caller's trace is sampled, none otherwise.

Uses OpenTelemetry's API alone. Which SDK and exporter run, if any, is decided outside of the
process's code (`opentelemetry-instrument engram serve CKPT`); without one a span is a no-op.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]([0-9a-f])(-[!-~]*)?")
_MEMBER = re.compile(
    rb"[ \t]*[a-z0-9][a-z0-9_*/-]{0,240}(@[a-z][a-z0-9_*/-]{0,13})?"
    rb"=[ -+\--<>-~]{0,255}[!-+\--<>-~][ \t]*"
)
"""An entry of `tracestate`. OpenTelemetry logs a line about each that is none, with its bytes."""
_STATE_BYTES = 512
"""As much of it goes along as every tracing system takes (W3C Trace Context 3.3.1.5)."""
_PROPAGATOR = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float]


def sampled_parent(headers: Iterable[tuple[bytes, bytes]]) -> Context | None:
    """Return the caller's trace if it is sampled: one well-formed `traceparent` with the flag."""
    found = [value for name, value in headers if name == b"traceparent"]
    if not found:
        return None
    told = _TRACEPARENT.fullmatch(found[0]) if len(found) == 1 else None
    if told is None or not int(told[1], 16) & trace.TraceFlags.SAMPLED:
        return None
    state = b",".join(value for name, value in headers if name == b"tracestate")
    if len(state) > _STATE_BYTES or not all(map(_MEMBER.fullmatch, state.split(b","))):
        state = b""
    carrier = {"traceparent": found[0].decode("ascii"), "tracestate": state.decode("ascii")}
    parent = _PROPAGATOR.extract(carrier)
    return parent if trace.get_current_span(parent).get_span_context().is_valid else None


def record_span(
    parent: Context, name: str, seconds: float, attributes: Attributes, *, is_fault: bool
) -> None:
    """Record a span that ends now and took `seconds`."""
    end_ns = time.time_ns()
    span = trace.get_tracer("engram").start_span(
        name,
        parent,
        kind=trace.SpanKind.SERVER,
        attributes=dict(attributes),
        start_time=end_ns - int(seconds * 1e9),
    )
    if is_fault:
        span.set_status(trace.StatusCode.ERROR)
    span.end(end_ns)
