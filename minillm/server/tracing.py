"""Traces of requests for OpenTelemetry's collectors: a span for each request, with one for each phase in it.

Names: OpenTelemetry's semantic conventions for HTTP and for generative AI. A client's `traceparent` header is the
parent. No text of a prompt or an answer is in them. OpenTelemetry itself reads its variables, such as
OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
"""

import time
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from .. import __version__
from ..errors import MinillmError, UsageError, install, shown

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
"""Paths -> the convention's name of what they do (`gen_ai.operation.name`)"""
UNTRACED = ("/health", "/metrics")
"""Paths that machines ask every few seconds"""
TRACES_PATH = "/v1/traces"


class Tracing:
    """Sends a span of each request to a collector, in the background."""

    def __init__(self, provider: Any) -> None:
        """`provider`: OpenTelemetry's `TracerProvider`; it is shut down by `close`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("minillm", __version__)
        self._parents = TraceContextTextMapPropagator()

    def note(self, scope: Scope, request: Any, route: str, status: int, seconds: float) -> None:
        """Make the spans of a request that has just ended.

        Args:
            scope: of the connection
            request: with `attributes`, model and tokens by the convention's names, and maybe `phases`, the times of its
                first prompt; None if nothing was taken
            route: its path, or "other"
            status: of the response
            seconds: from its arrival to its end
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if route in UNTRACED:
            return
        now, ended = time.monotonic(), time.time_ns()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "http.route": route, "http.response.status_code": status}
        if route in OPERATIONS:
            attributes |= {"gen_ai.operation.name": OPERATIONS[route], "gen_ai.provider.name": "minillm"}
        attributes |= getattr(request, "attributes", dict)()
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=self._parents.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=ended - round(1e9 * seconds),
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for phase in getattr(request, "phases", tuple)():
            start = ended - round(1e9 * (now - phase.began))
            child = self._tracer.start_span(phase.name, context=inside, start_time=start)
            child.end(start + round(1e9 * phase.seconds))
        span.end(ended)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def otlp_tracing(endpoint: str) -> Tracing:
    """Traces that are sent to a collector by OTLP over HTTP.

    Args:
        endpoint: its URL, with or without the path /v1/traces

    Raises:
        UsageError: it is no URL of HTTP.
        MinillmError: OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--otlp-endpoint should be a URL such as http://localhost:4318, found {shown(endpoint)}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MinillmError(f"--otlp-endpoint needs {error.name}: {install('otlp')}") from None
    base = endpoint.rstrip("/")
    address = base if base.endswith(TRACES_PATH) else base + TRACES_PATH
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable names it
        resource = resource.merge(Resource({"service.name": "minillm"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return Tracing(provider)
