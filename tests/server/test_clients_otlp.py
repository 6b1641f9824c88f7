"""Traces of requests, sent by OpenTelemetry's exporter to a collector that reads its protocol."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from minillm import Engine
from minillm.errors import MinillmError
from minillm.server import make_app
from minillm.server.tracing import otlp_tracing

from .client import LEFT_OPEN, listening

pytestmark = [pytest.mark.slow, LEFT_OPEN]

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes traces: its URL, and the resources with their spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            taken.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


def told(span: Any) -> dict[str, Any]:
    """The attributes of a span."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_is_a_span_with_its_tokens_and_phases() -> None:
    began = time.time_ns()
    with collector() as (endpoint, taken):
        app = make_app(Engine(max_batch_size=2), tracing=otlp_tracing(endpoint))
        with listening(app) as url:
            body = {"prompt": "A list of colors: red,", "max_tokens": 4, "temperature": 0}
            with httpx.Client(base_url=url, timeout=60) as client:
                answer = client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).json()
                client.post("/v1/completions", json=body | {"stream": True})
                client.post("/v1/completions", json=body | {"model": "absent"})
                client.get("/health")
    ended = time.time_ns()
    spans = [span for resource in taken for scope in resource.scope_spans for span in scope.spans]
    resource = {item.key: item.value.string_value for item in taken[0].resource.attributes}
    assert resource["service.name"] == "minillm"
    requests = [span for span in spans if span.name == "POST /v1/completions"]  # in the order of their ends
    requests.sort(key=lambda span: span.start_time_unix_nano)
    assert len(requests) == 3
    first = requests[0]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    attributes = told(first)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.response.model"] == "minillm"
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 4
    assert told(requests[2])["http.response.status_code"] == 404
    for span in requests[:2]:
        inside = sorted((s for s in spans if s.parent_span_id == span.span_id), key=lambda s: s.start_time_unix_nano)
        assert [child.name for child in inside] == ["queue", "prefill", "decode"]
        assert began <= span.start_time_unix_nano <= inside[0].start_time_unix_nano + 1_000_000
        assert inside[-1].end_time_unix_nano <= span.end_time_unix_nano + 1_000_000  # two clocks
        assert span.end_time_unix_nano <= ended
    assert {span.name for span in spans} == {"POST /v1/completions", "queue", "prefill", "decode"}
    text = b"".join(resource.SerializeToString() for resource in taken)
    assert b"colors" not in text and answer["choices"][0]["text"].encode() not in text


def test_one_line_about_an_endpoint_that_is_none() -> None:
    with pytest.raises(MinillmError, match="should be a URL such as http://localhost:4318, found 'localhost:4318'"):
        otlp_tracing("localhost:4318")
