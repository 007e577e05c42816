"""A small OTLP receiver: what an OpenTelemetry collector would get."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import until


@dataclass(slots=True)
class Received:
    """One span; ids are hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    status: int
    attributes: dict[str, Any]
    links: list[str]
    """Ids of linked spans."""


@dataclass(slots=True)
class Collector:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def trace(self, trace_id: str) -> dict[str, Received]:
        """The spans of a trace by their names, once its request's span has arrived."""
        until(lambda: any(s.name == "llm_request" and s.trace_id == trace_id for s in self.spans))
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_values(group.resource.attributes))
            self.spans += [_received(s) for scope in group.scope_spans for s in scope.spans]


def _received(span) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        status=span.status.code,
        attributes=_values(span.attributes),
        links=[link.span_id.hex() for link in span.links],
    )


def _values(attributes) -> dict[str, Any]:
    found = {}
    for one in attributes:
        value = getattr(one.value, one.value.WhichOneof("value"))
        found[one.key] = (
            [v.string_value for v in value.values] if "array" in str(type(value)).lower() else value
        )
    return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A receiver, until the end of the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces"
            if is_right:
                collector.take(body)
            self.send_response(200 if is_right else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
