"""A local OpenTelemetry collector, which records the spans that processes export by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """An exported span.

    Attributes:
        service: `service.name` of the process.
        name: name of the span.
        trace: id of the trace that contains the span.
        id: id of the span.
        parent: id of the parent span, or "" if the span has no parent.
        began, ended: start and end of the span, in ns since 1970.
        attributes: attributes of the span whose values are strings or integers.
        links: ids (trace, span) of the linked spans.
        is_error: whether the span's status is an error.
    """

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, str | int]
    links: set[tuple[str, str]]
    is_error: bool


class Collector:
    """Holds all spans that were exported so far.

    Attributes:
        spans: all exported spans, in order of arrival.
        url: the collector's address, for `OTEL_EXPORTER_OTLP_ENDPOINT`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def named(self, name: str) -> list[Span]:
        """The exported spans with this name."""
        return [span for span in list(self.spans) if span.name == name]

    def take(self, body: bytes) -> None:
        """Record the spans in the body of an export request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {item.key: item.value for item in span.attributes}
                    self.spans.append(
                        Span(
                            names.get("service.name", ""),
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            {name: value.string_value or value.int_value for name, value in values.items()},
                            {(link.trace_id.hex(), link.span_id.hex()) for link in span.links},
                            span.status.code == 2,
                        )
                    )


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/v1/traces":
                collected.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  named so by the base class
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collected = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collected
        finally:
            server.shutdown()
            thread.join()
