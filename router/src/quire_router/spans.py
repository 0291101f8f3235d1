"""Spans of OpenTelemetry: one for each request, with its upstream and its cached tokens."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Scope

from quire.errors import ConfigError
from quire.web.errors import ApiError
from quire_router.gateway import READ, Incoming
from quire_router.usage import AnswerUsage

_LIBRARIES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
_CONTEXT = (b"traceparent", b"tracestate")
"""Headers that name the parent of a span; upstreams get those of the router's span instead."""


class RequestSpan:
    """The span of a request; on leaving it, it ends, with its error if there was one."""

    def __init__(self, span: Any, usage: AnswerUsage) -> None:
        self._span, self._usage = span, usage

    @property
    def is_recorded(self) -> bool:
        """Whether it is sampled, so that its attributes are of use."""
        return bool(self._span.is_recording())

    def answered(self, response: Response, upstream: str | None) -> None:
        """Note an answer, and the server that made it."""
        self._set("http.response.status_code", response.status_code)
        self._set("quire.upstream", upstream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 - only where it is asked for

        usage = self._usage
        self._set("gen_ai.usage.input_tokens", usage.prompt)
        self._set("gen_ai.usage.output_tokens", usage.completion)
        self._set("gen_ai.usage.cache_read.input_tokens", usage.cached)
        if isinstance(error, ApiError):
            self._set("http.response.status_code", error.status)
        if error is not None:
            kind = error.code if isinstance(error, ApiError) else None
            self._set("error.type", kind or type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()

    def _set(self, name: str, value: Any) -> None:
        if value is not None:
            self._span.set_attribute(name, value)


class Spans:
    """Makes the spans of a router's requests.

    `provider`  OpenTelemetry's `TracerProvider`, which samples and exports them
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - as above
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._provider, self._kind = provider, SpanKind.SERVER
        self._tracer = provider.get_tracer("quire_router")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, incoming: Incoming, usage: AnswerUsage) -> RequestSpan:
        """Begin a request's span, below the span of its client; what is sent on names it as the parent."""
        scope = incoming.request.scope
        method, path = scope["method"], scope["path"]
        span = self._tracer.start_span(
            f"{method} {path}" if path in READ else method,
            self._propagator.extract(incoming.headers),
            self._kind,
            {"http.request.method": method, "url.path": path},
        )
        made = RequestSpan(span, usage)
        model = incoming.question and incoming.question.model_name
        if made.is_recorded and model:
            span.set_attribute("gen_ai.request.model", model)
        self._name_parent(scope, span)
        return made

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _name_parent(self, scope: Scope, span: Any) -> None:
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - as above

        own: dict[str, str] = {}
        self._propagator.inject(own, set_span_in_context(span))
        kept = [pair for pair in scope["headers"] if pair[0] not in _CONTEXT]
        scope["headers"] = [*kept, *((name.encode(), text.encode()) for name, text in own.items())]


def exported_to(endpoint: str) -> Spans:
    """Return spans that are sent to an OTLP endpoint over HTTP. Raises `ConfigError`."""
    missing = [package for module, package in _LIBRARIES.items() if not _is_there(module)]
    if missing:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint is http://HOST:4318/v1/traces, got {endpoint[:80]!r}"
        )
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    name = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "quire-router"}
    provider = TracerProvider(resource=Resource.create(name))
    exporters: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    exporter = exporters.OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(provider)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
