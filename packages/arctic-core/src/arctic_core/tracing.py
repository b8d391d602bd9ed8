"""Spans of one request on its way from client to engine, where OpenTelemetry is installed and configured; nothing otherwise.

The trace travels as a W3C ``traceparent``: as a header over HTTP, as an argument to actors over Ray, and as the context
of the running task inside a process. Without a tracer provider no span is made; a trace that comes in is handed on. The
provider is the program's own, or :func:`configure` makes one for the exporter that the environment names.

Spans hold names, sizes and keys of requests, and never tokens, texts or arrays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from arctic_core.protocol import ErrorInfo, Reply, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["client", "server", "internal"]
Attributes = dict[str, str | int | float | bool]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Environment variables that say where spans go; they are OpenTelemetry's own, like all others beside them."""
FLUSH_MS = 2000


class Mark:
    """What the code inside a span can say about itself. This one says it to nobody."""

    def failed(self, kind: str) -> None:
        """Mark the span as failed by an error of this class."""

    def note(self, key: str, value: str | int | float) -> None:
        """Add an attribute."""

    def name(self, name: str) -> None:
        """Rename the span."""


class _SpanMark(Mark):
    def __init__(self, span: Any) -> None:
        self._span = span

    def failed(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(_api().StatusCode.ERROR, kind)

    def note(self, key: str, value: str | int | float) -> None:
        self._span.set_attribute(key, value)

    def name(self, name: str) -> None:
        self._span.update_name(name)


_NOBODY = Mark()


@functools.cache
def _api() -> Any:
    """The parts of OpenTelemetry's API that are used here; ``None`` where it is not installed."""
    try:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return None
    propagator = TraceContextTextMapPropagator()
    return SimpleNamespace(
        trace=trace,
        StatusCode=trace.StatusCode,
        attach=context.attach,
        detach=context.detach,
        kinds={"client": trace.SpanKind.CLIENT, "server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL},
        inject=propagator.inject,
        extract=propagator.extract,
    )


def enabled() -> bool:
    """Whether spans are made in this process."""
    api = _api()
    return api is not None and not isinstance(api.trace.get_tracer_provider(), api.trace.ProxyTracerProvider)


def traceparent() -> str:
    """The running code's trace and span as a ``traceparent``; empty where there are none."""
    return _headers(None).get("traceparent", "")


def _headers(context: Any) -> dict[str, str]:
    api, headers = _api(), {}
    if api is not None:
        api.inject(headers, context)
    return headers


def _has_parent() -> bool:
    return _api().trace.get_current_span().get_span_context().is_valid


@contextlib.contextmanager
def _attached(context: Any) -> Iterator[None]:
    """Run the block in a context; no ``yield`` of a generator may stand inside."""
    token = _api().attach(context)
    try:
        yield
    finally:
        _api().detach(token)


@contextlib.contextmanager
def _started(name: str, kind: Kind, attributes: Attributes) -> Iterator[tuple[Mark, Any]]:
    """A span that is not the current one yet, and the context in which it is. Errors mark it, cancellation too."""
    api = _api()
    span = api.trace.get_tracer("arctic_core").start_span(name, kind=api.kinds[kind], attributes=attributes)
    mark = _SpanMark(span)
    try:
        yield mark, api.trace.set_span_in_context(span)
    except GeneratorExit:  # a stream that is left early
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            span.record_exception(error)
        mark.failed(type(error).__name__)
        raise
    finally:
        span.end()


@contextlib.contextmanager
def span(name: str, kind: Kind = "internal", attributes: Attributes | None = None, *, child: bool = False) -> Iterator[Mark]:
    """A span around a block, as the child of the current one.

    Args:
        name: What happens, of few different values.
        kind: Which side of a request it is.
        attributes: Facts by name, e.g. ``{"arctic.job": "j1"}``.
        child: Make it only where there is a span to be the child of.
    """
    if not enabled() or (child and not _has_parent()):
        yield _NOBODY
        return
    with _started(name, kind, attributes or {}) as (mark, context), _attached(context):
        yield mark


def spanned(
    name: str,
    items: AsyncGenerator[T, None],
    attributes: Attributes | None = None,
    *,
    child: bool = False,
    failure: Callable[[T], str] = lambda item: "",
) -> AsyncGenerator[T, None]:
    """The same items, under a span that ends with them.

    Args:
        name: As in :func:`span`.
        items: What the span is about; closed at its end.
        attributes: As in :func:`span`.
        child: As in :func:`span`.
        failure: Class name of the error in an item, else empty.
    """
    if not enabled():
        return items
    return _spanned(name, items, child, failure, attributes or {})


async def _spanned(
    name: str, items: AsyncGenerator[T, None], child: bool, failure: Callable[[T], str], attributes: Attributes
) -> AsyncGenerator[T, None]:
    if child and not _has_parent():
        async with contextlib.aclosing(items):
            async for item in items:
                yield item
        return
    with _started(name, "internal", attributes) as (mark, context):
        async with contextlib.aclosing(_inside(context, items)) as inside:
            async for item in inside:
                if kind := failure(item):
                    mark.failed(kind)
                yield item


async def _inside(context: Any, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items, each made in that context. Between two the caller has its own back, whichever task it comes from."""
    try:
        while True:
            with _attached(context):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        await items.aclose()


@contextlib.contextmanager
def carried(parent: str) -> Iterator[None]:
    """Make a ``traceparent`` that came from elsewhere the current one, for a block."""
    if not parent or _api() is None:
        yield
        return
    with _attached(_api().extract({"traceparent": parent})):
        yield


def carried_items(parent: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same for items that are made as they are asked for."""
    if not parent or _api() is None:
        return items
    return _inside(_api().extract({"traceparent": parent}), items)


# --- requests -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def client_span(request: Request) -> Iterator[dict[str, str]]:
    """A span of one request where it leaves; yields the headers that tell the other side of it."""
    if not enabled():
        yield _headers(None)
        return
    with _started(f"arctic {request.operation.op()}", "client", facts(request)) as (_, context):
        yield _headers(context)


def facts(request: Request) -> Attributes:
    """Attributes of a request's spans."""
    return {"arctic.operation": request.operation.op(), "arctic.session": request.session, "arctic.sequence": request.sequence}


def failure(reply: Reply) -> str:
    """Class name of the error in a reply, else empty."""
    return reply.body.kind if isinstance(reply.body, ErrorInfo) else ""


# --- set-up ---------------------------------------------------------------------------------------------------------------


def configure(service: str) -> bool:
    """Send this process's spans to the OTLP endpoint that the environment names; returns whether they are sent.

    Does nothing where no endpoint is named, or the program has a provider already.

    Args:
        service: ``service.name`` of the spans, unless the environment has another (``OTEL_SERVICE_NAME``).
    """
    if not any(os.environ.get(name) for name in ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if enabled():
        return True
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning(
            "spans are wanted (%s is set), but %s is not installed: pip install opentelemetry-exporter-otlp-proto-http",
            next(name for name in ENDPOINTS if os.environ.get(name)),
            error.name,
        )
        return False
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name, "process.pid": os.getpid()}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def flush() -> None:
    """Send what waits to be sent, before a process is ended; at most two seconds."""
    if enabled():
        force = getattr(_api().trace.get_tracer_provider(), "force_flush", None)
        if force is not None:
            force(FLUSH_MS)
