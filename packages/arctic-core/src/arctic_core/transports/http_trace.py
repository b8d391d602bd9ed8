"""A span per request and its ``traceparent``, where OpenTelemetry is installed; nothing otherwise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from arctic_core.protocol import Request


@contextlib.contextmanager
def client_span(request: Request) -> Iterator[dict[str, str]]:
    """A span of one request, as the child of the caller's; yields the headers that tell the server of it.

    Without a configured provider OpenTelemetry makes no spans, and there is no header, unless the caller has a span.
    """
    api = _opentelemetry()
    if api is None:
        yield {}
        return
    trace, propagate = api
    op = request.operation.op()
    attributes = {"arctic.operation": op, "arctic.session": request.session, "arctic.sequence": request.sequence}
    span = trace.get_tracer("arctic_core").start_span(f"arctic {op}", kind=trace.SpanKind.CLIENT, attributes=attributes)
    headers: dict[str, str] = {}
    propagate.inject(headers, context=trace.set_span_in_context(span))
    try:
        yield headers
    except Exception as error:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        span.end()


@functools.cache
def _opentelemetry() -> Any:
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    return trace, propagate
